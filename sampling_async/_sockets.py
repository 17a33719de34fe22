"""One connection as a socket: opened, written, read and closed, and what is known about each of these.

Sockets are used directly, not through streams of an event loop: only so is it known whether a byte has left,
whether bytes lie unread that nobody asked for, and that closing needs no turn of the loop, which a cancelled
task may not get. Runs on asyncio and trio.
"""

from __future__ import annotations

import os
import socket
import ssl
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.lowlevel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_RECEIVED_AT_ONCE: Final = 2**16
_HEAD_START: Final = 0.25  # seconds until the next address is tried too (RFC 8305, "Happy Eyeballs")

Address = tuple[Any, ...]


class Wire:
    """An open connection. It is closed at once and for good; nothing of it is left to the event loop."""

    __slots__ = ("_sock", "_tls")

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._tls = isinstance(sock, ssl.SSLSocket)

    async def send(self, data: bytes, leaving: Callable[[], None]) -> None:
        """Send everything.

        Args:
            data: What to send.
            leaving: Told before bytes may have left. Until then it is certain that none has.
        """
        if self._tls:
            leaving()  # a TLS record can leave in part before anything is reported
        view = memoryview(data)
        while view:
            try:
                sent = self._sock.send(view)
            except (BlockingIOError, ssl.SSLWantWriteError):
                await anyio.wait_writable(self._sock)
            except ssl.SSLWantReadError:
                await anyio.wait_readable(self._sock)
            else:
                leaving()
                view = view[sent:]

    async def receive(self) -> bytes:
        """Return the next bytes, or none at the end of the connection."""
        waited = False
        while True:
            try:
                data = self._sock.recv(_RECEIVED_AT_ONCE)
            except (BlockingIOError, ssl.SSLWantReadError):
                await anyio.wait_readable(self._sock)
                waited = True
            except ssl.SSLWantWriteError:
                await anyio.wait_writable(self._sock)
                waited = True
            else:
                if not waited:  # a fast peer must not keep the event loop to itself
                    await anyio.lowlevel.checkpoint()
                return data

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
        self._sock.close()


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
