"""A panel's columns, as Arrow has them, made into the classes of answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from sampling_async._errors import InvalidRequestError
from sampling_async.matching._questions import OLDEST
from sampling_async.matching.panel._arrow import WHOLE, booleans, integers, pa, pc
from sampling_async.matching.panel._classes import MOST_CODES, OTHER, UNANSWERED
from sampling_async.matching.panel._plan import Columns
from sampling_async.matching.panel._postal import Beginnings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from sampling_async.matching._questions import QuestionKinds
    from sampling_async.matching.panel._classes import Classes
    from sampling_async.matching.panel._plan import Source

MEMBER_CODE: Final = "member_code"
DEVICE: Final = "device_type"
EXCLUDED: Final = "exclude_surveys"
PARTICIPATIONS: Final = "participations"
OTHERS: Final = frozenset({MEMBER_CODE, DEVICE, EXCLUDED, PARTICIPATIONS})
"""The columns that are no questions."""

# Types by their IDs, as in `WHOLE`: there may be hundreds of columns.
_LISTS: Final = frozenset(
    kind.id for kind in (pa.list_(pa.null()), pa.large_list(pa.null()), pa.list_(pa.null(), 1))
)
_TEXTS: Final = frozenset(kind.id for kind in (pa.string(), pa.large_string(), pa.string_view()))
_VIEW: Final = pa.string_view().id
_DICTIONARY: Final = pa.dictionary(pa.int32(), pa.string()).id
_SETTLED: Final = WHOLE.keys() | _TEXTS - {_VIEW}

_WIDEST_TABLE: Final = 2**20
_PARTICIPATION: Final = ("survey_id", "wave_id", "status_id")


class Several(NamedTuple):
    """Several things of a member: of each, which it is and whose."""

    what: NDArray[np.intp]
    member: NDArray[np.intp]

    @classmethod
    def of(cls, what: NDArray[Any], member: NDArray[np.intp]) -> Several:
        """Return these in the order of members, as `between` takes them to be."""
        order = np.argsort(member, kind="stable")
        return cls(what[order].astype(np.intp), member[order])

    def between(self, first: int, end: int) -> Several:
        """Return those of some members, counted from the first of these."""
        start, stop = np.searchsorted(self.member, (first, end))
        return Several(self.what[start:stop], self.member[start:stop] - first)


def is_list(kind: Any) -> bool:
    """Return whether the values of a type of Arrow are lists."""
    return kind.id in _LISTS


def columns_of(schema: Any, source: Source) -> Columns:
    """Return what a panel has of what is asked for.

    Raises:
        InvalidRequestError: A column is there twice.
    """
    names = schema.names
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise InvalidRequestError(
            f"the panel has several columns {twice[0]!r}: rename or leave out one of them"
        )
    kinds = dict(zip(names, schema.types, strict=True))
    present = frozenset(id_ for id_ in source.classes if str(id_) in kinds)
    return Columns(
        questions=present,
        multiple=frozenset(id_ for id_ in present if is_list(kinds[str(id_)])),
        has_device=DEVICE in names,
        has_taken=EXCLUDED in names or PARTICIPATIONS in names,
        has_codes=MEMBER_CODE in names,
    )


class Reader:
    """Reads a question's columns.

    Args:
        question_id: The question.
        classes: Its classes.
        kinds: What an answer is.
    """

    def __init__(self, question_id: int, classes: Classes, kinds: QuestionKinds) -> None:
        self._question_id = question_id
        self._classes = classes
        self._kinds = kinds
        self._codes: Any = np.uint8 if len(classes) <= MOST_CODES else np.intp
        self._as_they_are: frozenset[int] = frozenset()
        """Types of whole numbers that can be looked up as they come."""
        self._beginnings = Beginnings(classes) if classes.kind == "postal" else None
        if self._beginnings is not None:
            return
        known = np.array(sorted(classes.of) or [0], dtype=np.int64)
        if classes.kind == "age":
            known = np.arange(OLDEST + 1)
        self._low, self._high = int(known[0]), int(known[-1])
        self._known = known
        self._known_codes = np.array([classes.of.get(int(each), OTHER) for each in known], dtype=self._codes)
        self._table: NDArray[Any] | None = None
        if self._high - self._low <= _WIDEST_TABLE and self._low > np.iinfo(np.int64).min:
            self._table = np.full(self._high - self._low + 3, OTHER, dtype=self._codes)
            self._table[known - self._low + 1] = self._known_codes
        lowest, highest = self._low - 1, max(self._high + 1, self._high - self._low + 2)
        self._as_they_are = frozenset(
            number
            for number, kind in WHOLE.items()
            if np.iinfo(kind).min <= lowest and highest <= np.iinfo(kind).max
        )

    def read(self, column: Any, first: int) -> NDArray[Any] | Several:
        """Return the class of each member's answer, or the classes of their answers.

        Args:
            column: The column.
            first: The place in the panel of its first member.

        Raises:
            InvalidRequestError: An answer is none; the text tells the row.
        """
        kind = column.type.id
        if kind in self._as_they_are:
            return self._of_integers(column, first, None)
        if kind in _LISTS:
            values, member = _flat(column)
            codes = self._single(values, first, member)
            is_answer = codes != UNANSWERED
            codes, member = codes[is_answer], member[is_answer]
            empty = np.setdiff1d(np.arange(len(column)), member)
            unanswered = np.full(len(empty), UNANSWERED, dtype=codes.dtype)
            return Several.of(np.concatenate([codes, unanswered]), np.concatenate([member, empty]))
        return self._single(column, first, None)

    def _single(self, column: Any, first: int, member: NDArray[np.intp] | None) -> NDArray[Any]:
        kind = column.type
        if kind.id == _DICTIONARY and (
            not (_is_text(kind.value_type) or kind.value_type.id in WHOLE)
            or len(column.dictionary) > len(column)  # only what is in use is read
        ):
            column = column.dictionary_decode()
            kind = column.type
        if pa.types.is_null(kind):
            return np.full(len(column), UNANSWERED, dtype=self._codes)
        if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
            column = self._whole(column)
            kind = column.type
        if kind.id in WHOLE and self._classes.kind != "postal":
            return self._of_integers(column, first, member)
        if kind.id == _DICTIONARY:
            return self._of_words(column, first, member)
        if self._beginnings is not None and _is_text(kind):
            codes = self._beginnings.numbers(column)
            if codes is not None:
                return codes.astype(self._codes)
        if _is_text(kind) or kind.id in WHOLE:
            return self._of_words(column.dictionary_encode(), first, member)
        raise InvalidRequestError(
            f"column '{self._question_id}' of the panel is of type {kind}: answers are whole numbers or texts,"
            " or lists of these"
        )

    def _whole(self, column: Any) -> Any:
        """Return whole numbers, where a library that has no gaps in whole numbers made others of them."""
        try:
            return _as_integers(column)
        except pa.ArrowInvalid:
            raise InvalidRequestError(
                f"column '{self._question_id}' of the panel has numbers that are not whole: answers are"
                " answer IDs, or an age in years"
            ) from None

    def _of_integers(self, column: Any, first: int, member: NDArray[np.intp] | None) -> NDArray[Any]:
        values, answered = integers(column)
        if column.type.id not in self._as_they_are:
            beyond = values > np.iinfo(np.int64).max if values.dtype == np.uint64 else False
            # The lowest number there is stands for those that are too large: no answer ID is either.
            values = np.where(beyond, np.iinfo(np.int64).min, values.astype(np.int64))
        codes: NDArray[Any]
        if self._table is not None:
            # A number far below comes out far above, where it would overflow: of no known answer either way.
            codes = self._table.take(values - (self._low - 1), mode="clip")
        else:
            at = np.minimum(np.searchsorted(self._known, values), len(self._known) - 1)
            codes = np.where(self._known[at] == values, self._known_codes[at], OTHER).astype(self._codes)
        if self._classes.kind == "age":
            wrong = (values < self._low) | (values > self._high)
            if answered is not None:
                wrong &= answered
            if wrong.any():
                self._refuse(int(values[wrong][0]), int(np.flatnonzero(wrong)[0]), first, member)
        if answered is not None:
            codes *= answered  # no answer is class 0
        return codes

    def _of_words(self, column: Any, first: int, member: NDArray[np.intp] | None) -> NDArray[Any]:
        """Return the classes of texts: each text is read once, however many members gave it."""
        words = column.dictionary
        numbers = np.append(self._numbers_of(words), UNANSWERED)
        indices = column.indices
        at, answered = integers(indices)
        codes: NDArray[np.intp] = numbers[at if answered is None else np.where(answered, at, len(words))]
        wrong = np.flatnonzero(codes == _NONE)
        if len(wrong):
            self._refuse(words[int(at[wrong[0]])].as_py(), int(wrong[0]), first, member)
        return codes.astype(self._codes)

    def _numbers_of(self, words: Any) -> NDArray[np.intp]:
        """Return the classes of texts, or `_NONE` for those that are no answers."""
        if self._beginnings is not None and _is_text(words.type):
            numbers = self._beginnings.numbers(words)
            if numbers is not None:
                return numbers
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
        row = first + (at if member is None else int(member[at]))
        try:
            self._kinds.known(self._question_id, value)
        except InvalidRequestError as exc:
            raise InvalidRequestError(f"row {row} of the panel: {exc}") from None


_NONE: Final = -1
_NOTHING: Final = np.zeros(0, dtype=np.intp)
NOBODY: Final = Several(_NOTHING, _NOTHING)


def member_codes(batch: Any, first: int) -> Any:
    """Return the member codes of a batch.

    Args:
        batch: The members.
        first: The place in the panel of the first.

    Raises:
        InvalidRequestError: The column holds something else, or a member has none.
    """
    column = batch.column(MEMBER_CODE)
    if column.type.id == _DICTIONARY:
        column = column.dictionary_decode()
    if not _is_text(column.type):
        raise InvalidRequestError(f"column {MEMBER_CODE!r} of the panel holds texts, not {column.type}")
    column = column.cast(pa.string())
    if column.null_count:
        row = first + int(np.flatnonzero(booleans(column.is_null()))[0])
        raise InvalidRequestError(f"row {row} of the panel: there is no {MEMBER_CODE}")
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        raise InvalidRequestError(f"column {MEMBER_CODE!r} of the panel has texts that are not UTF-8") from None
    return column


def is_settled(kind: Any) -> bool:
    """Return whether a type is known to be one that can be taken apart."""
    return kind.id in _SETTLED


def settled(batch: Any) -> Any:
    """Return a batch in types that can be taken apart: views of texts, as Polars has them, cannot."""
    columns = [_settled(column) for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _settled(column: Any) -> Any:
    kind = column.type
    if kind.id == _VIEW:
        return column.cast(pa.string())
    if kind.id == _DICTIONARY and kind.value_type.id == _VIEW:
        return pa.DictionaryArray.from_arrays(column.indices, column.dictionary.cast(pa.string()))
    if is_list(kind) and kind.value_type.id == _VIEW:
        return column.cast(pa.list_(pa.string()))
    return column


def numbers(column: Any, name: str) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return whole numbers, and which of them are there.

    Raises:
        InvalidRequestError: It is something else.
    """
    try:
        column = _as_integers(column)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise InvalidRequestError(
            f"column {name!r} of the panel holds whole numbers, not {column.type}"
        ) from None
    values, answered = integers(column)
    return values, np.ones(len(column), dtype=bool) if answered is None else answered


