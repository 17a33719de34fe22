"""How a bulk invite ends: one outcome for every quota ID asked.

An outcome is made of the item of a reply when somebody looks at it. Most are looked at once or never: a partner
takes the invites and counts the rest. Kept as they came, items cost less, and the garbage collector, which has
to visit every record, does not see them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, overload

import msgspec
from attrs import field, frozen

from sampling_async._drafts import draft_of
from sampling_async._errors import IncompleteBulkError, SamplingError
from sampling_async._fastlane import WireItem
from sampling_async._models import Invite, hidden

if TYPE_CHECKING:
    from collections.abc import Iterator


OutcomeStatus: TypeAlias = Literal["invited", "rejected", "not_sent", "unknown"]
"""See `InviteOutcome.status`."""


@frozen
class InviteOutcome:
    """What became of one quota ID for one member.

    Attributes:
        member_code: The member; hidden in the repr.
        quota_id: The quota ID asked for.
        status: `invited`, the service made an invite; `rejected`, it answered for this ID with another code;
            `not_sent`, no byte left or the whole call was refused unprocessed, so it is safe to send again;
            `unknown`, it was sent and no usable answer came: an invite may exist.
        invite: The invite when `invited`, else None.
        result_code: The service's number for this ID, or for the refused call; None if there was none.
        result: The service's name for it; names drift, so key on the number.
        error: Why it is `not_sent` or `unknown`, where a failure was the cause, else None.
        anomaly: What was odd about the answer, in words, else None.
        replayed: Whether it was handed over from a journal of a run before: nothing was sent for it in this
            one, a run being one stream from its entering to its end.
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


class Failure(msgspec.Struct, frozen=True, gc=False):  # so what holds a million of them needs no look either
    """Why quota IDs of a request have no answer: one for all of them."""

    status: OutcomeStatus
    result_code: int | None
    result: str | None
    error: SamplingError

    def of(self, member_code: str, quota_id: int) -> InviteOutcome:
        """Return the outcome of one of the quota IDs."""
        status, code, result, error = self.status, self.result_code, self.result, self.error
        return InviteOutcome(member_code, quota_id, status, None, code, result, error)


Answer: TypeAlias = "InviteOutcome | WireItem | Failure"
"""What became of a quota ID: an outcome, the item of a reply that says it without a doubt, or a failure."""

_Outcome: Final = draft_of(InviteOutcome)
_Invite: Final = draft_of(Invite)


def made(member_code: str, quota_ids: Iterable[int], answers: Iterable[Answer]) -> Iterator[InviteOutcome]:
    """Make outcomes of what became of a member's quota IDs."""
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
    whatever happened on the way. Outcomes are made when they are looked at: each look gives equal ones, which
    need not be the same objects.

    Attributes:
        unrequested: Answers of the service under quota IDs that nobody asked for; the latest 10,000.
    """

    __slots__ = ("_answers", "_member_code", "_quota_ids", "unrequested")

    def __init__(
        self,
        outcomes: Iterable[Answer],
        unrequested: Iterable[InviteOutcome] = (),
        *,
        member_code: str = "",
        quota_ids: tuple[int, ...] | None = None,
    ) -> None:
        """Hold outcomes.

        Args:
            outcomes: Outcomes; of a request also the items of replies that say them, which the client has.
            unrequested: See above.
            member_code: The member, where there are such items.
            quota_ids: What was asked, in the order of `outcomes`, where there are such items.
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

    def _answers_having(self, status: OutcomeStatus) -> Iterator[tuple[int, Answer]]:
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
        """The invites themselves, in the order of `invited`."""
        return tuple(outcome.invite for outcome in self.invited if outcome.invite is not None)

    @property
    def rejected(self) -> tuple[InviteOutcome, ...]:
        """Outcomes the service answered with a code other than 1."""
        return self._having("rejected")

    @property
    def not_sent(self) -> tuple[InviteOutcome, ...]:
        """Outcomes that surely had no effect: safe to send again."""
        return self._having("not_sent")

    @property
    def unknown(self) -> tuple[InviteOutcome, ...]:
        """Outcomes that may have an invite nobody has read: sending again may make a second one."""
        return self._having("unknown")

    def resendable(self) -> tuple[int, ...]:
        """Return the quota IDs that are safe to send again, each once, in the caller's order."""
        return tuple(dict.fromkeys(outcome.quota_id for outcome in self.not_sent))

    def raise_for_incomplete(self) -> None:
        """Raise if any quota ID ended without an answer.

        Raises:
            IncompleteBulkError: Some outcome is `not_sent` or `unknown`; the error carries this result.
        """
        not_sent, unknown = self._count("not_sent"), self._count("unknown")
        if not_sent or unknown:
            raise IncompleteBulkError(
                f"of {len(self)} quota IDs {not_sent} were not sent and {unknown} have an unknown outcome; "
                "resendable() gives those that are safe to send again",
                bulk_result=self,
            )
