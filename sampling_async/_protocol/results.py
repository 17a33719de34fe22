"""The result of a bulk invite: an outcome for every quota ID, in the caller's order."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Final, get_args, overload

from sampling_async._contract.errors import SamplingError
from sampling_async._contract.timing import TimedInSlot
from sampling_async._protocol.answers import Listed, outcomes_from
from sampling_async._protocol.outcomes import InviteOutcome, OutcomeStatus

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sampling_async._contract.records import Invite
    from sampling_async._protocol.answers import Answers

_STATUSES: Final[tuple[OutcomeStatus, ...]] = get_args(OutcomeStatus)


class BulkInviteResult(TimedInSlot, Sequence[InviteOutcome]):
    """The outcomes of a bulk invite: one for each quota ID given, in the caller's order.

    `len(result.invited) + len(result.rejected) + len(result.not_sent) + len(result.unknown) == len(result)`,
    whatever happened. Outcome objects are created when they are read: reading one again gives an equal object,
    which may not be the same one.

    Its `timing` is that of the request that ended last, from the beginning of the bulk to the result: the other
    requests ran beside it and ended earlier.

    Attributes:
        unrequested: Outcomes that the service returned for unrequested quota IDs; the latest 10,000.
    """

    __slots__ = ("_answers", "_ends", "_member_code", "_quota_ids", "unrequested")

    def __init__(
        self,
        outcomes: Iterable[InviteOutcome] = (),
        unrequested: Iterable[InviteOutcome] = (),
        *,
        member_code: str = "",
        quota_ids: tuple[int, ...] = (),
        answers: Sequence[Answers] | None = None,
    ) -> None:
        """Make a result of outcomes. The client itself gives the other three in their place.

        Args:
            outcomes: The outcomes.
            unrequested: See the class.
            member_code: The member.
            quota_ids: The quota IDs in the caller's order.
            answers: Their results in the same order: those of the first IDs, then those of the next ones.
        """
        if answers is None:
            listed = tuple(outcomes)
            quota_ids, answers = tuple([outcome.quota_id for outcome in listed]), (Listed(listed),)
        self._member_code = member_code
        self._quota_ids = quota_ids
        self._answers = answers
        self._ends: list[int] = []
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
        return len(self._quota_ids)

    def __iter__(self) -> Iterator[InviteOutcome]:
        return outcomes_from(self._answers, self._member_code, self._quota_ids)

    def __reversed__(self) -> Iterator[InviteOutcome]:
        return reversed(tuple(self))  # a look for each place would take four times as long

    @overload
    def __getitem__(self, index: int) -> InviteOutcome: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[InviteOutcome, ...]: ...
    def __getitem__(self, index: int | slice) -> InviteOutcome | tuple[InviteOutcome, ...]:
        places = range(len(self))[index]
        if isinstance(places, int):
            return next(self._between(places, places + 1))
        if not places:
            return ()
        first, last = sorted((places[0], places[-1]))
        return tuple(self._between(first, last + 1))[:: places.step]

    def _between(self, start: int, end: int) -> Iterator[InviteOutcome]:
        """Yield the outcomes from one place to before another."""
        if not self._ends:  # not before it is needed: there may be half a million answers
            self._ends = list(accumulate(map(len, self._answers)))
        first, last = bisect_right(self._ends, start), bisect_left(self._ends, end) + 1
        parts = []
        for answers, after in zip(self._answers[first:last], self._ends[first:last], strict=True):
            before = after - len(answers)
            parts.append(answers.part(max(start - before, 0), end - before))
        return outcomes_from(parts, self._member_code, self._quota_ids[start:end])

    def _having(self, status: OutcomeStatus) -> tuple[InviteOutcome, ...]:
        return tuple([outcome for outcome in self if outcome.status == status]) if self.counts[status] else ()

    @property
    def invited(self) -> tuple[InviteOutcome, ...]:
        """Outcomes with an invite."""
        return self._having("invited")

    @property
    def invites(self) -> tuple[Invite, ...]:
        """The invites of the outcomes in `invited`, in their order. This creates no outcomes."""
        return tuple(chain.from_iterable([answers.invites for answers in self._answers]))

    @property
    def counts(self) -> Mapping[OutcomeStatus, int]:
        """The number of outcomes with each of the four statuses. This creates no outcomes."""
        counted = dict.fromkeys(_STATUSES, 0)
        for answers in self._answers:
            for status, number in answers.counts():
                counted[status] += number
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
