"""A panel matched by several processes of one machine, a piece of it each at a time.

This process is one of them: it matches from the beginning, while the others start, and hands out pieces in
between. They go by shared memory: through a pipe, to write and to read them would cost a good part of what is
gained. Each of the others has one more piece waiting than it works on.
"""

from __future__ import annotations

import os
import pickle
import signal
from collections import deque
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.shared_memory import SharedMemory
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from sampling_async.matching.panel._arrow import pa

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
    from multiprocessing.connection import Connection

Piece: TypeAlias = "tuple[int, Any]"
"""The place in the panel of a batch's first member, and the batch."""

_PIECES: Final = 2
_AHEAD: Final = 8
"""Pieces that each process may be ahead of one that is not done: what comes of them has to be kept."""


class _Worker:
    """A process, the end of the pipe to it, and the pieces it has: the one it works on first."""

    def __init__(self, work: bytes) -> None:
        context = get_context("spawn")  # threads of pyarrow do not survive a fork
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, work), daemon=True)
        with _interrupts_put_off():
            self._process.start()
        theirs.close()
        self._blocks: deque[SharedMemory | None] = deque([None] * _PIECES)
        self.pieces: deque[int] = deque()
        self.is_ready = False
        self._is_told = False

    @property
    def has_room(self) -> bool:
        """Whether it can have one more piece."""
        return self.is_ready and len(self.pieces) < _PIECES

    def give(self, number: int, piece: Piece) -> bool:
        """Have it work on a piece after those it has; return whether it could.

        Where shared memory has no room, a piece goes through the pipe, and to a process that has none only: one
        that is at work does not read, and may be waiting for us to read what it says.
        """
        first, batch = piece
        sink = pa.MockOutputStream()
        _write(sink, batch)
        size = sink.size()
        block = self._blocks.popleft()  # that of a piece which is done
        if block is not None and block.size < size:
            _free(block)
            block = None
        if block is None and _has_room(size):
            block = SharedMemory(create=True, size=size)
        self._blocks.append(block)
        if block is None and self.pieces:
            return False
        self.pieces.append(number)
        if block is None:
            self._send((None, _written(batch), first))
            return True
        assert block.buf is not None  # it is not closed
        with memoryview(block.buf) as view:
            _write(pa.FixedSizeBufferWriter(pa.py_buffer(view)), batch)
        self._send((block.name, size, first))
        return True

    def finish(self) -> None:
        """Tell it, once, that there is nothing left after the pieces it has."""
        if not self._is_told:
            self._is_told = True
            self._send(None)

    def receive(self) -> tuple[str, Any]:
        """Return what it says."""
        try:
            kind, what = self.connection.recv()
        except (EOFError, ConnectionError):
            raise self._ended() from None
        return kind, what

    def _send(self, what: object) -> None:
        try:
            self.connection.send(what)
        except ConnectionError:
            raise self._ended() from None

    def _ended(self) -> ChildProcessError:
        self._process.join()
        return ChildProcessError(
            f"a process that matched the panel ended with exit code {self._process.exitcode}: it may have been"
            " out of memory; or the main module starts one again, for want of `if __name__ == '__main__':`"
        )

    def stop(self) -> None:
        """End it, whatever it does."""
        self._process.terminate()
        self._process.join()
        self._process.close()
        self.connection.close()
        for block in self._blocks:
            if block is not None:
                _free(block)


def _free(block: SharedMemory) -> None:
    block.close()
    block.unlink()


def matched(
    match: Callable[[Iterable[Piece]], Iterator[Any]], pieces: Iterator[Piece], workers: int
) -> Iterator[tuple[bool, Any]]:
    """Yield what comes of pieces, as record batches; first those of the pieces, in their order.

    Args:
        match: What makes record batches of pieces; it is pickled.
        pieces: The panel.
        workers: How many processes, with this one.

    Returns:
        Of each, whether it came after all pieces, and is to be put together with others.
    """
    work = pickle.dumps(match)
    crew = [_Worker(work) for _ in range(workers - 1)]
    try:
        yield from _Lead(crew, pieces).matched(match)
    finally:
        for worker in crew:
            worker.stop()


