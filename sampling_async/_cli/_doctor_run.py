"""The checks of `doctor` in their order, over the client's own connections. Get Settings only is sent."""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar
from uuid import uuid4

import anyio
import httpx
from attrs import frozen

from sampling_async import DecodeError, PartnerSettings, TransportError, __version__, from_json
from sampling_async._cli import _doctor_findings as judge
from sampling_async._cli._connection import first_in_pem, validity_of
from sampling_async._cli._doctor_findings import Finding, ProbeResponse
from sampling_async._protocol.requests import get_settings
from sampling_async._wire.address import Proxy, Secret
from sampling_async._wire.bodies import Head, LimitedBody, Request
from sampling_async._wire.connection import CONNECTING
from sampling_async._wire.engine import Engine
from sampling_async._wire.failures import Refusal, translated
from sampling_async._wire.lookups import Lookups
from sampling_async._wire.reader import TooSlow
from sampling_async._wire.sockets import Wire, connect, is_of_the_system
from sampling_async._wire.trust import Unusable, default_context
from sampling_async._wire.tunnels import Tunnel

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Sequence

    from sampling_async._cli._connection import CertificateDates

T = TypeVar("T")

CHECKS: Final = (
    *("Address", "Proxy", "DNS", "TLS", "Client cert", "Service", "Clock", "Key header", "Key", "Panel"),
    *("End pages", "Notifications", "Latency"),
)
"""The names of all checks. Each run has one finding for each of them."""

CONNECT_SECONDS: Final = 5.0
READ_SECONDS: Final = 15.0
_LATENCY_REQUESTS: Final = 5
_SHOWN_ADDRESSES: Final = 4
_BODY_BYTES: Final = 2**20
_NOT_A_KEY: Final = "not-a-key"
_KEY_HEADER: Final = "API_AUTH_KEY"
_REFUSING: Final = frozenset({401, 403})
_OK: Final = 200


@frozen(kw_only=True)
class CheckOptions:
    """What is checked, and how."""

    base_url: httpx.URL
    panel_guid: str
    key: Secret | None = None
    proxy: Proxy | None = None
    tls: ssl.SSLContext | None = None  # None for the default
    client_cert: str | None = None  # the file of the user's certificate, which `tls` has
    read_seconds: float = READ_SECONDS
    expected: Mapping[str, str] | None = None  # the user's notification URLs by setting, if they are known

    @property
    def is_https(self) -> bool:
        """Whether there is TLS."""
        return self.base_url.scheme == "https"

    @property
    def host(self) -> str:
        """The host, in ASCII."""
        return self.base_url.raw_host.decode("ascii")

    @property
    def port(self) -> int:
        """The port."""
        return self.base_url.port or (443 if self.is_https else 80)


