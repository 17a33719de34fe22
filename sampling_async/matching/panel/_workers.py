"""A panel matched by several processes of one machine, a piece of it each at a time.

This process is one of them: it matches from the beginning, while the others start, and hands out pieces in
between. They go by files that are mapped into memory, and are in memory where the system has a place for that:
through a pipe, to write and to read them would cost a good part of what is gained. Each of the others has one
more piece waiting than it works on. They end with the run, unless `Workers` keeps them for the next.
"""

from __future__ import annotations

import os
import pickle
import signal
from collections import deque
from contextlib import contextmanager, suppress
from itertools import chain, islice
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from threading import RLock
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

from sampling_async._errors import InvalidRequestError
from sampling_async.matching.panel._arrow import pa

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
    from multiprocessing.connection import Connection

Piece: TypeAlias = "tuple[int, Any]"
"""The place in the panel of a batch's first member, and the batch."""

Matches: TypeAlias = "Callable[[Iterable[Piece]], Iterator[Any]]"
"""Makes record batches of pieces."""

_WORK: Final = "work"
_IN_MEMORY: Final = "/dev/shm"  # noqa: S108  there Linux has files that are in memory
_WORTH: Final = 5
"""Pieces that a panel needs for others to match: fewer are done before one has read what it has to do."""

_PIECES: Final = 2
_AHEAD: Final = 4
"""Pieces that each process may be ahead of one that is not done: what comes of them has to be kept."""


