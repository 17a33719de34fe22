"""What `doctor` concludes: plain functions, numbers and responses in, a finding out."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from math import floor
from statistics import median
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias
from urllib.parse import unquote

from attrs import field, frozen

from sampling_async import DecodeError, ResultCode

if TYPE_CHECKING:
    from sampling_async import PartnerSettings

Verdict: TypeAlias = Literal["ok", "warn", "fail", "skipped"]

_OK, _BAD_REQUEST, _SERVER_ERROR = 200, 400, 500
_SOON_DAYS: Final = 14
_DAY: Final = 86_400
_CLOCK_WARN, _CLOCK_FAIL = 2.0, 60.0  # seconds
_LETTERS: Final = 40
_HIDDEN: Final = "<hidden>"
_BETWEEN: Final = r"(?:%[0-9a-f]{2}|[\W_]){0,3}"  # a dash, other signs, escaped ones (%2D) or none
_GUID: Final = re.compile(
    rf"[0-9a-f]{{8}}{_BETWEEN}(?:[0-9a-f]{{4}}{_BETWEEN}){{3}}[0-9a-f]{{12}}", re.IGNORECASE
)
_CONTRACT_PATH: Final = re.compile("IPExternalSamplingService|IntegratedPanelService", re.IGNORECASE)
_PRIVATE_FROM: Final = re.compile(f"{_CONTRACT_PATH.pattern}|{_GUID.pattern}", re.IGNORECASE)
_VARYING: Final = re.compile(rb"[0-9a-f-]{8,}|\d+", re.IGNORECASE)
_PAGE_OF_NGINX: Final = re.compile(rb"<center>(?:nginx|openresty|tengine)", re.IGNORECASE)
# The two times of a certificate in DER: a sequence of 30 to 34 bytes, with years of two or of four digits.
_TIMES: Final = re.compile(rb"\x30[\x1e\x20\x22]" + rb"(?:\x17\x0d(\d{12})Z|\x18\x0f(\d{14})Z)" * 2)
_NGINX: Final = "underscores_in_headers on"
_DROPPERS: Final = {
    "nginx": _NGINX,
    "openresty": _NGINX,
    "tengine": _NGINX,
    "gunicorn": "header_map = dangerous",
}
"""Servers that drop header names with underscores, with the setting that makes them keep these."""

LATE: Final = "no complete response"
# What to do, by words in the text of a failure, and in the body of a 400 without a result code.
_BY_PROBLEM: Final = {
    LATE: "The connection works. Allow more time with --timeout, or ask the operator why it is slow.",
    os.strerror(
        errno.ECONNREFUSED
    ): "Nothing listens at this host and port. Is the service started, and is the port right?",
    "not valid HTTP": "Check the port of the address, and whether it begins with http or https.",
    "proxy": "Check SAMPLING_PROXY, --proxy or the profile's proxy.",
    "": "Run this again. A service that closes new connections may ask for SAMPLING_CLIENT_CERT.",
}
_BY_TLS_PROBLEM: Final = {
    "has expired": "It is for the operator to renew it, if the date of this machine is right.",
    "not yet valid": "Check the clock of this machine.",
    "mismatch": "Give the host for which the certificate was issued; the operator knows it.",
    "certificate was refused": (
        "For a private authority, give its certificate in SAMPLING_CA_FILE or --ca-file."
    ),
    "": "Check the port, and that the host speaks https there.",
}
_BY_PROXY_PROBLEM: Final = {
    **dict.fromkeys(
        ("answered 502", "answered 503", "answered 504"),
        "The proxy does not reach {host}. Is that right? If so, ask whoever runs the proxy.",
    ),
    "answered 403": "Ask whoever runs the proxy to let you through to {host}.",
    "": "Check SAMPLING_PROXY, --proxy or the profile's proxy. Without a proxy, unset it.",
}
_BY_BODY: Final = {
    "SSL certificate": "It wants a client certificate: give it in SAMPLING_CLIENT_CERT or --client-cert.",
    "HTTPS port": "This port speaks https: write https:// in the address.",
    "": "The service gives a result code with each 400; something on the way refuses this. Ask the operator.",
}
_BY_STATUS: Final = {
    404: "Check the path of the address: the client adds /IntegratedPanelService and the like to it.",
    407: "A proxy on the way wants a user and a password: give them in SAMPLING_PROXY.",
    429: "These are too many requests. Wait a while and run this again; the client slows down by itself.",
}


def without_guids(text: str) -> str:
    """Return a text without its Guids: one of them may be the key or the panel, which a service may echo."""
    return _GUID.sub(_HIDDEN, text)


@frozen
class Finding:
    """The result of one check. Its texts hold no Guid, so neither the key nor the panel, and no member code."""

    check: str
    verdict: Verdict  # "fail": it must be mended; "warn": it works, or it is not certain
    found: str = field(converter=without_guids)
    remedy: str = field(default="", converter=without_guids)
    figures: Mapping[str, Any] = field(factory=dict[str, Any])  # for --json, in the spelling of its keys
    is_blocked: bool = False  # whether it was skipped because an earlier check has failed


@frozen
class ProbeResponse:
    """A response, or the reason why there is none."""

    status: int = 0  # 0 without a response
    headers: Mapping[str, str] = field(factory=dict[str, str])
    body: bytes = field(default=b"", repr=False)
    problem: str = ""  # why there is no response
    began: float = 0.0  # the wall clock before the request, in seconds since 1970
    seconds: float = 0.0  # the time it took

    @property
    def server(self) -> str:
        """The Server header in printable characters, or ""."""
        text = "".join(each for each in self.headers.get("server", "") if each.isprintable())
        return without_guids(text)[:_LETTERS]  # in this order: half a key would not be recognised

    @property
    def result_code(self) -> Any:
        try:
            return json.loads(self.body).get("ResultCode")
        except (ValueError, AttributeError, RecursionError):
            return None


def _remedy(remedies: Mapping[str, str], text: str) -> str:
    return next(remedy for words, remedy in remedies.items() if words in text)


# --- The way to the service


def address(base_url: str, *, is_http: bool, is_loopback: bool) -> Finding:
    shown, plain = base_url, unquote(base_url)
    # Who copies a whole URL of the interface has the PanelGUID and a member code in it.
    if end := _PRIVATE_FROM.search(plain):
        shown = f"{plain[: end.end()]}{'/...' if plain[end.end() :] else ''}"
    if doubled := _CONTRACT_PATH.search(plain):
        found = f"{shown} has /{doubled[0]} in it, which the client adds itself"
        return Finding("Address", "fail", found, f"Give the address without the part from /{doubled[0]} on.")
    if is_http and not is_loopback:
        found = f"{shown} is plain http: everybody on the way can read the key"
        return Finding("Address", "warn", found, "Ask the operator for an https address.")
    return Finding("Address", "ok", shown)


def proxy(
    where: str, problem: str = "", *, host: str = "", seconds: float = 0.0, is_tunnel: bool = True
) -> Finding:
    """Judge a proxy; `problem` says why there is no tunnel through it to the host."""
    if problem:
        remedy = _remedy(_BY_PROXY_PROBLEM, problem).format(host=host)
        return Finding("Proxy", "fail", f"{where}: {problem}", remedy)
    what = "opens a tunnel (CONNECT)" if is_tunnel else "takes connections"
    figures = {"Seconds": round(seconds, 4)}
    return Finding("Proxy", "ok", f"{where} {what}, in {_milliseconds(seconds)}", figures=figures)


def no_tls(problem: str) -> Finding:
    return Finding("TLS", "fail", problem, _remedy(_BY_TLS_PROBLEM, problem))


def validity_of(der: bytes) -> tuple[datetime, datetime] | None:
    """Return from when to when a certificate is valid; None if the bytes do not say it."""
    if (found := _TIMES.search(der)) is None:
        return None
    times = [each.decode() for each in found.groups() if each]
    # A year of two digits: 50 to 99 are of the last century.
    whole = [time if len(time) > 12 else ("19" if time >= "50" else "20") + time for time in times]  # noqa: PLR2004
    with suppress(ValueError):
        begins, ends = (datetime.strptime(time, "%Y%m%d%H%M%S").replace(tzinfo=UTC) for time in whole)
        return begins, ends
    return None


def certificate(check: str, der: bytes | None, now: datetime, *, whose: str = "the operator") -> Finding:
    """Judge the dates of a certificate, if they can be read; `whose` says who must renew it."""
    validity = validity_of(der or b"")
    if validity is None:
        return Finding(check, "ok", "it can be used; its dates could not be read")
    begins, ends = validity
    left, until = (ends - now).total_seconds(), f"{ends:%Y-%m-%d}"
    figures = {"ValidUntil": ends.isoformat(), "Days": floor(left / _DAY)}
    if left < 0:
        found = f"the certificate expired {_span(-left)} ago, on {until}"
        return Finding(check, "fail", found, f"It is for {whose} to renew it.", figures)
    if begins > now:
        found = f"the certificate is valid from {begins:%Y-%m-%d} only"
        return Finding(check, "fail", found, f"This machine's date is {now:%Y-%m-%d}.", figures)
    whole = left - left % _DAY if left >= 2 * _DAY else left  # as `Days`
    found = f"the certificate is valid for {_span(whole)}, until {until}"
    if left < _SOON_DAYS * _DAY:
        return Finding(check, "warn", found, f"It is for {whose} to renew it soon.", figures)
    return Finding(check, "ok", found, "", figures)


def clock(date: str | None, age: str | None, before: float, after: float) -> Finding:
    """Judge the difference of two clocks, from two headers and the times before and after the request."""
    if not date:
        return Finding("Clock", "skipped", "the service sends no Date")
    try:
        theirs = parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError):
        return Finding("Clock", "skipped", "the service's Date is no date")
    if age not in {None, "0"}:  # the Date is that of an earlier response
        return Finding("Clock", "skipped", "a cache answered, whose Date is an old one")
    # Date has whole seconds, so the service's time lies between `theirs` and `theirs + 1`.
    ahead = max(theirs - after, 0.0) or min(theirs + 1 - before, 0.0)
    figures = {"SecondsAhead": round(ahead, 1)}
    if abs(ahead) < _CLOCK_WARN:
        return Finding("Clock", "ok", "the service's Date agrees with this machine's clock", "", figures)
    direction = "ahead of" if ahead > 0 else "behind"
    found = f"the service's Date is {_span(abs(ahead))} {direction} this machine's clock"
    remedy = (
        "See whether this machine keeps time (`timedatectl`); if it does, ask the operator. Times of "
        "notifications and of Retry-After are off by as much."
    )
    return Finding("Clock", "fail" if abs(ahead) >= _CLOCK_FAIL else "warn", found, remedy, figures)


def latency(responses: Sequence[ProbeResponse]) -> Finding:
    seconds = [each.seconds for each in responses if each.status == _OK]
    refusals = {str(each.status or "no response") for each in responses if each.status != _OK}
    if not seconds:
        return Finding("Latency", "warn", "not one of the requests was answered", "Run this again.")
    figures = {"MedianSeconds": round(median(seconds), 4), "Requests": len(seconds)}
    found = f"{_milliseconds(median(seconds))} for Get Settings, the median of {len(seconds)}"
    if not refusals:
        return Finding("Latency", "ok", found, "", figures)
    failed = f"{len(responses) - len(seconds)} of {len(responses)} requests in a row were refused or lost"
    remedy = "Run this again. If it stays so, ask the operator: some node of the service may be ill."
    return Finding("Latency", "warn", f"{failed} ({', '.join(sorted(refusals))}); {found}", remedy, figures)


# --- The service, the key and the panel


def service(response: ProbeResponse) -> Finding:
    who = f" ({response.server})" if response.server else ""
    figures = {"Status": response.status or None, "Server": response.server or None}
    if response.problem:
        return Finding("Service", "fail", response.problem, _remedy(_BY_PROBLEM, response.problem), figures)
    found, remedy = f"it answers {response.status}{who}", _remedy_of_another(response)
    return Finding("Service", "fail" if remedy else "ok", found, remedy, figures)


def _remedy_of_another(response: ProbeResponse) -> str:
    """Return the remedy if the response is not the service's; "" if it may be."""
    if 300 <= response.status < _BAD_REQUEST:  # noqa: PLR2004  redirects
        # Scheme and host only: what comes after may hold a member code or a Guid.
        host = re.match(r"https?://[A-Za-z0-9.:\[\]-]{1,80}(?=/|$)", response.headers.get("location", ""))
        to = f", at {host[0]}" if host else ""
        return f"The client follows no redirects. Give the address that the redirect leads to{to}."
    if response.status >= _SERVER_ERROR:
        return "The service or a proxy in front of it has a failure. Try again later, or ask the operator."
    if response.status == _BAD_REQUEST and response.result_code is None:
        return _remedy(_BY_BODY, response.body.decode(errors="replace"))
    return _BY_STATUS.get(response.status, "")


