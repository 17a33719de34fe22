"""Questions whose answer IDs come one after the other, as they mostly do: read by arithmetic."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from sampling_async.matching.panel._arrow import WHOLE, integers, pa
from sampling_async.matching.panel._classes import OTHER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

_TOGETHER: Final = 2**16
"""Answers read in one go, of several columns put together."""

_LONG: Final = 2**15
"""Members whose answers are read in less time than they are put together with others."""


class _OfKind(NamedTuple):
    """What is to be done with columns of a type.

    Attributes:
        fits: Of each question, whether the type has all its answer IDs.
        firsts: The first answer ID of each.
        counts: How many there are.
    """

    fits: list[bool]
    firsts: NDArray[Any]
    counts: NDArray[Any]


class Consecutive:
    """Reads columns of such questions.

    Args:
        ranges: Of each question, by its ID, the answer IDs: they are in the classes after `OTHER`, one in each.
    """

    def __init__(self, ranges: Mapping[int, range]) -> None:
        self._question_ids = list(ranges)
        self._names = list(map(str, ranges))
        self._ranges = list(ranges.values())
        self._of_kinds: dict[int, _OfKind] = {}  # of those that came

    def read(self, columns: Mapping[str, Any], codes: NDArray[np.uint8]) -> list[int]:
        """Read the class of each member's answers into the first rows of `codes`, a row a question.

        Returns:
            The questions that are left to others: their columns hold something else than whole numbers.
        """
        mine = [columns[name] for name in self._names]
        left: list[int] = []
        for kind, group in groupby(range(len(mine)), key=lambda at: self._kind(at, mine[at])):
            places = list(group)
            if kind is None:
                left += [self._question_ids[at] for at in places]
            else:
                some = slice(places[0], places[-1] + 1)
                of_kind = self._of_kind(kind)
                _read(mine[some], of_kind.firsts[some], of_kind.counts[some], codes[some])
        return left

    def _kind(self, at: int, column: Any) -> int | None:
        kind: int = column.type.id
        return kind if kind in WHOLE and self._of_kind(kind).fits[at] else None

    def _of_kind(self, kind: int) -> _OfKind:
        if kind not in self._of_kinds:
            self._of_kinds[kind] = _of_kind(self._ranges, WHOLE[kind])
        return self._of_kinds[kind]


def _of_kind(ranges: Sequence[range], kind: np.dtype[Any]) -> _OfKind:
    limits = np.iinfo(kind)
    fits = [bool(limits.min <= each[0] and each[-1] <= limits.max) for each in ranges]
    firsts = [[each[0] if fit else 0] for each, fit in zip(ranges, fits, strict=True)]
    counts = [[len(each)] for each in ranges]
    return _OfKind(fits, np.array(firsts, dtype=kind), np.array(counts, dtype=f"u{kind.itemsize}"))


def _read(columns: Sequence[Any], firsts: NDArray[Any], counts: NDArray[Any], codes: NDArray[np.uint8]) -> None:
    """Read columns of one type into as many rows."""
    members = codes.shape[1]
    at_once = 1 if members >= _LONG else min(_TOGETHER // max(members, 1), len(columns))
    room = np.empty((at_once, members), dtype=firsts.dtype)
    for start in range(0, len(columns), at_once):
        some = slice(start, min(start + at_once, len(columns)))
        column = pa.concat_arrays(columns[some]) if at_once > 1 else columns[start]
        values, answered = integers(column)
        after, read = room[: some.stop - start], codes[some]
        # What is below the first one comes out above all others: there is nothing below 0.
        np.subtract(values.reshape(after.shape), firsts[some], out=after)
        is_one = after.view(counts.dtype) < counts[some]
        read[:] = after  # too large ones are cut, and made 0
        read += 1
        read *= is_one
        read += OTHER
        if answered is not None:
            read *= answered.reshape(after.shape)  # no answer is class 0
