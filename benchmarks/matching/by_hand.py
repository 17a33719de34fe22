"""Matching as a careful partner would write it: conditions parsed once, answers cached per member, early exits.

It follows the contract with the default policy of the index, so that the results can be compared.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from matching.inventories import AGE, DMA, POSTAL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from sampling_async import QuestionAndAnswers, Quotas
    from sampling_async.matching import QuotaIndex

NO, POSSIBLE, CERTAIN = range(3)
_LONG: Final = 1000


class ByHand:
    """An inventory, prepared for matching."""

    def __init__(self, quotas: Quotas) -> None:
        self._rows: dict[QuestionAndAnswers, int] = {}
        self._tests: list[Any] = []
        self._quotas = [
            (
                -quota.estimated_completes_remaining,
                quota.quota_id,
                survey.survey_id,
                [[self._sub_quota(sub_quota) for sub_quota in layer.sub_quotas] for layer in quota.layers],
            )
            for survey in quotas.surveys
            for quota in survey.quotas
        ]
        self._quotas.sort(key=lambda quota: quota[:2])

    def _sub_quota(self, sub_quota: Any) -> tuple[bool, list[int]]:
        rows = [self._row(row) for row in sub_quota.questions_and_answers]
        return sub_quota.current_completes >= sub_quota.max_target_completes, rows

    def _row(self, row: QuestionAndAnswers) -> int:
        number = self._rows.setdefault(row, len(self._rows))
        if number == len(self._tests):
            if row.question_id == AGE:
                spans = [tuple(map(int, value.split("-"))) for value in row.answer_values]
                wanted: Any = [(low, high if high < 99 else 999) for low, high in spans]
            elif row.question_id == POSTAL:
                wanted = dict.fromkeys(row.answer_values), {len(value) for value in row.answer_values}
            elif row.question_id == DMA:
                wanted = frozenset(map(int, row.answer_values))
            else:
                wanted = frozenset(row.answer_ids)
            cut = row.question_id == POSTAL and len(row.answer_values) >= _LONG
            self._tests.append((row.question_id, wanted, row.is_routable, cut))
        return number

    def match(self, profile: dict[int, Any]) -> Iterator[tuple[int, int, int]]:
        """Yield quota ID, survey ID and truth of each certain or possible quota, the most wanted first."""
        memo: dict[int, int] = {}
        for _, quota_id, survey_id, layers in self._quotas:
            truth = CERTAIN
            for layer in layers:
                truth = min(truth, self._layer(layer, profile, memo))
                if truth == NO:
                    break
            else:
                yield quota_id, survey_id, truth

    def _layer(self, layer: list[tuple[bool, list[int]]], profile: dict[int, Any], memo: dict[int, int]) -> int:
        certain = possible = possible_open = 0
        for is_full, rows in layer:
            truth = CERTAIN
            for number in rows:
                found = memo.get(number)
                if found is None:
                    found = memo[number] = self._test(number, profile)
                truth = min(truth, found)
                if truth == NO:
                    break
            if truth == CERTAIN:
                if is_full or certain:
                    return NO
                certain = 1
            if truth:
                possible += 1
                possible_open += not is_full
        if not possible_open:
            return NO
        return CERTAIN if certain and possible == 1 else POSSIBLE

    def _test(self, number: int, profile: dict[int, Any]) -> int:
        question_id, wanted, routable, cut = self._tests[number]
        answer = profile.get(question_id)
        if answer is None:
            return POSSIBLE if routable or cut else NO
        if question_id == AGE:
            return CERTAIN if any(low <= answer <= high for low, high in wanted) else NO
        if question_id == POSTAL:
            listed, lengths = wanted
            hit = any(answer[:length] in listed for length in lengths)
            return CERTAIN if hit else POSSIBLE if cut else NO
        answers = (answer,) if isinstance(answer, int) else answer
        return NO if wanted.isdisjoint(answers) else CERTAIN


def agree(index: QuotaIndex, by_hand: ByHand, people: Iterable[dict[int, Any]]) -> None:
    """Check that both give the same result: a wrong result would make the speed meaningless."""
    for profile in people:
        found, matched = list(by_hand.match(profile)), index.match(profile)
        assert [id_ for id_, _, truth in found if truth == CERTAIN] == list(matched.certain)
        assert [id_ for id_, _, truth in found if truth == POSSIBLE] == list(matched.possible)


def cpu(run: Callable[[], object]) -> float:
    """Return the CPU seconds of a run."""
    started = time.process_time()
    run()
    return time.process_time() - started
