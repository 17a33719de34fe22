"""100,000 notifications at full speed over HTTP, while receivers are killed, and the disk or database fails.

    python benchmarks/notifications.py
    python benchmarks/notifications.py --count 5000      a short one
    python benchmarks/notifications.py --store postgres  two receivers on one PostgreSQL
    python benchmarks/notifications.py --by fastapi      two workers of an application with FastAPI

`sampling-async notifications serve` receives, or an application with FastAPI, whose workers are killed. 5 % are
sent twice, the order is shuffled, 1 % are not understood, and 1 % more are forged. What is not acknowledged is
sent again, as the service does. Then two processes with handlers take the facts.

With SQLite there is one receiver, which is killed five times with SIGKILL and started again. Once it cannot
write to its disk for a second: its files may not grow (`prlimit`). One of the handlers is killed too.

With PostgreSQL there are two receivers on a server of its own. Receivers are killed five times, handlers five
times, and the server crashes and is started again once beside each.

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
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from store_kit import (
    NOTE_SETTLED,  # the folder of the tests must be on the path
    Cluster,
    missing,
)
from wire import free_port

from sampling_async.notifications import (
    Completion,
    Inbox,
    InviteNotification,
    QuotaStatus,
    State,
    Terminate,
    UnknownNotification,
    Validity,
    kept_secrets,
)
from sampling_async.notifications._stores import store_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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

    def __init__(self, store: str) -> None:
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
            *("--store", self._store, "--port", str(self._port)),
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

    def restart(self) -> None:
        """Kill it, and start it again."""
        self.kill()
        self.start()

    def have_a_full_disk(self) -> None:
        """Let its disk be full for a while."""
        self.fill_disk(is_full=True)
        time.sleep(FULL_SECONDS)
        self.fill_disk(is_full=False)

    def fill_disk(self, *, is_full: bool) -> None:
        """Let no file of it grow, or all."""
        assert self._process is not None
        _, hard = resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE)
        soft = 4096 if is_full else hard
        resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (soft, hard))


APPLICATION = """
import os
from contextlib import asynccontextmanager
from fastapi import FastAPI
from sampling_async.notifications import Inbox, kept_secrets
inbox = Inbox(os.environ["STORE"], secrets=kept_secrets(os.environ["STORE"]))
@asynccontextmanager
async def lifespan(app):
    async with inbox:
        yield
