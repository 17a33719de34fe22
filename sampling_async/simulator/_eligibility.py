"""Whether a member matches a quota: the service's truth, written to be read against the contract.

A member matches a quota when all its layers hold. A layer holds when the member's profile fits exactly one of
its sub-quotas. Inside a sub-quota, conditions on the same question are alternatives, and all its questions must
be met. An answer list is met by any one answer:

- age: the years lie in a range of AnswerValues, both ends included, 99 and above meaning "and over", or in the
  band that an answer ID stands for;
- postal code: it begins with a listed value, compared without blanks, hyphens and case. The exposed list is
  taken for the whole list, also where the service would have cut it;
- everything else, DMA and MSA included: the member gave one of the answer IDs.

A question without an answer is not met, unless it is routable: then the service will ask it, and here every
member answers rightly. Where no sub-quota fits by profile alone, the member takes the first open one that fits
with such answers. A condition with an unreadable or empty list is met by nobody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from sampling_async.simulator._questions import AGE, AGE_BANDS, OPEN_END, POSTAL_CODE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sampling_async._models import Layer, QuestionAndAnswers, Quota, SubQuota
    from sampling_async.simulator._members import ProfileAnswer

Fit: TypeAlias = tuple[int, ...]
"""The sub-quotas of one layer that a member can take, by position: the one that fits, or those to be asked."""

_NO_FIT: Final[Fit] = ()


class QuotaTargets:
    """Whom a quota is for: its layers, with the conditions made ready to be asked many times."""

    __slots__ = ("_layers",)

    def __init__(self, quota: Quota) -> None:
        self._layers = tuple(_LayerTargets(layer) for layer in quota.layers)

    def fit(self, profile: Mapping[int, ProfileAnswer]) -> tuple[Fit, ...] | None:
        """Return the sub-quotas the member can take, layer by layer; None if the member does not match."""
        fits: list[Fit] = []
        for layer in self._layers:
            fit = layer.fit(profile)
            if not fit:
                return None
            fits.append(fit)
        return tuple(fits)


class _LayerTargets:
    __slots__ = ("_sub_quotas",)

    def __init__(self, layer: Layer) -> None:
        self._sub_quotas = tuple(_SubQuotaTargets(sub_quota) for sub_quota in layer.sub_quotas)

    def fit(self, profile: Mapping[int, ProfileAnswer]) -> Fit:
        certain: list[int] = []
        asked: list[int] = []
        for position, sub_quota in enumerate(self._sub_quotas):
            held = sub_quota.holds(profile)
            if held:
                certain.append(position)
            elif held is None:
                asked.append(position)
        if certain:
            return (certain[0],) if len(certain) == 1 else _NO_FIT
        return tuple(asked)


class _SubQuotaTargets:
    __slots__ = ("_questions",)

    def __init__(self, sub_quota: SubQuota) -> None:
        by_question: dict[int, list[QuestionAndAnswers]] = {}
        for condition in sub_quota.questions_and_answers:
            by_question.setdefault(condition.question_id, []).append(condition)
        self._questions = tuple(
            (question_id, any(c.is_routable for c in conditions), tuple(_test(c) for c in conditions))
            for question_id, conditions in by_question.items()
        )

    def holds(self, profile: Mapping[int, ProfileAnswer]) -> bool | None:
        """Say whether a member fits; None when only answers the service has yet to ask for are missing."""
        asks = False
        for question_id, is_routable, tests in self._questions:
            answer = profile.get(question_id)
            if answer is None:
                if not is_routable:
                    return False
                asks = True
            elif not any(test(answer) for test in tests):
                return False
        return None if asks else True


def _test(condition: QuestionAndAnswers) -> Callable[[ProfileAnswer], bool]:
    """Return the test of a member's answer against one condition."""
    if condition.question_id == AGE:
        return _age_test(condition)
    if condition.question_id == POSTAL_CODE:
        return _postal_test(condition)
    return _answer_test(condition)


def _age_test(condition: QuestionAndAnswers) -> Callable[[ProfileAnswer], bool]:
    bands = [AGE_BANDS[answer_id] for answer_id in condition.answer_ids if answer_id in AGE_BANDS]
    ranges = [_age_range(value) for value in condition.answer_values]
    spans = [span for span in (*bands, *ranges) if span]

    def test(answer: ProfileAnswer) -> bool:
        return isinstance(answer, int) and any(
            low <= answer and (answer <= high or high >= OPEN_END) for low, high in spans
        )

    return test


def _age_range(value: str) -> tuple[int, int] | None:
    low, dash, high = (part.strip() for part in value.partition("-"))
    if not low.isdecimal() or (dash and not high.isdecimal()):
        return None
    return int(low), int(high if dash else low)


def _postal_test(condition: QuestionAndAnswers) -> Callable[[ProfileAnswer], bool]:
    listed = {postal for value in condition.answer_values if (postal := _plain(value))}
    lengths = sorted({len(value) for value in listed})

    def test(answer: ProfileAnswer) -> bool:
        postal = _plain(str(answer))
        return any(postal[:length] in listed for length in lengths)

    return test


def _plain(postal_code: str) -> str:
    return postal_code.replace(" ", "").replace("-", "").casefold()


def _answer_test(condition: QuestionAndAnswers) -> Callable[[ProfileAnswer], bool]:
    wanted = {str(answer_id) for answer_id in condition.answer_ids} | set(condition.answer_values)

    def test(answer: ProfileAnswer) -> bool:
        if isinstance(answer, frozenset):
            return any(str(one) in wanted for one in answer)
        return str(answer) in wanted

    return test


def first_open(fit: Fit, completes: Sequence[int], sub_quotas: Sequence[SubQuota]) -> int | None:
    """Return the first of the sub-quotas a member can take that is not full, by position."""
    for position in fit:
        if completes[position] < sub_quotas[position].max_target_completes:
            return position
    return None