def accepted(response: ProbeResponse, *, has_settings: bool) -> list[Finding]:
    """Return the findings about header and key for a response that does not refuse the key.

    Settings are a proof, and a result code is one too: the service gives neither to anybody without a key.
    """
    status = response.status
    if has_settings or (status == _BAD_REQUEST and response.result_code is not None):
        found = "it is accepted" if has_settings else f"it is not refused: {status} with a result code"
        return [Finding("Key header", "ok", "API_AUTH_KEY arrives"), Finding("Key", "ok", found)]
    why = f"not certain after {status} {'without settings' if status == _OK else 'and not 403'}"
    return [Finding("Key header", "skipped", why), Finding("Key", "skipped", why)]


def refused(
    own: ProbeResponse, without: Sequence[ProbeResponse], wrong: Sequence[ProbeResponse]
) -> list[Finding]:
    """Judge a refusal: is the key wrong, or was its header dropped on the way?

    If any key gets another response than no key does, the header arrives. If all responses are the same, nobody
    outside can say for certain: a service may answer a wrong key and a missing one alike. `without` are two
    responses to requests without a key: if these differ, bodies prove nothing.
    """
    remedy = "Compare it with what the operator gave you, and that it is for this panel and address."
    key = Finding("Key", "fail", f"it is refused ({own.status})", remedy)
    if any(each.problem for each in (*without, *wrong)):
        found = "not certain: not all requests to compare with were answered"
        return [Finding("Key header", "warn", found, "Run this again."), key]
    is_stable = _compared(without[0], with_body=True) == _compared(without[1], with_body=True)
    responses = {_compared(each, with_body=is_stable) for each in (without[0], own, *wrong)}
    if len(responses) > 1:
        found = "API_AUTH_KEY arrives: with a key the response is another than without one"
        return [Finding("Key header", "ok", found), key]
    return [_uncertain_header(own), key]


