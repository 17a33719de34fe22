"""What `doctor` sends: connections and Get Settings only, which change nothing, over the client's own wire."""

from __future__ import annotations

import ssl
import time
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Final, Self, TypeVar

import anyio
import httpx
from attrs import frozen

from sampling_async import DecodeError
from sampling_async._cli._doctor_findings import Wave, hiding
from sampling_async._cli._doctor_service import Seen
from sampling_async._contract.statuses import OK
from sampling_async._protocol.requests import get_settings
from sampling_async._version import __version__
from sampling_async._wire.address import Proxy, Secret
from sampling_async._wire.bodies import LimitedBody, RequestBody
from sampling_async._wire.engine import Engine
from sampling_async._wire.failures import Refusal, translated
from sampling_async._wire.http1 import ResponseParser
from sampling_async._wire.lookups import Lookups
from sampling_async._wire.reader import TooSlow
from sampling_async._wire.sockets import Wire, connect, is_of_the_system
from sampling_async._wire.trust import Unusable, alert_in, default_context, text_of
from sampling_async._wire.tunnels import Tunnel

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

T = TypeVar("T")

CONNECT_SECONDS: Final = 5.0
READ_SECONDS: Final = 15.0
_BODY: Final = 2**20
_HTTPS, _HTTP = 443, 80
KEY_HEADER: Final = "API_AUTH_KEY"


class Unreachable(Exception):  # noqa: N818  what one check reports, not an error of the program
    """A connection failed. The text says why and quotes nothing from the network."""

    def __init__(self, text: str, *, refused_certificate: str = "") -> None:
        super().__init__(text)
        self.refused_certificate = refused_certificate


@frozen(kw_only=True)
class Target:
    """Where requests go, and how. The key is not among this."""

    base_url: httpx.URL
    panel_guid: str
    proxy: Proxy | None = None
    tls: ssl.SSLContext | None = None
    idle_seconds: float = 4.0
    read_seconds: float = READ_SECONDS

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
        return self.base_url.port or (_HTTPS if self.is_https else _HTTP)

    @property
    def url(self) -> httpx.URL:
        """The URL of Get Settings."""
        path = self.base_url.raw_path.decode("ascii").rstrip("/")
        return self.base_url.copy_with(raw_path=f"{path}{get_settings(self.panel_guid).target}".encode())

    @property
    def headers(self) -> dict[str, str]:
        """The headers that the client sends with each request."""
        return {
            "Host": self.base_url.netloc.decode("ascii"),
            "Accept": "application/json",
            "Accept-Encoding": "gzip",
            "User-Agent": f"sampling-async/{__version__}",
        }


async def looked_up(host: str, port: int) -> list[str]:
    """Return the addresses of a host.

    Raises:
        Unreachable: It has none.
    """
    found = await _within(CONNECT_SECONDS, Lookups().addresses(host, port))
    return list(dict.fromkeys(str(address[0]) for _, address in found))


async def reach_proxy(target: Target) -> float:
    """Open a connection to the proxy, and a tunnel through it for https; return the seconds that it took.

    Raises:
        Unreachable: There is none.
    """
    began = time.monotonic()
    (await opened(target, None)).close()
    return time.monotonic() - began


async def server_certificate(target: Target, tls: ssl.SSLContext) -> bytes:
    """Return the server's certificate in DER, after a handshake.

    Raises:
        Unreachable: The handshake failed.
    """
    wire = await opened(target, tls)
    try:
        assert wire.certificate is not None
        return wire.certificate
    finally:
        wire.close()


def client_context(target: Target) -> ssl.SSLContext:
    """Return the TLS settings of the client.

    Raises:
        Unreachable: A file of authorities cannot be used.
    """
    try:
        return target.tls or default_context()
    except Unusable as exc:
        problem = str(exc)
    raise Unreachable(problem)


