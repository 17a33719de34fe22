"""Matching of one member with all quotas: a program as sets of quotas, which are Python's big integers.

Each answer rules out some quotas: that set is computed once and cached, and to match a member, the sets of its
answers are united. One answer can rule out a layer with one sub-quota, or whose sub-quotas all ask the same
question. The others cross questions, as gender by age. No answer alone rules out such a layer: an answer meets
some of its needs, which are cached beside the quotas that it rules out. So the sub-quotas of all these layers
are found first, and then the rule of a layer is applied to all layers at once.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from itertools import chain
from operator import and_, getitem, or_
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from sampling_async import InvalidRequestError, Quota, Survey
from sampling_async._pacing.gc_pauses import defer_full_gc, with_gc_deferred
from sampling_async.matching._bits import all_of, ascending, of_places, without
from sampling_async.matching._conditions import fitting
from sampling_async.matching._program import Program, Target
from sampling_async.matching._question import NARROW, AnsweredQuestion, QuestionSets

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
        self._excluding: defaultdict[tuple[int, int | None, int], int] = defaultdict(int)
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


_CHUNK: Final = 64
_FOUR: Final = 4


class Unions:
    """Sets of places, for many unions of some of them.

    The sets are in groups of four, whose 16 unions are made before. Sixteen groups are a chunk, whose unions
    count from its lowest place on. So if sets near each other have places near each other, unions are short.
    """

    def __init__(self, sets: Sequence[Sequence[int]]) -> None:
        self._chunks: list[tuple[int, list[dict[str, int]]]] = []
        for start in range(0, len(sets), _CHUNK):
            some = sets[start : start + _CHUNK]
            first = min(chain.from_iterable(some), default=0)
            groups: list[dict[str, int]] = []
            for at in range(0, _CHUNK, _FOUR):
                unions = [0]
                for places in some[at : at + _FOUR]:
                    added = of_places(place - first for place in places)
                    unions += [union | added for union in unions]
                groups.append(dict(zip("0123456789abcdef", unions, strict=False)))
            self._chunks.append((first, groups))

    def of(self, chosen: int) -> int:
        """Return the union of the chosen sets: of set `n` if bit `n` is 1."""
        # Hexadecimal digit `g`, from the lowest on, says which sets of group `g` are chosen, and is the key of
        # their union. For sets {1, 4, 5} it is 0x32: "2" in group 0 and "3" in group 1.
        digits = f"{chosen:0{len(self._chunks) * _CHUNK // _FOUR}x}"[::-1]
        united = start = 0
        for first, groups in self._chunks:
            end = start + len(groups)
            united |= reduce(or_, map(getitem, groups, digits[start:end])) << first
            start = end
        return united


def _numbers() -> array[int]:
    return array("i")


class _Plane(NamedTuple):
    """The sub-quotas at one position of all crossed layers that have so many."""

    begin: int  # the first bit of these sub-quotas
    layers: int  # the layers that have this position, a bit each; always the lowest bits
    full: int  # the layers whose sub-quota at this position is full


class CrossedLayers:
    """Crossed layers whose sub-quotas have at most the same number of needs: of questions that they ask.

    The bits of the first sub-quotas of all layers come first, then those of the second sub-quotas, and so on.
    The layers are sorted by their number of sub-quotas, the most first, so that each position is one run of
    bits: layers A with three sub-quotas and B with two have, from bit 0 on, A0 B0 A1 B1 A2. A shift then brings
    the sub-quotas of a position to the bits of their layers.

    Needs have bits in the same manner: from bit `first` on, the first needs of all sub-quotas, then the second
    ones. A need belongs to one question. So no two questions share a bit, and what answers meet is united.

    Attributes:
        end: The bit after the last need.
        needs: The bits of needs, by the alternatives that meet them; whoever reads them takes them out.
        met: The needs that are met whatever a member answers: those that a sub-quota does not have.
        doubt: The needs that are uncertain whatever a member answers: of sub-quotas that ask for nothing.
    """

    def __init__(
        self, layers: Sequence[tuple[LayerShape, list[int]]], program: Program, depth: int, first: int
    ) -> None:
        # With an equal number, in the order of their first quotas, as `Unions` needs it. Keys that are pairs
        # would be thousands of objects at once, after which a full collection is due.
        ordered = sorted(layers, key=lambda each: each[1][0])
        ordered.sort(key=lambda each: -len(each[0]))
        self._policy = program.policy
        self._planes: list[_Plane] = []
        self._quotas = Unions([quotas for _, quotas in ordered])
        self._all = (1 << len(ordered)) - 1
        asked: list[tuple[int, ...]] = []
        for position in range(len(ordered[0][0])):
            having = [shape[position] for shape, _ in ordered if len(shape) > position]
            full = all_of(1 << at for at, (_, is_full) in enumerate(having) if is_full)
            self._planes.append(_Plane(len(asked), (1 << len(having)) - 1, full))
            asked += [program.sub_quotas[place] for place, _ in having]
        width = len(asked)
        self._shifts = range(first, first + depth * width, width)
        self.end = self._shifts.stop
        self.needs: defaultdict[int, array[int]] = defaultdict(_numbers)
        met: list[int] = []
        doubt: list[int] = []
        for bit, places in enumerate(with_gc_deferred(asked)):
            for shift, place in zip(self._shifts, places, strict=False):
                self.needs[place].append(shift + bit)
            if len(places) < depth:
                met += [shift + bit for shift in self._shifts[max(1, len(places)) :]]
                doubt += [] if places else [first + bit]
        self.met, self.doubt = of_places(met), of_places(doubt)

    def ruled(self, met: int, may: int) -> tuple[int, int]:
        """Return the quotas that the layers rule out, and those that they make uncertain.

        `met` has the needs that are certainly met, and `may` those that may be, these included.
        """
        certain, possible = self._fitting(met), self._fitting(may)
        # `layers` masks the bits of later positions.
        sub_quotas = (
            (certain >> begin & layers, possible >> begin & layers, full)
            for begin, layers, full in self._planes
        )
        fits = fitting(sub_quotas, 0, exactly_one=self._policy.subquota_rule == "exactly_one")
        no, unsure = without(self._all, fits.possible), without(self._all, fits.certain)
        return self._quotas.of(no), self._quotas.of(unsure)

    def _fitting(self, needs: int) -> int:
        """Return the sub-quotas all of whose needs are in a set."""
        return reduce(and_, [needs >> shift for shift in self._shifts])


def crossed_layers(layers: Sequence[tuple[LayerShape, list[int]]], program: Program) -> list[CrossedLayers]:
    """Return the layers in groups, each with the quotas that have it.

    All sub-quotas of a group take as many bits as the most needs of one of them. If sets are long, one with ten
    questions must not make those of all others longer: then each number of needs is a group.
    """
    by_depth: defaultdict[int, list[tuple[LayerShape, list[int]]]] = defaultdict(list)
    for shape, quotas in with_gc_deferred(layers):
        by_depth[max(1, *[len(program.sub_quotas[place]) for place, _ in shape])].append((shape, quotas))
    if by_depth and max(by_depth) * sum(len(shape) for shape, _ in layers) <= NARROW:
        by_depth = defaultdict(list, {max(by_depth): list(layers)})
    groups: list[CrossedLayers] = []
    for depth, some in by_depth.items():
        groups.append(CrossedLayers(some, program, depth, groups[-1].end if groups else 0))
    return groups


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
        for shape, quotas in with_gc_deferred(zip(program.layers, having, strict=True)):
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
        # No garbage is made here and below, as in `Program`.
        having: list[list[int]] = [[] for _ in with_gc_deferred(program.layers)]
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
        for at, having in with_gc_deferred(layers.asked.items()):
            question, conditions = self._asked(program, at, places)
            question.add_demand([(conditions, False)], having)
        for shape, having in with_gc_deferred(layers.choices):
            of = [(program.sub_quotas[sub_quota][0], full) for sub_quota, full in shape]
            question, _ = self._asked(program, of[0][0], places)
            question.add_demand([(self._asked(program, at, places)[1], full) for at, full in of], having)
        for question in with_gc_deferred(self._questions.values()):
            question.seal()
        self._places = {question_id: at for at, question_id in enumerate(self._questions)}
        self._unanswered = [question.ruled_unanswered() for question in self._questions.values()]
        self._met = all_of(crossed.met for crossed in self._crossed)
        self._doubt = all_of(crossed.doubt for crossed in self._crossed)
        # For each question, what any answer changes in `_doubt`. No two questions share a need, so `^` does it.
        self._changed: list[int] = []
        for question in self._questions.values():
            unanswered, answered = question.doubts()
            self._doubt |= unanswered
            self._changed.append(unanswered ^ answered)
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
