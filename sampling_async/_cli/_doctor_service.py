"""What `doctor` says about the service's answers: key, panel, settings. Plain functions, answers in."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from attrs import field, frozen

from sampling_async import DecodeError, ResultCode
from sampling_async._cli._doctor_findings import Finding, without_guids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sampling_async import PartnerSettings

REFUSING: Final = frozenset({401, 403})
_OK, _BAD_REQUEST, _NOT_FOUND, _SERVER_ERROR = 200, 400, 404, 500
_SQUID: Final = "x-squid-error"
_REDIRECTS: Final = range(300, 400)
_DROPPERS: Final = ("nginx", "openresty", "tengine", "gunicorn")
_BY_STATUS: Final = {
    _NOT_FOUND: "Check the path of the address: the client adds /IntegratedPanelService and the like to it.",
    407: "A proxy on the way wants a user and a password: give them in SAMPLING_PROXY.",
    429: "These are too many requests. Wait a while and run this again; the client slows down by itself.",
}
_OF_A_PROXY: Final = (
    (b"SSL certificate", "It wants a client certificate: give it in SAMPLING_CLIENT_CERT or --client-cert."),
    (b"HTTPS port", "This port speaks https: write https:// in the address."),
    (
        b"",
        "The service gives a result code with each 400; something on the way refuses this. Ask the operator.",
    ),
)
"""What to do after a 400 that is not the service's own, by words in its body, as of nginx."""

_OWN_PAGE: Final = re.compile(rb"<center>(?:nginx|openresty|tengine)", re.IGNORECASE)
_VARYING: Final = re.compile(rb"[0-9a-f-]{8,}|\d+", re.IGNORECASE)
_NOTIFICATION: Final = "Notification URL"
_LETTERS: Final = 40


@frozen
class Seen:
    """A response, or the reason why there is none.

    Attributes:
        status: The status, 0 without a response.
        headers: The headers, by names in small letters.
        body: The body, or its beginning.
        seconds: The time it took.
        problem: Why there is no response.
        is_late: Whether the reason is that it takes too long.
        began: The wall clock before the request, in seconds since 1970.
        ended: The same after the response.
    """

    status: int = 0
    headers: Mapping[str, str] = field(factory=dict[str, str])
    body: bytes = field(default=b"", repr=False)
    seconds: float = 0.0
    problem: str = ""
    is_late: bool = False
    began: float = 0.0
    ended: float = 0.0

    @property
    def server(self) -> str:
        """What the Server header says, in printable characters."""
        return _printable(self.headers.get("server", ""))


def _printable(header: str) -> str:
    text = "".join(each for each in header if each.isprintable())
    return without_guids(text)[:_LETTERS]  # in this order: half a key is not known for one


def service(seen: Seen) -> Finding:
    """Judge whether a service answers at all."""
    who = f" ({seen.server})" if seen.server else ""
    figures = {"Status": seen.status or None, "Server": seen.server or None}
    if seen.problem:
        return Finding("Service", "fail", seen.problem, _remedy_without_response(seen), figures)
    found, remedy = f"it answers {seen.status}{who}", _remedy_of_another(seen)
    if error := seen.headers.get(_SQUID):
        found = f"the proxy answers {seen.status} in its place{who}: {_printable(error)}"
    return Finding("Service", "fail" if remedy else "ok", found, remedy, figures)


def _remedy_without_response(seen: Seen) -> str:
    if seen.is_late:
        return "The connection works. Allow more time with --timeout, or ask the operator why it is slow."
    if os.strerror(errno.ECONNREFUSED) in seen.problem:
        return "Nothing listens at this host and port. Is the service started, and is the port right?"
    if "not valid HTTP" in seen.problem:
        return "Check the port of the address, and whether it begins with http or https."
    if "proxy" in seen.problem:
        return "Check SAMPLING_PROXY, --proxy or the profile's proxy."
    return "Run this again. A service that closes new connections may ask for SAMPLING_CLIENT_CERT."