def looking_context() -> ssl.SSLContext:
    """Return TLS settings that verify nothing, to look at a certificate; nothing is ever sent over them."""
    # Safe, because the caller closes the connection after the handshake. `check_hostname` must go first.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def opened(target: Target, tls: ssl.SSLContext | None) -> Wire:
    """Open a connection as the client does, through the proxy if there is one.

    Raises:
        Unreachable: That failed.
    """
    nearest, through = (target.host, target.port), None
    if target.proxy is not None:
        nearest = target.proxy.host, target.proxy.port
        through = Tunnel(target.proxy, target.host, target.port).dig if target.is_https else None

    async def connected() -> Wire:
        return await connect(await Lookups().addresses(*nearest), target.host, tls, through=through)

    return await _within(CONNECT_SECONDS, connected())


async def _within(seconds: float, work: Awaitable[T]) -> T:
    """Wait for a connection.

    Raises:
        Unreachable: It failed, or took too long.
    """
    problem = Unreachable(f"no connection within {seconds:g} s")
    with anyio.move_on_after(seconds):
        try:
            return await work
        except Refusal as exc:
            problem = Unreachable(str(exc))
        except ssl.SSLCertVerificationError as exc:
            problem = Unreachable("the certificate is refused", refused_certificate=exc.verify_message)
        except OSError as exc:
            if not is_of_the_system(exc):
                raise
            alert = alert_in(exc)
            reason = exc.strerror or type(exc).__name__
            if isinstance(exc, ssl.SSLError):  # its text names a line of the C code
                reason = f"TLS failed: {(exc.reason or reason).lower().replace('_', ' ')}"
            problem = Unreachable(text_of(alert) if alert else reason)
    raise problem


