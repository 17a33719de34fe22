"""Conditions: rows of QuestionsAndAnswers, parsed once, and tested against a member's answers.

And the rule of a layer: which members fit it, given which members fit its sub-quotas. It is written once, in
set operations, for four kinds of sets: sets of members, of answer classes, of layers that are evaluated
together, and sets of one single member (1 is everybody, 0 is nobody).
"""

from __future__ import annotations

import operator
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping
from enum import IntEnum
from functools import lru_cache
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    Literal,
    NamedTuple,
    Self,
    SupportsIndex,
    TypeAlias,
    get_args,
)

from attrs import field, frozen

from sampling_async import InvalidRequestError
from sampling_async._contract.checks import require_instance, shown, whole_id
from sampling_async._contract.records import AGE_BANDS, OPEN_AGE
from sampling_async.matching._bits import S, without

if TYPE_CHECKING:
    from collections.abc import Callable

    from attrs import Attribute

    from sampling_async import QuestionAndAnswers


class Truth(IntEnum):
    """Whether a member matches; `POSSIBLE` if that is not known.

    The values are ordered: `min` is "and", `max` is "or".
    """

    NO = 0
    POSSIBLE = 1
    CERTAIN = 2


SubQuotaRule: TypeAlias = Literal["exactly_one", "at_least_one"]
Missing: TypeAlias = Literal["routable", "possible", "no"]
TruncatedPostal: TypeAlias = Literal["possible", "no"]
Full: TypeAlias = Literal["blocks", "ignored"]


def _one_of(choices: Any) -> Any:
    allowed: Final = get_args(choices)

    def check(_: object, attribute: Attribute[Any], value: object) -> None:
        if value not in allowed:
            raise InvalidRequestError(
                f"{attribute.name} must be one of {', '.join(map(repr, allowed))}, not {value!r}"
            )

    return check


@frozen(kw_only=True)
class MatchPolicy:
    """Rules for the cases that the contract leaves open.

    Attributes:
        subquota_rule: How many sub-quotas of a layer a member must fit. `exactly_one` is the contract;
            `at_least_one` is what operators advise in practice. Both give the same result if the sub-quotas do
            not overlap.
        missing: What a question without an answer means. "routable": possible if the service asks the question,
            else no. "possible": always possible, for estimates. "no": always no, to invite only members whose
            answers are known.
        truncated_postal: What a miss means in a postal list of 1000 entries or more: "possible" or "no". The
            service shows only the first 1000 entries of a list.
        full: What a sub-quota that has all its completes does. "blocks": a member who fits it does not match.
            "ignored": it counts as open, for estimates of the inventory before it filled up.
    """

    subquota_rule: SubQuotaRule = field(default="exactly_one", validator=_one_of(SubQuotaRule))
    missing: Missing = field(default="routable", validator=_one_of(Missing))
    truncated_postal: TruncatedPostal = field(default="possible", validator=_one_of(TruncatedPostal))
    full: Full = field(default="blocks", validator=_one_of(Full))


Kind: TypeAlias = Literal["age", "postal", "ids", "choice"]
"""How a question is matched: by years of age, by the prefix of a postal code, by answer IDs that may also come
as texts in AnswerValues, or by answer IDs only."""

Bands: TypeAlias = Mapping[int, tuple[int, int]]
"""The meaning of an age question's answer IDs: first and last year. A last year of 99 or more is "and over"."""

Value: TypeAlias = int | str
Profile: TypeAlias = Mapping[int, Value | Iterable[Value]]
"""A member's answers by question ID: the age in years, a postal code, or one or several answer IDs."""

Known: TypeAlias = int | str | frozenset[int]
"""An answer in normal form: years of age, a plain postal code, or a set of answer IDs."""

AGE_ANSWERS: Final[Bands] = AGE_BANDS
"""The answer IDs of the age question 1001538, as an operator publishes them for all cultures. Other ranges come
in AnswerValues. Replace them with `QuestionKinds.with_age`."""

OLDEST: Final = 150
_DIGITS: Final = 19


def _as_set(question_ids: Iterable[int]) -> frozenset[int]:
    require_instance(question_ids, Iterable, "questions of a kind", "several question IDs, such as {1001042}")
    return frozenset(whole_id(each, "a question ID") for each in question_ids)


def _checked(age: Mapping[int, Bands]) -> dict[int, dict[int, tuple[int, int]]]:
    require_instance(age, Mapping, "age", "age bands by question ID")
    return {whole_id(each, "a question ID"): _checked_bands(bands) for each, bands in age.items()}


