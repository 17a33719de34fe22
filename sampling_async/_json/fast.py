"""The fast decoder: msgspec reads JSON in C, directly into the records.

A few values differ between the wire and the record: a null, a date, a text that holds several values. So
msgspec fills a *draft*: a Struct with the same fields, that can be changed and has the types of the wire. These
values are put right in the drafts, for all of one kind together, so that the loops run in C as well. Then a
change of its `__class__` makes each draft the record. Records that are attrs classes are made of what their
drafts hold. The decoder returns None for a body that it cannot read, or would read differently from the careful
decoder. Then the careful decoder reads the body. The fast decoder does not check fields that no record has.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from datetime import datetime
from functools import cache, partial
from itertools import chain, islice, repeat
from operator import attrgetter
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    TypeAlias,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)
from weakref import ref

import attrs
import msgspec
from msgspec.structs import astuple

from sampling_async._contract.records import (
    INT64_MAX,
    Int64,
    Invite,
    QuestionAndAnswers,
    Quotas,
    Survey,
    wire_name,
)
from sampling_async._contract.structs import WireStruct, value
from sampling_async._json.rules import NULLS, Mismatch, answer_values, date_time

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attrs import AttrsInstance

_HEAD_BYTES: Final = 32  # of a survey; its ID is in them, so few surveys begin alike
_MOST_LENGTHS: Final = 2**16  # that are remembered
_FEWEST_REFERENCES: Final = 2**12  # up to which nobody looks for those whose survey is gone
_BETWEEN: Final = re.compile(rb"[ \t\r\n]*+,[ \t\r\n]*+(?=\{)")


def _sha1(text: bytes) -> int:
    from hashlib import sha1  # noqa: PLC0415  few machines need it

    return int.from_bytes(sha1(text, usedforsecurity=False).digest())


# Python's hash of bytes is a SipHash, seeded anew in each process, and takes less than half the time of SHA-1.
# With 64 bits, one of 10 ** 19 surveys that change is taken for what it was before.
_fingerprint: Final[Callable[[bytes], int]] = hash if sys.hash_info.width >= 64 else _sha1  # noqa: PLR2004


def _gone() -> None:
    """Return what a reference does whose survey is gone."""


class KnownSurveys:
    """The surveys that somebody still uses, by the fingerprints of their texts.

    The length of each survey's latest text is known too, by its first bytes. So in an inventory that has
    changed little, nobody looks for the ends of the surveys: either the text of that length is known, or the
    survey is read. A length that is wrong costs time only.
    """

    __slots__ = ("_lengths", "_most", "_surveys")

    def __init__(self) -> None:
        # A WeakValueDictionary would forget at once. But it is written in Python, and takes 2 % of a full read.
        self._surveys: dict[int, ref[Survey]] = {}
        self._most = _FEWEST_REFERENCES
        self._lengths: dict[bytes, int] = {}

    def __len__(self) -> int:
        return sum(survey() is not None for survey in self._surveys.values())

    def add(self, text: bytes, survey: Survey) -> None:
        if len(self._surveys) >= self._most:
            self._surveys = {key: known for key, known in self._surveys.items() if known() is not None}
            self._most = max(_FEWEST_REFERENCES, 2 * len(self._surveys))
        self._surveys[_fingerprint(text)] = ref(survey)
        self._remember(text)

    def find(self, text: bytes) -> Survey | None:
        survey = self._surveys.get(_fingerprint(text), _gone)()
        if survey is not None:
            self._remember(text)
        return survey

    def _remember(self, text: bytes) -> None:
        if len(self._lengths) >= _MOST_LENGTHS:
            self._lengths.clear()
        self._lengths[text[:_HEAD_BYTES]] = len(text)

    def awaits(self, buffer: bytearray, start: int) -> bool:
        """Return whether the survey that begins at `start` has a known length, and the buffer is shorter."""
        length = self._lengths.get(bytes(buffer[start : start + _HEAD_BYTES]))
        return length is not None and start + length > len(buffer)

    def leading(self, buffer: bytearray, start: int) -> tuple[list[Survey], int]:
        """Return the known surveys with which a list goes on from `start`, and where the last of them ends."""
        surveys: list[Survey] = []
        length_of, survey_of = self._lengths.get, self._surveys.get
        at, end, size = start, start, len(buffer)
        with memoryview(buffer) as view:
            while length := length_of(view[at : at + _HEAD_BYTES].tobytes()):
                # At the end of the buffer may be less: a part of the survey, or a shorter text of it that is
                # known too, and ends here.
                if at + length > size:
                    break
                survey = survey_of(_fingerprint(view[at : at + length].tobytes()), _gone)()
                if survey is None:
                    break
                surveys.append(survey)
                end = at + length
                if buffer.startswith(b",{", end):
                    at = end + 1
                elif between := _BETWEEN.match(buffer, end):
                    at = between.end()
                else:
                    break
        return surveys, end


T = TypeVar("T")

_SHARED_BYTES: Final = 2**22  # of the texts of conditions that `Shared` remembers
_PositiveInts: TypeAlias = tuple[Annotated[int, msgspec.Meta(ge=1, le=INT64_MAX)], ...]

_Step: TypeAlias = "Callable[[Sequence[Any], Shared], bool]"


class Shared:
    """The conditions read so far, by their text on the wire, so that sub-quotas share equal ones.

    The memory is bounded, whatever the size of the inventory.
    """

    __slots__ = ("_bytes", "conditions")

    def __init__(self) -> None:
        self.conditions: dict[bytes, QuestionAndAnswers] = {}
        self._bytes = 0

    def unknown(self, texts: Sequence[bytes]) -> tuple[bytes, ...]:
        if self._bytes > _SHARED_BYTES:
            self.conditions.clear()
            self._bytes = 0
        unknown = tuple(set(texts).difference(self.conditions))
        self._bytes += sum(map(len, unknown))
        return unknown


@value
class Part:
    """Bytes that were cut out of an inventory. All its parts share their equal conditions."""

    body: bytes
    shared: Shared
    known: KnownSurveys | None = None  # surveys that are not read again


def read(record: type[T], body: bytes, shared: Shared | None = None) -> T | None:
    """Read a record from JSON in UTF-8; return None if the careful decoder must read it."""
    draft = _decoded(_draft(cast("Any", record)), body)
    records = None if draft is None else _finished(record, (draft,), shared or Shared())
    return None if records is None else records[0]


def read_many(record: type[T], body: bytes, shared: Shared | None = None) -> Sequence[T] | None:
    """Read a list of records from JSON; return None if the careful decoder must read it."""
    draft: Any = _draft(cast("Any", record))
    drafts = _decoded(tuple[draft, ...], body)
    return None if drafts is None else _finished(record, drafts, shared or Shared())


def read_part(record: type[T], part: Part) -> Sequence[T] | None:
    """Read a list of records; None likewise. Known surveys are not read again, and unknown ones are added."""
    known = part.known
    if known is None:
        return read_many(record, part.body, part.shared)
    # `Raw` finds the bounds of each survey without decoding it.
    raws: Sequence[msgspec.Raw] | None = _decoded(tuple[msgspec.Raw, ...], part.body)
    if raws is None:
        return None
    texts = list(map(bytes, raws))
    surveys = list(map(known.find, texts))
    unknown = [at for at, survey in enumerate(surveys) if survey is None]
    new = [_decoded(_draft(Survey), texts[at]) for at in unknown]
    if None in new or _finished(Survey, new, part.shared) is None:
        return None
    for at, survey in zip(unknown, new, strict=True):
        surveys[at] = survey
        known.add(texts[at], survey)
    return cast("list[T]", surveys)


def positive_ints(values: tuple[Any, ...]) -> tuple[int, ...] | None:
    """Return values that are all ints from 1 to 2**63 - 1; None if one is not."""
    try:
        return msgspec.convert(values, _PositiveInts)
    except Exception:  # noqa: BLE001  a text with half of a surrogate pair raises no error of msgspec's own
        return None


def warm_up() -> None:
    """Fill the caches, so that the first response does not block the event loop."""
    survey: Any = _draft(Survey)
    lists: tuple[Any, ...] = (tuple[survey, ...], tuple[msgspec.Raw, ...])
    for what in (_draft(Quotas), survey, _draft(QuestionAndAnswers), WireReply, *lists):
        _decoder(what)


class WireRequest(WireStruct):
    """A bulk request."""

    QuotaIDs: Sequence[int]


class WireItem(WireStruct, kw_only=True):
    """An item of a bulk response."""

    QuotaID: Int64
    Invite: Invite | None = None
    ResultCode: Int64
    Result: str | None = None


_CODE: Final = b'"ResultCode"'


class WireReply(WireStruct):
    """A bulk response."""

    Invites: list[WireItem]


class UnreadReply(WireReply):
    """A bulk response whose items are parsed JSON, to be read one by one."""

    Invites: list[Any]


def read_bulk(body: bytes) -> WireReply | None:
    """Read a bulk response; return None if it must be read with care."""
    answer: WireReply | None = _decoded(WireReply, body)
    # msgspec takes the last of several values of a name. More codes than items are a repeated code or list.
    return None if answer is None or body.count(_CODE) > len(answer.Invites) else answer


def _decoded(what: Any, body: bytes) -> Any:
    if not _is_utf8(body):
        return None
    try:
        return _decoder(what).decode(body.removeprefix(b"\xef\xbb\xbf"))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _is_utf8(body: bytes) -> bool:
    """Return whether a body is UTF-8 as a whole. msgspec does not check the texts that it skips."""
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError:
            return False
    return True


@cache
def _decoder(what: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(what)


@cache
def _draft(record: Any) -> Any:
    """Return the Struct that msgspec fills: the record itself if its types are those of the wire."""
    if not attrs.has(record):
        return record
    bounds = get_type_hints(record, include_extras=True) if issubclass(record, msgspec.Struct) else {}
    fields: list[Any] = []
    for each in _attributes(record):
        place = (record.__name__, each.name)
        hint = _OTHERWISE.get(place) or _on_the_wire(bounds.get(each.name, each.type))
        if place in NULLS:
            hint |= None
        fields.append((each.name, hint, *(() if each.default is attrs.NOTHING else (each.default,))))
    if not issubclass(record, msgspec.Struct):
        return msgspec.defstruct(record.__name__, fields, rename=wire_name)
    if all(hint == bounds[name] for name, hint, *_ in fields):
        return record
    config = record.__struct_config__
    return msgspec.defstruct(
        record.__name__,
        fields,
        bases=(record,),
        frozen=False,
        gc=config.gc,
        weakref=config.weakref,
        rename=wire_name,
    )


def _on_the_wire(hint: Any) -> Any:
    if get_origin(hint) is tuple:
        return tuple[_on_the_wire(get_args(hint)[0]), ...]  # type: ignore[misc]
    scalars: dict[Any, Any] = {int: Int64, datetime: str}
    return _draft(hint) if attrs.has(hint) else scalars.get(hint, hint)


_OTHERWISE: Final[dict[tuple[str, str], Any]] = {
    ("QuestionAndAnswers", "answer_values"): tuple[str, ...] | str,
    ("SubQuota", "questions_and_answers"): tuple[msgspec.Raw, ...],
}
"""Fields that are read with another type than the record's. A step of their own converts them."""


