"""One connection as a socket: open it, send, receive, close, and know exactly what happened.

The streams of an event loop do not show whether a byte was sent, or whether unread bytes came without a
request. HTTP/1.1 does not say which request a response belongs to, but a socket shows two things: bytes that
are there before a request is sent are no response to it (`is_quiet`, `is_silent`), and neither are bytes that
arrive while the peer's kernel has acknowledged nothing of the request (`receive`; on Linux). What it cannot
show: bytes without a request that come after a part of the next one has reached the server's kernel, or, under
TLS, the rest of a record whose first part came before the first request. There only the content of the response
can show the error.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
import sys
import time
import weakref
from contextlib import suppress
from itertools import chain, zip_longest
from math import inf
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import anyio
import anyio.lowlevel

from sampling_async._pacing.loops import asyncio_loop
from sampling_async._pacing.threads import start
from sampling_async._wire.reader import SocketReader, TooSlow
from sampling_async._wire.trust import alert_in

if sys.platform == "linux":
    import fcntl
    import termios

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from sampling_async._pacing.threads import Run

_RECEIVED_AT_ONCE: Final = 2**16
_HEAD_START: Final = 0.25  # seconds until the next address is tried too (RFC 8305, "Happy Eyeballs")
_TCP: Final = frozenset({socket.AF_INET, socket.AF_INET6})
_NUMBER: Final = b"\0\0\0\0"


def is_of_the_system(exc: BaseException) -> bool:
    """Return whether an error comes from the system or TLS. A signal handler's OSError has no errno."""
    return isinstance(exc, OSError) and exc.errno is not None


def _is_of_this_call(exc: OSError) -> bool:
    """Return whether the call to the system raised an error, in the frame that caught it.

    A signal handler may raise after a `send` that took everything. Its error has one more frame, its own.
    """
    return is_of_the_system(exc) and exc.__traceback__ is not None and exc.__traceback__.tb_next is None


