"""The reference matcher: one member with one quota, written for clarity. The index must agree with it.

Reasons that do not depend on the member's answers are given as texts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from sampling_async.matching._conditions import MatchPolicy, Truth, condition_of, fitting

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from sampling_async import Layer, QuestionAndAnswers, Quota, SubQuota, Survey
    from sampling_async._contract.records import Participation
    from sampling_async.matching._conditions import Known, Profile, QuestionKinds


def mask_reasons(
    survey: Survey,
    *,
    device_type: int | None,
    exclude_surveys: Collection[int],
    participations: Collection[Participation],
) -> Iterator[Reason]:
    """Yield the reasons why a survey is not open to a member; none if it is open."""
    devices = survey.device_type_ids
    if device_type is not None and devices and device_type not in devices:
        shown = ", ".join(map(str, devices))
        yield Reason(f"device {device_type}", Truth.NO, f"the survey accepts only devices {shown}")
    if survey.survey_id in exclude_surveys:
        yield Reason(f"survey {survey.survey_id}", Truth.NO, "the survey is in exclude_surveys")
    for exclusion in survey.survey_wave_exclusions:
        if any(map(exclusion.excludes, participations)):
            yield Reason(
                f"participation in survey {exclusion.survey_id}",
                Truth.NO,
                "the survey excludes members with such a participation",
            )


def recontact_reasons(
    survey: Survey, member_codes: Collection[str] | None, member_code: str | None
) -> Iterator[Reason]:
    """Yield the reason why the recontact list of a quota excludes a member, or may; none if it does not."""
    if member_codes is not None and member_code is not None:
        if member_code not in member_codes:
            yield Reason("recontact list", Truth.NO, "the member is not on it")
    elif survey.is_survey_recontact:
        missing = "list was given" if member_codes is None else "member code was given"
        yield Reason(
            "recontact list", Truth.POSSIBLE, f"the survey is only for members on a list, and no {missing}"
        )


@frozen
class Reason:
    """Why a member matches or not: a tree, from the quota down to the conditions.

    Attributes:
        what: The part that was evaluated: the quota, a layer, a sub-quota or a question.
        truth: Whether the member fits the part.
        why: The rule that gave this result.
        parts: The reasons of the part's own parts.
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
    """Return whether a member matches a quota, with the reasons. It is simple and slow."""
    layers = tuple(_layer(profile, layer, kinds, policy) for layer in quota.layers)
    truth = min((layer.truth for layer in layers), default=Truth.CERTAIN)
    why = "all layers must hold" if layers else "no layers: every member matches"
    return Reason(f"quota {quota.quota_id}", truth, why, layers)


def _layer(profile: Profile, layer: Layer, kinds: QuestionKinds, policy: MatchPolicy) -> Reason:
    parts = tuple(_sub_quota(profile, sub_quota, kinds, policy) for sub_quota in layer.sub_quotas)
    full = [
        policy.full == "blocks" and each.current_completes >= each.max_target_completes
        for each in layer.sub_quotas
    ]
    truth, why = layer_truth([part.truth for part in parts], full, policy)
    return Reason(f"layer {layer.layer_id}", truth, why, parts)


def layer_truth(truths: Sequence[Truth], full: Sequence[bool], policy: MatchPolicy) -> tuple[Truth, str]:
    """Return whether a member fits a layer, and the rule that gave this result."""
    exactly_one = policy.subquota_rule == "exactly_one"
    # Sets of one member: 1 holds the member, 0 is empty.
    sub_quotas = [
        (int(truth == Truth.CERTAIN), int(truth >= Truth.POSSIBLE), int(is_full))
        for truth, is_full in zip(truths, full, strict=True)
    ]
    fits = fitting(sub_quotas, 0, exactly_one=exactly_one)
    truth = Truth.CERTAIN if fits.certain else Truth.POSSIBLE if fits.possible else Truth.NO
    certain_full = sum(certain & is_full for certain, _, is_full in sub_quotas)
    certain_open = truths.count(Truth.CERTAIN) - certain_full
    possible = sum(may for _, may, _ in sub_quotas)
    if truth == Truth.NO:
        if certain_full:
            return truth, "a full sub-quota certainly fits"
        if exactly_one and certain_open > 1:
            return truth, f"exactly one sub-quota must fit, and {certain_open} certainly do"
        return truth, "no open sub-quota fits"
    if exactly_one:
        if truth == Truth.CERTAIN:
            return truth, "exactly one sub-quota fits, and it is open"
        return truth, f"{certain_open} sub-quotas certainly fit, and {possible - certain_open} more may fit"
    if truth == Truth.CERTAIN:
        return truth, "an open sub-quota fits, and no full one may fit"
    return truth, f"{certain_open} open sub-quotas certainly fit; {possible} may fit, and some of them are full"


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
    why = "all its questions must be met" if parts else "it has no questions, so nothing is known"
    return Reason(f"sub-quota {sub_quota.sub_quota_id}, {count}", truth, why, parts)


def _question(
    answer: Known | None,
    question_id: int,
    rows: Sequence[QuestionAndAnswers],
    kinds: QuestionKinds,
    policy: MatchPolicy,
) -> Reason:
    odd: list[str] = []
    conditions = [condition_of(row, kinds, policy, odd.append) for row in rows]
    # The rows are alternatives: the best of them counts.
    truth = max(condition.truth(answer, policy) for condition in conditions)
    if truth == Truth.CERTAIN:
        why = "one of the answers is listed"
    elif odd:
        why = "; ".join(odd)
    elif answer is not None and truth == Truth.POSSIBLE:
        why = "it is not among the postal codes that the service shows of a long list"
    elif answer is not None:
        why = "the answer is not listed"
    elif policy.missing != "routable":
        why = "no answer is known"
    elif truth == Truth.POSSIBLE:
        why = "no answer is known, and the service asks"
    else:
        why = "no answer is known, and the service does not ask for it"
    return Reason(f"question {question_id}", truth, why)
