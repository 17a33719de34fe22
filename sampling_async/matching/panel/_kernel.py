"""The kernel, which turns answers into rows: sets of some thousand members, a bit for each member."""

from __future__ import annotations

from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from sampling_async._contract.checks import is_utf8
from sampling_async._pacing.gc_pauses import defer_full_gc
from sampling_async.matching.panel._arrow import booleans, member_codes, pa, pc
from sampling_async.matching.panel._columns import (
    DEVICE,
    NOBODY,
    AnswerReader,
    Several,
    numbers,
    taken,
)
from sampling_async.matching.panel._rows import MOST_CODES, TOGETHER, InputRow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from sampling_async.matching.panel._plan import Block, PanelPlan

Filled: TypeAlias = "Iterator[tuple[NDArray[np.intp], NDArray[np.uint64]]]"

CHUNK: Final = 10_240
"""Members in a chunk: many, so that a call of numpy pays; few, so that their rows fit the last-level cache."""

_WORD: Final = 64
# A square of 8 by 8 bits in one 64-bit number, bit `column + 8 * row`, is transposed in three steps: swap
# single bits in each square of 2 by 2 (7 bits apart), then squares of 2 in each of 4 by 4 (14), then squares of
# 4 (28).
_SWAPS: Final = tuple(
    (np.uint64(shift), np.uint64(mask))
    for shift, mask in ((7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0x00000000F0F0F0F0))
)
_AT_ONCE: Final = 128
_COMPARE: Final = {"is": np.equal, "upto": np.less_equal}
_UFUNCS: Final = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


class Answers(NamedTuple):
    """The answers of a batch, as classes."""

    codes: NDArray[np.uint8]  # a row of classes, a member each, for each question with at most `MOST_CODES`
    looked_up: dict[int, NDArray[np.intp]]  # by question with more classes
    several: dict[int, Several]  # by question whose answers are lists
    devices: tuple[NDArray[Any], NDArray[np.bool_]] | None  # and whether each is known
    taken: Several  # the waves that must not be offered; empty if the panel does not say
    listed: dict[int, NDArray[np.bool_]]  # by quota with a recontact list


_Filler: TypeAlias = "Callable[[Answers, slice], Filled]"
"""Fills rows of one kind: it yields some places of rows, and the rows to put there."""


def _compared(given: Sequence[tuple[str, int, int, int]]) -> _Filler:
    """Fill rows of the members in a class, or in a class up to a given one, by comparing class numbers.

    Rows are given as (how, question, class, place), sorted by how and question. Most questions have few
    classes, so one group has rows of many questions.
    """
    # For each group the places of its rows, and the comparisons of each question for adjacent rows.
    groups: list[tuple[NDArray[np.intp], list[tuple[np.ufunc, int, NDArray[np.uint8], slice]]]] = []
    for first in range(0, len(given), _AT_ONCE):
        some = given[first : first + _AT_ONCE]
        comparisons: list[tuple[np.ufunc, int, NDArray[np.uint8], slice]] = []
        end = 0
        for (how, question), group in groupby(some, key=lambda row: row[:2]):
            classes = np.array([[class_] for _, _, class_, _ in group], dtype=np.uint8)
            start, end = end, end + len(classes)
            comparisons.append((_COMPARE[how], question, classes, slice(start, end)))
        groups.append((np.array([place for *_, place in some], dtype=np.intp), comparisons))

    def rows(answers: Answers, members: slice) -> Filled:
        codes = answers.codes[:, members]
        are_in = np.empty((_AT_ONCE, codes.shape[1]), dtype=bool)
        for places, comparisons in groups:
            for compare, question, classes, some in comparisons:
                # `classes` is a column: its shape (rows, 1) gives one row for each class in one call.
                compare(codes[question], classes, out=are_in[some])
            yield places, packed(are_in[: len(places)])

    return rows