def _checked_bands(bands: Bands) -> dict[int, tuple[int, int]]:
    require_instance(bands, Mapping, "bands", "years by answer ID, such as {9000001: (18, 29)}")
    return {answer_id: _checked_band(answer_id, band) for answer_id, band in bands.items()}


def _checked_band(answer_id: int, band: object) -> tuple[int, int]:
    match band:
        case (SupportsIndex() as first, SupportsIndex() as last):
            years = operator.index(first), operator.index(last)
            if years[0] <= years[1]:
                return years
        case _:
            pass
    raise InvalidRequestError(
        f"age band {answer_id} must be its first and its last year, such as (18, 29), not {shown(band)}"
    )


@frozen
class QuestionKinds:
    """The questions that are not matched by answer IDs only.

    The question IDs are the operator's; the reference data interface lists them. `default()` has the question
    IDs seen in real responses, and the published meaning of the answer IDs of age, `AGE_ANSWERS`. If your
    operator gives them another meaning, that replaces it:

        kinds = QuestionKinds.default().with_age(1001538, {9000001: (18, 29), 9000002: (30, 99)})

    Attributes:
        age: Questions answered with an age, each with the meaning of its answer IDs.
        postal: Questions answered with a postal code.
        ids: Questions whose answer IDs come as texts in AnswerValues, as DMA and MSA do.
    """

    age: Mapping[int, Bands] = field(factory=dict[int, "Bands"], converter=_checked)
    postal: frozenset[int] = field(factory=frozenset[int], converter=_as_set)
    ids: frozenset[int] = field(factory=frozenset[int], converter=_as_set)

    @classmethod
    def default(cls) -> Self:
        """Return the kinds with age 1001538, postal code 1001042, DMA 1001568 and MSA 1001569."""
        return cls(
            age={1001538: dict(AGE_ANSWERS)}, postal=frozenset({1001042}), ids=frozenset({1001568, 1001569})
        )

    def with_age(self, question_id: int, bands: Bands) -> QuestionKinds:
        """Return a copy with one more age question, or with other bands for it.

        Raises:
            InvalidRequestError: A band is not two whole numbers, or ends before it begins.
        """
        return QuestionKinds({**self.age, question_id: bands}, self.postal, self.ids)

    def kind_of(self, question_id: int) -> Kind:
        """Return how a question is matched."""
        if question_id in self.age:
            return "age"
        if question_id in self.postal:
            return "postal"
        return "ids" if question_id in self.ids else "choice"

    def known(self, question_id: int, answer: object) -> Known | None:
        """Return an answer in normal form, or None if it is empty: None, a blank text, or no answer IDs.

        Raises:
            InvalidRequestError: A member cannot have given this answer to this question.
        """
        if answer is None or (isinstance(answer, str) and not answer.strip()):
            return None
        kind = self.kind_of(question_id)
        if kind == "age":
            return _years(question_id, answer)
        if kind == "postal":
            return _postal_code(question_id, answer)
        # The usual case first. `type(...) is`, because a bool is an `int` too, and is refused below.
        if type(answer) is int:
            return frozenset((answer,))
        is_one = isinstance(answer, str | bytes | Mapping) or getattr(answer, "ndim", None) == 0  # of NumPy
        if isinstance(answer, Iterable) and not is_one:
            return frozenset([_answer_id(question_id, one) for one in answer]) or None
        return frozenset((_answer_id(question_id, answer),))


def _years(question_id: int, answer: object) -> int:
    years = _whole(answer)
    if years is not None and 0 <= years <= OLDEST:
        return years
    raise InvalidRequestError(
        f"profile[{question_id}]: an age must be a whole number of years from 0 to {OLDEST}, not {answer!r:.40}"
    )


def _postal_code(question_id: int, answer: object) -> str | None:
    if isinstance(answer, str):
        return plain_postal(answer) or None
    raise InvalidRequestError(
        f"profile[{question_id}]: a postal code must be a text, because it may begin with a zero, not "
        f"{answer!r:.40}"
    )


def _answer_id(question_id: int, answer: object) -> int:
    answer_id = _whole(answer)
    if answer_id is not None:
        return answer_id
    raise InvalidRequestError(
        f"profile[{question_id}]: answers must be answer IDs, as whole numbers or as texts of them, not "
        f"{answer!r:.40}"
    )


def _whole(value: object) -> int | None:
    """Return a whole number, given as a number of any whole type or as digits; None for any other value."""
    if isinstance(value, str):
        digits = value.strip().removesuffix(".0")  # as libraries write numbers of a column with gaps to CSV
        return int(digits) if digits.isdecimal() and len(digits) <= _DIGITS else None
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


_LASTING: Final = frozenset({int, str, list, tuple, set, frozenset, type(None)})


