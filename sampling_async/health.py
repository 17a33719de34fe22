"""The health of a partner's process: for probes, for people, and as metrics.

`Health` looks at the parts that a process runs. See `docs/howto/monitoring.md`.
"""

from __future__ import annotations

import threading
import time
from math import inf
from typing import TYPE_CHECKING, Any, Final

import anyio
from attrs import define, field, frozen

from sampling_async import InvalidRequestError, SamplingClient, Snapshot, WatchStatus
from sampling_async._calls import reports
from sampling_async._contract.checks import count_of, number_above_0, require_functions, require_instance
from sampling_async._pacing.threads import call_soon_here
from sampling_async._telemetry.providers import telemetry_of
from sampling_async.matching import LiveIndex
from sampling_async.notifications import Inbox, InboxStatus, StoreError
from sampling_async.routing import RouterStatus, SurveyRouter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sampling_async import Telemetry
    from sampling_async._telemetry.vitals import Measurement

__all__ = ["Health", "HealthReport"]

_NEW_SECONDS: Final = 0.5  # for which a look at the store is not repeated
_COLLECT_SECONDS: Final = 1.0  # for which metrics wait for the store
_LATELY_SECONDS: Final = 60.0  # for which calls that ended unsent are a problem
_MANY_UNUSED: Final = 0.05  # a share of the invites of clicks that is a problem, if it is of enough of them
_ENOUGH_INVITED: Final = 400


@frozen(kw_only=True)
class HealthReport:
    """What a process can do now; `attrs.asdict` makes it ready for JSON. It holds no secrets.

    Attributes:
        is_ready: Whether the process should get requests. With an inbox: whether a notification could be stored
            now. Without one: whether clicks can be routed, or else whether there is an inventory.
        reasons: Why it is not ready, a sentence each; empty if it is.
        problems: What else does not work, a sentence each, such as an outage of the service. No other process
            would do better.
        name: The name of the client.
        inventory: How current the live index is.
        inventory_age: The age of its inventory in seconds; None without one.
        client: The state of the client.
        inbox: The state of the inbox and its store; None also if the store could not be read in time.
        router: What the router has done, and whether clicks can be routed.
    """

    is_ready: bool
    reasons: tuple[str, ...]
    problems: tuple[str, ...]
    name: str | None = None
    inventory: WatchStatus | None = None
    inventory_age: float | None = None
    client: Snapshot | None = None
    inbox: InboxStatus | None = None
    router: RouterStatus | None = None


