"""Send quota IDs through every fault of the simulator over real sockets, and compare with its ledger."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final

from peers.common import Options, Peer
from peers.naive import NaiveClient
from peers.ours import OurClient

from sampling_async.simulator import Fault, Simulator
from scoreboard.audit import Audit, audit
from scoreboard.board import Row, Run, at_least, exactly, published
from scoreboard.service import FIRST_QUOTA, Remote, open_inventory, open_members, service

QUOTAS: Final = 300
MEMBER_IDS: Final = 300
MEMBERS_A_FAULT: Final = 5
READ_SECONDS: Final = 1.0
SILENCE: Final = 1.6
"""Longer than the timeouts of the clients, with a margin for a slow machine."""

FAULTS: Final = {
    "cut before it acted": Fault.cut(when="before"),
    "cut after it acted": Fault.cut(when="after"),
    "cut in the body": Fault.cut(when="middle"),
    "reset before it acted": Fault.cut(when="before", reset=True),
    "reset after it acted": Fault.cut(when="after", reset=True),
    "reset in the body": Fault.cut(when="middle", reset=True),
    "500 before it acted": Fault.status(500),
    "500 after it acted": Fault.status(500, when="after"),
    "502 page after it acted": Fault.status(502, html=True, when="after"),
    "504 page after it acted": Fault.status(504, html=True, when="after"),
    "408": Fault.status(408, html=True),
    "429": Fault.status(429, retry_after=0.05),
    "503 in the service's own words": Fault.status(503, result_code=15, retry_after=0.05),
    "503 page after it acted": Fault.status(503, html=True, when="after", retry_after=0.05),
    "400 that was cut, after it acted": Fault.status(400, result_code=None, when="after"),
    "400 that hides a fault, after it acted": Fault.status(400, result_code=36, when="after"),
    "200 with a page": Fault.html(),
    "200 with null": Fault.null(),
    "200 with nothing": Fault.empty(),
    "200 with half a document": Fault.body(b'{"Invites":[{"QuotaID":5000000,"Invite":null,"Res'),
    "items missing": Fault.missing(3),
    "items nobody asked for": Fault.extra(3),
    "items in another order": Fault.wrong_order(shuffled=True),
    "success without an invite": Fault.contradiction("success_without_invite"),
    "refusal with an invite": Fault.contradiction("failure_with_invite"),
    "invites that name another quota": Fault.wrong_invite(),
    "labelled as plain text": Fault.plaintext(),
    "silence": Fault.delay(SILENCE),
    "drip": Fault.drip(slices=8, pause=0.02),
}
UNAMBIGUOUS: Final = (
    "408",
    "429",
    "503 in the service's own words",
    "items nobody asked for",
    "items in another order",
    "invites that name another quota",
    "labelled as plain text",
    "drip",
)
"""Faults after which a correct client knows the outcome of every quota ID."""


@dataclass
class Account:
    """The audits of one client, in total and by fault."""

    total: Audit = field(default_factory=Audit)
    by_fault: dict[str, Audit] = field(default_factory=dict)


def rows(run: Run) -> list[Row]:
    """Measure both clients and compare."""
    batches = run.of(1, 17)
    ours, naive = Account(), Account()
    for batch in range(batches):
        seed = run.seed * 1000 + batch
        for account, peer in ((ours, OurClient), (naive, NaiveClient)):
            with service(build, seed) as remote:
                asyncio.run(_push(remote, peer, account))
    us, them = ours.total, naive.total
    clear = sum(ours.by_fault[name].vague for name in UNAMBIGUOUS)
    clear_naive = sum(naive.by_fault[name].vague for name in UNAMBIGUOUS)
    note = f"{len(FAULTS)} kinds of fault, each alone on every third request, then all in rotation"
    return [
        at_least("quota IDs pushed through faults", run.of(60_000, 1_000_000), us.asked, them.asked, note=note),
        exactly("lost: no outcome", 0, us.lost, them.lost),
        exactly("doubled: two outcomes, or processed twice", 0, us.doubled, them.doubled),
        exactly(
            "lies: an invite in the ledger was denied, or an invite was claimed that is not in the ledger",
            0,
            us.lies,
            them.lies,
            note="the naive client's `failed` counts as a denial: it has no other status",
        ),
        exactly(
            "`unknown` after faults whose effect is certain",
            0,
            clear,
            clear_naive,
            note="naive: `failed`; " + ", ".join(UNAMBIGUOUS),
        ),
        *(
            published(f"`unknown` after: {name}", ours.by_fault[name].told(), naive.by_fault[name].told())
            for name in FAULTS
        ),
    ]


def build(seed: int) -> Simulator:
    """Make a simulator in which every fourth quota is not open to the members."""
    members = len(FAULTS) * MEMBERS_A_FAULT + 200
    inventory = open_inventory(QUOTAS, refused_every=4)
    return Simulator(seed, inventory=inventory, members=open_members(members), keep_requests=100_000)


def set_faults(simulator: Simulator, faults: list[Fault]) -> None:
    """Replace the planned faults."""
    simulator.faults.clear()
    simulator.faults.add(*faults)


async def _push(remote: Remote, peer: type[Peer], account: Account) -> None:
    members = (f"m{number:06}" for number in range(1, 10**6))
    for name, fault in FAULTS.items():
        every = 6 if name == "silence" else 3
        remote.ask(set_faults, [fault.on("bulk_invite", every=every)])
        audited = await _run(remote, peer, [next(members) for _ in range(MEMBERS_A_FAULT)])
        account.total.add(audited)
        account.by_fault.setdefault(name, Audit()).add(audited)
    # Every second request has a fault, each kind in turn.
    turn = 2 * len(FAULTS)
    rotation = [
        fault.on("bulk_invite", every=turn, after=2 * place) for place, fault in enumerate(FAULTS.values())
    ]
    remote.ask(set_faults, rotation)
    rest = 60_000 // MEMBER_IDS - len(FAULTS) * MEMBERS_A_FAULT
    account.total.add(await _run(remote, peer, [next(members) for _ in range(rest)]))


async def _run(remote: Remote, peer: type[Peer], members: list[str]) -> Audit:
    options = Options(read=READ_SECONDS, patience=2 * READ_SECONDS, backoff=0.02)
    quota_ids = range(FIRST_QUOTA, FIRST_QUOTA + MEMBER_IDS)
    async with peer(remote.address, options) as client:
        outcomes = await client.invite_all((member, quota_ids) for member in members)
    return remote.ask(audit, set(members), quota_ids, outcomes)
