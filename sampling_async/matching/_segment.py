"""Matching of one member with all quotas: a program as sets of quotas, which are Python's big integers.

Each answer rules out some quotas: that set is computed once and cached, and to match a member, the sets of its
answers are united. One answer can rule out a layer with one sub-quota, or whose sub-quotas all ask the same
question. The others cross questions, as gender by age. Of these, an answer meets some needs, which are cached
beside the quotas that it rules out: see `_crossed`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from sampling_async import InvalidRequestError, Quota, Survey
from sampling_async._pacing.gc_pauses import defer_full_gc
from sampling_async.matching._bits import all_of, ascending, of_places, without
from sampling_async.matching._crossed import crossed_layers
from sampling_async.matching._program import Program, Target
from sampling_async.matching._question import AnsweredQuestion, QuestionSets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sampling_async._contract.records import Participation
    from sampling_async.matching._conditions import MatchPolicy, Profile, QuestionKinds
    from sampling_async.matching._program import LayerShape

Rank: TypeAlias = Callable[[Survey, Quota], Any]
"""The sort key of quotas, lowest first: `lambda survey, quota: -survey.price.amount` for the best paid.
With prices in several currencies, `-rates.worth(survey.price)`, see `CurrencyRates`."""


def most_wanted(_: Survey, quota: Quota) -> int:
    """Rank quotas by the completes that are still wanted, the most first."""
    return -quota.estimated_completes_remaining


class CompiledPart:
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
        """Yield rank, program and target of each quota in a set, best first."""
        return ((self.ranks[bit], self.program, self.targets[bit]) for bit in ascending(bits))

    def of_surveys(self, survey_ids: Iterable[int]) -> int:
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
        # Wave 0 of an exclusion stands for all waves of the survey.
        return all_of(
            self._excluding.get((one.survey_id, wave_id, one.status_id), 0)
            for one in participations
            for wave_id in (one.wave_id, 0)
        )


_REMEMBERED_BYTES: Final = 2**25
"""The largest size of the cache of the sets that answers rule out; then it is cleared and filled again."""

_REMEMBERED_SIZE: Final = 64
"""The most answer IDs, or letters, of an answer that is cached; longer answers hardly occur twice."""


class _Sorted:
    """The layers of a program, sorted by how they are matched, each with the quotas that have it."""

    def __init__(self, program: Program, having: Sequence[list[int]]) -> None:
        self.never: list[int] = []  # quotas with a layer that nobody can fit
        self.never_certain: list[int] = []  # quotas with a layer that asks for nothing
        self.asked: defaultdict[int, list[int]] = defaultdict(list)  # by the alternatives that rule them out
        self.choices: list[tuple[LayerShape, list[int]]] = []  # several sub-quotas about one question
        self.crossed: list[tuple[LayerShape, list[int]]] = []  # all others
        for shape, quotas in zip(program.layers, having, strict=True):
            # No garbage is made here, as in `Program`.
            defer_full_gc()
            # `all` is true for a layer without sub-quotas, too: nobody can fit it.
            if all(full for _, full in shape):
                self.never += quotas
            elif len(shape) == 1:
                asked = program.sub_quotas[shape[0][0]]
                for place in asked:
                    self.asked[place] += quotas
                self.never_certain += [] if asked else quotas
            elif _is_one_question(program, shape):
                self.choices.append((shape, quotas))
            else:
                self.crossed.append((shape, quotas))


def _is_one_question(program: Program, layer: LayerShape) -> bool:
    asked = [program.sub_quotas[place] for place, _ in layer]
    if max(map(len, asked)) > 1 or not all(asked):
        return False
    return len({program.asked[place].question_id for (place,) in asked}) == 1


class Segment:
    """A program prepared for matching one member at a time; bit `n` of a set is the `n`th best quota."""

    def __init__(self, program: Program, order: Sequence[int]) -> None:
        self.all = (1 << len(order)) - 1
        self._policy = program.policy
        self._questions: dict[int, QuestionSets] = {}
        having: list[list[int]] = []
        for _ in program.layers:
            defer_full_gc()
            having.append([])
        for bit, place in enumerate(order):
            for layer in program.targets[place].layers:
                having[layer].append(bit)
        self._build(program, _Sorted(program, having))

    def _build(self, program: Program, layers: _Sorted) -> None:
        self._never, self._never_certain = of_places(layers.never), of_places(layers.never_certain)
        self._crossed = crossed_layers(layers.crossed, program)
        self._needs = self._crossed[-1].end if self._crossed else 0  # the number of them
        # For each condition, its place in its own question.
        places: dict[int, int] = {}
        for crossed in self._crossed:
            while crossed.needs:
                defer_full_gc()
                at, needs = crossed.needs.popitem()
                question, conditions = self._asked(program, at, places)
                question.add_needs(conditions, needs)
        for at, having in layers.asked.items():
            defer_full_gc()
            question, conditions = self._asked(program, at, places)
            question.add_demand([(conditions, False)], having)
        for shape, having in layers.choices:
            defer_full_gc()
            of = [(program.sub_quotas[sub_quota][0], full) for sub_quota, full in shape]
            question, _ = self._asked(program, of[0][0], places)
            question.add_demand([(self._asked(program, at, places)[1], full) for at, full in of], having)
        for question in self._questions.values():
            defer_full_gc()
            question.seal()
        self._places = {question_id: at for at, question_id in enumerate(self._questions)}
        self._unanswered = [question.ruled_unanswered() for question in self._questions.values()]
        self._met = all_of(crossed.met for crossed in self._crossed)
        self._doubt = all_of(crossed.doubt for crossed in self._crossed)
        # For each question, what any answer changes in `_doubt`. No two questions share a need, so `^` does it.
        self._changed: list[int] = []
        for question in self._questions.values():
            unanswered = question.doubt_unanswered()
            self._doubt |= unanswered
            self._changed.append(unanswered ^ question.doubt_answered())
        self._remembered: list[dict[object, AnsweredQuestion]] = [{} for _ in self._questions]
        self._bytes = 0

    def _asked(self, program: Program, at: int, places: dict[int, int]) -> tuple[QuestionSets, list[int]]:
        """Return the question of some alternatives, and the places of their conditions in it."""
        question_id, conditions = program.asked[at]
        question = self._questions.get(question_id)
        if question is None:
            question = self._questions[question_id] = QuestionSets(
                self.all.bit_length(), self._needs, self._policy
            )
        for condition in conditions:
            if condition not in places:
                places[condition] = question.add(program.conditions[condition])
        return question, [places[condition] for condition in conditions]

    def match(self, profile: Profile, kinds: QuestionKinds) -> tuple[int, int]:
        """Return the quotas that a member certainly matches, and those it may match, these included."""
        # Start as if nothing was answered, then replace the sets of the questions that were.
        ruled, met, doubt = self._unanswered.copy(), self._met, self._doubt
        needs: list[int] = []
        places, remembered, changed = self._places, self._remembered, self._changed
        for question_id, answer in profile.items():
            at = places.get(question_id)
            if at is None:
                _check_question_id(question_id)
                continue
            # The cache is by equality, and True == 1 == 1.0. Only for `int` and `str` do equal answers mean the
            # same; all others are normalized first.
            found = remembered[at].get(answer) if type(answer) is int or type(answer) is str else None
            if found is None:
                found = self._answered(at, question_id, answer, kinds)
                if found is None:
                    continue
            ruled[at], many, few = found
            if many:
                met |= many
            if few:
                needs += few
            if changed[at]:
                doubt ^= changed[at]
        both = all_of(ruled)
        out, uncertain = both & self.all, both >> self.all.bit_length()
        if needs:
            met |= of_places(needs)
        for crossed in self._crossed:
            by_crossed = crossed.ruled(met, met | doubt)
            out |= by_crossed[0]
            uncertain |= by_crossed[1]
        possible = without(self.all, out | self._never)
        return without(possible, uncertain | self._never_certain), possible

    def _answered(
        self, at: int, question_id: int, answer: object, kinds: QuestionKinds
    ) -> AnsweredQuestion | None:
        known = kinds.known(question_id, answer)
        if known is None:
            return None
        key = answer if type(answer) is int or type(answer) is str else known
        found = self._remembered[at].get(key)
        if found is None:
            # Else a full collection may be due at the first members after building, and visits all of the
            # inventory: half a second for one member, with ten thousand quotas.
            defer_full_gc()
            found = self._questions[question_id].answered(known)
            size = 1 if isinstance(known, int) else len(known)
            if size > _REMEMBERED_SIZE:
                return found
            bits = found.ruled.bit_length() + found.many.bit_length()
            self._bytes += bits // 8 + 4 * len(found.few) + 250 + 100 * size
            if self._bytes > _REMEMBERED_BYTES:
                self._bytes = 0
                for each in self._remembered:
                    each.clear()
            self._remembered[at][key] = found
        return found


def _check_question_id(question_id: object) -> None:
    if isinstance(question_id, str):
        raise InvalidRequestError(
            f"profile[{question_id!r:.40}]: question IDs must be whole numbers, not texts (JSON turns them "
            "into texts)"
        )
