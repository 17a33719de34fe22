"""Surveys that are compiled together: a part of an index, with its quotas in the order of their rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from sampling_async._contract.records import Quota, Survey
from sampling_async.matching._bits import all_of, ascending
from sampling_async.matching._program import Program, Target
from sampling_async.matching._segment import Segment

if TYPE_CHECKING:
    from sampling_async._contract.records import Participation
    from sampling_async.matching._policy import MatchPolicy
    from sampling_async.matching._questions import QuestionKinds

Rank: TypeAlias = Callable[[Survey, Quota], Any]
"""The sort key of quotas, lowest first: `lambda survey, quota: -survey.price.amount` for the best paid."""


def most_wanted(_: Survey, quota: Quota) -> int:
    """Rank quotas by the completes that are still wanted, the most first."""
    return -quota.estimated_completes_remaining


class Part:
    """Some of an inventory's surveys, compiled together; bit `n` of a set is the part's `n`th best quota."""

    def __init__(
        self, surveys: Iterable[Survey], kinds: QuestionKinds, policy: MatchPolicy, rank: Rank
    ) -> None:
        self.program = program = Program(surveys, kinds, policy)
        keys = [(rank(target.survey, target.quota), target.quota.quota_id) for target in program.targets]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        self.segment = Segment(program, order)
        self.targets = [program.targets[place] for place in order]
        self.ranks = [keys[place] for place in order]
        self.bit_of: dict[object, int] = {target.quota.quota_id: bit for bit, target in enumerate(self.targets)}
        self.diagnostics = program.diagnostics
        self._of_survey: defaultdict[int, int] = defaultdict(int)
        self._of_device: dict[int, int] = {}
        self._excluding: defaultdict[tuple[int, int, int], int] = defaultdict(int)
        self.recontact = 0
        for bit, target in enumerate(self.targets):
            survey = target.survey
            self._of_survey[survey.survey_id] |= 1 << bit
            for exclusion in survey.survey_wave_exclusions:
                for status_id in exclusion.participation_status_ids:
                    key = exclusion.survey_id, exclusion.wave_id, status_id
                    self._excluding[key] |= 1 << bit
            if survey.is_survey_recontact:
                self.recontact |= 1 << bit

    def ranked(self, bits: int) -> Iterator[tuple[Any, Program, Target]]:
        """Yield the rank, the program and the target of each quota in a set, best first."""
        return ((self.ranks[bit], self.program, self.targets[bit]) for bit in ascending(bits))

    def of_surveys(self, survey_ids: Iterable[int]) -> int:
        """Return the set of the quotas of some surveys."""
        return all_of(self._of_survey.get(survey_id, 0) for survey_id in survey_ids)

    def for_device(self, device_type: int) -> int:
        """Return the set of the quotas open to a device; a survey that names no device is open to all."""
        # There are few device types, so each set is computed once and kept.
        found = self._of_device.get(device_type)
        if found is None:
            devices = (target.survey.device_type_ids for target in self.targets)
            found = all_of(1 << bit for bit, ids in enumerate(devices) if not ids or device_type in ids)
            self._of_device[device_type] = found
        return found

    def excluding(self, participations: Iterable[Participation]) -> int:
        """Return the set of the quotas that exclude a member with these participations."""
        # Wave 0 of an exclusion stands for all waves of the survey.
        return all_of(
            self._excluding.get((one.survey_id, wave_id, one.status_id), 0)
            for one in participations
            for wave_id in (one.wave_id, 0)
        )