def _remedy_of_another(seen: Seen) -> str:
    """Return what to do if another answered in place of the service; "" if it may be the service itself."""
    if error := seen.headers.get(_SQUID):
        if error.startswith("ERR_ACCESS_DENIED"):
            return "Ask whoever runs the proxy to let you through to this host."
        return "The proxy does not reach the host. Is the address right? If so, tell whoever runs the proxy."
    if seen.status in _REDIRECTS:
        host = _host_of(seen.headers.get("location", ""))
        to = f", at {host}" if host else ""
        return f"The client follows no redirects. Give the address that the redirect leads to{to}."
    if seen.status >= _SERVER_ERROR:
        return "The service or a proxy in front of it has a failure. Try again later, or tell the operator."
    if seen.status == _BAD_REQUEST and _result_code(seen.body) is None:
        return next(remedy for words, remedy in _OF_A_PROXY if words in seen.body)
    return _BY_STATUS.get(seen.status, "")


def _host_of(location: str) -> str:
    """Return scheme and host of an address; what comes after may hold a member code or a Guid."""
    found = re.match(r"https?://[A-Za-z0-9.:\[\]-]{1,80}(?=/|$)", location)
    return found[0] if found else ""


def accepted(seen: Seen, *, has_settings: bool) -> list[Finding]:
    """Return the findings about header and key for a response that does not refuse the key.

    Args:
        seen: The response.
        has_settings: Whether it holds settings, which the service gives to nobody without a key.
    """
    if has_settings:
        return [Finding("Key header", "ok", "API_AUTH_KEY arrives"), Finding("Key", "ok", "it is accepted")]
    if seen.status == _BAD_REQUEST and _result_code(seen.body) is not None:
        return [
            Finding("Key header", "ok", f"it answers {seen.status} with a result code, and not 403"),
            Finding("Key", "ok", f"it is not refused: {seen.status}"),
        ]
    told = "without settings" if seen.status == _OK else "and not 403"
    why = f"cannot be told from an answer with {seen.status} {told}"
    return [Finding("Key header", "skipped", why), Finding("Key", "skipped", why)]


def refused(
    own: Seen, none: Sequence[Seen], others: Sequence[Seen], *, is_proxied: bool = False
) -> list[Finding]:
    """Judge a refusal: is the key wrong, or was its header dropped on the way?

    If any other key gets another response than no key does, the header arrives. If all responses are the same,
    nobody outside can tell for certain: a service may answer a wrong key and a missing one alike.

    Args:
        own: The response to the key.
        none: Two responses to requests without a key. If they differ, bodies prove nothing.
        others: The responses to keys that are wrong for certain.
        is_proxied: Whether a proxy reads the requests, and may answer in place of the service.
    """
    key = Finding(
        "Key",
        "fail",
        f"it is refused ({own.status})",
        "Compare it with what the operator gave you, and that it is for this panel and address.",
    )
    if any(each.problem for each in (*none, *others)):
        found = "cannot be told: not all requests to compare with were answered"
        return [Finding("Key header", "warn", found, "Run this again."), key]
    # The same question twice shows what varies by itself, such as a greeting. Numbers are left out before.
    is_stable = _signature(none[0]) == _signature(none[1])
    signature = _signature if is_stable else _status
    keyless, keyed = signature(none[0]), {signature(each) for each in (own, *others)}
    if keyed != {keyless}:
        found = "API_AUTH_KEY arrives: with a key the response is another than without one"
        return [Finding("Key header", "ok", found), key]
    if is_proxied:
        return [
            Finding(
                "Key header",
                "warn",
                "cannot be told: the response is the same with your key, with a wrong one and with none. It "
                "may be that of your proxy",
                "Ask whoever runs the proxy whether it lets you through to this host, and keeps API_AUTH_KEY.",
                {"ProbablyDropped": False},
            ),
            key,
        ]
    return [_untold(own), key]


