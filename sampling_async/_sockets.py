"""One connection as a socket: opened, written, read and closed, and what is known about each of these.

Sockets are used directly, not through streams of an event loop: only so is it known whether a byte may have
left, whether bytes lie unread that nobody asked for, and that closing needs no turn of the loop, which a
cancelled task may not get. Runs on asyncio and trio.

HTTP/1.1 does not say which request an answer belongs to. What a socket can tell of it is told here:

- Bytes that lie there before a request is sent are no answer to it (`is_quiet`, `is_silent`).
- Nor are bytes that come while the peer's kernel has acknowledged nothing of the request: whatever answers it
  was sent after a part of it had arrived, and acknowledges that part (`receive`; on Linux). That covers all
  that is sooner than the round trip, so what the kernel measured of that adds nothing.

What remains: bytes that a server sends unasked after a part of the next request has reached its kernel; on
systems other than Linux, those that arrive after the request was sent; and under TLS, of a record that came in
part before the first request of a connection, the rest. Of these a socket says nothing; what is in them must.
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
from functools import partial
from itertools import chain, zip_longest
from math import inf
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.lowlevel

from sampling_async._alerts import alert_in
from sampling_async._forks import forks
from sampling_async._loops import asyncio_loop, runs_here

if sys.platform == "linux":
    import fcntl
    import termios

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Sequence

    from sampling_async._lookups import Addresses

_RECEIVED_AT_ONCE: Final = 2**16
_HEAD_START: Final = 0.25  # seconds until the next address is tried too (RFC 8305, "Happy Eyeballs")
_TCP: Final = frozenset({socket.AF_INET, socket.AF_INET6})
_NUMBER: Final = b"\0\0\0\0"


class TooSlow(Exception):  # noqa: N818  not an error of the system, which TimeoutError would be
    """The peer took nothing, or sent nothing, for as long as was allowed."""


def is_of_the_system(exc: BaseException) -> bool:
    """Return whether an error is one of the system or of TLS.

    A signal handler of the application may raise OSErrors too, TimeoutError for one, but without a number.
    """
    return isinstance(exc, OSError) and exc.errno is not None


class Wire:
    """An open connection. It is closed at once and for good; nothing of it is left to the event loop.

    Dropped unclosed, it closes itself.

    Args:
        sock: The socket.
        opened_within: The seconds until it was open, TLS aside.

    Attributes:
        opened_within: The same.
        close: Closes the connection now; may be called again.
    """

    __slots__ = (
        "__weakref__",
        "_asked",
        "_forks",
        "_is_tcp",
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
        self._asked = 0  # the length of what was sent, until an answer begins
        self._forks = forks.count
        loop = asyncio_loop() if sys.platform != "win32" else None  # whose loop there watches no sockets
        self._waits = None if loop is None else _Reader(loop, sock.fileno())
        # In a table of its own: the event loop, which goes on watching, has to be told before the descriptor
        # is closed, and of two that are collected together nobody says which goes first.
        self.close: Callable[[], object] = weakref.finalize(self, _close, sock, self._waits, forks.count)

    async def send(self, data: bytes, sent: Callable[[bool], None], seconds: float = inf) -> None:
        """Send everything.

        Args:
            data: What to send.
            sent: Told True before bytes may leave, and False again if it turns out that none has.
            seconds: How long to wait at most until the peer takes another part.

        Raises:
            TooSlow: The peer took nothing for so long.
            OSError: The connection is broken.
        """
        self._asked = len(data)
        view = memoryview(data)
        while view:
            self._must_be_of_this_process()
            sent(True)  # not after: a signal handler can raise something between the two
            try:
                view = view[self._sock.send(view) :]
            except OSError as exc:
                if len(view) == len(data) and self._took_nothing(exc):
                    sent(False)
                await self._ready_again(exc, self._writable, seconds)

    def _took_nothing(self, exc: OSError) -> bool:
        """Return whether an error of sending says that no byte was taken: a TLS record can leave in part.

        What a signal handler raises, behind a call that took all, comes from a frame of its own.
        """
        is_ours = exc.__traceback__ is not None and exc.__traceback__.tb_next is None
        return is_ours and self._tls is None and is_of_the_system(exc)

    async def receive(self, seconds: float = inf) -> bytes:
        """Return the next bytes, or none at the end of the connection.

        It gives the event loop a turn in any case: a fast peer must not keep that to itself.

        Raises:
            TooSlow: There were none for so long.
            OSError: The connection is broken, ended without TLS saying so, or what came is no answer to what
                was sent.
        """
        if self._tls and self._tls.pending():
            await anyio.lowlevel.checkpoint()
        else:
            await self._readable(seconds)
        while True:
            self._must_be_of_this_process()
            try:
                data = self._sock.recv(_RECEIVED_AT_ONCE)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as exc:
                await self._ready_again(exc, self._readable, seconds)
            else:
                if self._asked and data:
                    self._must_be_heard()
                return data

    def _must_be_heard(self) -> None:
        """Refuse what cannot be the answer, since the peer's kernel has acknowledged nothing of what was sent.

        Under TLS more bytes than `_asked` went over the wire, some dozens a record. An answer acknowledges a
        whole record at least, and that is longer than all that was added.
        """
        asked, self._asked = self._asked, 0
        if sys.platform == "linux" and self._is_tcp:
            left = fcntl.ioctl(self._sock.fileno(), termios.TIOCOUTQ, _NUMBER)
            if int.from_bytes(left, sys.byteorder) >= asked:
                raise OSError(errno.EPROTO, "what came is no answer: the request had not arrived")

    def _must_be_of_this_process(self) -> None:
        if self._forks != forks.count:
            raise OSError(errno.EBADF, "the connection belongs to the process that this one was forked from")

    async def _ready_again(
        self, exc: OSError, usual: Callable[[float], Awaitable[None]], seconds: float
    ) -> None:
        """Wait for what a call of the socket lacked, or raise again what else went wrong."""
        if isinstance(exc, ssl.SSLWantReadError):
            await self._readable(seconds)
        elif isinstance(exc, ssl.SSLWantWriteError):
            await self._writable(seconds)
        elif isinstance(exc, BlockingIOError):
            await usual(seconds)
        else:
            raise exc

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
        if self._forks != forks.count:
            return False
        try:
            # Below TLS too, which keeps nothing back: what lies there, a record or the end, was not asked for.
            socket.socket.recv(self._sock, 1, socket.MSG_PEEK)
        except OSError as exc:
            if is_of_the_system(exc):
                return isinstance(exc, BlockingIOError)
            raise
        return False

    def is_silent(self) -> bool:
        """Return whether the peer, of a connection just opened, has neither closed nor spoken unasked.

        Tickets, by which TLS sessions are resumed, come unasked and are of no account.

        Raises:
            OSError: What the peer said is why it ends TLS (`ssl.SSLError`).
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

    def must_not_be_refused(self) -> None:
        """Raise the alert by which the peer has ended TLS, where one lies unread behind a failure to send.

        Raises:
            OSError: The alert (`ssl.SSLError`).
        """
        try:
            if self._tls is not None:
                self._tls.recv(1)
        except OSError as exc:
            if not is_of_the_system(exc) or alert_in(exc):
                raise

    def tell_of_news(self, news: Callable[[], object]) -> None:
        """Have a function called when something comes that nobody reads: the end, or what nobody asked for.

        On asyncio, whose event loop goes on watching; elsewhere nobody looks.

        Args:
            news: The function. It lives as long as the event loop watches, so it holds the connection weakly.
        """
        if self._waits is not None:
            self._waits.news = news

    @property
    def session(self) -> ssl.SSLSession | None:
        """What another connection to the same host can go on with, in place of a whole handshake."""
        return None if self._tls is None else self._tls.session

    @property
    def asks_for_who_we_are_later(self) -> bool:
        """Whether the server may ask for our certificate after it has got a request."""
        return self._tls is not None and self._tls.context.post_handshake_auth


