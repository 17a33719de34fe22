"""How fast quota IDs go through parallel bulk invites, and what that costs the client's process.

The service is the simulator in a process of its own, over real HTTP on loopback. Each combination of width and
chunk size is run in interleaved rounds; figures are medians over the rounds. CPU time of the client's process a
request is the steady figure; IDs a second depend on the machine and on the service's latency. Latencies come
from a round of their own, whose cost is not counted.

    python benchmarks/bulk_throughput.py --ids 10000 --width 8 64 --chunk-size 100 --latency 0.0 --json out.json
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import platform
import statistics
import time
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from sampling_async import SamplingClient
from sampling_async.simulator import Latency, Simulator

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection


def serve(pipe: Connection, latency: Latency) -> None:
    """Run the simulator until the other end of the pipe is closed."""
    simulator = Simulator(seed=1, latency=latency, keep_requests=False)
    with simulator.serve() as url:
        pipe.send((url, simulator.panel_guid, simulator.api_key, next(iter(simulator.members))))
        try:
            pipe.recv()
        except EOFError:
            return


@contextmanager
def service(latency: Latency) -> Iterator[tuple[str, str, str, str]]:
    """Start the simulator in a process of its own; gives address, panel, key and a member code."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, latency), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        ours.close()
        process.join()


class Latencies(logging.Handler):
    """Collects the seconds of each attempt from the client's own log."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Take the seconds of one attempt."""
        if isinstance(record.args, tuple) and isinstance(record.args[3], float):
            self.seconds.append(record.args[3])


async def run(client: SamplingClient, member_code: str, ids: int, chunk_size: int) -> tuple[float, float]:
    """Send the IDs once; return wall and CPU seconds."""
    quota_ids = range(10**9, 10**9 + ids)
    wall, cpu = time.perf_counter(), time.process_time()
    result = await client.bulk_invite(member_code, quota_ids, chunk_size=chunk_size)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    assert len(result.rejected) == ids, result
    return wall, cpu


async def percentiles(client: SamplingClient, member_code: str, ids: int, chunk_size: int) -> dict[str, float]:
    """Send the IDs once more and return percentiles of a request's milliseconds."""
    logger, collected = logging.getLogger("sampling_async"), Latencies()
    logger.addHandler(collected)
    logger.setLevel(logging.DEBUG)
    try:
        await run(client, member_code, ids, chunk_size)
    finally:
        logger.removeHandler(collected)
        logger.setLevel(logging.WARNING)
    cuts = statistics.quantiles(collected.seconds, n=100, method="inclusive")
    return {f"p{n}_ms": round(cuts[n - 1] * 1000, 2) for n in (50, 90, 99)}


async def measure(options: argparse.Namespace, address: tuple[str, str, str, str]) -> list[dict[str, Any]]:
    """Run all combinations, round by round, and return a row of medians for each."""
    url, panel_guid, api_key, member_code = address
    combinations = [(width, size) for width in options.width for size in options.chunk_size]
    clients = {
        width: SamplingClient(url, panel_guid=panel_guid, api_key=api_key, max_concurrency=width)
        for width in options.width
    }
    samples: dict[tuple[int, int], list[tuple[float, float]]] = {each: [] for each in combinations}
    rows = []
    for counted in range(-1, options.rounds):  # the first round opens the connections
        for width, size in combinations:
            sample = await run(clients[width], member_code, options.ids, size)
            if counted >= 0:
                samples[width, size].append(sample)
    for (width, size), taken in samples.items():
        requests = -(-options.ids // size)
        row = {
            "width": width,
            "chunk_size": size,
            "requests": requests,
            "ids_a_second": round(options.ids / statistics.median(wall for wall, _ in taken)),
            "cpu_us_a_request": round(statistics.median(cpu for _, cpu in taken) / requests * 1e6),
        }
        rows.append(row | await percentiles(clients[width], member_code, options.ids, size))
    for client in clients.values():
        await client.aclose()
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows as a Markdown table."""
    lines = [" | ".join(rows[0]), " | ".join("---:" for _ in rows[0])]
    lines += [" | ".join(f"{value:,}" for value in row.values()) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def main() -> None:
    """Read the arguments, measure, print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ids", type=int, default=10_000, help="quota IDs a run")
    parser.add_argument("--width", type=int, nargs="+", default=[8, 64], help="max_concurrency")
    parser.add_argument("--chunk-size", type=int, nargs="+", default=[100], help="quota IDs a request")
    parser.add_argument("--latency", type=float, default=0.0, help="simulated seconds a request")
    parser.add_argument("--latency-per-id", type=float, default=0.0, help="simulated seconds a quota ID")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    with service(Latency(a=options.latency, b=options.latency_per_id)) as address:
        rows = anyio.run(measure, options, address)
    print(table(rows))
    if options.json:
        setting = vars(options) | {
            "json": None,
            "python": platform.python_version(),
            "machine": platform.machine(),
        }
        setting |= {name: version(name) for name in ("sampling-async", "httpx", "httpcore", "anyio")}
        options.json.write_text(json.dumps({"setting": setting, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
