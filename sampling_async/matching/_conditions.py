"""Conditions: rows of QuestionsAndAnswers, parsed once, and tested against members' answers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from attrs import field, frozen

from sampling_async.matching._policy import Truth
from sampling_async.matching._questions import OLDEST, OPEN_END, plain_postal

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from sampling_async._contract.records import QuestionAndAnswers
    from sampling_async.matching._policy import MatchPolicy
    from sampling_async.matching._questions import Known, QuestionKinds

_SHOWN: Final = 1000
"""How many postal codes of a list the service shows at most; it does not say whether there are more."""

_RANGE: Final = re.compile(r"\s*(\d{1,3})(?:\s*-\s*(\d{1,3}))?\s*")
_ID: Final = re.compile(r"\s*(\d{1,18})\s*")
_NO_END: Final = 1000

Span = tuple[int, int]
"""The first and the last year of age, both included."""


@frozen
class Condition:
    """The condition of one row.

    Attributes:
        question_id: The question.
        ids: Answer IDs; any one of them meets the condition.
        spans: Ranges of years of age that meet it; if there are any, the answer is an age.
        prefixes: Prefixes of postal codes that meet it.
        lengths: The lengths of these prefixes, a few.
        is_vague: Whether the row was not understood, or only in part: any member may meet the condition.
        is_cut: Whether the service shows only a part of the list: an answer outside it may still be right.
        is_asked: Whether the service asks members without an answer (IsRoutable).
    """

    question_id: int
    ids: frozenset[int]
    spans: tuple[Span, ...]
    prefixes: frozenset[str]
    lengths: frozenset[int] = field(eq=False)
    is_vague: bool
    is_cut: bool
    is_asked: bool

    def values(self) -> Collection[int | str]:
        """Return what meets the condition: answer IDs, prefixes of postal codes, or years of age."""
        if not self.spans:
            return self.ids or self.prefixes
        # Spans may overlap, and a year counts once.
        return {year for first, last in self.spans for year in range(first, min(last, OLDEST) + 1)}

    def is_met_by(self, answer: Known) -> bool:
        """Return whether an answer certainly meets the condition."""
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
        """Return whether a member who does not certainly meet the condition may meet it.

        Args:
            answered: Whether the member answered the question.
            policy: What a missing answer means.
        """
        if self.is_vague or answered:
            return self.is_vague or self.is_cut
        return policy.missing == "possible" or (policy.missing == "routable" and self.is_asked)


def condition_of(
    row: QuestionAndAnswers, kinds: QuestionKinds, policy: MatchPolicy, odd: Callable[[str], None]
) -> Condition:
    """Parse a row; a part that cannot be parsed makes the condition vague, and is reported.

    Args:
        row: The row.
        kinds: How its question is matched.
        policy: What a cut postal list means.
        odd: Called with a message for each part that cannot be parsed.
    """
    kind, question_id = kinds.kind_of(row.question_id), row.question_id
    ids, values = frozenset(row.answer_ids), row.answer_values
    spans: tuple[Span, ...] = ()
    prefixes: frozenset[str] = frozenset()
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
    return first, _NO_END if last >= OPEN_END else last


def _prefixes(values: tuple[str, ...], note: Callable[[str], None]) -> frozenset[str]:
    # Nearly all lists are in the normal form already. Two tests of all codes as one text find that out faster
    # than normalizing code by code.
    together = "".join(values)
    codes: Iterable[str] = values
    if not together.isalnum():
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
