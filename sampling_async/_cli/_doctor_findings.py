"""What `doctor` concludes: plain functions, numbers and responses in, a finding out."""

from __future__ import annotations

import errno
import json
import os
import re
import ssl
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from statistics import median
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias
from urllib.parse import unquote

from attrs import field, frozen

from sampling_async import DecodeError, ResultCode
from sampling_async._wire.address import comparable, is_loopback

if TYPE_CHECKING:
    import httpx

    from sampling_async import PartnerSettings
    from sampling_async._wire.address import Proxy

Verdict: TypeAlias = Literal["ok", "warn", "fail", "skipped"]

_OK, _BAD_REQUEST = 200, 400
_SOON_DAYS: Final = 14
_CLOCK_WARN, _CLOCK_FAIL = 2.0, 60.0  # seconds
_LETTERS: Final = 40
_BETWEEN: Final = r"(?:%[0-9a-f]{2}|[\W_]){0,3}"  # a dash, other signs, escaped ones (%2D) or none
_GUID: Final = re.compile(
    rf"[0-9a-f]{{8}}{_BETWEEN}(?:[0-9a-f]{{4}}{_BETWEEN}){{3}}[0-9a-f]{{12}}", re.IGNORECASE
)
_CONTRACT_PATH: Final = re.compile("/(?:IPExternalSamplingService|IntegratedPanelService)", re.IGNORECASE)
_VARYING: Final = re.compile(rb"[0-9a-f-]{8,}|\d+", re.IGNORECASE)
_PAGE_OF_NGINX: Final = re.compile(rb"<center>(?:nginx|openresty|tengine)", re.IGNORECASE)
_DROPPERS: Final = {
    **dict.fromkeys(("nginx", "openresty", "tengine"), "underscores_in_headers on"),
    "gunicorn": "header_map = dangerous",
}
"""Servers that drop header names with underscores, with the setting that makes them keep these."""

_FAILURES: Final = (
    ("has expired", "TLS", "It is for the operator to renew it, if the date of this machine is right."),
    ("not yet valid", "TLS", "Check the clock of this machine."),
    ("mismatch", "TLS", "Give the host for which the certificate was issued; the operator knows it."),
    ("certificate was refused", "TLS", "Give a private authority in SAMPLING_CA_FILE or --ca-file."),
    ("cannot be used", "TLS", "Check the file and the variable that names it."),
    ("the alert", "TLS", "Check the client certificate: SAMPLING_CLIENT_CERT or --client-cert."),
    ("TLS", "TLS", "Check the port, and that the host speaks https there."),
    ("proxy answered 50", "Proxy", "It does not reach the host: ask whoever runs it, if the host is right."),
    ("proxy answered 403", "Proxy", "Ask whoever runs it to let you through to the host."),
    ("the proxy", "Proxy", "Check SAMPLING_PROXY, --proxy or the profile's proxy. Without a proxy, unset it."),
    ("complete response|ReadTimeout", "Service", "Allow more time with --timeout, or ask the operator."),
    (os.strerror(errno.ECONNREFUSED), "Service", "Nothing listens there: is the service started?"),
    ("ConnectTimeout", "Service", "Nothing answers: check the port, and whether a firewall lets you out."),
    ("not valid HTTP", "Service", "Check the port of the address, and whether it begins with http or https."),
    ("", "Service", "Run this again. A service that closes connections may ask for SAMPLING_CLIENT_CERT."),
)
"""Words in the text of a failure, the check that it is about, and what to do. The first that fit count."""

_REFUSALS: Final = (
    ("400 .*SSL certificate", "It wants a client certificate: SAMPLING_CLIENT_CERT or --client-cert."),
    ("400 .*HTTPS port", "This port speaks https: write https:// in the address."),
    ("400", "Each 400 of the service has a result code: something on the way refuses this. Ask the operator."),
    ("404", "Check the path of the address: the client adds /IntegratedPanelService and the like to it."),
    ("407", "A proxy on the way wants a user and a password: give them in SAMPLING_PROXY."),
    ("429", "Wait a while and run this again. The client slows down by itself."),
    ("5", "The service or a proxy in front of it has a failure. Try again later, or ask the operator."),
)
"""Status and body of a response that is not the service's, and what to do."""