class _File:
    """A file for pieces, one after the other: to write where one was is twice as fast as to write anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mapped: Any = None

    def write(self, batch: Any) -> None:
        """Write a piece over the one before, which must be done with."""
        size = pa.MockOutputStream()
        _write(size, [batch])
        if self._mapped is not None and self._mapped.size() >= size.size():
            self._mapped.seek(0)
            _write(self._mapped, [batch])
            return
        if self._mapped is not None:
            self.close()
            self.path.unlink()  # it may be mapped elsewhere
        # To write it so fails where there is no room; to write what is mapped would end the process.
        with pa.OSFile(str(self.path), "wb") as file:
            _write(file, [batch])
        self._mapped = pa.memory_map(str(self.path), "r+")

    def close(self) -> None:
        """Unmap it."""
        if self._mapped is not None:
            self._mapped.close()


class _Worker:
    """A process, the end of the pipe to it, and the pieces it has: the one it works on first."""

    def __init__(self) -> None:
        context = get_context("spawn")  # threads of pyarrow do not survive a fork
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs,), daemon=True)
        with _interrupts_put_off():
            self._process.start()
        theirs.close()
        self._files: deque[_File] = deque()
        self.pieces: deque[int] = deque()
        self.is_free = True  # takes part in no run
        self.is_ready = self._is_told = False

    @property
    def is_alive(self) -> bool:
        """Whether the process is there."""
        return self._process.is_alive()

    def join(self, folder: Path, name: str) -> None:
        """Have it take part in a run, whose files are in a folder."""
        self.is_free = False
        self._files.extend(_File(folder / f"{name}-{at}") for at in range(_PIECES))
        self._send(folder)

    def begin(self) -> None:
        """Tell it that what it has to do is written down; to start takes it longer."""
        self._send(None)

    @property
    def has_room(self) -> bool:
        """Whether it can have one more piece."""
        return self.is_ready and len(self.pieces) < _PIECES

    def give(self, number: int, piece: Piece) -> None:
        """Have it work on a piece after those it has."""
        first, batch = piece
        file = self._files[0]  # that of a piece which is done
        self._files.rotate(-1)
        file.write(batch)
        self._send((file.path, first))
        self.pieces.append(number)

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

    def leave(self) -> None:
        """Have done with a run, of which it has said all that it had to say."""
        self.is_free = True
        self.is_ready = self._is_told = False
        while self._files:
            self._files.pop().close()

    def stop(self) -> None:
        """End it, whatever it does."""
        self._process.kill()  # SIGTERM may be ignored, or come to one that is stopped
        self._process.join()
        self.connection.close()
        self.leave()


class Workers:
    """Processes that match panels, kept from one run to the next: to start them takes half a second each time.

        with Workers(8) as workers:
            counts = PanelMatcher(index).run(panel, workers=workers).read_all()
            best = PanelMatcher(index, TopK(20)).run(panel, workers=workers).read_all()

    A run that is worth it, from a piece of 32,768 members for each and five pieces on, starts those that are
    not there. At its end it waits for those that came too late to match, so that the next one has them. They
    end with the block, and before it with a run that fails or whose result is not read to its end. Several
    threads may use them: a run that finds them at work starts others, and those that are too many then end.
    Without a block they are as a number.

    Args:
        count: How many match a panel, with the process that runs it.

    Raises:
        InvalidRequestError: That is no number, or none from 1 on.
    """

    def __init__(self, count: int) -> None:
        if not isinstance(count, int) or count < 1:
            raise InvalidRequestError(f"workers is a number of processes from 1 on, not {count!r}")
        self.count = count
        self._lock = RLock()  # the end of a run may come with a garbage collection, wherever that falls due
        self._is_open = False
        self._idle: list[_Worker] = []

    def __enter__(self) -> Self:
        if self._is_open:
            raise InvalidRequestError("these workers are kept already: one `with` block, for all runs")
        self._is_open = True
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._is_open = False
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.stop()

    def matched(
        self, match: Matches, pieces: Iterator[Piece], ready: Callable[[Any], object]
    ) -> Iterator[tuple[bool, Any]]:
        """Yield what comes of a panel, as record batches, for `PanelMatcher.run`; pieces in their order.

        Args:
            match: What makes record batches of pieces; it is pickled.
            pieces: The panel; where it is of few, they are matched by this process alone.
            ready: Called with a batch of it before `match` is pickled, while other processes start.

        Returns:
            Of each, whether it came after all pieces, and is to be put together with others.
        """
        worth = max(self.count, _WORTH)
        begun = list(islice(pieces, worth)) if self.count > 1 else []
        pieces = chain(begun, pieces)
        if len(begun) < worth:
            yield from ((False, batch) for batch in match(pieces))
            return
        batch = begun[0][1]
        room = _PIECES * (self.count - 1) * batch.nbytes
        with (
            TemporaryDirectory(prefix="sampling-async-", dir=_place(room), ignore_cleanup_errors=True) as name,
            self._taking_part(Path(name)) as crew,
        ):
            ready(batch)
            del batch, begun  # they are large
            Path(name, _WORK).write_bytes(pickle.dumps(match))
            for worker in crew:
                worker.begin()
            yield from _Lead(crew, pieces).matched(match, self._has_room)

    @contextmanager
    def _taking_part(self, folder: Path) -> Generator[Sequence[_Worker]]:
        """Have processes take part in a run, as many as there are to be; those that are not done then end."""
        crew: list[_Worker] = []
        try:
            for number in range(self.count - 1):
                crew.append(self._idle_one() or _Worker())
                crew[-1].join(folder, str(number))
            yield crew
        finally:
            for worker in crew:
                if not (worker.is_free and self._keeps(worker)):
                    worker.stop()

    def _idle_one(self) -> _Worker | None:
        while True:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            if worker is None or worker.is_alive:
                return worker
            worker.stop()

    def _keeps(self, worker: _Worker) -> bool:
        with self._lock:
            keeps = self._has_room()
            if keeps:
                self._idle.append(worker)
            return keeps

    def _has_room(self) -> bool:
        """Return whether one more is kept."""
        return self._is_open and len(self._idle) < self.count - 1


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
        self._mine = self._after_all  # where what this process makes belongs to

    def matched(self, match: Matches, waits: Callable[[], bool]) -> Iterator[tuple[bool, Any]]:
        """Yield what comes of them.

        Args:
            match: What makes record batches of pieces.
            waits: Whether processes that came too late are waited for, for the next run to have them.
        """
        for batch in match(self._own()):
            self._mine.append(batch)
            self._hear(0)
            yield from self._in_order()
        while any(worker.is_ready or waits() for worker in self._busy.values()):
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
                self._busy.pop(connection).leave()
        for worker in self._busy.values():
            while worker.has_room and self._next is not None and not self._is_far_ahead:
                worker.give(*self._next)
                self._next = next(self._pieces, None)
            if self._next is None and worker.is_ready:
                worker.finish()

    def _in_order(self) -> Iterator[tuple[bool, Any]]:
        while self._shown in self._done:
            yield from ((False, batch) for batch in self._done.pop(self._shown))
            self._shown += 1


def _place(room: int) -> str | None:
    """Return where files are to be: in memory, if it has room to spare, which it often lacks in containers."""
    try:
        memory = os.statvfs(_IN_MEMORY)
    except (AttributeError, OSError):
        return None
    return _IN_MEMORY if memory.f_bavail * memory.f_frsize > 2 * room else None


@contextmanager
def _interrupts_put_off() -> Generator[None]:
    """Start a process that Ctrl-C does not reach before it can pass it over."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # to start it lets interrupts through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _write(sink: Any, batches: Sequence[Any]) -> None:
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def _written(batches: Sequence[Any]) -> bytes:
    if not batches:
        return b""
    sink = pa.BufferOutputStream()
    _write(sink, batches)
    written: bytes = sink.getvalue().to_pybytes()
    return written


def _read(written: bytes) -> list[Any]:
    return list(pa.ipc.open_stream(written)) if written else []


def _work(connection: Connection) -> None:
    """Do what a worker does: take part in runs until it is ended, or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    folder = None
    with suppress(EOFError, ConnectionError):  # the parent is gone
        try:
            while True:
                folder = connection.recv()
                _take_part(connection, folder)
        except Exception as exc:  # noqa: BLE001  told to the parent, who raises it, and ends us
            connection.send(("error", exc))
            while True:
                connection.recv()
    if folder is not None:
        rmtree(folder, ignore_errors=True)  # it may not have tidied up


def _take_part(connection: Connection, folder: Path) -> None:
    made: list[Any] = []

    def say(kind: str) -> None:
        connection.send((kind, _written(made)))
        made.clear()

    def pieces() -> Iterator[Piece]:
        say("ready")
        while True:
            given = connection.recv()
            if given is None:
                return
            path, first = given
            yield first, pa.ipc.open_stream(pa.memory_map(str(path))).read_next_batch()
            say("done")  # all that came of it is written by now: the file may be written again

    connection.recv()
    for batch in pickle.loads((folder / _WORK).read_bytes())(pieces()):  # noqa: S301  from our own parent
        made.append(batch)  # noqa: PERF402  it is emptied in between
    say("end")