class Wire:
    """An open connection. Closing is immediate; a connection that is dropped closes itself."""

    __slots__ = (
        "__weakref__",
        "_asked",
        "_is_tcp",
        "_process",
        "_sock",
        "_tls",
        "_waits",
        "close",
        "opened_within",
    )

    def __init__(self, sock: socket.socket, opened_within: float = 0.0) -> None:
        self.opened_within = opened_within
        self._sock = sock
        self._tls = sock if isinstance(sock, ssl.SSLSocket) else None
        self._is_tcp = sock.family in _TCP
        self._asked = 0  # the length of the request, until the response begins
        # After a fork, parent and child have the same socket, and what one of them reads is lost for the other.
        self._process = os.getpid()
        # The default event loop of Windows cannot watch sockets.
        loop = asyncio_loop() if sys.platform != "win32" else None
        self._waits = None if loop is None else SocketReader(loop, sock.fileno())
        # `finalize` keeps socket and reader alive until it runs. The event loop must stop watching before the
        # descriptor is closed. If both were only collected together with this object, the order would be open.
        self.close: Callable[[], object] = weakref.finalize(self, _close, sock, self._waits, self._process)

    async def send(self, data: bytes, sent: Callable[[bool], None], seconds: float = inf) -> None:
        """Send all the data, or raise `TooSlow` if the peer accepts none of it for some seconds.

        `sent` is called with True before bytes may leave, and with False again if it is certain that none left.
        """
        self._asked = left = len(data)
        rest: bytes | memoryview = data
        while left:
            # Before the call, not after it: a signal handler may raise in between.
            sent(True)
            try:
                left -= self._sock.send(rest)
            except OSError as exc:
                if left == len(data) and self._sent_no_byte(exc):
                    sent(False)
                await self._ready_again(exc, self._writable, seconds)
            else:
                rest = memoryview(data)[-left:] if left else b""

    def _sent_no_byte(self, exc: OSError) -> bool:
        """Return whether an error of `send` proves that no byte was sent. Under TLS it never does."""
        return self._tls is None and _is_of_this_call(exc)

    async def receive(self, seconds: float = inf) -> bytes:
        """Return the next bytes, or none at the end of the connection.

        This always gives the event loop a turn, so that a fast peer does not block other tasks. An end without
        the closing alert of TLS is an OSError, and so are bytes that cannot be the response.
        """
        if self._tls and self._tls.pending():
            await anyio.lowlevel.checkpoint()
        else:
            # With `_asked`, this is the first wait since the request was sent.
            await self._readable(seconds, again=not self._asked)
        while True:
            try:
                data = self._sock.recv(_RECEIVED_AT_ONCE)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as exc:
                await self._ready_again(exc, self._readable, seconds)
            else:
                if self._asked and data:
                    self._check_request_arrived()
                return data

    def _check_request_arrived(self) -> None:
        """Refuse bytes that cannot be the response: the peer's kernel has acknowledged nothing of the request.

        Under TLS the bytes on the wire are more than `_asked`, by some dozens for each record. The comparison
        still works: a response acknowledges at least one whole record, which is more than all these additions.
        """
        # Example: the request has 400 bytes. If the kernel's send queue still holds 400, the peer has received
        # nothing. If it holds 0, all of it has arrived, and the bytes may be the response.
        asked, self._asked = self._asked, 0
        if sys.platform == "linux" and self._is_tcp:
            try:
                left = fcntl.ioctl(self._sock.fileno(), termios.TIOCOUTQ, _NUMBER)
            except OSError as exc:
                if not _is_of_this_call(exc):
                    raise
                return  # a sandbox that does not know it
            if left != _NUMBER and int.from_bytes(left, sys.byteorder) >= asked:
                raise OSError(
                    errno.EPROTO, "bytes came before the request had arrived, so they are not its response"
                )

    async def _ready_again(
        self, exc: OSError, usual: Callable[[float], Awaitable[None]], seconds: float
    ) -> None:
        if isinstance(exc, ssl.SSLWantReadError):
            await self._readable(seconds)
        elif isinstance(exc, ssl.SSLWantWriteError):
            await self._writable(seconds)
        elif isinstance(exc, BlockingIOError):
            await usual(seconds)
        else:
            raise exc

    def _readable(self, seconds: float, *, again: bool = True) -> Awaitable[None]:
        if self._waits is None:
            return _in_time(anyio.wait_readable, self._sock, seconds)
        return self._waits.readable(seconds, again=again)

    def _writable(self, seconds: float) -> Awaitable[None]:
        return _in_time(anyio.wait_writable, self._sock, seconds)

    def is_quiet(self) -> bool:
        """Return whether the peer has neither closed the connection nor sent anything since the last read.

        A connection of the parent process is never quiet in a child.
        """
        if self._process != os.getpid():
            return False
        try:
            # Looks at the TCP socket, under TLS too. TLS holds no bytes of its own here, so any bytes, a record
            # or the end, came without a request.
            socket.socket.recv(self._sock, 1, socket.MSG_PEEK)
        except OSError as exc:
            if is_of_the_system(exc):
                return isinstance(exc, BlockingIOError)
            raise
        return False

    def is_silent(self) -> bool:
        """Return whether the peer of a new connection has neither closed it nor sent data without a request.

        Session tickets of TLS come without a request too, and are ignored. An alert of TLS is raised.
        """
        if self.is_quiet():
            return True
        try:
            if self._tls is not None:
                self._tls.recv(1)
        except OSError as exc:
            if is_of_the_system(exc) and not alert_in(exc):
                return isinstance(exc, ssl.SSLWantReadError)
            raise
        return False

    def on_readable(self, notify: Callable[[], object]) -> None:
        """Set a function that is called when bytes, or the end, arrive and no task is reading (asyncio only).

        The event loop keeps the function alive, so it must hold the connection weakly.
        """
        if self._waits is not None:
            self._waits.notify = notify

    @property
    def session(self) -> ssl.SSLSession | None:
        """The TLS session, which another connection to the same host can resume without a full handshake."""
        return None if self._tls is None else self._tls.session

    @property
    def certificate(self) -> Mapping[str, Any]:
        """The server's certificate as `ssl` returns it; empty without TLS, and after the end."""
        if self._tls is None or self._tls.fileno() < 0:
            return {}
        return self._tls.getpeercert() or {}

    @property
    def post_handshake_auth(self) -> bool:
        """Whether the server may ask for our certificate after it has received a request."""
        return self._tls is not None and self._tls.context.post_handshake_auth


async def _in_time(
    wait: Callable[[socket.socket], Awaitable[None]], sock: socket.socket, seconds: float
) -> None:
    with anyio.move_on_after(seconds) as scope:
        await wait(sock)
    if scope.cancelled_caught:
        raise TooSlow


def _close(sock: socket.socket, reader: SocketReader | None, made_in: int) -> None:
    if reader is None:
        sock.close()
    else:
        reader.close(sock, is_forked=made_in != os.getpid())


async def connect(
    addresses: Addresses,
    host: str,
    tls: ssl.SSLContext | None,
    *,
    through: Callable[[socket.socket], Awaitable[object]] | None = None,
    session: ssl.SSLSession | None = None,
) -> Wire:
    """Open a connection to the address of the host that connects first, with TLS for its name, if given.

    `through` is called with the open socket before TLS begins: it asks a proxy to open a tunnel.
    """
    started = time.monotonic()
    sock = await _race(_alternating(addresses))
    try:
        if through is not None:
            await through(sock)
        opened_within = time.monotonic() - started
        if tls is not None:
            sock = _under_tls(sock, host, tls, session)
            await _handshake(sock)
        return Wire(sock, opened_within)
    except BaseException:
        sock.close()
        raise


async def send_whole(sock: socket.socket, data: bytes) -> None:
    """Send all the data over a socket that is not in a `Wire` yet."""
    view = memoryview(data)
    while view:
        try:
            view = view[sock.send(view) :]
        except BlockingIOError:
            await anyio.wait_writable(sock)


