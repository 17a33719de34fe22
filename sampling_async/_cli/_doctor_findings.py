"""What `doctor` says about the way to the service: plain functions, numbers in and a finding out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from math import floor
from statistics import median
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias
from urllib.parse import unquote

from attrs import evolve, field, frozen

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from sampling_async._cli._connection import Validity
    from sampling_async._wire.address import Secret

Verdict: TypeAlias = Literal["ok", "warn", "fail", "skipped"]

_SOON_DAYS: Final = 14
_DAY: Final = 86_400
_MINUTE: Final = 60
_CLOCK_WARN: Final = 2.0
_CLOCK_FAIL: Final = 60.0
_SLOWER: Final = 3.0
_FELT: Final = 0.05  # seconds; below, the machine's own load shows
_CONTRACT_PATHS: Final = ("IPExternalSamplingService", "IntegratedPanelService")
_GUID: Final = re.compile(r"[0-9a-f]{8}-?(?:[0-9a-f]{4}-?){3}[0-9a-f]{12}", re.IGNORECASE)
_HIDDEN: Final = "<hidden>"
_SHORTEST_SECRET: Final = 16  # a text that is shorter is no Guid, and may be a common word
LINE_PER_ID: Final = (
    "The time per quota ID shows in use only, since a bulk invite makes invites: see seconds_per_id of "
    "client.snapshot()."
)


@frozen
class Finding:
    """What one check has found.

    Attributes:
        check: The name of the check.
        verdict: "fail": it must be mended. "warn": it works, or it cannot be told for certain.
        found: What was found. It holds no key, no Guid of a panel and no member code.
        remedy: What to do, or "".
        figures: Numbers for `--json`, in the spelling of its keys.
        is_blocked: Whether the check was skipped because an earlier one has failed.
    """

    check: str
    verdict: Verdict
    found: str
    remedy: str = ""
    figures: Mapping[str, Any] = field(factory=dict[str, Any])
    is_blocked: bool = False


def without_guids(text: str) -> str:
    """Return a text of the network without its Guids: one of them may be the key."""
    return _GUID.sub(_HIDDEN, text)


def hiding(*secrets: Secret | None) -> Callable[[Any], Any]:
    """Return a function that takes secrets out of a finding or a text.

    A service may echo them, in its Server header for one. They are found in capital and small letters, with
    dashes, other signs, escaped ones (%2D) or none between their digits.
    """
    digits = [re.sub(r"[\W_]", "", each.reveal()) for each in secrets if each is not None]
    between = r"(?:%[0-9a-f]{2}|[\W_]){0,3}"
    patterns = [between.join(map(re.escape, each)) for each in digits if len(each) >= _SHORTEST_SECRET]
    pattern = re.compile("|".join(patterns) or r"(?!)", re.IGNORECASE)  # (?!) is found nowhere

    def hidden(value: Any) -> Any:
        if isinstance(value, str):
            return pattern.sub(_HIDDEN, value)
        if isinstance(value, Mapping):
            return {hidden(name): hidden(each) for name, each in value.items()}
        if isinstance(value, list):
            return [hidden(each) for each in value]
        if isinstance(value, Finding):
            texts = {name: hidden(getattr(value, name)) for name in ("found", "remedy", "figures")}
            return evolve(value, **texts)
        return value

    return hidden


def skipped(check: str, why: str) -> Finding:
    """Return the finding of a check that was not made."""
    return Finding(check, "skipped", why)


def address(base_url: str, *, is_http: bool, is_loopback: bool) -> Finding:
    """Judge an address that the client accepts."""
    base_url, doubled = _shown(base_url)
    if doubled:
        return Finding(
            "Address",
            "fail",
            f"{base_url} has /{doubled} in it, which the client adds itself",
            f"Give the address without the part from /{doubled} on.",
        )
    if is_http and not is_loopback:
        return Finding(
            "Address",
            "warn",
            f"{base_url} is plain http: everybody on the way can read the key",
            "Ask the operator for an https address.",
        )
    return Finding("Address", "ok", base_url)


def _shown(base_url: str) -> tuple[str, str]:
    """Return an address up to a path of the contract or a Guid, and that path, or "".

    Who copies a whole URL of the interface has the PanelGUID and a member code in it.
    """
    way, slashes, rest = base_url.partition("://")
    host, slash, path = rest.partition("/")
    plain = unquote(path)
    for name in _CONTRACT_PATHS:
        before, found, after = _parted(plain, re.search(name, plain, re.IGNORECASE))
        if found:
            more = "/..." if after else ""
            return f"{way}{slashes}{host}{slash}{_up_to_guid(before)}{found}{more}", name
    return f"{way}{slashes}{host}{slash}{_up_to_guid(path)}", ""


def _up_to_guid(path: str) -> str:
    plain = unquote(path)
    before, found, after = _parted(plain, _GUID.search(plain))
    return f"{before}{_HIDDEN}{'/...' if after else ''}" if found else path


def _parted(text: str, found: re.Match[str] | None) -> tuple[str, str, str]:
    return (text[: found.start()], found[0], text[found.end() :]) if found else (text, "", "")


def names(host: str, addresses: Sequence[str], problem: str = "") -> Finding:
    """Judge the addresses of a host."""
    if problem:
        return Finding(
            "DNS",
            "fail",
            f"{host} has no address: {problem}",
            "Check the spelling of the host, and that this machine reaches its name server.",
        )
    shown = ", ".join(addresses[:4]) + (f" and {len(addresses) - 4} more" if len(addresses) > 4 else "")  # noqa: PLR2004
    return Finding("DNS", "ok", shown, figures={"Addresses": list(addresses)})


def proxy(where: str, problem: str, *, host: str = "", seconds: float = 0.0, is_tunnel: bool = True) -> Finding:
    """Judge a proxy: `problem` says why there is no tunnel through it to the host."""
    if problem:
        remedy = "Check SAMPLING_PROXY, --proxy or the profile's proxy. Without a proxy, unset it."
        if re.search(r"answered 50[234]", problem):
            remedy = f"The proxy does not reach {host}. Is that right? If so, tell whoever runs the proxy."
        elif "answered 403" in problem:
            remedy = f"Ask whoever runs the proxy to let you through to {host}."
        return Finding("Proxy", "fail", f"{where}: {problem}", remedy)
    what = "opens a tunnel (CONNECT)" if is_tunnel else "takes connections"
    return Finding("Proxy", "ok", f"{where} {what}, in {_ms(seconds)}", figures={"Seconds": round(seconds, 4)})


def no_proxy(unused: str) -> Finding:
    """Return the finding without a proxy; `unused` is a variable of other programs that is set."""
    if unused:
        return Finding(
            "Proxy",
            "warn",
            f"none is used, although {unused} is set",
            "If the service is reached only through that proxy, set SAMPLING_PROXY.",
        )
    return skipped("Proxy", "none is used")


def certificate(
    check: str, validity: Validity | None, now: datetime, *, refusal: str = "", whose: str = "the operator"
) -> Finding:
    """Judge a certificate.

    Args:
        check: The name of the check.
        validity: Its dates, if they could be read.
        now: The time of this machine.
        refusal: Why OpenSSL refuses it, or "".
        whose: Who must renew it.
    """
    figures = _dates(validity, now)
    # The dates come first: OpenSSL may name another fault of an expired certificate, which is renewed anyhow.
    if validity is not None and validity.ends < now:
        return Finding(
            check,
            "fail",
            f"the certificate expired {_days(now - validity.ends)} ago, on {validity.ends:%Y-%m-%d}",
            f"It is for {whose} to renew it. (This machine's date is {now:%Y-%m-%d}.)",
            figures,
        )
    if validity is not None and validity.begins > now:
        return Finding(
            check,
            "fail",
            f"the certificate is valid from {validity.begins:%Y-%m-%d} only",
            f"Check the clock of this machine: its date is {now:%Y-%m-%d}.",
            figures,
        )
    if refusal:
        return Finding(check, "fail", f"the certificate is refused: {refusal}", _remedy_of(refusal), figures)
    if validity is None:
        return Finding(check, "ok", "the certificate is trusted; its dates could not be read")
    left = validity.ends - now
    found = f"the certificate is valid for {_days(left)}, until {validity.ends:%Y-%m-%d}"
    if left.days < _SOON_DAYS:
        return Finding(check, "warn", found, f"It is for {whose} to renew it soon.", figures)
    return Finding(check, "ok", found, "", figures)


def _dates(validity: Validity | None, now: datetime) -> dict[str, Any]:
    if validity is None:
        return {}
    return {
        "ValidUntil": validity.ends.isoformat(),
        "Days": floor((validity.ends - now).total_seconds() / _DAY),
    }


def _remedy_of(refusal: str) -> str:
    if "ostname mismatch" in refusal or "IP address mismatch" in refusal:
        return "Give the host for which the certificate was issued; the operator knows it."
    return "For a private authority, give its certificate in SAMPLING_CA_FILE or --ca-file."


def clock(date: str | None, age: str | None, before: float, after: float) -> Finding:
    """Judge the difference of two clocks.

    Args:
        date: The Date header.
        age: The Age header: a cache sent the response, with the Date of an earlier one.
        before: The time of this machine before the request, in seconds since 1970.
        after: The time after the response.
    """
    if not date:
        return skipped("Clock", "the service sends no Date")
    try:
        said = parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError):
        return skipped("Clock", "the service's Date is no date")
    if age not in {None, "0"}:
        return skipped("Clock", "a cache answered, whose Date is an old one")
    # Date has whole seconds, so the service's time lies between `said` and `said + 1`.
    ahead = max(said - after, 0.0) or min(said + 1 - before, 0.0)
    figures = {"SecondsAhead": round(ahead, 1)}
    if abs(ahead) < _CLOCK_WARN:
        return Finding("Clock", "ok", "the service's Date agrees with this machine's clock", "", figures)
    way = "ahead of" if ahead > 0 else "behind"
    return Finding(
        "Clock",
        "fail" if abs(ahead) >= _CLOCK_FAIL else "warn",
        f"the service's Date is {_span(abs(ahead))} {way} this machine's clock",
        "See whether this machine keeps time (`timedatectl`); if it does, tell the operator. Times of "
        "notifications and of Retry-After are off by as much.",
        figures,
    )


def keep_alive(closed_after: float | None, waited: float, idle_seconds: float) -> Finding:
    """Judge how long the service keeps an idle connection.

    Args:
        closed_after: The seconds after which it was closed; None if it was still open at the end.
        waited: The seconds that were waited.
        idle_seconds: The seconds for which the client keeps one.
    """
    if closed_after is None:
        found = f"an idle connection was still open after {waited:.0f} s"
        return Finding("Keep-alive", "ok", found, "", {"OpenAfterSeconds": round(waited, 1)})
    figures = {"ClosedAfterSeconds": round(closed_after, 1)}
    if closed_after < 0.1:  # noqa: PLR2004  at once, on any network
        return Finding(
            "Keep-alive",
            "warn",
            "the service closes each connection after its response, so each request opens another",
            "Ask the operator, or whoever runs the proxy, to keep connections open.",
            figures,
        )
    found = f"the service closes an idle connection after {closed_after:.1f} s"
    if closed_after <= idle_seconds:
        return Finding(
            "Keep-alive",
            "warn",
            f"{found}; the client keeps it for {idle_seconds:g} s",
            f"Give idle_seconds={max(0.8 * closed_after, 0.1):.1f} to the client or the profile. Without "
            "that, it learns so by itself.",
            figures,
        )
    return Finding("Keep-alive", "ok", f"{found}; the client keeps it for {idle_seconds:g} s", "", figures)


def latency(seconds: Sequence[float], refusals: Sequence[int] = ()) -> Finding:
    """Judge a few requests, one after the other.

    Args:
        seconds: The times of those that were answered with 200.
        refusals: The statuses of the others; 0 for no response.
    """
    if not seconds:
        return Finding("Latency", "warn", "not one of the requests was answered", "Run this again.")
    figures = {"MedianSeconds": round(median(seconds), 4), "Requests": len(seconds)}
    found = f"{_ms(median(seconds))} for Get Settings, the median of {len(seconds)}. {LINE_PER_ID}"
    if refusals:
        failed = f"{len(refusals)} of {len(seconds) + len(refusals)} requests in a row were refused or lost"
        statuses = ", ".join(sorted({str(status) if status else "no response" for status in refusals}))
        remedy = "Run this again. If it stays so, tell the operator: some node of the service may be ill."
        return Finding("Latency", "warn", f"{failed} ({statuses}); {found}", remedy, figures)
    return Finding("Latency", "ok", found, "", figures)


@frozen
class Wave:
    """Requests at the same time.

    Attributes:
        width: Their number.
        seconds: The times of those that were answered with 200.
        refusals: The statuses of the others; 0 for no response.
    """

    width: int
    seconds: Sequence[float]
    refusals: Sequence[int]


def width(waves: Sequence[Wave]) -> Finding:
    """Judge how many requests at the same time the service takes; the last wave may have refusals."""
    taken = max((wave.width for wave in waves if not wave.refusals), default=0)
    figures = {
        "Taken": taken,
        "Waves": [
            {
                "Width": wave.width,
                "Answered": len(wave.seconds),
                "Refused": len(wave.refusals),
                "MedianSeconds": round(median(wave.seconds), 4) if wave.seconds else None,
            }
            for wave in waves
        ],
    }
    last = waves[-1]
    if last.refusals:
        codes = " and ".join(str(code) if code else "no response" for code in sorted({*last.refusals}))
        return Finding(
            "Width",
            "warn",
            f"of {last.width} at the same time, the service refused {len(last.refusals)} ({codes}); "
            f"{taken} were taken",
            f"Give --max-concurrency {max(taken, 1)}, or ask the operator for its limit. The client also slows "
            "down by itself.",
            figures,
        )
    alone, together = median(waves[0].seconds), median(last.seconds)
    found = f"{taken} at the same time were all answered"
    if together >= max(_SLOWER * alone, alone + _FELT):
        found += f", in {_ms(together)} each and not {_ms(alone)}: the service lets them wait"
    return Finding("Width", "ok", found, "", figures)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 0.1 else f"{seconds * 1000:.0f} ms"  # noqa: PLR2004


def _span(seconds: float) -> str:
    for unit, size in (("days", _DAY), ("hours", _MINUTE**2), ("minutes", _MINUTE)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def _days(span: Any) -> str:
    days = span.days
    return f"{days} day{'s' if days != 1 else ''}" if days else _span(span.total_seconds())
