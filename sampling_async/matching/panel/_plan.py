"""The plan for a chunk of a panel: which rows to make from the answers, and how to combine them into quotas."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain, combinations
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from sampling_async._pacing.gc_pauses import with_gc_deferred
from sampling_async.matching._bits import all_of
from sampling_async.matching._conditions import fitting
from sampling_async.matching._program import DistinctList
from sampling_async.matching.panel._rows import (
    MOST_CODES,
    TOGETHER,
    UNANSWERED,
    Arranged,
    Classes,
    InputRow,
    SymbolicRows,
    by_turn,
    parts_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from sampling_async.matching._conditions import MatchPolicy, QuestionKinds
    from sampling_async.matching._program import Program, Target
    from sampling_async.matching.panel._rows import Row

_Place: TypeAlias = tuple[int, int]  # the ID of a program, and a place in it

_LOOKED_UP: Final = 40
_FILLED: Final = 5
"""The costs of looking up a row, and of filling one: how many rows can be combined in the same time."""


class Pair(NamedTuple):
    """Two sets of classes, or two rows or lists of rows: for a certain match, and for a possible one."""

    certain: Any
    possible: Any


class FittingClasses(NamedTuple):
    question_id: int
    classes: Pair


class QuotaOfPlan(NamedTuple):
    quota_id: int
    wave: int  # the place of its survey and wave
    layers: tuple[int, ...]  # the places of its layers
    device_types: tuple[int, ...]  # the devices it is open to; if empty, all
    needs_list: bool  # whether it is only for members on a recontact list


@frozen
class PanelColumns:
    """The columns of a panel, of those that an inventory asks for."""

    questions: frozenset[int]  # those with a column
    multiple: frozenset[int]  # those with a column of lists of answers
    has_device: bool
    has_taken: bool  # a column of excluded surveys or of participations
    has_codes: bool


@frozen(eq=False)
class Market:
    """The quotas of an allocation, in the order of a `CompactInventory`."""

    values: NDArray[np.float64]  # what an invite is worth, 0 or more
    rooms: NDArray[np.int64]  # how many invites each quota can use
    surveys: NDArray[np.int64]  # the number of each quota's survey, from 0 on
    survey_rooms: NDArray[np.int64]  # how many invites each survey can use, by its number
    prices: NDArray[np.float64]  # what a place in the quota and in the survey costs
    reach: NDArray[np.float64]  # the share of the members who fit that become candidates
    chances: NDArray[np.float64]  # that an invite ends in a complete

    def order(self) -> NDArray[np.intp]:
        """Return the quotas by what an invite brings beyond its price, the most first."""
        return np.argsort(self.prices - self.values, kind="stable")

    def arranged(self, order: NDArray[np.intp]) -> Market:
        return evolve(
            self,
            values=self.values[order],
            rooms=self.rooms[order],
            surveys=self.surveys[order],
            prices=self.prices[order],
            reach=self.reach[order],
            chances=self.chances[order],
        )


class CompactInventory:
    """An inventory in a small form for sending to other processes: with classes instead of conditions.

    `compiled` has the quotas, best first, each in a pair after the program it was compiled in.

    Attributes:
        layers: For each layer, the places of its sub-quotas, and whether each is full.
        of_survey: The places of a survey's waves, by survey ID.
        excluding: The places of the waves that exclude a participation, by its survey, wave and status.
    """

    def __init__(
        self,
        compiled: Sequence[tuple[Program, Target]],
        kinds: QuestionKinds,
        policy: MatchPolicy,
        lists: Mapping[int, frozenset[str]],
        market: Market | None = None,
    ) -> None:
        self.kinds, self.policy = kinds, policy
        self.lists = lists
        self.market = market
        programs = {id(program): program for program, _ in compiled}
        layers, sub_quotas, all_asked = DistinctList[_Place](), DistinctList[_Place](), DistinctList[_Place]()
        waves: dict[tuple[int, int], int] = {}
        # Plain tuples, not `QuotaOfPlan`: pickled, they are sent in a third of the time.
        self._quotas = [
            (
                target.quota.quota_id,
                waves.setdefault((target.survey.survey_id, target.survey.wave_id), len(waves)),
                tuple([layers.place((id(program), place)) for place in target.layers]),
                target.survey.device_type_ids,
                target.survey.is_survey_recontact,
            )
            for program, target in with_gc_deferred(compiled)
        ]
        self.layers = [
            tuple([(sub_quotas.place((id_, at)), full) for at, full in programs[id_].layers[place]])
            for id_, place in with_gc_deferred(layers.items)
        ]
        self._sub_quotas = [
            tuple([all_asked.place((id_, at)) for at in programs[id_].sub_quotas[place]])
            for id_, place in with_gc_deferred(sub_quotas.items)
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

    def ranked_by(self, market: Market) -> CompactInventory:
        """Return the same inventory with its quotas in the order of what they bring beyond their price."""
        order = market.order()
        source = CompactInventory.__new__(CompactInventory)
        vars(source).update(
            vars(self),
            _quotas=[self._quotas[at] for at in order],
            quota_ids=self.quota_ids[order],
            survey_ids=self.survey_ids[order],
            needed=self.needed[order],
            market=market.arranged(order),
        )
        return source

    def quotas(self) -> list[QuotaOfPlan]:
        return list(map(QuotaOfPlan._make, self._quotas))

    def sub_quotas(self) -> list[tuple[FittingClasses, ...]]:
        """Return, for each sub-quota, the classes it asks for in each of its questions."""
        asked = [
            FittingClasses(question_id, Pair(certain, possible))
            for question_id, certain, possible in with_gc_deferred(self._asked)
        ]
        return [tuple([asked[at] for at in places]) for places in with_gc_deferred(self._sub_quotas)]


def _numbers(values: Iterable[int]) -> NDArray[np.int64]:
    return np.fromiter(values, dtype=np.int64)


def _classes(
    programs: Mapping[int, Program], all_asked: Sequence[_Place], kinds: QuestionKinds, policy: MatchPolicy
) -> tuple[dict[int, Classes], list[tuple[int, int, int]]]:
    """Return the classes by question, and each set of alternatives as question and the parts of a `Pair`."""
    of_question: defaultdict[int, DistinctList[_Place]] = defaultdict(DistinctList)
    shapes: list[tuple[int, list[int]]] = []
    for id_, at in with_gc_deferred(all_asked):
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
        for question_id, places in with_gc_deferred(shapes)
    ]


class Block(NamedTuple):
    """Some quotas of adjacent ranks, made together; the quotas with most rows to combine come first."""

    quotas: NDArray[np.intp]  # by their places in the source
    possible: list[NDArray[np.intp]]  # their intersection is the members who may match; see `by_turn`
    unsure: NDArray[np.intp]  # those that a member may match uncertainly, by their places in `quotas`
    certain: list[NDArray[np.intp]]  # with the possible rows, their intersection is those who certainly match


class PanelPlan:
    """The plan for panels with the same columns.

    `given` are the rows to fill, which are the first ones: "nothing", "everything", and then `InputRow`.
    `steps` make all others from them.
    """

    def __init__(self, source: CompactInventory, columns: PanelColumns) -> None:
        self.source, self.columns = source, columns
        planning = _PlanBuilder(source, columns)
        # A plan of some hundred thousand rows has no garbage, as a `Program` has none.
        quotas = [planning.quota(each) for each in with_gc_deferred(source.quotas())]
        arranged = Arranged(planning.rows, {part for pair in quotas for row in pair for part in row})
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
    """Return the rows that a certain match needs in addition to a possible one."""
    return [row for row in pair.certain if row not in pair.possible]


_SubQuota: TypeAlias = "tuple[tuple[FittingClasses, ...], bool]"
"""The classes of a sub-quota by question, and whether it is full."""


class _PlanBuilder:
    """The state while a plan is made: its rows so far, and caches of combinations made before."""

    def __init__(self, source: CompactInventory, columns: PanelColumns) -> None:
        self.rows = SymbolicRows()
        self._source, self._columns = source, columns
        self._exactly_one = source.policy.subquota_rule == "exactly_one"
        all_sub_quotas = source.sub_quotas()
        layers = [
            self._read([(all_sub_quotas[place], full) for place, full in shape])
            for shape in with_gc_deferred(source.layers)
        ]
        self._ways = self._fillings(layers)
        self._made: dict[tuple[int, int], Row] = {}
        self._fits: dict[tuple[FittingClasses, ...], Pair] = {}
        self._layers = [self._layer(each) for each in with_gc_deferred(layers)]

    def _read(self, sub_quotas: list[_SubQuota]) -> list[_SubQuota]:
        """Return the sub-quotas of a layer; if all ask the same question, as one."""
        questions = {tuple(each.question_id for each in asked) for asked, _ in sub_quotas}
        only = next(iter(questions)) if len(questions) == 1 else ()
        # A member with several answers may fit several sub-quotas, one with each answer. So the sub-quotas
        # cannot be combined into one set of classes.
        if len(only) != 1 or (only[0] in self._columns.multiple and len(sub_quotas) > 1):
            return sub_quotas
        all_classes = -1
        classes = [(*asked[0].classes, all_classes if full else 0) for asked, full in sub_quotas]
        united = Pair(*fitting(classes, 0, exactly_one=self._exactly_one))
        return [((FittingClasses(only[0], united),), False)]

    def _fillings(self, layers: Iterable[list[_SubQuota]]) -> dict[int, str]:
        """Return the cheapest `InputRow.how` for the sets of each question's classes."""
        wanted: defaultdict[int, set[int]] = defaultdict(set)
        for sub_quotas in with_gc_deferred(layers):
            for each in chain.from_iterable(asked for asked, _ in sub_quotas):
                wanted[each.question_id].update(each.classes)
        return {question_id: self._filling(question_id, sets) for question_id, sets in wanted.items()}

    def _filling(self, question_id: int, sets: set[int]) -> str:
        if question_id in self._columns.multiple:
            return "has"
        everything = self._source.classes[question_id].everything
        costs = {"in": _LOOKED_UP * len(sets)}
        if everything.bit_length() <= MOST_CODES:
            for how in ("is", "upto"):
                parts = [parts_of(how, question_id, each, everything)[1] for each in sets]
                costs[how] = sum(map(len, parts)) + _FILLED * len({part for each in parts for part in each})
        return min(costs, key=costs.__getitem__)

    def _row(self, question_id: int, classes: int) -> Row:
        # Nobody has answered a question without a column.
        if question_id not in self._columns.questions:
            return self.rows.everything if classes >> UNANSWERED & 1 else self.rows.nothing
        everything = self._source.classes[question_id].everything
        found = self._made.get((question_id, classes))
        if found is None:
            op, parts = parts_of(self._ways[question_id], question_id, classes, everything)
            found = self._made[question_id, classes] = self.rows.combined(op, map(self.rows.given, parts))
        return found

    def _layer(self, sub_quotas: list[_SubQuota]) -> Pair:
        pairs = [(self._fitting(asked), full) for asked, full in sub_quotas]
        # If nobody may fit two sub-quotas, the rule of a layer is a plain union of the open ones.
        if self._is_one_at_most(sub_quotas):
            is_open = [pair for pair, full in pairs if not full]
            return Pair(*(self.rows.combined("or", rows) for rows in zip(*is_open, strict=True)))
        nobody, everybody = self.rows.nothing, self.rows.everything
        fits = [(*pair, everybody if full else nobody) for pair, full in pairs]
        return Pair(*fitting(fits, nobody, exactly_one=self._exactly_one))

    def _fitting(self, asked: tuple[FittingClasses, ...]) -> Pair:
        """Return the members who fit a sub-quota; everybody may fit one without questions."""
        if not asked:
            return Pair(self.rows.nothing, self.rows.everything)
        found = self._fits.get(asked)
        if found is None:
            rows = [[self._row(each.question_id, classes) for classes in each.classes] for each in asked]
            found = Pair(*(self.rows.combined("and", each) for each in zip(*rows, strict=True)))
            self._fits[asked] = found
        return found

    def _is_one_at_most(self, sub_quotas: list[_SubQuota]) -> bool:
        """Return whether nobody may fit two sub-quotas, because each two exclude each other by a question."""
        possible = [
            {
                each.question_id: each.classes.possible
                for each in asked
                if each.question_id not in self._columns.multiple
            }
            for asked, _ in sub_quotas
        ]
        return any(not full for _, full in sub_quotas) and all(
            any(not classes & other.get(question_id, -1) for question_id, classes in one.items())
            for one, other in combinations(possible, 2)
        )

    def quota(self, quota: QuotaOfPlan) -> Pair:
        """Return the numbers of the rows whose intersection is a quota's members."""
        rows, columns, source = self.rows, self._columns, self._source
        masks: list[Row] = []
        if columns.has_device and quota.device_types:
            masks.append(rows.given(InputRow("device", 0, quota.device_types)))
        if columns.has_taken:
            masks.append(rows.given(InputRow("untaken", 0, quota.wave)))
        is_listed = columns.has_codes and quota.quota_id in source.lists
        if is_listed:
            masks.append(rows.given(InputRow("listed", 0, quota.quota_id)))
        layers = [self._layers[place] for place in quota.layers]
        possible = rows.operands("and", [*masks, *(each.possible for each in layers)])
        certain = [*masks, *(each.certain for each in layers)]
        if quota.needs_list and not is_listed:
            certain = [rows.nothing]
        return Pair(rows.operands("and", certain), possible)
