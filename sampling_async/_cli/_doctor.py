"""The command `doctor`: is everything in order between this machine and the service?"""

from __future__ import annotations

import os
import ssl
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import aclosing, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import anyio
import httpx
import typer
from attrs import frozen
from rich.table import Column, Table
from rich.text import Text

from sampling_async import (
    BodyLimits,
    DecodeError,
    InvalidRequestError,
    PartnerSettings,
    SamplingError,
    Timeouts,
    __version__,
    from_json,
)
from sampling_async._cli import _doctor_findings as judge
from sampling_async._cli import _rendering as show
from sampling_async._cli._connection import ServiceOptions
from sampling_async._cli._doctor_findings import Finding, ProbeResponse, Verdict, without_guids
from sampling_async._cli._options import flag, option, takes
from sampling_async._cli._tally import DONE, INCOMPLETE
from sampling_async._protocol.requests import get_settings
from sampling_async._wire.address import Proxy, Secret, base_url_of, guid_of, proxy_of, require_https_through
from sampling_async._wire.failures import way_of
from sampling_async._wire.session import Session, Track
from sampling_async._wire.sockets import Lookups

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence


CHECKS: Final = "Address", "DNS", "Proxy", "TLS", "Service", "Clock", "Key", "Panel", "Settings", "Latency"
"""The names of all checks, in the order in which they are made."""

CONNECT_SECONDS: Final = 5.0
_READ_SECONDS: Final = 15.0
_LATENCY_REQUESTS: Final = 5
_LIMITS: Final = BodyLimits(wire=2**20, decoded=2**20)
_NO_KEY: Final = Secret("")
_REFUSING: Final = frozenset({401, 403})
_OK: Final = 200
_SHOWN: Final[Mapping[Verdict, tuple[str, str]]] = {
    "ok": ("ok", "green"),
    "warn": ("warn", "yellow"),
    "fail": ("FAIL", "bold red"),
    "skipped": ("skip", "dim"),
}
"""The label and the style of each verdict."""


@takes(service=ServiceOptions, json="Print one JSON document, on a terminal too.")
def doctor(
    service: ServiceOptions,
    *,
    store: str | None = option(
        "FILE|ADDRESS", "The store of `notifications serve`, to compare its URLs with the operator's."
    ),
    public_url: str | None = option(
        "URL", "The address of your receiver, as for `notifications serve`; with --store."
    ),
    quiet: bool = flag("Show only what is not in order.", "--quiet", "-q"),
) -> None:
    """Check all between this machine and the service: address, TLS, proxy, key, panel, settings, speed.

    Each check says what was found and what to do. The command sends Get
    Settings only, six times at most, and requests no invite. Nothing is
    repeated, so --max-concurrency, --attempts and --patience have no effect.
    The output holds no key, no PanelGUID and no member code. The exit code is
    1 if a check failed, and 0 if there are only warnings.
    """
    key = service.known_key()
    expected = _expected_urls(store, public_url)
    is_silent, screen = show.as_lines(), show.screen()
    findings: list[Finding] = []

    async def examine() -> None:
        async for finding in _findings(service, key, expected):
            findings.append(finding)
            if not (is_silent or (quiet and finding.verdict in {"ok", "skipped"})):
                screen.print(row(finding))

    anyio.run(examine)
    verdict = worst(findings)
    if is_silent and (show.wanted.json or not quiet or verdict != "ok"):
        show.emit_json(document(findings, service.profile))
    elif not (is_silent or quiet):
        screen.print("", closing_text(findings), sep="\n")
    raise typer.Exit(INCOMPLETE if verdict == "fail" else DONE)


def _expected_urls(store: str | None, public_url: str | None) -> Mapping[str, str] | None:
    if (store is None) != (public_url is None):
        raise InvalidRequestError("give --store and --public-url together: they make the URLs")
    if store is None or public_url is None:
        return None
    from sampling_async._cli._stores import existing_store  # noqa: PLC0415  takes time to load
    from sampling_async.notifications import Inbox, kept_secrets  # noqa: PLC0415

    opened = existing_store(store)
    urls = Inbox(opened, secrets=kept_secrets(opened)).urls(public_url)
    return {kind.setting: url for kind, url in urls.items() if kind.setting}