class _Lead:
    """Divides pieces among a crew and this process."""

    def __init__(self, crew: Sequence[_Worker], pieces: Iterator[Piece]) -> None:
        self._busy: dict[Any, _Worker] = {worker.connection: worker for worker in crew}
        self._pieces = enumerate(pieces)
        self._next = next(self._pieces, None)
        self._most_ahead = _AHEAD * (len(crew) + 1)
        self._done: dict[int, list[Any]] = {}  # what came of pieces, until it is shown
        self._shown = self._all_done = 0  # how many from the first one on
        self._after_all: list[Any] = []

    def matched(self, match: Callable[[Iterable[Piece]], Iterator[Any]]) -> Iterator[tuple[bool, Any]]:
        """Yield what comes of them."""
        self._mine: list[Any] = self._after_all
        for batch in match(self._own()):
            self._mine.append(batch)
            self._hear(0)
            yield from self._in_order()
        while any(worker.is_ready for worker in self._busy.values()):  # others came too late
            self._hear(None)
        yield from self._in_order()
        yield from ((True, batch) for batch in self._after_all)

    def _own(self) -> Iterator[Piece]:
        """Yield pieces for this process, while there are any: others come first."""
        while True:
            self._hear(0)
            while self._is_far_ahead:
                self._hear(None)
            if self._next is None:
                return
            number, piece = self._next
            self._next = next(self._pieces, None)
            self._mine = []
            yield piece
            self._note(number, self._mine)
            self._mine = self._after_all

    def _note(self, number: int, made: list[Any]) -> None:
        """Note what came of a piece."""
        self._done[number] = made
        while self._all_done in self._done:
            self._all_done += 1

    @property
    def _is_far_ahead(self) -> bool:
        return self._next is not None and self._next[0] - self._all_done >= self._most_ahead

    def _hear(self, seconds: float | None) -> None:
        """Take what the crew says, for which it waits so long, and give them what they can have."""
        for connection in wait(list(self._busy), seconds):
            worker = self._busy[connection]
            kind, what = worker.receive()
            if kind == "error":
                raise what
            if kind == "ready":
                worker.is_ready = True
            elif kind == "done":
                self._note(worker.pieces.popleft(), _read(what))
            else:
                self._after_all += _read(what)
                del self._busy[connection]
        for worker in self._busy.values():
            while worker.has_room and self._next is not None and not self._is_far_ahead:
                if not worker.give(*self._next):
                    break
                self._next = next(self._pieces, None)
            if self._next is None and worker.is_ready:
                worker.finish()

    def _in_order(self) -> Iterator[tuple[bool, Any]]:
        while self._shown in self._done:
            yield from ((False, batch) for batch in self._done.pop(self._shown))
            self._shown += 1


def _has_room(size: int) -> bool:
    """Return whether shared memory has room, with some to spare for others; containers often have little."""
    try:
        room = os.statvfs("/dev/shm")  # noqa: S108  where Linux has shared memory
    except (AttributeError, OSError):
        return True  # elsewhere it is not sparse
    return room.f_bavail * room.f_frsize > 2 * size


@contextmanager
def _interrupts_put_off() -> Generator[None]:
    """Start a process that Ctrl-C does not reach before it can pass it over."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _write(sink: Any, *batches: Any) -> None:
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def _written(*batches: Any) -> bytes:
    if not batches:
        return b""
    sink = pa.BufferOutputStream()
    _write(sink, *batches)
    written: bytes = sink.getvalue().to_pybytes()
    return written


def _read(written: bytes) -> list[Any]:
    return list(pa.ipc.open_stream(written)) if written else []


def _work(connection: Connection, work: bytes) -> None:
    """Do what a worker does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us

    made: list[Any] = []

    def say(kind: str) -> None:
        connection.send((kind, _written(*made)))
        made.clear()

    def pieces() -> Iterator[Piece]:
        say("ready")
        while True:
            given = connection.recv()
            if given is None:
                return
            name, body, first = given
            if name is not None:
                memory = SharedMemory(name)
                # A copy, because the block is written again while a batch may still be looked at.
                assert memory.buf is not None  # it is not closed
                body = bytes(memory.buf[:body])
                memory.close()
            yield first, pa.ipc.open_stream(pa.py_buffer(body)).read_next_batch()
            say("done")

    try:
        for batch in pickle.loads(work)(pieces()):  # noqa: S301  from our own parent
            made.append(batch)  # noqa: PERF402  it is emptied in between
        say("end")
    except (EOFError, BrokenPipeError):
        return  # the parent is gone
    except Exception as exc:  # noqa: BLE001  told to the parent, who raises it
        connection.send(("error", exc))
