"""One thread that runs the operations of all tasks on a store, many of them in one transaction.

A transaction ends with a write to the disk that takes a millisecond or more, however much is in it. So whatever
has come in while the last one ended goes into the next one together.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypeVar

from sampling_async._pacing.loops import OneShotEvent
from sampling_async._pacing.threads import call_soon_here
from sampling_async.notifications._facts import Hit, StoreError
from sampling_async.notifications._stores import in_transaction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from sampling_async.notifications._sql import SqlStore

T = TypeVar("T")
Operation: TypeAlias = "Callable[[Any], T] | Hit"
"""What is done with the store, of whatever kind it is."""

GROUP: Final = 64
"""The most operations in one transaction."""

MOST_WAITING: Final = 4_096
"""The most operations that wait; beyond it new ones are refused, so that memory stays bounded."""


MOST_BYTES_WAITING: Final = 64 << 20
"""The most bytes of bodies that wait, likewise."""


class _Submission(Generic[T]):
    """An operation that waits or has ended, with its result."""

    __slots__ = ("failure", "key", "operation", "over", "result", "size")

    def __init__(self, operation: Operation[T], size: int, over: _InLoop | Future[T], *, key: str = "") -> None:
        self.operation = operation
        self.key = key
        self.size = size
        self.over = over
        self.result: Any = None
        self.failure: BaseException | None = None

    def run(self, store: SqlStore) -> None:
        operation = self.operation
        if isinstance(operation, Hit):
            (self.result,) = store.receive_all([operation])
        else:
            self.result = operation(store)


class _InLoop:
    """A task that waits for an operation, in an event loop."""

    __slots__ = ("call_soon", "event")

    def __init__(self) -> None:
        self.call_soon = call_soon_here()
        self.event = OneShotEvent()


class Committer:
    """Runs operations on a store in one thread, in groups.

    If one operation of a group fails, the group is rolled back, and each operation runs again in a separate
    transaction. An operation may therefore run twice, and must only use the store. The hits of a group are
    stored first, together; the other operations run one after the other.
    """

    def __init__(self, store: SqlStore) -> None:
        self._store = store
        self._jobs: SimpleQueue[_Submission[Any] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_open = False
        self._waiting_bytes = 0

    def start(self) -> None:
        """Open the store and start the thread. It may block, and raise a StoreError."""
        self._store.open()
        self._jobs, self._waiting_bytes = SimpleQueue(), 0  # it may have been stopped before
        self._is_open = True
        self._thread = threading.Thread(target=self._work, name="notifications", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Run what was submitted, end the thread, and close the store. It may block."""
        with self._lock:  # so that nothing is submitted behind the last job
            self._is_open = False
            self._jobs.put(None)
        if self._thread is not None:
            self._thread.join()
        self._store.close()

    def submit(self, operation: Operation[T], *, size: int = 0) -> Future[T]:
        """Have an operation run. Its result is there when it is on the disk.

        If too many wait, or the store is closed, it is refused with a StoreError.
        """
        future: Future[T] = Future()
        self._put(_Submission(operation, size, future))
        return future

    async def run(self, operation: Operation[T], *, size: int = 0, key: str = "") -> T:
        """Return an operation's result when it is on the disk. If cancelled, it runs all the same.

        `key` is what the operation locks. Those of a group run in the order of their keys, so that two
        processes never wait for each other.
        """
        over = _InLoop()
        job = _Submission(operation, size, over, key=key)
        self._put(job)
        await over.event.wait()
        failure, job.failure = job.failure, None  # no cycle of the exception, its traceback and this frame
        if failure is None:
            result: T = job.result
            return result
        try:
            raise failure
        finally:
            del failure

    def _put(self, job: _Submission[Any]) -> None:
        with self._lock:
            if not self._is_open:
                raise StoreError("the store of notifications is closed")
            if self._jobs.qsize() >= MOST_WAITING or self._waiting_bytes > MOST_BYTES_WAITING:
                raise StoreError("too many notifications wait to be stored; try again later")
            self._waiting_bytes += job.size
            self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            group, is_last = [job], False
            while len(group) < GROUP:
                try:
                    another = self._jobs.get_nowait()
                except Empty:
                    break
                if another is None:
                    is_last = True
                    break
                group.append(another)
            group.sort(key=lambda job: job.key)
            self._commit(group)
            with self._lock:
                self._waiting_bytes -= sum(job.size for job in group)
            if is_last:
                return

    def _commit(self, group: Sequence[_Submission[Any]]) -> None:
        has_begun = False
        try:
            with self._store.transaction():
                has_begun = True
                hits = [(job, job.operation) for job in group if isinstance(job.operation, Hit)]
                if hits:
                    verdicts = self._store.receive_all([hit for _, hit in hits])
                    for (job, _), verdict in zip(hits, verdicts, strict=True):
                        job.result = verdict
                for job in group:
                    if not isinstance(job.operation, Hit):
                        job.run(self._store)
        except BaseException as exc:  # noqa: BLE001  the caller gets it
            if has_begun:  # one of them may be the cause, or the disk
                for job in group:
                    self._commit_alone(job)
                return
            for job in group:  # another process holds the lock, and would block each of them
                job.failure = StoreError(str(exc))
        _end(group)

    def _commit_alone(self, job: _Submission[Any]) -> None:
        try:
            in_transaction(self._store, job.run)
        except BaseException as exc:  # noqa: BLE001  the caller gets it
            job.failure = exc
        _end([job])


def _end(group: Iterable[_Submission[Any]]) -> None:
    """Have those who wait for operations go on: one call for all tasks of an event loop."""
    events: dict[Any, list[OneShotEvent]] = {}
    for job in group:
        if isinstance(job.over, _InLoop):
            events.setdefault(job.over.call_soon, []).append(job.over.event)
        elif job.failure is None:
            job.over.set_result(job.result)
        else:
            job.over.set_exception(job.failure)
    for call_soon, of_loop in events.items():
        with suppress(RuntimeError):  # the event loop has ended: nobody waits
            call_soon(partial(_set, of_loop))


def _set(events: Iterable[OneShotEvent]) -> None:
    for event in events:
        event.set()