def _uncertain_header(own: ProbeResponse) -> Finding:
    same = "the response is the same with your key, with a wrong one and with none"
    if _PAGE_OF_NGINX.search(own.body):
        found = f"{same}, and it is a page of nginx itself, not of the service"
        remedy = "nginx may admit only some addresses: ask the operator whether yours is among them."
        return Finding("Key header", "warn", found, remedy)
    # The Server header is the last hop's. One further back may drop the header too, so this is a hint only.
    dropper = next((name for name in _DROPPERS if name in own.server.lower()), None)
    found = f"not certain: {same}"
    remedy = (
        "If the key is right, ask the operator, or whoever runs your proxy, whether something on the way drops "
        "names with underscores."
    )
    if dropper is not None:
        found = f"probably dropped: {same}, and {dropper} answers, which drops API_AUTH_KEY by default"
        remedy = f"Ask whoever runs {dropper} for `{_DROPPERS[dropper]}`. If that is set, the key is wrong."
    return Finding("Key header", "warn", found, remedy, {"ProbablyDropped": dropper is not None})


def _compared(response: ProbeResponse, *, with_body: bool) -> tuple[object, ...]:
    if not with_body:
        return (response.status,)
    # Numbers of requests and times are left out.
    return response.status, response.headers.get("content-type"), _VARYING.sub(b"#", response.body)