def lasting(profile: Profile) -> Profile:
    """Return a profile whose answers can be read more than once: iterators are read into tuples."""
    if not isinstance(profile, Mapping):
        raise InvalidRequestError(
            f"a profile must be a mapping of question IDs to answers, not {type(profile).__name__}"
        )
    if all(type(answer) in _LASTING for answer in profile.values()):
        return profile
    return {
        id_: answer if isinstance(answer, Collection) or not isinstance(answer, Iterable) else tuple(answer)
        for id_, answer in profile.items()
    }


def plain_postal(code: str) -> str:
    """Return a postal code as it is compared: lower case, without blanks and hyphens.

    What spreadsheets and typing make of a code is undone: `="01001"`, `'01001`, hyphens and blanks of all
    kinds, those that are not seen, and digits of other scripts.
    """
    if code.isascii() and code.isalnum():
        return code.lower()
    code = unicodedata.normalize("NFKC", code)
    code = "".join(map(_plain_character, code)).casefold()
    # Excel writes ="01001" and '01001 so that a zero in front is kept. U+0301 is what NFKC makes of an acute.
    return code.strip(_QUOTES)


_QUOTES: Final = "=\"'`\u0301\u2018\u2019\u201a\u201b\u201c\u201d\u201e"
_HYPHENS: Final = "\u02d7\u2043\u2212\u2500\u2796\u30fc"
"""Hyphens by their look, not by their category: minus signs, a bullet, a line, a long sound of kana."""


@lru_cache(maxsize=4096)
def _plain_character(character: str) -> str:
    """Return the normal form of a character; empty for blanks, hyphens and invisible characters."""
    category = unicodedata.category(character)
    if category in {"Pd", "Cf", "Cc"} or category[0] == "Z" or character in _HYPHENS:
        return ""
    return str(unicodedata.decimal(character)) if category == "Nd" else character


_SHOWN: Final = 1000
"""How many postal codes of a list the service shows at most; it does not say whether there are more."""

_RANGE: Final = re.compile(r"\s*(\d{1,3})(?:\s*-\s*(\d{1,3}))?\s*")
_ID: Final = re.compile(r"\s*(\d{1,18})\s*")
_NO_END: Final = 1000

Span = tuple[int, int]
"""The first and the last year of age, both included."""


class Condition(NamedTuple):  # of tens of thousands, tuples are made in a third of the time
    question_id: int
    ids: frozenset[int]  # answer IDs; any one of them meets the condition
    spans: tuple[Span, ...]  # ranges of years of age; if there are any, the answer is an age
    prefixes: frozenset[str]  # of postal codes
    lengths: frozenset[int]  # of these prefixes, a few
    is_vague: bool  # not understood, or only in part: any member may meet it
    is_cut: bool  # the service shows a part of the list: an answer outside it may still be right
    is_asked: bool  # the service asks members without an answer (IsRoutable)

    def values(self) -> Collection[int | str]:
        """Return what meets the condition: answer IDs, prefixes of postal codes, or years of age."""
        if not self.spans:
            return self.ids or self.prefixes
        # Spans may overlap, and a year counts once.
        return {year for first, last in self.spans for year in range(max(0, first), min(last, OLDEST) + 1)}

    def is_met_by(self, answer: Known) -> bool:
        if isinstance(answer, frozenset):
            return not self.ids.isdisjoint(answer)
        if isinstance(answer, int):
            return any(first <= answer <= last for first, last in self.spans)
        # A lookup for each length that occurs (a few), not a comparison with each prefix (up to 1000).
        return any(answer[:length] in self.prefixes for length in self.lengths)

    def truth(self, answer: Known | None, policy: MatchPolicy) -> Truth:
        """Return whether an answer meets the condition; None is no answer."""
        if answer is not None and self.is_met_by(answer):
            return Truth.CERTAIN
        return Truth.POSSIBLE if self.may_be_met(answered=answer is not None, policy=policy) else Truth.NO

    def may_be_met(self, *, answered: bool, policy: MatchPolicy) -> bool:
        """Return whether a member who does not certainly meet the condition may meet it."""
        if self.is_vague or answered:
            return self.is_vague or self.is_cut
        return policy.missing == "possible" or (policy.missing == "routable" and self.is_asked)


