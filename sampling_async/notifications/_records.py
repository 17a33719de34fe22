"""The notifications of the contract's section Events, as frozen values.

The contract names five kinds and shows no payload. The fields here are those that services send.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any, ClassVar, TypeAlias

from attrs import field, frozen

from sampling_async._contract.records import hidden


class Kind(StrEnum):
    """The five kinds of notification. The value is the kind's name in URLs and in output."""

    INVITE = "invite"
    COMPLETION = "completion"
    TERMINATE = "terminate"
    SURVEY_CLOSED = "survey_closed"
    QUOTA_STATUS = "quota_status"

    @property
    def setting(self) -> str:
        """The setting of Get Settings that holds the URL for this kind."""
        return _SETTINGS[self]


_SETTINGS = {
    Kind.INVITE: "Invite Notification URL",
    Kind.COMPLETION: "Completion Notification URL",
    Kind.TERMINATE: "Terminate Notification URL",
    Kind.SURVEY_CLOSED: "Survey Notification URL",
    Kind.QUOTA_STATUS: "Quota Notification URL",
}


@frozen(kw_only=True)
class InviteNotification:
    """The service tells of an invite of a member, or asks for one.

    No service has published its shape. A body counts as one if it names a member and a survey or a quota.
    """

    kind: ClassVar[Kind] = Kind.INVITE
    member_code: str = field(repr=hidden)
    survey_id: int | None = None
    wave_id: int | None = None
    quota_id: int | None = None
    at: datetime | None = None


@frozen(kw_only=True)
class Completion:
    """A member has completed a survey. A member, survey and wave have one completion, and its corrections.

    `revenue` is in units of the currency; it comes as a whole number of hundredths. `additional_data` is the
    whole query string of the invite URL.
    """

    kind: ClassVar[Kind] = Kind.COMPLETION
    member_code: str = field(repr=hidden)
    survey_id: int
    wave_id: int
    revenue: Decimal
    at: datetime | None = None
    quota_id: int | None = None
    survey_ref: str | None = None
    additional_data: str | None = field(default=None, repr=hidden)
    is_auto_routed: bool | None = None
    original_survey_id: int | None = None


@frozen(kw_only=True)
class Terminate:
    """A member's survey has ended without a complete; `reason` is the service's text."""

    kind: ClassVar[Kind] = Kind.TERMINATE
    member_code: str = field(repr=hidden)
    survey_id: int
    wave_id: int
    reason: str | None = None
    at: datetime | None = None
    quota_id: int | None = None
    survey_ref: str | None = None
    additional_data: str | None = field(default=None, repr=hidden)
    rejection_id: int | None = None
    rejection_name: str | None = None
    is_auto_routed: bool | None = None
    original_survey_id: int | None = None


@frozen(kw_only=True)
class SurveyClosed:
    """A survey was closed; `wave_id` is the wave, or None if the service did not say."""

    kind: ClassVar[Kind] = Kind.SURVEY_CLOSED
    survey_id: int
    wave_id: int | None = None
    survey_ref: str | None = None
    at: datetime | None = None


@frozen(kw_only=True)
class QuotaStatus:
    """A quota is live or not since `at`. Of several, the one with the newest `at` is true."""

    kind: ClassVar[Kind] = Kind.QUOTA_STATUS
    quota_id: int
    is_live: bool
    at: datetime
    survey_id: int | None = None
    wave_id: int | None = None


@frozen(kw_only=True)
class UnknownNotification:
    """A notification that was not understood: its body, and the reason.

    It was posted to the URL of `kind`, by somebody who knows that URL. Nothing more is known of it.
    """

    kind: Kind
    body: bytes = field(repr=lambda body: f"<{len(body)} bytes>")
    reason: str


Notification: TypeAlias = (
    InviteNotification | Completion | Terminate | SurveyClosed | QuotaStatus | UnknownNotification
)
"""What a fact tells."""

Fields: TypeAlias = Mapping[str, Any]
"""The fields of a notification, with the names and values that came."""
