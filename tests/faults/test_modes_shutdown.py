"""Modes of interruption: all tasks cancelled at once, a handler that raises, a block left by the collector.

In none of them may an ID be lost, or be called `not_sent` that the service processed.
"""

from __future__ import annotations

import asyncio
import gc
from itertools import count
from typing import TYPE_CHECKING

import pytest
from fault_server import PROCESSED, FaultServer, answer, wait
from kit import client_of

from sampling_async import InviteRequest

if TYPE_CHECKING:
    from sampling_async import InviteOutcome, OutcomeStream, SamplingClient

SLOW = [*PROCESSED, wait(0.0001), answer()]
IDS = range(1, 31)


class Taken:
    """Requests, and the pairs in them that were taken."""

    def __init__(self, members: list[str]) -> None:
        self.pairs: list[tuple[str, int]] = []
        self._members = members

    def __iter__(self):
        for member in self._members:
            request = InviteRequest(member, IDS)
            self.pairs += [(member, quota_id) for quota_id in IDS]
            yield request


async def read(outcomes: OutcomeStream, seen: list[InviteOutcome]) -> None:
    """Read a stream to its end; `seen` has all of it afterwards, whatever ends this."""
    try:
        async with outcomes:
            async for outcome in outcomes:
                seen.append(outcome)
    finally:
        seen += outcomes.left_over


def account(taken: Taken, seen: list[InviteOutcome]) -> None:
    """Check that there is one outcome for each pair that was taken."""
    assert sorted((outcome.member_code, outcome.quota_id) for outcome in seen) == sorted(taken.pairs)


# --- Everything cancelled at once


async def cancelled_all(server: FaultServer, client: SamplingClient, ticks: int, members: list[str]) -> bool:
    """Cancel all tasks after so many ticks, as programs do at their end; returns whether it had ended."""
    taken, seen = Taken(members), []
    task = asyncio.ensure_future(read(client.fan_out(taken, chunk_size=10), seen))
    for _ in range(ticks):
        await asyncio.sleep(0)
    finished = task.done()
    for each in asyncio.all_tasks() - {asyncio.current_task()}:
        each.cancel()
    await asyncio.wait([task], timeout=10)
    assert task.done(), f"hangs when all tasks are cancelled after {ticks} ticks"
    account(taken, seen)
    assert server.ledger.lies(seen) == [], ticks
    shot = client.snapshot()
    assert (shot.running, shot.waiting) == (0, 0), ticks
    return finished


async def cancel_all_sweep() -> int:
    """Cancel all tasks at each tick of a fan-out; returns the number of ticks."""
    with FaultServer(then=SLOW) as server:
        async with client_of(server.url, max_concurrency=4) as client:
            for ticks in count():
                if await cancelled_all(server, client, ticks, [f"a{ticks}", f"b{ticks}"]):
                    return ticks
                async with asyncio.timeout(10):
                    assert len(await client.get_settings()) == 2, ticks
    raise AssertionError


def test_mode_39_every_id_is_accounted_for_whenever_all_tasks_are_cancelled():
    assert asyncio.run(cancel_all_sweep()) >= 10


@pytest.mark.parametrize("ticks", range(6))
def test_mode_39_no_coroutine_is_left_behind_when_tasks_are_cancelled_before_their_first_step(ticks, recwarn):
    async def main() -> None:
        with FaultServer(then=SLOW) as server:
            async with client_of(server.url, max_concurrency=8) as client:
                await cancelled_all(server, client, ticks, ["m"])

    asyncio.run(main())
    gc.collect()
    assert [str(warning.message) for warning in recwarn] == []


# --- A block left by the garbage collector


def test_mode_40_a_fan_out_in_a_generator_that_nobody_reads_on_does_not_cancel_its_host():
    """PEP 789: the loop ends the generator in a task of its own, some time after the host has left it."""

    async def outcomes(client: SamplingClient):
        async with client.stream_bulk_invite("m", range(1, 301), chunk_size=10) as stream:
            async for outcome in stream:
                yield outcome

    async def main() -> None:
        with FaultServer(then=SLOW) as server:
            async with client_of(server.url, max_concurrency=4) as client:
                async for _ in outcomes(client):
                    break
                gc.collect()
                async with asyncio.timeout(10):
                    while client.snapshot().running:  # noqa: ASYNC110  there is nothing to wait for
                        await asyncio.sleep(0.001)
                    for _ in range(20):
                        await asyncio.sleep(0)
                    assert len(await client.get_settings()) == 2

    asyncio.run(main())
