"""Layers that ask several questions and have several sub-quotas, as gender by age.

No answer alone rules out such a layer. So the sub-quotas of all these layers are found first, and then the rule
of a layer is applied to all layers at once.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Final, NamedTuple

from sampling_async._pacing.gc_pauses import defer_full_gc
from sampling_async.matching._bits import Unions, all_of, of_places, without
from sampling_async.matching._conditions import fitting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sampling_async.matching._program import LayerShape, Program


NARROW: Final = 2**15
"""Up to so many needs, a set of them is short: it has 4 KiB at most."""


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
        for bit, places in enumerate(asked):
            # No garbage is made here, as in `Program`.
            defer_full_gc()
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
    for shape, quotas in layers:
        defer_full_gc()
        by_depth[max(1, *[len(program.sub_quotas[place]) for place, _ in shape])].append((shape, quotas))
    if by_depth and max(by_depth) * sum(len(shape) for shape, _ in layers) <= NARROW:
        by_depth = defaultdict(list, {max(by_depth): list(layers)})
    groups: list[CrossedLayers] = []
    for depth, some in by_depth.items():
        groups.append(CrossedLayers(some, program, depth, groups[-1].end if groups else 0))
    return groups
