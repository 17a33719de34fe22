"""Handlers of facts: called at least once for each fact, in order for each key, and again if they fail.

Their tracebacks are logged without member codes and secrets.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
import random
import re
import time
import traceback
from collections import Counter, deque
from concurrent.futures import Future
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import anyio
import anyio.to_thread
from attrs import define, field, frozen

from sampling_async import InvalidRequestError
from sampling_async._contract.checks import number_from_0, positive, positive_and_finite, whole_from_1
from sampling_async._contract.logs import FailureLog
from sampling_async._pacing.background import BackgroundService
from sampling_async._pacing.loops import Notifier
from sampling_async._pacing.patience import doubled
from sampling_async._pacing.threads import call_soon_here
from sampling_async.notifications._entries import folded
from sampling_async.notifications._facts import Fact, Settled, State, StoreError
from sampling_async.notifications._handlers import name_of
from sampling_async.notifications._records import UnknownNotification

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from sampling_async.notifications._committer import Committer
    from sampling_async.notifications._handlers import Handler, Handlers
    from sampling_async.notifications._records import Kind, Notification
    from sampling_async.notifications._sql import SqlStore

_HIDDEN: Final = "<hidden>"
_MOST_FRAMES: Final = 30
_LONGEST: Final = 8_000
_PLACE: Final = 'File "'
_SECRET_FIELDS: Final = {"encryptedvalue", "additionaldata"}


def masked_traceback(exc: BaseException, fact: Fact[Any], secrets: Iterable[str]) -> str:
    """Return the traceback of an exception that a handler raised, without the values of local variables.

    The member code of the fact, its signature, the data of its link and secrets are replaced in all lines. Of a
    fact that was not understood, the texts of exceptions are left out: what they may hold is not known.
    """
    if isinstance(fact.notification, UnknownNotification):
        frames = traceback.format_tb(exc.__traceback__, -_MOST_FRAMES)
        text = f"Traceback (most recent call last):\n{''.join(frames)}{type(exc).__name__}: {_HIDDEN}"
    else:
        text = "".join(traceback.format_exception(exc, limit=-_MOST_FRAMES)).rstrip()
    hidden = _pattern([*_texts_of(fact), *secrets])
    # A short member code must not garble the numbers of lines.
    lines = [
        line if line.lstrip(" |+-").startswith(_PLACE) else hidden.sub(_HIDDEN, line)
        for line in text.split("\n")
    ]
    return "\n".join(lines)[-_LONGEST:]


def _texts_of(fact: Fact[Any]) -> Iterator[str]:
    yield getattr(fact.notification, "member_code", "")
    for name, value in fact.fields.items():
        if folded(str(name)) in _SECRET_FIELDS:
            yield str(value)


def _pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds texts as they are, in a repr, in JSON and in a URL."""
    forms = {
        form
        for text in texts
        if text
        for form in (text, repr(text)[1:-1], json.dumps(text)[1:-1], quote(text, safe=""))
    }
    each = "|".join(re.escape(form) for form in sorted(forms, key=len, reverse=True))
    return re.compile(rf"(?<!\w)(?:{each})(?!\w)" if each else r"(?!)")


