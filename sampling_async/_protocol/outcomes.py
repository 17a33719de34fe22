"""The outcomes of a bulk invite: one for every requested quota ID.

Outcome objects are created lazily, from the items of a response, when they are read. Most are read once or
never: a partner uses the invites and counts the rejected IDs. Items cost less than outcomes, and the garbage
collector does not visit them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat, starmap
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, overload

import msgspec
from attrs import field, frozen

from sampling_async._contract.errors import SamplingError
from sampling_async._contract.records import Invite, ResultCode, hidden
from sampling_async._contract.timing import Timed
from sampling_async._json.drafts import draft_of
from sampling_async._json.fast import WireInvite, WireItem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


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


class Rejection(msgspec.Struct, frozen=True, gc=False):
    """The rejection of a quota ID: one object for all IDs of a response that have the same code and name."""

    result_code: int
    result: str | None


RawOutcome: TypeAlias = "InviteOutcome | WireInvite | WireItem | Rejection | Failure"
"""The result of one quota ID: an outcome, or what one is made of.

A `WireInvite` is an invite whose result has the contract's name, and a `WireItem` is one with another name.
"""

SUCCESS: Final = "SUCCESS"
"""The name of result code 1 (section "Bulk invite result item")."""

_SUCCESS_CODE: Final = int(ResultCode.SUCCESS)
_Outcome: Final = draft_of(InviteOutcome)
_Invite: Final = draft_of(Invite)


def made(member_code: str, quota_ids: Iterable[int], answers: Iterable[RawOutcome]) -> Iterator[InviteOutcome]:
    """Yield the outcomes for a member's quota IDs and their results, in the same order."""
    # Drafts, and each field by hand: this runs once for each quota ID of a bulk, see `draft_of`. `starmap`
    # makes the drafts, because a call from C takes half of the time of one from Python.
    answer: Any
    outcome: Any
    for quota_id, answer, outcome in zip(quota_ids, answers, starmap(_Outcome, repeat(())), strict=False):
        kind = type(answer)
        if kind is Rejection:
            outcome.status = "rejected"
            outcome.invite = None
            outcome.result_code = answer.result_code
            outcome.result = answer.result
        elif kind is WireInvite:
            outcome.status = "invited"
            outcome.invite = _invite_of(answer)
            outcome.result_code = _SUCCESS_CODE
            outcome.result = SUCCESS
        elif kind is WireItem:
            outcome.status = "invited"
            outcome.invite = _invite_of(answer.Invite)
            outcome.result_code = _SUCCESS_CODE
            outcome.result = answer.Result
        else:
            yield answer if isinstance(answer, InviteOutcome) else answer.of(member_code, quota_id)
            continue
        outcome.member_code = member_code
        outcome.quota_id = quota_id
        outcome.error = outcome.anomaly = None
        outcome.replayed = False
        outcome.__class__ = InviteOutcome
        yield outcome


def _invite_of(came: Any) -> Any:
    if type(came) is Invite:
        return came
    invite: Any = _Invite()
    invite.survey_id = came.SurveyID
    invite.wave_id = came.WaveID
    invite.quota_id = came.QuotaID
    invite.partner_amount = came.PartnerAmount
    invite.url = came.URL
    invite.loi = came.LOI
    invite.ir = came.IR
    invite.member_amount = came.MemberAmount
    invite.__class__ = Invite
    return invite


class _Invites(Sequence[Invite]):
    """The invites in some results. Each is created when it is read, as outcomes are."""

    __slots__ = ("_came",)

    def __init__(self, answers: Iterable[RawOutcome]) -> None:
        came = [
            answer if type(answer) is WireInvite else _came_in(answer)
            for answer in answers
            if type(answer) is not Rejection
        ]
        self._came: tuple[Any, ...] = tuple(filter(None, came))

    def __repr__(self) -> str:
        return f"<{len(self)} invites>"

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, _Invites | tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __len__(self) -> int:
        return len(self._came)

    def __iter__(self) -> Iterator[Invite]:
        return map(_invite_of, self._came)

    @overload
    def __getitem__(self, index: int) -> Invite: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Invite, ...]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return tuple(map(_invite_of, self._came[index]))
        return _invite_of(self._came[index])


