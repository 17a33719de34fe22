"""What a refusal says about other pairs of member and quota, and what a person can do about it.

And what invites and completes say of the next ones: how many invites end in a complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve, field, frozen

from sampling_async._contract.checks import not_negative, positive, whole_from_1
from sampling_async._contract.errors import InvalidRequestError
from sampling_async._contract.result_codes import ResultCode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from attrs import Attribute

    from sampling_async._contract.records import Survey


class Lesson(StrEnum):
    """What a refusal says about the pairs that were not requested yet.

    Attributes:
        PAIR: Nothing: the refusal is about this member and this quota.
        QUOTA: The quota takes nobody now. It is taken out of what is queued.
        SURVEY: The survey takes nobody now. All its quotas are taken out.
        MEMBER: The member gets nothing more in this campaign, or this day.
        MEMBER_SURVEY: The member gets nothing more of this survey.
        LATER: The same pair is requested again later, up to three times in all.
        STOP: No pair can succeed, for example because the panel is not known. The campaign stops, and the
            pairs that were refused so stay pending for its next run.
    """

    PAIR = "pair"
    QUOTA = "quota"
    SURVEY = "survey"
    MEMBER = "member"
    MEMBER_SURVEY = "member_survey"
    LATER = "later"
    STOP = "stop"


def _a_lesson(_: object, __: Attribute[Any], value: object) -> None:
    if not isinstance(value, Lesson):
        raise InvalidRequestError(f"lesson must be a Lesson, such as Lesson.QUOTA, not {value!r:.40}")


@frozen
class Rule:
    """What is done about a result code.

    Attributes:
        lesson: What it says about others.
        advice: What a person can do about it, for the report.
        in_a_row: Apply the lesson only when so many pairs of the quota were refused with this code, one after
            the other. A full sub-quota concerns some members of a quota; several in a row mean most of them.
    """

    lesson: Lesson = field(validator=_a_lesson)
    advice: str = ""
    in_a_row: int = field(default=1, validator=whole_from_1, kw_only=True)


_UNKNOWN: Final = Rule(Lesson.PAIR, "A code that this version does not know: ask the operator what it means.")
_PROFILE: Final = "Compare the member's profile here with the one that the service holds."
_ENABLE: Final = "Ask the operator whether the panel should get this."
_CLOSED: Final = "Nothing to do. Read quotas more often, or follow notifications, to see it sooner."
_MEMBER: Final = "Check whether the member is registered and active at the service."
_CAP: Final = "Give such members fewer invites: fill the column invites_left."
_USED_UP: Final = "The partner's share of the survey is used up."
_SCREENED_OUT: Final = "The member was screened out before: fill the column exclude_surveys."
_PANEL: Final = (
    "Check the PanelGUID and the key, then ask the operator. The campaign continues when it is run again."
)

_ADVICE: Final[Mapping[Lesson, Mapping[int, str]]] = {
    Lesson.STOP: {
        ResultCode.PANEL_DOES_NOT_EXIST: _PANEL,
        ResultCode.PANEL_NOT_ES_ENABLED: _PANEL,
        ResultCode.NO_PANEL_GUID: _PANEL,
        ResultCode.PANEL_INVALID_ES_REQUEST: _PANEL,
    },
    Lesson.QUOTA: {
        ResultCode.QUOTA_NOT_LIVE: _CLOSED,
        ResultCode.QUOTA_FULL: _CLOSED,
        ResultCode.NO_QUOTA_ID: "The quota is gone: read the inventory again.",
        ResultCode.QUOTA_NOT_ES_ENABLED: _ENABLE,
        ResultCode.INTERVALLIC_QUOTA_NOTAVAILBLE: "The quota opens again later: top up then.",
        ResultCode.STARTS_THRESHOLD_ACHIEVED: "Temporary: top up later.",
        ResultCode.SUB_QUOTA_FULL: "A group of the quota is full; read the inventory again, then top up.",
        ResultCode.IP_EXTERNAL_RESPONDENTTYPE_FULL: _CLOSED,
        ResultCode.MEMBER_DOES_NOT_MATCH_QUOTA: _PROFILE,
    },
    Lesson.SURVEY: {
        ResultCode.SURVEY_DOES_NOT_EXIST: _CLOSED,
        ResultCode.SURVEY_NOT_FOR_RECONTACT: "Ask the operator: the survey is no recontact.",
        ResultCode.SURVEY_NOT_ENABLED_FOR_IP_ES: _ENABLE,
        ResultCode.SURVEY_NOT_AVAILABLE_FOR_PARTNER: _ENABLE,
        ResultCode.IP_PROVIDER_COST_NOMATCH: "Compare the agreed prices with the operator.",
        ResultCode.SURVEY_COMPLETES_CAP_ACHIEVED: _CLOSED,
        ResultCode.SURVEY_IPPARTNER_COMPLETES_ALLOCATION_ACHIEVED: _USED_UP,
    },
    Lesson.MEMBER: {
        ResultCode.NO_MEMBER_FOUND: _MEMBER,
        ResultCode.NO_MEMBER_CODE: _MEMBER,
        ResultCode.MEMBER_NOT_ROUTABLE: _MEMBER,
        ResultCode.MEMBER_BLOCKED: "The service has blocked the member: leave it out.",
        ResultCode.MEMBER_NOT_ACTIVE: _MEMBER,
        ResultCode.MAX_DAILY_EXCEEDED: _CAP,
        ResultCode.MAX_WEEKLY_EXCEEDED: _CAP,
        ResultCode.UNABLE_TO_GET_GID: _MEMBER,
        ResultCode.MEMBER_GID_NOT_AVAILABLE: _MEMBER,
    },
    Lesson.MEMBER_SURVEY: {
        ResultCode.SURVEY_TAKEN: "Fill the column exclude_surveys with what the member holds or took.",
        ResultCode.ACCOUNT_GROUP_SURVEY_TAKEN: "The member took a related survey.",
        ResultCode.EXCLUDED_SURVEY_TAKEN: "Fill the column participations.",
        ResultCode.DEVICETYPE_NOT_SUPPORTED_FOR_SURVEY: "Fill the column device_type.",
        ResultCode.SURVEY_EXCLUDED: "Excluded by settings: ask the operator which.",
        ResultCode.SURVEY_STUDY_TYPE_EXCLUDED: "Excluded by settings of the panel.",
        ResultCode.SURVEY_CUSTOMER_EXCLUDED: "Excluded by settings of the panel.",
        ResultCode.SURVEY_LOI_MISMATCH: "The survey is too long for these settings.",
        ResultCode.SURVEY_VERIFICATION_LEVEL_FAILED: _MEMBER,
        ResultCode.PREVIOUSLY_TERMINATED_SCREENER: _SCREENED_OUT,
    },
    Lesson.PAIR: {
        ResultCode.NON_QUOTA_DEMOGRAPHIC_REJECTION: _PROFILE,
        ResultCode.NO_RECONTACT_GID: "Read the recontact list into the index before planning.",
    },
    Lesson.LATER: {ResultCode.TECHNICAL_ERROR: "A fault of the service: tell the operator if it stays."},
}
_IN_A_ROW: Final[Mapping[int, int]] = {
    ResultCode.SUB_QUOTA_FULL: 3,
    ResultCode.IP_EXTERNAL_RESPONDENTTYPE_FULL: 3,
    # One member may differ from what the panel says. Many in a row mean that the quota requires something else
    # than is matched here, and all others would be refused too.
    ResultCode.MEMBER_DOES_NOT_MATCH_QUOTA: 20,
}
LESSONS: Final[Mapping[int, Rule]] = MappingProxyType(
    {
        code: Rule(lesson, advice, in_a_row=_IN_A_ROW.get(code, 1))
        for lesson, codes in _ADVICE.items()
        for code, advice in codes.items()
    }
)
"""What each result code says, for campaigns and routers. `Campaign(lessons=...)` replaces some or all of it."""


def rules_of(lessons: Mapping[int, Rule | Lesson] | None) -> Mapping[int, Rule]:
    """Return the table with a user's changes."""
    if lessons is None:
        return LESSONS
    made: dict[int, Rule] = dict(LESSONS)
    for code, rule in lessons.items():
        if not isinstance(rule, Rule):
            # The advice of the table still helps, whatever else is done about the code.
            rule = Rule(rule, made[code].advice if code in made else "")  # noqa: PLW2901
        made[code] = rule
    return made


