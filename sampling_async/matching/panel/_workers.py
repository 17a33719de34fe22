"""Matching of a panel by several processes of one machine, which take it piece by piece.

This process matches too: it begins while the others start. Each process has a separate executor, because its
counts are fetched from it at the end. Pieces and outputs pass through files: a pipe would cost more time, and a
process that dies could leave half a message in it.
"""

from __future__ import annotations

import os
import pickle
import signal
from collections import deque
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import chain, islice
from multiprocessing import current_process, get_context, parent_process
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TypeAlias
from weakref import ref

from sampling_async import InvalidRequestError
from sampling_async._contract.checks import whole_number
from sampling_async.matching.panel._arrow import pa

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
    from multiprocessing.process import BaseProcess

Piece: TypeAlias = "tuple[int, Any]"
"""The place in the panel of a batch's first member, and the batch."""

_Output: TypeAlias = "list[Any] | Future[Path | None]"
"""Record batches that were made here; or the file of those that another process makes, or None for none."""

_WORTH: Final = 5
"""The fewest pieces for which workers are started: this process matches fewer before a worker is ready."""

_AHEAD: Final = 4
"""Pieces for each process that may be ahead of the first unfinished piece; their output is kept."""

_PIECES: Final = 2  # pieces that a worker has at a time: one to match, and one that waits

_IN_MEMORY: Final = "/dev/shm"  # noqa: S108  the memory file system of Linux
_ROOM: Final = 50
_MATCHER: Final = "matcher"


class Share(Protocol):
    """What one process matches of a panel."""

    def add(self, first: int, batch: Any) -> Iterator[Any]:
        """Yield the output of a piece, as record batches."""
        ...

    def end(self) -> Any:
        """Return the output of all its pieces, which must be merged with that of other processes; or None."""
        ...


class Workers:
    """Processes that match panels, kept for several runs: to start them takes half a second each time.

        matcher = PanelMatcher(index, TopK(20))
        with Workers(8) as workers:
            for panel in panels:
                best = matcher.run(panel, workers=workers).read_all()

    They keep the matcher of their last run too, so it is best to use one `PanelMatcher` for all panels of an
    inventory. (An `Allocate` makes two more for each run.) A panel that is a stream is read ahead by a few
    pieces for each process.

    A run starts the processes that are missing if the panel is large enough: at least five pieces of 32,768
    members, and at least one piece for each process. At its end, it waits for processes that started too late
    to match: the next run can use them. The processes end with the `with` block; earlier if a run fails, or if
    its result is not read to its end. Several threads may share the workers: a run that finds them busy starts
    others, and the surplus processes end after the run. Without a `with` block, `Workers(8)` is the same as the
    number 8.

    Args:
        count: How many processes match a panel, including the one that runs it.

    Attributes:
        count: As given.

    Raises:
        InvalidRequestError: `count` is not a whole number from 1 on.
    """

    def __init__(self, count: int) -> None:
        self.count = whole_number(count, "workers")
        self._lock = Lock()
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

    @contextmanager
    def _crew(self) -> Generator[list[_Worker]]:
        """Start the workers of a run; stop them at its end, but keep the free ones if it did not fail."""
        crew: list[_Worker] = []
        try:
            while len(crew) < self.count - 1:
                with self._lock:
                    worker = self._idle.pop() if self._idle else None
                crew.append(worker or _Worker())
                if not crew[-1].is_alive:
                    crew.pop().stop()
            yield crew
            if self._is_open:
                for worker in crew:
                    worker.wait_until_ready()
            with self._lock:
                while crew and self._is_open and len(self._idle) < self.count - 1:
                    self._idle.append(crew.pop())
        finally:
            for worker in crew:
                worker.stop()


def matched_by(
    workers: Workers, begin: Callable[[], Share], pieces: Iterator[Piece], planned: Callable[[Any], object]
) -> Iterator[tuple[bool, Any]]:
    """Yield the output of a panel in the order of its pieces, for `PanelMatcher.run`.

    `begin` is a method that begins the share of a process; its object is pickled, with the plan that `planned`
    returns for batches like the given one. With each record batch comes whether it must be merged with others.
    """
    # Read some pieces to see whether the panel is large enough, and match here if it is not.
    worth = max(workers.count, _WORTH)
    read = list(islice(pieces, worth)) if workers.count > 1 else []
    pieces = chain(read, pieces)
    if len(read) < worth:
        yield from _divided([], begin(), pieces, Path())
        return
    if current_process().daemon:
        raise InvalidRequestError(
            "workers: this process may start no others, because it is a daemon itself, as those of Dask "
            "are; use workers=1 in it"
        )
    batch = read[0][1]
    place = _place(_ROOM * workers.count * batch.nbytes)
    try:
        with (
            TemporaryDirectory(prefix="sampling-async-", dir=place, ignore_cleanup_errors=True) as name,
            workers._crew() as crew,  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        ):
            folder, plan = Path(name), planned(batch)
            # Free these pieces as soon as they are matched: they are large.
            del batch, read
            if any(worker.plan() is not plan for worker in crew):
                (folder / _MATCHER).write_bytes(pickle.dumps(begin))
            for worker in crew:
                worker.begin(folder, plan)
            yield from _divided(crew, begin(), halved_at_the_end(pieces, workers.count), folder)
    except BrokenProcessPool:
        raise ChildProcessError(
            "a process that matched the panel ended: it may have run out of memory; or the main module has no "
            "`if __name__ == '__main__':` and starts workers again"
        ) from None


