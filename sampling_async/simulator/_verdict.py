"""Check a client's report against the service's ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

from attrs import define, field, frozen

from sampling_async.simulator._records import LedgerEntry

if TYPE_CHECKING:
    from collections.abc import Iterable


class OutcomeInvite(Protocol):
    """The part of an invite that the check reads."""

    @property
    def url(self) -> str:
        """The link of the invite."""
        ...


class Outcome(Protocol):
    """The part of a client's outcome that the check reads; `sampling_async.InviteOutcome` has all of it."""

    @property
    def member_code(self) -> str:
        """The member asked for."""
        ...

    @property
    def quota_id(self) -> int:
        """The quota ID asked for."""
        ...

    @property
    def status(self) -> str:
        """One of `invited`, `rejected`, `not_sent`, `unknown`."""
        ...

    @property
    def invite(self) -> OutcomeInvite | None:
        """The invite, if the status is `invited`."""
        ...


@frozen
class Lie:
    """An outcome that the ledger contradicts, with the reason."""

    outcome: Outcome
    reason: str


@frozen
class Verdict:
    """The result of checking a client's outcomes against the ledger.

    A pair is a member code with a quota ID. An invite of the ledger is *accounted for* if an `invited` outcome
    of its pair has its URL.

    Attributes:
        lies: Outcomes that are false. Either the outcome is `invited`, and the ledger does not hold its invite
            (by URL) for the pair. Or it is `rejected` or `not_sent`, and the ledger holds an invite of the pair
            that no outcome accounts for, while no outcome of the pair is `unknown`.
        unread: Invites that are not accounted for, whose pair has an `unknown` outcome: the invites exist, and
            nobody has read them. This is no fault of the client.
        unexplained: Invites that are not accounted for, whose pair has no `unknown`, `rejected` or `not_sent`
            outcome: the client does not say what became of them.
        lost: `unknown` outcomes of pairs without an invite in the ledger: the request had no effect, or the
            service rejected it. This is no fault of the client.
    """

    lies: tuple[Lie, ...] = ()
    unread: tuple[LedgerEntry, ...] = ()
    unexplained: tuple[LedgerEntry, ...] = ()
    lost: tuple[Outcome, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there are no lies and nothing is unexplained."""
        return not (self.lies or self.unexplained)

    def __str__(self) -> str:
        head = (
            f"{'ok' if self.ok else 'NOT ok'}: {len(self.lies)} lies, {len(self.unexplained)} unexplained, "
            f"{len(self.unread)} unread, {len(self.lost)} lost"
        )
        lies = (f"  quota {lie.outcome.quota_id}, {lie.outcome.status}: {lie.reason}" for lie in self.lies[:10])
        entries = (
            f"  invite {e.sequence_number} to quota {e.quota_id} unexplained" for e in self.unexplained[:10]
        )
        return "\n".join((head, *lies, *entries))


@define
class _PairAccount:
    """The facts about a pair: its invites by URL, and the client's outcomes."""

    entries: dict[str, LedgerEntry] = field(factory=dict[str, LedgerEntry])
    # Whether an `unknown` outcome of the pair admits that an invite may exist.
    is_admitted: bool = False
    denials: list[Outcome] = field(factory=list[Outcome])
    open_urls: set[str] = field(factory=set[str])


_Accounts: TypeAlias = dict[tuple[str, int], _PairAccount]


def verdict(entries: Iterable[LedgerEntry], outcomes: Iterable[Outcome]) -> Verdict:
    """Check outcomes against the ledger's entries. Outcomes that the ledger confirms are not kept in memory.

    Raises:
        ValueError: An outcome has a status that is none of the four.
    """
    accounts: _Accounts = {}
    for entry in entries:
        account = accounts.setdefault((entry.member_code, entry.quota_id), _PairAccount())
        account.entries[entry.url] = entry
        account.open_urls.add(entry.url)
    lies: list[Lie] = []
    lost: list[Outcome] = []
    for outcome in outcomes:
        _enter(outcome, accounts, lies, lost)
    return _balance(accounts, lies, lost)


def _enter(outcome: Outcome, accounts: _Accounts, lies: list[Lie], lost: list[Outcome]) -> None:
    account = accounts.get((outcome.member_code, outcome.quota_id))
    match outcome.status:
        case "invited":
            url = outcome.invite.url if outcome.invite else None
            if account is None or url not in account.entries:
                lies.append(Lie(outcome, "the ledger holds no such invite of this member to this quota"))
            else:
                account.open_urls.discard(url)
        case "unknown":
            if account is None:
                lost.append(outcome)
            else:
                account.is_admitted = True
        case "rejected" | "not_sent":
            # Judged at the end only: another outcome of the pair may account for the invite.
            if account is not None:
                account.denials.append(outcome)
        case other:
            raise ValueError(f"outcome status {other!r}: must be invited, rejected, not_sent or unknown")


def _balance(accounts: _Accounts, lies: list[Lie], lost: list[Outcome]) -> Verdict:
    unread: list[LedgerEntry] = []
    unexplained: list[LedgerEntry] = []
    for account in accounts.values():
        left = [entry for url, entry in account.entries.items() if url in account.open_urls]
        # One `unknown` outcome admits all open invites of its pair, so the denials beside it are no lies.
        if account.is_admitted:
            unread += left
        elif left and account.denials:
            lies += [
                Lie(denial, "the ledger holds an invite that no outcome accounts for")
                for denial in account.denials
            ]
        else:
            unexplained += left
    return Verdict(tuple(lies), tuple(unread), tuple(unexplained), tuple(lost))
