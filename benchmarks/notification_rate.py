"""How many notifications a second one receiver stores, and how long each waits for its acknowledgement.

    python benchmarks/notification_rate.py
    python benchmarks/notification_rate.py --beside ../other-worktree    another version too, interleaved
    python benchmarks/notification_rate.py --store postgres              PostgreSQL too: one receiver, and two

`sampling-async notifications serve` receives, undisturbed; for kills and a full disk see `notifications.py`.
Beside it, in turn, a *bare* application under the same server reads the body and answers 200: that is what
HTTP alone costs. With `--store postgres` a PostgreSQL server of its own is started, whose writes reach the
disk. The sender has 64 connections to each receiver, with one notification each at a time. It writes bytes that
were made before, so that it takes little of the machine.

CPU time is what the processes of the receivers used, with all threads and the kernel's work for them, but not
that of the database. Then one process with handlers that do nothing handles all facts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from attrs import frozen
from notifications import CONNECTIONS, Cluster, percentile, true_ones

from sampling_async.notifications import (
    Completion,
    Fact,
    Inbox,
    InviteNotification,
    QuotaStatus,
    Terminate,
    UnknownNotification,
)
from sampling_async.notifications._stores import store_of

ROOT: Final = Path(__file__).resolve().parent.parent
RECORDS: Final = (Completion, InviteNotification, QuotaStatus, Terminate, UnknownNotification)
TICKS: Final = os.sysconf("SC_CLK_TCK")
BARE: Final = """
import asyncio, json, socket, uvicorn
async def app(scope, receive, send):
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"OK"})
listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # so that asyncio sets NODELAY
listener.bind(("127.0.0.1", 0))
listener.listen(2048)
print(json.dumps({"any": f"http://127.0.0.1:{listener.getsockname()[1]}/any"}), flush=True)
options = {"lifespan": "off", "ws": "none", "access_log": False, "proxy_headers": False, "log_level": "warning"}
asyncio.run(uvicorn.Server(uvicorn.Config(app, **options)).serve(sockets=[listener]))
"""


@frozen
class Measured:
    """One run: notifications a second, and times in milliseconds."""

    rate: float
    median: float
    p99: float
    cpu: float
    sender_cpu: float
    handled: float


class Connection(asyncio.Protocol):
    """Sends the next request when the response to the last one is there."""

    def __init__(self, requests: list[bytes], seconds: list[float], over: asyncio.Future[None]) -> None:
        self._requests = requests
        self._seconds = seconds
        self._over = over
        self._transport: asyncio.WriteTransport
        self._began = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # noqa: D102  of asyncio
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        self._send()

    def data_received(self, data: bytes) -> None:  # noqa: D102
        if not data.endswith(b"\r\n\r\nOK"):  # the response is written at once, or its head before its body
            assert data.startswith(b"HTTP/1.1 200 ") or data == b"OK", data
            if data != b"OK":
                return
        self._seconds.append(time.perf_counter() - self._began)
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: D102
        if not self._over.done():
            self._over.set_exception(exc or ConnectionError("the receiver has closed a connection"))

    def _send(self) -> None:
        if self._requests:
            self._began = time.perf_counter()
            self._transport.write(self._requests.pop())
        elif not self._over.done():
            self._over.set_result(None)


async def send(url: str, requests: list[bytes]) -> list[float]:
    """Send all requests, and return how long each one took."""
    parts, loop, seconds = urlsplit(url), asyncio.get_running_loop(), list[float]()
    ends = [loop.create_future() for _ in range(CONNECTIONS)]
    made = [partial(Connection, requests, seconds, end) for end in ends]
    opened = [await loop.create_connection(each, parts.hostname, parts.port) for each in made]
    await asyncio.gather(*ends)
    for transport, _ in opened:
        transport.close()
    return seconds


def cpu_of(process: int) -> float:
    """Return the CPU time of a process so far, in seconds."""
    user, system = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / TICKS


def measure(root: Path | None, queue: list[tuple[str, bytes, str]], store: str, receivers: int = 1) -> Measured:
    """Have receivers started, send everything to them, and hold their store against what was sent."""
    serve = ["-m", "sampling_async", "notifications", "serve", "--port", "0", "--store", store]
    command = [sys.executable, *(["-c", BARE] if root is None else serve)]
    more: Any = {"cwd": root or ROOT, "env": {**os.environ, "PYTHONPATH": str(root or ROOT)}}
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **more) for _ in range(receivers)]
    try:
        urls = [json.loads(str(process.stdout and process.stdout.readline())) for process in processes]
        shares = [
            [request(each.get(kind, next(iter(each.values()))), body) for kind, body, _ in queue[at::receivers]]
            for at, each in enumerate(urls)
        ]
        before, own_before = sum(cpu_of(process.pid) for process in processes), time.process_time()
        began = time.perf_counter()
        seconds = asyncio.run(send_all([next(iter(each.values())) for each in urls], shares))
        took = time.perf_counter() - began
        own = time.process_time() - own_before
        cpu = sum(cpu_of(process.pid) for process in processes) - before
    finally:
        for process in processes:
            process.kill()
            process.wait()
    handled = 0.0
    if root is not None:
        found, sent = sum(1 for _ in store_of(store).facts()), len({identity for *_, identity in queue})
        assert found == sent, f"{found:,} facts of {sent:,} notifications"
        handled = asyncio.run(handle_all(store))
    return Measured(
        len(queue) / took,
        percentile(seconds, 0.5) * 1e3,
        percentile(seconds, 0.99) * 1e3,
        cpu / len(queue) * 1e3,
        own / len(queue) * 1e3,
        handled,
    )


async def send_all(urls: list[str], shares: list[list[bytes]]) -> list[float]:
    """Send each receiver its share at the same time, and return how long each request took."""
    found = await asyncio.gather(*map(send, urls, shares))
    return [seconds for each in found for seconds in each]


async def handle_all(store: str) -> float:
    """Handle all facts of a store in this process, and return how many a second."""
    inbox, count = Inbox(store, secrets="a-secret-of-this-benchmark"), 0

    @inbox.on(*RECORDS)
    async def handle(_: Fact[Any]) -> None:
        nonlocal count
        count += 1

    began = time.perf_counter()
    async with inbox:
        while (await inbox.status()).pending:  # noqa: ASYNC110  of a store
            await asyncio.sleep(0.1)
    return count / (time.perf_counter() - began)


def request(url: str, body: bytes) -> bytes:
    """Return the bytes of a request."""
    return (
        f"POST {urlsplit(url).path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    )


def main() -> None:
    """Measure in rounds, and print medians and extremes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--beside", type=Path, action="append", default=[], metavar="WORKTREE")
    parser.add_argument("--store", choices=["sqlite", "postgres"], default="sqlite")
    options = parser.parse_args()
    rng = random.Random(18)
    queue = true_ones(options.count, rng)
    queue += rng.sample(queue, options.count // 20)
    rng.shuffle(queue)
    roots: dict[str, Path | None] = {"inbox": ROOT, **{str(each): each.resolve() for each in options.beside}}
    roots["bare"] = None
    names = [*roots, *(["postgres", "postgres, 2"] if options.store == "postgres" else [])]
    runs: dict[str, list[Measured]] = {name: [] for name in names}
    cluster = Cluster(fsync=True) if options.store == "postgres" else None
    try:
        for _ in range(options.rounds):
            for name in names:
                with tempfile.TemporaryDirectory() as folder:
                    of_database = cluster is not None and name.startswith("postgres")
                    store = cluster.new_dsn() if cluster and of_database else f"{folder}/notifications.db"
                    runs[name].append(measure(roots.get(name, ROOT), queue, store, 2 if name[-1] == "2" else 1))
    finally:
        if cluster is not None:
            cluster.remove()
    width = max(map(len, runs))
    print(
        f"{'':{width}}  a second (each round)   median, 99 % ms   CPU ms: receiver, sender   handled a second"
    )
    for name, each in runs.items():
        rates = " ".join(f"{run.rate:,.0f}" for run in each)
        middle = [
            statistics.median(getattr(run, field) for run in each)
            for field in ("rate", "median", "p99", "cpu", "sender_cpu", "handled")
        ]
        rate, median, p99, cpu, sender, handled = middle
        print(
            f"{name:{width}}  {rate:7,.0f} ({rates})  {median:5.1f} {p99:6.1f}   {cpu:.3f} {sender:.3f}"
            f"   {handled:7,.0f}"
        )


if __name__ == "__main__":
    os.environ.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    main()
