"""The service of docs/howto/monitoring.md in a real server, whose operator is away or hangs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import httpx
import pytest
from docs_kit import ROOT, examples_of
from store_kit import COMPLETION
from wire import free_port

from sampling_async.notifications import Inbox, Kind, kept_secrets
from sampling_async.simulator import Fault, Simulator

SIM = Simulator(seed=3, surveys=20, members=30)
AWAY = "Surveys are not available at the moment. Please try again in a minute."


@contextmanager
def refusing():
    """Yield the address of a port that refuses connections."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@contextmanager
def hanging():
    """Yield the address of an operator that accepts connections and never responds."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


class Service:
    """The service in a process of its own."""

    def __init__(self, folder, operator):
        for example in examples_of(ROOT / "docs" / "howto" / "monitoring.md"):
            if example.is_service:
                # Members of the simulator, in place of a database.
                profiles = (
                    f"PROFILES.update({ {code: dict(each.profile) for code, each in SIM.members.items()} })\n"
                )
                (folder / example.name).write_text(f"{example.text}\n\n{profiles}")
        self.store, port = folder / "partner.db", free_port()
        self.url = f"http://127.0.0.1:{port}"
        known = {"PANEL_GUID": SIM.panel_guid, "API_KEY": SIM.api_key, "BASE_URL": operator}
        environment = {f"SAMPLING_{name}": value for name, value in known.items()}
        command = [
            sys.executable,
            "-m",
            "uvicorn",
            "monitored_service:app",
            "--no-access-log",
            f"--port={port}",
        ]
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **environment, "STORE": str(self.store)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __enter__(self):
        assert self._until(lambda: self._status("/alive") == 200)
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def _status(self, path):
        try:
            return httpx.get(f"{self.url}{path}", timeout=10).status_code
        except httpx.TransportError:
            return None

    @staticmethod
    def _until(is_done, seconds=30):
        until = time.monotonic() + seconds
        while not is_done():
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
        return True

    def report(self):
        return httpx.get(f"{self.url}/ready", timeout=10)

    def until_inventory(self):
        assert self._until(lambda: self.report().json()["inventory_age"] is not None)

    def post(self):
        """Post a completion with the secret of the store."""
        path = Inbox(self.store, secrets=kept_secrets(self.store)).path(Kind.COMPLETION)
        return httpx.post(f"{self.url}/events{path}", json=COMPLETION, timeout=10)

    def click(self, code="nobody"):
        return httpx.get(f"{self.url}/go", headers={"X-Member": code}, timeout=10)

    def terminate(self):
        """Send SIGTERM; return the seconds until the end, and what the process has written."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)
        return time.monotonic() - began, self.process.stdout.read()


def seconds_to_end(run):
    """Return the shortest of at most three times to the end: a machine that does other things too is slow."""
    seconds = []
    while len(seconds) < 3 and min(seconds, default=9.0) > 1.0:
        seconds.append(run())
    return min(seconds)


@pytest.mark.parametrize("operator", [refusing, hanging])
def test_a_service_whose_operator_is_away_starts_receives_and_ends(operator, tmp_path):
    def run():
        with operator() as url, Service(tmp_path, url) as service:
            assert service.post().status_code == 200
            click = service.click()
            report = service.report()
            seconds, written = service.terminate()
        assert (click.status_code, click.json()["detail"]) == (503, AWAY)
        assert report.status_code == 200
        assert report.json()["problems"][0] == "clicks cannot be routed: there is no inventory yet"
        assert "Traceback" not in written
        return seconds

    assert seconds_to_end(run) < 1.0


def test_a_service_ends_while_the_operator_may_still_respond_to_a_click(tmp_path):
    """The click has ended. The response is waited for, because there may be an invite, but not at the end."""

    def run():
        with SIM.serve() as url, Service(tmp_path, url) as service:
            service.until_inventory()
            SIM.faults.add(Fault.delay(30))
            try:
                clicks = [
                    threading.Thread(target=service.click, args=[code]) for code in list(SIM.members)[:10]
                ]
                for click in clicks:
                    click.start()
                for click in clicks:
                    click.join()
                assert service.report().json()["router"]["clicks"]["unclear"] > 0
                seconds, written = service.terminate()
            finally:
                SIM.faults.clear()
        assert "Traceback" not in written
        return seconds

    assert seconds_to_end(run) < 1.0
