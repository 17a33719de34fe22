"""A panel matched by several processes of one machine, a piece of it each at a time.

Pieces go by shared memory: through a pipe, to write and to read them would cost a good part of what is gained.
Each process has one more piece waiting than it works on, which is written while all of them are busy.
"""

from __future__ import annotations

import os
import pickle
import signal
from collections import defaultdict, deque
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.shared_memory import SharedMemory
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from sampling_async.matching.panel._arrow import pa

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator
    from multiprocessing.connection import Connection

Piece: TypeAlias = "tuple[int, Any]"
"""The place in the panel of a batch's first member, and the batch."""

_AFTER_ALL: Final = -1
_PIECES: Final = 2


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
        self._is_told = False

    def give(self, number: int, piece: Piece) -> bool:
        """Have it work on a piece after those it has, which are fewer than `_PIECES`; return whether it could.

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
            through_pipe = pa.BufferOutputStream()
            _write(through_pipe, batch)
            self._send((None, through_pipe.getvalue().to_pybytes(), first))
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
        workers: How many processes.

    Returns:
        Of each, whether it came after all pieces, and is to be put together with others.
    """
    work = pickle.dumps(match)
    crew = [_Worker(work) for _ in range(workers)]
    try:
        yield from _led(crew, enumerate(pieces))
    finally:
        for worker in crew:
            worker.stop()


def _led(crew: list[_Worker], pieces: Iterator[tuple[int, Piece]]) -> Iterator[tuple[bool, Any]]:
    made: defaultdict[int, list[Any]] = defaultdict(list)
    done: set[int] = set()
    shown = 0
    upcoming = next(pieces, None)

    def give(worker: _Worker) -> None:
        nonlocal upcoming
        if upcoming is None:
            worker.finish()
        elif worker.give(*upcoming):
            upcoming = next(pieces, None)

    for worker in crew * _PIECES:
        give(worker)
    busy = {worker.connection: worker for worker in crew}
    while busy:
        for connection in wait(list(busy)):
            worker = busy[connection]  # type: ignore[index]
            kind = _take(worker, made)
            if kind == "end":
                del busy[worker.connection]
            elif kind == "done":
                done.add(worker.pieces.popleft())
                give(worker)
        while shown in done:
            yield from ((False, batch) for batch in made.pop(shown, ()))
            shown += 1
    yield from ((True, batch) for batch in made[_AFTER_ALL])


def _take(worker: _Worker, made: dict[int, list[Any]]) -> str:
    """Take what a worker says next, and return of which kind it was."""
    kind, what = worker.receive()
    if kind == "error":
        raise what
    if kind == "made":
        with pa.ipc.open_stream(what) as reader:
            made[worker.pieces[0] if worker.pieces else _AFTER_ALL].extend(reader)
    return kind


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


def _write(sink: Any, batch: Any) -> None:
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)


def _work(connection: Connection, work: bytes) -> None:
    """Do what a worker does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us

    def pieces() -> Iterator[Piece]:
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
            connection.send(("done", None))

    try:
        for batch in pickle.loads(work)(pieces()):  # noqa: S301  from our own parent
            sink = pa.BufferOutputStream()
            _write(sink, batch)
            connection.send(("made", sink.getvalue().to_pybytes()))
        connection.send(("end", None))
    except (EOFError, BrokenPipeError):
        return  # the parent is gone
    except Exception as exc:  # noqa: BLE001  told to the parent, who raises it
        connection.send(("error", exc))
