"""100,000 notifications at full speed over HTTP, with a receiver that is killed and a disk that is full.

    python benchmarks/notifications.py
    python benchmarks/notifications.py --count 5000      a short one

`sampling-async notifications serve` receives. 5 % are sent twice, the order is shuffled, 1 % are not
understood, and 1 % more are forged. The receiver is killed five times with SIGKILL and started again. Once it
cannot write to its disk for a second: its files may not grow (`prlimit`). What is not acknowledged is sent
again, as the service does. Then two processes with handlers take the facts; one of them is killed.

At the end the store is held against what was acknowledged.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sampling_async.notifications import (
    Completion,
    InviteNotification,
    QuotaStatus,
    SqliteStore,
    State,
    Terminate,
    UnknownNotification,
    Validity,
)

CONNECTIONS = 64
KILLS = 5
FULL_SECONDS = 1.0
FORGED = "forged"


def true_ones(count: int, rng: random.Random) -> list[tuple[str, bytes, str]]:
    """Return notifications: kind, body, and what identifies the fact."""
    made: list[tuple[str, bytes, str]] = []
    for number in range(count):
        member = {
            "UniqueCode": f"m{number:07}",
            "SurveyId": 2_400_000 + number % 300,
            "SurveyRef": "S",
            "WaveId": 770_000 + number % 300,
            "QuotaID": 1_100_000 + number % 800,
            "DateTime": "2026-11-22 10:00:00",
            "AdditionalData": f"invite={number:024x}&quota={number % 800}",
        }
        chance = rng.random()
        if chance < 0.01:
            made.append(("invite", b"\xff?%d" % number, f"unknown {number}"))
        elif chance < 0.55:
            made.append(("completion", json.dumps({**member, "Revenue": 150}).encode(), f"completion {number}"))
        elif chance < 0.8:
            made.append(("terminate", json.dumps({**member, "Reason": "X"}).encode(), f"terminate {number}"))
        elif chance < 0.85:
            made.append(("invite", json.dumps(member).encode(), f"invite {number}"))
        else:
            status = {
                "QuotaID": 5_000_000 + number,
                "SurveyID": 1,
                "WaveID": 1,
                "IsLive": False,
                "UpdateDateTimeUTC": "2026-11-22T10:00:00",
            }
            made.append(("quota_status", json.dumps(status).encode(), f"quota_status {number}"))
    return made


def identity_of(fact: Any) -> str:
    """Return what identifies a fact, as `true_ones` has it."""
    notification = fact.notification
    match notification:
        case UnknownNotification():
            return f"unknown {notification.body[2:].decode()}"
        case QuotaStatus():
            return f"quota_status {notification.quota_id - 5_000_000}"
        case Completion() | Terminate() | InviteNotification() if notification.member_code != FORGED:
            return f"{fact.kind} {int(notification.member_code[1:])}"
        case _:
            return FORGED


class Receiver:
    """`sampling-async notifications serve`, which can be killed and started again."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._port = 0
        self._process: subprocess.Popen[str] | None = None
        self.urls: dict[str, str] = {}
        self.peak_kb = 0
        self.starts: list[float] = []

    def start(self) -> None:
        """Start it, and check that its URLs are those from before."""
        began = time.perf_counter()
        command = [
            *(sys.executable, "-m", "sampling_async", "notifications", "serve"),
            *("--store", str(self._store), "--port", str(self._port)),
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        urls = json.loads(self._process.stdout.readline())
        assert not self.urls or urls == self.urls, "the URLs have changed"
        self.urls, self._port = urls, urlsplit(urls["invite"]).port or 0
        self.starts.append(time.perf_counter() - began)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End it, and note the memory it had."""
        assert self._process is not None
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        self.peak_kb = max(self.peak_kb, int(status.partition("VmHWM:")[2].split()[0]))
        self._process.send_signal(number)
        self._process.wait()

    def fill_disk(self, *, is_full: bool) -> None:
        """Let no file of it grow, or all."""
        assert self._process is not None
        _, hard = resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE)
        soft = 4096 if is_full else hard
        resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (soft, hard))


class Sender:
    """Sends over keep-alive connections, and again until it is acknowledged."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self.acknowledged: set[str] = set()
        self.statuses: Counter[int] = Counter()
        self.seconds: list[float] = []
        self.hits = 0

    async def send_all(self, queue: list[tuple[str, bytes, str]]) -> None:
        """Send everything, in this order as far as several connections keep one."""
        items = iter(queue)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(CONNECTIONS):
                tasks.create_task(self._connection(items))

    async def _connection(self, items: Any) -> None:
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        for kind, body, identity in items:
            while True:
                url = urlsplit(self._receiver.urls[kind])
                path = url.path + ("x" if identity == FORGED else "")
                head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
                began = time.perf_counter()
                try:
                    if streams is None:
                        streams = await asyncio.open_connection(url.hostname, url.port)
                    streams[1].write(head.encode() + body)
                    status = await self._status(streams[0])
                except (OSError, asyncio.IncompleteReadError):
                    streams = None
                    await asyncio.sleep(0.05)
                    continue
                self.hits += 1
                self.statuses[status] += 1
                self.seconds.append(time.perf_counter() - began)
                if status == 503:
                    await asyncio.sleep(0.05)
                    continue
                if status == 200:
                    self.acknowledged.add(identity)
                break
        if streams is not None:
            streams[1].close()

    async def _status(self, reader: asyncio.StreamReader) -> int:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split()[0])
        await reader.readexactly(length)
        return int(head.split()[1])