app = FastAPI(lifespan=lifespan)
app.mount("/events", inbox.app)
"""


class Workers(Receiver):
    """An application with FastAPI and two workers of uvicorn, which starts a worker again that was killed."""

    def __init__(self, store: str, folder: Path) -> None:
        super().__init__(store)
        self._folder = folder
        self._next = 0

    def start(self) -> None:
        """Start it, and wait until it answers."""
        began = time.perf_counter()
        (self._folder / "application.py").write_text(APPLICATION)
        self._port = free_port()
        address = f"http://127.0.0.1:{self._port}/events"
        self.urls = {str(kind): url for kind, url in self._inbox().urls(address).items()}
        command = [sys.executable, "-m", "uvicorn", "application:app", "--workers", "2", "--no-access-log"]
        environment = {**os.environ, "STORE": self._store}
        self._process = subprocess.Popen(
            [*command, "--port", str(self._port), "--log-level", "error"], cwd=self._folder, env=environment
        )
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1.0):
                break
            time.sleep(0.05)
        self.starts.append(time.perf_counter() - began)

    def _inbox(self) -> Inbox:
        return Inbox(self._store, secrets=kept_secrets(self._store))

    def restart(self) -> None:
        """Kill one worker; the other goes on, and a new one comes."""
        assert self._process is not None
        listed = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        workers = [int(pid) for pid in listed if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(workers[self._next % len(workers)], signal.SIGKILL)
        self._next += 1


class Sender:
    """Sends over keep-alive connections, and again until it is acknowledged."""

    def __init__(self, receivers: Sequence[Receiver]) -> None:
        self._receivers = receivers
        self.acknowledged: set[str] = set()
        self.statuses: Counter[int] = Counter()
        self.seconds: list[float] = []
        self.hits = 0

    async def send_all(self, queue: list[tuple[str, bytes, str]]) -> None:
        """Send everything, in this order as far as several connections keep one."""
        items = iter(queue)
        async with asyncio.TaskGroup() as tasks:
            for number in range(CONNECTIONS):
                tasks.create_task(self._connection(items, self._receivers[number % len(self._receivers)]))

    async def _connection(self, items: Any, receiver: Receiver) -> None:
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        for kind, body, identity in items:
            while True:
                url = urlsplit(receiver.urls[kind])
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


async def ingest(
    receivers: Sequence[Receiver], queue: list[tuple[str, bytes, str]], steps: Sequence[Callable[[], object]]
) -> tuple[Sender, float]:
    """Send everything, while these steps are taken in between; return the seconds it took."""
    sender = Sender(receivers)
    for receiver in receivers:
        receiver.start()
    began = time.perf_counter()
    sending = asyncio.create_task(sender.send_all(queue))
    for number, step in enumerate(steps, 1):
        while sender.hits < len(queue) * number / (len(steps) + 1) and not sending.done():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.to_thread(step)
    await sending
    seconds = time.perf_counter() - began
    for receiver in receivers:
        receiver.kill(signal.SIGTERM)
    return sender, seconds


HANDLING = f"""{NOTE_SETTLED}
import asyncio
async def main():
    policy = HandlerPolicy(at_once=64, lease=3.0, poll=0.1)
    inbox = Inbox(store, secrets="a-secret-of-nobody", handling=policy)
    @inbox.on(Completion, Terminate, QuotaStatus, SurveyClosed, InviteNotification, UnknownNotification)
    async def handle(fact):
        os.write(file, b"begun %d\\n" % fact.id)
    async with inbox:
        print("ready", flush=True)
        await asyncio.sleep(10_000)
