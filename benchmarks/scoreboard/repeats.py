"""Pairs that come again in a fan-out, and plans over quotas that close meanwhile.

Each trial asks for random quotas of a few members in many requests. So most pairs come several times, while the
first is in flight or long after it. Each plan is made from a live index in which quotas close at any moment.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

import anyio
import httpx
from peers.common import Options, Outcome, Peer
from peers.naive import NaiveClient
from peers.ours import OurClient

from sampling_async.campaign import Campaign
from sampling_async.matching import Allocate, LiveIndex, PanelMatcher
from sampling_async.simulator import Simulator
from scoreboard import virtual
from scoreboard.board import Row, Run, at_least, exactly
from scoreboard.replies import NOWHERE, SETTINGS, bulk, ok
from scoreboard.testkit import tool

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

panel_kit: Final = tool("panel_kit")

MEMBERS: Final = 4
QUOTAS: Final = 60
REQUESTS: Final = 40


@dataclass
class Slow(httpx.AsyncBaseTransport):
    """A service that invites every ID after a random time, and counts what it was asked for.

    Attributes:
        random: Draws the times.
        asked: How often each member was asked for each quota.
    """

    random: Random
    asked: Counter[tuple[str, int]] = field(default_factory=Counter)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer a request."""
        if request.method == "GET":
            return ok(SETTINGS)
        member = request.url.path.split("/")[-2]
        quota_ids = [int(text) for text in _ids(await request.aread())]
        self.asked.update((member, quota_id) for quota_id in quota_ids)
        await anyio.sleep(self.random.uniform(0.0, 1.0))
        # A link belongs to one member: the same for two of them would be an anomaly.
        return ok(bulk(quota_ids).replace(b"survey?", f"survey?m={member}&".encode()))


def rows(run: Run) -> list[Row]:
    """Measure both clients, and both ways to make a plan."""
    trials, plans = run.of(100, 2_000), run.of(3, 20)
    seeds = [f"{run.seed}/{number}" for number in range(trials)]
    places, twice, wrong = _summed(_repeats(OurClient, seed) for seed in seeds)
    _, naive_twice, _ = _summed(_repeats(NaiveClient, seed) for seed in seeds)
    died, naive_died = _summed(_plans(f"{run.seed}/{number}") for number in range(plans))
    note = f"{trials} fan-outs of {REQUESTS} requests, {MEMBERS} members and {QUOTAS} quotas; no journal"
    return [
        at_least("places of pairs in fan-outs", trials * REQUESTS, places, note=note),
        exactly("IDs asked twice", 0, twice, naive_twice),
        exactly("places without the outcome of the first", 0, wrong),
        exactly(
            "plans that died because quotas closed meanwhile",
            0,
            died,
            naive_died,
            note=f"of {plans}; naive: match a panel with `live.index`, then look its quotas up there",
        ),
    ]


def _summed(trials: Iterable[tuple[int, ...]]) -> Iterator[int]:
    return map(sum, zip(*trials, strict=True))


def _ids(body: bytes) -> list[str]:
    return body.decode().partition("[")[2].partition("]")[0].split(",")


def _repeats(peer: type[Peer], seed: str) -> tuple[int, int, int]:
    """Return how many places there were, how many pairs were asked twice, and how many places are wrong."""
    return virtual.run(_fan_out(peer, Random(seed)))


async def _fan_out(peer: type[Peer], random: Random) -> tuple[int, int, int]:
    service = Slow(random)
    requests = [
        (f"m{random.randrange(MEMBERS)}", random.sample(range(1, QUOTAS + 1), random.randint(1, 20)))
        for _ in range(REQUESTS)
    ]
    async with peer(NOWHERE, Options(concurrency=random.randint(1, 16), transport=service)) as client:
        outcomes: list[Outcome] = await client.invite_all(requests)
    places = sum(len(quota_ids) for _, quota_ids in requests)
    twice = sum(times - 1 for times in service.asked.values())
    wrong = abs(places - len(outcomes)) + sum(outcome.status != "invited" for outcome in outcomes)
    return places, twice, wrong


def _plans(seed: str) -> tuple[bool, bool]:
    """Return whether a plan died, and whether one died that reads the index twice."""
    return asyncio.run(_planned(Random(seed)))


async def _planned(random: Random) -> tuple[bool, bool]:
    simulator = Simulator(random.randrange(1000), surveys=20, members=60)
    panel = panel_kit.panel_table(simulator)
    async with (
        simulator.client() as client,
        client.watch_quotas(600) as watch,
        LiveIndex(watch, kinds=panel_kit.AGES) as live,
    ):
        await live.ready()

        def closing() -> Any:
            for quota_id in _some(random, live):
                live.index.close(quota_id)
            return panel.to_reader()

        with tempfile.TemporaryDirectory() as folder:
            ledger = Path(folder) / "ledger"
            died = await _dies(Campaign(client, closing, live, ledger=ledger, allocate=Allocate(3)))
        matcher = PanelMatcher(live.index, Allocate(3))
        matched = matcher.run(panel).read_all().column("quota_ids").to_pylist()
        closing()
        of_index = {target.quota.quota_id: target for target in live.index.quota_ids.targets()}
        naive_died = any(quota_id not in of_index for quota_ids in matched for quota_id in quota_ids)
    return died, naive_died


def _some(random: Random, live: LiveIndex) -> Iterator[int]:
    """Yield a third of the open quotas."""
    return (quota_id for quota_id in tuple(live.index.quota_ids) if random.random() < 1 / 3)


async def _dies(campaign: Campaign) -> bool:
    try:
        await campaign.plan()
    except KeyError:
        return True
    return False
