"""One thread that runs the operations of all tasks on a store, many of them in one transaction.

A transaction ends with a write to the disk that takes a millisecond or more, however much is in it. So whatever
has come in while the last one ended goes into the next one together.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import anyio

from sampling_async._pacing.threads import call_soon_here
from sampling_async.notifications._store import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sampling_async.notifications._store import Store

T = TypeVar("T")
_Job: TypeAlias = "tuple[Future[Any], Callable[[Store], Any], int]"

GROUP: Final = 64
"""The most operations in one transaction."""

MOST_WAITING: Final = 4_096
"""The most operations that wait; beyond it new ones are refused, so that memory stays bounded."""


MOST_BYTES_WAITING: Final = 64 << 20
"""The most bytes of bodies that wait, likewise."""


class Committer:
    """Runs operations on a store in one thread, in groups.

    If one operation of a group fails, the group is rolled back, and each operation runs again in a separate
    transaction. An operation may therefore run twice, and must only use the store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
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

    def submit(self, operation: Callable[[Store], T], *, size: int = 0) -> Future[T]:
        """Have an operation run, which holds `size` bytes; its result is there when it is on the disk.

        If too many wait, or the store is closed, it is refused with a StoreError.
        """
        future: Future[T] = Future()
        with self._lock:
            if not self._is_open:
                raise StoreError("the store of notifications is closed")
            if self._jobs.qsize() >= MOST_WAITING or self._waiting_bytes > MOST_BYTES_WAITING:
                raise StoreError("too many notifications wait to be stored; try again later")
            self._waiting_bytes += size
            self._jobs.put((future, operation, size))
        return future

    async def run(self, operation: Callable[[Store], T], *, size: int = 0) -> T:
        """Return an operation's result when it is on the disk. If cancelled, it runs all the same."""
        call_soon, over = call_soon_here(), anyio.Event()
        future = self.submit(operation, size=size)

        def wake(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the event loop has ended: nobody waits
                call_soon(over.set)

        future.add_done_callback(wake)
        await over.wait()
        return future.result()

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
            self._commit(group)
            with self._lock:
                self._waiting_bytes -= sum(size for _, _, size in group)
            if is_last:
                return

    def _commit(self, group: list[_Job]) -> None:
        has_begun = False
        try:
            with self._store.transaction():
                has_begun = True
                results = [operation(self._store) for _, operation, _ in group]
        except BaseException as exc:  # noqa: BLE001  the caller gets it
            if len(group) == 1:
                group[0][0].set_exception(exc)
                return
            if not has_begun:  # another process holds the lock, and would block each of them
                for future, _, _ in group:
                    future.set_exception(StoreError(str(exc)))
                return
            # One of them may be the cause, or the disk: run each one alone.
            for job in group:
                self._commit([job])
            return
        for (future, _, _), result in zip(group, results, strict=True):
            future.set_result(result)
