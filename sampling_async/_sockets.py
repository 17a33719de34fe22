"""One connection as a socket: opened, written, read and closed, and what is known about each of these.

Sockets are used directly, not through streams of an event loop: only so is it known whether a byte has left,
whether bytes lie unread that nobody asked for, and that closing needs no turn of the loop, which a cancelled
task may not get. Runs on asyncio and trio.
"""

from __future__ import annotations

import os
import socket
import ssl
import sys
from itertools import chain, zip_longest
from math import inf
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.lowlevel

from sampling_async._loops import asyncio_loop

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

_RECEIVED_AT_ONCE: Final = 2**16
_HEAD_START: Final = 0.25  # seconds until the next address is tried too (RFC 8305, "Happy Eyeballs")

Address = tuple[Any, ...]


class TooSlow(Exception):  # noqa: N818  not an error of the system, which TimeoutError would be
    """The peer took nothing, or sent nothing, for as long as was allowed."""


class Wire:
    """An open connection. It is closed at once and for good; nothing of it is left to the event loop."""

    __slots__ = ("_sock", "_tls", "_waits")

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._tls = sock if isinstance(sock, ssl.SSLSocket) else None
        loop = asyncio_loop() if sys.platform != "win32" else None  # whose loop there watches no sockets
        self._waits = None if loop is None else _Reader(loop, sock.fileno())

    async def send(self, data: bytes, leaving: Callable[[], None], seconds: float = inf) -> None:
        """Send everything.

        Args:
            data: What to send.
            leaving: Told before bytes may have left. Until then it is certain that none has.
            seconds: How long to wait at most until the peer takes another part.

        Raises:
            TooSlow: The peer took nothing for so long.
            OSError: The connection is broken.
        """
        if self._tls:
            leaving()  # a TLS record can leave in part before anything is reported
        view = memoryview(data)
        while view:
            try:
                sent = self._sock.send(view)
            except (BlockingIOError, ssl.SSLWantWriteError):
                await self._writable(seconds)
            except ssl.SSLWantReadError:
                await self._readable(seconds)
            else:
                leaving()
                view = view[sent:]

    async def receive(self, seconds: float = inf) -> bytes:
        """Return the next bytes, or none at the end of the connection.

        It gives the event loop a turn in any case: a fast peer must not keep that to itself.

        Raises:
            TooSlow: There were none for so long.
            OSError: The connection is broken.
        """
        if self._tls and self._tls.pending():
            await anyio.lowlevel.checkpoint()
        else:
            await self._readable(seconds)
        while True:
            try:
                return self._sock.recv(_RECEIVED_AT_ONCE)
            except (BlockingIOError, ssl.SSLWantReadError):
                await self._readable(seconds)
            except ssl.SSLWantWriteError:
                await self._writable(seconds)

    async def _readable(self, seconds: float) -> None:
        if self._waits is not None:
            await self._waits.readable(seconds)
            return
        with anyio.move_on_after(seconds) as scope:
            await anyio.wait_readable(self._sock)
        if scope.cancelled_caught:
            raise TooSlow

    async def _writable(self, seconds: float) -> None:
        with anyio.move_on_after(seconds) as scope:
            await anyio.wait_writable(self._sock)
        if scope.cancelled_caught:
            raise TooSlow

    def is_quiet(self) -> bool:
        """Return whether the peer has neither closed nor sent anything since we read last."""
        try:
            # Below TLS too, which keeps nothing back: what lies there, a record or the end, was not asked for.
            socket.socket.recv(self._sock, 1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def close(self) -> None:
        """Close the connection now."""
        if self._waits is not None:
            self._waits.end()
        self._sock.close()


class _Reader:
    """Waits on asyncio, for less: the loop goes on watching a socket from one wait to the next."""

    __slots__ = ("_fd", "_future", "_idled", "_loop", "_watched")

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int) -> None:
        self._loop = loop
        self._fd = fd
        self._watched = False
        self._idled = False
        self._future: asyncio.Future[None] | None = None

    async def readable(self, seconds: float) -> None:
        """Wait until there is something to read, or the end.

        Raises:
            TooSlow: There was nothing for so long.
        """
        future = self._future = self._loop.create_future()
        self._idled = False
        if not self._watched:
            self._loop.add_reader(self._fd, self._tell)
            self._watched = True
        timer = None if seconds == inf else self._loop.call_later(seconds, _time_out, future)
        try:
            await future
        finally:
            self._future = None
            if timer is not None:
                timer.cancel()

    def _tell(self) -> None:
        if self._future is not None:
            if not self._future.done():
                self._future.set_result(None)
        elif self._idled:  # something lies there that nobody reads: being told of it without end helps nobody
            self._stop()
        else:  # the loop looked before what it had told of was read
            self._idled = True

    def _stop(self) -> None:
        self._watched = False
        self._loop.remove_reader(self._fd)

    def end(self) -> None:
        """Watch no more; the file descriptor will mean something else."""
        if self._watched and not self._loop.is_closed():
            self._stop()


def _time_out(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_exception(TooSlow)


async def connect(host: str, port: int, tls: ssl.SSLContext | None) -> Wire:
    """Open a connection, to whichever address of the host answers first.

    Raises:
        OSError: No address could be connected to, or the TLS handshake failed (`ssl.SSLError`).
    """
    found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    sock = await _race(_by_turns([(family, address) for family, _, _, _, address in found]))
    if tls is not None:
        try:
            sock = tls.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
            await _handshake(sock)
        except BaseException:
            sock.close()
            raise
    return Wire(sock)


def _by_turns(addresses: Sequence[tuple[int, Address]]) -> list[tuple[int, Address]]:
    """Alternate between the families, the resolver's first one first, so that a dead family costs one turn."""
    first = addresses[0][0]
    same = [each for each in addresses if each[0] == first]
    other = [each for each in addresses if each[0] != first]
    return [each for each in chain.from_iterable(zip_longest(same, other)) if each is not None]


async def _race(addresses: Sequence[tuple[int, Address]]) -> socket.socket:
    """Return the first socket that connects; each address gets a head start on the next one."""
    if len(addresses) == 1:
        return await _connected(*addresses[0])
    winners: list[socket.socket] = []
    failures: list[OSError] = []

    async def run(family: int, address: Address, over: anyio.Event) -> None:
        try:
            winners.append(await _connected(family, address))
            runners.cancel_scope.cancel()
        except OSError as exc:
            failures.append(exc)
        finally:
            over.set()

    try:
        async with anyio.create_task_group() as runners:
            for family, address in addresses:
                over = anyio.Event()
                runners.start_soon(run, family, address, over)
                with anyio.move_on_after(_HEAD_START):
                    await over.wait()
    except BaseException:
        for sock in winners:
            sock.close()
        raise
    for loser in winners[1:]:
        loser.close()
    if not winners:
        raise failures[-1]
    return winners[0]


async def _connected(family: int, address: Address) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            sock.connect(address)
        except BlockingIOError:
            await anyio.wait_writable(sock)
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
