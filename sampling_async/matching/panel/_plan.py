"""What is to be done with each chunk of a panel: which rows to make of the answers, and quotas of these."""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar

import numpy as np
from attrs import frozen

from sampling_async.matching._bits import all_of, ascending, without
from sampling_async.matching._program import Kept
from sampling_async.matching.panel._classes import MOST_CODES, UNANSWERED, Classes
from sampling_async.matching.panel._rows import TOGETHER, Row, Rows, by_turn

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from sampling_async.matching._policy import MatchPolicy
    from sampling_async.matching._program import Program, Target
    from sampling_async.matching._questions import QuestionKinds
    from sampling_async.matching.panel._rows import Op

S = TypeVar("S", int, Row)
_Place: TypeAlias = tuple[int, int]
"""The ID of a program, and a place in it."""

_LOOKED_UP: Final = 40
_FILLED: Final = 5
"""What it takes to look a row up, or to fill it, in rows that are combined in the same time."""


class Pair(NamedTuple):
    """Classes, or rows: those that match for certain, and those that may."""

    certain: Any
    possible: Any


class Asked(NamedTuple):
    """What is asked about a question, as sets of its classes."""

    question_id: int
    classes: Pair


class QuotaOfPlan(NamedTuple):
    """What is kept of a quota.

    Attributes:
        quota_id: The quota.
        wave: Its survey and wave, by their place.
        layers: Its layers, by their places.
        device_types: The devices it is open to; none is all.
        needs_list: Whether it is for those on a list only.
    """

    quota_id: int
    wave: int
    layers: tuple[int, ...]
    device_types: tuple[int, ...]
    needs_list: bool


@frozen
class Columns:
    """What a panel has, of what is asked for.

    Attributes:
        questions: Questions with a column.
        multiple: Those whose answers are lists.
        has_device: Whether the device is known.
        has_taken: Whether it is known which surveys were taken.
        has_codes: Whether there are member codes.
    """

    questions: frozenset[int]
    multiple: frozenset[int]
    has_device: bool
    has_taken: bool
    has_codes: bool


class Source:
    """An inventory, as small as it can be sent to others: classes instead of conditions.

    Args:
        compiled: Quotas, best first, each after the program it was compiled in.
        kinds: How questions are matched.
        policy: What is taken how.
        lists: The members of recontact quotas.

    Attributes:
        kinds: As given.
        policy: As given.
        lists: As given.
        classes: Of each question, the classes of its answers.
        layers: Of each layer the sub-quotas, by their places, and whether they are full.
        quota_ids: Of each quota, best first, its ID; the same for `survey_ids` and the completes that are still
            `needed`.
        survey_ids: See there.
        needed: See there.
        of_survey: Of each survey, its waves by their places.
        excluding: By survey, wave and status, the waves that exclude who took part so.
    """

    def __init__(
        self,
        compiled: Sequence[tuple[Program, Target]],
        kinds: QuestionKinds,
        policy: MatchPolicy,
        lists: Mapping[int, frozenset[str]],
    ) -> None:
        self.kinds, self.policy = kinds, policy
        self.lists = lists
        programs = {id(program): program for program, _ in compiled}
        layers, sub_quotas, all_asked = Kept[_Place](), Kept[_Place](), Kept[_Place]()
        waves: dict[tuple[int, int], int] = {}
        # As tuples without names, which are sent in a third of the time.
        self._quotas = [
            (
                target.quota.quota_id,
                waves.setdefault((target.survey.survey_id, target.survey.wave_id), len(waves)),
                tuple([layers.place((id(program), place)) for place in target.layers]),
                target.survey.device_type_ids,
                target.survey.is_survey_recontact,
            )
            for program, target in compiled
        ]
        self.layers = [
            tuple([(sub_quotas.place((id_, at)), full) for at, full in programs[id_].layers[place].sub_quotas])
            for id_, place in layers.items
        ]
        self._sub_quotas = [
            tuple([all_asked.place((id_, at)) for at in programs[id_].sub_quotas[place].asked])
            for id_, place in sub_quotas.items
        ]
        self.classes, self._asked = _classes(programs, all_asked.items, kinds, policy)
        self.quota_ids = _numbers(target.quota.quota_id for _, target in compiled)
        self.survey_ids = _numbers(target.survey.survey_id for _, target in compiled)
        self.needed = _numbers(target.quota.estimated_completes_remaining for _, target in compiled)
        self.of_survey: defaultdict[int, list[int]] = defaultdict(list)
        for (survey_id, _), place in waves.items():
            self.of_survey[survey_id].append(place)
        self.excluding: defaultdict[tuple[int, int, int], set[int]] = defaultdict(set)
        for (_, target), quota in zip(compiled, self.quotas(), strict=True):
            for one in target.survey.survey_wave_exclusions:
                for status_id in one.participation_status_ids:
                    self.excluding[one.survey_id, one.wave_id, status_id].add(quota.wave)

    def quotas(self) -> list[QuotaOfPlan]:
        """Return the quotas, best first."""
        return list(map(QuotaOfPlan._make, self._quotas))

    def sub_quotas(self) -> list[tuple[Asked, ...]]:
        """Return what each sub-quota asks."""
        asked = [Asked(question_id, Pair(certain, possible)) for question_id, certain, possible in self._asked]
        return [tuple([asked[at] for at in places]) for places in self._sub_quotas]