def condition_of(
    row: QuestionAndAnswers, kinds: QuestionKinds, policy: MatchPolicy, odd: Callable[[str], None]
) -> Condition:
    """Parse a row; a part that cannot be parsed makes the condition vague, and is reported."""
    kind, question_id = kinds.kind_of(row.question_id), row.question_id
    ids, values = frozenset(row.answer_ids), row.answer_values
    spans: tuple[Span, ...] = ()
    prefixes: frozenset[str] = frozenset()
    if ids and not values and kind not in {"age", "postal"}:
        # Nearly all rows are so, and nothing can be odd in them.
        return Condition(question_id, ids, spans, prefixes, frozenset(), False, False, row.is_routable)
    vague = False

    def note(message: str) -> None:
        nonlocal vague
        vague = True
        odd(message)

    if not ids and not values:
        note(f"question {question_id} has neither AnswerIDs nor AnswerValues")
    if kind == "age":
        spans = _spans(row, kinds, note)
        # `_spans` has translated the answer IDs to years.
        ids = frozenset()
    elif kind == "postal":
        prefixes = _prefixes(values, note)
        if ids:
            note(f"question {question_id} is about postal codes but has AnswerIDs, whose meaning is not known")
            ids = frozenset()
    elif values and kind == "ids":
        ids |= _ids(values, note)
    elif values:
        note(f"question {question_id} has AnswerValues, but its kind is not registered")
    is_cut = kind == "postal" and len(values) >= _SHOWN and policy.truncated_postal == "possible"
    # Here, where the texts of a list are in the CPU's cache: later, this takes a twelfth of building an index.
    lengths = frozenset(map(len, prefixes))
    return Condition(question_id, ids, spans, prefixes, lengths, vague, is_cut, row.is_routable)


def _spans(row: QuestionAndAnswers, kinds: QuestionKinds, note: Callable[[str], None]) -> tuple[Span, ...]:
    bands = kinds.age[row.question_id]
    spans: set[Span] = set()
    for answer_id in row.answer_ids:
        if answer_id in bands:
            spans.add(_open_ended(*bands[answer_id]))
        else:
            note(f"answer {answer_id} of age question {row.question_id} is in no known band")
    for value in row.answer_values:
        match = _RANGE.fullmatch(value)
        # "25-34" is (25, 34) and "25" is (25, 25). (1, 0) fails the test below, as a range "34-25" does.
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first <= last:
            spans.add(_open_ended(first, last))
        else:
            note(f"{value!r} of age question {row.question_id} is not a range of years")
    return tuple(sorted(spans))


def _open_ended(first: int, last: int) -> Span:
    # A last year of 99 or more means "and over", so that a member aged 104 fits the span 65-99.
    return first, _NO_END if last >= OPEN_AGE else last


def _prefixes(values: tuple[str, ...], note: Callable[[str], None]) -> frozenset[str]:
    # Nearly all lists are in the normal form already. Two tests of all codes as one text find that out faster
    # than normalizing code by code.
    together = "".join(values)
    codes: Iterable[str] = values
    if not (together.isascii() and together.isalnum()):
        codes = map(plain_postal, values)
    elif together != together.casefold():
        codes = map(str.casefold, values)
    prefixes = frozenset(codes)
    if "" in prefixes:
        note("an empty postal code is ignored: every code begins with it")
        prefixes -= {""}
    return prefixes


def _ids(values: tuple[str, ...], note: Callable[[str], None]) -> frozenset[int]:
    ids: set[int] = set()
    for value in values:
        match = _ID.fullmatch(value)
        if match:
            ids.add(int(match[1]))
        else:
            note(f"{value!r} is not an answer ID")
    return frozenset(ids)


class Fitting(NamedTuple, Generic[S]):
    certain: S
    possible: S  # those who certainly fit included


def fitting(sub_quotas: Iterable[tuple[S, S, S]], nobody: S, *, exactly_one: bool) -> Fitting[S]:
    """Return the members who fit a layer: exactly one of its sub-quotas, or at least one.

    In both rules, a member who certainly fits a full sub-quota does not fit the layer. Each of `sub_quotas` has
    the members who certainly fit it, those who may, and those for whom it is full: everybody or nobody.
    """
    # Each set collects the members with one property: they certainly fit (`fit`) or may fit (`may`) at least
    # one sub-quota, at least two of them (`two_`), one that is full (`full_`), or one that is open.
    fit = two_fit = may = two_may = may_open = full_fit = full_may = open_fit = nobody
    for certain, possible, full in sub_quotas:
        # Order matters: `fit` holds the earlier sub-quotas only, so that `fit & certain` is a second fit.
        two_fit |= fit & certain
        fit |= certain
        two_may |= may & possible
        may |= possible
        full_fit |= certain & full
        full_may |= possible & full
        open_fit |= without(certain, full)
        may_open |= without(possible, full)
    # Possible: an open sub-quota may fit, and no certain fit contradicts that. Certain: an open sub-quota fits,
    # and no other one may fit that would contradict it.
    possible = without(may_open, full_fit | two_fit if exactly_one else full_fit)
    return Fitting(without(open_fit & possible, two_may if exactly_one else full_may), possible)
