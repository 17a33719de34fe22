"""SIGKILL at random moments of a run with a journal. The run is repeated with the same input until it ends."""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final

from peers.common import Address, Options, Outcome, Peer
from peers.naive import NaiveClient
from peers.ours import OurClient

from sampling_async.simulator import Latency, Simulator
from scoreboard.audit import Audit, audit
from scoreboard.board import Row, Run, at_least, exactly, published
from scoreboard.service import FIRST_QUOTA, Remote, open_inventory, open_members, service

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

MEMBERS: Final = 30
QUOTAS: Final = 200
KILLS_A_RUN: Final = 3
UNDISTURBED: Final = 60.0


@dataclass
class Story:
    """The results of many killed runs."""

    kills: int = 0
    runs: int = 0
    failed: int = 0
    total: Audit = field(default_factory=Audit)


def rows(run: Run) -> list[Row]:
    """Measure both clients."""
    kills = run.of(15, 200)
    us = _story(OurClient, kills, run.seed)
    them = _story(NaiveClient, kills // run.of(1, 5), run.seed)  # the long run is about our client
    note = (
        f"{us.runs} runs of {MEMBERS} members and {QUOTAS} IDs, each killed up to {KILLS_A_RUN} times and "
        "started again; the naive client starts from the beginning, since it knows no better"
    )
    return [
        at_least("SIGKILLs in a running process", kills, us.kills, them.kills, note=note),
        exactly("runs that could not be resumed", 0, us.failed, them.failed),
        exactly("lost: no outcome at the end", 0, us.total.lost, them.total.lost),
        exactly("doubled: a member and quota processed twice", 0, us.total.doubled, them.total.doubled),
        exactly("lies", 0, us.total.lies, them.total.lies),
        published("`unknown` at the end: in flight at a kill", us.total.told(), them.total.told()),
    ]


def build(seed: int, members: int) -> Simulator:
    """Make a slow simulator, so that there are always requests in flight."""
    return Simulator(
        seed,
        inventory=open_inventory(QUOTAS, refused_every=4),
        members=open_members(members),
        latency=Latency(a=0.02),
        keep_requests=200_000,
    )


def _story(peer: type[Peer], kills: int, seed: int) -> Story:
    random, story, first = Random(seed), Story(), 1
    with tempfile.TemporaryDirectory() as folder, service(build, seed, kills * 4 * MEMBERS) as remote:
        duration = 0.0
        while story.kills < kills:
            members = [f"m{number:06}" for number in range(first, first + MEMBERS)]
            first += MEMBERS
            story.runs += 1
            place = Path(folder) / str(story.runs)
            if not duration:  # the first run is not killed: its duration is measured
                duration = -time.perf_counter()
                _run(peer, remote, members, place, UNDISTURBED)
                duration += time.perf_counter()
            for _ in range(min(KILLS_A_RUN, kills - story.kills)):
                killed = _run(peer, remote, members, place, random.uniform(0.0, duration)) == "killed"
                story.kills += killed
                if not killed:
                    break
            outcomes = _told(place) if _run(peer, remote, members, place, UNDISTURBED) == "ended" else None
            if outcomes is None:
                story.failed += 1
            else:
                quota_ids = range(FIRST_QUOTA, FIRST_QUOTA + QUOTAS)
                story.total.add(remote.ask(audit, set(members), quota_ids, outcomes))
    return story


def _run(peer: type[Peer], remote: Remote, members: list[str], place: Path, patience: float) -> str:
    """Run a client in a process, and kill it after some seconds. Return `ended`, `failed` or `killed`."""
    place.with_suffix(".outcomes").unlink(missing_ok=True)
    # Forked, so that imports do not delay the chosen moment.
    process: BaseProcess = multiprocessing.get_context("fork").Process(
        target=_child, args=(peer, remote.address, members, place)
    )
    process.start()
    process.join(patience)
    if process.is_alive():
        process.kill()
        process.join()
        return "killed"
    return "failed" if process.exitcode else "ended"


def _child(peer: type[Peer], address: Address, members: list[str], place: Path) -> None:
    async def run() -> list[Outcome]:
        async with peer(address, Options(journal=str(place.with_suffix(".journal")))) as client:
            return await client.invite_all((member, quota_ids) for member in members)

    quota_ids = range(FIRST_QUOTA, FIRST_QUOTA + QUOTAS)
    place.with_suffix(".outcomes").write_bytes(pickle.dumps(asyncio.run(run())))


def _told(place: Path) -> list[Outcome]:
    outcomes: list[Outcome] = pickle.loads(place.with_suffix(".outcomes").read_bytes())
    return outcomes
