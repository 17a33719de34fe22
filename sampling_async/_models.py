"""The records of the contract, as frozen values that know nothing of JSON.

Field names are the contract's in snake_case, lists are tuples. How they look on the wire, and what is
tolerated there, is `_codec`'s business alone.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final

from attrs import field, frozen


def hidden(_value: object) -> str:
    """Stand in for a value that may not be printed: a member code, an invite link, a secret."""
    return "<hidden>"


def _count(values: tuple[object, ...]) -> str:
    return f"<{len(values)} hidden>"


@frozen
class Price:
    """What the operator pays for a complete ("Price object").

    `amount` is in units of the currency that `currency_id` names in the reference data.
    """

    amount: float
    currency_id: int


@frozen
class QuestionAndAnswers:
    """One condition of a sub-quota ("QuestionAndAnswers object"): at least one answer must match.

    `answer_values` holds one value each, however the wire packed them: an age range (`"18-34"`), a DMA or MSA
    answer ID, a postal code or its beginning. The service exposes the first 1000 postal codes only, so in a
    list that long a miss means nothing. `is_routable` is True when the service asks members who have not
    answered; a body that does not say counts as False.
    """

    question_id: int
    answer_ids: tuple[int, ...] = ()
    answer_values: tuple[str, ...] = ()
    is_routable: bool = False


@frozen
class SubQuota:
    """One target group of a layer ("SubQuota object"); open while completes are below the maximum."""

    sub_quota_id: int
    current_completes: int
    max_target_completes: int
    questions_and_answers: tuple[QuestionAndAnswers, ...]


@frozen
class Layer:
    """A group of sub-quotas ("Layer object"), exactly one of which a member must match."""

    layer_id: int
    sub_quotas: tuple[SubQuota, ...]


@frozen
class Quota:
    """An open quota ("Quota object"); a member must match all its layers. Counts are completes."""

    quota_id: int
    completes_required: int
    estimated_completes_remaining: int
    layers: tuple[Layer, ...]


@frozen
class SurveyWaveExclusion:
    """Members with one of these participations are excluded (item of SurveyWaveExclusions).

    `wave_id` 0 means any wave of the survey. The item is not part of the written contract; its fields are
    those seen in real bodies.
    """

    survey_id: int
    wave_id: int
    participation_status_ids: tuple[int, ...] = ()


@frozen
class Participation:
    """A survey that a member took part in, as exclusions name it: what a partner knows, not part of any body.

    `status_id` is 1 started, 3 terminated, 9 qualified or 10 quota full.
    """

    survey_id: int
    wave_id: int
    status_id: int = 9


@frozen
class Survey:
    """A survey with open quotas ("Survey object"); `survey_id` with `wave_id` is unique.

    `loi` is in minutes, `ir` in percent. `scheduled_completion_date` carries no zone when the wire gave none,
    and open surveys are often past it. `survey_name` is None where the body does not give one.
    """

    survey_id: int
    wave_id: int
    loi: int
    ir: int
    study_type_id: int
    scheduled_completion_date: datetime
    device_type_ids: tuple[int, ...]
    is_survey_recontact: bool
    completes_required: int
    estimated_completes_remaining: int
    price: Price
    quotas: tuple[Quota, ...]
    survey_name: str | None = None
    survey_wave_exclusions: tuple[SurveyWaveExclusion, ...] = ()


@frozen
class Quotas:
    """The open inventory of a panel ("Quotas response").

    `cache_expires` has been seen to mean both "expires" and "last updated": nothing should depend on it.
    """

    country_id: int
    cache_expires: datetime
    surveys: tuple[Survey, ...]


@frozen
class Invite:
    """An invite of one member to one quota ("Invite object").

    Price, LOI (minutes) and IR (percent) are those of the moment the invite was made, and count over those of
    Get Quotas. `member_amount` is None where the service leaves it out. `url` identifies the member, so it is
    hidden in the repr.
    """

    survey_id: int
    wave_id: int
    quota_id: int
    partner_amount: float
    url: str = field(repr=hidden)
    loi: int
    ir: int
    member_amount: float | None = None


@frozen
class RecontactMembers:
    """One page of the members wanted back for a recontact quota ("Recontact members response").

    `max_results` may echo the number asked for: count `member_codes` instead. They are hidden in the repr.
    """

    max_results: int
    has_additional_members: bool
    member_codes: tuple[str, ...] = field(repr=_count)


REFERENCE_DATA_KEY: Final = "Reference Data API Auth Key"


@frozen(repr=False)
class Setting:
    """One partner setting ("Setting object"); `value` is None when unset.

    The value of the Reference Data API Auth Key is a secret and hidden in the repr.
    """

    name: str
    description: str = ""
    value: str | None = None

    @property
    def is_secret(self) -> bool:
        """Whether the value must not be shown: it is the key of the reference data interface."""
        return folded(self.name) == folded(REFERENCE_DATA_KEY)

    def __repr__(self) -> str:
        value = "<hidden>" if self.is_secret and self.value else repr(self.value)
        return f"Setting(name={self.name!r}, description={self.description!r}, value={value})"


def folded(name: str) -> str:
    """Return a setting's name without what drifts: case and blanks."""
    return "".join(name.split()).casefold()