def _attributes(record: type[AttrsInstance]) -> tuple[attrs.Attribute[Any], ...]:
    attributes: tuple[attrs.Attribute[Any], ...] = attrs.fields(attrs.resolve_types(record))
    return attributes


# --- What differs from the wire ----------------------------------------------------------------------------


def _finished(record: type[T], drafts: Sequence[Any], shared: Shared) -> Sequence[T] | None:
    """Turn drafts of one kind, and those inside them, into records; return None if a value is invalid."""
    if _draft(cast("Any", record)) is record:
        return drafts
    if not all(step(drafts, shared) for step in _steps(cast("Any", record))):
        return None
    if not issubclass(record, msgspec.Struct):
        return tuple(record(*astuple(each)) for each in drafts)
    # `draft.__class__ = record` for each. The deque of length 0 consumes the map in C.
    deque(map(setattr, drafts, repeat("__class__"), repeat(record)), maxlen=0)
    return drafts


@cache
def _steps(record: type[AttrsInstance]) -> list[_Step]:
    """Return the steps that put drafts right; each step takes all of them at once."""
    steps: list[_Step] = []
    for attribute in _attributes(record):
        place, name = (record.__name__, attribute.name), attribute.name
        is_tuple = get_origin(attribute.type) is tuple
        held: Any = get_args(attribute.type)[0] if is_tuple else attribute.type
        if place in NULLS:
            steps.append(partial(_fill, name, NULLS[place]))
        if place == ("QuestionAndAnswers", "answer_values"):
            steps.append(_unpack)
        elif place == ("SubQuota", "questions_and_answers"):
            steps.append(_share)
        elif is_tuple and attrs.has(held) and _draft(held) is not held:
            steps.append(partial(_finish_all, name, held))
        elif held is datetime:
            steps.append(partial(_date, name))
    return steps