async def _findings(
    service: ServiceOptions, key: str, expected: Mapping[str, str] | None
) -> AsyncGenerator[Finding]:
    """Yield each finding. The first ones are about settings that the client would refuse."""
    Timeouts(read=service.timeout)  # refuses what the client would refuse
    base_url, panel_guid = service.whereto()
    allow_http = service.may_be_http
    check = "Address"
    try:
        url = base_url_of(base_url, allow_http=allow_http)
        check = "Panel"
        panel = guid_of(panel_guid, "the PanelGUID").reveal()
        check = "Proxy"
        address = service.proxy_address()
        proxy = proxy_of(address) if address else None
        if proxy is not None:
            require_https_through(proxy, url, allow_http=allow_http)
        check = "TLS"
        tls = service.tls_context()
        check = "Key"
        secret = guid_of(key, "the key") if key else _NO_KEY
    except InvalidRequestError as exc:
        yield Finding(check, "fail", str(exc).replace("allow_http=True", "--allow-http"))
        return
    seconds = service.timeout or _READ_SECONDS
    timeouts = Timeouts(
        connect=CONNECT_SECONDS, write=CONNECT_SECONDS, read=seconds, wall=CONNECT_SECONDS + seconds
    )
    async for finding in DoctorRun(url, panel, secret, proxy, tls, timeouts, expected).findings():
        yield finding


# --- The checks


@frozen
class DoctorRun:
    """One run of all checks: single attempts, as the client makes them."""

    base_url: httpx.URL
    panel_guid: str
    key: Secret  # empty if it is missing
    proxy: Proxy | None
    tls: ssl.SSLContext | None  # None for the default
    timeouts: Timeouts
    expected: Mapping[str, str] | None  # the user's notification URLs by setting, if they are known

    async def findings(self) -> AsyncGenerator[Finding]:
        """Yield findings, in the order of `CHECKS`, until a check fails that all others depend on."""
        yield judge.address(self.base_url)
        yield (dns := await self._dns())
        if dns.verdict == "fail":
            return
        async with aclosing(self._session(self.key)) as session:
            own = await self._send(session)
            failed = judge.failure(own.problem, self.proxy) if own.problem else None
            tls = judge.tls(self.base_url.scheme, own.certificate, datetime.now(UTC))
            for passed in (self._proxy(), tls, judge.service(own)):
                yield (finding := failed if failed and failed.check == passed.check else passed)
                if finding.verdict == "fail":
                    return
            yield judge.clock(own)
            settings: PartnerSettings | None = None
            with suppress(DecodeError):
                settings = from_json(PartnerSettings, own.body) if own.status == _OK else None
            yield (finding := await self._key(own, settings))
            if finding.verdict == "fail":
                return
            yield judge.panel(self.panel_guid, own, settings)
            if settings is None:
                return
            yield judge.urls(settings, self.expected)
            yield judge.latency([await self._send(session) for _ in range(_LATENCY_REQUESTS)])

    async def _dns(self) -> Finding:
        if self.proxy is not None:
            return Finding("DNS", "skipped", "the proxy looks the host up")
        host = self.base_url.raw_host.decode("ascii")
        try:
            with anyio.fail_after(CONNECT_SECONDS):
                found = await Lookups().addresses(host, self.base_url.port or 443)
        except OSError as exc:
            remedy = "Check the spelling of the host, and that this machine reaches its name server."
            return Finding("DNS", "fail", f"{host} has no address: {exc.strerror or 'no response'}", remedy)
        addresses = list(dict.fromkeys(str(address[0]) for _, address in found))
        return Finding("DNS", "ok", ", ".join(addresses), figures={"Addresses": addresses})

    def _proxy(self) -> Finding:
        if self.proxy is None:
            unused = way_of(self.base_url.scheme, has_proxy=False, environment=os.environ)
            return Finding("Proxy", "warn" if unused else "skipped", f"none is used{unused}")
        what = "opens a tunnel (CONNECT)" if self.base_url.scheme == "https" else "takes connections"
        return Finding("Proxy", "ok", f"{self.proxy.host}:{self.proxy.port} {what}")

    async def _key(self, own: ProbeResponse, settings: PartnerSettings | None) -> Finding:
        if not self.key.reveal():
            return Finding("Key", "fail", "it is missing", "Set SAMPLING_API_KEY, or what the profile names.")
        if own.status not in _REFUSING:
            return judge.accepted(own, settings)
        # Wrong keys are sent only after the user's was refused, so that no operator sees them as an attack.
        without = [await self._send_with(_NO_KEY) for _ in range(2)]
        wrong = [await self._send_with(Secret(text)) for text in (str(uuid4()), "not-a-key")]
        return judge.refused(own, without, wrong)

    def _session(self, key: Secret) -> Session:
        return Session(
            self.base_url,
            key,
            timeouts=self.timeouts,
            limits=_LIMITS,
            idle_seconds=4.0,
            proxy=self.proxy,
            tls=self.tls,
        )

    async def _send_with(self, key: Secret) -> ProbeResponse:
        async with aclosing(self._session(key)) as session:
            return await self._send(session)

    async def _send(self, session: Session) -> ProbeResponse:
        """Send one request. A failure is a `ProbeResponse` with a problem."""
        track, began, start = Track(), time.time(), time.monotonic()
        try:
            reply = await session.attempt(get_settings(self.panel_guid), track)
        except SamplingError as exc:
            return ProbeResponse(problem=str(exc), began=began)
        seconds, response = time.monotonic() - start, track.response
        if response is None:  # a monitoring agent has patched httpx, so it was not our engine that sent
            return ProbeResponse(reply.status, {}, reply.body, "", began, seconds)
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers}
        certificate = response.certificate
        track.release_connection()
        return ProbeResponse(reply.status, headers, reply.body, "", began, seconds, certificate)


