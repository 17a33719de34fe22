"""What a store holds: facts as an async iterator, in pages, or an Arrow table; and how many wait."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar

import anyio
from attrs import evolve, frozen

from sampling_async import InvalidRequestError
from sampling_async._contract.frames import arrow, utc_times
from sampling_async._pacing.threads import call_soon_here, in_thread
from sampling_async.notifications._facts import DamagedStoreError
from sampling_async.notifications._records import Kind, Notification

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sampling_async.notifications._facts import Backlog, Entry, Fact, State
    from sampling_async.notifications._sql import SqlStore


@frozen(kw_only=True)
class KindStatus:
    """The facts of one kind.

    Attributes:
        pending: How many wait for their handler, or are with it now. Without a handler they wait for one.
        dead: How many wait for a replay.
        failed: How many calls of the handler have failed since the inbox was opened, in this process.
        oldest_seconds: The age of the oldest pending one, in seconds since it came; 0 if none is pending.
        has_handler: Whether this process handles them.
    """

    pending: int = 0
    dead: int = 0
    failed: int = 0
    oldest_seconds: float = 0.0
    has_handler: bool = False


@frozen(kw_only=True)
class InboxStatus(KindStatus):
    """The state of an inbox and of its store, see `Inbox.status`. The counts are sums over all kinds.

    Attributes:
        is_open: Whether it takes hits.
        not_stored: How many hits in a row could not be stored, and were answered with 503.
        by_kind: The counts of each kind; None stands for what was not understood.
    """

    is_open: bool
    not_stored: int
    by_kind: Mapping[Kind | None, KindStatus]


def status_of(
    backlog: Iterable[Backlog],
    failed: Mapping[Kind | None, int],
    handled: Collection[Kind | None],
    *,
    is_open: bool,
    not_stored: int,
    now: float,
) -> InboxStatus:
    by_kind = {
        kind: KindStatus(failed=failed.get(kind, 0), has_handler=kind in handled) for kind in (*Kind, None)
    }
    for row in backlog:
        by_kind[row.kind] = evolve(
            by_kind[row.kind],
            pending=row.pending,
            dead=row.dead,
            oldest_seconds=0.0 if row.oldest_at is None else max(0.0, now - row.oldest_at),
        )
    return InboxStatus(
        is_open=is_open,
        not_stored=not_stored,
        pending=sum(each.pending for each in by_kind.values()),
        dead=sum(each.dead for each in by_kind.values()),
        failed=sum(each.failed for each in by_kind.values()),
        oldest_seconds=max(each.oldest_seconds for each in by_kind.values()),
        has_handler=bool(handled),
        by_kind=by_kind,
    )


N = TypeVar("N", bound=Notification)
_PAGE: Final = 1_000
_OF_FACTS: Final = (
    "id",
    "key",
    "received_at",
    "receipts",
    "differing",
    "verified",
    "anomaly",
    "corrects",
    "validity",
    "state",
)
_OF_RECORDS: Final = (
    "member_code",
    "survey_id",
    "wave_id",
    "quota_id",
    "revenue",
    "amount",
    "reason",
    "is_live",
    "at",
)


_KNOWN: Final = {"repeated", "differs"}


class Arrivals:
    """What this process has stored, in any thread: tasks that wait for facts need not look for it."""

    def __init__(self) -> None:
        self._counts: Counter[Kind | None] = Counter()
        self._waiting: dict[anyio.Event, tuple[Collection[Kind | None] | None, Callable[[], object]]] = {}

    def note(self, entries: Iterable[Entry], verdicts: Iterable[str]) -> None:
        """Note what became of entries: a repetition is no new fact."""
        kinds = [entry.kind for entry, said in zip(entries, verdicts, strict=True) if said not in _KNOWN]
        self._counts.update(kinds)
        for wanted, wake in tuple(self._waiting.values()):
            if wanted is None or any(kind in wanted for kind in kinds):
                with suppress(RuntimeError):  # its event loop has ended
                    wake()

    def count(self, kinds: Collection[Kind | None] | None) -> int:
        """Return how many facts of these kinds were noted; None stands for all kinds."""
        return sum(tuple(self._counts.values()) if kinds is None else (self._counts[kind] for kind in kinds))

    async def more_than(self, count: int, kinds: Collection[Kind | None] | None, seconds: float) -> None:
        """Wait for more facts of these kinds than a count, some seconds at most."""
        with anyio.move_on_after(seconds):
            while self.count(kinds) == count:
                event = anyio.Event()
                self._waiting[event] = kinds, partial(call_soon_here(), event.set)
                try:
                    if self.count(kinds) == count:  # what is noted from now on wakes it
                        await event.wait()
                finally:
                    del self._waiting[event]


class FactStream(Generic[N]):
    """The facts of a store in the order of their arrival, see `Inbox.facts`.

    It holds nothing open, so a loop over it may end at any place.
    """

    # A class and not a generator: one that is left early would have to be closed by its reader.

    def __init__(
        self,
        store: SqlStore,
        kinds: list[Kind | None] | None,
        after: int,
        state: State | None,
        *,
        poll: float | None,
        arrivals: Arrivals,
    ) -> None:
        self._store = store
        self._kinds = kinds
        self._after = after
        self._state = state
        self._poll = poll
        self._arrivals = arrivals
        self._page: deque[Any] = deque()
        self._is_last = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Fact[N]:
        """Return the next fact.

        Raises:
            StoreError: The store cannot be read. If the next fact is damaged, the text says how to go on.
            StopAsyncIteration: There are no more, and `follow` is false.
        """
        while not self._page:
            if self._is_last:
                raise StopAsyncIteration
            count = self._arrivals.count(self._kinds)
            facts, is_end = await in_thread(self._read)
            self._page.extend(facts)
            self._is_last = is_end and self._poll is None
            if not facts and self._poll is not None:
                await self._arrivals.more_than(count, self._kinds, self._poll)
        fact: Fact[N] = self._page.popleft()
        self._after = fact.id
        return fact

    async def to_arrow(self) -> Any:
        """Return the facts that are left as an Arrow table, one row each. It needs the extra `panel`.

        The columns are those of `Fact`, the fields as JSON, and those that most records have: member, survey,
        wave, quota, revenue, amount, reason, `is_live` and `at`; null where a record has no such field.

        Raises:
            InvalidRequestError: `follow` is true, so there is no last fact.
        """
        if self._poll is not None:
            raise InvalidRequestError("facts that are followed have no end: use follow=False for a table")
        facts = [fact async for fact in self]
        return await in_thread(_table, facts)

    def _read(self) -> tuple[list[Any], bool]:
        """Return a page of facts, up to a damaged one, and whether there are no more."""
        facts: list[Any] = []
        try:
            for fact in islice(
                self._store.facts(kinds=self._kinds, after=self._after, state=self._state), _PAGE
            ):
                facts.append(fact)  # noqa: PERF402  it may raise
        except DamagedStoreError:
            if not facts:
                raise
            return facts, False
        return facts, len(facts) < _PAGE


def _table(facts: Sequence[Fact[Any]]) -> Any:
    pa = arrow()
    text, number = pa.string(), pa.int64()
    types = {
        **dict.fromkeys(("received_at", "at"), utc_times()),
        **dict.fromkeys(("verified", "is_live"), pa.bool_()),
        **dict.fromkeys(("key", "validity", "state", "member_code", "reason", "kind", "posted_as"), text),
        **dict.fromkeys(("revenue", "amount"), pa.decimal128(38, 2)),
        **dict.fromkeys(("anomaly", "fields"), text),
    }
    columns: dict[str, list[Any]] = {
        "kind": [None if fact.kind is None else str(fact.kind) for fact in facts],
        "posted_as": [str(fact.posted_as) for fact in facts],
        **{name: [getattr(fact, name) for fact in facts] for name in _OF_FACTS},
        **{name: [getattr(fact.notification, name, None) for fact in facts] for name in _OF_RECORDS},
        "fields": [json.dumps(fact.fields) for fact in facts],
    }
    return pa.table({name: pa.array(values, types.get(name, number)) for name, values in columns.items()})
