"""The kinds of questions, and the normal form of a member's answers."""

from __future__ import annotations

import operator
import unicodedata
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import Final, Literal, Self, TypeAlias

from attrs import field, frozen

from sampling_async._contract.errors import InvalidRequestError

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

AGE_ANSWERS: Final[Bands] = {
    2006351: (13, 17),
    2006352: (18, 24),
    2006353: (25, 29),
    2006354: (30, 34),
    2006355: (35, 39),
    2006356: (40, 44),
    2006357: (45, 49),
    2006358: (50, 54),
    2006359: (55, 59),
    2006360: (60, 64),
    2006361: (65, 99),
}
"""The answer IDs of the age question 1001538, as an operator publishes them for all cultures. Other ranges come
in AnswerValues. Replace them with `QuestionKinds.with_age`."""

OPEN_END: Final = 99
OLDEST: Final = 150
_DIGITS: Final = 19


def _as_set(question_ids: Iterable[int]) -> frozenset[int]:
    return frozenset(question_ids)


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

    age: Mapping[int, Bands] = field(factory=dict[int, "Bands"])
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
            InvalidRequestError: A band ends before it begins.
        """
        for answer_id, (first, last) in bands.items():
            if first > last:
                raise InvalidRequestError(
                    f"age band {answer_id} begins at {first}, but ends before that, at {last}"
                )
        return QuestionKinds({**self.age, question_id: dict(bands)}, self.postal, self.ids)

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
        if isinstance(answer, Iterable) and not isinstance(answer, str | bytes | Mapping):
            return frozenset([_answer_id(question_id, one) for one in answer]) or None
        return frozenset((_answer_id(question_id, answer),))


def _years(question_id: int, answer: object) -> int:
    years = _whole(answer)
    if years is not None and 0 <= years <= OLDEST:
        return years
    raise InvalidRequestError(
        f"profile[{question_id}]: an age must be in years, from 0 to {OLDEST}, not {answer!r:.40}"
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
    """Return a profile whose answers can be read more than once: iterators are read into tuples.

    Raises:
        InvalidRequestError: The profile is not a mapping.
    """
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
    """Return a postal code in the form used for comparison: lower case, without blanks and hyphens.

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
"""What looks like a hyphen and is none by its category: minus signs, a bullet, a line, a long sound of kana."""


@lru_cache(maxsize=4096)
def _plain_character(character: str) -> str:
    """Return a character of a postal code as it counts: nothing for blanks, hyphens and what is not seen."""
    category = unicodedata.category(character)
    if category in {"Pd", "Cf", "Cc"} or category[0] == "Z" or character in _HYPHENS:
        return ""
    return str(unicodedata.decimal(character)) if category == "Nd" else character