_COMPARE_KEY: Final = "Compare it with the operator's, and that it is for this panel and address."
_COMPARE_PANEL: Final = "Compare the PanelGUID with the operator's, and that it is for this address."
_CHANGE_URLS: Final = (
    "Ask the operator to change them. `sampling-async notifications settings` shows the URLs for notifications."
)


def without_guids(text: str) -> str:
    """Return a text without its Guids: one of them may be the key or the panel, which a service may echo."""
    return _GUID.sub("<hidden>", text)


@frozen
class Finding:
    """The result of one check. Its texts hold no Guid, so neither the key nor the panel, and no member code."""

    check: str
    verdict: Verdict  # "fail": it must be mended; "warn": it works, or it is not certain
    found: str = field(converter=without_guids)
    remedy: str = field(default="", converter=without_guids)
    figures: Mapping[str, Any] = field(factory=dict[str, Any])  # for --json, in the spelling of its keys


@frozen
class ProbeResponse:
    """A response, or the reason why there is none."""

    status: int = 0  # 0 without a response
    headers: Mapping[str, str] = field(factory=dict[str, str])
    body: bytes = field(default=b"", repr=False)
    problem: str = ""  # why there is no response
    began: float = 0.0  # the wall clock before the request, in seconds since 1970
    seconds: float = 0.0  # the time it took
    certificate: Mapping[str, Any] = field(factory=dict[str, Any])  # the server's, as `ssl` returns it

    @property
    def server(self) -> str:
        """The beginning of the Server header, or ""."""
        # In this order: half a key would not be recognised.
        return without_guids(self.headers.get("server", ""))[:_LETTERS]

    @property
    def result_code(self) -> Any:
        try:
            return json.loads(self.body).get("ResultCode")
        except (ValueError, AttributeError, RecursionError):
            return None


# --- The way to the service


def address(base_url: httpx.URL) -> Finding:
    shown, plain = str(base_url), unquote(base_url.path)
    doubled = _CONTRACT_PATH.search(plain)
    # Who copies a whole URL of the interface has the PanelGUID and a member code in it.
    if doubled or _GUID.search(plain):
        shown = f"{base_url.scheme}://{base_url.netloc.decode()}/..."
    if doubled:
        found = f"{shown} has {doubled[0]} in it, which the client adds itself"
        return Finding("Address", "fail", found, f"Give the address without the part from {doubled[0]} on.")
    if base_url.scheme == "http" and not is_loopback(base_url.host):
        found = f"{shown} is plain http: everybody on the way can read the key"
        return Finding("Address", "warn", found, "Ask the operator for an https address.")
    return Finding("Address", "ok", shown)


def failure(problem: str, proxy: Proxy | None) -> Finding:
    """Say what a failed request is about: the proxy, TLS or the service."""
    check, remedy = next((check, remedy) for words, check, remedy in _FAILURES if re.search(words, problem))
    where = f"{proxy.host}:{proxy.port}: " if proxy is not None and check == "Proxy" else ""
    return Finding(check, "fail", f"{where}{problem}", remedy)


def tls(scheme: str, certificate: Mapping[str, Any], now: datetime) -> Finding:
    """Judge the end of a certificate that was verified, so that it is valid now."""
    if scheme != "https":
        return Finding("TLS", "skipped", "the address is http")
    if "notAfter" not in certificate:
        return Finding("TLS", "ok", "the certificate is trusted")
    end = datetime.fromtimestamp(ssl.cert_time_to_seconds(certificate["notAfter"]), UTC)
    days = (end - now).days
    is_soon = days < _SOON_DAYS
    return Finding(
        "TLS",
        "warn" if is_soon else "ok",
        f"the certificate is valid for {days} days, until {end:%Y-%m-%d}",
        "It is for the operator to renew it soon." if is_soon else "",
        {"ValidUntil": end.isoformat(), "Days": days},
    )


def service(response: ProbeResponse) -> Finding:
    """Judge whether a response may be the service's."""
    remedy = _remedy_of_another(response)
    found = f"it answers {response.status}{f' ({response.server})' if response.server else ''}"
    figures = {"Status": response.status, "Server": response.server or None}
    return Finding("Service", "fail" if remedy else "ok", found, remedy, figures)