def worst(findings: Sequence[Finding]) -> Verdict:
    verdicts = {each.verdict for each in findings}
    return "fail" if "fail" in verdicts else "warn" if "warn" in verdicts else "ok"


# --- What is shown


def row(finding: Finding) -> Table:
    """Return a finding for a terminal: its check, what was found, and below that what to do."""
    label, style = _SHOWN[finding.verdict]
    grid = Table.grid(Column(width=6), Column(width=max(map(len, CHECKS)) + 2), Column(overflow="fold"))
    grid.add_row(Text(label, style), Text(finding.check, "bold"), show.plain(finding.found))
    if finding.remedy:
        grid.add_row("", "", show.plain(f"-> {finding.remedy}"))
    return grid


def closing_text(findings: Sequence[Finding]) -> Text:
    """Return the last words: how many checks failed, and how many warn."""
    counts, waiting = Counter(each.verdict for each in findings), len(CHECKS) - len(findings)
    text = f"{counts['fail']} failed, {counts['warn']} to look at, {counts['ok']} in order"
    if waiting:
        text += f"; {waiting} must wait until that is mended"
    return Text(f"{text}.", _SHOWN[worst(findings)][1])


def document(findings: Sequence[Finding], profile: str | None) -> dict[str, Any]:
    """Return all findings as one JSON object. A check that was not made, after a failed one, is skipped."""
    made, why = {each.check: each for each in findings}, f"not before {findings[-1].check} is mended"
    checks = [made.get(check) or Finding(check, "skipped", why) for check in CHECKS]
    return {
        "Verdict": worst(findings),
        "Profile": without_guids(profile or "") or None,
        "Version": __version__,
        "Checks": [
            {
                **show.fields_of(each, "check verdict found"),
                "Remedy": each.remedy or None,
                "Figures": each.figures,
            }
            for each in checks
        ],
    }
