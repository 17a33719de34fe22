"""The outcomes of a bulk invite: one for every requested quota ID.

Outcome objects are created lazily, from the items of a response, when they are read. Most are read once or
never: a partner uses the invites and counts the rejected IDs. Items cost less than outcomes, and the garbage
collector does not visit them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, overload

import msgspec
from attrs import field, frozen

from sampling_async._contract.errors import SamplingError
from sampling_async._contract.records import Invite, hidden
from sampling_async._json.drafts import draft_of
from sampling_async._json.fast import WireItem

if TYPE_CHECKING:
    from collections.abc import Iterator


OutcomeStatus: TypeAlias = Literal["invited", "rejected", "not_sent", "unknown"]
"""See `InviteOutcome.status`."""


@frozen
class InviteOutcome:
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

    member_code: str = field(repr=hidden)
    quota_id: int
    status: OutcomeStatus
    invite: Invite | None = None
    result_code: int | None = None
    result: str | None = None
    error: SamplingError | None = None
    anomaly: str | None = None
    replayed: bool = False


# `gc=False`: the garbage collector does not visit these objects, nor containers that hold nothing else. There
# may be a million of them.
class Failure(msgspec.Struct, frozen=True, gc=False):
    """The failure of a request: one object for all its quota IDs."""

    status: OutcomeStatus
    result_code: int | None
    result: str | None
    error: SamplingError

    def of(self, member_code: str, quota_id: int) -> InviteOutcome:
        """Return the outcome of one quota ID of the request."""
        status, code, result, error = self.status, self.result_code, self.result, self.error
        return InviteOutcome(member_code, quota_id, status, None, code, result, error)


RawOutcome: TypeAlias = "InviteOutcome | WireItem | Failure"
"""The result of one quota ID: an outcome, an item of a response that needs no explanation, or a failure."""

_Outcome: Final = draft_of(InviteOutcome)
_Invite: Final = draft_of(Invite)


def made(member_code: str, quota_ids: Iterable[int], answers: Iterable[RawOutcome]) -> Iterator[InviteOutcome]:
    """Yield the outcomes for a member's quota IDs and their results, in the same order."""
    # Drafts, and each field by hand: this runs once for each quota ID of a bulk, see `draft_of`.
    new: Any = object.__new__
    for quota_id, answer in zip(quota_ids, answers, strict=False):
        if not isinstance(answer, WireItem):
            yield answer if isinstance(answer, InviteOutcome) else answer.of(member_code, quota_id)
            continue
        item = answer
        came = item.Invite
        outcome = new(_Outcome)
        if came is None:
            outcome.status = "rejected"
            outcome.invite = None
        else:
            invite = new(_Invite)
            invite.survey_id = came.SurveyID
            invite.wave_id = came.WaveID
            invite.quota_id = came.QuotaID
            invite.partner_amount = came.PartnerAmount
            invite.url = came.URL
            invite.loi = came.LOI
            invite.ir = came.IR
            invite.member_amount = came.MemberAmount
            invite.__class__ = Invite
            outcome.status = "invited"
            outcome.invite = invite
        outcome.member_code = member_code
        outcome.quota_id = item.QuotaID
        outcome.result_code = item.ResultCode
        outcome.result = item.Result
        outcome.error = outcome.anomaly = None
        outcome.replayed = False
        outcome.__class__ = InviteOutcome
        yield outcome


