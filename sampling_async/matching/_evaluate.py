"""The matching of one member with one quota, written to be read: what the index must agree with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from sampling_async.matching._conditions import read_condition
from sampling_async.matching._policy import MatchPolicy, Truth

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sampling_async._models import Layer, QuestionAndAnswers, Quota, SubQuota
    from sampling_async.matching._questions import Known, Profile, QuestionKinds


@frozen
class Reason:
    """Why a member matches or not: a tree, from the quota to the conditions.

    Attributes:
        what: What was looked at: the quota, a layer, a sub-quota or a question.
        truth: What came of it.
        why: The rule by which it did.
        parts: What it was made of.
    """

    what: str
    truth: Truth
    why: str
    parts: tuple[Reason, ...] = ()

    def __str__(self) -> str:
        return "\n".join(self._lines(0))

    def _lines(self, depth: int) -> Iterator[str]:
        yield f"{'  ' * depth}{self.truth.name.lower():8} {self.what}: {self.why}"
        for part in self.parts:
            yield from part._lines(depth + 1)  # noqa: SLF001  its own class


def evaluate(profile: Profile, quota: Quota, kinds: QuestionKinds, policy: MatchPolicy) -> Reason:
    """Return whether a member matches a quota, with the reasons. Slow and plain.

    Args:
        profile: The member's answers.
        quota: The quota.
        kinds: How questions are matched.
        policy: What is taken how.

    Raises:
        InvalidRequestError: An answer of the profile is none.
    """
    layers = tuple(_layer(profile, layer, kinds, policy) for layer in quota.layers)
    truth = min((layer.truth for layer in layers), default=Truth.CERTAIN)
    why = "all layers must hold" if layers else "no layers: it is for everybody"
    return Reason(f"quota {quota.quota_id}", truth, why, layers)


def _layer(profile: Profile, layer: Layer, kinds: QuestionKinds, policy: MatchPolicy) -> Reason:
    parts = tuple(_sub_quota(profile, sub_quota, kinds, policy) for sub_quota in layer.sub_quotas)
    full = [policy.full == "blocks" and _is_full(sub_quota) for sub_quota in layer.sub_quotas]
    truth, why = layer_truth([part.truth for part in parts], full, policy)
    return Reason(f"layer {layer.layer_id}", truth, why, parts)


def _is_full(sub_quota: SubQuota) -> bool:
    return sub_quota.current_completes >= sub_quota.max_target_completes


def layer_truth(truths: Sequence[Truth], full: Sequence[bool], policy: MatchPolicy) -> tuple[Truth, str]:
    """Return what a layer comes to, and the rule.

    Args:
        truths: Of its sub-quotas.
        full: Which of them are full.
        policy: Says how many must fit.
    """
    certain_full = sum(is_full and truth == Truth.CERTAIN for truth, is_full in zip(truths, full, strict=True))
    certain_open = truths.count(Truth.CERTAIN) - certain_full
    possible = sum(truth >= Truth.POSSIBLE for truth in truths)
    possible_full = sum(
        is_full and truth >= Truth.POSSIBLE for truth, is_full in zip(truths, full, strict=True)
    )
    if certain_full:
        return Truth.NO, "a sub-quota that is full certainly fits"
    if policy.subquota_rule == "exactly_one" and certain_open > 1:
        return Truth.NO, f"exactly one sub-quota must fit, and {certain_open} certainly do"
    if possible == possible_full:
        return Truth.NO, "no open sub-quota fits"
    if policy.subquota_rule == "exactly_one":
        if certain_open == possible == 1:
            return Truth.CERTAIN, "exactly one sub-quota fits, and it is open"
        return Truth.POSSIBLE, f"{certain_open} sub-quotas certainly fit, and {possible - certain_open} may"
    if certain_open and not possible_full:
        return Truth.CERTAIN, "an open sub-quota fits, and none that is full may"
    return (
        Truth.POSSIBLE,
        f"{certain_open} open sub-quotas certainly fit, and of {possible} that may some are full",
    )


def _sub_quota(profile: Profile, sub_quota: SubQuota, kinds: QuestionKinds, policy: MatchPolicy) -> Reason:
    rows: dict[int, list[QuestionAndAnswers]] = {}
    for row in sub_quota.questions_and_answers:
        rows.setdefault(row.question_id, []).append(row)
    parts = tuple(
        _question(kinds.known(question_id, profile.get(question_id)), question_id, same, kinds, policy)
        for question_id, same in rows.items()
    )
    truth = min((part.truth for part in parts), default=Truth.POSSIBLE)
    count = f"{sub_quota.current_completes} of {sub_quota.max_target_completes} completes"
    why = "all its questions must be met" if parts else "it asks for nothing, which says nothing"
    return Reason(f"sub-quota {sub_quota.sub_quota_id}, {count}", truth, why, parts)


def _question(
    answer: Known | None,
    question_id: int,
    rows: Sequence[QuestionAndAnswers],
    kinds: QuestionKinds,
    policy: MatchPolicy,
) -> Reason:
    odd: list[str] = []
    conditions = [read_condition(row, kinds, policy, odd.append) for row in rows]
    truth = max(condition.truth(answer, policy) for condition in conditions)
    if truth == Truth.CERTAIN:
        why = "an answer is listed"
    elif odd:
        why = "; ".join(odd)
    elif answer is not None and truth == Truth.POSSIBLE:
        why = "not among those the service shows of a long list of postal codes"
    elif answer is not None:
        why = "the answer is not listed"
    elif truth == Truth.POSSIBLE:
        why = (
            "no answer is known, and the service asks" if policy.missing == "routable" else "no answer is known"
        )
    else:
        why = (
            "no answer is known, and the service does not ask"
            if policy.missing == "routable"
            else "no answer is known"
        )
    return Reason(f"question {question_id}", truth, why)
