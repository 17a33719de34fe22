"""The command `doctor`: is everything in order between this machine and the service?"""

from __future__ import annotations

import os
import ssl
import textwrap
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, Final, TypeVar
from uuid import uuid4

import anyio
import httpx
import typer
from attrs import frozen
from rich.text import Text

from sampling_async import (
    DecodeError,
    InvalidRequestError,
    PartnerSettings,
    Timeouts,
    TransportError,
    __version__,
    from_json,
)
from sampling_async._cli import _doctor_findings as judge
from sampling_async._cli import _rendering as show
from sampling_async._cli._connection import ServiceOptions, asked_key, ended_by_failure
from sampling_async._cli._doctor_findings import Finding, ProbeResponse, Verdict, without_guids
from sampling_async._cli._options import given, takes
from sampling_async._cli._tally import DONE, INCOMPLETE
from sampling_async._profiles import setting
from sampling_async._protocol.requests import get_settings
from sampling_async._wire.address import Proxy, Secret, base_url_of, guid_of, proxy_of, require_https_through
from sampling_async._wire.bodies import Head, LimitedBody, Request
from sampling_async._wire.connection import CONNECTING
from sampling_async._wire.engine import Engine
from sampling_async._wire.failures import Refusal, translated
from sampling_async._wire.lookups import Lookups
from sampling_async._wire.reader import TooSlow
from sampling_async._wire.sockets import Wire, connect
from sampling_async._wire.trust import Unusable, default_context
from sampling_async._wire.tunnels import Tunnel

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Iterator, Sequence

    from sampling_async._profiles import Profile

T = TypeVar("T")

CHECKS: Final = (
    *("Address", "Proxy", "DNS", "TLS", "Client cert", "Service", "Clock", "Key header", "Key", "Panel"),
    *("End pages", "Notifications", "Latency"),
)
"""The names of all checks. Each run has one finding for each of them."""

CONNECT_SECONDS: Final = 5.0
_READ_SECONDS: Final = 15.0
_LATENCY_REQUESTS: Final = 5
_SHOWN_ADDRESSES: Final = 4
_BODY_BYTES: Final = 2**20
_REFUSING: Final = frozenset({401, 403})
_OK: Final = 200
_LABELS: Final = {"ok": "ok", "warn": "warn", "fail": "FAIL", "skipped": "skip"}
_STYLES: Final = {"ok": "green", "warn": "yellow", "fail": "bold red", "skipped": "dim"}
_BESIDE: Final = 6 + max(map(len, CHECKS)) + 2  # the column of the text, on a terminal that is not narrow
_NARROW: Final = 60


@frozen(kw_only=True)
class DoctorOptions:
    store: Path | None = given(
        "FILE", "The store of `notifications serve`, to compare its URLs with the operator's."
    )
    public_url: str | None = given(
        "URL", "The address of your receiver, as for `notifications serve`; with --store."
    )
    quiet: bool = given("", "Show only what is not in order.", "--quiet", "-q", default=False)
    as_json: bool = given("", "Print one JSON document, on a terminal too.", "--json", default=False)

    def expected_urls(self) -> Mapping[str, str] | None:
        if (self.store is None) != (self.public_url is None):
            raise InvalidRequestError("give --store and --public-url together: they make the URLs")
        if self.store is None or self.public_url is None:
            return None
        from sampling_async._cli._notifications import existing_store  # noqa: PLC0415  takes time to load
        from sampling_async.notifications import Inbox, kept_secrets  # noqa: PLC0415

        store = existing_store(self.store)
        urls = Inbox(store, secrets=kept_secrets(store)).urls(self.public_url)
        return {kind.setting: url for kind, url in urls.items() if kind.setting}


