"""Matching of a panel by several processes of one machine, which take it piece by piece.

This process matches too: it begins while the others start, and hands out pieces between its own. A piece is
sent as a file mapped into memory, in a memory file system if there is one: to send it through a pipe would cost
a good part of the time gained. Each worker has one piece to work on and one waiting. The workers end with the
run, unless `Workers` keeps them for the next run. A worker keeps its matcher and its files: to send the one and
to write the others for the first time costs as much as some pieces.
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
from weakref import WeakMethod, ref

from sampling_async._contract.checks import whole_number
from sampling_async._contract.errors import InvalidRequestError
from sampling_async.matching.panel._arrow import pa

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
    from multiprocessing.connection import Connection

Piece: TypeAlias = "tuple[int, Any]"
"""The place in the panel of a batch's first member, and the batch."""

Matches: TypeAlias = "Callable[[Iterable[Piece]], Iterator[Any]]"
"""A method that makes record batches from pieces."""

_Work: TypeAlias = "tuple[WeakMethod[Matches], ref[object]]"
"""What a worker matches with: the method, and the plan that it was sent with."""

_WORK: Final = "work"
_IN_MEMORY: Final = "/dev/shm"  # noqa: S108  the memory file system of Linux
_WORTH: Final = 5
"""The fewest pieces for which workers are started: this process matches fewer before a worker is ready."""

_PIECES: Final = 2
_AHEAD: Final = 4
"""Pieces for each process that may be ahead of the first unfinished piece; their output is kept in memory."""


