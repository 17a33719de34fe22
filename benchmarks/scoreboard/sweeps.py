"""Responses cut at every byte, and calls cancelled at every tick: the sweeps of the tests, with counts."""

from __future__ import annotations

import asyncio
from itertools import count, product
from typing import TYPE_CHECKING, Any, Final

import anyio
import httpx
from peers.common import Address, Options
from peers.naive import NaiveClient
from pydantic import ValidationError

from scoreboard.board import Row, Run, at_least, exactly, published
from scoreboard.testkit import tool

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    Operation = Callable[[NaiveClient], Coroutine[Any, Any, Any]]

FAILURES: Final = (httpx.HTTPError, ValidationError, IndexError)
PATIENCE: Final = 0.25


def rows(run: Run) -> list[Row]:
    """Run both sweeps for both clients."""
    sweeps = tool("test_sweeps")
    stride = run.of(9, 1)
    counts = anyio.run(sweeps.cut_sweep, stride)
    cuts, wrong_cuts = anyio.run(_cut_sweep, stride)
    ticks, wrong, first = _our_cancels(sweeps, run)
    naive_ticks, naive_wrong = anyio.run(_cancel_sweep)
    places = "; ".join(name for name in counts if " at byte " in name)
    each = "byte" if stride == 1 else f"{stride}th byte"
    note = f"each {each} of 5 endpoints, 4 framings, ended and reset"
    wrong_note = places[:200] or "naive: other data, a lie, or a POST processed twice"
    cancel_note = first or "one connection, then one healthy call; naive: how many healthy calls failed"
    return [
        at_least("cuts", run.of(600, 6_000), counts["cuts"], cuts, note=note),
        exactly(
            "cuts that were taken for a complete response, or followed by a lie",
            0,
            counts["wrong"],
            wrong_cuts,
            note=wrong_note,
        ),
        published("ticks tried, each with a cancelled call", ticks, naive_ticks),
        exactly("operations not cancelled cleanly at some tick", 0, wrong, naive_wrong, note=cancel_note),
    ]


def _our_cancels(sweeps: Any, run: Run) -> tuple[int, int, str]:
    """Return the number of ticks, the number of sweeps that found a problem, and the first problem."""
    ticks, found = 0, []
    kinds = (False, True) if run.version == "long" else (True,)
    for (name, operation), warm in product(sweeps.OPERATIONS.items(), kinds):
        try:
            ticks += anyio.run(lambda run=operation, warm=warm: sweeps.cancel_sweep(run, warm=warm))
        except (AssertionError, TimeoutError, ExceptionGroup) as exc:
            found.append(f"{name}: {type(exc).__name__}")
    return ticks, len(found), "; ".join(found)


# --- The same for the naive client


async def _cut_sweep(stride: int) -> tuple[int, int]:
    """Return the number of cuts, and after how many of them the naive client was wrong."""
    server_tool, known = tool("fault_server"), tool("doubles")
    cuts = wrong = 0
    with server_tool.FaultServer() as server:
        address = Address(server.url, known.PANEL, known.KEY)
        async with NaiveClient(address, Options(read=PATIENCE, backoff=0.0)) as client:
            for (name, operation), framing in product(_operations().items(), server_tool.FRAMINGS):
                lengths: list[int] = []
                measure = [
                    *server_tool.PROCESSED,
                    lambda exchange, lengths=lengths, framing=framing: lengths.append(
                        len(exchange.right(framing))
                    ),
                ]
                server.faults.append([*measure, server_tool.answer(framing)])
                meant = await operation(client)
                for at, how in product(range(0, lengths[0] + 1, stride), ("fin", "rst")):
                    cuts += 1
                    server.ledger.invites.clear()
                    server.faults.append([*server_tool.PROCESSED, server_tool.cut(at, how, framing)])
                    wrong += await _is_wrong(server, client, name, operation, meant)
    return cuts, wrong


async def _is_wrong(server: Any, client: NaiveClient, name: str, operation: Operation, meant: Any) -> bool:
    try:
        got = await operation(client)
    except FAILURES:
        return False  # an error makes no claim
    # Our client also repeats Generate Invite, a GET. Only a POST that is sent again counts.
    return got != meant or (name == "bulk_invite" and max(server.ledger.invites.values()) > 1)


def _operations() -> dict[str, Operation]:
    return {
        "get_settings": lambda client: client.settings(),
        "get_quotas": lambda client: client.quotas(),
        "generate_invite": lambda client: client.invite("m1", 2),
        "recontact_members": _first_page,
        "bulk_invite": lambda client: client.bulk_invite("m1", [2, 3]),
    }


async def _first_page(client: NaiveClient) -> list[str]:
    codes = client.recontact(5)
    read = [await anext(codes) for _ in range(10)]
    await codes.aclose()
    return read


async def _cancel_sweep() -> tuple[int, int]:
    """Return the number of ticks, and after how many the next call failed although the service worked."""
    server_tool, known = tool("fault_server"), tool("doubles")
    then = [*server_tool.PROCESSED, server_tool.wait(0.0001), server_tool.answer()]
    ticks = wrong = 0
    with server_tool.FaultServer(then=then) as server:
        address = Address(server.url, known.PANEL, known.KEY)
        for operation in _operations().values():
            for after in count():
                ticks += 1
                async with NaiveClient(address, Options(concurrency=1, read=PATIENCE, backoff=0.0)) as client:
                    finished = await _cancelled_after(after, operation(client))
                    try:
                        await client.settings()
                    except FAILURES:
                        wrong += 1
                if finished:
                    break
    return ticks, wrong


async def _cancelled_after(ticks: int, operation: Coroutine[Any, Any, Any]) -> bool:
    task = asyncio.ensure_future(operation)
    for _ in range(ticks):
        await asyncio.sleep(0)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return False
    return True
