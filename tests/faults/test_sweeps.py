"""Sweeps: every byte at which a response can be cut, and every tick at which a call can be cancelled.

The tests try a part of them. All of them, with counts:

    python tests/faults/test_sweeps.py

or, in a program, `await cut_sweep(stride=1)`.
"""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import aclosing
from itertools import count, product
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    sys.path[:0] = [str(folder) for folder in Path(__file__).parents[:3]]

import anyio
import anyio.lowlevel
import pytest
from fault_server import ENDPOINTS, FRAMINGS, PROCESSED, RECONTACT_CODES, FaultServer, answer, cut, wait
from kit import ONCE, assert_idle, call, client_of, descriptors

from sampling_async import (
    BulkInviteResult,
    DecodeError,
    InviteOutcome,
    InviteRequest,
    OutcomeStream,
    SamplingClient,
    TransportError,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable


# --- Cuts


async def cut_sweep(
    stride: int = 1, endpoints=ENDPOINTS, framings=FRAMINGS, hows=("fin", "rst")
) -> Counter[str]:
    """Cut responses at every `stride`-th byte and check the result of the client.

    Returns:
        How many cuts there were (`cuts`), how many calls gave what the service meant although cut (`whole`: the
        cut was behind all that counts), how many failed truthfully (`failed`), and how many accepted something
        else or claimed what the ledger denies (`wrong`, with a line for each under its own text).
    """
    counts: Counter[str] = Counter()
    with FaultServer() as server:
        async with client_of(server.url, retry=ONCE) as client:
            for endpoint, framing in product(endpoints, framings):
                length, meant = await _whole_answer(server, client, endpoint, framing)
                for at, how in product(range(0, length + 1, stride), hows):
                    counts["cuts"] += 1
                    server.faults.append([*PROCESSED, cut(at, how, framing)])
                    verdict = await _verdict(server, client, endpoint, meant)
                    counts[verdict] += 1
                    if verdict == "wrong":
                        counts[f"{endpoint}, {framing}, {how} at byte {at} of {length}"] += 1
            assert_idle(client)
    return counts


async def _whole_answer(server: FaultServer, client: SamplingClient, endpoint: str, framing: str):
    lengths = []
    server.faults.append(
        [*PROCESSED, lambda exchange: lengths.append(len(exchange.right(framing))), answer(framing)]
    )
    done = server.done
    meant = await call(client, endpoint)
    await server.has_done(done + 1)
    return lengths[0], meant


async def _verdict(server: FaultServer, client: SamplingClient, endpoint: str, meant: object) -> str:
    server.ledger.invites.clear()
    done = server.done
    try:
        got = await call(client, endpoint)
    except (TransportError, DecodeError) as error:
        return "failed" if error.delivery == "unknown" else "wrong"
    finally:
        await server.has_done(done + 1)  # the connection's end must arrive before the next call
    if isinstance(got, BulkInviteResult):
        if server.ledger.lies(got):
            return "wrong"
        if len(got.unknown) == len(got):
            return "failed"
    return "whole" if got == meant else "wrong"


async def test_mode_21_no_cut_response_is_accepted_as_complete():
    counts = await cut_sweep(stride=41)
    assert counts["wrong"] == 0, counts
    assert counts["cuts"] == counts["whole"] + counts["failed"] > 300
    assert counts["whole"] < counts["cuts"] / 20


async def test_mode_21_only_a_response_with_its_last_bytes_is_complete():
    """Cut byte by byte at the end of each framing: only complete responses are accepted."""
    with FaultServer() as server:
        async with client_of(server.url, retry=ONCE) as client:
            for framing in FRAMINGS:
                length, meant = await _whole_answer(server, client, "generate_invite", framing)
                seen = []
                for lost in range(12):
                    server.faults.append([*PROCESSED, cut(length - lost, "fin", framing)])
                    seen.append(await _verdict(server, client, "generate_invite", meant))
                assert seen == ["whole"] + ["failed"] * 11, framing


# --- Cancellations


async def _stream(client: SamplingClient, member: str, account: list[InviteOutcome]) -> None:
    outcomes = client.stream_bulk_invite(member, range(1, 7), chunk_size=3)
    await _accounted(outcomes, account, 6)


async def _fan_out(client: SamplingClient, member: str, account: list[InviteOutcome]) -> None:
    requests = [InviteRequest(member, [1, 2, 3]), InviteRequest(f"{member}+", [1, 2, 3])]
    await _accounted(client.fan_out(requests), account, 6)


async def _accounted(outcomes: OutcomeStream, account: list[InviteOutcome], asked: int) -> None:
    seen = []
    try:
        async with outcomes:
            async for outcome in outcomes:
                seen.append(outcome)
        assert len(seen) == asked
    finally:
        # IDs that were not taken from the input have no outcome; the requests here have three or six IDs.
        assert len(seen) + len(outcomes.left_over) in {0, 3, asked}
        account += seen
        account += outcomes.left_over


async def _pages(client: SamplingClient, *_: object) -> None:
    async with aclosing(client.recontact_members(5, max_results=13)) as codes:
        assert [code async for code in codes] == list(RECONTACT_CODES)


async def _pages_ahead(client: SamplingClient, *_: object) -> None:
    async with client.stream_recontact_members(5, max_results=13) as codes:
        assert [code async for code in codes] == list(RECONTACT_CODES)


OPERATIONS = {
    "get_settings": lambda client, *_: client.get_settings(),
    "generate_invite": lambda client, member, _: client.generate_invite(member, 2),
    "bulk_invite": lambda client, member, _: client.bulk_invite(member, range(1, 7), chunk_size=3),
    "stream": _stream,
    "fan_out": _fan_out,
    "recontact paging": _pages,
    "recontact stream": _pages_ahead,
}


async def cancel_sweep(operation, *, warm: bool) -> int:
    """Cancel an operation at each tick of the event loop until it completes; return the number of ticks.

    After each, one more call must succeed with the single permit, and nothing may be held. At the end the
    outcomes of all cancelled operations are compared with what the service did.
    """
    account: list[InviteOutcome] = []
    with FaultServer(then=[*PROCESSED, wait(0.0001), answer()]) as server:
        client = client_of(server.url, max_concurrency=1)
        before = None
        for ticks in count():
            if not warm:
                await client.aclose()
                client = client_of(server.url, max_concurrency=1)
            finished = await _cancelled_after(ticks, operation(client, f"m{ticks}", account))
            with anyio.fail_after(10):
                result = await client.bulk_invite("healthy", [1, 2])
            assert len(result.invited) == len(result.rejected) == 1, (ticks, result[0].error)
            assert_idle(client, ticks)
            before = before or descriptors()
            if finished:
                break
        # Both ends of a connection belong to this process, and the server may still be closing its end.
        assert descriptors() <= before + 4
        await client.aclose()
    assert server.ledger.lies(account) == []
    return ticks


async def _cancelled_after(ticks: int, operation: Awaitable[object]) -> bool:
    finished = False

    async def run() -> None:
        nonlocal finished
        await operation
        finished = True

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        for _ in range(ticks):
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    return finished


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("operation", OPERATIONS)
async def test_mode_02_a_cancel_at_any_tick_affects_only_its_own_call(operation, warm):
    assert await cancel_sweep(OPERATIONS[operation], warm=warm) > 1


async def test_mode_02_churn_under_short_deadlines_leaks_nothing():
    with FaultServer() as server:
        async with client_of(server.url, max_concurrency=2) as client:
            await client.get_settings()
            before = descriptors()

            async def hasty(seconds: float) -> None:
                with anyio.move_on_after(seconds):
                    await client.bulk_invite("m1", range(1, 200))

            for step in range(30):
                async with anyio.create_task_group() as tasks:
                    for seconds in (0.0002 * step, 0.0005, 0.0001 * step):
                        tasks.start_soon(hasty, seconds)
            assert len((await client.bulk_invite("m2", range(1, 300))).unknown) == 0
            assert_idle(client)
            assert descriptors() <= before + 4


async def _main() -> None:
    for name, number in sorted((await cut_sweep()).items()):
        print(f"{number:7,} {name}")  # noqa: T201


if __name__ == "__main__":
    anyio.run(_main)