def dropped(found: Sequence[Finding], none: Seen, hyphens: Seen, underscores: Seen) -> Sequence[Finding]:
    """Judge two requests with more headers than a server takes, after `refused` could not tell.

    If so many names with hyphens are refused, and as many with underscores are not, then the latter vanish
    before they are counted. The other results prove nothing: a proxy in front may count before it drops.

    Args:
        found: The findings so far.
        none: The response to a request without a key.
        hyphens: The response to one with a crowd of names with hyphens.
        underscores: The response to one with a crowd of names with underscores.
    """
    is_proof = hyphens.status not in {0, none.status} and underscores.status == none.status
    if not is_proof:
        return found
    return [
        Finding(
            "Key header",
            "fail",
            "dropped on the way: of 120 headers with underscores in their names none arrives, and with hyphens "
            "they do",
            "Ask the operator for `underscores_in_headers on` in nginx, or the like in what stands there.",
            {"ProbablyDropped": True, "IsCertain": True},
        ),
        Finding("Key", "skipped", "not before its header arrives"),
    ]


def _untold(own: Seen) -> Finding:
    """Return the finding about a header for which all responses are the same."""
    same = "the response is the same with your key, with a wrong one and with none"
    server = own.server.lower()
    if _OWN_PAGE.search(own.body):
        return Finding(
            "Key header",
            "warn",
            f"{same}, and it is a page of nginx itself, not of the service",
            "nginx may admit only some addresses: ask the operator whether yours is among them.",
        )
    # The Server header is the last hop's. One further back may drop the header too, so this is a hint only.
    if dropper := next((name for name in _DROPPERS if name in server), None):
        setting = "header_map = dangerous" if dropper == "gunicorn" else "underscores_in_headers on"
        return Finding(
            "Key header",
            "warn",
            f"probably dropped: {same}, and {dropper} answers, which drops API_AUTH_KEY unless it is told not "
            "to. It cannot be told for certain",
            f"Ask whoever runs {dropper} for `{setting}`. If that is set, the key is wrong.",
            {"ProbablyDropped": True},
        )
    likely = "without a Server header, nothing shows what answers: either the key or its header is the reason"
    if own.server:
        likely = f"{own.server} answers, which is not known to drop it, so the key is the likely reason"
    return Finding(
        "Key header",
        "warn",
        f"cannot be told: {same}. {likely}",
        "If the key is right, ask the operator whether something on the way drops names with underscores.",
        {"ProbablyDropped": False},
    )


def _signature(seen: Seen) -> tuple[int, str, bytes]:
    """Return what should be the same in two like responses: without times and numbers of requests."""
    return seen.status, seen.headers.get("content-type", ""), _VARYING.sub(b"#", seen.body)


def _status(seen: Seen) -> tuple[int, str, bytes]:
    return seen.status, "", b""


def unknown_panel(seen: Seen) -> Finding:
    """Judge a response without settings, by its result code."""
    if seen.status == _BAD_REQUEST and _result_code(seen.body) == ResultCode.PANEL_DOES_NOT_EXIST:
        return Finding(
            "Panel",
            "fail",
            "the service does not know it (3 PANEL_DOES_NOT_EXIST)",
            "Compare the PanelGUID with what the operator gave you, and that it is for this address.",
        )
    if seen.status == _OK:
        return Finding(
            "Panel",
            "fail",
            "Get Settings was answered with 200, but what came are no settings",
            "Something else may answer there: a login page, a proxy, another service. Ask the operator.",
        )
    return Finding(
        "Panel", "fail", f"Get Settings was answered with {seen.status}", "Tell the operator, with this output."
    )


def panel(ours: str, settings: PartnerSettings) -> Finding:
    """Judge the panel by the settings that came for it."""
    if not len(settings):
        return Finding(
            "Panel",
            "warn",
            "the service sent no settings at all, so it may not know the panel",
            "Compare the PanelGUID with what the operator gave you.",
        )
    theirs = (settings.panel_guid or "").strip("{} ")
    if not theirs:
        return Finding("Panel", "ok", f"known: {len(settings)} settings came for it")
    if theirs.lower() != ours.lower():
        return Finding(
            "Panel",
            "fail",
            "the settings name another panel than the one that was asked for",
            "Compare the PanelGUID with what the operator gave you: invites may be made for another panel.",
        )
    if theirs != ours:
        return Finding(
            "Panel",
            "warn",
            "known, but the service spells its Guid with other capital letters",
            "Write the PanelGUID as `sampling-async settings` shows it, because it stands in paths.",
        )
    return Finding("Panel", "ok", f"known: {len(settings)} settings came for it")