class _File:
    """A file for one piece at a time, reused: to overwrite a piece is twice as fast as to write a new file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mapped: Any = None

    def write(self, batch: Any) -> None:
        """Write a piece over the previous one, which must not be in use any more."""
        # Measure the size first, by writing to nowhere.
        size = pa.MockOutputStream()
        _write(size, [batch])
        if self._mapped is not None and self._mapped.size() >= size.size():
            self._mapped.seek(0)
            _write(self._mapped, [batch])
            return
        if self._mapped is not None:
            self.close()
            # A worker may still have it mapped: unlink it, do not change its size.
            self.path.unlink()
        # If there is no space left, this write raises an error. A write to mapped memory would kill the
        # process.
        with pa.OSFile(str(self.path), "wb") as file:
            _write(file, [batch])
        self._mapped = pa.memory_map(str(self.path), "r+")

    @property
    def is_gone(self) -> bool:
        """Whether the file was written, and somebody has removed it."""
        return self._mapped is not None and not self.path.exists()

    def close(self) -> None:
        """Unmap the file."""
        if self._mapped is not None:
            self._mapped.close()


class _Worker:
    """A worker process, seen from this one.

    Attributes:
        connection: This process's end of the pipe.
        pieces: The numbers of the pieces that the worker has; it works on the first one.
        work: What it matches with, since it was sent; kept when the run has ended.
        is_free: Whether the worker takes part in no run.
        is_ready: Whether the worker can take pieces of the current run.
    """

    def __init__(self) -> None:
        # Not "fork": the threads of pyarrow do not survive a fork.
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs,), daemon=True)
        with _interrupts_put_off():
            self._process.start()
        # Close our copy of the worker's end: otherwise `recv` would not raise EOFError when the worker ends.
        theirs.close()
        self._folder: TemporaryDirectory[str] | None = None
        self._size = 0  # of the pieces that the folder was made for
        self._files: deque[_File] = deque()
        self.pieces: deque[int] = deque()
        self.work: _Work | None = None
        self.is_free = True
        self.is_ready = self._is_told = False

    @property
    def is_alive(self) -> bool:
        """Whether the process is running."""
        return self._process.is_alive()

    def join(self, size: int, workers: int) -> None:
        """Make the worker take part in a run.

        Args:
            size: The bytes of a piece.
            workers: How many workers take part.
        """
        self.is_free = False
        # Programs that clean up temporary files may have removed ours, if a day has passed since the last run.
        if self._folder is None or size > self._size or self._is_incomplete(self._folder):
            self._remove_folder()
            place = _place(_PIECES * workers * size)
            # Each worker has a folder of its own, because it may be kept longer than the others.
            folder = TemporaryDirectory(prefix="sampling-async-", dir=place, ignore_cleanup_errors=True)
            self._folder, self._size = folder, size
            self._files.extend(_File(Path(folder.name, str(at))) for at in range(_PIECES))
        self._send(Path(self._folder.name))

    def _is_incomplete(self, folder: TemporaryDirectory[str]) -> bool:
        return not Path(folder.name).is_dir() or any(file.is_gone for file in self._files)

    @property
    def work_file(self) -> Path:
        """Where the work may be written for a run in which the worker takes part."""
        assert self._folder is not None
        return Path(self._folder.name, _WORK)

    def begin(self, work: _Work, written: Path | None) -> None:
        """Tell the worker what it matches with, and the file from which to read it, if it does not have it."""
        self._send(written)
        self.work = work
        # One that has the work takes pieces at once, while this process matches its first one.
        self.is_ready = written is None

    @property
    def has_room(self) -> bool:
        """Whether the worker can take one more piece."""
        return self.is_ready and len(self.pieces) < _PIECES

    def give(self, number: int, piece: Piece) -> None:
        """Send the worker a piece, which it matches after those it has."""
        first, batch = piece
        # There are as many files as pieces at a time, used in turn: the first is that of a finished piece.
        file = self._files[0]
        self._files.rotate(-1)
        file.write(batch)
        self._send((file.path, first))
        self.pieces.append(number)

    def finish(self) -> None:
        """Notify the worker, once, that no more pieces follow those it has."""
        if not self._is_told:
            self._is_told = True
            self._send(None)

    def receive(self) -> tuple[str, Any]:
        """Return the worker's next message: its kind and its content.

        Raises:
            ChildProcessError: The process ended.
        """
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
            f"a process that matched the panel ended with exit code {self._process.exitcode}: it may have run "
            "out of memory; or the main module has no `if __name__ == '__main__':` and starts workers again"
        )

    def leave(self) -> None:
        """Release the worker from a run, after its last message."""
        self.is_ready = self._is_told = False
        self.is_free = True  # last: a signal handler may raise before

    def stop(self) -> None:
        """Kill the process, in whatever state it is, and release its resources."""
        # SIGKILL, because a process can ignore SIGTERM, and a stopped one does not react to it.
        self._process.kill()
        self._process.join()
        self.connection.close()
        self._remove_folder()

    def _remove_folder(self) -> None:
        while self._files:
            self._files.pop().close()
        if self._folder is not None:
            self._folder.cleanup()


class Workers:
    """Processes that match panels, kept for several runs: to start them takes half a second each time.

        matcher = PanelMatcher(index, TopK(20))
        with Workers(8) as workers:
            for panel in panels:
                best = matcher.run(panel, workers=workers).read_all()

    They keep the matcher of their last run too, so it is best to use one `PanelMatcher` for all panels of an
    inventory. (An `Allocate` makes two of its own for each run.) Each keeps two files besides, as large as a
    piece, in memory if there is room.

    A run starts the processes that are missing if the panel is large enough: at least five pieces of 32,768
    members, and at least one piece for each process. At its end, a run waits for processes that started too
    late to match, so that the next run can use them. The processes end with the `with` block. They end earlier
    if a run fails, or if its result is not read to its end. Several threads may share the workers: a run that
    finds them busy starts others, and the surplus processes end after the run. Without a `with` block,
    `Workers(8)` is the same as the number 8.

    Args:
        count: How many processes match a panel, including the one that runs it.

    Attributes:
        count: As given.

    Raises:
        InvalidRequestError: `count` is not a whole number from 1 on.
    """

    def __init__(self, count: int) -> None:
        self.count = whole_number(count, "workers")
        # Reentrant: the garbage collector may close an unread run, and so take the lock, in a thread that holds
        # it.
        self._lock = RLock()
        self._is_open = False
        self._idle: list[_Worker] = []

    def __enter__(self) -> Self:
        if self._is_open:
            raise InvalidRequestError("these workers are kept already; use one `with` block for all runs")
        self._is_open = True
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._is_open = False
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.stop()

    def _matched(
        self, match: Matches, pieces: Iterator[Piece], planned: Callable[[Any], object]
    ) -> Iterator[tuple[bool, Any]]:
        # Read some pieces to see whether the panel is large enough, and match here if it is not.
        worth = max(self.count, _WORTH)
        begun = list(islice(pieces, worth)) if self.count > 1 else []
        pieces = chain(begun, pieces)
        if len(begun) < worth:
            yield from ((False, batch) for batch in match(pieces))
            return
        batch = begun[0][1]
        with self._taking_part(batch.nbytes) as crew:
            work = WeakMethod(match), ref(planned(batch))
            # Free these pieces as soon as they are matched: they are large.
            del batch, begun
            new = [worker for worker in crew if worker.work != work]
            if new:
                new[0].work_file.write_bytes(pickle.dumps(match))
            for worker in crew:
                worker.begin(work, new[0].work_file if worker in new else None)
            try:
                yield from _Lead(crew, pieces).matched(match, self._has_room)
            finally:
                if new:
                    new[0].work_file.unlink(missing_ok=True)

    @contextmanager
    def _taking_part(self, size: int) -> Generator[Sequence[_Worker]]:
        """Make processes take part in a run; at its end, stop those that are not free or not kept.

        Args:
            size: The bytes of a piece.
        """
        crew: list[_Worker] = []
        try:
            for _ in range(self.count - 1):
                crew.append(self._idle_one() or _Worker())
                crew[-1].join(size, self.count - 1)
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
        """Return whether one more idle process is kept."""
        return self._is_open and len(self._idle) < self.count - 1


def matched_by(
    workers: Workers, match: Matches, pieces: Iterator[Piece], planned: Callable[[Any], object]
) -> Iterator[tuple[bool, Any]]:
    """Yield the output of a panel as record batches, in the order of its pieces, for `PanelMatcher.run`.

    Args:
        workers: The processes that match.
        match: A method that makes record batches from pieces. Its object is pickled, with the plan.
        pieces: The panel; if there are few pieces, this process matches them alone.
        planned: Returns the plan that the object of `match` has for batches like the given one. It is called
            while the other processes start.

    Returns:
        For each record batch, whether it came after all pieces and must be merged with others; and the batch.
    """
    return workers._matched(match, pieces, planned)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


class _Lead:
    """Divides pieces among a crew and this process."""

    def __init__(self, crew: Sequence[_Worker], pieces: Iterator[Piece]) -> None:
        self._busy: dict[Any, _Worker] = {worker.connection: worker for worker in crew}
        self._pieces = enumerate(pieces)
        self._next = next(self._pieces, None)
        self._most_ahead = _AHEAD * (len(crew) + 1)
        # The output of finished pieces, by number, until it is yielded.
        self._done: dict[int, list[Any]] = {}
        # How many pieces from the first one on have been yielded, and are finished.
        self._shown = self._all_done = 0
        self._after_all: list[Any] = []
        # The list for this process's next output: that of its current piece or, after all pieces, the last one.
        self._mine = self._after_all

    def matched(self, match: Matches, waits: Callable[[], bool]) -> Iterator[tuple[bool, Any]]:
        """Yield the output of all pieces; see `matched_by`.

        Args:
            match: Makes record batches from pieces.
            waits: Whether to wait for processes that started too late, to keep them for the next run.
        """
        for batch in match(self._own()):
            self._mine.append(batch)
            self._receive_messages(0)
            yield from self._in_order()
        while any(worker.is_ready or waits() for worker in self._busy.values()):
            self._receive_messages(None)
        yield from self._in_order()
        yield from ((True, batch) for batch in self._after_all)

    def _own(self) -> Iterator[Piece]:
        """Yield pieces for this process while there are any; the workers are given theirs first."""
        while True:
            self._receive_messages(0)
            while self._is_far_ahead:
                self._receive_messages(None)
            if self._next is None:
                return
            number, piece = self._next
            self._next = next(self._pieces, None)
            self._mine = []
            yield piece
            # `match` asks for the next piece only after it has yielded all the output of this one.
            self._note(number, self._mine)
            self._mine = self._after_all

    def _note(self, number: int, made: list[Any]) -> None:
        """Store the output of a finished piece."""
        self._done[number] = made
        while self._all_done in self._done:
            self._all_done += 1

    @property
    def _is_far_ahead(self) -> bool:
        return self._next is not None and self._next[0] - self._all_done >= self._most_ahead

    def _receive_messages(self, seconds: float | None) -> None:
        """Receive the workers' messages, and give them as many pieces as they can take.

        Args:
            seconds: How long to wait for a message; None waits until there is one.
        """
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
    """Return a folder in memory, or None if less than twice the room is free, as often in containers."""
    try:
        memory = os.statvfs(_IN_MEMORY)
    except (AttributeError, OSError):
        return None
    return _IN_MEMORY if memory.f_bavail * memory.f_frsize > 2 * room else None


@contextmanager
def _interrupts_put_off() -> Generator[None]:
    """Block Ctrl-C while a process starts, so that it cannot be interrupted before it ignores the signal."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # Start the resource tracker before: its start unblocks the signal.
    resource_tracker.ensure_running()
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
    """Run a worker: take part in runs until the parent kills this process, or the parent is gone."""
    # On Ctrl-C, the parent kills this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder = None
    held: list[Matches] = []
    # These errors mean that the parent is gone.
    with suppress(EOFError, ConnectionError):
        try:
            while True:
                folder = connection.recv()
                _take_part(connection, held)
        except Exception as exc:  # noqa: BLE001  sent to the parent, which raises it and kills this process
            connection.send(("error", _sendable(exc)))
            while True:
                connection.recv()
    if folder is not None:
        # A parent that was killed has not removed it.
        rmtree(folder, ignore_errors=True)


def _sendable(exc: Exception) -> Exception:
    """Return the exception, or a RuntimeError with its type and text if it does not survive pickling."""
    try:
        # Some exceptions can be pickled but not be read again: their class needs other arguments.
        again = pickle.loads(pickle.dumps(exc))  # noqa: S301  made here
    except Exception:  # noqa: BLE001  any of them: classes may define how they are pickled
        again = None
    if type(again) is type(exc):
        return exc
    return RuntimeError(f"a process that matched the panel failed: {type(exc).__name__}: {exc}")


def _take_part(connection: Connection, held: list[Matches]) -> None:
    """Take part in a run with the matcher that is held, or with another one that is sent and held then."""
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
            # `match` has yielded all the output of this piece, so the parent may overwrite the file.
            say("done")

    written = connection.recv()
    if written is not None:
        held.clear()  # before the next one is read: with its rows it is large
        held.append(pickle.loads(written.read_bytes()))  # noqa: S301  from our own parent
    for batch in held[0](pieces()):
        made.append(batch)  # noqa: PERF402  `say` empties it in between
    say("end")