def _numbers(values: Iterable[int]) -> NDArray[np.int64]:
    return np.fromiter(values, dtype=np.int64)


def _classes(
    programs: Mapping[int, Program], all_asked: Sequence[_Place], kinds: QuestionKinds, policy: MatchPolicy
) -> tuple[dict[int, Classes], list[tuple[int, int, int]]]:
    """Return the classes of all questions, and what is asked: the question, and the parts of a `Pair`."""
    of_question: defaultdict[int, Kept[_Place]] = defaultdict(Kept)
    shapes: list[tuple[int, list[int]]] = []
    for id_, at in all_asked:
        question_id, conditions = programs[id_].asked[at]
        place = of_question[question_id].place
        shapes.append((question_id, [place((id_, condition)) for condition in conditions]))
    classes = {
        question_id: Classes(
            kinds.kind_of(question_id), [programs[id_].conditions[at] for id_, at in kept.items], policy
        )
        for question_id, kept in of_question.items()
    }
    return classes, [
        (
            question_id,
            all_of(classes[question_id].certain[at] for at in places),
            all_of(classes[question_id].possible[at] for at in places),
        )
        for question_id, places in shapes
    ]


def layer(sub_quotas: Iterable[tuple[Pair, bool]], nothing: S, *, exactly_one: bool) -> Pair:
    """Return who fits a layer, of who fits its sub-quotas and which of these are full."""
    fits = two_fit = may = two_may = may_open = full_fits = full_may = open_fits = nothing
    for (certain, possible), is_full in sub_quotas:
        two_fit |= fits & certain
        fits |= certain
        two_may |= may & possible
        may |= possible
        if is_full:
            full_fits |= certain
            full_may |= possible
        else:
            open_fits |= certain
            may_open |= possible
    out = full_fits | two_fit if exactly_one else full_fits
    uncertain = two_may if exactly_one else full_may
    may_match = without(may_open, out)
    return Pair(without(open_fits & may_match, uncertain), may_match)


class Given(NamedTuple):
    """A row that is filled from a panel's columns.

    Attributes:
        how: "is", who is in a class of answers; "upto", in it or one before it; "in", in one of a set of
            classes; "has", who has several answers and one of a class among them; "device", who is on one of
            these devices; "untaken", who may take a wave of a survey; "listed", who is on a quota's list.
        of: The question; of the last three, none.
        what: The class, the set of classes, the device types, the survey by its place, or the quota.
    """

    how: str
    of: int
    what: Any


class Block(NamedTuple):
    """Some quotas, next to each other in rank. Those with most rows come first, which is how they are made.

    Attributes:
        quotas: The quotas, by their places in the source.
        possible: What is to be combined to who may match: the first row of each quota, the second, and so on.
        unsure: Quotas that some match for certain and some not, by their places in `quotas`.
        certain: What is to be combined, with who may match these, to who does.
    """

    quotas: NDArray[np.intp]
    possible: list[NDArray[np.intp]]
    unsure: NDArray[np.intp]
    certain: list[NDArray[np.intp]]


