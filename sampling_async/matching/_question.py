"""The demands of an inventory about one question, and the quotas that an answer to it rules out.

A quota or sub-quota may ask for one of several conditions; a layer whose sub-quotas all ask this question is a
choice between them. Both are a *demand*: it has parts, and each part has conditions. An answer meets few
conditions of many, so only the demands that it meets are looked at: first all demands count as not met, and
then these are taken out again. That is done with sets of numbers, which Python does in C.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

from sampling_async.matching._bits import all_of, of_places, without
from sampling_async.matching._conditions import Fitting, fitting

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from sampling_async.matching._conditions import Condition, Known, MatchPolicy

_MANY: Final = 12
"""From so many quotas on, those of a demand are kept as a set, which is then united faster than a list."""

_LONG: Final = 64  # longer lists of postal codes are not put into a table at once; see `_LongLists`

_SPARSE: Final = 256
"""A long set of needs is faster than a list of them only if more than one need in so many is met."""

NARROW: Final = 2**15
"""Up to so many needs, a set of them is short: it has 4 KiB at most."""

_NO_NEEDS: Final = array("i")


class AnsweredQuestion(NamedTuple):
    """What an answer does: the quotas it rules out, and the needs of crossed layers that it meets."""

    ruled: int  # from the lowest bit on, the quotas ruled out, and then those uncertain or ruled out
    many: int  # needs as a set
    few: array[int]  # the other needs, if they are few


class _Met(NamedTuple):
    """What one value meets, such as an answer ID: parts of demands, and needs of crossed layers."""

    parts: Sequence[int]
    many: int  # the needs of conditions that meet many
    needs: array[int]  # the other needs


class _Doubt(NamedTuple):
    """What stays uncertain: because conditions are vague, or because there is no answer."""

    parts: frozenset[int]  # that may fit
    mixed: frozenset[int]  # the demands with several parts, of which one may fit
    possible: frozenset[int]  # the demands that may be met
    asking: int  # the set of those who have these demands


class QuestionSets:
    """All demands of an inventory about one question.

    Conditions, demands and parts of demands have places, in the order in which they were added.
    """

    def __init__(self, quotas: int, needs: int, policy: MatchPolicy) -> None:
        self._quotas = quotas
        self._sparse = needs // _SPARSE
        self._few = self._sparse if needs > NARROW else 0
        self._policy = policy
        self._exactly_one = policy.subquota_rule == "exactly_one"
        # For each year, answer ID or prefix, the conditions it meets; for those asked before, all it meets.
        self._meeting: defaultdict[int | str, list[int]] = defaultdict(list)
        self._met: dict[int, _Met] = {}
        self._lengths: tuple[int, ...] = ()
        self._postal = _LongLists()
        self._vague: list[int] = []
        self._unanswered: list[int] = []
        # For each condition, the needs of crossed layers that it meets; if they are many, they are a set.
        self._needs: list[array[int]] = []
        self._many: dict[int, int] = {}
        # For each condition, the parts that contain it. For each part, its demand. For each demand, its parts,
        # and the quotas that have it.
        self._having: list[list[int] | tuple[()]] = []
        self._demands: list[int] = []
        self._parts: list[range] = []
        self._places: list[Sequence[int]] = []
        self._full: set[int] = set()

    def add(self, condition: Condition) -> int:
        place = len(self._having)
        self._having.append(())
        self._needs.append(_NO_NEEDS)
        values, meeting = condition.values(), self._meeting
        if len(condition.prefixes) > _LONG:
            self._postal.add(place, condition)
        else:
            for value in values:
                meeting[value].append(place)
        if condition.may_be_met(answered=True, policy=self._policy):
            self._vague.append(place)
        if condition.may_be_met(answered=False, policy=self._policy):
            self._unanswered.append(place)
        return place

    def add_demand(self, parts: Sequence[tuple[Iterable[int], bool]], places: Sequence[int]) -> None:
        """Add a demand: for each part its conditions, and whether it is full; and the quotas that have it."""
        demand, first = len(self._parts), len(self._demands)
        for part, (conditions, is_full) in enumerate(parts, first):
            for condition in conditions:
                having = self._having[condition]
                if isinstance(having, list):
                    having.append(part)
                else:
                    self._having[condition] = [part]
            self._demands.append(demand)
            if is_full:
                self._full.add(part)
        self._parts.append(range(first, len(self._demands)))
        self._places.append(places)

    def add_needs(self, conditions: Iterable[int], needs: array[int]) -> None:
        """Add needs of crossed layers, which any of the conditions meets."""
        for condition in conditions:
            if len(needs) > self._sparse:
                self._many[condition] = self._many.get(condition, 0) | of_places(needs)
            else:
                known = self._needs[condition]
                self._needs[condition] = known + needs if known else needs

    def seal(self) -> None:
        """Precompute what does not depend on an answer; call it after everything was added."""
        self._lengths = tuple({len(value) for value in self._meeting if isinstance(value, str)})
        self._postal.seal()
        # Long lists of places become sets, and short ones stay.
        self._sets = {
            demand: of_places(places) for demand, places in enumerate(self._places) if len(places) >= _MANY
        }
        times = Counter(chain.from_iterable(self._places))
        self._asking = of_places(times)
        # A quota with several demands needs all of them.
        twice = {place for place, count in times.items() if count > 1}
        self._twice = of_places(twice)
        self._shared = {
            demand for demand, places in enumerate(self._places) if twice and not twice.isdisjoint(places)
        }
        for demand in self._sets:
            self._places[demand] = ()
        self._doubt = self._doubt_of(self._vague)

    def _doubt_of(self, conditions: Sequence[int]) -> _Doubt:
        parts = frozenset(self._parts_of(conditions))
        demands = {self._demands[part] for part in parts}
        mixed = frozenset(demand for demand in demands if len(self._parts[demand]) > 1)
        possible = demands - mixed
        possible.update(demand for demand in mixed if self._fits(demand, frozenset(), parts).possible)
        return _Doubt(parts, mixed, frozenset(possible), self._having_any(possible))

    def _parts_of(self, conditions: Iterable[int]) -> Iterable[int]:
        return chain.from_iterable(map(self._having.__getitem__, conditions))

    def _having_any(self, demands: set[int] | frozenset[int]) -> int:
        found = of_places(chain.from_iterable(map(self._places.__getitem__, demands)))
        return found | all_of(map(self._sets.__getitem__, self._sets.keys() & demands))

    def _fits(self, demand: int, fit: frozenset[int], may: frozenset[int]) -> Fitting[int]:
        """Apply the rule of a layer to a demand, given the parts that fit and those that may fit too."""
        # Sets of one member: 1 holds the member, 0 is empty.
        parts = [
            (int(part in fit), int(part in fit or part in may), int(part in self._full))
            for part in self._parts[demand]
        ]
        return fitting(parts, 0, exactly_one=self._exactly_one)

    def ruled_unanswered(self) -> int:
        return self._ruled(frozenset(), self._doubt_of(self._unanswered))

    def doubts(self) -> Iterator[int]:
        """Yield the needs that may be met without an answer, and those that may be met by any answer."""
        for conditions in (self._unanswered, self._vague):
            many, needs = self._needs_of(conditions)
            yield many | of_places(needs)

    def answered(self, answer: Known) -> AnsweredQuestion:
        if isinstance(answer, str):
            found = self._meeting.get
            prefixes = [answer[:length] for length in self._lengths]
            conditions = chain(*(found(prefix, ()) for prefix in prefixes), self._postal.met(answer))
            met = [self._met_by(conditions)]
        else:
            met = list(map(self._met_by_value, answer if isinstance(answer, frozenset) else (answer,)))
        ruled = self._ruled(frozenset().union(*[each.parts for each in met]), self._doubt)
        many = all_of(each.many for each in met)
        needs = met[0].needs if len(met) == 1 else _joined(each.needs for each in met)
        if len(needs) > self._few:
            many, needs = many | of_places(needs), _NO_NEEDS
        return AnsweredQuestion(ruled, many, needs)

    def _met_by_value(self, value: int) -> _Met:
        found = self._met.get(value)
        if found is None:
            conditions = self._meeting.get(value, ())
            found = self._met_by(conditions)
            if conditions:
                self._met[value] = found
        return found

    def _met_by(self, conditions: Iterable[int]) -> _Met:
        listed = list(conditions)
        return _Met(tuple(self._parts_of(listed)), *self._needs_of(listed))

    def _needs_of(self, conditions: Sequence[int]) -> tuple[int, array[int]]:
        """Return the needs that any of the conditions meets, some as a set and the others as numbers."""
        many = all_of(map(self._many.__getitem__, self._many.keys() & conditions)) if self._many else 0
        return many, _joined(map(self._needs.__getitem__, conditions))

    def _ruled(self, fit: frozenset[int], doubt: _Doubt) -> int:
        demands = list(map(self._demands.__getitem__, fit))
        touched = set(demands)
        # A demand none of whose parts is in doubt is met if one part fits, and no full one does. That is the
        # rule of a layer without doubt, for all demands at once.
        certain = touched - doubt.mixed
        certain.difference_update(self._demands[part] for part in fit & self._full)
        if self._exactly_one and len(touched) < len(demands):
            certain.difference_update(demand for demand, count in Counter(demands).items() if count > 1)
        possible = certain.copy()
        for demand in touched & doubt.mixed:
            fits = self._fits(demand, fit, doubt.parts)
            if fits.possible:
                possible.add(demand)
            if fits.certain:
                certain.add(demand)
        met = self._having_any(certain)
        may = doubt.asking
        if not touched.isdisjoint(doubt.possible):
            may = without(may, self._having_any(touched & doubt.possible))
        may |= met if len(possible) == len(certain) else self._having_any(possible)
        out, uncertain = without(self._asking, may), without(self._asking, met)
        # A quota with two demands is in `met` if either is met, but needs both. So rule it out again by those
        # that are not met.
        if may & self._twice:
            uncertain |= self._having_any(self._shared - certain)
            out |= self._having_any(self._shared - possible - (doubt.possible - touched))
        return out | uncertain << self._quotas


def _joined(some: Iterable[array[int]]) -> array[int]:
    # As bytes: arrays are joined without a number being made of each element.
    return array("i", b"".join(some))


class _LongLists:
    """Long lists of prefixes, and the conditions that have them.

    A table of all prefixes answers fast, but takes long to make: a second for a thousand lists of a thousand
    codes. So each question moves one more list to the table, and searches the others one by one. Several
    threads may ask: a list leaves `_left` when all of it is in the table, and may be in both.
    """

    def __init__(self) -> None:
        self._left: tuple[tuple[int, frozenset[str]], ...] = ()
        self._added: list[tuple[int, frozenset[str]]] = []
        self._table: defaultdict[str, list[int]] = defaultdict(list)
        self._lengths: set[int] = set()

    def add(self, place: int, condition: Condition) -> None:
        self._added.append((place, condition.prefixes))
        self._lengths |= condition.lengths

    def seal(self) -> None:
        self._left = tuple(self._added)
        self._added.clear()

    def met(self, code: str) -> list[int]:
        """Return the conditions that a code meets; one may be there several times."""
        left = self._left
        found: list[int] = []
        for prefix in [code[:length] for length in self._lengths]:
            found += [place for place, prefixes in left if prefix in prefixes]
            found += self._table.get(prefix, ())
        if left:
            place, prefixes = left[-1]
            for prefix in prefixes:
                self._table[prefix].append(place)
            self._left = left[:-1]
        return found