class _Reader:
    """Waits on asyncio, for less: the loop goes on watching a socket from one wait to the next."""

    __slots__ = ("_fd", "_future", "_idled", "_loop", "_watched", "news")

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int) -> None:
        self._loop = loop
        self._fd = fd
        self._watched = False
        self._idled = False
        self._future: asyncio.Future[None] | None = None
        self.news: Callable[[], object] = bool  # which does nothing

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
            self.news()
        else:  # the loop looked before what it had told of was read
            self._idled = True

    def _stop(self) -> None:
        self._watched = False
        self._loop.remove_reader(self._fd)

    def close(self, sock: socket.socket, *, is_forked: bool) -> None:
        """Watch no more and close the socket, in this order: the descriptor will mean something else then."""
        if not self._watched or self._loop.is_closed():
            sock.close()
        elif is_forked:  # and what the system watches is still one: closed first, ours is not found in it
            sock.close()
            self._stop()
        elif self._is_elsewhere():
            try:
                self._loop.call_soon_threadsafe(partial(self.close, sock, is_forked=is_forked))
            except RuntimeError:  # it was closed in this moment
                sock.close()
        else:
            self._stop()
            sock.close()

    def _is_elsewhere(self) -> bool:
        """Return whether another thread runs the loop: garbage is collected in any."""
        return self._loop.is_running() and not runs_here(self._loop)