def unknown_panel(response: ProbeResponse) -> Finding:
    if response.status == _BAD_REQUEST and response.result_code == ResultCode.PANEL_DOES_NOT_EXIST:
        remedy = "Compare the PanelGUID with what the operator gave you, and that it is for this address."
        return Finding("Panel", "fail", "the service does not know it (3 PANEL_DOES_NOT_EXIST)", remedy)
    if response.status == _OK:
        found = "Get Settings was answered with 200, but what came are no settings"
        remedy = "Something else may answer there: a login page, a proxy, another service. Ask the operator."
        return Finding("Panel", "fail", found, remedy)
    found = f"Get Settings was answered with {response.status}"
    return Finding("Panel", "fail", found, "Ask the operator, and send this output.")


def panel(panel_guid: str, settings: PartnerSettings) -> Finding:
    remedy = "Compare the PanelGUID with what the operator gave you"
    if not len(settings):
        found = "the service sent no settings at all, so it may not know the panel"
        return Finding("Panel", "warn", found, f"{remedy}.")
    theirs = (settings.panel_guid or "").strip("{} ")
    if theirs and theirs.lower() != panel_guid.lower():
        found = "the settings name another panel than the one of the request"
        return Finding("Panel", "fail", found, f"{remedy}: invites may be made for another panel.")
    return Finding("Panel", "ok", f"known: {len(settings)} settings came for it")