class Plan:
    """What is to be done with panels that have the same columns.

    Args:
        source: The inventory.
        columns: What the panels have of what is asked for.

    Attributes:
        source: As given.
        columns: As given.
        given: The rows to be filled, which are the first ones: "nothing" and "everything", and then `Given`.
        steps: What makes the others of these.
        count: How many rows there are.
        blocks: The quotas, best first.
    """

    def __init__(self, source: Source, columns: Columns) -> None:
        self.source, self.columns = source, columns
        planning = _Planning(source, columns)
        quotas = [planning.quota(each) for each in source.quotas()]
        arranged = planning.rows.arranged({part for pair in quotas for row in pair for part in row})
        self.given = arranged.given
        self.steps = arranged.steps
        self.count = arranged.count
        at = [Pair(*([arranged.places[part] for part in row] for row in pair)) for pair in quotas]
        self.blocks = [
            _block(at, range(first, min(first + TOGETHER, len(at)))) for first in range(0, len(at), TOGETHER)
        ]


def _block(pairs: Sequence[Pair], places: Sequence[int]) -> Block:
    places = sorted(places, key=lambda place: -len(pairs[place].possible))
    more = [(at, _more(pairs[place])) for at, place in enumerate(places) if _more(pairs[place])]
    more.sort(key=lambda each: -len(each[1]))
    return Block(
        np.array(places, dtype=np.intp),
        by_turn([pairs[place].possible for place in places]),
        np.array([at for at, _ in more], dtype=np.intp),
        by_turn([rows for _, rows in more]),
    )


def _more(pair: Pair) -> list[int]:
    """Return the rows that make who may match a quota to who does."""
    return [row for row in pair.certain if row not in pair.possible]


class _OneQuestion(NamedTuple):
    """A layer that asks one question only."""

    asked: Asked

    def all_asked(self) -> Iterator[Asked]:
        """Yield what is asked."""
        yield self.asked


class _Crossed(NamedTuple):
    """Any other layer: what its sub-quotas ask, and which are full."""

    sub_quotas: list[tuple[tuple[Asked, ...], bool]]

    def all_asked(self) -> Iterator[Asked]:
        """Yield what is asked."""
        return (each for asked, _ in self.sub_quotas for each in asked)


