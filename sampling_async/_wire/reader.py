"""Wait until a socket can be read, on asyncio, at less cost than the event loop's own way."""

from __future__ import annotations

from contextvars import Context
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Final

from sampling_async._pacing.loops import runs_here

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Callable

_TICK: Final = 0.001  # seconds; a wait for a response may end this much too early


class TooSlow(Exception):  # noqa: N818  not an OSError, which TimeoutError would be
    """The peer accepted or sent no bytes within the time limit."""


class SocketReader:
    """A faster `wait_readable` for asyncio: the event loop watches the socket all the time.

    To add and remove the socket for each wait would cost two system calls. This is done only on loops that are
    not asyncio's own, and only within a response: uvloop reports a broken connection only once, perhaps
    together with earlier bytes, and must be asked again.
    """

    __slots__ = (
        "_deadline",
        "_fd",
        "_future",
        "_idled",
        "_is_foreign",
        "_loop",
        "_rings_at",
        "_timer",
        "_watched",
        "notify",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int) -> None:
        import asyncio  # noqa: PLC0415  it is loaded: there is a loop

        self._loop = loop
        self._is_foreign = not isinstance(loop, asyncio.SelectorEventLoop)
        self._fd = fd
        self._watched = False
        self._idled = False
        self._future: asyncio.Future[None] | None = None
        self._deadline = inf  # of the wait
        self._timer: asyncio.Handle | None = None
        self._rings_at = inf  # no later than the deadline; uvloop's timers do not always say
        # called when bytes, or the end, arrive and no task is reading
        self.notify: Callable[[], object] = bool  # no effect

    def readable(self, seconds: float, *, again: bool) -> asyncio.Future[None]:
        """Return a future that is done when there are bytes to read, or the end; it may raise `TooSlow`.

        With `again`, bytes may have been read since the connection was last found unbroken.
        """
        future = self._future = self._loop.create_future()
        self._idled = False
        if again and self._watched and self._is_foreign:
            self._stop()
        if not self._watched:
            self._watch()
        self._deadline = inf if seconds == inf else self._loop.time() + seconds
        # One timer serves many waits. It is not cancelled at the end of a wait, which would cost as much as the
        # wait itself; it looks at the deadline of the wait that it finds.
        if self._deadline < self._rings_at:
            self._set_timer()
        return future

    def _set_timer(self) -> None:
        self._stop_timer()
        self._timer = self._loop.call_at(self._deadline, self._look_at_time, context=Context())
        self._rings_at = self._deadline

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._rings_at = None, inf

    def _look_at_time(self) -> None:
        self._timer, self._rings_at = None, inf
        if self._future is None or self._future.done():
            return
        # The timer fires up to one tick of the clock early.
        if self._deadline - self._loop.time() <= _TICK:
            self._future.set_exception(TooSlow)
        else:
            self._set_timer()

    def _notify(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)
        elif self._idled:
            # Nobody reads these bytes. Stop watching, or the loop spins: it would call this in each round.
            self._stop()
            self.notify()
        else:
            # The first call without a reader may be late: the loop looked before the task read the bytes.
            self._idled = True
            if self._is_foreign:  # it reports a broken connection once, unless it is asked again
                self._stop()
                self._watch()

    def _watch(self) -> None:
        # In a context of its own: that of the task may hold the data of a request, and outlive it here.
        Context().run(self._loop.add_reader, self._fd, self._notify)
        self._watched = True

    def _stop(self) -> None:
        self._watched = False
        self._loop.remove_reader(self._fd)

    def close(self, sock: socket.socket, *, is_forked: bool) -> None:
        """Stop watching, then close the socket: after that, its descriptor may belong to another file."""
        if not self._watched or self._loop.is_closed():
            sock.close()
        elif is_forked:
            # The other order in the child of a fork, which shares the system's list of watched sockets with its
            # parent. Closed first, our socket is no longer found there, and the parent's entry stays.
            sock.close()
            self._stop()
        elif self._is_elsewhere():
            try:
                self._loop.call_soon_threadsafe(partial(self.close, sock, is_forked=False))
            except RuntimeError:  # the loop was closed a moment ago
                sock.close()
        else:
            self._stop()
            self._stop_timer()
            sock.close()

    def _is_elsewhere(self) -> bool:
        """Return whether another thread runs the loop. Garbage collection may call `close` in any thread."""
        return self._loop.is_running() and not runs_here(self._loop)