class BulkInviteResult(Sequence[InviteOutcome]):
    """The outcomes of a bulk invite: one for each quota ID given, in the caller's order.

    `len(result.invited) + len(result.rejected) + len(result.not_sent) + len(result.unknown) == len(result)`,
    whatever happened. Outcome objects are created when they are read: reading one again gives an equal object,
    which may not be the same one.

    Attributes:
        unrequested: Outcomes that the service returned for unrequested quota IDs; the latest 10,000.
    """

    __slots__ = ("_answers", "_member_code", "_quota_ids", "unrequested")

    def __init__(
        self,
        outcomes: Iterable[RawOutcome],
        unrequested: Iterable[InviteOutcome] = (),
        *,
        member_code: str = "",
        quota_ids: tuple[int, ...] | None = None,
    ) -> None:
        """Store the results of a bulk invite.

        Args:
            outcomes: The outcomes. The client itself also gives items of responses and failures.
            unrequested: See the class.
            member_code: The member; required with items or failures.
            quota_ids: The quota IDs in the order of `outcomes`; required with items or failures.
        """
        self._answers = tuple(outcomes)
        self._member_code = member_code
        given = (outcome.quota_id for outcome in self._answers if isinstance(outcome, InviteOutcome))
        self._quota_ids = tuple(given) if quota_ids is None else quota_ids
        self.unrequested = tuple(unrequested)

    def __repr__(self) -> str:
        return (
            f"<BulkInviteResult invited={self._count('invited')} rejected={self._count('rejected')} "
            f"not_sent={self._count('not_sent')} unknown={self._count('unknown')} "
            f"unrequested={len(self.unrequested)}>"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BulkInviteResult):
            return NotImplemented
        return tuple(self) == tuple(other) and self.unrequested == other.unrequested

    __hash__ = None  # type: ignore[assignment]  # outcomes carry exceptions, which compare by identity

    def __reduce__(self) -> tuple[type[BulkInviteResult], tuple[object, ...]]:
        return BulkInviteResult, (tuple(self), self.unrequested)

    def __len__(self) -> int:
        return len(self._answers)

    def __iter__(self) -> Iterator[InviteOutcome]:
        return made(self._member_code, self._quota_ids, self._answers)

    @overload
    def __getitem__(self, index: int) -> InviteOutcome: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[InviteOutcome, ...]: ...
    def __getitem__(self, index: int | slice) -> InviteOutcome | tuple[InviteOutcome, ...]:
        if isinstance(index, slice):
            return tuple(made(self._member_code, self._quota_ids[index], self._answers[index]))
        return next(made(self._member_code, (self._quota_ids[index],), (self._answers[index],)))

    def _having(self, status: OutcomeStatus) -> tuple[InviteOutcome, ...]:
        having = tuple(self._answers_having(status))
        return tuple(made(self._member_code, *zip(*having, strict=True))) if having else ()

    def _count(self, status: OutcomeStatus) -> int:
        return sum(1 for _ in self._answers_having(status))

    def _answers_having(self, status: OutcomeStatus) -> Iterator[tuple[int, RawOutcome]]:
        # An item has no status. It is `invited` with an invite and `rejected` without one, and never another.
        as_items = {"invited": True, "rejected": False}.get(status)
        for quota_id, answer in zip(self._quota_ids, self._answers, strict=True):
            if isinstance(answer, InviteOutcome | Failure):
                if answer.status == status:
                    yield quota_id, answer
            elif (answer.Invite is not None) is as_items:
                yield quota_id, answer

    @property
    def invited(self) -> tuple[InviteOutcome, ...]:
        """Outcomes with an invite."""
        return self._having("invited")

    @property
    def invites(self) -> tuple[Invite, ...]:
        """The invites of the outcomes in `invited`, in their order."""
        return tuple(outcome.invite for outcome in self.invited if outcome.invite is not None)

    @property
    def rejected(self) -> tuple[InviteOutcome, ...]:
        """Outcomes with a result code other than 1."""
        return self._having("rejected")

    @property
    def not_sent(self) -> tuple[InviteOutcome, ...]:
        """Outcomes whose IDs had no effect at the service: they are safe to send again."""
        return self._having("not_sent")

    @property
    def unknown(self) -> tuple[InviteOutcome, ...]:
        """Outcomes whose invites may exist but were not received: sending again may make second invites."""
        return self._having("unknown")

    def resendable(self) -> tuple[int, ...]:
        """Return the quota IDs that are safe to send again: those of `not_sent`, each once, in their order."""
        return tuple(dict.fromkeys(outcome.quota_id for outcome in self.not_sent))

    def raise_for_incomplete(self) -> None:
        """Raise an error if any quota ID is neither invited nor rejected.

        Raises:
            IncompleteBulkError: An outcome is `not_sent` or `unknown`. The error holds this result.
        """
        not_sent, unknown = self._count("not_sent"), self._count("unknown")
        if not_sent or unknown:
            raise IncompleteBulkError(
                f"{not_sent} of {len(self)} quota IDs were not sent, and {unknown} have an unknown outcome; "
                "resendable() gives those that are safe to send again",
                bulk_result=self,
            )


class IncompleteBulkError(SamplingError):
    """Some quota IDs of a bulk invite are neither invited nor rejected (but `not_sent` or `unknown`).

    Attributes:
        bulk_result: The whole result, with the invited and rejected IDs.
    """

    bulk_result: BulkInviteResult

    def __init__(self, message: str = "", *, bulk_result: BulkInviteResult | None = None) -> None:
        super().__init__(message, endpoint="bulk_invite", delivery="unknown")
        if bulk_result is not None:
            self.bulk_result = bulk_result