@takes(options=DoctorOptions, service=ServiceOptions)
def doctor(service: ServiceOptions, options: DoctorOptions) -> None:
    """Check all between this machine and the service: address, TLS, proxy, key, panel, settings, speed.

    Each check says what was found and what to do. The command sends Get
    Settings only, six times at most, and requests no invite. Nothing is
    repeated, so --max-concurrency, --attempts and --patience have no effect.
    The output holds no key, no PanelGUID and no member code. The exit code is
    1 if a check failed, and 0 if there are only warnings.
    """
    profile = ended_by_failure(service.panel_of_profile)
    key = ended_by_failure(lambda: service.known_key(profile)) or asked_key(profile)
    expected = ended_by_failure(options.expected_urls)
    is_silent, screen = show.as_lines(options.as_json), show.screen()
    # Not the console's width, which is 80 on every dumb terminal, also on one of 40 columns.
    width = get_terminal_size().columns

    def report(finding: Finding) -> None:
        is_hidden = finding.is_blocked or (options.quiet and finding.verdict in {"ok", "skipped"})
        if not (is_silent or is_hidden):
            for line in lines(finding, width):
                screen.print(line, soft_wrap=True)

    run = ended_by_failure(lambda: _run_of(service, profile, key, expected, report))
    if isinstance(run, Finding):
        report(run)
        findings = sorted([run, *not_made([run])], key=lambda each: CHECKS.index(each.check))
    else:
        findings = ended_by_failure(lambda: anyio.run(run.run))
    verdict = worst(findings)
    if is_silent and (options.as_json or not options.quiet or verdict != "ok"):
        ended_by_failure(lambda: show.emit_json(document(findings, service.profile)))
    elif not (is_silent or options.quiet):
        screen.print(closing_text(findings, width), soft_wrap=True)
    raise typer.Exit(INCOMPLETE if verdict == "fail" else DONE)


def _run_of(
    service: ServiceOptions,
    profile: Profile | None,
    key: str,
    expected: Mapping[str, str] | None,
    report: Callable[[Finding], object],
) -> DoctorRun | Finding:
    """Return the run, or a finding about a setting that the client would refuse."""
    Timeouts(read=service.timeout)  # refuses what the client would refuse
    base_url, panel_guid = service.whereto()
    allow_http = service.may_be_http(profile)
    check = "Address"
    try:
        url = base_url_of(base_url, allow_http=allow_http)
        check = "Panel"
        panel = guid_of(panel_guid, "the PanelGUID").reveal()
        check = "Proxy"
        address = service.proxy_address(profile)
        proxy = proxy_of(address) if address else None
        if proxy is not None:
            require_https_through(proxy, url, allow_http=allow_http)
        check = "TLS"
        tls = service.tls_context(profile)
        check = "Key"
        secret = guid_of(key, "the key") if key else None
    except InvalidRequestError as exc:
        return Finding(check, "fail", str(exc).replace("allow_http=True", "--allow-http"))
    client_cert = service.client_cert or setting(profile, "client_cert")
    read_seconds = service.timeout or _READ_SECONDS
    return DoctorRun(url, panel, secret, proxy, tls, client_cert, read_seconds, expected, report)


# --- The checks