def _divided(
    crew: Sequence[_Worker], here: Share, pieces: Iterable[Piece], folder: Path
) -> Iterator[tuple[bool, Any]]:
    """Divide pieces among a crew and this process; yield as `matched_by`."""
    # The outputs of the pieces from the first one on whose output was not yielded yet.
    waiting: deque[_Output] = deque()
    for number, (first, batch) in enumerate(pieces):
        worker = next((each for each in crew if each.has_room), None)
        if worker is not None:
            waiting.append(worker.match(_put(folder / str(number), [batch]), first))
        elif waiting:
            waiting.append(list(here.add(first, batch)))
        else:
            yield from ((False, made) for made in here.add(first, batch))
        while waiting and (
            isinstance(waiting[0], list) or waiting[0].done() or len(waiting) > _AHEAD * (len(crew) + 1)
        ):
            yield from ((False, made) for made in _output(waiting.popleft()))
    ends = [worker.end(folder / f"end {at}") for at, worker in enumerate(crew) if worker.is_ready]
    made_here = here.end()
    for each in waiting:
        yield from ((False, made) for made in _output(each))
    for at_end in ([] if made_here is None else [made_here], *map(_output, ends)):
        yield from ((True, made) for made in at_end)


def _output(output: _Output) -> list[Any]:
    if isinstance(output, list):
        return output
    path = output.result()
    return [] if path is None else _take(path)


def halved_at_the_end(pieces: Iterable[Piece], last: int) -> Iterator[Piece]:
    """Yield pieces, the `last` ones in halves, so that all processes end at about the same time.

    Smaller parts cost more for a member, and the last pieces of a stream are kept in memory until its end.
    """
    held: deque[Piece] = deque()
    for piece in pieces:
        held.append(piece)
        if len(held) > last:
            yield held.popleft()
    for first, batch in held:
        half = -(-len(batch) // 2)
        yield first, batch.slice(0, half)
        if len(batch) > half:
            yield first + half, batch.slice(half)


def _place(room: int) -> str | None:
    """Return a folder in memory, or None if less than `room` bytes are free, as often in containers."""
    try:
        memory = os.statvfs(_IN_MEMORY)
    except (AttributeError, OSError):
        return None
    return _IN_MEMORY if memory.f_bavail * memory.f_frsize > room else None


def _put(path: Path, batches: Sequence[Any]) -> Path:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return path


def _take(path: Path) -> list[Any]:
    with pa.OSFile(str(path)) as file:
        made = list(pa.ipc.open_stream(file.read_buffer()))
    path.unlink()
    return made


class _Worker:
    def __init__(self) -> None:
        self.plan: Callable[[], object] = lambda: None  # returns that of the matcher which the process has
        # Not "fork": the threads of pyarrow do not survive a fork.
        self._executor = ProcessPoolExecutor(1, get_context("spawn"), _prepare)
        with _interrupts_deferred():
            self._ready = self._executor.submit(_held.clear)
        self._tasks: list[Future[Path | None]] = []

    @property
    def _processes(self) -> list[BaseProcess]:
        # Executors know no way to kill their processes before Python 3.14.
        return list(self._executor._processes.values())  # noqa: SLF001

    @property
    def is_alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def begin(self, folder: Path, plan: object) -> None:
        """Begin a run; the matcher is in the folder, unless the process has it since its last run."""
        self._ready = self._executor.submit(_begin, folder, is_new=self.plan() is not plan)
        self.plan = ref(plan)

    @property
    def is_ready(self) -> bool:
        """Whether the process has started and begun the run; raises what went wrong."""
        if not self._ready.done():
            return False
        self.wait_until_ready()
        return True

    def wait_until_ready(self) -> None:
        self._ready.result()

    @property
    def has_room(self) -> bool:
        self._tasks = [task for task in self._tasks if not task.done()]
        return self.is_ready and len(self._tasks) < _PIECES

    def match(self, path: Path, first: int) -> Future[Path | None]:
        """Match a piece; return the file with its output, or None if there is none."""
        task = self._executor.submit(_match, path, first)
        self._tasks.append(task)
        return task

    def end(self, path: Path) -> Future[Path | None]:
        return self._executor.submit(_end, path)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        self._executor.shutdown(cancel_futures=True)


@contextmanager
def _interrupts_deferred() -> Generator[None]:
    """Block Ctrl-C while a process starts, so that it cannot be interrupted before it ignores the signal."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --- In a worker

_held: dict[str, Any] = {}
"""The matcher's method that begins a share, and the share and the folder of the current run."""


def _prepare() -> None:
    # On Ctrl-C, the parent kills this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    # A parent that was killed has not removed it.
    rmtree(_held.get("folder", ""), ignore_errors=True)
    os._exit(1)


def _begin(folder: Path, *, is_new: bool) -> None:
    _held["folder"] = folder
    if is_new:
        _held.pop("share", None)
        _held.pop("begin", None)  # before the next one is read: with its rows it is large
        _held["begin"] = pickle.loads((folder / _MATCHER).read_bytes())  # noqa: S301  from the parent process
    _held["share"] = _held["begin"]()


def _match(path: Path, first: int) -> Path | None:
    (batch,) = _take(path)
    made = list(_held["share"].add(first, batch))
    return _put(path, made) if made else None


def _end(path: Path) -> Path | None:
    made = _held.pop("share").end()
    return None if made is None else _put(path, [made])
