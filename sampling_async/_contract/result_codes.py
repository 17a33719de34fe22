"""The result codes of the service."""

from __future__ import annotations

from typing import Final


class ResultCode:
    """Result codes of the service, by name.

    The codes are plain ints and not an enum, because the list is open: names change and codes are added.
    Compare numbers, not names, and accept unknown numbers. The contract documents 1, 3, 9 and 10; the others
    were seen in use.
    """

    # The spelling of each name is the service's own, mistakes included.
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
        """Return the name of a code, or None if this version does not know the code."""
        return _CODE_NAMES.get(code)


_CODE_NAMES: Final = {code: name for name, code in vars(ResultCode).items() if name.isupper()}