def _close(sock: socket.socket, reader: _Reader | None, made_after: int) -> None:
    if reader is None:
        sock.close()
    else:
        reader.close(sock, is_forked=made_after != forks.count)


def _time_out(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_exception(TooSlow)


async def connect(
    addresses: Addresses,
    host: str,
    tls: ssl.SSLContext | None,
    *,
    through: Callable[[socket.socket], Awaitable[object]] | None = None,
    session: ssl.SSLSession | None = None,
) -> Wire:
    """Open a connection, to whichever address of the host answers first.

    Args:
        addresses: Where to: those of the host, or of the proxy on the way to it.
        host: Whose certificate is accepted.
        tls: How TLS is spoken, or None for plain TCP.
        through: Called with the open socket before TLS begins: it asks a proxy for the way.
        session: One of TLS to go on with, if the server agrees.

    Raises:
        OSError: No address could be connected to, or the TLS handshake failed (`ssl.SSLError`).
    """
    started = time.monotonic()
    sock = await _race(_by_turns(addresses))
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
    """Send everything over a socket that has no connection made of it yet.

    Raises:
        OSError: It is broken.
    """
    view = memoryview(data)
    while view:
        try:
            view = view[sock.send(view) :]
        except BlockingIOError:
            await anyio.wait_writable(sock)


async def received(sock: socket.socket) -> bytes:
    """Return the next bytes of such a socket, or none at its end.

    Raises:
        OSError: It is broken.
    """
    while True:
        await anyio.wait_readable(sock)
        with suppress(BlockingIOError):
            return sock.recv(_RECEIVED_AT_ONCE)


def _under_tls(
    sock: socket.socket, host: str, tls: ssl.SSLContext, session: ssl.SSLSession | None
) -> ssl.SSLSocket:
    try:
        host.encode("idna")  # as ssl does, which loses the socket where that fails
    except UnicodeError as exc:
        raise OSError(errno.EINVAL, "the name of the host cannot be that of a certificate") from exc
    # An end that TLS does not vouch for may be anybody's: it must not look like the end of an answer.
    return tls.wrap_socket(
        sock,
        server_hostname=host,
        do_handshake_on_connect=False,
        suppress_ragged_eofs=False,
        session=session,
    )


def _by_turns(addresses: Addresses) -> Addresses:
    """Alternate between the families, the resolver's first one first, so that a dead family costs one turn."""
    first = addresses[0][0]
    same = [each for each in addresses if each[0] == first]
    other = [each for each in addresses if each[0] != first]
    return [each for each in chain.from_iterable(zip_longest(same, other)) if each is not None]


async def _race(addresses: Addresses) -> socket.socket:
    """Return the first socket that connects; each address gets a head start on the next one."""
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
            if not is_of_the_system(exc):  # but of a signal handler
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
        _raise_of(failures, none_won=not winners)
    except BaseException:
        for sock in winners:
            sock.close()
        raise
    for loser in winners[1:]:
        loser.close()
    return winners[0]


def _raise_of(failures: Sequence[Exception], *, none_won: bool) -> None:
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
