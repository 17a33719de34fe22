"""The ledger of outcomes: what became of each invite, and what was paid for it.

An end of a survey is joined to one of the member's invites, which stand in the inbox's store.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from enum import StrEnum
from functools import reduce
from itertools import islice
from operator import index
from typing import TYPE_CHECKING, Any, Final, TypeVar

from attrs import evolve, field, frozen

from sampling_async._contract.checks import moment_of, number_from_0
from sampling_async._contract.frames import ROWS, arrow, batch_of, stream_of, table_of, utc_times
from sampling_async._contract.records import hidden
from sampling_async._pacing.threads import in_thread
from sampling_async._protocol.lessons import LearnedRates
from sampling_async._protocol.requests import quota_id_of
from sampling_async.notifications._entries import code_of, member_key, member_text, text_code
from sampling_async.notifications._settling import PossibleInvite, Settlements, checked_pair, settle
from sampling_async.notifications._stores import AnyStore, run_once, store_of
from sampling_async.notifications._understanding import added, difference, of_hundredths

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from sampling_async import InviteOutcome
    from sampling_async._contract.checks import Text
    from sampling_async.notifications._sql import SqlStore

# What was paid, then what was taken back of it, then whatever is left.
_STEP: Final = "CASE WHEN e.kind != 'reconciliation' THEN 0 WHEN e.amount IS NOT NULL THEN 1 ELSE 2 END"
_ENDS: Final = """
WITH notified AS (
    -- A correction may leave out the original survey, and must join the invite of what it corrects.
    -- Wave 0 means that the service named none: then the invite is one of the same survey.
    SELECT f.id, f.key, f.kind, f.member, f.survey, f.wave, f.quota, f.amount, f.label, f.ended, f.at,
    f.corrects, coalesce((
        SELECT o.origin FROM facts AS o WHERE o.key = f.key AND o.origin IS NOT NULL ORDER BY o.id LIMIT 1
    ), CASE f.wave WHEN 0 THEN f.survey END) AS via, (
        SELECT o.quota FROM facts AS o WHERE o.key = f.key AND o.quota IS NOT NULL ORDER BY o.id LIMIT 1
    ) AS said_quota, coalesce((
        SELECT min(coalesce(o.ended, o.at)) FROM facts AS o
        WHERE o.key = f.key AND o.kind IN ('completion', 'terminate')
    ), f.ended, f.at) AS first_ended
    FROM facts AS f
    WHERE {which} AND f.standing = 'stands'
), ends AS MATERIALIZED (
    -- An end belongs to the invite of its member, survey and wave. Of a routed member it is one of the original
    -- survey: that of the quota which it names, else the last one before the end.
    -- The cast lets SQLite build an index over it; without one, it compares each end with each invite.
    SELECT f.*, CAST(CASE
        WHEN f.via IS NULL OR EXISTS (SELECT 1 FROM invites AS i WHERE i.key = f.key) THEN f.key
        ELSE coalesce((
            -- SQLite's ORDER BY does not see `f`.
            SELECT key FROM (
                SELECT i.key, i.quota = f.said_quota AS is_quota, i.invited <= f.first_ended AS is_before,
                    abs(i.invited - f.first_ended) AS apart
                FROM invites AS i WHERE i.member = f.member AND i.survey = f.via
            ) AS possible ORDER BY is_quota DESC, is_before DESC, apart LIMIT 1
        ), f.key)
    END AS TEXT) AS invite
    FROM notified AS f
)
"""
# Of a store with a million facts, the rates of some hours need a few thousand.
_COMPLETES_OF: Final = """f.kind IN ('completion', 'reconciliation')
    AND f.member IN (SELECT i.member FROM invites AS i WHERE {at} >= ? AND {at} < ?)"""
_JOINED: Final = f"""{_ENDS.format(which="f.kind IN ('completion', 'terminate', 'reconciliation')")}
SELECT 0 AS part, i.rowid AS place, i.key AS invite, coalesce(e.key, i.key) AS key,
    coalesce(e.survey, i.survey) AS ended_in, i.member, i.survey, i.wave, i.quota, i.invited, i.entered, e.kind,
    e.amount, e.label, coalesce(e.ended, e.at) AS ended, e.id AS fact, {_STEP} AS step,
    e.key != i.key AND NOT (e.wave = 0 AND e.survey = i.survey) AS routed
