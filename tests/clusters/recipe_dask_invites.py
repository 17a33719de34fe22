"""Invites asked for by several processes of a Dask cluster, which keep one limit together."""

import asyncio
import json
from collections import Counter
from pathlib import Path

from distributed import Client

from sampling_async import InviteRequest, SamplingClient

LIMIT = 64  # requests in flight, all processes together
files = sorted(map(str, Path("requests").absolute().glob("*.jsonl")))  # each member in one of them


async def asked(requests, journal, shares):
    counts = Counter()
    async with SamplingClient.from_env(max_concurrency=LIMIT).share(of=shares) as client:
        async with client.fan_out(requests, journal=journal) as outcomes:
            async for outcome in outcomes:
                counts[outcome.status] += 1
    return counts


def asked_by_worker(file, shares):
    lines = map(json.loads, Path(file).read_text().splitlines())
    requests = [InviteRequest(line["MemberCode"], line["QuotaIDs"]) for line in lines]
    # Dask runs a task again if its worker is lost. With the journal, no pair is requested twice.
    return asyncio.run(asked(requests, f"{file}.journal", shares))


cluster = Client.current()
shares = sum(cluster.nthreads().values())  # so many tasks run at the same time, each with its client
counts = sum(cluster.gather(cluster.map(asked_by_worker, files, shares=shares, pure=False)), Counter())
