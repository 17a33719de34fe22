"""Celery: tasks of a whole night, whose processes keep one limit together."""

import asyncio
import os
from collections import Counter

from celery import Celery

from sampling_async import InviteRequest, SamplingClient

app = Celery("night", broker=os.environ.get("BROKER", "redis://127.0.0.1"), backend=os.environ.get("BACKEND"))
LIMIT, PROCESSES = 8, 4  # requests in flight, all processes together; `celery worker --concurrency 4`


async def invited(requests: list[InviteRequest], journal: str) -> dict[str, int]:
    counts: Counter[str] = Counter()
    async with SamplingClient.from_env(max_concurrency=LIMIT).share(of=PROCESSES) as client:
        async with client.fan_out(requests, journal=journal) as outcomes:
            async for outcome in outcomes:
                counts[outcome.status] += 1
    return dict(counts)


@app.task(acks_late=True, reject_on_worker_lost=True)  # a task whose worker dies is delivered again
def invite(part: str, pairs: list[tuple[str, list[int]]]) -> dict[str, int]:
    """Request invites for a part of the panel. The journal of the part knows what was sent before a crash."""
    requests = [InviteRequest(code, quota_ids) for code, quota_ids in pairs]
    return asyncio.run(invited(requests, f"{part}.journal"))