class ResultCode:
    """Result codes of the service, by name.

    Plain ints, because the list is open: the names drift and codes get added. Key on the number, and let an
    unknown one pass. The contract documents 1, 3, 9 and 10; the others were seen in the field.
    """

    SUCCESS: Final = 1
    PANEL_DOES_NOT_EXIST: Final = 3
    PANEL_NOT_ES_ENABLED: Final = 4
    SURVEY_DOES_NOT_EXIST: Final = 5
    SURVEY_NOT_FOR_RECONTACT: Final = 6
    QUOTA_NOT_ES_ENABLED: Final = 8
    QUOTA_NOT_LIVE: Final = 9
    NO_QUOTA_ID: Final = 10
    NO_MEMBER_FOUND: Final = 12
    MEMBER_NOT_ROUTABLE: Final = 13
    MEMBER_BLOCKED: Final = 14
    SURVEY_NOT_ENABLED_FOR_IP_ES: Final = 15
    MEMBER_DOES_NOT_MATCH_QUOTA: Final = 16
    NO_RECONTACT_GID: Final = 17
    NO_PANEL_GUID: Final = 18
    NO_MEMBER_CODE: Final = 19
    PANEL_INVALID_ES_REQUEST: Final = 20
    NON_QUOTA_DEMOGRAPHIC_REJECTION: Final = 21
    MEMBER_NOT_ACTIVE: Final = 22
    SURVEY_STUDY_TYPE_EXCLUDED: Final = 23
    SURVEY_CUSTOMER_EXCLUDED: Final = 24
    SURVEY_EXCLUDED: Final = 25
    ACCOUNT_GROUP_SURVEY_TAKEN: Final = 26
    INTERVALLIC_QUOTA_NOTAVAILBLE: Final = 27
    QUOTA_FULL: Final = 28
    IP_EXTERNAL_RESPONDENTTYPE_FULL: Final = 29
    EXCLUDED_SURVEY_TAKEN: Final = 30
    DEVICETYPE_NOT_SUPPORTED_FOR_SURVEY: Final = 31
    SURVEY_LOI_MISMATCH: Final = 32
    IP_PROVIDER_COST_NOMATCH: Final = 33
    SURVEY_VERIFICATION_LEVEL_FAILED: Final = 34
    PREVIOUSLY_TERMINATED_SCREENER: Final = 35
    TECHNICAL_ERROR: Final = 36
    UNABLE_TO_GET_GID: Final = 37
    SURVEY_TAKEN: Final = 38
    MAX_DAILY_EXCEEDED: Final = 39
    MAX_WEEKLY_EXCEEDED: Final = 40
    SUB_QUOTA_FULL: Final = 41
    SURVEY_NOT_AVAILABLE_FOR_PARTNER: Final = 42
    MEMBER_GID_NOT_AVAILABLE: Final = 43
    STARTS_THRESHOLD_ACHIEVED: Final = 45
    SURVEY_COMPLETES_CAP_ACHIEVED: Final = 46
    SURVEY_IPPARTNER_COMPLETES_ALLOCATION_ACHIEVED: Final = 47

    @classmethod
    def name_of(cls, code: int) -> str | None:
        """Return the constant's name for a code, or None for one this version does not know."""
        return _CODE_NAMES.get(code)


_CODE_NAMES: Final = {code: name for name, code in vars(ResultCode).items() if isinstance(code, int)}
