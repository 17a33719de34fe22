"""How a bulk invite ends: one outcome for every quota ID asked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, overload

from attrs import field, frozen

from sampling_async._errors import IncompleteBulkError, SamplingError
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
    """

    member_code: str = field(repr=hidden)
    quota_id: int
    status: OutcomeStatus
    invite: Invite | None = None
    result_code: int | None = None
    result: str | None = None
    error: SamplingError | None = None
    anomaly: str | None = None


class BulkInviteResult(Sequence[InviteOutcome]):
    """The outcomes of a bulk invite: one for each quota ID given, in the caller's order.

    `len(result.invited) + len(result.rejected) + len(result.not_sent) + len(result.unknown) == len(result)`,
    whatever happened on the way.

    Attributes:
        unrequested: Answers of the service under quota IDs that nobody asked for; the latest 10,000.
    """

    __slots__ = ("_outcomes", "unrequested")

    def __init__(self, outcomes: Iterable[InviteOutcome], unrequested: Iterable[InviteOutcome] = ()) -> None:
        self._outcomes = tuple(outcomes)
        self.unrequested = tuple(unrequested)

    def __repr__(self) -> str:
        return (
            f"<BulkInviteResult invited={len(self.invited)} rejected={len(self.rejected)} "
            f"not_sent={len(self.not_sent)} unknown={len(self.unknown)} unrequested={len(self.unrequested)}>"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BulkInviteResult):
            return NotImplemented
        return self._outcomes == other._outcomes and self.unrequested == other.unrequested

    __hash__ = None  # type: ignore[assignment]  # outcomes carry exceptions, which compare by identity

    def __reduce__(self) -> tuple[type[BulkInviteResult], tuple[object, ...]]:
        return BulkInviteResult, (self._outcomes, self.unrequested)

    def __len__(self) -> int:
        return len(self._outcomes)

    def __iter__(self) -> Iterator[InviteOutcome]:
        return iter(self._outcomes)

    @overload
    def __getitem__(self, index: int) -> InviteOutcome: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[InviteOutcome, ...]: ...
    def __getitem__(self, index: int | slice) -> InviteOutcome | tuple[InviteOutcome, ...]:
        return self._outcomes[index]

    def _having(self, status: OutcomeStatus) -> tuple[InviteOutcome, ...]:
        return tuple(outcome for outcome in self._outcomes if outcome.status == status)

    @property
    def invited(self) -> tuple[InviteOutcome, ...]:
        """Outcomes with an invite."""
        return self._having("invited")

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
        not_sent, unknown = len(self.not_sent), len(self.unknown)
        if not_sent or unknown:
            raise IncompleteBulkError(
                f"of {len(self)} quota IDs {not_sent} were not sent and {unknown} have an unknown outcome; "
                "resendable() gives those that are safe to send again",
                bulk_result=self,
            )
