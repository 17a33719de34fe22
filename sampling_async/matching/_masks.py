"""Reasons, in words, that exclude a member from a quota independent of the member's answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sampling_async.matching._evaluate import Reason
from sampling_async.matching._policy import Truth

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from sampling_async._contract.records import Participation, Survey


def mask_reasons(
    survey: Survey,
    *,
    device_type: int | None,
    exclude_surveys: Collection[int],
    participations: Collection[Participation],
) -> Iterator[Reason]:
    """Yield the reasons why a survey is not open to a member; none if it is open.

    Args:
        survey: The survey.
        device_type: The member's device; None if it is not known, then it excludes nothing.
        exclude_surveys: Surveys that the member must not be offered.
        participations: What the member took part in.
    """
    devices = survey.device_type_ids
    if device_type is not None and devices and device_type not in devices:
        shown = ", ".join(map(str, devices))
        yield Reason(f"device {device_type}", Truth.NO, f"the survey accepts only devices {shown}")
    if survey.survey_id in exclude_surveys:
        yield Reason(f"survey {survey.survey_id}", Truth.NO, "the survey is in exclude_surveys")
    for exclusion in survey.survey_wave_exclusions:
        # Wave 0 of an exclusion stands for all waves of the survey.
        if any(
            one.survey_id == exclusion.survey_id
            and exclusion.wave_id in {0, one.wave_id}
            and one.status_id in exclusion.participation_status_ids
            for one in participations
        ):
            yield Reason(
                f"participation in survey {exclusion.survey_id}",
                Truth.NO,
                "the survey excludes members with such a participation",
            )


def recontact_reasons(
    survey: Survey, member_codes: Collection[str] | None, member_code: str | None
) -> Iterator[Reason]:
    """Yield the reason why the recontact list of a quota excludes a member, or may; none if it does not.

    Args:
        survey: The survey of the quota.
        member_codes: The quota's list, if one was given.
        member_code: The member's code, if it is known.
    """
    if member_codes is not None and member_code is not None:
        if member_code not in member_codes:
            yield Reason("recontact list", Truth.NO, "the member is not on it")
    elif survey.is_survey_recontact:
        missing = "list was given" if member_codes is None else "member code was given"
        yield Reason(
            "recontact list", Truth.POSSIBLE, f"the survey is only for members on a list, and no {missing}"
        )