FROM invites AS i LEFT JOIN ends AS e ON e.invite = i.key
UNION ALL
SELECT 1, 0, e.invite, e.key, e.survey, e.member, e.survey, e.wave, e.quota, NULL, NULL, e.kind, e.amount,
    e.label, coalesce(e.ended, e.at), e.id, {_STEP},
    e.via IS NOT NULL AND NOT (e.wave = 0 AND e.via = e.survey)
FROM ends AS e WHERE NOT EXISTS (SELECT 1 FROM invites AS i WHERE i.key = e.invite)
ORDER BY part, place, invite, step, key, fact
"""  # noqa: S608  of constants

# A complete that was taken back is none.
_RATES: Final = f"""{_ENDS.format(which=_COMPLETES_OF)}, completed AS (
    SELECT invite FROM ends GROUP BY invite HAVING max(CASE
        WHEN kind = 'reconciliation' THEN 2 WHEN corrects IS NULL THEN 1 ELSE 0
    END) = 1
)
SELECT i.survey, i.quota, count(*), count(c.invite)
FROM invites AS i LEFT JOIN completed AS c ON c.invite = i.key
WHERE {{at}} >= ? AND {{at}} < ? GROUP BY i.survey, i.quota
"""  # noqa: S608  of constants


def _add_invites(store: SqlStore, invites: Sequence[tuple[object, ...]]) -> int:
    """Store new invites (key, member, survey, wave, quota, time) and return how many are new."""
    columns = "invites (key, member, survey, wave, quota, invited)"
    return store.insert(columns, invites, on_conflict="ON CONFLICT (key) DO NOTHING")


def note_entered(store: SqlStore, member_code: str, quota_id: int, at: float) -> bool:
    """Note when a member was sent to a survey, the first time; return False if there is no such invite."""
    change = "UPDATE invites SET entered = coalesce(entered, ?) WHERE member = ? AND quota = ?"
    return bool(store.run(change, (at, member_text(member_code), quota_id)).rowcount)


def _joined(store: SqlStore) -> Iterator[Mapping[str, Any]]:
    """Yield invites with their ends, then ends without an invite."""
    with store.failing("cannot be read"):
        for rows in store.in_parts(_JOINED):
            names = [column[0] for column in rows.description]
            for values in rows:
                row = dict(zip(names, values, strict=True))
                yield {**row, "member": code_of(row["member"])}


def read_rates(store: SqlStore, since: float, until: float, *, entered: bool) -> LearnedRates:
    """Return the rates of invites that were made between two moments, or entered. It may block."""
    at = "i.entered" if entered else "i.invited"
    with store.reading("cannot be read", is_long=True) as run:
        rows = run(_RATES.format(at=at), (since, until, since, until)).fetchall()
    surveys: dict[int, tuple[int, int]] = {}
    quotas: dict[int, tuple[int, int]] = {}
    with store.as_written():
        for survey, quota, invites, completes in rows:
            for counts, of in ((surveys, index(survey)), (quotas, index(quota))):
                before = counts.get(of, (0, 0))
                counts[of] = before[0] + int(invites), before[1] + int(completes)
    return LearnedRates(surveys=surveys, quotas=quotas)


T = TypeVar("T")
_HOUR: Final = 3600.0
_UNDECIDED: Final = 6 * _HOUR


class SurveyEnding(StrEnum):
    """How a member's survey has ended.

    A `CORRECTED` row changes the revenue of a `COMPLETED` one, and a `RECONCILED` row takes it back.
    """

    OPEN = "open"
    COMPLETED = "completed"
    CORRECTED = "corrected"
    RECONCILED = "reconciled"
    TERMINATED = "terminated"


_ENDINGS: Final[Mapping[str | None, SurveyEnding]] = {
    "completion": SurveyEnding.COMPLETED,
    "terminate": SurveyEnding.TERMINATED,
    "reconciliation": SurveyEnding.RECONCILED,
    None: SurveyEnding.OPEN,
}


@frozen(kw_only=True)
class OutcomeRow:
    """One invite and its end, or one end without an invite.

    Attributes:
        member_code: The member.
        survey_id: The survey, with `wave_id`.
        wave_id: The wave.
        quota_id: The quota of the invite; without an invite, that of the notification, or None if it names
            none.
        ending: How it has ended.
        revenue: What this row adds to the revenue, in the currency of the survey's price, which no notification
            names. A correction is the difference to the revenue before, and a reconciliation is below 0. So the
            sum of all rows of a survey is what is paid.
        reason: The reason of a terminate or a reconciliation.
        invited_at: When the invite was recorded; None if there is no invite.
        entered_at: When the member was sent to the survey, if recorded.
        ended_at: When it ended; if the service does not say, when the notification was received.
        fact_id: The fact of the end, or None.
        is_auto_routed: Whether the member was routed to another survey than the one of the invite.
    """

    member_code: str = field(repr=hidden)
    survey_id: int
    wave_id: int
    quota_id: int | None
    ending: SurveyEnding
    revenue: Decimal = Decimal(0)
    reason: str | None = None
    invited_at: datetime | None = None
    entered_at: datetime | None = None
    ended_at: datetime | None = None
    fact_id: int | None = None
    is_auto_routed: bool = False


@frozen(kw_only=True)
class QuotaFunnel:
    """How many members of a quota reached each stage.

    Attributes:
        survey_id: The survey, with `wave_id`.
        wave_id: The wave.
        quota_id: The quota; None for ends without an invite whose notification names no quota.
        invited: Invites.
        entered: Invites whose member was sent to the survey, as far as that was recorded.
        completed: Completes, those without an invite included.
        terminated: Terminates that were not overruled.
        reasons: The number of terminates by reason.
        open: Invites without an end.
        uninvited: Completes without an invite.
        corrected: Corrections of the revenue.
        reconciled: Reconciliations, which take revenue back.
        revenue: The sum of the revenue, corrections and reconciliations included, in the currency of the
            survey's price. Do not add surveys with different currencies: the sum of each currency is in the
            report of a campaign.
    """

    survey_id: int
    wave_id: int
    quota_id: int | None
    invited: int = 0
    entered: int = 0
    completed: int = 0
    terminated: int = 0
    reasons: Mapping[str, int] = field(factory=dict[str, int])
    open: int = 0
    uninvited: int = 0
    corrected: int = 0
    reconciled: int = 0
    revenue: Decimal = Decimal(0)


class OutcomeLedger:
    """Joins invites with the completions, terminates and reconciliations of an inbox, in the inbox's store.

        ledger = OutcomeLedger("notifications.db")
        async with client.fan_out(requests) as outcomes:
            async for outcome in outcomes:
                batch.append(outcome)
        await ledger.invited(batch)
        ...
        for quota in await ledger.funnel():
            print(quota.quota_id, quota.invited, quota.completed, quota.revenue)

    An *end* (a completion, a terminate or a reconciliation) is joined with the invite of the same member,
    survey and wave. If the member was routed to another survey, the original survey is compared. If the end has
    no wave, only member and survey are compared. If there are several such invites, the one of the quota that
    the end names is taken, else the last one before the end. Each method runs in a thread with a separate
    connection, and works while an inbox is open, too. It raises a StoreError if the store cannot be read or
    written.

    Args:
        store: The inbox's store: the path of its file, a `PostgresStore`, or its address. It is made if there
            is none.
        clock: The clock, in seconds since 1970.
    """

    def __init__(self, store: AnyStore, *, clock: Callable[[], float] = time.time) -> None:
        self._store = store_of(store).copy()
        self._clock = clock

    async def invited(self, outcomes: Iterable[InviteOutcome], *, at: datetime | None = None) -> int:
        """Record invites and return how many are new; outcomes without an invite are skipped.

        Outcomes recorded before, as from a journal, are not recorded again. `at` says when the invites were
        made; it has a time zone, and None means now.

        Raises:
            InvalidRequestError: `at` has no time zone.
        """
        moment = self._clock() if at is None else moment_of(at, "at")
        rows = [
            (
                member_key(outcome.invite.survey_id, outcome.invite.wave_id, outcome.member_code),
                member_text(outcome.member_code),
                outcome.invite.survey_id,
                outcome.invite.wave_id,
                outcome.quota_id,
                moment,
            )
            for outcome in outcomes
            if outcome.invite is not None
        ]
        return await self._written(lambda store: _add_invites(store, rows))

    async def entered(self, member_code: Text, quota_id: int, *, at: datetime | None = None) -> bool:
        """Record that a member was sent to a survey; False if there is no such invite. The first time counts.

        Raises:
            InvalidRequestError: `at` has no time zone, the code is no text, or `quota_id` no ID.
        """
        moment = self._clock() if at is None else moment_of(at, "at")
        code, number = text_code(member_code), quota_id_of(quota_id)
        return await self._written(lambda store: note_entered(store, code, number, moment))

    async def rows(self) -> list[OutcomeRow]:
        """Return all rows: invites in the order in which they were recorded, then ends without an invite."""
        return await in_thread(lambda: list(self.read_rows()))

    def read_rows(self) -> Iterator[OutcomeRow]:
        """Yield what `rows` returns, in this thread and in constant memory."""
        invite, account = None, _InviteAccount()
        with self._store.as_written():
            for row in _joined(self._store):
                if row["invite"] != invite:
                    invite, account = row["invite"], _InviteAccount()
                yield account.booked(row)

    async def funnel(self) -> list[QuotaFunnel]:
        """Return a row for each quota, by survey, wave and quota."""
        return await in_thread(self.read_funnel)

    def read_funnel(self) -> list[QuotaFunnel]:
        """Return what `funnel` returns, in this thread."""
        counts: dict[tuple[int, int, int | None], _QuotaCounts] = {}
        for row in self.read_rows():
            counts.setdefault((row.survey_id, row.wave_id, row.quota_id), _QuotaCounts()).add(row)
        ordered = sorted(counts, key=lambda place: (place[0], place[1], place[2] or 0))
        return [counts[place].funnel(*place) for place in ordered]

    async def rates(self, *, younger: float = _UNDECIDED, since: datetime | None = None) -> LearnedRates:
        """Return the share of invites that ended in a complete, by quota and survey.

            Allocate(5, rates=await ledger.rates())

        Args:
            younger: Invites that are younger than so many seconds do not count: they may still end.
            since: Invites made before do not count; it has a time zone.

        Raises:
            InvalidRequestError: `since` has no time zone.
        """
        first = 0.0 if since is None else moment_of(since, "since")
        last = self._clock() - number_from_0(younger, "younger", "seconds")
        return await in_thread(lambda: read_rates(self._store.copy(), first, last, entered=False))

    async def overdue(self, hours: float) -> list[OutcomeRow]:
        """Return the invites without an end that are older than so many hours.

        Raises:
            InvalidRequestError: `hours` is not a number of at least 0.
        """
        latest = self._clock() - number_from_0(hours, "hours") * _HOUR
        return [
            row
            for row in await self.rows()
            if row.ending is SurveyEnding.OPEN
            and row.invited_at is not None
            and row.invited_at.timestamp() <= latest
        ]

    @property
    def store(self) -> SqlStore:
        """The store of the ledger, not open."""
        return self._store.copy()

    async def settle(self, pairs: Iterable[PossibleInvite]) -> Settlements:
        """Return which of some unknown pairs have an invite, as the notifications of the store prove.

            possible = possible_invites(Journal("night.journal").read_outcomes(), quotas.surveys, since=began)
            found = await ledger.settle(possible)

        Of a campaign, `Campaign.settle` does this. Nothing is written. What is no such pair is refused.
        """
        return await in_thread(settle, self.store, map(checked_pair, pairs))

    async def uninvited(self) -> list[OutcomeRow]:
        """Return the completes without an invite."""
        ended = (SurveyEnding.COMPLETED, SurveyEnding.CORRECTED)
        return [row for row in await self.rows() if row.invited_at is None and row.ending in ended]

    async def to_arrow(self) -> Any:
        """Return all rows as an Arrow table. It needs the extra `panel`.

        Raises:
            ImportError: pyarrow is missing.
        """
        return await in_thread(self.read_arrow)

    def read_arrow(self) -> Any:
        """Return what `to_arrow` returns, in this thread."""
        return table_of(_schema(), self._batches())

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Export all rows to another library, by the Arrow C stream interface, in constant memory.

        They are read where the stream is used: in a service, call that in a thread.
        """
        return stream_of(_schema(), self._batches(), requested_schema)

    def _batches(self) -> Iterator[Any]:
        schema, rows = _schema(), self.read_rows()
        while some := list(islice(rows, ROWS)):
            columns = {name: [getattr(row, name) for row in some] for name in schema.names}
            columns["ending"] = [str(ending) for ending in columns["ending"]]
            yield batch_of(schema, columns)

    async def _written(self, operation: Callable[[SqlStore], T]) -> T:
        return await in_thread(lambda: run_once(self._store.copy(), operation))