class Health:
    """The health of what a partner's process runs, in one object.

        health = Health(client=client, live=live, inbox=inbox, router=router, telemetry=True)

        @app.get("/ready")
        async def ready() -> JSONResponse:
            report = await health.report()
            return JSONResponse(asdict(report), 200 if report.is_ready else 503)

    Give it the parts that there are. It never raises for a service or a store that is away. The store is asked
    in a thread, at most twice a second, and never again before it has answered. Each time a transaction is
    written that changes nothing.

    With several panels, make one for each panel, and one more for the inbox alone.

    Args:
        client: The client. Its name is the `sampling.panel` of the metrics.
        live: The live index.
        inbox: The inbox.
        router: The router of clicks.
        telemetry: Whether to have the metrics collected (extra `otel`), or a `Telemetry` with providers of your
            own. They are collected for as long as you keep this object.
        clock: Returns seconds from any start, in any thread.

    Raises:
        InvalidRequestError: No part is given, or one is of another type.
    """

    def __init__(
        self,
        *,
        client: SamplingClient | None = None,
        live: LiveIndex | None = None,
        inbox: Inbox | None = None,
        router: SurveyRouter | None = None,
        telemetry: bool | Telemetry = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        require_instance(client, SamplingClient | None, "client", "a SamplingClient")
        require_instance(live, LiveIndex | None, "live", "a LiveIndex")
        require_instance(inbox, Inbox | None, "inbox", "an Inbox")
        require_instance(router, SurveyRouter | None, "router", "a SurveyRouter")
        require_functions(clock=clock)
        if all(part is None for part in (client, live, inbox, router)):
            raise InvalidRequestError("health needs something to look at: client=, live=, inbox= or router=")
        self._client, self._live, self._inbox, self._router = client, live, inbox, router
        self._too_late = 0 if client is None else client.snapshot().too_late  # calls, at the last look
        self._late_at = -inf  # when there were more of them
        self._clock = clock
        self._lock = threading.Lock()
        self._look: _StoreLook | None = None  # the newest
        self._seen: _StoreLook | None = None  # the newest that has ended
        self._name = None if client is None else client.name
        chosen = telemetry_of(telemetry) or reports.instrumented
        self._vitals = None if chosen is None else chosen.of_process(self._measured, self._name)

    async def report(self, *, within: float = 0.8) -> HealthReport:
        """Return what the process can do now.

        Args:
            within: Seconds to wait for the store of the inbox. A store that takes longer makes the process not
                ready. The default is less than the second that Kubernetes gives a probe.

        Raises:
            InvalidRequestError: `within` is not above 0.
        """
        number_above_0(within, "within", "seconds")
        look = self._looked(self._inbox)
        if look is not None:
            await look.wait(within)
        return self._report(look)

    def _looked(self, inbox: Inbox | None) -> _StoreLook | None:
        """Return the look at the store that is running or has just ended, or start another one."""
        if inbox is None:
            return None
        with self._lock:
            now, look = self._clock(), self._look
            if look is not None and look.over.is_set():
                self._seen = look
            # A store that hangs gets no second question: each would take a thread.
            if look is None or (look.over.is_set() and now - look.ended > _NEW_SECONDS):
                look = self._look = _StoreLook(inbox, self._clock, began=now)
                threading.Thread(target=look.run, name="sampling_async", daemon=True).start()
            return look

    def _report(self, look: _StoreLook | None) -> HealthReport:
        live, router = self._live, None if self._router is None else self._router.status
        reasons: list[str] = []
        problems: list[str] = []
        if self._inbox is not None and not self._inbox.is_open:  # the look may be older than that
            reasons.append("the inbox is closed")
        elif look is not None:
            reasons += look.reasons(self._clock())
        if router is not None and not router.is_ready:
            (reasons if look is None else problems).append(f"clicks cannot be routed: {router.reason}")
        elif live is not None and live.age is None:
            (reasons if look is None else problems).append("there is no inventory yet")
        snapshot = None if self._client is None else self._client.snapshot()
        if snapshot is not None and snapshot.breaker == "open":
            problems.append(f"the service has been away for {snapshot.away_for:.0f} s")
        if snapshot is not None and self._is_late_now(snapshot):
            problems.append(f"callers wait in vain: {count_of(snapshot.too_late, 'call')} so far ended unsent")
        if router is not None and router.unused > _MANY_UNUSED * max(router.invited, _ENOUGH_INVITED):
            problems.append(f"{count_of(router.unused, 'invite')} of {router.invited} reached no click")
        if live is not None:
            problems += _problems_of(live)
        status = None if look is None else look.status
        if status is not None and status.dead:
            problems.append(f"{count_of(status.dead, 'dead fact')}: mend the handlers, then replay")
        return HealthReport(
            is_ready=not reasons,
            reasons=tuple(reasons),
            problems=tuple(problems),
            name=self._name,
            inventory=None if live is None else live.status,
            inventory_age=None if live is None else live.age,
            client=snapshot,
            inbox=status,
            router=router,
        )

    def _is_late_now(self, snapshot: Snapshot) -> bool:
        """Return whether calls of the last minute could not be sent before their deadline."""
        now = self._clock()
        if snapshot.too_late > self._too_late:
            self._too_late, self._late_at = snapshot.too_late, now
        return now - self._late_at < _LATELY_SECONDS

    # --- Metrics

    def _measured(self) -> Iterator[Measurement]:
        """Yield the value of each metric. It is called in any thread."""
        from sampling_async._telemetry.vitals import Measurement  # noqa: PLC0415  it needs OpenTelemetry

        look = self._looked_now()
        report = self._report(look)
        if look is None or look.over.is_set() or self._is_late(look):
            yield Measurement("ready", int(report.is_ready), {})
        if report.inventory_age is not None:
            yield Measurement("inventory.age", report.inventory_age, {})
        if report.client is not None:
            yield Measurement("outage", report.client.away_for, {})
            yield Measurement("calls.too_late", report.client.too_late, {})
        if report.inbox is not None:
            yield Measurement("notifications.not_stored", report.inbox.not_stored, {})
            for kind, facts in report.inbox.by_kind.items():
                of_kind = {"sampling.kind": kind or "unknown"}
                yield Measurement("facts.pending", facts.pending, of_kind)
                yield Measurement("facts.dead", facts.dead, of_kind)
                if facts.has_handler:  # the others wait forever, and their age says nothing
                    yield Measurement("facts.lag", facts.oldest_seconds, of_kind)
                    yield Measurement("handler.failures", facts.failed, of_kind)
        if report.router is not None:
            for status, clicks in report.router.clicks.items():
                yield Measurement("clicks", clicks, {"sampling.status": status})
            yield Measurement("clicks.repeated", report.router.repeats, {})
            yield Measurement("clicks.invites", report.router.invited, {})
            yield Measurement("invites.unused", report.router.unused, {})

    def _looked_now(self) -> _StoreLook | None:
        """Return a look at the store, for metrics.

        In a thread it waits for the store. An event loop must not wait: there it returns the look that ended
        last, and the next collection gets the one that begins now.
        """
        look = self._looked(self._inbox)
        if look is None or look.over.is_set():
            return look
        if _is_in_event_loop():
            return look if self._seen is None or self._is_late(look) else self._seen
        look.over.wait(max(0.0, look.began + _COLLECT_SECONDS - self._clock()))
        return look

    def _is_late(self, look: _StoreLook) -> bool:
        return self._clock() - look.began >= _COLLECT_SECONDS


@define(eq=False)
class _StoreLook:
    """One look at the store of an inbox, in a thread: what waits there, and whether it can be written."""

    _inbox: Inbox
    _clock: Callable[[], float]
    began: float
    ended: float = 0.0
    status: InboxStatus | None = None
    failure: str = ""
    over: threading.Event = field(factory=threading.Event)
    _waiting: dict[Any, anyio.Event] = field(factory=dict)  # by the event loop

    def run(self) -> None:
        try:
            self.status = self._inbox.read_status()
            if self._inbox.is_open:
                self._inbox.check_writable()
        except StoreError as exc:
            self.failure = str(exc)
        except Exception as exc:  # noqa: BLE001  of a store that you have written; its text may hold secrets
            self.failure = f"its store raised {type(exc).__name__}"
        self.ended = self._clock()
        self.over.set()
        for call_soon, event in tuple(self._waiting.items()):
            try:
                call_soon(event.set)
            except RuntimeError:  # the event loop has ended
                continue

    async def wait(self, seconds: float) -> None:
        """Wait until it is over, but not longer than this."""
        # Entered first: either the thread finds the event, or it has ended by the next line.
        event = self._waiting.setdefault(call_soon_here(), anyio.Event())
        if not self.over.is_set():
            with anyio.move_on_after(seconds):
                await event.wait()

    def reasons(self, now: float) -> list[str]:
        """Return why no notification could be stored."""
        if not self.over.is_set():
            return [f"the store of the inbox has not responded for {now - self.began:.1f} s"]
        if self.failure:
            return [f"notifications cannot be stored: {self.failure}"]
        return []


def _problems_of(live: LiveIndex) -> list[str]:
    problems: list[str] = []
    if live.last_error is not None:
        error = type(live.last_error).__name__
        problems.append(f"the newest inventory cannot be used, an older one is: {error}")
    elif live.age is not None and live.status != "ready":
        problems.append(f"the inventory is {live.age:.0f} s old")
    return problems


def _is_in_event_loop() -> bool:
    try:
        call_soon_here()
    except RuntimeError:
        return False
    return True
