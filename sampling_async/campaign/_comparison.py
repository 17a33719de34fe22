"""Several campaigns side by side, as several nights: figures, and what has changed from one to the next."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from attrs import field, frozen

from sampling_async._contract.currencies import unit_of
from sampling_async._contract.records import counted
from sampling_async._contract.result_codes import ResultCode
from sampling_async.campaign._summary import QuotaFill, Summary

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_CHANGES: Final = 8  # so many changes are named
_LEAST: Final = 0.01  # a smaller change of a share is not named

Figure: TypeAlias = "float | None"


def _of_ends(name: str) -> Callable[[Summary], Figure]:
    return lambda summary: None if summary.ends is None else getattr(summary.ends.total, name)


def _conversion(summary: Summary) -> Figure:
    # Of all invites, the share of a night whose surveys are still open is low, whatever the members do.
    if summary.ends is None or not (ended := summary.ends.total.completed + summary.ends.total.terminated):
        return None
    return summary.ends.total.completed / ended


def _revenue(summary: Summary) -> Figure:
    revenue = None if summary.ends is None else summary.ends.total.revenue
    return None if revenue is None else float(revenue)


FIGURES: Final[Mapping[str, tuple[str, Callable[[Summary], Figure]]]] = {
    "members": ("Members", lambda summary: summary.members),
    "asked": ("Requested pairs", lambda summary: summary.asked),
    "invited": ("Invites", lambda summary: summary.pairs.invited),
    "success_rate": ("Success rate", lambda summary: summary.success_rate),
    "rejected": ("Refused", lambda summary: summary.pairs.rejected),
    "unknown": ("Unknown", lambda summary: summary.pairs.unknown),
    "settled": ("Settled as invited", lambda summary: summary.settled or None),
    "expected_value": ("Expected value", lambda summary: summary.expected_value),
    "completed": ("Completes", _of_ends("completed")),
    "open": ("Still open", _of_ends("open")),
    "conversion": ("Conversion of ended", _conversion),
    "revenue": ("Revenue", _revenue),
    "reconciled": ("Reconciled", _of_ends("reconciled")),
}
"""The figures of a night: their names, and where they stand in a summary. None is not known."""

MONEY: Final = frozenset({"expected_value", "revenue"})
_SEVERAL: Final = "several, or not known"
SHARES: Final = frozenset({"success_rate", "conversion"})


@frozen(kw_only=True)
class ComparedNight:
    """A campaign of a comparison.

    Attributes:
        name: Its name, that of its folder.
        summary: What became of it.
    """

    name: str
    summary: Summary

    @property
    def figures(self) -> dict[str, Figure]:
        """Its figures, see `FIGURES`."""
        return {name: read(self.summary) for name, (_, read) in FIGURES.items()}

    @property
    def currency(self) -> str:
        """What its money is in."""
        return unit_of(self.summary.currency_id, self.summary.currency_rates) or _SEVERAL

    @property
    def codes(self) -> dict[str, int]:
        """Refused pairs by result code and name. A service may change its names: a known code has one name."""
        return {
            "no response"
            if each.result_code is None
            else f"{each.result_code} {ResultCode.name_of(each.result_code) or each.result}": each.pairs
            for each in self.summary.codes
            if each.lesson or each.result_code is None
        }


@frozen(kw_only=True)
class CampaignComparison:
    """Several campaigns, the newest plan first.

    Attributes:
        nights: The campaigns.
    """

    nights: tuple[ComparedNight, ...] = field(repr=counted("nights"))

    @property
    def codes(self) -> dict[str, list[int]]:
        """The refused pairs of each night, by result code, the most frequent first."""
        by_night = [night.codes for night in self.nights]
        total: Counter[str] = Counter()
        for codes in by_night:
            total.update(codes)
        return {code: [codes.get(code, 0) for codes in by_night] for code, _ in total.most_common()}

    @property
    def quotas(self) -> dict[int, list[QuotaFill | None]]:
        """The fill of each quota in each night; None where it was not planned. Most room first."""
        by_night = [{fill.quota_id: fill for fill in night.summary.quotas} for night in self.nights]
        room: Counter[int] = Counter()
        for fills in by_night:
            room.update({quota_id: fill.room for quota_id, fill in fills.items()})
        ordered = sorted(room, key=lambda quota_id: (-room[quota_id], quota_id))
        return {quota_id: [fills.get(quota_id) for fills in by_night] for quota_id in ordered}

    def changes(self) -> list[str]:
        """Return what has changed most from the night before the newest to the newest one, in sentences."""
        if len(self.nights) < 2:  # noqa: PLR2004  two are compared
            return []
        after, before = self.nights[:2]
        found: list[tuple[float, str]] = []
        for name in sorted(SHARES):
            old, new = before.figures[name], after.figures[name]
            if old is not None and new is not None:
                found.append((abs(new - old), f"{FIGURES[name][0]}: {old:.1%} before, {new:.1%} now"))
        for code in {**before.codes, **after.codes}:
            old, new = (night.codes.get(code, 0) / max(1, night.summary.asked) for night in (before, after))
            found.append((abs(new - old), f"{code}: {old:.1%} of requested pairs before, {new:.1%} now"))
        found.sort(key=lambda change: -change[0])
        return [text for size, text in found[:_CHANGES] if size >= _LEAST]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON has it."""
        return {
            "nights": [
                {
                    "name": night.name,
                    "planned_at": night.summary.planned_at.isoformat(),
                    "state": night.summary.state,
                    "currency_id": night.summary.currency_id,
                    **{name: value and round(value, 4) for name, value in night.figures.items()},
                    "codes": night.codes,
                }
                for night in self.nights
            ],
            "changes": self.changes(),
            "quotas": [
                {
                    "quota_id": quota_id,
                    "fills": [fill and {"invited": fill.invited, "room": fill.room} for fill in fills],
                }
                for quota_id, fills in self.quotas.items()
            ],
        }


def compare(summaries: Mapping[str, Summary]) -> CampaignComparison:
    """Return campaigns side by side, the newest first, given their summaries by name."""
    ordered = sorted(summaries.items(), key=lambda each: (each[1].planned_at, each[0]), reverse=True)
    return CampaignComparison(
        nights=tuple(ComparedNight(name=name, summary=summary) for name, summary in ordered)
    )


def changed(values: Sequence[Figure]) -> list[str]:
    """Return how each value differs from that of the night before, which comes next, as `+12 %`, or as ""."""
    return [*(_change(before, after) for after, before in pairwise(values)), ""]


def _change(before: Figure, after: Figure) -> str:
    if not before or after is None:
        return ""
    percent = round(100 * (after - before) / abs(before))
    return f"{percent:+,} %" if percent else "0 %"