_LOG: Final = logging.getLogger("sampling_async.notifications")
_LONGEST_ERROR: Final = 500
_LONGEST_RETRY: Final = 31 * 86_400
_SHORTEST_RETRY: Final = 0.1
_EXTRA_SECONDS: Final = 0.05
_MOST_STUCK: Final = 32
"""How many handlers may hang in threads, which cannot be stopped, before they hold the places of others."""


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
        at_once: How many facts are handled at a time. If all these places are taken, a kind that has none of
            them gets one more, so that a slow kind does not hold up the others; not if it is 1.
        attempts: How many times a handler is called with a fact before the fact is dead.
        first_wait: Seconds before the second call; each later wait is twice as long, at random 50 to 100 %.
        longest_wait: The longest of these waits.
        timeout: Seconds that a handler may take. A coroutine is cancelled then, and this counts as a failure. A
            thread cannot be stopped: its fact stays with it, and its place is given to another one.
        lease: Seconds after which another process may take over a fact, if this one has died. A handler that
            runs longer keeps its fact, with a warning.
        poll: Seconds between two checks for facts that other processes have stored.
        grace: Seconds that running handlers get to end when the inbox is closed. A handler that is no
            coroutine function runs in a thread, which is waited for in any case.
    """

    at_once: int = field(default=8, validator=whole_from_1)
    attempts: int = field(default=15, validator=whole_from_1)
    first_wait: float = field(default=1.0, validator=positive_and_finite)
    longest_wait: float = field(default=600.0, validator=positive_and_finite)
    timeout: float = field(default=300.0, validator=positive)
    lease: float = field(default=60.0, validator=positive_and_finite)
    poll: float = field(default=1.0, validator=positive)
    grace: float = field(default=10.0, validator=positive)

    def wait(self, attempts: int, random_number: float) -> float:
        """Return the seconds to wait after so many attempts; `random_number` is from 0 to 1."""
        return doubled(self.first_wait, attempts - 1, self.longest_wait) * (0.5 + random_number / 2)


@define
class _Running:
    fact: Fact[Any]
    handler: Handler
    since: float  # by the event loop's clock
    is_long: bool = False  # a warning said that it takes long
    is_stuck: bool = False  # it hangs in a thread, and its place is given to another one


class Handling(BackgroundService):
    """Leases facts, calls their handlers and stores the results, while its block is open.

    No log shows the texts in `secrets`. `failed` counts the calls of handlers that have failed, by kind.
    """

    _called = "handling of notifications"

    def __init__(
        self,
        committer: Committer,
        handlers: Handlers,
        policy: HandlerPolicy,
        *,
        secrets: Sequence[str] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__()
        self._committer = committer
        self._handlers = handlers
        self._policy = policy
        self._clock = clock
        self.failed: Counter[Kind | None] = Counter()
        self._secrets = secrets
        self._reading = FailureLog(_LOG, "facts cannot be read, and are looked for again", logging.ERROR)
        self._storing = FailureLog(_LOG, "results of handlers cannot be stored, and are stored again")
        self._owner = token_hex(8)
        self._held: dict[int, _Running] = {}
        # Results that could not be stored yet, and until when that is tried.
        self._unsettled: deque[tuple[Settled, float]] = deque()
        # Not anyio's limiter: handlers that hang must not use up the threads of the application. The places
        # bound how many are used.
        self._threads = anyio.CapacityLimiter(math.inf)
        self._stuck = 0
        # The kinds for which an extra place was of no use, until when, and how long to wait for new facts.
        self._no_extra_for: set[Kind | None] = set()
        self._no_extra_before = 0.0
        self._wait = policy.poll
        self._new_facts = anyio.Event()
        self._idle = Notifier()
        self._stopping = False
        self._call_soon = call_soon_here()

    def wake(self) -> None:
        """Look for facts now. It may be called in any thread, after facts were stored."""
        if self._new_facts.is_set():  # it has not looked since the last call, so it will find these too
            return
        try:
            self._call_soon(self._look)
        except RuntimeError:  # the event loop has ended
            return

    def _look(self) -> None:
        self._new_facts.set()

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
                    self._new_facts = anyio.Event()
                    facts = await self._claim()
                    for fact in facts:
                        handler = self._handlers.of(fact)
                        running = _Running(fact, handler, anyio.current_time())
                        self._held[fact.id] = running
                        tasks.start_soon(self._handle, running)
                    if not facts:
                        with anyio.move_on_after(self._wait):
                            await self._new_facts.wait()
        finally:
            self._settle_again()
            # So that other processes need not wait for the end of the leases.
            self._submit(lambda store: store.release(self._owner))

    async def _claim(self) -> list[Fact[Notification]]:
        self._settle_again()
        kinds, most = self._handlers.kinds, self._policy.at_once - len(self._held) + self._stuck
        only, self._wait = kinds, self._policy.poll
        if most <= 0:
            # Look for one fact of a kind that has no place yet. If there is none, do not look again after each
            # handled fact, but a little later.
            busy = {running.fact.kind for running in self._held.values() if not running.is_stuck}
            only, most = [kind for kind in kinds if kind not in busy], 1
            if not only or self._policy.at_once == 1:
                return []
            pause = self._no_extra_before - anyio.current_time()
            if pause > 0 and self._no_extra_for.issuperset(only):
                self._wait = min(pause, self._wait)
                return []
        now = self._clock()
        try:
            facts = await self._committer.run(
                lambda store: store.claim(self._owner, kinds, now, now + self._policy.lease, most, only=only)
            )
            if not facts and only is not kinds:
                self._no_extra_for = set(only)
                self._no_extra_before = anyio.current_time() + _EXTRA_SECONDS
            self._reading.over()
            # If a lease ran out while its handler was still running, the fact was leased again.
            return [fact for fact in facts if fact.id not in self._held]
        except Exception as exc:  # noqa: BLE001  any error: handling must continue
            self._reading.failed(exc if isinstance(exc, StoreError) else type(exc).__name__)
            return []

    async def _keep_leases(self) -> None:
        try:
            while True:
                await anyio.sleep(min(self._policy.lease / 3, self._policy.timeout / 2))
                self._prolong()
                self._look_for_long_ones()
        finally:
            # A handler in a thread cannot be cancelled, and must keep its fact until it has ended.
            with anyio.CancelScope(shield=True):
                while self._held:
                    self._prolong()
                    self._look_for_long_ones()
                    with anyio.move_on_after(self._policy.lease / 3):
                        await self._idle.wait()

    def _prolong(self) -> None:
        held, until = list(self._held), self._clock() + self._policy.lease
        if held:
            self._submit(lambda store: store.extend(self._owner, held, until))

    def _look_for_long_ones(self) -> None:
        """Warn of handlers that take long, and free the places of those that hang in threads."""
        now = anyio.current_time()
        for running in self._held.values():
            seconds, what = now - running.since, _description(running)
            if seconds > self._policy.lease and not running.is_long:
                running.is_long = True
                _LOG.warning("%s has been running for %.0f seconds; its lease is prolonged", what, seconds)
            # A coroutine is cancelled at the timeout. What still runs after it is in a thread, or resists.
            if seconds > self._policy.timeout and not running.is_stuck and self._stuck < _MOST_STUCK:
                running.is_stuck, self._stuck = True, self._stuck + 1
                _LOG.error(
                    "%s hangs: it has been running for %.0f seconds (HandlerPolicy.timeout is %g), and"
                    " cannot be stopped; others get its place",
                    *(what, seconds, self._policy.timeout),
                )
                self._look()

    async def _handle(self, running: _Running) -> None:
        fact = running.fact
        try:
            settled = await self._attempt(running)
            # Do not wait until this is stored.
            self._settle(settled, self._clock() + self._policy.lease)
        finally:
            del self._held[fact.id]
            self._stuck -= running.is_stuck
            self._look()
            if not self._held:
                self._idle.notify()

    async def _attempt(self, running: _Running) -> Settled:
        fact = running.fact
        if fact.attempts > self._policy.attempts:
            error = "no attempt has ended: each time the process died, or lost its lease"
            self.failed[fact.kind] += 1
            _LOG.error("fact %d: %s; it is dead", fact.id, error)
            return Settled(fact_id=fact.id, state=State.DEAD, error=error)
        try:
            with anyio.move_on_after(self._policy.timeout) as scope:
                await self._call(running.handler, fact)
            if scope.cancelled_caught:
                seconds = self._policy.timeout
                raise TimeoutError(f"no end after {seconds:g} seconds (HandlerPolicy.timeout)")  # noqa: TRY301
        except RetryLater as exc:
            due = self._clock() + max(exc.seconds, _SHORTEST_RETRY)
            return Settled(fact_id=fact.id, state=State.PENDING, due=due, counts=False)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            # A cancellation of the scope around all handlers ends this one. Any other cancellation, such as
            # that of a future which the handler awaited, is a failure of the handler. It must not reach the
            # task group, which would end all handling.
            if isinstance(exc, anyio.get_cancelled_exc_class()) and _is_cancelled():
                raise
            error = _text_of(exc)
            is_dead = isinstance(exc, GiveUp) or fact.attempts >= self._policy.attempts
            self.failed[fact.kind] += 1
            # As text: with the exception itself, error reports would show its local variables.
            _LOG.log(
                logging.ERROR if is_dead else logging.WARNING,
                "%s raised %s in attempt %d%s\n%s",
                *(_description(running), type(exc).__name__, fact.attempts, "; it is dead" if is_dead else ""),
                masked_traceback(exc, fact, self._secrets),
            )
            if is_dead:
                return Settled(fact_id=fact.id, state=State.DEAD, error=error)
            wait = self._policy.wait(fact.attempts, random.random())  # noqa: S311  no secret
            return Settled(fact_id=fact.id, state=State.PENDING, due=self._clock() + wait, error=error)
        return Settled(fact_id=fact.id, state=State.HANDLED)

    async def _call(self, handler: Handler, fact: Fact[Any]) -> None:
        if inspect.iscoroutinefunction(handler):
            await handler(fact)
            return
        # In a list, because trio refuses a function in a thread that returns a coroutine.
        (result,) = await anyio.to_thread.run_sync(lambda: [handler(fact)], limiter=self._threads)
        if inspect.isawaitable(result):  # a callable object whose __call__ is a coroutine function
            await result

    def _settle(self, settled: Settled, until: float) -> None:
        """Store a result; if the store is away, again before the next claim, as long as the lease lasts."""

        def note(future: Future[object]) -> None:
            exc = future.exception()
            if exc is None:
                self._storing.over()
                return
            if not isinstance(exc, StoreError) or self._clock() > until:
                _log_failure(future)
                return
            self._storing.failed(exc)
            self._unsettled.append((settled, until))

        self._submit(lambda store: store.settle(self._owner, settled), note)

    def _settle_again(self) -> None:
        for _ in range(len(self._unsettled)):
            self._settle(*self._unsettled.popleft())

    def _submit(
        self, operation: Callable[[SqlStore], object], note: Callable[[Future[object]], None] | None = None
    ) -> None:
        try:
            future = self._committer.submit(operation)
        except StoreError as exc:
            future = Future()
            future.set_exception(exc)
        future.add_done_callback(note or _log_failure)


def _description(running: _Running) -> str:
    fact = running.fact
    return f"fact {fact.id}: the {fact.kind or 'unknown'} handler {name_of(running.handler)}"


def _is_cancelled() -> bool:
    return anyio.get_current_task().has_pending_cancellation()


def _text_of(exc: BaseException) -> str:
    """Return type and text of an exception, in a form that can be stored."""
    try:
        text = str(exc)
    except Exception:  # noqa: BLE001  a __str__ may raise anything
        text = "its text cannot be read"
    return f"{type(exc).__name__}: {text}"[:_LONGEST_ERROR].encode("utf-8", "backslashreplace").decode()


def _log_failure(future: Future[object]) -> None:
    exc = future.exception()
    if exc is not None:
        _LOG.warning("the state of facts cannot be stored: %s", exc)
