"""Readers of a panel's Arrow columns: they turn answers into classes, and check the other columns."""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from sampling_async import InvalidRequestError
from sampling_async._contract.records import OPEN_AGE
from sampling_async.matching._conditions import OLDEST
from sampling_async.matching.panel._arrow import (
    DICTIONARY,
    LISTS,
    MEMBER_CODE,
    WHOLE,
    NotWholeError,
    arrow,
    as_integers,
    booleans,
    flat,
    integers,
    is_list,
    is_null,
    is_text,
    lists_of,
    pa,
)
from sampling_async.matching.panel._plan import PanelColumns
from sampling_async.matching.panel._postal import Beginnings
from sampling_async.matching.panel._rows import MOST_CODES, OTHER, UNANSWERED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from sampling_async.matching._conditions import QuestionKinds
    from sampling_async.matching.panel._plan import CompactInventory
    from sampling_async.matching.panel._rows import Classes

DEVICE: Final = "device_type"
EXCLUDED: Final = "exclude_surveys"
PARTICIPATIONS: Final = "participations"
INVITES_LEFT: Final = "invites_left"
"""The column of the panel with the most invites that a member may get today, as its caps say."""

OTHERS: Final = frozenset({MEMBER_CODE, DEVICE, EXCLUDED, PARTICIPATIONS})
"""The columns that are not questions."""

_SINGLE: Final = frozenset({"age", "postal"})
_UNSIGNED: Final = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
_WIDEST_TABLE: Final = 2**20
_NEEDED: Final = ("survey_id", "status_id")  # of a participation


class Several(NamedTuple):
    """Pairs of a number and a member, for members who have any number of things."""

    what: NDArray[np.intp]  # the class of an answer, or the place of a wave
    member: NDArray[np.intp]  # the member who has it, by place; ascending

    @classmethod
    def of(cls, what: NDArray[Any], member: NDArray[np.intp]) -> Several:
        """Return pairs sorted by member, as `between` needs them."""
        order = np.argsort(member, kind="stable")
        return cls(what[order].astype(np.intp), member[order])

    def between(self, first: int, end: int) -> Several:
        """Return the pairs of the members from `first` up to `end`, which are then counted from 0."""
        start, stop = np.searchsorted(self.member, (first, end))
        return Several(self.what[start:stop], self.member[start:stop] - first)


def columns_of(schema: Any, source: CompactInventory) -> PanelColumns:
    """Return which of the columns that an inventory needs a panel has."""
    names = schema.names
    kinds = dict(zip(names, schema.types, strict=True))
    present = frozenset(id_ for id_ in source.classes if str(id_) in kinds)
    return PanelColumns(
        questions=present,
        multiple=frozenset(id_ for id_ in present if is_list(kinds[str(id_)])),
        has_device=DEVICE in names,
        has_taken=EXCLUDED in names or PARTICIPATIONS in names,
        has_codes=MEMBER_CODE in names,
    )