class Asker:
    """Sends Get Settings over the client's own engine. A context manager.

    Args:
        target: Where to.
        connections: The most connections that are kept.
        wall_clock: Returns seconds since 1970.
    """

    def __init__(self, target: Target, connections: int, wall_clock: Callable[[], float] = time.time) -> None:
        self._target = target
        self._url = target.url
        self._wall_clock = wall_clock
        self._engine = Engine(
            idle=connections, idle_seconds=target.idle_seconds, proxy=target.proxy, tls=target.tls
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()

    async def ask(self, key: Secret | None, more: Mapping[str, str] | None = None) -> Seen:
        """Send one request with a key, or without one; every failure is a `Seen` with a problem.

        Args:
            key: The key.
            more: Further headers.
        """
        began, start = self._wall_clock(), time.monotonic()
        sent: list[bool] = []
        most = CONNECT_SECONDS + self._target.read_seconds
        problem, is_late = f"no complete response within {most:g} s", True
        with anyio.move_on_after(most):
            try:
                response, body = await self._exchange(key, more or {}, sent)
                hidden = hiding(key, Secret(self._target.panel_guid))  # before anything is cut
                return Seen(
                    response.status_code,
                    {name.lower(): hidden(value) for name, value in response.headers.items()},
                    body,
                    time.monotonic() - start,
                    began=began,
                    ended=self._wall_clock(),
                )
            except httpx.ReadTimeout:
                problem = f"no complete response within {self._target.read_seconds:g} s"
            except (httpx.HTTPError, OSError, DecodeError, TooSlow) as exc:
                if isinstance(exc, OSError) and not is_of_the_system(exc):
                    raise
                is_late = False
                problem = str(
                    exc
                    if isinstance(exc, DecodeError)
                    else translated(exc, "not_sent", sent=bool(sent and sent[-1]))
                )
        return Seen(problem=problem, is_late=is_late, began=began, ended=self._wall_clock())

    async def _exchange(
        self, key: Secret | None, more: Mapping[str, str], sent: list[bool]
    ) -> tuple[httpx.Response, bytes]:
        limits = {"connect": CONNECT_SECONDS, "write": CONNECT_SECONDS, "read": self._target.read_seconds}
        request = httpx.Request(
            "GET",
            self._url,
            headers={**self._target.headers, **more},
            stream=RequestBody(b""),
            extensions={"timeout": limits, "sent": sent.append},
        )
        private: Mapping[str, str] = {} if key is None else {KEY_HEADER: key.reveal()}
        response = await self._engine.exchange(request, private)
        body = LimitedBody(response, _BODY, _BODY)
        try:
            return response, await body.read()
        finally:
            await body.aclose()

    async def waves(self, key: Secret, most: int) -> list[Wave]:
        """Send 1, 2, 4 ... requests at the same time, up to `most`; stop after a wave with a refusal."""
        waves: list[Wave] = []
        for width in widths(most):
            answers: list[Seen] = []

            # `answers` is a parameter, since a name in a closure would be that of the latest wave.
            async def one(into: list[Seen]) -> None:
                into.append(await self.ask(key))

            async with anyio.create_task_group() as tasks:
                for _ in range(width):
                    tasks.start_soon(one, answers)
            good = [each.seconds for each in answers if each.status == OK]
            bad = [each.status for each in answers if each.status != OK]
            waves.append(Wave(width, good, bad))
            if bad:
                break
        return waves


def crowd(separator: str) -> dict[str, str]:
    """Return more headers than most servers take, 120 of 180 bytes, named like that of the key.

    Apache and gunicorn take 100 headers, IIS and Node 16 KB. nginx takes 32 KB, so it lets them pass.
    """
    name = separator.join(("API", "AUTH", "KEY"))
    return {f"{name}{separator}{number}": "0" * 160 for number in range(120)}


def widths(most: int) -> list[int]:
    """Return 1, 2, 4 ... up to `most`, and `most` itself."""
    return sorted({*(2**n for n in range(most.bit_length()) if 2**n <= most), most})


async def kept_open(target: Target, key: Secret, seconds: float) -> float | None:
    """Return after how many seconds the service closes an idle connection; None if it keeps it for longer.

    Args:
        target: Where to.
        key: The key.
        seconds: The longest time to wait.

    Raises:
        Unreachable: There was no response over that connection.
    """
    wire = await opened(target, client_context(target) if target.is_https else None)
    try:
        answer = await _answer(wire, target, key)
        if not answer.leaves_reusable:
            return 0.0
        began = time.monotonic()
        with suppress(OSError):
            while True:  # bytes without a request are an end too
                try:
                    await wire.receive(seconds)
                except TooSlow:
                    return None
                break
        return time.monotonic() - began
    finally:
        wire.close()


async def _answer(wire: Wire, target: Target, key: Secret) -> ResponseParser:
    url = target.url
    lines = [f"GET {url.raw_path.decode('ascii')} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in {**target.headers, KEY_HEADER: key.reveal()}.items()]
    answer = ResponseParser()

    async def exchanged() -> ResponseParser:
        await wire.send("\r\n".join([*lines, "", ""]).encode("ascii"), lambda _: None, inf)
        while not answer.is_whole:
            answer.feed(await wire.receive())
        return answer

    try:
        return await _within(target.read_seconds, exchanged())
    except httpx.RemoteProtocolError:
        raise Unreachable("the response was no HTTP/1.1") from None


async def heads(urls: Mapping[str, str]) -> dict[str, int]:
    """Send HEAD to our own notification URLs; return each status, 0 without a response in time.

    The URLs hold secrets, so no error is told in its own words. The receiver is not the service: its
    certificate may be of another authority, and our own is none of its business.

    Raises:
        Unusable: A file of certificates, which https needs, cannot be used.
    """
    is_https = any(url.casefold().startswith("https:") for url in urls.values())
    context = default_context() if is_https else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    found = dict.fromkeys(urls, 0)

    async def ask(name: str) -> None:
        with suppress(Exception), anyio.move_on_after(CONNECT_SECONDS):
            found[name] = (await client.head(urls[name])).status_code

    async with (
        httpx.AsyncClient(trust_env=False, timeout=CONNECT_SECONDS, verify=context) as client,
        anyio.create_task_group() as tasks,
    ):
        for name in urls:
            tasks.start_soon(ask, name)
    return found
