"""Receivers and handlers that are killed, and a database that is restarted: nothing is lost or doubled."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter

import anyio
import pytest
from store_kit import NOTE_SETTLED, SECRET, Cluster, missing

from sampling_async.notifications import Inbox, State

COUNT = 400
WAIT = 60.0
BEGIN = f"""{NOTE_SETTLED}
import anyio
def log(*words):
    os.write(file, " ".join(map(str, words)).encode() + b"\\n")
inbox = Inbox(store, secrets={SECRET!r}, handling=HandlerPolicy(lease=1.0, poll=0.02, first_wait=0.01))
"""
RECEIVER = f"""{BEGIN}
import json, random
numbers = json.loads(sys.argv[3])
random.Random(sys.argv[2]).shuffle(numbers)
async def send():
    while numbers:
        number = numbers.pop()
        fields = {{"UniqueCode": f"m-{{number}}", "SurveyId": 1, "WaveId": 1, "Revenue": 100}}
        while (await inbox.receive(
            "completion", json.dumps(fields).encode(), {{}}, "", secret={SECRET!r}
        )).status != 200:
            await anyio.sleep(0.01)
        log(number)
async def main():
    async with inbox, anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(send)
anyio.run(main)
"""
HANDLER = f"""{BEGIN}
@inbox.on(Completion, UnknownNotification)
async def handle(fact):
    log("begin", fact.id, fact.key)
async def main():
    async with inbox:
        await anyio.sleep_forever()
anyio.run(main)
"""


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def database(request, tmp_path):
    """Return the address of a store, and what restarts its server."""
    if request.param == "sqlite":
        yield str(tmp_path / "n.db"), lambda: None
        return
    if reason := missing():
        pytest.skip(reason)
    cluster = Cluster(fsync=True)
    yield cluster.dsn, cluster.restart
    cluster.remove()


class Processes:
    """Programs that are killed and started again, each with a file of what it has done."""

    def __init__(self, program: str, address: str, files, arguments) -> None:
        self._program = program
        self._address = address
        self._arguments = arguments
        self.files = files
        for file in self.files:
            file.touch()
        self.running = [self.start(number) for number in range(2)]

    def start(self, number: int) -> subprocess.Popen[bytes]:
        file = self.files[number]
        command = [sys.executable, "-c", self._program, self._address, file, self._arguments(file)]
        return subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def kill(self, number: int, *, again: bool = True) -> None:
        self.running[number].kill()
        self.running[number].wait()
        if again:
            self.running[number] = self.start(number)

    def wait_for(self, lines: int) -> None:
        until = time.monotonic() + WAIT
        while sum(file.read_bytes().count(b"\n") for file in set(self.files)) < lines:
            assert time.monotonic() < until
            time.sleep(0.01)


def facts_of(address, **options):
    async def read():
        return [fact async for fact in Inbox(address, secrets=SECRET).facts(**options)]

    return anyio.run(read)


def acknowledged(file):
    return {int(line) for line in file.read_text().splitlines()}


def test_what_was_acknowledged_is_there_once(database, tmp_path):
    """Both receivers get everything, so that they receive the same at the same time."""
    address, restart = database
    receivers = Processes(
        RECEIVER,
        address,
        [tmp_path / "0.log", tmp_path / "1.log"],
        lambda file: str(sorted(set(range(COUNT)) - acknowledged(file))),
    )
    for number, lines in enumerate((100, 200, 300, 400)):
        receivers.wait_for(lines)
        receivers.kill(number % 2)
        if lines in (200, 300):
            restart()
    for process in receivers.running:
        assert process.wait(WAIT) == 0
    assert all(acknowledged(file) == set(range(COUNT)) for file in receivers.files)
    facts = facts_of(address)
    assert Counter(fact.notification.member_code for fact in facts) == Counter(f"m-{n}" for n in range(COUNT))
    assert len({fact.key for fact in facts}) == COUNT
    assert all(fact.receipts >= 2 for fact in facts)

    log = tmp_path / "handled.log"  # one for both, for the order
    processes = Processes(HANDLER, address, [log, log], lambda _file: "")
    for number, lines in enumerate((100, 250, 400)):
        processes.wait_for(lines)
        processes.kill(number % 2)
        if lines == 250:
            restart()
    until = time.monotonic() + WAIT
    while len(facts_of(address, state=State.HANDLED)) < COUNT:
        assert time.monotonic() < until
        time.sleep(0.05)
    for number in range(2):
        processes.kill(number, again=False)
    begun, settled = set(), set()
    for what, fact_id, *key in map(str.split, log.read_text().splitlines()):
        if what == "settled":
            settled.add(fact_id)
        else:
            assert fact_id not in settled
            begun.update(key)
    assert begun == {fact.key for fact in facts}