def _remedy_of_another(response: ProbeResponse) -> str:
    """Return what to do if the response is not the service's; "" if it may be."""
    if 300 <= response.status < _BAD_REQUEST:  # noqa: PLR2004  redirects
        # Scheme and host only: what comes after may hold a member code or a Guid.
        host = re.match(r"https?://[A-Za-z0-9.:\[\]-]{1,80}(?=/|$)", response.headers.get("location", ""))
        to = f", at {host[0]}" if host else ""
        return f"The client follows no redirects. Give the address that the redirect leads to{to}."
    if response.status == _BAD_REQUEST and response.result_code is not None:
        return ""
    text = f"{response.status} {response.body.decode(errors='replace')}"
    return next((remedy for words, remedy in _REFUSALS if re.match(words, text, re.DOTALL)), "")


def clock(response: ProbeResponse) -> Finding:
    """Judge the difference between the Date of a response and this machine's clock."""
    try:
        date = parsedate_to_datetime(response.headers.get("date", "")).timestamp()
    except (ValueError, OverflowError):
        return Finding("Clock", "skipped", "the service sends no Date that can be read")
    if response.headers.get("age", "0") != "0":
        return Finding("Clock", "skipped", "a cache answered, whose Date is an old one")
    # Date has whole seconds, so the service's time lies between `date` and `date + 1`.
    after = response.began + response.seconds
    ahead = max(date - after, 0.0) or min(date + 1 - response.began, 0.0)
    figures = {"SecondsAhead": round(ahead, 1)}
    if abs(ahead) < _CLOCK_WARN:
        return Finding("Clock", "ok", "the service's Date agrees with this machine's clock", "", figures)
    span = timedelta(seconds=round(abs(ahead)))
    found = f"the service's Date is {span} {'ahead of' if ahead > 0 else 'behind'} this machine's clock"
    remedy = (
        "See whether this machine keeps time (`timedatectl`); if it does, ask the operator. Times of "
        "notifications and of Retry-After are off by as much."
    )
    return Finding("Clock", "fail" if abs(ahead) >= _CLOCK_FAIL else "warn", found, remedy, figures)


def latency(responses: Sequence[ProbeResponse]) -> Finding:
    seconds = [each.seconds for each in responses if each.status == _OK]
    refusals = sorted({str(each.status or "no response") for each in responses if each.status != _OK})
    if not seconds:
        return Finding("Latency", "warn", "not one of the requests was answered", "Run this again.")
    middle = median(seconds)
    figures = {"MedianSeconds": round(middle, 4), "Requests": len(seconds)}
    found = f"{middle * 1000:.1f} ms for Get Settings, the median of {len(seconds)}"
    if not refusals:
        return Finding("Latency", "ok", found, "", figures)
    failed = f"{len(responses) - len(seconds)} of {len(responses)} requests in a row were refused or lost"
    remedy = "Run this again. If it stays so, ask the operator: some node of the service may be ill."
    return Finding("Latency", "warn", f"{failed} ({', '.join(refusals)}); {found}", remedy, figures)


# --- The key and the panel


def accepted(response: ProbeResponse, settings: PartnerSettings | None) -> Finding:
    """Judge a response that does not refuse the key: nobody gets settings or a result code without one."""
    if settings is not None:
        return Finding("Key", "ok", "it is accepted")
    if response.result_code is not None:
        return Finding("Key", "ok", f"it is not refused: {response.status} with a result code")
    return Finding("Key", "skipped", f"not certain after {response.status} without settings")