def _finish_all(name: str, record: type[Any], drafts: Sequence[Any], shared: Shared) -> bool:
    inner = tuple(chain.from_iterable(map(attrgetter(name), drafts)))
    return _finished(record, inner, shared) is not None


def _fill(name: str, stands_for: Any, drafts: Sequence[Any], _: Shared) -> bool:
    # The first test runs in C, and nearly always finds no null.
    if None in map(attrgetter(name), drafts):
        for each in drafts:
            if getattr(each, name) is None:
                setattr(each, name, stands_for)
    return True


def _date(name: str, drafts: Sequence[Any], _: Shared) -> bool:
    try:
        for each in drafts:
            setattr(each, name, date_time(getattr(each, name)))
    except Mismatch:
        return False
    return True


def _share(drafts: Sequence[Any], shared: Shared) -> bool:
    """Set the conditions of sub-quotas, and decode each text of a condition once."""
    lists = list(map(attrgetter("questions_and_answers"), drafts))
    texts = list(map(bytes, chain.from_iterable(lists)))
    unknown = shared.unknown(texts)
    try:
        conditions = list(map(_decoder(_draft(QuestionAndAnswers)).decode, unknown))
    except msgspec.MsgspecError:
        return False
    _finished(QuestionAndAnswers, conditions, shared)
    shared.conditions.update(zip(unknown, conditions, strict=True))
    # One iterator over the conditions of all: each sub-quota takes as many as its list had texts.
    found = map(shared.conditions.__getitem__, texts)
    for each, raws in zip(drafts, lists, strict=True):
        each.questions_and_answers = tuple(islice(found, len(raws)))
    return True


def _unpack(drafts: Sequence[Any], _: Shared) -> bool:
    """Split answer values that are not a list of texts with one value each. Such values are rare."""
    # One test for all together, and nearly always there is nothing to do.
    lists = list(map(attrgetter("answer_values"), drafts))
    if set(map(type, lists)) <= {tuple} and _are_single_values(list(chain.from_iterable(lists))):
        return True
    for each, values in zip(drafts, lists, strict=True):
        if type(values) is not tuple or not _are_single_values(values):
            each.answer_values = answer_values(values)
    return True


def _are_single_values(values: Sequence[str]) -> bool:
    joined = ",".join(values)
    if joined.split() != [joined]:  # there is a blank, or no character at all
        return not values
    # A comma inside a value makes the count too large. An empty value makes two commas meet, or one stand at
    # the beginning or the end.
    return joined.count(",") == len(values) - 1 and ",," not in joined and joined[0] != "," != joined[-1]