def taken(batch: Any, source: Source) -> Several:
    """Return the waves of surveys, by their places, that members are not to be offered.

    Raises:
        InvalidRequestError: A column does not hold what it should.
    """
    hits = [
        read(batch.column(name), source)
        for name, read in ((EXCLUDED, _excluded), (PARTICIPATIONS, _participations))
        if name in batch.schema.names and not _says_nothing(batch.schema.field(name).type)
    ]
    what = np.concatenate([_NOTHING, *(each.what for each in hits)])
    member = np.concatenate([_NOTHING, *(each.member for each in hits)])
    return Several.of(what, member)


def _says_nothing(kind: Any) -> bool:
    return bool(pa.types.is_null(kind) or (is_list(kind) and pa.types.is_null(kind.value_type)))


def _excluded(column: Any, source: Source) -> Several:
    if not is_list(column.type):
        raise InvalidRequestError(
            f"column {EXCLUDED!r} of the panel holds lists of survey IDs, not {column.type}"
        )
    values, member = _flat(column)
    survey_ids, there = numbers(values, EXCLUDED)
    return _looked_up(survey_ids[there, None], member[there], lambda key: source.of_survey.get(key[0], ()))


def _participations(column: Any, source: Source) -> Several:
    if not (is_list(column.type) and pa.types.is_struct(column.type.value_type)):
        raise InvalidRequestError(
            f"column {PARTICIPATIONS!r} of the panel holds lists of {{survey_id, wave_id, status_id}}, not"
            f" {column.type}"
        )
    values, member = _flat(column)
    missing = sorted(set(_PARTICIPATION) - {field.name for field in column.type.value_type})
    if missing:
        raise InvalidRequestError(f"column {PARTICIPATIONS!r} of the panel has no {missing[0]!r} in its lists")
    fields = [numbers(values.field(name), PARTICIPATIONS) for name in _PARTICIPATION]
    keys = np.stack([field for field, _ in fields], axis=1)
    is_known = np.isin(keys[:, 0], [survey_id for survey_id, _, _ in source.excluding])  # most are of no matter
    is_known &= booleans(values.is_valid())
    for _, is_there in fields:
        is_known &= is_there

    def excluding(key: Sequence[int]) -> set[int]:
        survey_id, wave_id, status_id = key
        ways = {(survey_id, wave_id, status_id), (survey_id, 0, status_id)}
        return {place for way in ways for place in source.excluding.get(way, ())}

    return _looked_up(keys[is_known], member[is_known], excluding)


def _looked_up(
    keys: NDArray[np.int64], member: NDArray[np.intp], places_of: Callable[[Sequence[int]], Iterable[int]]
) -> Several:
    """Return what each key of members stands for, each looked up once however many members have it."""
    unique, number = np.unique(keys, axis=0, return_inverse=True)
    places = [np.fromiter(places_of(key), dtype=np.intp) for key in unique.tolist()]
    lengths = np.array([len(each) for each in places], dtype=np.intp)
    ends = np.cumsum(lengths)
    number = number.reshape(-1)
    times = lengths[number]
    within = np.arange(times.sum()) - np.repeat(np.cumsum(times) - times, times)
    all_places = np.concatenate([_NOTHING, *places])
    return Several(all_places[np.repeat(ends[number] - times, times) + within], np.repeat(member, times))


def _flat(column: Any) -> tuple[Any, NDArray[np.intp]]:
    """Return the values of lists, and whose each is."""
    lengths = integers(pc.list_value_length(column))[0] * booleans(column.is_valid())
    return column.flatten(), np.repeat(np.arange(len(column)), lengths)


def _as_integers(column: Any) -> Any:
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), None, column)
    return column.cast(pa.int64())


def _is_text(kind: Any) -> bool:
    return kind.id in _TEXTS
