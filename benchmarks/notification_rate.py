"""How many notifications a second one receiver stores, and how long each waits for its acknowledgement.

    python benchmarks/notification_rate.py
    python benchmarks/notification_rate.py --beside ../other-worktree    another version too, interleaved

`sampling-async notifications serve` receives, undisturbed; for kills and a full disk see `notifications.py`.
Beside it, in turn, a *bare* application under the same server reads the body and answers 200: that is what
HTTP alone costs. The sender has 64 connections with one notification each at a time, and writes bytes that were
made before, so that it takes little of the machine.

CPU time is what the process of the receiver used, with both of its threads and the kernel's work for it.
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
from typing import Final
from urllib.parse import urlsplit

from attrs import frozen
from notifications import CONNECTIONS, percentile, true_ones

from sampling_async.notifications import SqliteStore

ROOT: Final = Path(__file__).resolve().parent.parent
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


def measure(root: Path | None, queue: list[tuple[str, bytes, str]], folder: Path) -> Measured:
    """Have a receiver started, send everything to it, and hold its store against what was sent."""
    store = folder / "notifications.db"
    serve = ["-m", "sampling_async", "notifications", "serve", "--port", "0", "--store", str(store)]
    process = subprocess.Popen(
        [sys.executable, *(["-c", BARE] if root is None else serve)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root or ROOT,
        env={**os.environ, "PYTHONPATH": str(root or ROOT)},
    )
    try:
        assert process.stdout is not None
        urls = json.loads(process.stdout.readline())
        requests = [request(urls.get(kind, next(iter(urls.values()))), body) for kind, body, _ in queue]
        before, own_before = cpu_of(process.pid), time.process_time()
        began = time.perf_counter()
        seconds = asyncio.run(send(next(iter(urls.values())), requests))
        took = time.perf_counter() - began
        own, cpu = time.process_time() - own_before, cpu_of(process.pid) - before
    finally:
        process.kill()
        process.wait()
    if root is not None:
        found, sent = sum(1 for _ in SqliteStore(store).facts()), len({identity for *_, identity in queue})
        assert found == sent, f"{found:,} facts of {sent:,} notifications"
    return Measured(
        len(queue) / took,
        percentile(seconds, 0.5) * 1e3,
        percentile(seconds, 0.99) * 1e3,
        cpu / len(queue) * 1e3,
        own / len(queue) * 1e3,
    )


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
    options = parser.parse_args()
    rng = random.Random(18)
    queue = true_ones(options.count, rng)
    queue += rng.sample(queue, options.count // 20)
    rng.shuffle(queue)
    roots: dict[str, Path | None] = {"inbox": ROOT, **{str(each): each.resolve() for each in options.beside}}
    roots["bare"] = None
    runs: dict[str, list[Measured]] = {name: [] for name in roots}
    for _ in range(options.rounds):
        for name, root in roots.items():
            with tempfile.TemporaryDirectory() as folder:
                runs[name].append(measure(root, queue, Path(folder)))
    width = max(map(len, runs))
    print(f"{'':{width}}  a second (each round)   median, 99 % ms   CPU ms: receiver, sender")
    for name, each in runs.items():
        rates = " ".join(f"{run.rate:,.0f}" for run in each)
        middle = [
            statistics.median(getattr(run, field) for run in each)
            for field in ("rate", "median", "p99", "cpu", "sender_cpu")
        ]
        rate, median, p99, cpu, sender = middle
        print(f"{name:{width}}  {rate:7,.0f} ({rates})  {median:5.1f} {p99:6.1f}   {cpu:.3f} {sender:.3f}")


if __name__ == "__main__":
    os.environ.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    main()
