"""Compare a client's outcomes with the simulator's ledger. This runs in the process of the simulator."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from peers.common import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sampling_async.simulator import Simulator


@dataclass
class Audit:
    """The result of comparing a client's outcomes with the ledger."""

    asked: int = 0
    lost: int = 0
    doubled: int = 0
    lies: int = 0
    vague: int = 0
    vague_invited: int = 0

    def add(self, other: Audit) -> None:
        """Add another audit's counts."""
        for name, count in vars(other).items():
            setattr(self, name, getattr(self, name) + count)

    def told(self) -> str:
        """Return the share of IDs without a clear outcome, and how many of those have an invite."""
        share = self.vague / max(1, self.asked)
        return f"{share:.1%} ({self.vague_invited:,} of {self.vague:,} invited)"


def audit(simulator: Simulator, asked: set[str], quota_ids: Sequence[int], outcomes: list[Outcome]) -> Audit:
    """Compare the outcomes of some members with the ledger. Each ID was requested once for each member."""
    told = Counter((outcome.member_code, outcome.quota_id) for outcome in outcomes)
    wanted = [(member, quota_id) for member in asked for quota_id in quota_ids]
    carried_out = Counter(
        (record.member_code, quota_id)
        for record in simulator.ledger.requests
        if record.is_processed and record.member_code in asked
        for quota_id in record.quota_ids
    )
    invited = {
        (entry.member_code, entry.quota_id) for entry in simulator.ledger.invites if entry.member_code in asked
    }
    vague = [outcome for outcome in outcomes if outcome.status in {"unknown", "failed"}]
    return Audit(
        asked=len(wanted),
        lost=sum(pair not in told for pair in wanted),
        doubled=sum(count - 1 for count in told.values()) + sum(count - 1 for count in carried_out.values()),
        lies=_lies(simulator, asked, outcomes),
        vague=len(vague),
        vague_invited=sum((outcome.member_code, outcome.quota_id) in invited for outcome in vague),
    )


def _lies(simulator: Simulator, asked: set[str], outcomes: Iterable[Outcome]) -> int:
    claims = [
        Outcome(each.member_code, each.quota_id, "not_sent") if each.status == "failed" else each
        for each in outcomes
    ]
    verdict = simulator.ledger.check(claims)
    # The outcomes are about these members only, so the invites of others are left out.
    return len(verdict.lies) + sum(entry.member_code in asked for entry in verdict.unexplained)
