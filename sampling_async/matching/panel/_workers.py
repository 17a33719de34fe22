"""Matching of a panel by several processes of one machine, which take it piece by piece.

This process matches too: it begins while the others start, and distributes pieces between its own. The workers
end with the run, unless `Workers` keeps them for the next run.
"""

from __future__ import annotations

import pickle
from collections import deque
from contextlib import contextmanager
from itertools import chain, islice
from multiprocessing import current_process
from multiprocessing.connection import wait
from threading import RLock
from typing import TYPE_CHECKING, Any, Final, Self
from weakref import WeakMethod, ref

from sampling_async import InvalidRequestError
from sampling_async._contract.checks import whole_number
from sampling_async.matching.panel._worker import Matches, Piece, Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

_WORTH: Final = 5
"""The fewest pieces for which workers are started: this process matches fewer before a worker is ready."""

_AHEAD: Final = 4
"""Pieces for each process that may be ahead of the first unfinished piece; their output is kept in memory."""


class Workers:
    """Processes that match panels, kept for several runs: to start them takes half a second each time.

        matcher = PanelMatcher(index, TopK(20))
        with Workers(8) as workers:
            for panel in panels:
                best = matcher.run(panel, workers=workers).read_all()

    They keep the matcher of their last run too, so it is best to use one `PanelMatcher` for all panels of an
    inventory. (An `Allocate` makes two more for each run.) Each process also keeps two files, as large as a
    piece, in memory if there is room. A panel that is a stream is read ahead by a few pieces for each process.

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
        self._idle: list[Worker] = []

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
        """Yield the output of a panel as record batches, in the order of its pieces, for `PanelMatcher.run`.

        Args:
            match: A method that makes record batches from pieces. Its object is pickled, with the plan.
            pieces: The panel; if there are few pieces, this process matches them alone.
            planned: Returns the plan that the object of `match` has for batches like the given one. It is
                called while the other processes start.

        Returns:
            For each record batch, whether it came after all pieces and must be merged; and the batch.
        """
        # Read some pieces to see whether the panel is large enough, and match here if it is not.
        worth = max(self.count, _WORTH)
        begun = list(islice(pieces, worth)) if self.count > 1 else []
        pieces = chain(begun, pieces)
        if len(begun) < worth:
            yield from ((False, batch) for batch in match(pieces))
            return
        if current_process().daemon:
            raise InvalidRequestError(
                "workers: this process may start no others, because it is a daemon itself, as those of Dask "
                "are; use workers=1 in it"
            )
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
                lead = _Distribution(crew, halved_at_the_end(pieces, self.count))
                yield from lead.matched(match, self._has_room)
            finally:
                if new:
                    new[0].work_file.unlink(missing_ok=True)

    @contextmanager
    def _taking_part(self, size: int) -> Generator[Sequence[Worker]]:
        """Make processes take part in a run with pieces of `size` bytes; stop those not free, or not kept."""
        crew: list[Worker] = []
        try:
            for _ in range(self.count - 1):
                crew.append(self._idle_one() or Worker())
                crew[-1].join(size, self.count - 1)
            yield crew
        finally:
            for worker in crew:
                if not (worker.is_free and self._keeps(worker)):
                    worker.stop()

    def _idle_one(self) -> Worker | None:
        while True:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            if worker is None or worker.is_alive:
                return worker
            worker.stop()

    def _keeps(self, worker: Worker) -> bool:
        with self._lock:
            keeps = self._has_room()
            if keeps:
                self._idle.append(worker)
            return keeps

    def _has_room(self) -> bool:
        return self._is_open and len(self._idle) < self.count - 1


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


class _Distribution:
    """Divides pieces among a crew and this process."""

    def __init__(self, crew: Sequence[Worker], pieces: Iterator[Piece]) -> None:
        self._busy: dict[Any, Worker] = {worker.connection: worker for worker in crew}
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
        """Yield the output of all pieces; see `Workers._matched`.

        `waits` says whether to wait for processes that started too late, to keep them for the next run.
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
        """Yield pieces for this process while there are any; the workers get theirs first."""
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
        self._done[number] = made
        while self._all_done in self._done:
            self._all_done += 1

    @property
    def _is_far_ahead(self) -> bool:
        return self._next is not None and self._next[0] - self._all_done >= self._most_ahead

    def _receive_messages(self, seconds: float | None) -> None:
        """Receive all messages of the workers, and give them as many pieces as they can take.

        Wait `seconds` for the first message, or with None until there is one.
        """
        while connections := wait(list(self._busy), seconds):
            for connection in connections:
                worker = self._busy[connection]
                kind, made = worker.receive()
                if kind == "ready":
                    worker.is_ready = True
                elif kind == "done":
                    self._note(worker.pieces.popleft(), made)
                else:
                    self._after_all += made
                    self._busy.pop(connection).leave()
            seconds = 0
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
