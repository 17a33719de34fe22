"""What book, record and ledger of a campaign exchange: quotas, members, and their pairs."""

from __future__ import annotations

from typing import Any, NamedTuple

from attrs import define, field, frozen

from sampling_async._contract.records import hidden


@frozen
class PlannedQuota:
    """A quota as a campaign counts with it; see `QuotaFill`."""

    id: int
    survey: int
    wave: int
    name: str
    currency: int | None
    room: int
    value: float
    cost: float
    closed: str | None = None


@define
class DueMember:
    """A member whose turn it is.

    Attributes:
        id: Its number in the ledger.
        code: The member code.
        closed: Why it gets nothing more; None if it may.
        due: The quotas to request now, each with how often that was tried.
        refused: The result code that the service answered last, for those of `due` that it did answer.
        reserves: The quotas that may take the place of others, the best first.
        turn: Which turn it is; a member gets a second one if something was refused.
        waiting: The quotas that were requested and have no outcome yet.
        added: How many pairs were planned for it, reserves included.
        was_asked: Whether it had a request before.
    """

    id: int
    code: str = field(repr=hidden)
    closed: str | None
    reserves: list[int]
    turn: int
    due: dict[int, int] = field(factory=dict[int, int])
    refused: dict[int, int] = field(factory=dict[int, int])
    waiting: set[int] = field(factory=set[int])
    tries: dict[int, int] = field(factory=dict[int, int])
    added: int = 0
    was_asked: bool = False


class NewPair(NamedTuple):
    """A pair to be planned."""

    member: int
    quota: int
    rank: int
    certain: bool
    turn: int


class PairEnd(NamedTuple):
    """What became of a pair, for now or for good."""

    state: str
    code: int | None
    reason: str | None
    turn: int
    tries: int
    due: float
    member: int
    quota: int


class MadeInvite(NamedTuple):
    """An invite as it is kept."""

    member: int
    quota: int
    survey: int
    wave: int
    url: str
    partner_amount: float | None
    member_amount: float | None
    loi: int | None
    ir: int | None
    at: float

    def __repr__(self) -> str:
        return f"<MadeInvite of member {self.member} for quota {self.quota}>"


@define
class Notes:
    """What is to be written together, in the order of these fields."""

    pairs: list[NewPair] = field(factory=list[NewPair])
    sent: list[tuple[int, int, str]] = field(factory=list["tuple[int, int, str]"])
    ends: list[PairEnd] = field(factory=list[PairEnd])
    invites: list[MadeInvite] = field(factory=list[MadeInvite])
    answered: list[tuple[int]] = field(factory=list["tuple[int]"])
    closed_quotas: list[tuple[str, int]] = field(factory=list["tuple[str, int]"])
    closed_members: list[tuple[str, int]] = field(factory=list["tuple[str, int]"])
    codes: dict[int, str] = field(factory=dict[int, str])
    moments: list[tuple[Any, ...]] = field(factory=list["tuple[Any, ...]"])
    waits: dict[int, tuple[str, float, float]] = field(factory=dict[int, "tuple[str, float, float]"])
