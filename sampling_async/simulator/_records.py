"""What the ledger holds: invites and requests."""

from __future__ import annotations

from array import array

from attrs import field, frozen

from sampling_async._errors import Endpoint


@frozen
class LedgerEntry:
    """One invite of the ledger.

    Attributes:
        sequence_number: Its place in the ledger, from 0.
        panel_guid: The panel of the member.
        member_code: The member invited.
        quota_id: The quota invited to.
        survey_id: The survey of the quota, with `wave_id`.
        wave_id: The wave of the survey.
        endpoint: `bulk_invite` or `generate_invite`.
        url: The link that was made, different for every invite.
        request_number: The request it was made for, see `RequestRecord.number`.
    """

    sequence_number: int
    panel_guid: str
    member_code: str
    quota_id: int
    survey_id: int
    wave_id: int
    endpoint: Endpoint
    url: str
    request_number: int


@frozen
class RequestRecord:
    """One request that reached the service.

    Attributes:
        number: Requests are numbered from 0 in the order they arrive, those no longer recorded included.
        endpoint: The endpoint it asked.
        member_code: The member it named, or None.
        quota_ids: The quota IDs it named, in its order.
        status: The HTTP status of the answer; None when the connection was cut before one.
        is_processed: False when a fault kept the request from having any effect.
    """

    number: int
    endpoint: Endpoint
    member_code: str | None
    _quota_ids: array[int] = field(alias="quota_ids")
    status: int | None
    is_processed: bool

    @property
    def quota_ids(self) -> tuple[int, ...]:
        """The quota IDs it named, in its order."""
        return tuple(self._quota_ids)