def _looked_up(
    question_id: int, question: int | None, sets: Sequence[int], size: int, places: NDArray[np.intp]
) -> _Filler:
    """Fill rows of the members whose class is in a set of classes, for many sets of one question."""
    # A table has a row for each class, with a bit for each of up to 128 sets that contain the class. So one
    # lookup gives a member's bits in all these sets.
    tables: list[tuple[NDArray[np.intp], NDArray[np.uint8]]] = []
    for first in range(0, len(sets), _AT_ONCE):
        some = [classes.to_bytes(-(-size // 8), "little") for classes in sets[first : first + _AT_ONCE]]
        is_in = np.frombuffer(b"".join(some), dtype=np.uint8).reshape(len(some), -1)
        by_class = np.unpackbits(is_in, axis=1, count=size, bitorder="little").T
        table = np.packbits(by_class, axis=1, bitorder="little")
        tables.append((places[first : first + _AT_ONCE], table))

    def rows(answers: Answers, members: slice) -> Filled:
        if question is None:
            codes = answers.looked_up[question_id][members]
        else:
            codes = answers.codes[question, members].astype(np.intp)
        # The table gives a row for each member, but a row for each set is needed: `_transposed` transposes the
        # bits, and needs whole words of members.
        if len(codes) % _WORD:
            codes = np.pad(codes, (0, -len(codes) % _WORD))
        for some, table in tables:
            yield some, _transposed(table.take(codes, axis=0))[: len(some)].view(np.uint64)

    return rows


def _transposed(bits: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the transpose of a matrix of bits, which are packed eight to a byte."""
    height, width = bits.shape
    # Cut the matrix into squares of 8 by 8 bits, one 64-bit number each; transpose each square, and then the
    # order of the squares. Every step works on all squares at once.
    squares = np.ascontiguousarray(bits.reshape(-1, 8, width).transpose(2, 0, 1)).view("<u8")
    for shift, mask in _SWAPS:
        # `swapped` has a 1 where two bits to be swapped differ; to swap them is to flip both.
        swapped = (squares ^ squares >> shift) & mask
        squares ^= swapped ^ swapped << shift
    return np.ascontiguousarray(
        squares.view(np.uint8).reshape(width, height // 8, 8).transpose(0, 2, 1)
    ).reshape(8 * width, height // 8)


def _among(how: str, question_id: int, what: Sequence[int], places: NDArray[np.intp]) -> _Filler:
    """Fill rows from lists: of the members with an answer in a class, or without a wave among those taken."""
    is_answer = how == "has"
    # For each class or wave its row in this filler, or -1 if no row asks for it.
    row_of = np.full(max(what) + 1, -1)
    row_of[what] = np.arange(len(what))

    def rows(answers: Answers, members: slice) -> Filled:
        several = answers.several[question_id] if is_answer else answers.taken
        found, member = several.between(members.start, members.stop)
        row = row_of[np.minimum(found, len(row_of) - 1)]
        # `minimum` avoided an index out of bounds; drop the classes beyond the last one with a row.
        row[found >= len(row_of)] = -1
        order = np.argsort(row, kind="stable")
        row, member = row[order], member[order]
        for first in range(0, len(places), _AT_ONCE):
            some = places[first : first + _AT_ONCE]
            start, end = np.searchsorted(row, (first, first + len(some)))
            # "untaken" starts with everybody and removes members; "has" starts with nobody and adds them.
            among = np.full((len(some), members.stop - members.start), not is_answer)
            among[row[start:end] - first, member[start:end]] = is_answer
            yield some, packed(among)

    return rows


def _on_device(
    device_types: Sequence[tuple[int, ...]], places: NDArray[np.intp], answers: Answers, members: slice
) -> Filled:
    """Fill rows of the members whose device is one of some device types, or is not known."""
    assert answers.devices is not None
    device, is_known = (each[members] for each in answers.devices)
    yield places, packed(np.array([~is_known | np.isin(device, each) for each in device_types]))


def _listed(quotas: Sequence[int], places: NDArray[np.intp], answers: Answers, members: slice) -> Filled:
    yield places, packed(np.array([answers.listed[quota][members] for quota in quotas]))


class Kernel:
    """Makes rows from answers by a plan. The rows of a chunk are valid until the next chunk."""

    def __init__(self, plan: PanelPlan) -> None:
        self.plan = plan
        source, columns = plan.source, plan.columns
        single = sorted(columns.questions - columns.multiple)
        small = [id_ for id_ in single if len(source.classes[id_]) <= MOST_CODES]
        # By question; created on first use.
        self._readers: dict[int, AnswerReader] = {}
        self._places = {id_: place for place, id_ in enumerate(small)}
        self._fillers = list(self._made_fillers())
        self._lists = {
            # A code that is not UTF-8 is in no panel.
            quota_id: pa.array(sorted(filter(is_utf8, codes)), pa.string())
            for quota_id, codes in source.lists.items()
            if columns.has_codes
        }
        self._rooms = _Rooms()

    def __reduce__(self) -> tuple[type[Kernel], tuple[PanelPlan]]:
        # Pickle the plan only: everything else is derived from it.
        return Kernel, (self.plan,)

    def another(self) -> Kernel:
        """Return a kernel with the same plan and separate rows, for use at the same time."""
        # A shallow copy shares all that `fill` does not write to.
        kernel = Kernel.__new__(Kernel)
        vars(kernel).update(vars(self), _rooms=_Rooms())
        return kernel

    def answers(self, batch: Any, first: int) -> Answers:
        """Return the answers of a batch; they are valid until the next batch is read."""
        columns, source = self.plan.columns, self.plan.source
        codes = self._rooms.rows(np.uint8, len(self._places), len(batch))
        looked_up: dict[int, NDArray[np.intp]] = {}
        several: dict[int, Several] = {}
        read = dict(zip(batch.schema.names, batch.columns, strict=True))
        for question_id in sorted(columns.questions):
            found = self._reader(question_id).read(read[str(question_id)], first)
            if isinstance(found, Several):
                several[question_id] = found
            elif question_id in self._places:
                codes[self._places[question_id]] = found
            else:
                looked_up[question_id] = found
        listed: dict[int, NDArray[np.bool_]] = {}
        if self._lists:
            codes_of_members = member_codes(batch, first)
            for quota_id, of_quota in self._lists.items():
                listed[quota_id] = booleans(pc.is_in(codes_of_members, value_set=of_quota))
        return Answers(
            codes,
            looked_up,
            several,
            numbers(batch.column(DEVICE), DEVICE, first) if columns.has_device else None,
            taken(batch, source, first) if columns.has_taken else NOBODY,
            listed,
        )

    def _reader(self, question_id: int) -> AnswerReader:
        reader = self._readers.get(question_id)
        if reader is None:
            source = self.plan.source
            reader = AnswerReader(question_id, source.classes[question_id], source.kinds)
            self._readers[question_id] = reader
        return reader

    def fill(self, answers: Answers, members: slice) -> None:
        count = members.stop - members.start
        words = -(-count // _WORD)
        # One block of memory: the rows of the plan, and three areas for temporary rows.
        room, made = self._rooms.rows(np.uint64, self.plan.count + 3 * TOGETHER, words), self.plan.count
        self._rows = rows = room[:made]
        self._some, self._possible, self._certain = (
            room[first : first + TOGETHER] for first in range(made, len(room), TOGETHER)
        )
        rows[0] = 0
        self.everybody = packed(np.ones((1, count), dtype=bool))[0]
        rows[1] = self.everybody
        for filler in self._fillers:
            for places, filled in filler(answers, members):
                rows[places] = filled
        for op, first, operands in self.plan.steps:
            _combine(_UFUNCS[op], rows, operands, rows[first : first + len(operands[0])], self._some)
        # The last word has bits beyond the last member, and some fillers set them.
        self._is_partial = bool(count % _WORD)

    def block(self, block: Block) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Return the members who may match the quotas of a block, and those who certainly match.

        The first array has a row for each of `block.quotas`, the second for each of `block.unsure`: for all
        other quotas, everybody who may match certainly does. The next call overwrites both arrays.
        """
        possible = self._possible[: len(block.quotas)]
        _combine(np.bitwise_and, self._rows, block.possible, possible, self._some)
        if self._is_partial:
            possible &= self.everybody
        # A member who certainly matches also may match, so start with the possible rows: fewer rows are left to
        # combine.
        certain = self._certain[: len(block.unsure)]
        possible.take(block.unsure, 0, certain, "clip")
        _combine_rest(self._rows, block.certain, certain, self._some)
        return possible, certain

    def _made_fillers(self) -> Iterator[_Filler]:
        defer_full_gc()
        # Sorted by kind and question: each filler does all the rows of its kind, and each comparison all of a
        # question.
        given = sorted(
            ((name, place) for place, name in enumerate(self.plan.given) if isinstance(name, InputRow)),
            key=lambda each: (each[0].how, each[0].of),
        )
        compared = [
            (name.how, self._places[name.of], name.what, place) for name, place in given if name.how in _COMPARE
        ]
        yield _compared(compared)
        others = [each for each in given if each[0].how not in _COMPARE]
        for (how, question_id), group in groupby(others, key=lambda each: (each[0].how, each[0].of)):
            names, places = zip(*group, strict=True)
            of, at = [name.what for name in names], np.array(places, dtype=np.intp)
            if how in {"has", "untaken"}:
                yield _among(how, question_id, of, at)
            elif how == "in":
                size = len(self.plan.source.classes[question_id])
                yield _looked_up(question_id, self._places.get(question_id), of, size, at)
            else:
                yield partial(_on_device if how == "device" else _listed, of, at)


class _Rooms:
    """Memory for rows, used repeatedly: to allocate it anew takes a tenth of the time it takes to fill it.

    Kernels of the same plan do not share it.
    """

    def __init__(self) -> None:
        self._of: dict[Any, NDArray[Any]] = {}

    def rows(self, kind: Any, count: int, length: int) -> NDArray[Any]:
        numbers = self._of.get(kind)
        if numbers is None or count * length > len(numbers):
            numbers = self._of[kind] = np.empty(count * length, dtype=kind)
        return numbers[: count * length].reshape(count, length)


def packed(members: NDArray[np.bool_]) -> NDArray[np.uint64]:
    """Return rows of booleans as rows of bits, padded with zeros to whole words."""
    bits = np.packbits(members, axis=1, bitorder="little")
    if bits.shape[1] % 8:
        whole = np.zeros((len(bits), -(-bits.shape[1] // 8) * 8), dtype=np.uint8)
        whole[:, : bits.shape[1]] = bits
        bits = whole
    return bits.view(np.uint64)


def members_in(words: NDArray[np.uint64]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the positions of the bits set in words: for each bit, the word's index and the bit's number."""
    # Often most words are 0: unpack only the others. Words 0, 5, 0 have bits 0 and 2 set in word 1, so this
    # returns [1, 1] and [0, 2].
    some = np.flatnonzero(words)
    bits = np.unpackbits(words[some].view(np.uint8), bitorder="little")
    at = np.flatnonzero(bits.view(bool))
    return some[at // _WORD], at % _WORD


def _combine(
    op: np.ufunc,
    rows: NDArray[np.uint64],
    operands: Sequence[NDArray[np.intp]],
    out: NDArray[np.uint64],
    some: NDArray[np.uint64],
) -> None:
    """Combine rows, for many results at once: all first operands, then the second operands, and so on.

    `some` is memory for as many rows as `out`, where the results are written; see `Step.operands`.
    """
    # "clip" is about speed: the places are always in bounds, and with the default, "raise", numpy would make a
    # copy of the result first.
    rows.take(operands[0], 0, out, "clip")
    _combine_rest(rows, operands[1:], out, some, op)


def _combine_rest(
    rows: NDArray[np.uint64],
    operands: Sequence[NDArray[np.intp]],
    out: NDArray[np.uint64],
    some: NDArray[np.uint64],
    op: np.ufunc = np.bitwise_and,
) -> None:
    # Results with most operands come first, so those that have this operand are the first `count` ones.
    for places in operands:
        count = len(places)
        rows.take(places, 0, some[:count], "clip")
        op(out[:count], some[:count], out=out[:count])