def _came_in(answer: RawOutcome) -> WireInvite | Invite | None:
    if isinstance(answer, WireItem):
        return answer.Invite
    return answer.invite if isinstance(answer, InviteOutcome) else None


class BulkInviteResult(Timed, Sequence[InviteOutcome]):
    """The outcomes of a bulk invite: one for each quota ID given, in the caller's order.

    `len(result.invited) + len(result.rejected) + len(result.not_sent) + len(result.unknown) == len(result)`,
    whatever happened. Outcome objects are created when they are read: reading one again gives an equal object,
    which may not be the same one.

    Its `timing` is that of the request that ended last, from the beginning of the bulk to the result: the other
    requests ran beside it and ended earlier.

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
        counts = " ".join(f"{status}={number}" for status, number in self.counts.items())
        return f"<BulkInviteResult {counts} unrequested={len(self.unrequested)}>"

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

    def _answers_having(self, status: OutcomeStatus) -> Iterator[tuple[int, RawOutcome]]:
        for quota_id, answer in zip(self._quota_ids, self._answers, strict=True):
            if _status_of(answer) == status:
                yield quota_id, answer

    @property
    def invited(self) -> tuple[InviteOutcome, ...]:
        """Outcomes with an invite."""
        return self._having("invited")

    @property
    def invites(self) -> Sequence[Invite]:
        """The invites of the outcomes in `invited`, in their order. This creates no outcomes."""
        return _Invites(self._answers)

    @property
    def counts(self) -> Mapping[OutcomeStatus, int]:
        """The number of outcomes with each of the four statuses. This creates no outcomes."""
        counted: dict[OutcomeStatus, int] = {"invited": 0, "rejected": 0, "not_sent": 0, "unknown": 0}
        kinds = list(map(type, self._answers))  # two loops in C, which leave little to count in Python
        for kind, status in _STATUSES.items():
            counted[status] += kinds.count(kind)
        if sum(counted.values()) < len(kinds):
            for answer in self._answers:
                if type(answer) not in _STATUSES:
                    counted[_status_of(answer)] += 1
        return counted

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
        counts = self.counts
        not_sent, unknown = counts["not_sent"], counts["unknown"]
        if not_sent or unknown:
            raise IncompleteBulkError(
                f"{not_sent} of {len(self)} quota IDs were not sent, and {unknown} have an unknown outcome; "
                "resendable() gives those that are safe to send again",
                bulk_result=self,
            )


_STATUSES: Final[dict[type[object], OutcomeStatus]] = {
    Rejection: "rejected",
    WireInvite: "invited",
    WireItem: "invited",
}


def tally(answers: Sequence[RawOutcome]) -> tuple[dict[tuple[str, int | None], int], SamplingError | None]:
    """Count results by status and result code, without those from a journal. Also return their first error."""
    counted: dict[tuple[str, int | None], int] = {}
    error: SamplingError | None = None
    for answer in answers:
        if isinstance(answer, WireInvite | WireItem):
            key: tuple[str, int | None] = ("invited", _SUCCESS_CODE)
        elif isinstance(answer, Rejection):
            key = ("rejected", answer.result_code)
        elif isinstance(answer, InviteOutcome) and answer.replayed:
            continue
        else:
            key, error = (answer.status, answer.result_code), error or answer.error
        counted[key] = counted.get(key, 0) + 1
    return counted, error


def _status_of(answer: RawOutcome) -> OutcomeStatus:
    known = _STATUSES.get(type(answer))
    if known is not None:
        return known
    assert isinstance(answer, InviteOutcome | Failure)
    return answer.status


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