asyncio.run(main())
"""


class Handlers:
    """Two processes with handlers, and one file in which both note what they do, in its order."""

    def __init__(self, store: str, folder: Path) -> None:
        self._store = store
        self._file = folder / "handled"
        self._file.touch()
        self._processes = [self._start(), self._start()]

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HANDLING, self._store, str(self._file)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    def kill(self, number: int) -> None:
        """Kill one of them, and start it again."""
        self._processes[number].kill()
        self._processes[number].wait()
        self._processes[number] = self._start()

    def handle(self, count: int, steps: Sequence[Callable[[], object]]) -> float:
        """Handle all facts, with these steps in between; return the seconds it took."""
        began = time.perf_counter()
        for number, step in enumerate(steps, 1):
            while sum(self.calls()[0].values()) < count * number / (len(steps) + 1):
                time.sleep(0.1)
            step()
        opened = store_of(self._store)
        while next(iter(opened.facts(state=State.PENDING)), None) is not None:
            time.sleep(0.2)
        seconds = time.perf_counter() - began
        for process in self._processes:
            process.terminate()
            process.wait()
        return seconds

    def calls(self) -> tuple[Counter[int], set[int]]:
        """Return how often a handler was called with each fact, and the facts that it got after a success."""
        begun, settled, again = Counter[int](), set[int](), set[int]()
        for line in self._file.read_text().splitlines():
            what, number = line.split()
            if what == "settled":
                settled.add(int(number))
                continue
            begun[int(number)] += 1
            if int(number) in settled:
                again.add(int(number))
        return begun, again


def percentile(values: list[float], share: float) -> float:
    """Return the value that this share of the values is below."""
    return sorted(values)[int(len(values) * share)]


def main() -> None:
    """Run everything, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--store", choices=["sqlite", "postgres"], default="sqlite")
    parser.add_argument("--by", choices=["serve", "fastapi"], default="serve", help="who receives")
    options = parser.parse_args()
    count, is_postgres = options.count, options.store == "postgres"
    if is_postgres and missing():
        raise SystemExit(missing())
    rng = random.Random(18)
    true = true_ones(count, rng)
    forged = json.dumps({"UniqueCode": FORGED, "SurveyId": 1, "WaveId": 1, "Revenue": 99_999}).encode()
    queue = [*true, *rng.sample(true, count // 20), *([("completion", forged, FORGED)] * (count // 100))]
    # Shuffled whole first, so that repetitions and forged ones are everywhere, and the kinds in no order.
    rng.shuffle(queue)
    cluster = Cluster(fsync=True) if is_postgres else None
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        if cluster is not None:
            stack.callback(cluster.remove)
        store = cluster.dsn if cluster is not None else str(Path(folder) / "notifications.db")
        receivers = (
            [Workers(store, Path(folder))]
            if options.by == "fastapi"
            else [Receiver(store) for _ in range(2 if is_postgres else 1)]
        )
        steps: list[Callable[[], object]] = [
            receivers[number % len(receivers)].restart for number in range(KILLS)
        ]
        if cluster is not None:
            steps.insert(KILLS // 2, cluster.restart)
        elif options.by == "serve":
            steps.insert(KILLS // 2, receivers[0].have_a_full_disk)
        sender, seconds = asyncio.run(ingest(receivers, queue, steps))
        found = Counter(identity_of(fact) for fact in store_of(store).facts())
        valid = [fact.id for fact in store_of(store).facts() if fact.validity is Validity.STANDS]
        handlers = Handlers(store, Path(folder))
        steps = [partial(handlers.kill, number % 2) for number in range(KILLS if is_postgres else 1)]
        if cluster is not None:
            steps.insert(KILLS // 2, cluster.restart)
        handling_seconds = handlers.handle(len(valid), steps)
        handled, again = handlers.calls()
    lost = sender.acknowledged - set(found)
    rows = [
        ("notifications sent, of which answered 200, 404, 503", f"{sender.hits:,}: {_counts(sender.statuses)}"),
        (
            ("receivers and handlers killed, server restarted", f"{2 * KILLS} times, twice")
            if is_postgres
            else (
                ("receiver killed, disk full", f"{KILLS} times, {FULL_SECONDS:g} s")
                if options.by == "serve"
                else ("worker killed", f"{KILLS} times")
            )
        ),
        ("acknowledged, but lost", f"{len(lost):,} of {len(sender.acknowledged):,}"),
        ("never acknowledged", f"{count - len(sender.acknowledged):,}"),
        ("doubled facts", f"{sum(times - 1 for times in found.values()):,} of {len(found):,}"),
        ("forged accepted", f"{found[FORGED]:,} of {count // 100:,}"),
        ("facts that no handler got", f"{len(set(valid) - set(handled)):,} of {len(valid):,}"),
        ("facts that a handler got again, after a kill", f"{sum(times > 1 for times in handled.values()):,}"),
        ("facts that a handler got again after a success", f"{len(again):,}"),
        ("stored, a second (kills and restarts included)", f"{sender.hits / seconds:,.0f}"),
        ("acknowledged after, median", f"{percentile(sender.seconds, 0.5) * 1e3:,.1f} ms"),
        ("acknowledged after, 99 %", f"{percentile(sender.seconds, 0.99) * 1e3:,.1f} ms"),
        ("start of a receiver, longest", f"{max(max(each.starts) for each in receivers):.2f} s"),
        ("memory of a receiver, most", f"{max(each.peak_kb for each in receivers) / 1e3:,.0f} MB"),
        ("handled, a second, by two processes", f"{sum(handled.values()) / handling_seconds:,.0f}"),
    ]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    if lost or found[FORGED] or sum(found.values()) > len(found) or set(valid) - set(handled) or again:
        raise SystemExit(1)


def _counts(statuses: Counter[int]) -> str:
    return ", ".join(f"{count:,} x {status}" for status, count in sorted(statuses.items()))


if __name__ == "__main__":
    os.environ.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    main()