def _schema() -> Any:
    pa = arrow()
    text, whole, at = pa.string(), pa.int64(), utc_times()
    columns = {"member_code": text, "survey_id": whole, "wave_id": whole, "quota_id": whole, "ending": text}
    columns |= {"revenue": pa.decimal128(38, 2), "reason": text, "invited_at": at, "entered_at": at}
    return pa.schema(columns | {"ended_at": at, "fact_id": whole, "is_auto_routed": pa.bool_()})


class _InviteAccount:
    """The payments for an invite while its rows are read: completions, then reconciliations."""

    def __init__(self) -> None:
        self._latest: dict[str, Decimal] = {}
        self._paid: dict[int, Decimal] = {}

    def booked(self, row: Mapping[str, Any]) -> OutcomeRow:
        """Return a row as an outcome whose revenue is the change, not the total."""
        outcome, key, surveys = _row(row), row["key"], [row["ended_in"]]
        if outcome.ending in (SurveyEnding.OPEN, SurveyEnding.TERMINATED):
            return outcome
        if outcome.ending is SurveyEnding.RECONCILED and row["ended_in"] not in self._paid:
            # It may name the survey of the invite instead of the one that was paid.
            surveys = [*self._paid] or surveys
        paid = reduce(added, (self._paid.pop(survey, Decimal(0)) for survey in surveys))
        if outcome.ending is SurveyEnding.COMPLETED:
            before = self._latest.get(key)
            self._latest[key] = outcome.revenue
            if before is not None:
                change = difference(outcome.revenue, before)
                outcome = evolve(outcome, ending=SurveyEnding.CORRECTED, revenue=change)
        else:
            # Without an amount, all that was paid is taken back.
            taken = max(paid, Decimal(0)) if row["amount"] is None else outcome.revenue
            outcome = evolve(outcome, revenue=difference(Decimal(0), taken))
        self._paid[surveys[0]] = added(paid, outcome.revenue)
        return outcome


