"""Read an inventory while it arrives: each survey is cut out and decoded as soon as its last byte is there.

A body that is decoded as a whole would block the event loop for seconds. The end of a survey is guessed first,
because that is fast: by the text between the two surveys before, and by counting braces. A brace inside a text
can make a guess wrong, but never a result. The cut-out piece must be one whole JSON object, and if it is not,
the end is found token by token. A survey that lacks a value is left out on request. If no other survey is left,
or a value has a wrong type, the body breaks the contract.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve

from sampling_async._contract.errors import DecodeError
from sampling_async._contract.records import Quotas, Survey, leave_out
from sampling_async._json.converter import from_json, structure
from sampling_async._json.fast import Part, Shared
from sampling_async._json.rules import parse, says_absent, spelled, whole_number_or_none

if TYPE_CHECKING:
    from sampling_async._contract.records import PartialKey
    from sampling_async._json.fast import KnownSurveys

# The body up to the first survey. Plain values may come before the surveys, in any order. A body with anything
# else there is read as a whole.
_HEAD: Final = re.compile(
    rb"(?:\xef\xbb\xbf)?"
    rb'[ \t\r\n]*+\{(?:[ \t\r\n]*+"[^"\\]*+"[ \t\r\n]*+:[ \t\r\n]*+(?:"[^"\\]*+"|[-+.\w]++)[ \t\r\n]*+,)*'
    rb'[ \t\r\n]*+"Surveys"[ \t\r\n]*+:[ \t\r\n]*+\['
)
_HEAD_BYTES: Final = 4096
# After a survey, or at the beginning of the list: an optional comma and the next character.
_NEXT: Final = re.compile(rb"[ \t\r\n]*+(,?)[ \t\r\n]*+([^ \t\r\n,])")
# A possible end of a survey: a closing brace before a comma or a closing bracket.
_END: Final = re.compile(rb"\}(?=\s{0,99}[,\]])")
# The text between two surveys, with the first name of the second one: `},{"SurveyID"`. A service writes all its
# surveys alike, so this text marks the next end too.
_ALIKE: Final = re.compile(rb'\}\s{0,99},\s{0,99}\{\s{0,99}"[^"\\]{1,99}"')
# A place in a body, in the rule of an error.
_PLACE: Final = re.compile(r" at (?:character|byte) \d+$")
# The next text or brace. Texts are skipped as a whole, so that braces inside them do not count.
_TOKEN: Final = re.compile(rb'[^"{}]*+(?:"(?:[^"\\]|\\.)*+"|[{}])', re.DOTALL)
_GUESSED_BYTES: Final = 2**18  # of a survey; without a guess in so many bytes, another method is tried
_LOG: Final = logging.getLogger("sampling_async.json")
_NAMED: Final = 10  # surveys of one inventory that are left out with a line in the log for each
# Behind so many known surveys, one that has changed is read alone: those that follow are most likely known too.
_MOSTLY_KNOWN: Final = 8


class Inventory:
    """The body of Get Quotas, fed in parts. Surveys in `known` are not read again; the others are added.

    A survey that lacks a value is refused if `strict`, or left out.
    """

    def __init__(self, known: KnownSurveys | None = None, *, strict: bool = True) -> None:
        self.left_out = LeftOut(strict=strict)
        self._buffer = bytearray()
        self._head: bytes | None = None
        self._count = 0
        self._survey: _Extent | None = None  # the survey whose end has not been found so far
        self._alike = b""  # the text between the two latest surveys, see `_ALIKE`
        self._tried = 0  # where the last try of `_cut_many` ended, successful or not
        self._shared = Shared()
        self._known = known
        self._unchanged = 0  # known surveys since the last one that was read
        self._is_exact = False
        self._is_list_over = False

    def feed(self, part: bytes) -> list[Survey]:
        self._buffer += part
        if self._head is None and len(self._buffer) - len(part) <= _HEAD_BYTES:
            head = _HEAD.match(self._buffer)
            if head is not None:
                self._head = head[0]
                del self._buffer[: len(self._head)]
        return [] if self._head is None else self._whole_surveys()

    def end(self) -> list[Survey]:
        """Return the last surveys, at the end of the body."""
        if self._head is None:
            return []
        # A guess may be waiting for bytes that will not come now, so the last surveys are not guessed.
        self._is_exact = True
        if self._survey is not None:
            self._survey.be_exact()
        surveys = self._whole_surveys()
        if not self._is_list_over:
            raise DecodeError(self._path, "expected a survey or the end of the list, found the end of the body")
        self.left_out.end(self._count)
        return surveys

    @property
    def unread(self) -> bytes | None:
        """After the end: the body, if it has no surveys and must be read as a whole; else None."""
        if self._head is None:
            return bytes(self._buffer)
        return self._head + b"]" + self._buffer if self._count == 0 else None

    def frame(self) -> Quotas:
        assert self._head is not None
        # The head ends with the opening bracket of the list, so this is a whole body with an empty list.
        body = self._head + b"]" + self._buffer
        try:
            frame = from_json(Quotas, body)
        except DecodeError as exc:
            # The surveys are not in this text, so a place in it is none in the body.
            exc.rule = _PLACE.sub(" before or after the surveys", exc.rule)
            exc.args = exc.path, exc.rule
            raise
        fields: list[tuple[str, object]] = parse(body, pairs=True)
        if [name for name, _ in fields].count("Surveys") > 1:
            raise DecodeError("$.Surveys", "expected one list of surveys, found several")
        return frame

    @property
    def _path(self) -> str:
        return f"$.Surveys[{self._count}]"

    def _whole_surveys(self) -> list[Survey]:
        surveys: list[Survey] = []
        start = 0  # of the bytes that have not been read
        while not self._is_list_over:
            if self._survey is None:
                following = _NEXT.match(self._buffer, start)
                if following is None:
                    break
                start = following.end(2)
                if self._begins_survey(following):
                    start -= 1  # the brace that opens a survey stays in the buffer
                continue
            extent, known = self._survey, self._known
            end = None
            if known is not None and not extent.is_exact:
                if known.awaits(self._buffer, extent.start):
                    break
                end = self._skip(known, extent, surveys)
            end = end or self._cut_many(extent, surveys) or self._cut(extent, surveys)
            if end is None:
                break
            start, self._survey = end, None
        del self._buffer[:start]
        self._tried -= start
        if self._survey is not None:
            self._survey.shift(start)
        return surveys

    def _begins_survey(self, following: re.Match[bytes]) -> bool:
        """Handle the next character, after a survey or before the first one; return whether a survey starts."""
        comma, first = following.groups()
        if first == b"]" and not comma:
            self._is_list_over = True
            return False
        if first != b"{" or bool(comma) is (self._count == 0):
            raise DecodeError(self._path, "expected surveys, each an object, separated by commas")
        self._survey = _Extent(self._buffer, following.start(2), self._alike, is_exact=self._is_exact)
        return True

    def _skip(self, known: KnownSurveys, extent: _Extent, surveys: list[Survey]) -> int | None:
        """Take the known surveys up to one that is not, and return where they end; None if there is none."""
        leading, end = known.leading(self._buffer, extent.start)
        if not leading:
            return None
        surveys.extend(leading)
        self._count += len(leading)
        self._unchanged += len(leading)
        self._note_end(end)
        return end

    def _cut_many(self, extent: _Extent, surveys: list[Survey]) -> int | None:
        """Read all surveys up to the last possible end in the buffer, in one call.

        Return where they end; None if there is no such end, or the guess is wrong.
        """
        if not extent.alike or extent.is_exact or self._unchanged >= _MOSTLY_KNOWN:
            return None
        buffer, start = self._buffer, extent.start
        last = buffer.rfind(extent.alike, max(start, self._tried)) + 1
        if last == 0:
            return None
        self._tried = last
        # Unequal counts mean that the guess is wrong, or that a text contains a brace. With known surveys, the
        # reading finds a wrong guess as fast: it begins with the bounds of the surveys.
        if self._known is None and buffer.count(b"{", start, last) != buffer.count(b"}", start, last):
            return None
        # The view avoids a second copy. It must be released, because a viewed bytearray cannot change its size.
        with memoryview(buffer) as view:
            body = b"".join((b"[", view[start:last], b"]"))
        try:
            many = structure(list[Survey], Part(body, self._shared, self._known))
        except DecodeError:
            return None
        surveys.extend(many)
        self._count += len(many)
        self._unchanged = 0
        return last

    def _cut(self, extent: _Extent, surveys: list[Survey]) -> int | None:
        """Read one survey and return its end; None if its end has not arrived."""
        while (end := extent.find_end()) is not None:
            with memoryview(self._buffer) as view:
                piece = bytes(view[extent.start : end])
            survey = None if self._known is None else self._known.find(piece)
            if survey is None:
                try:
                    survey = structure(Survey, Part(piece, self._shared), self._path)
                except DecodeError as exc:
                    # A whole JSON object breaks the contract: that is an error of the body. Otherwise the guess
                    # was wrong, and the end is found token by token.
                    if not self.left_out.accepts(exc, piece):
                        if extent.is_exact or _is_json(piece):
                            raise
                        extent.be_exact()
                        continue
                else:
                    if self._known is not None:
                        self._known.add(piece, survey)
            if survey is not None:
                surveys.append(survey)
            self._count += 1
            self._unchanged = 0
            self._note_end(end)
            return end
        return None

    def _note_end(self, end: int) -> None:
        """Derive from a survey that ends here, and from the beginning of the next one, where others end."""
        alike = _ALIKE.match(self._buffer, end - 1)
        if alike is not None:
            self._alike = alike[0]


class LeftOut:
    """The surveys of one inventory that were left out, because they lack a value; none if `strict`."""

    def __init__(self, *, strict: bool) -> None:
        self.errors: list[DecodeError] = []
        self.ids: list[PartialKey] = []  # the ID and the wave of each, as far as they can be read
        self._is_strict = strict

    def accepts(self, exc: DecodeError, survey: bytes | dict[str, Any]) -> bool:
        """Return whether a survey with this error is left out. Then this is noted, and a warning logged."""
        if self._is_strict or not says_absent(exc.rule):
            return False
        # A new error: the traceback of the other one holds the body.
        error = DecodeError(exc.path, exc.rule, endpoint="get_quotas", delivery="answered")
        self.errors.append(error)
        fields = parse(survey) if isinstance(survey, bytes) else survey
        survey_id, wave_id = (whole_number_or_none(spelled(fields, name)) for name in ("SurveyID", "WaveID"))
        self.ids.append((survey_id, wave_id))
        if len(self.errors) <= _NAMED:
            _LOG.warning("a survey is left out, the others are read: %s", error)
        return True

    def end(self, count: int) -> None:
        """End the inventory, which had so many surveys. Raise if all of them were left out."""
        if self.errors and len(self.errors) == count:
            raise DecodeError(self.errors[0].path, self.errors[0].rule)
        if len(self.errors) > _NAMED:
            _LOG.warning("%d surveys of %d are left out", len(self.errors), count)


def read_inventory(body: bytes, *, strict: bool) -> Quotas:
    try:
        return from_json(Quotas, body)
    except DecodeError as exc:
        if strict or not says_absent(exc.rule) or not exc.path.startswith("$.Surveys["):
            raise
    document = parse(body)
    left_out, surveys = LeftOut(strict=False), []
    for at, each in enumerate(document["Surveys"]):
        try:
            surveys.append(structure(Survey, each, f"$.Surveys[{at}]"))
        except DecodeError as exc:
            if each is None or not left_out.accepts(exc, each):
                raise
    left_out.end(len(document["Surveys"]))
    frame = structure(Quotas, {**document, "Surveys": []})
    return leave_out(evolve(frame, surveys=tuple(surveys)), left_out.errors, left_out.ids)


class _Extent:
    """The bounds of a survey in a buffer that grows."""

    __slots__ = ("_buffer", "_depth", "_scanned", "alike", "is_exact", "start")

    def __init__(self, buffer: bytearray, start: int, alike: bytes, *, is_exact: bool) -> None:
        self.start = start
        self.alike = alike  # the text to search for as its end, see `_ALIKE`; empty for any possible end
        self.is_exact = is_exact  # the end is found token by token, not guessed
        self._buffer = buffer
        self._depth = 0
        self._scanned = start

    def shift(self, by: int) -> None:
        """Adjust the indexes to a buffer without its first `by` bytes."""
        self.start -= by
        self._scanned -= by

    def be_exact(self) -> None:
        self.is_exact, self._depth, self._scanned = True, 0, self.start

    def find_end(self) -> int | None:
        # A candidate is the end if the braces up to it are balanced. If none is found in a long survey, the
        # search falls back: first from the known text to any possible end, then to tokens.
        while not self.is_exact:
            end = self._candidate()
            if end >= 0:
                self._depth += self._buffer.count(b"{", self._scanned, end)
                self._depth -= self._buffer.count(b"}", self._scanned, end)
                self._scanned = end
                if self._depth == 0:
                    return end
            elif len(self._buffer) - self.start < _GUESSED_BYTES:
                return None
            elif self.alike:
                self.alike = b""
            else:
                self.be_exact()
        return self._exact_end()

    def _candidate(self) -> int:
        if self.alike:
            return self._buffer.find(self.alike, self._scanned) + 1 or -1
        match = _END.search(self._buffer, self._scanned)
        return match.end() if match else -1

    def _exact_end(self) -> int | None:
        while token := _TOKEN.match(self._buffer, self._scanned):
            self._scanned = token.end()
            last = self._buffer[self._scanned - 1]
            self._depth += (last == ord("{")) - (last == ord("}"))
            if self._depth == 0:
                return self._scanned
        return None


def _is_json(piece: bytes) -> bool:
    try:
        parse(piece)
    except DecodeError:
        return False
    return True
