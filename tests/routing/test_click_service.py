"""The service of the guide about clicks, run by two workers of uvicorn, with clicks at the same moment."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections import defaultdict

import anyio
import httpx
import pytest
from docs_kit import ROOT, examples_of
from wire import free_port

from sampling_async.simulator import Fault, Latency, Simulator

SECONDS = 60.0
MEMBERS = 30
CLICKS = 6  # of each member, at the same moment
WRAPPER = """
import os, pickle
from service import PROFILES, app
PROFILES.update(pickle.loads(open(os.environ["PROFILES"], "rb").read()))
"""


@pytest.fixture
def simulator():
    return Simulator(5, surveys=30, members=MEMBERS, latency=Latency(a=0.05))


def start(folder, simulator, url, links, port):
    """Start the service of the guide with two workers."""
    (service,) = [each for each in examples_of(ROOT / "docs/howto/click-time.md") if each.name == "service.py"]
    (folder / "service.py").write_text(service.text)
    (folder / "clicks.py").write_text(WRAPPER)
    profiles = {code: dict(member.profile) for code, member in simulator.members.items()}
    (folder / "profiles").write_bytes(pickle.dumps(profiles))
    environment = {
        **os.environ,
        "SAMPLING_BASE_URL": url,
        "SAMPLING_PANEL_GUID": simulator.panel_guid,
        "SAMPLING_API_KEY": simulator.api_key,
        "LINKS": links,
        "PROFILES": str(folder / "profiles"),
    }
    command = [sys.executable, "-m", "uvicorn", "clicks:app", "--workers", "2", "--port", str(port)]
    return subprocess.Popen(
        [*command, "--log-level", "warning"], cwd=folder, env=environment, start_new_session=True
    )


async def wait_until_ready(browser):
    """Wait until both workers have an inventory: many requests in a row over new connections succeed."""
    ready, until = 0, time.monotonic() + SECONDS
    while ready < 20:
        assert time.monotonic() < until
        try:
            answer = await browser.get("/surveys", headers={"X-Member": "nobody", "Connection": "close"})
            ready = ready + 1 if answer.status_code == 200 else 0
        except httpx.TransportError:
            ready = 0
        await anyio.sleep(0.02)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_parallel_clicks_at_two_workers_make_no_second_invite(tmp_path, simulator, new_address):
    port, got = free_port(), defaultdict(list)
    simulator.faults.add(Fault.cut(when="after").on("bulk_invite", every=10))
    with simulator.serve() as url:
        running = start(tmp_path, simulator, url, new_address(), port)
        limits = httpx.Limits(max_keepalive_connections=0)  # so that clicks come to either worker
        browser = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", limits=limits, timeout=SECONDS)
        try:
            async with browser:
                await wait_until_ready(browser)

                async def click(code):
                    answer = await browser.get("/go", headers={"X-Member": code})
                    got[code].append((answer.status_code, answer.headers.get("Location")))

                for _ in range(2):
                    async with anyio.create_task_group() as tasks:
                        for code in simulator.members:
                            for _ in range(CLICKS):
                                tasks.start_soon(click, code)
        finally:
            running.terminate()
            running.wait(SECONDS)
    asked = [
        (request.member_code, quota_id)
        for request in simulator.ledger.requests(endpoint="bulk_invite")
        for quota_id in request.quota_ids
    ]
    assert len(asked) == len(set(asked)) > MEMBERS
    assert max(simulator.ledger.by_pair().values()) == 1
    statuses = [status for clicks in got.values() for status, _ in clicks]
    assert len(statuses) == 2 * MEMBERS * CLICKS
    assert set(statuses) <= {303, 404, 503}  # a busy machine may need longer than a click waits
    assert statuses.count(303) > MEMBERS
    given = {url for clicks in got.values() for _, url in clicks if url}
    assert given <= {invite.url for invite in simulator.ledger.invites}