class _QuotaCounts:
    """The counts of a quota while its rows are read, by the names of `QuotaFunnel`."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._member: str | None = None
        self._revenue = Decimal(0)

    def add(self, row: OutcomeRow) -> None:
        self._counts[row.ending.value] += 1
        self._revenue = added(self._revenue, row.revenue)
        if row.ending is SurveyEnding.CORRECTED:  # the invite was counted with its complete
            return
        # A routed member may have several ends for one invite: its rows stand one after the other.
        if row.member_code != self._member:
            self._counts["invited"] += row.invited_at is not None
            self._counts["entered"] += row.entered_at is not None
        self._member = row.member_code
        self._counts["uninvited"] += row.invited_at is None and row.ending is SurveyEnding.COMPLETED
        if row.ending is SurveyEnding.TERMINATED:
            self._reasons[row.reason or ""] += 1

    def funnel(self, survey_id: int, wave_id: int, quota_id: int | None) -> QuotaFunnel:
        place: dict[str, Any] = {"survey_id": survey_id, "wave_id": wave_id, "quota_id": quota_id}
        return QuotaFunnel(**place, **self._counts, reasons=dict(self._reasons), revenue=self._revenue)


def _row(row: Mapping[str, Any]) -> OutcomeRow:
    return OutcomeRow(
        member_code=row["member"],
        # A file of SQLite takes a text for a number.
        survey_id=index(row["survey"]),
        wave_id=index(row["wave"]),
        quota_id=None if row["quota"] is None else index(row["quota"]),
        ending=_ENDINGS[row["kind"]],
        revenue=of_hundredths(row["amount"] or 0),
        reason=None if row["label"] is None else json.loads(row["label"]),
        invited_at=_moment(row["invited"]),
        entered_at=_moment(row["entered"]),
        ended_at=_moment(row["ended"]),
        fact_id=row["fact"],
        is_auto_routed=bool(row["routed"]),
    )


def _moment(seconds: float | None) -> datetime | None:
    if seconds is None:
        return None
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        # Some services send the last possible moment, which as a float may be in the year 10000.
        return datetime.max.replace(tzinfo=UTC) if seconds > 0 else datetime.min.replace(tzinfo=UTC)