async def received(sock: socket.socket) -> bytes:
    """Return the next bytes of a socket that is not in a `Wire` yet, or none at its end."""
    while True:
        await anyio.wait_readable(sock)
        with suppress(BlockingIOError):
            return sock.recv(_RECEIVED_AT_ONCE)


def _under_tls(
    sock: socket.socket, host: str, tls: ssl.SSLContext, session: ssl.SSLSession | None
) -> ssl.SSLSocket:
    host = host.removesuffix(".")  # which a name in the DNS may have, and one in TLS may not (RFC 6066)
    try:
        # `ssl` does the same, but loses the socket without closing it if this fails. So it is checked first.
        host.encode("idna")
    except UnicodeError as exc:
        raise OSError(errno.EINVAL, "the host name cannot be in a certificate") from exc
    # `suppress_ragged_eofs=False`: anybody on the network can end the TCP connection. Without the closing alert
    # of TLS, this must not look like the end of a response.
    return tls.wrap_socket(
        sock, server_hostname=host, do_handshake_on_connect=False, suppress_ragged_eofs=False, session=session
    )


def _alternating(addresses: Addresses) -> Addresses:
    """Alternate between address families, beginning with the resolver's first one.

    If one family does not work, this costs one head start and not one for each of its addresses.
    """
    # Example: the IPv6 addresses a, b, c and the IPv4 address x become a, x, b, c.
    first = addresses[0][0]
    same = [each for each in addresses if each[0] == first]
    other = [each for each in addresses if each[0] != first]
    return [each for each in chain.from_iterable(zip_longest(same, other)) if each is not None]


async def _race(addresses: Addresses) -> socket.socket:
    """Return the first socket that connects. Each address has a head start before the next one is tried."""
    if len(addresses) == 1:
        return await _connected(*addresses[0])
    winners: list[socket.socket] = []
    failures: list[Exception] = []

    async def run(family: int, address: tuple[Any, ...], over: anyio.Event) -> None:
        try:
            winners.append(await _connected(family, address))
            runners.cancel_scope.cancel()
        except Exception as exc:  # noqa: BLE001  raised below
            failures.append(exc)
            # An exception of a signal handler ends the race. A failed address does not.
            if not is_of_the_system(exc):
                runners.cancel_scope.cancel()
        finally:
            over.set()

    try:
        async with anyio.create_task_group() as runners:
            for family, address in addresses:
                over = anyio.Event()
                runners.start_soon(run, family, address, over)
                with anyio.move_on_after(_HEAD_START):
                    await over.wait()
        _raise_one_of(failures, none_won=not winners)
    except BaseException:
        for sock in winners:
            sock.close()
        raise
    # Two sockets may connect in the same round of the event loop.
    for loser in winners[1:]:
        loser.close()
    return winners[0]


def _raise_one_of(failures: Sequence[Exception], *, none_won: bool) -> None:
    foreign = [exc for exc in failures if not is_of_the_system(exc)]
    if foreign or none_won:
        raise (foreign or failures)[-1]


async def _connected(family: int, address: tuple[Any, ...]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            sock.connect(address)
        except BlockingIOError:
            await anyio.wait_writable(sock)
        # A socket whose connection failed is writable too, and has the error here.
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))  # noqa: TRY301
    except BaseException:
        sock.close()
        raise
    return sock


async def _handshake(sock: ssl.SSLSocket) -> None:
    while True:
        try:
            sock.do_handshake()
        except ssl.SSLWantReadError:
            await anyio.wait_readable(sock)
        except ssl.SSLWantWriteError:
            await anyio.wait_writable(sock)
        else:
            return


Addresses: TypeAlias = list[tuple[int, tuple[Any, ...]]]
"""Pairs of address family and the argument for `socket.connect`, in the resolver's order of preference."""


class Lookups:
    """The lookups of one event loop, without the application's threads, which may be busy.

    Tasks that need the same host at the same time share one lookup.
    """

    def __init__(self) -> None:
        self._under_way: dict[tuple[str, int], Run[Addresses]] = {}

    async def addresses(self, host: str, port: int) -> Addresses:
        """Return the addresses of a host. An IP address needs no lookup."""
        try:
            return _found(host, port, socket.AI_NUMERICHOST)
        except socket.gaierror:  # a name, not an IP address
            pass
        run = self._run(host, port)
        # A cancellation here does not end the lookup: other tasks may wait for it.
        await run.over.wait()
        run.check()
        return run.result()

    def _run(self, host: str, port: int) -> Run[Addresses]:
        run = self._under_way.get((host, port))
        if run is None or run.over.is_set():
            try:
                run = self._under_way[host, port] = start(_found, host, port)
            except RuntimeError as exc:
                raise OSError(errno.EAGAIN, "no thread could be started to look up the host name") from exc
        return run


def _found(host: str, port: int, flags: int = 0) -> Addresses:
    # As bytes: httpx has encoded the name already, and Python would encode a str again, by an older rule.
    found = socket.getaddrinfo(host.encode("ascii"), port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, address) for family, _, _, _, address in found]
