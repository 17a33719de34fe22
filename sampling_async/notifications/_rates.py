"""How many invites end in a complete: learned from the ledger of outcomes, by survey."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from attrs import field, frozen

if TYPE_CHECKING:
    from sampling_async.notifications._sql import SqlStore

_WEIGHT: Final = 20.0
_PERCENT: Final = 100.0

# Of the invites that members have entered; an invite that nobody used says nothing about the survey.
_RATES: Final = """
SELECT i.survey, count(*), sum(CASE WHEN EXISTS (
    SELECT 1 FROM facts AS f WHERE f.kind = 'completion' AND f.standing = 'stands' AND f.corrects IS NULL
    AND (f.key = i.key OR (f.member = i.member AND f.origin = i.survey))
) THEN 1 ELSE 0 END) FROM invites AS i
WHERE i.entered IS NOT NULL AND i.entered >= ? AND i.entered < ? GROUP BY i.survey
"""


@frozen(kw_only=True)
class Rates:
    """The share of entered invites that ended in a complete, by survey.

    A survey with few invites is drawn towards its incidence rate: `chance` is that of the invites, and of
    `weight` more whose share of completes is the incidence rate.

    Attributes:
        counts: Entered invites, and those of them that were completed, by survey ID.
        weight: How many invites the incidence rate counts for.
    """

    counts: Mapping[int, tuple[int, int]] = field(factory=dict[int, tuple[int, int]])
    weight: float = _WEIGHT

    def chance(self, survey_id: int, ir: int) -> float:
        """Return the chance of a complete, from 0 to 1. `ir` is the incidence rate of the survey in percent."""
        invites, completes = self.counts.get(survey_id, (0, 0))
        prior = min(max(ir / _PERCENT, 0.0), 1.0)
        return (completes + self.weight * prior) / (invites + self.weight)


def read_rates(store: SqlStore, since: float, until: float) -> Rates:
    """Return the rates of the invites that were entered between two moments. It may block."""
    with store.reading("cannot be read", is_long=True) as run:
        rows = run(_RATES, (since, until)).fetchall()
    return Rates(counts={survey: (invites, completes) for survey, invites, completes in rows})
