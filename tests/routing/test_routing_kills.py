"""Processes that click for the same members and are killed at any moment: no pair is requested twice."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
from collections import Counter

import anyio
import pytest

from sampling_async.simulator import Fault, Latency, Simulator

KILLS = 8
MEMBERS = 12
WORKER = """
import pickle, random, sys
from pathlib import Path

import anyio

from sampling_async import SamplingClient
from sampling_async.matching import LiveIndex, Member
from sampling_async.routing import SurveyRouter

url, guid, key, store, profiles, seed = sys.argv[1:]
members = [Member(*each) for each in pickle.loads(Path(profiles).read_bytes())]

async def click(router, chance):
    while True:
        route = await router.route(chance.choice(members), within=1.0)
        if route.url is not None and chance.random() < 0.7:
            await route.entered()
        print(route.status, route.url, flush=True)

async def main():
    async with (
        SamplingClient(base_url=url, panel_guid=guid, api_key=key) as client,
        client.watch_quotas(every=60) as watch,
        LiveIndex(watch) as live,
        SurveyRouter(client, live, store=store) as router,
        anyio.create_task_group() as tasks,
    ):
        await live.ready()
        for number in range(8):
            tasks.start_soon(click, router, random.Random(f"{seed} {number}"))

anyio.run(main)
"""


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_processes_that_are_killed_request_no_pair_twice(tmp_path, new_address):
    simulator = Simulator(5, surveys=60, members=MEMBERS, latency=Latency(a=0.03))
    simulator.faults.add(Fault.cut(when="after").on("bulk_invite", every=10))
    profiles, store, chance = tmp_path / "profiles", new_address(), random.Random(1)
    members = [(code, dict(member.profile)) for code, member in simulator.members.items()]
    profiles.write_bytes(pickle.dumps(members))
    with simulator.serve() as url:

        def start(number):
            options = (url, simulator.panel_guid, simulator.api_key, store, str(profiles), str(number))
            with (tmp_path / f"{number}.txt").open("wb") as out:
                return subprocess.Popen([sys.executable, "-c", WORKER, *options], stdout=out)

        running = [start(0), start(1)]
        try:
            for number in range(2, 2 + KILLS):
                seen = len(simulator.ledger.requests(endpoint="bulk_invite"))
                with anyio.move_on_after(20):  # until all is taken
                    while len(simulator.ledger.requests(endpoint="bulk_invite")) < seen + 10:  # noqa: ASYNC110
                        await anyio.sleep(0.01)
                await anyio.sleep(chance.random() / 20)
                killed = running.pop(0)
                killed.kill()
                killed.wait(60)
                running.append(start(number))
        finally:
            for each in running:
                each.kill()
                each.wait(60)
    asked = Counter(
        (request.member_code, quota_id)
        for request in simulator.ledger.requests(endpoint="bulk_invite")
        for quota_id in request.quota_ids
    )
    assert len(asked) > KILLS * 5
    assert set(asked.values()) == {1}
    # A kill may cut off the last line.
    whole = [path.read_text().rpartition("\n")[0] for path in tmp_path.glob("*.txt")]
    lines = [line.split() for text in whole for line in text.splitlines()]
    given = {url for status, url in lines if status == "routed"}
    assert given <= {invite.url for invite in simulator.ledger.invites}