class DoctorRun:
    """One run of all checks. `report` is called with each finding, in the order of `CHECKS`."""

    def __init__(self, options: CheckOptions, report: Callable[[Finding], object]) -> None:
        self._options = options
        self._report = report

    async def run(self) -> list[Finding]:
        """Make all checks. After a failure, the checks that depend on it are skipped."""
        findings: list[Finding] = []
        async for finding in self._checks():
            findings.append(finding)
            self._report(finding)
        for finding in (skipped := not_made(findings)):
            self._report(finding)
        return [*findings, *skipped]

    async def _checks(self) -> AsyncGenerator[Finding]:
        """Yield findings until a check fails that all others depend on."""
        options = self._options
        host = options.base_url.host
        is_loopback = host == "localhost" or host.startswith("127.") or host == "::1"
        yield judge.address(str(options.base_url), is_http=not options.is_https, is_loopback=is_loopback)
        for check in (self._proxy, self._dns, self._tls):
            yield (finding := await check())
            if finding.verdict == "fail":
                return
        yield self._client_certificate()
        # Nothing was sent with the key up to here: the certificate is verified by now.
        with closing(Engine(idle=1, idle_seconds=4.0, proxy=options.proxy, tls=options.tls)) as engine:
            own = await self._send(engine, options.key)
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
            yield judge.panel(options.panel_guid, settings)
            yield judge.end_pages(settings)
            yield judge.notifications(settings, options.expected)
            yield judge.latency([await self._send(engine, options.key) for _ in range(_LATENCY_REQUESTS)])

    async def _proxy(self) -> Finding:
        options, proxy = self._options, self._options.proxy
        if proxy is None:
            scheme = options.base_url.scheme
            usual = (f"{scheme}_proxy".upper(), f"{scheme}_proxy", "ALL_PROXY", "all_proxy")
            unused = next((name for name in usual if os.environ.get(name)), None)
            if unused is None:
                return Finding("Proxy", "skipped", "none is used")
            remedy = "If the service is reached only through that proxy, set SAMPLING_PROXY."
            return Finding("Proxy", "warn", f"none is used, although {unused} is set", remedy)
        where, began = f"{proxy.host}:{proxy.port}", time.monotonic()
        try:
            (await self._connect(None)).close()
        except TransportError as exc:
            return judge.proxy(where, str(exc), host=options.host)
        return judge.proxy(where, seconds=time.monotonic() - began, is_tunnel=options.is_https)

    async def _dns(self) -> Finding:
        options = self._options
        if options.proxy is not None:
            return Finding("DNS", "skipped", "the proxy looks the host up")
        try:
            found = await _connected(Lookups().addresses(options.host, options.port))
        except TransportError as exc:
            remedy = "Check the spelling of the host, and that this machine reaches its name server."
            return Finding("DNS", "fail", f"{options.host} has no address: {exc}", remedy)
        addresses = list(dict.fromkeys(str(address[0]) for _, address in found))
        more = len(addresses) - _SHOWN_ADDRESSES
        shown = ", ".join(addresses[:_SHOWN_ADDRESSES]) + (f" and {more} more" if more > 0 else "")
        return Finding("DNS", "ok", shown, figures={"Addresses": addresses})

    async def _tls(self) -> Finding:
        if not self._options.is_https:
            return Finding("TLS", "skipped", "the address is http")
        try:
            wire = await self._connect(self._options.tls or default_context())
        except Unusable as exc:
            return Finding("TLS", "fail", str(exc), "Check the file and the variable that names it.")
        except TransportError as exc:
            return judge.no_tls(str(exc))
        certificate = wire.certificate
        wire.close()
        return judge.certificate("TLS", _dates(certificate), datetime.now(UTC))

    def _client_certificate(self) -> Finding:
        file, validity = self._options.client_cert, None
        if not file:
            return Finding("Client cert", "skipped", "none is used")
        # The file was used for the TLS settings by now. OpenSSL reads more forms of PEM than `first_in_pem`.
        with suppress(OSError, ValueError):
            validity = _dates(first_in_pem(Path(file).read_text("ascii", "replace")))
        return judge.certificate("Client cert", validity, datetime.now(UTC), whose="you")

    async def _key(self, engine: Engine, own: ProbeResponse, *, has_settings: bool) -> list[Finding]:
        if self._options.key is None:
            header = Finding("Key header", "skipped", "there is no key to send")
            remedy = "Set SAMPLING_API_KEY, or what the profile names."
            return [header, Finding("Key", "fail", "it is missing", remedy)]
        if own.status not in _REFUSING:
            return judge.accepted(own, has_settings=has_settings)
        # Wrong keys are sent only after the user's was refused, so that no operator sees them as an attack.
        without = [await self._send(engine, None) for _ in range(2)]
        wrong = [await self._send(engine, Secret(text)) for text in (str(uuid4()), _NOT_A_KEY)]
        return judge.refused(own, without, wrong)

    async def _connect(self, tls: ssl.SSLContext | None) -> Wire:
        """Open a connection as the client does, through the proxy if there is one.

        Raises:
            TransportError: That failed.
        """
        options = self._options
        nearest, through = (options.host, options.port), None
        if options.proxy is not None:
            nearest = options.proxy.host, options.proxy.port
            through = Tunnel(options.proxy, options.host, options.port).dig if options.is_https else None

        async def connected() -> Wire:
            return await connect(await Lookups().addresses(*nearest), options.host, tls, through=through)

        return await _connected(connected())

    async def _send(self, engine: Engine, key: Secret | None) -> ProbeResponse:
        """Send one request with a key, or without one. A failure is a `ProbeResponse` with a problem."""
        began, start, sent = time.time(), time.monotonic(), [False]
        read_seconds = self._options.read_seconds
        problem = f"{judge.LATE} within {CONNECT_SECONDS + read_seconds:g} s"
        with anyio.move_on_after(CONNECT_SECONDS + read_seconds):
            try:
                response, body = await self._exchange(engine, key, sent)
                headers = {name.lower(): value for name, value in response.headers.items()}
                seconds = time.monotonic() - start
                return ProbeResponse(response.status_code, headers, body, began=began, seconds=seconds)
            except httpx.ReadTimeout:
                problem = f"{judge.LATE} within {read_seconds:g} s"
            except DecodeError as exc:
                problem = str(exc)
            except (httpx.HTTPError, OSError, TooSlow) as exc:
                if isinstance(exc, OSError) and not is_of_the_system(exc):
                    raise
                problem = str(translated(exc, "not_sent", sent=sent[-1]))
        return ProbeResponse(problem=problem, began=began)

    async def _exchange(
        self, engine: Engine, key: Secret | None, sent: list[bool]
    ) -> tuple[httpx.Response, bytes]:
        options = self._options
        path = options.base_url.raw_path.decode("ascii").rstrip("/")
        headers = {
            "Host": options.base_url.netloc.decode("ascii"),
            "Accept": "application/json",
            "Accept-Encoding": "gzip",
            "User-Agent": f"sampling-async/{__version__}",
        }
        request = Request(
            "GET",
            options.base_url,
            f"{path}{get_settings(options.panel_guid).target}".encode(),
            head=Head(httpx.Headers(headers)),
            body=b"",
            extensions={
                "timeout": {"connect": CONNECT_SECONDS, "write": CONNECT_SECONDS, "read": options.read_seconds},
                "sent": sent.append,
            },
        )
        response = await engine.exchange(request, {} if key is None else {_KEY_HEADER: key.reveal()})
        body = LimitedBody(response, _BODY_BYTES, _BODY_BYTES)
        try:
            return response, await body.read()
        finally:
            await body.aclose()


def not_made(findings: Sequence[Finding]) -> list[Finding]:
    """Return a finding for each check that was not made, because the last one has failed."""
    known, why = {each.check for each in findings}, f"not before {findings[-1].check} is mended"
    return [Finding(check, "skipped", why, is_blocked=True) for check in CHECKS if check not in known]


async def _connected(work: Awaitable[T]) -> T:
    """Wait for a part of a connection.

    Raises:
        TransportError: It failed, or took too long.
    """
    try:
        with anyio.fail_after(CONNECT_SECONDS), CONNECTING:
            return await work
    except TimeoutError:
        raise TransportError(f"no connection within {CONNECT_SECONDS:g} s") from None
    except (httpx.HTTPError, Refusal) as exc:
        raise translated(exc, "not_sent", sent=False) from None


def _dates(der: bytes | None) -> CertificateDates | None:
    try:
        return None if der is None else validity_of(der)
    except ValueError:
        return None


def _settings_in(response: ProbeResponse) -> PartnerSettings | None:
    if response.status != _OK:
        return None
    try:
        return from_json(PartnerSettings, response.body)
    except DecodeError:
        return None
