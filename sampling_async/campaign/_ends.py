"""What the invites of a campaign have brought: the ledger of outcomes, joined with the campaign's invites."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from math import isnan, nan
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from attrs import define, field

from sampling_async._contract.currencies import add_to, total_of
from sampling_async.campaign._summary import Conversion, Ends
from sampling_async.notifications import SurveyEnding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from sampling_async._contract.currencies import CurrencyRates
    from sampling_async.campaign._ledger import CampaignLedger
    from sampling_async.campaign._summary import QuotaFill
    from sampling_async.notifications import OutcomeLedger, OutcomeRow

_HOUR: Final = 3600
_SLACK: Final = 3600.0  # seconds: the clocks of two hosts may be so far apart


class _InviteOf(NamedTuple):
    quota: int
    survey: int
    wave: int
    at: float
    group: int  # the number of its member's groups, see `_groups.py`


_OF_ONE: Final = partial(total_of, rates=None)


@define
class EndSums:
    """What came of some invites, until it is shown as a `Conversion`."""

    counts: Counter[str] = field(factory=Counter[str])
    # By currency, since a complete has the currency of its survey.
    expected: dict[int, float] = field(factory=dict[int, float])
    revenue: dict[int, Decimal] = field(factory=dict[int, Decimal])
    # The completes of invites whose chance is not known are NaN, and so are those of all sums with them.
    by_ir: float = 0.0
    planned: float = 0.0

    def add(self, row: OutcomeRow, currency_id: int) -> None:
        self.counts[row.ending.value] += 1
        add_to(self.revenue, currency_id, row.revenue)

    def take(self, other: EndSums) -> None:
        self.counts.update(other.counts)
        self.by_ir += other.by_ir
        self.planned += other.planned
        for each, expected in other.expected.items():
            add_to(self.expected, each, expected)
        for each, revenue in other.revenue.items():
            add_to(self.revenue, each, revenue)

    def _promised(self, completes: float) -> float | None:
        return round(completes, 2) if self.counts["invited"] and not isnan(completes) else None

    def conversion(
        self,
        added: Callable[[Mapping[int, float]], float | None] = _OF_ONE,
        rates: CurrencyRates | None = None,
        **of: Any,
    ) -> Conversion:
        names = ("invited", "entered", "completed", "terminated", "reconciled")
        counts: dict[str, Any] = {name: self.counts[name] for name in names}
        currencies = self.expected.keys() | self.revenue.keys()
        return Conversion(
            **of,
            **counts,
            expected=added(self.expected),
            revenue=_added_exactly(self.revenue, rates),
            currency_id=(next(iter(currencies)) or None) if len(currencies) == 1 and rates is None else None,
            completes_by_ir=self._promised(self.by_ir),
            completes_planned=self._promised(self.planned),
        )


def _added_exactly(sums: Mapping[int, Decimal], rates: CurrencyRates | None) -> Decimal | None:
    if rates is None and len(sums) <= 1:
        return sum(sums.values(), Decimal(0))
    total = total_of({each: float(revenue) for each, revenue in sums.items()}, rates)
    return None if total is None else Decimal(str(round(total, 2)))


def revenue_by_currency(found: Iterable[Conversion]) -> dict[int, Decimal]:
    """Return the revenue of some quotas, each of which has one currency."""
    sums: dict[int, Decimal] = {}
    for each in found:
        add_to(sums, each.currency_id or 0, each.revenue or Decimal(0))
    return sums


def ends_of(
    ledger: CampaignLedger, quotas: Iterable[QuotaFill], outcomes: OutcomeLedger
) -> tuple[Ends, dict[int, EndSums]]:
    """Return what became of a campaign's invites, and the same by group. It reads all outcomes, in this thread.

    Raises:
        StoreError: The outcomes cannot be read.
    """
    fills = {fill.quota_id: fill for fill in quotas}
    with ledger.as_written():
        by_quota = _promised(ledger, fills)
    by_hour: dict[int, EndSums] = {}
    by_group: dict[int, EndSums] = {}
    invites_of = _INVITES_OF.format(grouped="0" if ledger.fact("groups") is None else "m.grouped")
    reasons: Counter[str] = Counter()
    entered: set[tuple[str, int]] = set()
    for row in outcomes.read_rows():
        invite = _invite_of(ledger, row, invites_of)
        sums = None if invite is None else by_quota.get(invite.quota)
        if invite is None or sums is None:
            continue
        of_group = by_group.setdefault(invite.group, EndSums())
        # A routed member has several rows for one invite.
        if row.entered_at is not None and (row.member_code, invite.quota) not in entered:
            entered.add((row.member_code, invite.quota))
            for each in (sums, of_group):
                each.counts["entered"] += 1
        if row.ended_at is None:
            continue
        currency = fills[invite.quota].currency_id or 0
        of_hour = by_hour.setdefault(int(row.ended_at.timestamp()) // _HOUR, EndSums())
        for each in (sums, of_group, of_hour):
            each.add(row, currency)
        if row.ending is SurveyEnding.TERMINATED:
            reasons[row.reason or ""] += 1
    surveys: dict[tuple[int, int, str], EndSums] = {}
    total = EndSums()
    for quota_id, sums in by_quota.items():
        fill = fills[quota_id]
        of_survey = surveys.setdefault((fill.survey_id, fill.wave_id, fill.survey_name), EndSums())
        for whole in (of_survey, total):
            whole.take(sums)
    rates, added = ledger.currency_rates(), ledger.adding()
    ends = Ends(
        total=total.conversion(added, rates),
        reasons=dict(reasons.most_common()),
        surveys=_ordered(
            (
                sums.conversion(survey_id=survey_id, wave_id=wave_id, survey_name=name)
                for (survey_id, wave_id, name), sums in surveys.items()
            ),
            rates,
        ),
        quotas=_ordered(
            (
                sums.conversion(
                    survey_id=fills[quota_id].survey_id,
                    wave_id=fills[quota_id].wave_id,
                    survey_name=fills[quota_id].survey_name,
                    quota_id=quota_id,
                )
                for quota_id, sums in by_quota.items()
            ),
            rates,
        ),
        hours=tuple(
            by_hour[hour].conversion(added, rates, hour=datetime.fromtimestamp(hour * _HOUR, UTC))
            for hour in sorted(by_hour)
        ),
    )
    return ends, by_group


def _promised(ledger: CampaignLedger, fills: Mapping[int, QuotaFill]) -> dict[int, EndSums]:
    """Return the invites of each quota, with what they were expected to bring."""
    by_plan: dict[str, dict[str, tuple[float, float]]] = json.loads(ledger.fact("chances") or "{}")
    found: dict[int, EndSums] = {}
    for quota_id, plan, invited, value in ledger.read(_INVITED):
        if quota_id in fills:  # a run that is active may have added one since
            currency = fills[quota_id].currency_id or 0
            expected, revenue = {currency: invited * value}, {currency: Decimal(0)}
            chances = by_plan.get(str(plan), {}).get(str(quota_id), (nan, nan))
            by_ir, planned = (invited * each for each in chances)
            of_plan = EndSums(Counter(invited=invited), expected, revenue, by_ir, planned)
            found.setdefault(quota_id, EndSums()).take(of_plan)
    return found


def _ordered(found: Iterable[Conversion], rates: CurrencyRates | None) -> tuple[Conversion, ...]:
    """Return what brought most first, without rates in each currency; what brought nothing, by its invites."""

    def key(each: Conversion) -> tuple[float, ...]:
        currency = each.currency_id or 0
        revenue = float(each.revenue or 0) * (rates.by_id.get(currency, 1.0) if rates else 1.0)
        return 0 if rates else currency, -revenue, -each.invited, each.quota_id or 0

    return tuple(sorted(found, key=key))


# By plan: each invite counts as its own plan expected.
_INVITED: Final = """
SELECT i.quota, i.plan, i.invites, t.value FROM (
    SELECT quota, plan, count(*) AS invites FROM pairs AS p
    WHERE state = 'invited' OR state IN ('unknown', 'pending') AND EXISTS (
        SELECT 1 FROM settled AS s WHERE s.member = p.member AND s.quota = p.quota
    ) GROUP BY quota, plan
) AS i JOIN terms AS t USING (quota, plan)
"""
_INVITES_OF: Final = """
SELECT i.quota, i.survey, i.wave, i.at, coalesce({grouped}, 0)
FROM invites AS i JOIN members AS m ON m.id = i.member WHERE m.code = ?
UNION ALL SELECT s.quota, q.survey, q.wave, s.at, coalesce({grouped}, 0)
FROM settled AS s JOIN members AS m ON m.id = s.member JOIN quotas AS q ON q.id = s.quota WHERE m.code = ?
"""


def _invite_of(ledger: CampaignLedger, row: OutcomeRow, query: str) -> _InviteOf | None:
    """Return the invite of the campaign that a row is about; None if it is about none, or of an earlier one."""
    if row.ended_at is None and row.entered_at is None:
        return None
    invites = [_InviteOf(*found) for found in ledger.read(query, row.member_code, row.member_code)]
    found = [each for each in invites if each.survey == row.survey_id and row.wave_id in (0, each.wave)]
    if row.invited_at is not None:
        recorded = row.invited_at.timestamp()
        found = [each for each in found if each.quota == row.quota_id and recorded >= each.at - _SLACK]
    # An end without a recorded invite names a quota, or none.
    return max(found, key=lambda each: (each.quota == row.quota_id, each.at), default=None)