@frozen
class DoctorRun:
    """One run of all checks over the client's own connections, in the order of `CHECKS`."""

    base_url: httpx.URL
    panel_guid: str
    key: Secret | None
    proxy: Proxy | None
    tls: ssl.SSLContext | None  # None for the default
    client_cert: str | None  # the file of the user's certificate, which `tls` has
    read_seconds: float
    expected: Mapping[str, str] | None  # the user's notification URLs by setting, if they are known
    report: Callable[[Finding], object]  # called with each finding

    async def run(self) -> list[Finding]:
        """Make all checks. After a failure, the checks that depend on it are skipped."""
        findings: list[Finding] = []
        async for finding in self._checks():
            findings.append(finding)
            self.report(finding)
        for finding in (skipped := not_made(findings)):
            self.report(finding)
        return [*findings, *skipped]

    async def _checks(self) -> AsyncGenerator[Finding]:
        """Yield findings until a check fails that all others depend on."""
        host = self.base_url.host
        is_loopback = host == "localhost" or host.startswith("127.") or host == "::1"
        yield judge.address(str(self.base_url), is_http=not self._is_https, is_loopback=is_loopback)
        for check in (self._proxy, self._dns, self._tls):
            yield (finding := await check())
            if finding.verdict == "fail":
                return
        yield self._client_certificate()
        # Nothing was sent with the key up to here: the certificate is verified by now.
        with closing(Engine(idle=1, idle_seconds=4.0, proxy=self.proxy, tls=self.tls)) as engine:
            own = await self._send(engine, self.key)
            yield (finding := judge.service(own))
            if finding.verdict == "fail":
                return
            yield judge.clock(
                own.headers.get("date"), own.headers.get("age"), own.began, own.began + own.seconds
            )
            settings = _settings_in(own)
            for finding in await self._key(engine, own, has_settings=bool(settings)):
                yield finding
            if finding.verdict == "fail":
                return
            if settings is None:
                yield judge.unknown_panel(own)
                return
            yield judge.panel(self.panel_guid, settings)
            yield judge.end_pages(settings)
            yield judge.notifications(settings, self.expected)
            yield judge.latency([await self._send(engine, self.key) for _ in range(_LATENCY_REQUESTS)])

    @property
    def _is_https(self) -> bool:
        return self.base_url.scheme == "https"

    @property
    def _peer(self) -> tuple[str, int]:
        return self.base_url.raw_host.decode("ascii"), self.base_url.port or (443 if self._is_https else 80)

    async def _proxy(self) -> Finding:
        if self.proxy is None:
            scheme = self.base_url.scheme
            usual = (f"{scheme}_proxy".upper(), f"{scheme}_proxy", "ALL_PROXY", "all_proxy")
            unused = next((name for name in usual if os.environ.get(name)), None)
            if unused is None:
                return Finding("Proxy", "skipped", "none is used")
            remedy = "If the service is reached only through that proxy, set SAMPLING_PROXY."
            return Finding("Proxy", "warn", f"none is used, although {unused} is set", remedy)
        where, began = f"{self.proxy.host}:{self.proxy.port}", time.monotonic()
        try:
            (await self._connect(None)).close()
        except TransportError as exc:
            return judge.proxy(where, str(exc), host=self._peer[0])
        return judge.proxy(where, seconds=time.monotonic() - began, is_tunnel=self._is_https)

    async def _dns(self) -> Finding:
        if self.proxy is not None:
            return Finding("DNS", "skipped", "the proxy looks the host up")
        try:
            found = await _connected(Lookups().addresses(*self._peer))
        except TransportError as exc:
            remedy = "Check the spelling of the host, and that this machine reaches its name server."
            return Finding("DNS", "fail", f"{self._peer[0]} has no address: {exc}", remedy)
        addresses = list(dict.fromkeys(str(address[0]) for _, address in found))
        more = len(addresses) - _SHOWN_ADDRESSES
        shown = ", ".join(addresses[:_SHOWN_ADDRESSES]) + (f" and {more} more" if more > 0 else "")
        return Finding("DNS", "ok", shown, figures={"Addresses": addresses})

    async def _tls(self) -> Finding:
        if not self._is_https:
            return Finding("TLS", "skipped", "the address is http")
        try:
            wire = await self._connect(self.tls or default_context())
        except Unusable as exc:
            return Finding("TLS", "fail", str(exc), "Check the file and the variable that names it.")
        except TransportError as exc:
            return judge.no_tls(str(exc))
        certificate = wire.certificate
        wire.close()
        return judge.certificate("TLS", certificate, datetime.now(UTC))

    def _client_certificate(self) -> Finding:
        if not self.client_cert:
            return Finding("Client cert", "skipped", "none is used")
        der = None
        # The file was used for the TLS settings by now. OpenSSL reads more forms of PEM than this.
        with suppress(OSError, ValueError):
            _, begin, rest = Path(self.client_cert).read_text("ascii", "replace").partition(ssl.PEM_HEADER)
            der = ssl.PEM_cert_to_DER_cert(begin + rest.partition(ssl.PEM_FOOTER)[0] + ssl.PEM_FOOTER)
        return judge.certificate("Client cert", der, datetime.now(UTC), whose="you")

    async def _key(self, engine: Engine, own: ProbeResponse, *, has_settings: bool) -> list[Finding]:
        if self.key is None:
            header = Finding("Key header", "skipped", "there is no key to send")
            remedy = "Set SAMPLING_API_KEY, or what the profile names."
            return [header, Finding("Key", "fail", "it is missing", remedy)]
        if own.status not in _REFUSING:
            return judge.accepted(own, has_settings=has_settings)
        # Wrong keys are sent only after the user's was refused, so that no operator sees them as an attack.
        without = [await self._send(engine, None) for _ in range(2)]
        wrong = [await self._send(engine, Secret(text)) for text in (str(uuid4()), "not-a-key")]
        return judge.refused(own, without, wrong)

    async def _connect(self, tls: ssl.SSLContext | None) -> Wire:
        """Open a connection as the client does, through the proxy if there is one."""
        host, port = self._peer
        nearest, through = (host, port), None
        if self.proxy is not None:
            nearest = self.proxy.host, self.proxy.port
            through = Tunnel(self.proxy, host, port).dig if self._is_https else None

        async def connected() -> Wire:
            return await connect(await Lookups().addresses(*nearest), host, tls, through=through)

        return await _connected(connected())

    async def _send(self, engine: Engine, key: Secret | None) -> ProbeResponse:
        """Send one request with a key, or without one. A failure is a `ProbeResponse` with a problem."""
        began, start, sent = time.time(), time.monotonic(), [False]
        private = {} if key is None else {"API_AUTH_KEY": key.reveal()}
        most = CONNECT_SECONDS + self.read_seconds
        problem = f"{judge.LATE} within {most:g} s"
        with anyio.move_on_after(most):
            try:
                response = await engine.exchange(self._request(sent), private)
                body = LimitedBody(response, _BODY_BYTES, _BODY_BYTES)
                try:
                    content = await body.read()
                finally:
                    await body.aclose()
                seconds = time.monotonic() - start
                return ProbeResponse(response.status_code, response.headers, content, "", began, seconds)
            except httpx.ReadTimeout:
                problem = f"{judge.LATE} within {self.read_seconds:g} s"
            except DecodeError as exc:
                problem = str(exc)
            except (httpx.HTTPError, OSError, TooSlow) as exc:
                problem = str(translated(exc, "not_sent", sent=sent[-1]))
        return ProbeResponse(problem=problem, began=began)

    def _request(self, sent: list[bool]) -> Request:
        path = self.base_url.raw_path.decode("ascii").rstrip("/")
        seconds = {"connect": CONNECT_SECONDS, "write": CONNECT_SECONDS, "read": self.read_seconds}
        headers = {
            "Host": self.base_url.netloc.decode("ascii"),
            "Accept": "application/json",
            "Accept-Encoding": "gzip",
            "User-Agent": f"sampling-async/{__version__}",
        }
        return Request(
            "GET",
            self.base_url,
            f"{path}{get_settings(self.panel_guid).target}".encode(),
            head=Head(httpx.Headers(headers)),
            body=b"",
            extensions={"timeout": seconds, "sent": sent.append},
        )