class AnswerReader:
    def __init__(self, question_id: int, classes: Classes, kinds: QuestionKinds) -> None:
        self._question_id = question_id
        self._classes = classes
        self._kinds = kinds
        self._codes: Any = np.uint8 if len(classes) <= MOST_CODES else np.intp
        self._as_they_are: frozenset[int] = frozenset()
        """The integer types (by ID) that can be looked up without a conversion to 64 bits."""
        self._table: NDArray[Any] | None = None
        self._beginnings = Beginnings(classes) if classes.kind == "postal" else None
        if self._beginnings is not None:
            return
        known = np.array(sorted(classes.of) or [0], dtype=np.int64)
        if classes.kind == "age":
            known = np.arange(OLDEST + 1)
        self._low, self._high = int(known[0]), int(known[-1])
        # A table of the class of every number from `_low` to `_high`. If it would be too large, numbers are
        # looked up one by one. The first and the last place are for all below and above: OTHER.
        if self._high - self._low > _WIDEST_TABLE or self._low == np.iinfo(np.int64).min:
            return
        self._table = np.full(self._high - self._low + 3, OTHER, dtype=self._codes)
        self._table[known - self._low + 1] = [classes.of.get(int(each), OTHER) for each in known]
        # `_of_integers` computes `values - (low - 1)` in the column's own type. The type must hold `low - 1`,
        # and be so wide that a number that wraps around comes out above the last place of the table.
        lowest, highest = self._low - 1, max(self._high + 1, self._high - self._low + 2)
        self._as_they_are = frozenset(
            number
            for number, kind in WHOLE.items()
            if np.iinfo(kind).min <= lowest and highest <= np.iinfo(kind).max
        )

    def read(self, column: Any, first: int) -> NDArray[Any] | Several:
        """Return the class of each member's answer or, from a column of lists, the classes of their answers.

        `first` is the place of its first member in the panel.
        """
        kind = column.type.id
        if self._table is not None and kind in self._as_they_are:
            return self._of_integers(self._table, column, first, None)
        if kind in LISTS:
            if self._classes.kind in _SINGLE and not is_null(column.type):
                raise InvalidRequestError(
                    f"column '{self._question_id}' of the panel holds lists, but a member has one age and one "
                    "postal code"
                )
            values, member = flat(column)
            codes = self._single(values, first, member)
            # Nulls in a list do not count. A member with no answer at all then is in the class UNANSWERED.
            is_answer = codes != UNANSWERED
            codes, member = codes[is_answer], member[is_answer]
            empty = np.setdiff1d(np.arange(len(column)), member)
            unanswered = np.full(len(empty), UNANSWERED, dtype=codes.dtype)
            return Several.of(np.concatenate([codes, unanswered]), np.concatenate([member, empty]))
        return self._single(column, first, None)

    def _single(self, column: Any, first: int, member: NDArray[np.intp] | None) -> NDArray[Any]:
        kind = column.type
        # Decode a dictionary of other types, and a dictionary with more words than the column has members: most
        # of its words are not in use, so reading the members' words is less work.
        if kind.id == DICTIONARY and (
            not (is_text(kind.value_type) or kind.value_type.id in WHOLE)
            or len(column.dictionary) > len(column)
        ):
            column = column.dictionary_decode()
            kind = column.type
        if pa.types.is_null(kind):
            return np.full(len(column), UNANSWERED, dtype=self._codes)
        if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
            # Some libraries (pandas) cannot store missing values in columns of integers, and make them floats.
            try:
                column = as_integers(column)
            except NotWholeError as exc:
                self._refuse(exc.value, exc.at, first, member)
            kind = column.type
        if kind.id in WHOLE and self._table is not None:
            return self._of_integers(self._table, column, first, member)
        if kind.id == DICTIONARY:
            return self._of_words(column, first, member)
        if self._beginnings is not None and is_text(kind):
            # A text that is not UTF-8 is refused below.
            with suppress(UnicodeDecodeError):
                return self._beginnings.numbers(column).astype(self._codes)
        if is_text(kind) or kind.id in WHOLE:
            return self._of_words(column.dictionary_encode(), first, member)
        raise InvalidRequestError(
            f"column '{self._question_id}' of the panel is of type {kind}: answers must be whole numbers or "
            "texts, or lists of these"
        )

    def _of_integers(
        self, table: NDArray[Any], column: Any, first: int, member: NDArray[np.intp] | None
    ) -> NDArray[Any]:
        values, answered = integers(column)
        if column.type.id not in self._as_they_are:
            beyond = values > np.iinfo(np.int64).max if values.dtype == np.uint64 else False
            # Numbers too large for 64 bits with a sign become the lowest number, which is no answer ID either.
            values = np.where(beyond, np.iinfo(np.int64).min, values.astype(np.int64))
        # As numbers without a sign, those below the first place are above the last one too, and are clipped to
        # it, which means OTHER. With answers 101 to 126 as int8, the last place is 27, and -128 - 100 wraps
        # around to 28. A processor that had to guess between two ends would often guess wrong: the values of
        # nulls are zeros as a rule, so every member without an answer is a number below.
        places = values - (self._low - 1)
        places = places.view(_UNSIGNED[places.itemsize])
        if places.dtype == np.uint64:  # `take` refuses these, and only these
            places = np.minimum(places, len(table) - 1, out=places).view(np.int64)
        codes: NDArray[Any] = table.take(places, mode="clip")
        if self._classes.kind == "age":
            wrong = (values < self._low) | (values > self._high)
            if answered is not None:
                wrong &= answered
            if wrong.any():
                self._refuse(int(values[wrong][0]), int(np.flatnonzero(wrong)[0]), first, member)
        if answered is not None:
            # A null is class UNANSWERED, which is 0.
            codes *= answered
        return codes

    def _of_words(self, column: Any, first: int, member: NDArray[np.intp] | None) -> NDArray[Any]:
        """Return the classes of the values in a dictionary column; each distinct one is parsed once."""
        words = column.dictionary
        # The place after the last word is for nulls.
        numbers = np.append(self._numbers_of(words), UNANSWERED)
        indices = column.indices
        at, answered = integers(indices)
        codes: NDArray[np.intp] = numbers[
            at if answered is None else np.where(answered, at.astype(np.intp), len(words))
        ]
        wrong = np.flatnonzero(codes == _NONE)
        if len(wrong):
            self._refuse(words[int(at[wrong[0]])].as_py(), int(wrong[0]), first, member)
        return codes.astype(self._codes)

    def _numbers_of(self, words: Any) -> NDArray[np.intp]:
        """Return the classes of values, or `_NONE` for those that are not valid answers."""
        if self._beginnings is not None and is_text(words.type):
            with suppress(UnicodeDecodeError):
                return self._beginnings.numbers(words)
        try:
            texts = words.to_pylist()
        except UnicodeDecodeError:
            raise InvalidRequestError(
                f"column '{self._question_id}' of the panel has texts that are not UTF-8"
            ) from None
        return np.fromiter(map(self._number, texts), dtype=np.intp)

    def _number(self, word: object) -> int:
        try:
            return self._classes.number(self._kinds.known(self._question_id, word))
        except InvalidRequestError:
            return _NONE

    def _refuse(self, value: object, at: int, first: int, member: NDArray[np.intp] | None) -> None:
        # Parse the value again: that raises the error which explains it.
        try:
            self._kinds.known(self._question_id, value)
        except InvalidRequestError as exc:
            raise InvalidRequestError(f"row {_row(at, first, member)} of the panel: {exc}") from None


