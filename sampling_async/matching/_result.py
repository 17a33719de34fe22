"""The quotas that a member matches, as sequences of IDs that are made when they are read."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from operator import eq, itemgetter
from typing import TYPE_CHECKING, Any, overload

from attrs import frozen

from sampling_async._contract.checks import count_of, whole_number
from sampling_async.matching._bits import ascending

if TYPE_CHECKING:
    from sampling_async.matching._program import Program, Target
    from sampling_async.matching._segment import CompiledPart


class QuotaIds(Sequence[int]):
    """A sequence of quota IDs, best rank first, created lazily: a member may match thousands of quotas."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[tuple[CompiledPart, int]]) -> None:
        self._parts = [(part, bits) for part, bits in parts if bits]

    def __len__(self) -> int:
        return sum(bits.bit_count() for _, bits in self._parts)

    def __iter__(self) -> Iterator[int]:
        return (target.quota.quota_id for target in self.targets())

    def __contains__(self, quota_id: object) -> bool:
        # An unknown ID gets the bit after the last quota, which is never set.
        return any(bits >> part.bit_of.get(quota_id, len(part.targets)) & 1 for part, bits in self._parts)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            first, last, step = index.indices(len(self))
            if step > 0:
                return tuple(islice(self, first, last, step))
            # A negative step needs the end first, so the IDs are created all.
            return tuple(self)[index]
        at = index + len(self) if index < 0 else index
        for quota_id in islice(self, at, at + 1) if at >= 0 else ():
            return quota_id
        raise IndexError(index)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = ", ".join(map(str, islice(self, 3)))
        return f"<{count_of(len(self), 'quota ID')}: {shown}{', ...' if len(self) > 3 else ''}>"  # noqa: PLR2004

    def __reversed__(self) -> Iterator[int]:
        return reversed(tuple(self))

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """Return the position of a quota ID."""
        return tuple(self).index(value, start, len(self) if stop is None else stop)

    def parts(self) -> Iterator[tuple[CompiledPart, int]]:
        """Yield each part of the index with a set of its quotas; for other parts of this package."""
        return iter(self._parts)

    def targets(self) -> Iterator[Target]:
        """Yield the quotas, each with its survey."""
        # One part, which is usual, is in order already and needs no merge.
        if len(self._parts) == 1:
            part, bits = self._parts[0]
            return (part.targets[bit] for bit in ascending(bits))
        return (target for _, target in self.compiled())

    def compiled(self) -> Iterator[tuple[Program, Target]]:
        """Yield the quotas as `targets` does, each in a pair after the program it was compiled in."""
        ranked = heapq.merge(*(part.ranked(bits) for part, bits in self._parts), key=itemgetter(0))
        return ((program, target) for _, program, target in ranked)


@frozen
class MatchResult:
    """The quotas of one member.

    Attributes:
        certain: The quotas that the member certainly matches, best first.
        possible: The quotas that the member may match, best first: an answer is missing, or the service shows
            only a part of a list.
    """

    certain: QuotaIds
    possible: QuotaIds

    def select(self, n: int, *, one_per_survey: bool = True) -> tuple[int, ...]:
        """Return at most `n` quota IDs to request invites for: first the certain, then the possible ones.

        Both are in the order of their rank, best first. A bulk invite takes 100 IDs in one request. With
        `one_per_survey`, only one quota of each survey is selected, because a member can take a survey only
        once.

        Raises:
            InvalidRequestError: `n` is not a whole number from 0 on.
        """
        whole_number(n, "n", least=0)
        selected: list[int] = []
        surveys: set[int] = set()
        for target in chain(self.certain.targets(), self.possible.targets()):
            if len(selected) == n:
                break
            if not (one_per_survey and target.survey.survey_id in surveys):
                surveys.add(target.survey.survey_id)
                selected.append(target.quota.quota_id)
        return tuple(selected)