def end_pages(settings: PartnerSettings) -> Finding:
    """Judge the pages where members go at the end of a survey."""
    pages = {
        each.name: each.value or ""
        for each in settings
        if each.name.endswith("URL") and not each.name.endswith(_NOTIFICATION)
    }
    unset = [name for name, value in pages.items() if not value]
    nameless = [name for name, value in pages.items() if value and "[pid]" not in value]
    odd = [name for name, value in pages.items() if value and not value.lower().startswith("https://")]
    figures = {"NotSet": unset, "WithoutPid": nameless, "NotHttps": odd}
    problems = [
        f"{what}: {', '.join(names)}"
        for what, names in (("without [pid]", nameless), ("not https", odd))
        if names
    ]
    if problems:
        remedy = "Without [pid], your page cannot know which member came." if nameless else ""
        remedy = f"{remedy} Ask the operator to change them.".strip()
        return Finding("End pages", "warn", "; ".join(problems), remedy, figures)
    having = len(pages) - len(unset)
    found = f"{having} of {len(pages)} are set, with [pid]" if having else "none is set"
    return Finding("End pages", "ok", found, "", figures)


def notifications(settings: PartnerSettings, expected: Mapping[str, str] | None) -> Finding:
    """Judge where the service sends notifications.

    Args:
        settings: The settings.
        expected: The URLs of our own receiver by setting; None if it is not known.
    """
    urls = {each.name: each.value or "" for each in settings if each.name.endswith(_NOTIFICATION)}
    bare = [name for name, value in urls.items() if value and not value.lower().startswith("https://")]
    problems = [f"not https: {', '.join(bare)}"] if bare else []
    differing = [name for name, value in (expected or {}).items() if urls.get(name) != value]
    if differing:
        problems.append(f"not the URL of your store: {', '.join(differing)}")
    if _is_enabled(settings) and not urls.get(f"Quota {_NOTIFICATION}"):
        problems.append(f"quota notifications are enabled, and Quota {_NOTIFICATION} is not set")
    figures = {"NotHttps": bare, "NotOurs": differing, "Set": sum(map(bool, urls.values()))}
    if problems:
        remedy = "`sampling-async notifications settings` shows the URLs to enter at the operator."
        return Finding("Notifications", "fail" if differing else "warn", "; ".join(problems), remedy, figures)
    compared = "" if expected is None else ", all to your store"
    return Finding(
        "Notifications", "ok", f"{figures['Set']} of {len(urls)} URLs are set{compared}", "", figures
    )


def reached(answers: Mapping[str, int]) -> Finding:
    """Judge what our own notification URLs answer to a HEAD, which stores nothing.

    The receiver of this package looks at the secret first: 404 says that it does not know it. 403 says that it
    knows it and lets in other addresses than this one, and 405 that it takes no HEAD.

    Args:
        answers: The status of each setting's URL; 0 without a response.
    """
    silent = [name for name, status in answers.items() if not status]
    strangers = [name for name, status in answers.items() if status in {401, 404}]
    others = [name for name, status in answers.items() if status not in {0, 401, 403, 404, 405}]
    figures = {"Statuses": dict(answers)}
    problems = [
        f"{what}: {', '.join(names)}"
        for what, names in (
            ("no response", silent),
            ("the secret is not known there", strangers),
            ("something else answers", others),
        )
        if names
    ]
    if problems:
        remedy = (
            "See that `notifications serve` runs with the same store. From here is not from the operator: a "
            "firewall may let one in and not the other."
        )
        return Finding("Receiver", "warn", "; ".join(problems), remedy, figures)
    return Finding(
        "Receiver", "ok", f"it answers at all {len(answers)} URLs and knows their secrets", "", figures
    )


def _is_enabled(settings: PartnerSettings) -> bool:
    try:
        return settings.quota_notifications_enabled is True
    except DecodeError:
        return False


def _result_code(body: bytes) -> Any:
    try:
        return json.loads(body).get("ResultCode")
    except (ValueError, AttributeError, RecursionError):
        return None
