"""Read a campaign's summary from its ledger, with counts and latencies by interval."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime
from decimal import Decimal
from math import floor, inf, log
from typing import TYPE_CHECKING, Any, Final, NamedTuple, get_args

from attrs import define, field

from sampling_async._contract.currencies import total_of
from sampling_async._contract.result_codes import ResultCode
from sampling_async._protocol.lessons import rule_for
from sampling_async.campaign._ends import ends_of, revenue_by_currency
from sampling_async.campaign._groups import groups_of
from sampling_async.campaign._ledger import ASKED, IN_FLIGHT, KILLED, LAST_SIGN
from sampling_async.campaign._planning import sums_by_currency
from sampling_async.campaign._summary import (
    CampaignState,
    CodeCount,
    CurrencySums,
    Moment,
    Pairs,
    QuotaFill,
    Summary,
    Wait,
    WaitKind,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from sampling_async._protocol.lessons import Rule
    from sampling_async.campaign._ends import EndSums
    from sampling_async.campaign._ledger import CampaignLedger
    from sampling_async.campaign._ledger_file import PlannedQuota
    from sampling_async.campaign._limits import Limits
    from sampling_async.campaign._summary import Ends
    from sampling_async.notifications import OutcomeLedger

SLOT: Final = 10  # seconds in an interval of the ledger
_BRIEF: Final = 5.0  # seconds: waits that are closer together are one
_FINEST: Final = 0.001
_RATIO: Final = 1.1  # a latency is kept to within 10 %: 0.1 s is in the interval from 0.097 to 0.107 s


def class_of(seconds: float) -> int:
    """Return the class of a latency: all of one class are within 10 %."""
    return 0 if seconds <= _FINEST else floor(log(seconds / _FINEST, _RATIO)) + 1


def seconds_of(class_: int) -> float:
    """Return the middle of a class of latencies."""
    return _FINEST * _RATIO ** (class_ - 0.5) if class_ else _FINEST


def percentile(latencies: Mapping[int, int], percent: int) -> float | None:
    """Return what `percent` percent of the latencies do not exceed; None if there are none."""
    total = sum(latencies.values())
    wanted = -(-total * percent // 100)
    for class_ in sorted(latencies):
        wanted -= latencies[class_]
        if wanted <= 0:
            return seconds_of(class_)
    return None


@define
class _Slot:
    requests: int = 0
    invited: int = 0
    rejected: int = 0
    failed: int = 0
    latencies: Counter[int] = field(factory=Counter[int])
    limit: float | None = None

    def row(self) -> tuple[Any, ...]:
        return self.requests, self.invited, self.rejected, self.failed, json.dumps(self.latencies), self.limit


@define
class Moments:
    """The intervals of one run, until they are written."""

    _run: int
    _slots: dict[int, _Slot] = field(factory=dict[int, _Slot])
    _changed: set[int] = field(factory=set[int])
    _latest: int = 0

    def _at(self, now: float) -> _Slot:
        # A clock that is set back must not change intervals that were written.
        at = self._latest = max(self._latest, int(now // SLOT) * SLOT)
        self._changed.add(at)
        return self._slots.setdefault(at, _Slot())

    def add(self, now: float, latency: float, *, invited: int, rejected: int, failed: int) -> None:
        slot = self._at(now)
        slot.requests += 1
        slot.invited += invited
        slot.rejected += rejected
        slot.failed += failed
        slot.latencies[class_of(latency)] += 1

    def note_limit(self, now: float, limit: float) -> None:
        self._at(now).limit = limit

    def taken(self) -> list[tuple[Any, ...]]:
        """Return the rows that have changed since the last call."""
        changed = sorted(self._changed)
        self._changed.clear()
        rows = [(self._run, at, *self._slots[at].row()) for at in changed]
        # Only the last one may still change.
        for at in changed[:-1]:
            del self._slots[at]
        return rows


@define
class WaitLog:
    """The waits of a run. Those of one kind that follow each other closely are one."""

    _last: int  # the number of the last wait of the runs before
    _latest: dict[str, tuple[int, float, float]] = field(factory=dict[str, "tuple[int, float, float]"])

    def extend(self, kind: str, began: float, ended: float) -> tuple[int, float, float]:
        """Add a wait, or make the latest one of its kind longer; return its number, beginning and end."""
        number, first, last = self._latest.get(kind, (0, 0.0, -inf))
        if began - last > _BRIEF:
            self._last += 1
            number, first, last = self._last, began, ended
        self._latest[kind] = number, first, max(last, ended)
        return self._latest[kind]


_MOST_MOMENTS: Final = 240
_SETTLED: Final = """
SELECT count(*) FROM settled AS s WHERE EXISTS (
    SELECT 1 FROM pairs AS p
    WHERE p.member = s.member AND p.quota = s.quota AND p.state IN ('unknown', 'pending')
)
"""
_POSSIBLE: Final = """
SELECT coalesce(q.currency, 0), coalesce(sum(i.partner_amount), 0.0)
FROM invites AS i LEFT JOIN quotas AS q ON q.id = i.quota GROUP BY 1
"""
_NO_CODE: Final = "no usable response, or not sent"


def summary_of(
    ledger: CampaignLedger, rules: Mapping[int, Rule], outcomes: OutcomeLedger | None = None
) -> Summary:
    """Return the summary of a campaign, with what its invites have brought if `outcomes` know.

    What was in flight when a process ended is `unknown`, also before the next run notes that.
    """
    is_running = ledger.is_running()
    if not ledger.plan:
        raise ledger.error("has no plan yet")
    with ledger.as_written():
        quotas = ledger.quotas()
        counts = _counted(ledger, quotas, is_running=is_running)
        earlier = ledger.earlier()
        fills = tuple(
            _fill(quota, counts.by_quota[quota.id], earlier.get(quota.id, 0))
            for quota in sorted(quotas, key=lambda quota: (-quota.room, quota.id))
            if quota.id in counts.by_quota
        )
    ends, by_group = (None, None) if outcomes is None else ends_of(ledger, fills, outcomes)
    with ledger.as_written():
        return _summed(ledger, rules, fills, counts, ends=ends, by_group=by_group, is_running=is_running)


def _summed(
    ledger: CampaignLedger,
    rules: Mapping[int, Rule],
    fills: tuple[QuotaFill, ...],
    counts: _PairCounts,
    *,
    ends: Ends | None,
    by_group: Mapping[int, EndSums] | None,
    is_running: bool,
) -> Summary:
    facts = dict(ledger.read("SELECT name, value FROM facts"))
    states = sum(counts.by_quota.values(), Counter[str]())
    pairs = Pairs(planned=states.total(), **{state: states[state] for state in states})
    runs = ledger.read(
        f"SELECT began, coalesce(ended, {LAST_SIGN}), reason, ended IS NULL FROM runs ORDER BY id"  # noqa: S608
    )
    now = datetime.now(UTC).timestamp()
    limits = ledger.limits()
    state, reason = _state(pairs, runs, limits, is_running=is_running)
    rates, added = ledger.currency_rates(), ledger.adding()
    possible = dict.fromkeys(counts.planned, 0.0) | dict(ledger.read(_POSSIBLE))
    revenue = {} if ends is None else revenue_by_currency(ends.quotas)
    matched = ledger.read("SELECT count(*) FROM members")[0][0]  # in any plan
    return Summary(
        state=state,
        reason=reason,
        planned_at=_moment(float(facts["planned_at"])),
        started_at=_moment(runs[0][0]) if runs else None,
        ended_at=None if is_running or not runs else _moment(runs[-1][1]),
        active_seconds=sum(
            (now if is_running and has_no_end else ended) - began for began, ended, _, has_no_end in runs
        ),
        runs=len(runs),
        members=max(int(facts["members"]), matched),  # a top-up may be for others
        matched=matched,
        invited_members=ledger.read("SELECT count(DISTINCT member) FROM invites")[0][0],
        pairs=pairs,
        asked=pairs.planned - pairs.pending - pairs.skipped + _waiting_again(ledger, is_running=is_running),
        settled=ledger.read(_SETTLED)[0][0],
        requests=int(facts.get("requests", 0)),
        planned_value=added(counts.planned),
        expected_value=added(counts.expected),
        possible_value=total_of(possible, rates),
        spent=ledger.spent() + ledger.doubtful() + counts.lost,
        currency_id=next(iter(counts.planned)) or None if len(counts.planned) == 1 else None,
        by_currency={
            each: CurrencySums(
                planned_value=value,
                expected_value=counts.expected[each],
                possible_value=possible[each],
                revenue=None if ends is None else revenue.get(each, Decimal(0)),
            )
            for each, value in counts.planned.items()
        },
        currency_rates=rates,
        codes=_codes(ledger, rules),
        skipped=dict(
            ledger.read(
                "SELECT coalesce(reason, ''), count(*) FROM pairs WHERE state = 'skipped'"
                " GROUP BY reason ORDER BY 2 DESC"
            )
        ),
        quotas=fills,
        timeline=_timeline(
            ledger.read('SELECT slot, requests, invited, rejected, failed, latencies, "limit" FROM moments')
        ),
        waits=tuple(
            Wait(kind=kind, began=_moment(began), ended=_moment(ended))
            for kind, began, ended in ledger.read("SELECT kind, began, ended FROM waits ORDER BY began")
            if kind in get_args(WaitKind)
        ),
        limits=limits.in_words(),
        ends=ends,
        groups=tuple(groups_of(ledger, by_group)),
    )


class _PairCounts(NamedTuple):
    by_quota: dict[int, Counter[str]]  # pairs by quota and state
    planned: dict[int, float]  # the value of all pairs, by currency
    expected: dict[int, float]  # that of the invites
    lost: float  # the cost of what a dead run has left in flight


def _counted(ledger: CampaignLedger, quotas: Iterable[PlannedQuota], *, is_running: bool) -> _PairCounts:
    by_quota: dict[int, Counter[str]] = {}
    of_id = {quota.id: quota for quota in quotas}
    values: list[tuple[PlannedQuota, float]] = []
    invited: list[tuple[PlannedQuota, float]] = []
    for quota_id, state, count, value in ledger.counts():
        by_quota.setdefault(quota_id, Counter())[state] += count
        values.append((of_id[quota_id], value))
        invited.append((of_id[quota_id], value if state == "invited" else 0.0))
    lost = 0.0
    if not is_running:
        for _, quota_id in ledger.read(IN_FLIGHT, ledger.plan):
            by_quota[quota_id].update({"pending": -1, "unknown": 1})
            lost += of_id[quota_id].cost
    return _PairCounts(by_quota, sums_by_currency(values), sums_by_currency(invited), lost)


def _waiting_again(ledger: CampaignLedger, *, is_running: bool) -> int:
    """Return how many pending pairs were answered before, without those that a dead run had in flight."""
    query = "SELECT count(*) FROM pairs WHERE state = 'pending' AND code IS NOT NULL"
    if is_running:
        return int(ledger.read(query)[0][0])
    lost = f" AND (member, quota) NOT IN ({IN_FLIGHT})"
    return int(ledger.read(query + lost, ledger.plan)[0][0])


def _fill(quota: PlannedQuota, pairs: Counter[str], earlier: int) -> QuotaFill:
    return QuotaFill(
        quota_id=quota.id,
        survey_id=quota.survey,
        wave_id=quota.wave,
        survey_name=quota.name,
        room=quota.room + earlier,  # what its latest plan had left, and what was invited before
        planned=pairs.total(),
        invited=pairs["invited"],
        rejected=pairs["rejected"],
        unknown=pairs["unknown"],
        value=quota.value,
        currency_id=quota.currency,
        closed=quota.closed,
    )


def _state(
    pairs: Pairs, runs: Sequence[tuple[Any, ...]], limits: Limits, *, is_running: bool
) -> tuple[CampaignState, str]:
    """Return the state of a campaign, and why it is in it."""
    if is_running:
        return ("paused", limits.reason) if limits.paused else ("running", "")
    if not runs:
        return "planned", ""
    if pairs.pending:
        return "stopped", str(runs[-1][2]) or KILLED
    return "finished", ""


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _codes(ledger: CampaignLedger, rules: Mapping[int, Rule]) -> tuple[CodeCount, ...]:
    names = dict(ledger.read("SELECT code, result FROM codes"))
    counts = ledger.read(
        f"SELECT code, count(*) FROM pairs AS p WHERE {ASKED} GROUP BY code ORDER BY 2 DESC, 1"  # noqa: S608
    )
    found: list[CodeCount] = []
    for code, count in counts:
        if code is None:
            advice = "Compare with the service's own records before such a pair is requested again."
            found.append(CodeCount(result_code=None, result=_NO_CODE, pairs=count, lesson="", advice=advice))
            continue
        name = names.get(code) or ResultCode.name_of(code) or f"code {code}"
        rule = rule_for(rules, code)
        is_invite = code == ResultCode.SUCCESS
        found.append(
            CodeCount(
                result_code=code,
                result=name,
                pairs=count,
                lesson="" if is_invite else str(rule.lesson),
                advice="" if is_invite else rule.advice,
            )
        )
    return tuple(found)


def _timeline(rows: Iterable[tuple[Any, ...]]) -> tuple[Moment, ...]:
    """Return the intervals of the ledger, several as one if there are many."""
    slots: dict[int, list[tuple[Any, ...]]] = {}
    for slot, *more in rows:
        slots.setdefault(slot, []).append(tuple(more))
    if not slots:
        return ()
    first, last = min(slots), max(slots)
    width = max(1, -(-((last - first) // SLOT + 1) // _MOST_MOMENTS)) * SLOT
    merged: dict[int, list[tuple[Any, ...]]] = {begin: [] for begin in range(first, last + 1, width)}
    for slot in sorted(slots):
        merged[slot - (slot - first) % width].extend(slots[slot])
    return tuple(_merged(begin, width, found) for begin, found in merged.items())


def _merged(begin: int, width: int, rows: Sequence[tuple[Any, ...]]) -> Moment:
    latencies: Counter[int] = Counter()
    limit: float | None = None
    for *_, text, of_slot in rows:
        latencies.update({int(class_): count for class_, count in json.loads(text).items()})
        limit = limit if of_slot is None else of_slot
    requests, invited, rejected, failed = (sum(row[at] for row in rows) for at in range(4))
    return Moment(
        at=_moment(begin),
        seconds=width,
        requests=requests,
        invited=invited,
        rejected=rejected,
        failed=failed,
        latency=percentile(latencies, 50),
        latency_95=percentile(latencies, 95),
        limit=limit,
    )
