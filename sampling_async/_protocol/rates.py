"""How many invites end in a complete: the incidence rate, and what invites and completes so far have shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from attrs import evolve, field, frozen

from sampling_async._contract.checks import not_negative, positive

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sampling_async._contract.records import Survey

_WEIGHT: Final = 20.0
_PERCENT: Final = 100.0


def qualifying(survey: Survey) -> float:
    """Return the share of people who qualify, from 0 to 1. Real bodies have an IR of 0, which is not known."""
    return min(survey.ir, _PERCENT) / _PERCENT if survey.ir > 0 else 1.0


@frozen(kw_only=True)
class LearnedRates:
    """The share of invites that end in a complete, by quota and survey, as `OutcomeLedger.rates` returns it.

    Few invites say little. So `weight` invites are added to those of a quota, with the share of its survey, and
    to those of a survey, with its incidence rate times `follow`. For example, 2 of 5 invites of a quota ended
    in a complete, and the share of its survey is 10 %. With a `weight` of 20, the share of the quota is then
    (2 + 20 x 0.1) / (5 + 20), which is 16 %.

    Attributes:
        surveys: The number of invites, and of those that ended in a complete, by survey ID.
        quotas: The same by quota ID.
        weight: How many invites are added, see above.
        follow: The share of invites that members follow. `fitted` derives it.
    """

    surveys: Mapping[int, tuple[int, int]] = field(factory=dict[int, tuple[int, int]], repr=False)
    quotas: Mapping[int, tuple[int, int]] = field(factory=dict[int, tuple[int, int]], repr=False)
    weight: float = field(default=_WEIGHT, validator=positive)
    follow: float = field(default=1.0, validator=not_negative)

    def chance(self, survey: Survey, quota_id: int | None = None) -> float:
        """Return the chance that an invite ends in a complete, from 0 to 1: of a quota, or of its survey."""
        chance = self._drawn(self.surveys.get(survey.survey_id), min(1.0, self.follow * qualifying(survey)))
        return chance if quota_id is None else self._drawn(self.quotas.get(quota_id), chance)

    def _drawn(self, counts: tuple[int, int] | None, expected: float) -> float:
        invites, completes = counts or (0, 0)
        return min(1.0, (completes + self.weight * expected) / (invites + self.weight))

    def fitted(self, surveys: Iterable[Survey]) -> LearnedRates:
        """Return these rates with the `follow` that the invites of some surveys show.

        Surveys without invites then have the share IR times `follow`.
        """
        completes, expected = self.weight, self.weight
        for survey in {each.survey_id: each for each in surveys}.values():
            invites, completed = self.surveys.get(survey.survey_id, (0, 0))
            completes += completed
            expected += invites * qualifying(survey)
        return evolve(self, follow=completes / expected)