def not_made(findings: Sequence[Finding]) -> list[Finding]:
    """Return a finding for each check that was not made, because the last one has failed."""
    known, why = {each.check for each in findings}, f"not before {findings[-1].check} is mended"
    return [Finding(check, "skipped", why, is_blocked=True) for check in CHECKS if check not in known]


async def _connected(work: Awaitable[T]) -> T:
    """Wait for a part of a connection. Each failure is a `TransportError`."""
    try:
        with anyio.fail_after(CONNECT_SECONDS), CONNECTING:
            return await work
    except TimeoutError:
        raise TransportError(f"no connection within {CONNECT_SECONDS:g} s") from None
    except (httpx.HTTPError, Refusal) as exc:
        raise translated(exc, "not_sent", sent=False) from None


def _settings_in(response: ProbeResponse) -> PartnerSettings | None:
    with suppress(DecodeError):
        return from_json(PartnerSettings, response.body) if response.status == _OK else None
    return None


def worst(findings: Sequence[Finding]) -> Verdict:
    verdicts = {each.verdict for each in findings}
    return "fail" if "fail" in verdicts else "warn" if "warn" in verdicts else "ok"


# --- What is shown


def lines(finding: Finding, width: int) -> Iterator[Text]:
    """Yield the lines of a finding for a terminal. None is wider than the terminal."""
    label = f"{_LABELS[finding.verdict]:<6}", _STYLES[finding.verdict]
    style = "dim" if finding.verdict == "skipped" else ""
    is_narrow = width < _NARROW
    indent = 2 if is_narrow else _BESIDE
    text = _wrapped(finding.found, width - indent)
    beside = "" if is_narrow else text.pop(0)
    check = f"{finding.check:<{_BESIDE - 6}}" if beside else finding.check
    yield Text.assemble(label, (check, style or "bold"), show.plain(beside, style))
    for line in text:
        yield show.plain(" " * indent + line, style)
    for number, line in enumerate(_wrapped(finding.remedy, width - indent - 3)):
        yield show.plain(f"{' ' * indent}{'   ' if number else '-> '}{line}")


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, 20), break_on_hyphens=False)


def closing_text(findings: Sequence[Finding], width: int) -> Text:
    """Return the last words: how many checks failed, and how many warn."""
    counts = {verdict: sum(each.verdict == verdict for each in findings) for verdict in _LABELS}
    if not counts["fail"] + counts["warn"]:
        return Text(f"\nAll is in order: {counts['ok']} checks.", style="bold green")
    text = f"{counts['fail']} failed, {counts['warn']} to look at, {counts['ok']} in order"
    blocked = sum(each.is_blocked for each in findings)
    text += f"; {blocked} must wait until that is mended." if blocked else "."
    style = "bold red" if counts["fail"] else "bold yellow"
    return Text("\n".join(["", *_wrapped(text, width)]), style=style)


def document(findings: Sequence[Finding], profile: str | None) -> dict[str, Any]:
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
            for each in findings
        ],
    }
