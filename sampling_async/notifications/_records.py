"""The notifications of the contract's section Events, as frozen values.

The contract names five kinds and shows no payload. The fields here are those that services send. A sixth kind,
reconciliations, is not in the contract: it takes money back.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any, ClassVar, Final, TypeAlias

from attrs import field, frozen

from sampling_async._contract.records import hidden


class Kind(StrEnum):
    """The kinds of notification. The value is the kind's name in URLs and in output.

    Five of them have a setting of Get Settings. A `RECONCILIATION` comes to the URL of another kind.
    """

    INVITE = "invite"
    COMPLETION = "completion"
    TERMINATE = "terminate"
    SURVEY_CLOSED = "survey_closed"
    QUOTA_STATUS = "quota_status"
    RECONCILIATION = "reconciliation"

    @property
    def setting(self) -> str | None:
        """The setting of Get Settings that holds the URL for this kind; None for a `RECONCILIATION`."""
        return SETTINGS.get(self)


SETTINGS: Final[Mapping[Kind, str]] = {
    Kind.INVITE: "Invite Notification URL",
    Kind.COMPLETION: "Completion Notification URL",
    Kind.TERMINATE: "Terminate Notification URL",
    Kind.SURVEY_CLOSED: "Survey Notification URL",
    Kind.QUOTA_STATUS: "Quota Notification URL",
}
"""The kinds that the operator has a URL for, with the settings that hold them."""


@frozen(kw_only=True)
class InviteNotification:
    """The service reports an invite of a member, or requests one.

    No service has published its shape. A body counts as one if it names a member and a survey or a quota.
    """

    kind: ClassVar[Kind] = Kind.INVITE
    member_code: str = field(repr=hidden)
    survey_id: int | None = None
    wave_id: int | None = None
    quota_id: int | None = None
    at: datetime | None = None


@frozen(kw_only=True)
class _OfSurvey:
    """The fields of all notifications about a member's survey."""

    member_code: str = field(repr=hidden)
    survey_id: int
    wave_id: int
    at: datetime | None = None
    quota_id: int | None = None
    survey_ref: str | None = None
    additional_data: str | None = field(default=None, repr=hidden)
    is_auto_routed: bool | None = None
    original_survey_id: int | None = None


@frozen(kw_only=True)
class Completion(_OfSurvey):
    """A member has completed a survey. A member, survey and wave have one completion, and its corrections.

    `revenue` is in the currency of the survey's price, which the service does not name here; it sends whole
    hundredths. `additional_data` is the whole query string of the invite URL. Older partners get no wave:
    `wave_id` is 0 then, and `Fact.anomaly` says so.
    """

    kind: ClassVar[Kind] = Kind.COMPLETION
    revenue: Decimal


@frozen(kw_only=True)
class Terminate(_OfSurvey):
    """A member's survey has ended without a complete; `reason` is the service's text."""

    kind: ClassVar[Kind] = Kind.TERMINATE
    reason: str | None = None
    rejection_id: int | None = None
    rejection_name: str | None = None


@frozen(kw_only=True)
class Reconciliation(_OfSurvey):
    """Money of a completion is taken back. It never counts as a completion or a terminate.

    `reconciliation_id` is the service's text, or without one the time of the reconciliation; with the same one,
    a member's reconciliation is a repetition.
    `amount` is what is taken back, 0 or more, in the currency of the revenue; None if the service does not
    say: then it is the whole revenue of the completion.
    """

    kind: ClassVar[Kind] = Kind.RECONCILIATION
    reconciliation_id: str
    amount: Decimal | None = None
    reason: str | None = None


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
    """A quota is live or not since `at`. Of several statuses, the one with the newest `at` is true.

    `at` is None for a closing without a readable time: it counts from the moment of receipt.
    """

    kind: ClassVar[Kind] = Kind.QUOTA_STATUS
    quota_id: int
    is_live: bool
    at: datetime | None
    survey_id: int | None = None
    wave_id: int | None = None


@frozen(kw_only=True)
class UnknownNotification:
    """A notification that was not understood: its body, and the reason.

    It was posted to the URL of `kind`, by a sender who knows that URL.
    """

    kind: Kind
    body: bytes = field(repr=lambda body: f"<{len(body)} bytes>")
    reason: str


Notification: TypeAlias = (
    InviteNotification
    | Completion
    | Terminate
    | Reconciliation
    | SurveyClosed
    | QuotaStatus
    | UnknownNotification
)
"""The record of a fact."""

Fields: TypeAlias = Mapping[str, Any]
"""The fields of a notification, with the names and values as received."""