def end_pages(settings: PartnerSettings) -> Finding:
    pages = _urls(settings, of_notifications=False)
    nameless = [name for name, url in pages.items() if url and "[pid]" not in url]
    bare, unset = _not_https(pages), [name for name, url in pages.items() if not url]
    figures = {"NotSet": unset, "WithoutPid": nameless, "NotHttps": bare}
    if problems := _listed({"without [pid]": nameless, "not https": bare}):
        remedy = "Without [pid], your page cannot know which member came. " if nameless else ""
        return Finding("End pages", "warn", problems, f"{remedy}Ask the operator to change them.", figures)
    count = len(pages) - len(unset)
    found = f"{count} of {len(pages)} are set, with [pid]" if count else "none is set"
    return Finding("End pages", "ok", found, "", figures)


def notifications(settings: PartnerSettings, expected: Mapping[str, str] | None) -> Finding:
    """Judge where the service sends notifications; `expected` has the user's URLs by setting, if known."""
    urls = _urls(settings, of_notifications=True)
    bare = _not_https(urls)
    differing = [name for name, url in (expected or {}).items() if urls.get(name) != url]
    quota = "Quota Notification URL"
    problems = {"not https": bare, "not the URL of your store": differing}
    with suppress(DecodeError):  # whether they are enabled is in words that are not known
        if settings.quota_notifications_enabled and not urls.get(quota):
            problems["quota notifications are enabled, but not set"] = [quota]
    count = sum(map(bool, urls.values()))
    figures = {"NotHttps": bare, "NotOurs": differing, "Set": count}
    if found := _listed(problems):
        remedy = "`sampling-async notifications settings` shows the URLs to enter at the operator."
        return Finding("Notifications", "fail" if differing else "warn", found, remedy, figures)
    compared = "" if expected is None else ", all to your store"
    return Finding("Notifications", "ok", f"{count} of {len(urls)} URLs are set{compared}", "", figures)


def _urls(settings: PartnerSettings, *, of_notifications: bool) -> dict[str, str]:
    """Return the URLs by setting. A service may echo the key or the panel in a name."""
    return {
        without_guids(each.name): each.value or ""
        for each in settings
        if each.name.endswith("URL") and each.name.endswith("Notification URL") is of_notifications
    }


def _not_https(urls: Mapping[str, str]) -> list[str]:
    return [name for name, url in urls.items() if url and not url.lower().startswith("https://")]


def _listed(names_by_problem: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{problem}: {', '.join(names)}" for problem, names in names_by_problem.items() if names)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 0.1 else f"{seconds * 1000:.0f} ms"  # noqa: PLR2004


def _span(seconds: float) -> str:
    for unit, size in (("days", _DAY), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