def refused(own: ProbeResponse, without: Sequence[ProbeResponse], wrong: Sequence[ProbeResponse]) -> Finding:
    """Judge a refusal: is the key wrong, or was its header dropped on the way?

    If any key gets another response than no key does, the header arrives. If all responses are the same, nobody
    outside can say for certain: a service may answer a wrong key and a missing one alike. `without` are two
    responses to requests without a key: if these differ, bodies prove nothing.
    """
    found = f"it is refused ({own.status})"
    if any(each.problem for each in (*without, *wrong)):
        found += "; whether it arrives is not certain: not all requests to compare with were answered"
        return Finding("Key", "fail", found, "Run this again.")
    is_stable = _compared(without[0], with_body=True) == _compared(without[1], with_body=True)
    responses = {_compared(each, with_body=is_stable) for each in (without[0], own, *wrong)}
    if len(responses) > 1:
        found += ", and API_AUTH_KEY arrives: without it, the response is another"
        return Finding("Key", "fail", found, _COMPARE_KEY)
    found += "; the response is the same with a wrong key and with none"
    if _PAGE_OF_NGINX.search(own.body):
        found += ", and it is a page of nginx itself, not of the service"
        remedy = "nginx may admit only some addresses: ask the operator whether yours is among them."
        return Finding("Key", "fail", found, remedy)
    # The Server header is the last hop's. One further back may drop the header too, so this is a hint only.
    dropper = next((name for name in _DROPPERS if name in own.server.lower()), None)
    remedy = (
        f"{_COMPARE_KEY} If it is right, ask the operator, or whoever runs your proxy, whether something drops "
        "header names with underscores."
    )
    if dropper is not None:
        found += f", and {dropper} answers, which drops API_AUTH_KEY by default"
        remedy = f"Ask whoever runs {dropper} for `{_DROPPERS[dropper]}`. If that is set, the key is wrong."
    return Finding("Key", "fail", found, remedy, {"ProbablyDropped": dropper is not None})


def _compared(response: ProbeResponse, *, with_body: bool) -> tuple[object, ...]:
    if not with_body:
        return (response.status,)
    # Numbers of requests and times are left out.
    return response.status, response.headers.get("content-type"), _VARYING.sub(b"#", response.body)


def panel(panel_guid: str, response: ProbeResponse, settings: PartnerSettings | None) -> Finding:
    if response.status == _BAD_REQUEST and response.result_code == ResultCode.PANEL_DOES_NOT_EXIST:
        return Finding("Panel", "fail", "the service does not know it (3 PANEL_DOES_NOT_EXIST)", _COMPARE_PANEL)
    if settings is None:
        found = f"Get Settings was answered with {response.status}, and not with settings"
        remedy = "A login page, a proxy or another service may answer there. Ask the operator."
        return Finding("Panel", "fail", found, remedy)
    if not len(settings):
        found = "the service sent no settings at all, so it may not know the panel"
        return Finding("Panel", "warn", found, _COMPARE_PANEL)
    theirs = (settings.panel_guid or "").strip("{} ")
    if theirs and theirs.lower() != panel_guid.lower():
        found = "the settings name another panel than the request, so invites may be made for another panel"
        return Finding("Panel", "fail", found, _COMPARE_PANEL)
    return Finding("Panel", "ok", f"known: {len(settings)} settings came for it")


def urls(settings: PartnerSettings, expected: Mapping[str, str] | None) -> Finding:
    """Judge the URLs of end pages and notifications; `expected` are the user's by setting, if known."""
    # A service may echo the key or the panel in a name.
    found = {without_guids(each.name): each.value or "" for each in settings if each.name.endswith("URL")}
    given = {name: url for name, url in found.items() if url}
    pages = {name: url for name, url in given.items() if not name.endswith("Notification URL")}
    figures: dict[str, Any] = {
        "Set": len(given),
        "NotSet": [name for name in found if name not in given],
        "WithoutPid": [name for name, url in pages.items() if "[pid]" not in url],
        "NotHttps": [name for name, url in given.items() if not url.lower().startswith("https://")],
        "NotOurs": [
            name for name, url in (expected or {}).items() if comparable(found.get(name, "")) != comparable(url)
        ],
    }
    problems = {
        "without [pid], so your page cannot know the member": figures["WithoutPid"],
        "not https": figures["NotHttps"],
        "not the URL of your store": figures["NotOurs"],
    }
    quota = "Quota Notification URL"
    with suppress(DecodeError):  # whether they are enabled is in words that are not known
        if settings.quota_notifications_enabled and quota not in given:
            problems["enabled, but not set"] = [quota]
    if listed := "; ".join(f"{problem}: {', '.join(names)}" for problem, names in problems.items() if names):
        return Finding("Settings", "fail" if figures["NotOurs"] else "warn", listed, _CHANGE_URLS, figures)
    compared = "" if expected is None else "; notifications go to your store"
    return Finding("Settings", "ok", f"{len(given)} of {len(found)} URLs are set{compared}", "", figures)
