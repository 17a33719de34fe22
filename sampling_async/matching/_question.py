"""The demands of an inventory about one question, and the quotas that an answer to it rules out.

A quota or sub-quota may ask for one of several conditions; a layer whose sub-quotas all ask this question is a
choice between them. Both are a *demand*: it has parts, and each part has conditions. An answer meets few
conditions of many, so only the demands that it meets are looked at: first all demands count as not met, and
then these are taken out again. That is done with sets of numbers, which Python does in C.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

from sampling_async.matching._bits import all_of, of_places, without
from sampling_async.matching._layers import Fitting, fitting

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sampling_async.matching._conditions import Condition, Known, MatchPolicy

_MANY: Final = 12
"""From so many quotas on, those of a demand are kept as a set, which is then united faster than a list."""

_LONG: Final = 64  # longer lists of postal codes are not put into a table at once; see `_LongLists`


class Layout(NamedTuple):
    """The layout of the four sets that an answer rules out, packed into one integer.

    One integer needs one union instead of four. From the lowest bit on, it holds: quotas ruled out, uncertain
    quotas, sub-quotas of crossed layers ruled out, and uncertain ones. Few questions occur in crossed layers;
    the integers of all others are shorter, because their highest bits are 0.
    """

    quotas: int  # how many bits a set of quotas has
    crossed: int  # how many bits a set of sub-quotas of crossed layers has

    def packed(self, out: int, uncertain: int) -> int:
        """Return two sets of places as one integer; the sub-quotas of crossed layers come after the quotas."""
        # With 3 quotas and 2 sub-quotas: bits 0-2 are the quotas of `out`, 3-5 those of `uncertain`, 6-7 the
        # sub-quotas of `out` and 8-9 those of `uncertain`.
        quotas, bits = (1 << self.quotas) - 1, self.quotas
        of_crossed = out >> bits | uncertain >> bits << self.crossed
        return out & quotas | (uncertain & quotas | of_crossed << bits) << bits

    def parts(self, packed: int) -> tuple[int, int, int, int]:
        quotas, crossed = (1 << self.quotas) - 1, (1 << self.crossed) - 1
        of_crossed = packed >> 2 * self.quotas
        return (
            packed & quotas,
            packed >> self.quotas & quotas,
            of_crossed & crossed,
            of_crossed >> self.crossed,
        )


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

    def __init__(self, layout: Layout, policy: MatchPolicy) -> None:
        self._layout = layout
        self._policy = policy
        self._exactly_one = policy.subquota_rule == "exactly_one"
        # For each year, answer ID or prefix, the conditions that it meets; for those asked before, the parts.
        self._meeting: defaultdict[int | str, list[int]] = defaultdict(list)
        self._parts_met: dict[int, tuple[int, ...]] = {}
        self._lengths: tuple[int, ...] = ()
        self._postal = _LongLists()
        self._vague: list[int] = []
        self._unanswered: list[int] = []
        # For each condition, the parts that contain it. For each part, its demand. For each demand, its parts,
        # and who has it: quotas and, numbered after them, sub-quotas of crossed layers.
        self._having: list[list[int]] = []
        self._demands: list[int] = []
        self._parts: list[range] = []
        self._places: list[Sequence[int]] = []
        self._full: set[int] = set()

    def add(self, condition: Condition) -> int:
        place = len(self._having)
        self._having.append([])
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
        """Add a demand: for each part its conditions, and whether it is full.

        `places` has who has it: quotas and, numbered after them, sub-quotas of crossed layers.
        """
        demand, first = len(self._parts), len(self._demands)
        for part, (conditions, is_full) in enumerate(parts, first):
            for condition in conditions:
                self._having[condition].append(part)
            self._demands.append(demand)
            if is_full:
                self._full.add(part)
        self._parts.append(range(first, len(self._demands)))
        self._places.append(places)

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

    def ruled(self, answer: Known) -> int:
        """Return the sets that an answer rules out, packed."""
        if isinstance(answer, str):
            found = self._meeting.get
            places = chain.from_iterable(found(answer[:length], ()) for length in self._lengths)
            return self._ruled(frozenset(self._parts_of(chain(places, self._postal.met(answer)))), self._doubt)
        values = answer if isinstance(answer, frozenset) else (answer,)
        return self._ruled(frozenset().union(*map(self._met, values)), self._doubt)

    def _met(self, value: int) -> tuple[int, ...]:
        found = self._parts_met.get(value)
        if found is None:
            found = tuple(self._parts_of(self._meeting.get(value, ())))
            if found:
                self._parts_met[value] = found
        return found

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
        return self._layout.packed(out, uncertain)


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