def rule_for(rules: Mapping[int, Rule], code: int | None) -> Rule:
    """Return the rule of a code; an unknown one is about its pair only."""
    return _UNKNOWN if code is None else rules.get(code, _UNKNOWN)


_WEIGHT: Final = 20.0
_PERCENT: Final = 100.0


def qualifying(survey: Survey) -> float:
    """Return the share of people who qualify, from 0 to 1. Real bodies have an IR of 0, which is not known."""
    return min(survey.ir, _PERCENT) / _PERCENT if survey.ir > 0 else 1.0


@frozen(kw_only=True)
class LearnedRates:
    """The share of invites that end in a complete, by quota and survey, as `OutcomeLedger.rates` returns it.

    Few invites say little. So `weight` invites are added to those of a quota, with the share of its survey, and
    to those of a survey, with its incidence rate times `follow`. For example, 2 of 5 invites of a quota ended
    in a complete, and the share of its survey is 10 %. With a `weight` of 20, the share of the quota is then
    (2 + 20 x 0.1) / (5 + 20), which is 16 %.

    Attributes:
        surveys: The number of invites, and of those that ended in a complete, by survey ID.
        quotas: The same by quota ID.
        weight: How many invites are added, see above.
        follow: The share of invites that members follow. `fitted` derives it.
    """

    surveys: Mapping[int, tuple[int, int]] = field(factory=dict[int, tuple[int, int]], repr=False)
    quotas: Mapping[int, tuple[int, int]] = field(factory=dict[int, tuple[int, int]], repr=False)
    weight: float = field(default=_WEIGHT, validator=positive)
    follow: float = field(default=1.0, validator=not_negative)

    def chance(self, survey: Survey, quota_id: int | None = None) -> float:
        """Return the chance that an invite ends in a complete, from 0 to 1: of a quota, or of its survey."""
        chance = self._drawn(self.surveys.get(survey.survey_id), min(1.0, self.follow * qualifying(survey)))
        return chance if quota_id is None else self._drawn(self.quotas.get(quota_id), chance)

    def _drawn(self, counts: tuple[int, int] | None, expected: float) -> float:
        invites, completes = counts or (0, 0)
        return min(1.0, (completes + self.weight * expected) / (invites + self.weight))

    def fitted(self, surveys: Iterable[Survey]) -> LearnedRates:
        """Return these rates with the `follow` that the invites of some surveys show.

        Surveys without invites then have the share IR times `follow`.
        """
        completes, expected = self.weight, self.weight
        for survey in {each.survey_id: each for each in surveys}.values():
            invites, completed = self.surveys.get(survey.survey_id, (0, 0))
            completes += completed
            expected += invites * qualifying(survey)
        return evolve(self, follow=completes / expected)