async def ingest(receiver: Receiver, queue: list[tuple[str, bytes, str]]) -> tuple[Sender, float]:
    """Send everything, while the receiver is killed and its disk is full; return the seconds it took."""
    sender = Sender(receiver)
    receiver.start()
    began = time.perf_counter()
    sending = asyncio.create_task(sender.send_all(queue))
    for number in range(1, KILLS + 2):
        while sender.hits < len(queue) * number / (KILLS + 2) and not sending.done():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        if number == KILLS // 2 + 1:
            receiver.fill_disk(is_full=True)
            await asyncio.sleep(FULL_SECONDS)
            receiver.fill_disk(is_full=False)
        else:
            receiver.kill()
            await asyncio.to_thread(receiver.start)
    await sending
    seconds = time.perf_counter() - began
    receiver.kill(signal.SIGTERM)
    return sender, seconds


HANDLING = """
import asyncio, sys
from sampling_async.notifications import *
async def main():
    policy = HandlerPolicy(at_once=64, lease=3.0, poll=0.1)
    inbox = Inbox(sys.argv[1], secrets="a-secret-of-nobody", handling=policy)
    told = open(sys.argv[2], "a", buffering=1)
    @inbox.on(Completion, Terminate, QuotaStatus, SurveyClosed, InviteNotification, UnknownNotification)
    async def handle(fact):
        print(fact.id, file=told)
    async with inbox:
        print("ready", flush=True)
        await asyncio.sleep(10_000)
asyncio.run(main())
"""


def handle(store: Path, folder: Path, count: int) -> tuple[Counter[int], float]:
    """Handle all facts by two processes, of which one is killed; return how often each was, and the seconds."""
    told = [folder / f"handled-{number}" for number in range(3)]

    def start(number: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HANDLING, str(store), str(told[number])]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    def lines() -> Counter[int]:
        texts = [path.read_text() for path in told if path.exists()]
        # The last line of a process that was killed may be cut off.
        return Counter(int(line) for text in texts for line in text.rpartition("\n")[0].splitlines())

    began = time.perf_counter()
    first, second = start(0), start(1)
    while sum(lines().values()) < count / 2:
        time.sleep(0.1)
    first.kill()
    first.wait()
    third = start(2)
    opened = SqliteStore(store)
    while next(iter(opened.facts(state=State.PENDING)), None) is not None:
        time.sleep(0.2)
    seconds = time.perf_counter() - began
    for process in (second, third):
        process.terminate()
        process.wait()
    return lines(), seconds


def percentile(values: list[float], share: float) -> float:
    """Return the value that this share of the values is below."""
    return sorted(values)[int(len(values) * share)]


def main() -> None:
    """Run everything, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    count = parser.parse_args().count
    rng = random.Random(18)
    true = true_ones(count, rng)
    forged = json.dumps({"UniqueCode": FORGED, "SurveyId": 1, "WaveId": 1, "Revenue": 99_999}).encode()
    queue = [*true, *rng.sample(true, count // 20), *([("completion", forged, FORGED)] * (count // 100))]
    # Shuffled whole first, so that repetitions and forged ones are everywhere, and the kinds in no order.
    rng.shuffle(queue)
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "notifications.db"
        receiver = Receiver(store)
        sender, seconds = asyncio.run(ingest(receiver, queue))
        found = Counter(identity_of(fact) for fact in SqliteStore(store).facts())
        valid = [fact.id for fact in SqliteStore(store).facts() if fact.validity is Validity.STANDS]
        handled, handling_seconds = handle(store, Path(folder), len(valid))
        megabytes = store.stat().st_size / 1e6
    lost = sender.acknowledged - set(found)
    rows = [
        ("notifications sent, of which answered 200, 404, 503", f"{sender.hits:,}: {_counts(sender.statuses)}"),
        ("receiver killed, disk full", f"{KILLS} times, {FULL_SECONDS:g} s"),
        ("acknowledged, but lost", f"{len(lost):,} of {len(sender.acknowledged):,}"),
        ("never acknowledged", f"{count - len(sender.acknowledged):,}"),
        ("doubled facts", f"{sum(times - 1 for times in found.values()):,} of {len(found):,}"),
        ("forged accepted", f"{found[FORGED]:,} of {count // 100:,}"),
        ("facts that no handler got", f"{len(set(valid) - set(handled)):,} of {len(valid):,}"),
        (
            "facts that a handler got again",
            f"{sum(times > 1 for times in handled.values()):,} (one was killed)",
        ),
        ("stored, a second (kills and restarts included)", f"{sender.hits / seconds:,.0f}"),
        ("acknowledged after, median", f"{percentile(sender.seconds, 0.5) * 1e3:,.1f} ms"),
        ("acknowledged after, 99 %", f"{percentile(sender.seconds, 0.99) * 1e3:,.1f} ms"),
        ("start of the receiver, longest", f"{max(receiver.starts):.2f} s"),
        ("memory of the receiver, most", f"{receiver.peak_kb / 1e3:,.0f} MB"),
        ("handled, a second, by two processes", f"{sum(handled.values()) / handling_seconds:,.0f}"),
        ("size of the store", f"{megabytes:,.0f} MB"),
    ]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    if lost or found[FORGED] or sum(found.values()) > len(found) or set(valid) - set(handled):
        raise SystemExit(1)


def _counts(statuses: Counter[int]) -> str:
    return ", ".join(f"{count:,} x {status}" for status, count in sorted(statuses.items()))


if __name__ == "__main__":
    os.environ.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    main()