class _Planning:
    """A plan that is being made."""

    def __init__(self, source: Source, columns: Columns) -> None:
        self.rows = Rows()
        self._source, self._columns = source, columns
        self._exactly_one = source.policy.subquota_rule == "exactly_one"
        all_sub_quotas = source.sub_quotas()
        layers = [
            self._read([(all_sub_quotas[place], full) for place, full in shape]) for shape in source.layers
        ]
        self._ways = self._chosen_ways(layers)
        self._made: dict[tuple[int, int], Row] = {}
        self._fits: dict[tuple[Asked, ...], Pair] = {}
        self._layers = [self._layer(each) for each in layers]

    def _read(self, sub_quotas: list[tuple[tuple[Asked, ...], bool]]) -> _OneQuestion | _Crossed:
        questions = {tuple(each.question_id for each in asked) for asked, _ in sub_quotas}
        only = next(iter(questions)) if len(questions) == 1 else ()
        # Of several answers each may fit another sub-quota, so that who fits is not a matter of the class.
        if len(only) != 1 or (only[0] in self._columns.multiple and len(sub_quotas) > 1):
            return _Crossed(sub_quotas)
        classes = [(asked[0].classes, full) for asked, full in sub_quotas]
        return _OneQuestion(Asked(only[0], layer(classes, 0, exactly_one=self._exactly_one)))

    def _chosen_ways(self, layers: Iterable[_OneQuestion | _Crossed]) -> dict[int, str]:
        """Return how the classes of each question are put together to sets: whichever takes least."""
        wanted: defaultdict[int, set[int]] = defaultdict(set)
        for each in layers:
            for asked in each.all_asked():
                wanted[asked.question_id].update(asked.classes)
        return {question_id: self._way(question_id, sets) for question_id, sets in wanted.items()}

    def _way(self, question_id: int, sets: set[int]) -> str:
        if question_id in self._columns.multiple:
            return "has"
        everything = self._source.classes[question_id].everything
        costs = {"in": _LOOKED_UP * len(sets)}
        if everything.bit_length() <= MOST_CODES:
            for how in ("is", "upto"):
                parts = [_parts(how, question_id, each, everything)[1] for each in sets]
                costs[how] = sum(map(len, parts)) + _FILLED * len({part for each in parts for part in each})
        return min(costs, key=costs.__getitem__)

    def _row(self, question_id: int, classes: int) -> Row:
        """Return the row of who is in a set of classes."""
        if question_id not in self._columns.questions:
            return self.rows.everything if classes >> UNANSWERED & 1 else self.rows.nothing
        everything = self._source.classes[question_id].everything
        found = self._made.get((question_id, classes))
        if found is None:
            op, parts = _parts(self._ways[question_id], question_id, classes, everything)
            found = self._made[question_id, classes] = self.rows.combined(op, map(self.rows.given, parts))
        return found

    def _layer(self, of: _OneQuestion | _Crossed) -> Pair:
        if isinstance(of, _OneQuestion):
            return self._fitting((of.asked,))
        pairs = [(self._fitting(asked), full) for asked, full in of.sub_quotas]
        if self._is_one_at_most(of):
            is_open = [pair for pair, full in pairs if not full]
            return Pair(*(self.rows.combined("or", rows) for rows in zip(*is_open, strict=True)))
        return layer(pairs, self.rows.nothing, exactly_one=self._exactly_one)

    def _fitting(self, asked: tuple[Asked, ...]) -> Pair:
        """Return who fits a sub-quota; one that asks for nothing says nothing."""
        if not asked:
            return Pair(self.rows.nothing, self.rows.everything)
        found = self._fits.get(asked)
        if found is None:
            rows = [[self._row(each.question_id, classes) for classes in each.classes] for each in asked]
            found = Pair(*(self.rows.combined("and", each) for each in zip(*rows, strict=True)))
            self._fits[asked] = found
        return found

    def _is_one_at_most(self, of: _Crossed) -> bool:
        """Return whether nobody may fit two of these: some question keeps them apart, of each two."""
        possible = [
            {
                each.question_id: each.classes.possible
                for each in asked
                if each.question_id not in self._columns.multiple
            }
            for asked, _ in of.sub_quotas
        ]
        return any(not full for _, full in of.sub_quotas) and all(
            any(not classes & other.get(question_id, -1) for question_id, classes in one.items())
            for one, other in combinations(possible, 2)
        )

    def quota(self, quota: QuotaOfPlan) -> Pair:
        """Return the rows that make a quota, by their numbers."""
        rows, columns, source = self.rows, self._columns, self._source
        masks: list[Row] = []
        if columns.has_device and quota.device_types:
            masks.append(rows.given(Given("device", 0, quota.device_types)))
        if columns.has_taken:
            masks.append(rows.given(Given("untaken", 0, quota.wave)))
        is_listed = columns.has_codes and quota.quota_id in source.lists
        if is_listed:
            masks.append(rows.given(Given("listed", 0, quota.quota_id)))
        layers = [self._layers[place] for place in quota.layers]
        possible = rows.operands("and", [*masks, *(each.possible for each in layers)])
        certain = [*masks, *(each.certain for each in layers)]
        if quota.needs_list and not is_listed:
            certain = [rows.nothing]
        return Pair(rows.operands("and", certain), possible)


def _parts(how: str, question_id: int, classes: int, everything: int) -> tuple[Op, list[Hashable]]:
    """Return the rows that make a set of classes, by their names."""
    answered = everything ^ 1 << UNANSWERED
    if classes in {0, everything}:
        return "xor", ["everything"] if classes else []
    single = "is" if how == "upto" else how

    def given(parts: Iterable[int], how: str = how) -> list[Hashable]:
        return [Given(how, question_id, part) for part in parts]

    if classes == answered:
        return "xor", ["everything", *given([1 << UNANSWERED if how == "in" else UNANSWERED], single)]
    if how == "in":
        return "xor", given(part for part in (classes & 1, classes & answered) if part)
    if how == "has":
        return "or", given(ascending(classes))
    if how == "is":
        others = everything ^ classes
        if classes.bit_count() > others.bit_count() + 1:
            return "xor", ["everything", *given(ascending(others))]
        return "xor", given(ascending(classes))
    ends = list(ascending(classes ^ classes >> 1))
    last = everything.bit_length() - 1
    return "xor", [*given(end for end in ends if end != last), *(["everything"] if last in ends else [])]