_NONE: Final = -1
_NOTHING: Final = np.zeros(0, dtype=np.intp)
NOBODY: Final = Several(_NOTHING, _NOTHING)


def numbers(
    column: Any, name: str, first: int, member: NDArray[np.intp] | None = None
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return the whole numbers of a column, and which of them are not null.

    `member` has the member of the batch whom each value belongs to, if they are values of lists.
    """
    try:
        column = as_integers(column)
    except NotWholeError as exc:
        raise InvalidRequestError(
            f"row {_row(exc.at, first, member)} of the panel: column {name!r} must hold whole numbers, not "
            f"{exc.value!r:.40}"
        ) from None
    except TypeError:
        raise InvalidRequestError(
            f"column {name!r} of the panel must hold whole numbers, not {column.type}"
        ) from None
    values, answered = integers(column)
    return values, np.ones(len(column), dtype=bool) if answered is None else answered


def columns_read(weight: str | None) -> frozenset[str]:
    """Return the columns of the panel that only an allocation reads."""
    return frozenset({INVITES_LEFT} if weight is None else {INVITES_LEFT, weight})


def invite_limits(batch: Any, per_member: int, first: int) -> Any:
    if INVITES_LEFT not in batch.schema.names:
        return arrow(np.full(len(batch), per_member, dtype=np.int64))
    left, is_known = numbers(batch.column(INVITES_LEFT), INVITES_LEFT, first)
    return arrow(np.where(is_known, np.clip(left, 0, per_member), per_member).astype(np.int64))


def weights(batch: Any, name: str | None, first: int) -> Any:
    if name is None:
        return arrow(np.ones(len(batch)))
    if name not in batch.schema.names:
        raise InvalidRequestError(f"the panel has no column {name!r}, which Allocate(weight=...) names")
    try:
        column = batch.column(name).cast(pa.float64()).fill_null(1.0)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise InvalidRequestError(f"column {name!r} of the panel must hold numbers") from None
    values = column.to_numpy(zero_copy_only=False)
    wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if len(wrong):
        raise InvalidRequestError(
            f"column {name!r} of the panel must hold numbers from 0 on; row {first + wrong[0]} does not"
        )
    return column


def taken(batch: Any, source: CompactInventory, first: int) -> Several:
    """Return the waves, by their places, that must not be offered to members."""
    hits = [
        read(batch.column(name), source, first)
        for name, read in ((EXCLUDED, _excluded), (PARTICIPATIONS, _participations))
        if name in batch.schema.names and not is_null(batch.schema.field(name).type)
    ]
    what = np.concatenate([_NOTHING, *(each.what for each in hits)])
    member = np.concatenate([_NOTHING, *(each.member for each in hits)])
    return Several.of(what, member)


def known_numbers(column: Any, name: str, first: int) -> list[int | None]:
    """Return the whole numbers of a column; None for nulls."""
    values, there = numbers(column, name, first)
    return [
        value if is_there else None for value, is_there in zip(values.tolist(), there.tolist(), strict=True)
    ]


def excluded(column: Any, first: int) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
    """Return the surveys that the panel excludes, and the member that each is excluded for."""
    if not is_list(column.type):
        raise InvalidRequestError(
            f"column {EXCLUDED!r} of the panel must hold lists of survey IDs, not {column.type}"
        )
    values, member = flat(column)
    survey_ids, there = numbers(values, EXCLUDED, first, member)
    return survey_ids[there], member[there]


def _excluded(column: Any, source: CompactInventory, first: int) -> Several:
    survey_ids, member = excluded(column, first)
    return _places_of([survey_ids], member, lambda key: source.of_survey.get(key[0], ()))


def _participations(column: Any, source: CompactInventory, first: int) -> Several:
    if not (is_list(column.type) and pa.types.is_struct(column.type.value_type)):
        raise InvalidRequestError(
            f"column {PARTICIPATIONS!r} of the panel must hold lists of {{survey_id, wave_id, status_id}}, "
            f"not {column.type}"
        )
    values, member = flat(column)
    # Not by their names, which need not be UTF-8.
    missing = [name for name in sorted(_NEEDED) if column.type.value_type.get_field_index(name) < 0]
    if missing:
        raise InvalidRequestError(f"column {PARTICIPATIONS!r} of the panel has no {missing[0]!r} in its lists")
    (survey_ids, has_survey), (status_ids, has_status) = (
        numbers(values.field(name), PARTICIPATIONS, first, member) for name in _NEEDED
    )
    # Older partners learn of no waves. Wave 0 is one that only exclusions of all waves mean.
    waves = np.zeros(len(values), dtype=np.int64)
    if values.type.get_field_index("wave_id") >= 0:
        numbered, is_there = numbers(values.field("wave_id"), PARTICIPATIONS, first, member)
        waves[is_there] = numbered[is_there]
    # No survey of the inventory excludes most participations: drop them first.
    is_known = np.isin(survey_ids, [survey_id for survey_id, _, _ in source.excluding])
    is_known &= booleans(values.is_valid()) & has_survey & has_status

    def excluding(key: Sequence[int]) -> set[int]:
        survey_id, wave_id, status_id = key
        # Wave 0 of an exclusion stands for all waves of the survey.
        participations = {(survey_id, wave_id, status_id), (survey_id, 0, status_id)}
        return {place for each in participations for place in source.excluding.get(each, ())}

    return _places_of([each[is_known] for each in (survey_ids, waves, status_ids)], member[is_known], excluding)


def _places_of(
    keys: Sequence[NDArray[np.int64]],
    member: NDArray[np.intp],
    places_of: Callable[[Sequence[int]], Iterable[int]],
) -> Several:
    """Return the places that the members' keys stand for; each distinct key is looked up once.

    `keys` has an array for each number of a key.
    """
    number, count = _numbered(keys[0])
    for each in keys[1:]:
        # Numbers stay below the length of the arrays, so that these products fit 64 bits.
        further, more = _numbered(each)
        number, count = _numbered(number * more + further)
    example = np.empty(count, dtype=np.intp)  # a place where each key stands
    example[number] = np.arange(len(number))
    unique = zip(*(each[example].tolist() for each in keys), strict=True)
    found = [[*places_of(key)] for key in unique]
    # Not by `pa.array`, which first imports pandas if it is installed.
    places = arrow(np.fromiter(chain.from_iterable(found), np.int64))
    places, at = flat(lists_of(places, np.fromiter(map(len, found), np.int64)).take(arrow(number)))
    return Several(integers(places)[0].astype(np.intp), member[at])


def _numbered(values: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """Return values as numbers from 0 on, the same for equal values, and how many distinct ones there are."""
    # By a hash table: `np.unique` sorts, which took 40 % of the time of a plan.
    encoded = arrow(values).dictionary_encode()
    return integers(encoded.indices)[0].astype(np.int64), len(encoded.dictionary)


def _row(at: int, first: int, member: NDArray[np.intp] | None) -> int:
    """Return the panel's row of a value; `member` maps values of lists to members."""
    return first + (at if member is None else int(member[at]))


# --- Groups of members, for reports

REGION: Final = "region"  # a column of the panel for this only
_OF_GROUPS: Final = {
    "age": ("1001538",),
    "gender": ("1001007",),
    "region": (REGION, "1001568"),  # a DMA
    "device": (DEVICE,),
}
GROUP_QUESTIONS: Final = frozenset(name for names in _OF_GROUPS.values() for name in names if name.isdecimal())
GROUP_BITS: Final = 8
LAST_GROUP: Final = 2**GROUP_BITS - 1
"""The place of those that come when all places are taken; 0 is not known."""
_LONGEST: Final = 40


class GroupReader:
    """Reads the groups of members from a panel, batch by batch, and gives them in the same order."""

    def __init__(self, columns: Sequence[str], kinds: QuestionKinds, earlier: str | None) -> None:
        self._known = known = json.loads(earlier or "{}")  # the fact of an earlier plan: its places stay
        self._columns = {
            kind: next((name for name in names if columns.count(name) == 1), "")
            for kind, names in _OF_GROUPS.items()
        }
        self._found = {
            kind: {value: at for at, value in enumerate(known.get(kind, ["", ()])[1], 1)} for kind in _OF_GROUPS
        }
        self._kinds = kinds
        self._read: Any = np.zeros(0, np.int64)

    def to_json(self) -> str:
        """Return the fact of the ledger: the column and the groups of each kind."""
        names = {kind: name or self._known.get(kind, [""])[0] for kind, name in self._columns.items()}
        return json.dumps({kind: [names[kind], [*found]] for kind, found in self._found.items()})

    def following(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield batches, and read the groups of their members."""
        for batch in batches:
            numbers = np.zeros(len(batch), np.int64)
            for at, (kind, name) in enumerate(self._columns.items()):
                if name and name in batch.schema.names:
                    numbers += self._places(batch.column(name), kind).astype(np.int64) << at * GROUP_BITS
            self._read = np.concatenate([self._read, numbers])
            yield batch

    def taken(self, count: int) -> Any:
        """Return the numbers of the next members, which were read."""
        taken, self._read = self._read[:count], self._read[count:]
        return taken

    def _places(self, column: Any, kind: str) -> Any:
        places = np.zeros(len(column), np.uint8)
        if is_list(column.type):
            values, member = flat(column)
            places[member] = self._places(values, kind)
            places[np.bincount(member, minlength=len(column)) > 1] = 0  # several answers: in no group
            return places
        try:
            if column.type.id == DICTIONARY:  # it may have more words than members
                column = column.dictionary_decode()
            column = column.dictionary_encode()
            words = column.dictionary.to_pylist()
        except (pa.ArrowException, UnicodeDecodeError):
            return places  # a plan does not fail for a column that matching has no use for
        at, answered = integers(column.indices)
        table = np.array([*(self._place(word, kind) for word in words), 0], np.uint8)
        return table[at if answered is None else np.where(answered, at, len(words))]

    def _place(self, word: object, kind: str) -> int:
        value, found = self._value(word, self._columns[kind]), self._found[kind]
        if value and value not in found and len(found) + 1 < LAST_GROUP:
            found[value] = len(found) + 1
        return found.get(value, LAST_GROUP) if value else 0

    def _value(self, word: object, column: str) -> str:
        if isinstance(word, float):  # as pandas has whole numbers where some are missing
            word = int(word) if word.is_integer() else None
        question = int(column) if column.isdecimal() else 0
        known: object = "" if word is None or question in self._kinds.age else str(word)
        if question:
            with suppress(InvalidRequestError):
                known = self._kinds.known(question, word) or ""
        if isinstance(known, int):
            for first, last in sorted(self._kinds.age[question].values()):
                if first <= known and (known <= last or last >= OPEN_AGE):
                    return f"{first} and over" if last >= OPEN_AGE else f"{first}-{last}"
            return ""
        return (", ".join(map(str, known)) if isinstance(known, frozenset) else str(known).strip())[:_LONGEST]
