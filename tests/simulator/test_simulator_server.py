"""The simulator over a real socket."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from wire import free_port

import sampling_async
from sampling_async.simulator import Fault, Simulator

if TYPE_CHECKING:
    from collections.abc import Callable


def settings_of(sim: Simulator, base_url: str, *, timeout: float = 5.0) -> httpx.Response:
    return httpx.get(
        f"{base_url}/IntegratedPanelService/api/Settings",
        params={"partnerGUID": sim.panel_guid},
        headers={"API_AUTH_KEY": sim.api_key},
        timeout=timeout,
    )


def invite(sim: Simulator, base_url: str, member_code: str) -> httpx.Response:
    ids = [quota.quota_id for survey in sim.inventory.surveys for quota in survey.quotas]
    return httpx.post(
        f"{base_url}/IPExternalSamplingService/ExternalSample/{sim.panel_guid}/{member_code}/Invites",
        json={"QuotaIDs": ids[:100]},
        headers={"API_AUTH_KEY": sim.api_key},
    )


def test_a_question_for_the_head_makes_no_invite():
    sim = Simulator(surveys=10, members=5)
    quota_id = next(quota.quota_id for survey in sim.inventory.surveys for quota in survey.quotas)
    base = f"/IPExternalSamplingService/ExternalSample/{sim.panel_guid}"
    with sim.serve() as base_url:
        for path in (f"{base}/m000001/Invite/{quota_id}", f"{base}/Quotas"):
            answer = httpx.head(f"{base_url}{path}", headers={"API_AUTH_KEY": sim.api_key})
            assert answer.status_code == 405
    assert not sim.ledger.requests()


def test_one_server_responds_cuts_and_recovers(capfd: pytest.CaptureFixture[str]):
    sim = Simulator(surveys=10, members=5)
    with sim.serve() as base_url:
        assert base_url.startswith("http://127.0.0.1:")
        assert invite(sim, base_url, "m000001").status_code == 200
        for fault, error in [
            (Fault.cut(), httpx.RemoteProtocolError),
            (Fault.cut(reset=True), httpx.ReadError),
            (Fault.cut(when="middle"), httpx.RemoteProtocolError),
        ]:
            sim.faults.add(fault.on(times=1))
            with pytest.raises(error):
                settings_of(sim, base_url)
        assert settings_of(sim, base_url).status_code == 200
    assert capfd.readouterr() == ("", "")
    assert "simulator" not in {thread.name for thread in threading.enumerate()}


def test_a_cut_after_the_work_leaves_its_invites_in_the_ledger():
    sim = Simulator(surveys=10, members=5)
    sim.faults.add(Fault.cut(when="after").on("bulk_invite"))
    with sim.serve() as base_url:
        for member_code in sim.members:
            with pytest.raises(httpx.RemoteProtocolError):
                invite(sim, base_url, member_code)
    assert sim.ledger.invites
    assert {record.status for record in sim.ledger.requests} == {None}


def test_the_port_can_be_chosen_and_is_free_again_afterwards():
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(OSError, match="in use"), Simulator(surveys=1, members=1).serve(port=port):
            pass
    sim = Simulator(surveys=1, members=1)
    for _ in range(2):
        with sim.serve(port=port) as base_url:
            assert base_url == f"http://127.0.0.1:{port}"
            assert settings_of(sim, base_url).status_code == 200


def test_responses_are_not_delayed_by_the_socket():
    """Without TCP_NODELAY every second answer on a kept connection takes 40 ms."""
    sim = Simulator(surveys=1, members=1, gzip=False)
    took: list[float] = []
    with (
        sim.serve() as base_url,
        httpx.Client(base_url=base_url, headers={"API_AUTH_KEY": sim.api_key}) as client,
    ):
        for _ in range(40):
            began = time.perf_counter()
            client.get("/IntegratedPanelService/api/Settings", params={"partnerGUID": sim.panel_guid})
            took.append(time.perf_counter() - began)
    # On a busy machine most may be slow; with the delay no two in a row are fast.
    assert min(max(pair) for pair in pairwise(took)) < 0.03


def test_run_serves_until_it_is_interrupted():
    port = free_port()
    root = Path(sampling_async.__file__).parents[1]
    code = f"from sampling_async.simulator import Simulator; Simulator(surveys=1, members=1).run(port={port})"
    sim = Simulator(surveys=1, members=1)
    with subprocess.Popen([sys.executable, "-c", code], cwd=root, stderr=subprocess.PIPE, text=True) as process:
        answer = _retried(lambda: settings_of(sim, f"http://127.0.0.1:{port}"))
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert answer.status_code == 200
    assert "Error" not in stderr


def _retried(ask: Callable[[], httpx.Response]) -> httpx.Response:
    for _ in range(1000):
        try:
            return ask()
        except httpx.ConnectError:
            time.sleep(0.01)
    return ask()


def test_leaving_does_not_wait_for_delayed_responses(capfd: pytest.CaptureFixture[str]):
    sim = Simulator(surveys=1, members=1, faults=[Fault.delay(60)])
    began = time.monotonic()
    with sim.serve() as base_url, pytest.raises(httpx.ReadTimeout):
        settings_of(sim, base_url, timeout=0.01)
    assert time.monotonic() - began < 10
    assert capfd.readouterr() == ("", "")


def test_an_encoded_slash_reaches_the_service_over_a_socket():
    sim = Simulator(surveys=1, members=1)
    with sim.serve() as base_url:
        answered = invite(sim, base_url, "a%2Fb%20%25").json()
    assert sim.ledger.requests[0].member_code == "a/b %"
    assert {item["ResultCode"] for item in answered["Invites"]} == {12}
