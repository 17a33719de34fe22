"""Handlers of facts: called at least once for each fact, in order for each key, and again if they fail."""

from __future__ import annotations

import inspect
import logging
import math
import random
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import anyio
import anyio.to_thread
from attrs import field, frozen

from sampling_async._contract.checks import number_from_0, positive, whole_from_1
from sampling_async._contract.errors import InvalidRequestError
from sampling_async._pacing.change import Change
from sampling_async._pacing.standing import Standing
from sampling_async._pacing.threads import call_soon_here
from sampling_async.notifications._records import Notification, UnknownNotification
from sampling_async.notifications._store import Fact, Settled, State, Store, StoreError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from sampling_async.notifications._committer import Committer
    from sampling_async.notifications._records import Kind

Handler: TypeAlias = Callable[[Fact[Any]], Awaitable[object] | object]
_LOG: Final = logging.getLogger("sampling_async.notifications")
_LONGEST_ERROR: Final = 500
_LONGEST_RETRY: Final = 31 * 86_400
_SHORTEST_RETRY: Final = 0.1


class RetryLater(Exception):  # noqa: N818  what it asks for
    """Raised by a handler: call it again with this fact, after some seconds. It may be raised without end.

    Args:
        seconds: From 0 to 31 days; at least a tenth of a second passes.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = number_from_0(seconds, "seconds")
        if self.seconds > _LONGEST_RETRY:
            raise InvalidRequestError(f"seconds must be at most {_LONGEST_RETRY:,} (31 days), not {seconds!r}")
        super().__init__(f"in {self.seconds} seconds")


class GiveUp(Exception):  # noqa: N818  what it does
    """Raised by a handler: do not call it again with this fact. The fact is dead until it is replayed."""


@frozen(kw_only=True)
class HandlerPolicy:
    """How handlers are called.

    Attributes:
        at_once: How many facts are handled at a time.
        attempts: How many times a handler is called with a fact before the fact is dead.
        first_wait: Seconds before the second call; each later wait is twice as long, at random 50 to 100 %.
        longest_wait: The longest of these waits.
        lease: Seconds after which another process may take over a fact, if this one has died.
        poll: Seconds between two looks for facts that other processes have stored.
        grace: Seconds that running handlers get to end when the inbox is closed. A handler that is no
            coroutine function runs in a thread, which is waited for in any case.
    """

    at_once: int = field(default=8, validator=whole_from_1)
    attempts: int = field(default=15, validator=whole_from_1)
    first_wait: float = field(default=1.0, validator=positive)
    longest_wait: float = field(default=600.0, validator=positive)
    lease: float = field(default=60.0, validator=positive)
    poll: float = field(default=1.0, validator=positive)
    grace: float = field(default=10.0, validator=positive)

    def wait(self, attempts: int, random_number: float) -> float:
        """Return the seconds to wait after so many attempts; `random_number` is from 0 to 1."""
        # ldexp with a bounded exponent: 2.0 ** 1100 is an OverflowError.
        longest = min(self.longest_wait, math.ldexp(self.first_wait, min(attempts - 1, 60)))
        return longest * (0.5 + random_number / 2)


class Handlers:
    """The handlers of an inbox, by the record that they take."""

    def __init__(self) -> None:
        self._handlers: dict[type[Any], Handler] = {}
        self._is_closed = False

    def __bool__(self) -> bool:
        return bool(self._handlers)

    def add(self, records: tuple[type[Any], ...], handler: Handler) -> None:
        """Register a handler.

        Raises:
            RuntimeError: The inbox is open already.
            InvalidRequestError: A record is none, or has a handler already.
        """
        if self._is_closed:
            raise RuntimeError("register handlers before the inbox is opened: facts may wait in its store")
        for record in records:
            kind_of(record)
            if record in self._handlers:
                raise InvalidRequestError(f"{record.__name__} has a handler already")
        self._handlers.update(dict.fromkeys(records, handler))

    def close(self) -> None:
        """Take no more handlers.

        Raises:
            InvalidRequestError: There are handlers, and none for what is not understood.
        """
        if self._handlers and UnknownNotification not in self._handlers:
            raise InvalidRequestError(
                "register a handler for UnknownNotification too: money may be in what was not understood"
            )
        self._is_closed = True

    @property
    def kinds(self) -> list[Kind | None]:
        """The kinds that have a handler; None stands for what was not understood."""
        return [RECORDS[record] for record in self._handlers]

    def of(self, fact: Fact[Any]) -> Handler:
        """Return the handler of a fact."""
        return self._handlers[type(fact.notification)]


RECORDS: Final[dict[type[Any], Kind | None]] = {
    record: getattr(record, "kind", None) if record is not UnknownNotification else None
    for record in Notification.__args__
}
"""The records, with their kinds."""


def kind_of(record: type[Any]) -> Kind | None:
    """Return the kind of a record; None for what was not understood.

    Raises:
        InvalidRequestError: It is no record.
    """
    if record not in RECORDS:
        raise InvalidRequestError(f"{record!r} is no notification; see sampling_async.notifications")
    return RECORDS[record]


class Handling(Standing):
    """Leases facts from the store, calls their handlers, and keeps what came of it, while its block is open."""

    _called = "handling of notifications"

    def __init__(
        self,
        committer: Committer,
        handlers: Handlers,
        policy: HandlerPolicy,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__()
        self._committer = committer
        self._handlers = handlers
        self._policy = policy
        self._clock = clock
        self._owner = secrets.token_hex(8)
        self._held: dict[int, Fact[Any]] = {}
        self._news_of_facts = anyio.Event()
        self._idle = Change()
        self._stopping = False
        self._call_soon = call_soon_here()

    def wake(self) -> None:
        """Look for facts now. It may be called in any thread."""
        try:
            self._call_soon(self._look)
        except RuntimeError:  # the event loop has ended
            return

    def _look(self) -> None:
        self._news_of_facts.set()

    async def finish(self) -> None:
        """Take no more facts, and wait until running handlers have ended, at most `HandlerPolicy.grace`."""
        self._stopping = True
        self._look()
        with anyio.move_on_after(self._policy.grace):
            while self._held:
                await self._idle.wait()

    async def _work(self) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._keep_leases)
                while not self._stopping:
                    self._news_of_facts = anyio.Event()
                    facts = await self._claim()
                    for fact in facts:
                        self._held[fact.id] = fact
                        tasks.start_soon(self._handle, fact)
                    if not facts:
                        with anyio.move_on_after(self._policy.poll):
                            await self._news_of_facts.wait()
        finally:
            # So that they need not wait for the end of their leases.
            self._submit(lambda store: store.release(self._owner))

    async def _claim(self) -> list[Fact[Notification]]:
        most = self._policy.at_once - len(self._held)
        if most <= 0:
            return []
        kinds, now = self._handlers.kinds, self._clock()
        try:
            facts = await self._committer.run(
                lambda store: store.claim(self._owner, kinds, now, now + self._policy.lease, most)
            )
            # A lease that ran out while its handler was still running comes to us again.
            return [fact for fact in facts if fact.id not in self._held]
        except Exception as exc:  # noqa: BLE001  whatever it is, handling must go on
            reason = exc if isinstance(exc, StoreError) else type(exc).__name__
            _LOG.error("facts cannot be read, and are looked for again: %s", reason)
            return []

    async def _keep_leases(self) -> None:
        try:
            while True:
                await anyio.sleep(self._policy.lease / 3)
                self._prolong()
        finally:
            # A handler in a thread cannot be cancelled, and must keep its fact until it has ended.
            with anyio.CancelScope(shield=True):
                while self._held:
                    self._prolong()
                    with anyio.move_on_after(self._policy.lease / 3):
                        await self._idle.wait()

    def _prolong(self) -> None:
        held, until = list(self._held), self._clock() + self._policy.lease
        if held:
            self._submit(lambda store: store.extend(self._owner, held, until))

    async def _handle(self, fact: Fact[Any]) -> None:
        try:
            settled = await self._attempt(fact)
            # Nobody waits for this to be stored: if it is not, the fact is handled once more.
            self._submit(lambda store: store.settle(self._owner, settled))
        finally:
            del self._held[fact.id]
            self._look()
            if not self._held:
                self._idle.notify()

    async def _attempt(self, fact: Fact[Any]) -> Settled:
        if fact.attempts > self._policy.attempts:
            error = "no attempt has ended: each time the process died, or lost its lease"
            _LOG.warning("fact %d: %s; it is dead", fact.id, error)
            return Settled(fact_id=fact.id, state=State.DEAD, error=error)
        try:
            await _called(self._handlers.of(fact), fact)
        except RetryLater as exc:
            due = self._clock() + max(exc.seconds, _SHORTEST_RETRY)
            return Settled(fact_id=fact.id, state=State.PENDING, due=due, counts=False)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            # Our own cancellation ends the handler: that of the scope around all of them. Any other one is a
            # failure: of a future that it awaited, or of its task, by whoever watches over it. Raised on, that
            # would end all handling, because a task group takes it for its own.
            if isinstance(exc, anyio.get_cancelled_exc_class()) and _is_ours():
                raise
            error = _text_of(exc)
            is_dead = isinstance(exc, GiveUp) or fact.attempts >= self._policy.attempts
            # The text of the exception may hold a member code, and belongs into the store only.
            _LOG.warning(
                "fact %d: its handler raised %s in attempt %d%s",
                *(fact.id, type(exc).__name__, fact.attempts, "; it is dead" if is_dead else ""),
            )
            if is_dead:
                return Settled(fact_id=fact.id, state=State.DEAD, error=error)
            wait = self._policy.wait(fact.attempts, random.random())  # noqa: S311  no secret
            return Settled(fact_id=fact.id, state=State.PENDING, due=self._clock() + wait, error=error)
        return Settled(fact_id=fact.id, state=State.HANDLED)

    def _submit(self, operation: Callable[[Store], object]) -> None:
        try:
            self._committer.submit(operation).add_done_callback(_told)
        except StoreError as exc:
            _LOG.warning("the state of facts cannot be stored: %s", exc)


def _is_ours() -> bool:
    """Return whether a scope around the current task is cancelled."""
    return anyio.get_current_task().has_pending_cancellation()


def _text_of(exc: BaseException) -> str:
    """Return type and text of an exception, in a form that can be stored."""
    try:
        text = str(exc)
    except Exception:  # noqa: BLE001  a __str__ may raise anything
        text = "its text cannot be read"
    return f"{type(exc).__name__}: {text}"[:_LONGEST_ERROR].encode("utf-8", "backslashreplace").decode()


async def _called(handler: Handler, fact: Fact[Any]) -> None:
    if inspect.iscoroutinefunction(handler):
        await handler(fact)
        return
    # In a list, because trio refuses a function in a thread that returns a coroutine.
    (result,) = await anyio.to_thread.run_sync(lambda: [handler(fact)])
    if inspect.isawaitable(result):  # a callable object whose __call__ is a coroutine function
        await result


def _told(future: Future[object]) -> None:
    exc = future.exception()
    if exc is not None:
        _LOG.warning("the state of facts cannot be stored: %s", exc)
