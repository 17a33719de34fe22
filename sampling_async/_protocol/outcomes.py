"""The outcome of one quota ID of a bulk invite."""

from __future__ import annotations

from typing import Literal, TypeAlias

from sampling_async._contract.errors import SamplingError
from sampling_async._contract.records import Invite
from sampling_async._contract.structs import FrozenStruct, seen_by_attrs

OutcomeStatus: TypeAlias = Literal["invited", "rejected", "not_sent", "unknown"]
"""See `InviteOutcome.status`."""


@seen_by_attrs(hides="member_code")
class InviteOutcome(FrozenStruct, frozen=True):
    """The outcome of one quota ID for one member.

    Attributes:
        member_code: The member; hidden in the repr.
        quota_id: The requested quota ID.
        status: `invited`: the service made an invite. `rejected`: it returned another result code for this ID.
            `not_sent`: no byte was sent, or the whole call was refused without being processed, so it is safe
            to send the ID again. `unknown`: the ID was sent and no usable response came, so an invite may
            exist.
        invite: The invite if `invited`, else None.
        result_code: The service's result code for this ID or for the refused call; None if there was none.
        result: The service's name for the code. Names change, so compare the code.
        error: The failure that caused `not_sent` or `unknown`, or None if there was none.
        anomaly: A description of something unexpected in the response, else None.
        replayed: Whether the outcome came from a journal, which an earlier run had written. A run is one
            stream, from its entering to its end. Nothing was sent for this ID in the current run.
    """

    member_code: str
    quota_id: int
    status: OutcomeStatus
    invite: Invite | None = None
    result_code: int | None = None
    result: str | None = None
    error: SamplingError | None = None
    anomaly: str | None = None
    replayed: bool = False
