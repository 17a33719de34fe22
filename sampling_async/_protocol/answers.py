"""What the service said of the quota IDs of one request, in as little memory as it takes.

Users may keep the results of a million quota IDs, and most outcomes are read once or never: a partner uses the
invites and counts the rejected IDs. So a response is kept in columns: a byte for each ID, which stands for what
the service said of it, and the invites. Outcomes are created from the columns when they are read.

This leaves little to the garbage collector too. It visits each item of a new tuple, but no byte.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec
from attrs import evolve, frozen

from sampling_async._contract.errors import SamplingError
from sampling_async._contract.records import Invite, ResultCode
from sampling_async._protocol.outcomes import InviteOutcome, OutcomeStatus

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Counted: TypeAlias = dict[tuple[str, int | None], int]
"""Numbers of quota IDs by status and result code."""

Said: TypeAlias = tuple[OutcomeStatus, int, str | None]
"""What the service said of a quota ID: the status that it means, the result code and its name."""

SUCCESS: Final[Said] = ("invited", int(ResultCode.SUCCESS), "SUCCESS")
"""What it says beside an invite, in the contract's words (section "Bulk invite result item")."""

MOST_SAID: Final = 256
"""How many different `Said` one response may have: a byte tells them apart."""


# `gc=False`: the garbage collector does not visit it. There is one for each request.
class Columns(msgspec.Struct, frozen=True, gc=False):
    """The results in a response that has one item for each ID, in their order, and contradicts itself nowhere.

    Attributes:
        numbers: For each ID, the index into `said`.
        said: What the service said, each once. The first is `SUCCESS`.
        invites: The invites, in the order of their IDs.
    """

    numbers: bytes
    said: tuple[Said, ...]
    invites: tuple[Invite, ...]

    def links(self) -> list[str]:
        """Return the links of the invites."""
        return [invite.url for invite in self.invites]

    @property
    def errors(self) -> tuple[SamplingError, ...]:
        """The errors of IDs that are `not_sent` or `unknown`."""
        return ()

    def __len__(self) -> int:
        return len(self.numbers)

    def counts(self) -> tuple[tuple[OutcomeStatus, int], ...]:
        """Return how many IDs have each status."""
        invited = len(self.invites)
        return ("invited", invited), ("rejected", len(self.numbers) - invited)

    def tally(self) -> Counted:
        """Count the IDs by status and result code."""
        counted: Counted = {}
        for number, (status, code, _) in enumerate(self.said):
            if times := self.numbers.count(number):
                counted[status, code] = counted.get((status, code), 0) + times
        return counted

    def part(self, start: int, end: int) -> Columns:
        """Return the results from one index to before another."""
        is_invite = bytes(status == "invited" for status, _, _ in self.said).ljust(MOST_SAID, b"\0")
        numbers = self.numbers[start:end]
        # Each invite is a byte of 1 in these sums.
        before = sum(self.numbers[:start].translate(is_invite))
        until = before + sum(numbers.translate(is_invite))
        return Columns(numbers, self.said, self.invites[before:until])


@frozen
class Listed:
    """Results that are outcomes: from a journal, from a response that had to be read with care, or a mixture.

    Attributes:
        listed: The outcomes.
    """

    listed: tuple[InviteOutcome, ...]

    @property
    def invites(self) -> tuple[Invite, ...]:
        """The invites, in the order of their IDs."""
        return tuple(
            outcome.invite
            for outcome in self.listed
            if outcome.status == "invited" and outcome.invite is not None
        )

    def links(self) -> list[str]:
        """Return the links of the invites."""
        return [invite.url for invite in self.invites]

    @property
    def errors(self) -> tuple[SamplingError, ...]:
        """The errors of IDs that are `not_sent` or `unknown`, without those from a journal."""
        of_now = (outcome.error for outcome in self.listed if not outcome.replayed)
        return tuple(error for error in of_now if error is not None)

    def __len__(self) -> int:
        return len(self.listed)

    def counts(self) -> Iterable[tuple[OutcomeStatus, int]]:
        """Return how many IDs have each status."""
        counted: Counter[OutcomeStatus] = Counter(outcome.status for outcome in self.listed)
        return counted.items()

    def tally(self) -> Counted:
        """Count the IDs by status and result code, without those whose outcome is from a journal."""
        return Counter((each.status, each.result_code) for each in self.listed if not each.replayed)

    def part(self, start: int, end: int) -> Listed:
        """Return the results from one index to before another."""
        return Listed(self.listed[start:end])

    def outcomes(self, member_code: str, quota_ids: Iterable[int]) -> Iterator[InviteOutcome]:  # noqa: ARG002
        """Yield the outcomes, and take as many quota IDs as there are results."""
        return (outcome for outcome, _ in zip(self.listed, quota_ids, strict=False))


@frozen
class Failed:
    """The results of a request that failed: the same failure for each ID.

    Attributes:
        length: The number of IDs.
        status: The status of each.
        result_code: The result code of the refusal, if there was one.
        result: Its name.
        error: The failure.
    """

    length: int
    status: OutcomeStatus
    result_code: int | None
    result: str | None
    error: SamplingError

    @property
    def invites(self) -> tuple[Invite, ...]:
        """The invites, in the order of their IDs."""
        return ()

    def links(self) -> tuple[str, ...]:
        """Return the links of the invites."""
        return ()

    @property
    def errors(self) -> tuple[SamplingError, ...]:
        """The errors of IDs that are `not_sent` or `unknown`."""
        return (self.error,)

    def __len__(self) -> int:
        return self.length

    def counts(self) -> tuple[tuple[OutcomeStatus, int], ...]:
        """Return how many IDs have each status."""
        return ((self.status, self.length),)

    def tally(self) -> Counted:
        """Count the IDs by status and result code."""
        return {(self.status, self.result_code): self.length}

    def part(self, start: int, end: int) -> Failed:
        """Return the results from one index to before another."""
        return evolve(self, length=len(range(self.length)[start:end]))

    def outcomes(self, member_code: str, quota_ids: Iterable[int]) -> Iterator[InviteOutcome]:
        """Yield the outcomes, and take as many quota IDs as there are results."""
        status, code, result, error = self.status, self.result_code, self.result, self.error
        for _, quota_id in zip(range(self.length), quota_ids, strict=False):
            yield InviteOutcome(member_code, quota_id, status, None, code, result, error)


Answers: TypeAlias = Columns | Listed | Failed
"""The results of some quota IDs, in their order. The IDs themselves are kept elsewhere."""


def outcomes_from(
    parts: Iterable[Answers], member_code: str, quota_ids: Iterable[int]
) -> Iterator[InviteOutcome]:
    """Yield the outcomes of the quota IDs of some parts that follow each other."""
    each_id = iter(quota_ids)
    for part in parts:
        if not isinstance(part, Columns):
            yield from part.outcomes(member_code, each_id)
            continue
        said, invites = part.said, iter(part.invites)
        # The numbers come first: where they end, `zip` has taken no quota ID of the next part.
        for number, quota_id in zip(part.numbers, each_id, strict=False):
            status, code, result = said[number]
            invite = next(invites) if status == "invited" else None
            yield InviteOutcome(member_code, quota_id, status, invite, code, result)
