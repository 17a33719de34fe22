"""Modes of interruption: all tasks are cancelled, a handler raises, the collector closes a block.

In none of them may an ID be lost, or be reported as `not_sent` although the service processed it.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
import time
from collections import Counter
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest
import trio
from fault_server import PROCESSED, FaultServer, answer, wait
from kit import client_of
from raising import Raising

from sampling_async import InviteRequest, OutcomeStream

if TYPE_CHECKING:
    from sampling_async import InviteOutcome, SamplingClient

SLOW = [*PROCESSED, wait(0.0001), answer()]
IDS = range(1, 31)


def _handing_over(method) -> str:
    """Return the place of the one line of a method that has a counted outcome but has not returned it yet."""
    lines, first = inspect.getsourcelines(method)
    (at,) = [number for number, line in enumerate(lines, first) if line.strip() == "return outcome"]
    return f"{Path(inspect.getfile(OutcomeStream)).name}:{at} in {method.__name__}"


HANDING_OVER = {_handing_over(OutcomeStream.__anext__), _handing_over(OutcomeStream.next_now)}


class Taken:
    """Requests, and the pairs that were taken from them."""

    def __init__(self, members: list[str], quota_ids: range = IDS) -> None:
        self.pairs: list[tuple[str, int]] = []
        self._members = members
        self._quota_ids = quota_ids

    def __iter__(self):
        for member in self._members:
            request = InviteRequest(member, self._quota_ids)
            self.pairs += [(member, quota_id) for quota_id in self._quota_ids]
            yield request


async def read(outcomes: OutcomeStream, seen: list[InviteOutcome]) -> None:
    """Read a stream to its end; `seen` has all its outcomes afterwards, however reading ends."""
    try:
        async with outcomes:
            async for outcome in outcomes:
                seen.append(outcome)
    finally:
        seen += outcomes.left_over


def account(taken: Taken, seen: list[InviteOutcome], *, in_the_hand: int = 0) -> None:
    """Check that each pair that was taken has one outcome, except one that was just being handed over."""
    told = Counter((outcome.member_code, outcome.quota_id) for outcome in seen)
    missing, surplus = Counter(taken.pairs) - told, told - Counter(taken.pairs)
    assert missing.total() <= in_the_hand, f"without an outcome: {missing}"
    assert not surplus, f"with two outcomes, or never taken: {surplus}"


# --- All tasks cancelled at once


async def cancelled_all(server: FaultServer, client: SamplingClient, ticks: int, members: list[str]) -> bool:
    """Cancel all tasks after some ticks, as programs do at exit; return whether the work was done by then."""
    taken, seen = Taken(members), []
    task = asyncio.ensure_future(read(client.fan_out(taken, chunk_size=10), seen))
    for _ in range(ticks):
        await asyncio.sleep(0)
    finished = task.done()
    for each in asyncio.all_tasks() - {asyncio.current_task()}:
        each.cancel()
    await asyncio.wait([task], timeout=10)
    assert task.done(), f"hangs if all tasks are cancelled after {ticks} ticks"
    account(taken, seen)
    assert server.ledger.lies(seen) == [], ticks
    shot = client.snapshot()
    assert (shot.running, shot.waiting) == (0, 0), ticks
    return finished


async def cancel_all_sweep() -> int:
    """Cancel all tasks at each tick of a fan-out; return the number of ticks."""
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


# --- A signal handler that raises


class Alarm(Exception):  # noqa: N818  what an application calls it
    """The exception of a SIGALRM handler."""


def struck(server: FaultServer, raising: Raising, *, journal: Path | None = None) -> None:
    """Interrupt a fan-out with an exception, and check that its outcomes are true.

    The event loop is run to its end as by `asyncio.run`: the exception ends the program, or is caught.
    """
    taken, seen = Taken([f"a{raising.at}", f"b{raising.at}"], range(1, 5)), []

    async def main() -> None:
        client = client_of(server.url, max_concurrency=2)
        try:
            await read(client.fan_out(taken, chunk_size=2, journal=journal), seen)
        finally:
            await client.aclose()

    gc.disable()  # otherwise lines of finalizers might count
    try:
        with raising:
            asyncio.run(main())
    except BaseException as exc:
        if not isinstance(exc, type(raising.exception) | asyncio.CancelledError | RuntimeError):
            raise
        exc.__context__ = exc.__traceback__ = None  # their frames hold connections open
    finally:
        gc.enable()
    raising.exception.__context__ = raising.exception.__traceback__ = None
    # An outcome is counted and then returned. CPython runs no signal handler in between, but it calls the trace
    # function by which this sweep raises.
    account(taken, seen, in_the_hand=raising.struck in HANDING_OVER)
    settle(server)
    assert server.ledger.lies(seen) == [], raising.struck
    assert max(server.ledger.invites.values(), default=0) <= 1, raising.struck


def again(server: FaultServer, raising: Raising, journal: Path) -> None:
    """Repeat a fan-out with the journal of an interrupted one; no pair may be sent twice."""
    for thread in threading.enumerate():
        if thread.name == "sampling_async":  # the thread may be about to release the journal
            thread.join(5)
    gc.collect()  # releases a journal whose release was interrupted
    taken, seen = Taken([f"a{raising.at}", f"b{raising.at}"], range(1, 5)), []

    async def main() -> None:
        async with client_of(server.url, max_concurrency=2) as client:
            await read(client.fan_out(taken, chunk_size=2, journal=journal), seen)

    asyncio.run(main())
    account(taken, seen)
    assert server.ledger.lies(seen) == [], raising.struck
    assert max(server.ledger.invites.values()) == 1, raising.struck


def settle(server: FaultServer) -> None:
    """Wait until the service has read all that is left in its sockets, which our end has closed."""
    for attempt in range(20):
        if not server._open:
            return
        if attempt == 10:
            gc.collect()  # closes connections that an interrupted call left open
        time.sleep(0.0005)


def strike_sweep(
    exception: type[BaseException], first: int = 0, every: int = 1, folder: Path | None = None
) -> tuple[int, list[str]]:
    """Interrupt a fan-out at one in `every` of its lines, the first and the last time that each runs.

    Args:
        exception: The exception to raise.
        first: The first moment.
        every: The distance between two.
        folder: If given, each fan-out has a journal there, and is repeated after the interruption.

    Returns:
        How many moments were tried, and what was wrong in some of them.
    """
    wrong: list[str] = []
    gc.collect()
    gc.freeze()  # existing objects need not be collected again and again
    try:
        with FaultServer() as server:
            untouched = Raising(exception("struck"), None)
            struck(server, untouched, journal=folder and folder / "untouched")
            moments = untouched.moments()[first::every]
            for at in moments:
                server.ledger.invites.clear()
                raising = Raising(exception("struck"), at)
                try:
                    struck(server, raising, journal=folder and folder / str(at))
                    if folder is not None:
                        again(server, raising, folder / str(at))
                except AssertionError as exc:
                    wrong.append(f"{exception.__name__} at {raising.struck}: {exc}"[:200])
    finally:
        gc.unfreeze()
    return len(moments), wrong


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::RuntimeWarning")  # of what was struck
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("exception", "first"), [(SystemExit, 0), (KeyboardInterrupt, 13), (Alarm, 27)])
def test_mode_41_the_reported_outcomes_are_true_wherever_a_handler_raises(exception, first):
    tried, wrong = strike_sweep(exception, first, every=41)
    assert wrong == []
    assert tried > 20


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::RuntimeWarning")  # of what was struck
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_mode_41_a_run_with_a_journal_resumes_after_a_handler_raised(tmp_path):
    tried, wrong = strike_sweep(SystemExit, 7, every=83, folder=tmp_path)
    assert wrong == []
    assert tried > 20


# --- A block that the garbage collector closes


async def outcomes(client: SamplingClient):
    """Read a stream in the wrong way: in a generator that may be left open."""
    async with client.stream_bulk_invite("m", range(1, 301), chunk_size=10) as stream:
        async for outcome in stream:
            yield outcome


def test_mode_40_a_fan_out_in_an_abandoned_generator_does_not_cancel_its_caller():
    """PEP 789: the loop closes the generator in another task, some time after the caller has left it."""

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


def test_mode_40_trio_reports_a_block_that_is_left_in_another_task():
    async def main() -> None:
        with FaultServer(then=SLOW) as server:
            async with client_of(server.url, max_concurrency=4) as client:
                found = outcomes(client)
                await anext(found)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(found.aclose)

    # trio finds its nursery stack corrupted, and reports this in one of several ways when the task ends.
    in_disorder = pytest.raises((RuntimeError, trio.TrioInternalError), match=r"Nursery|internal error")
    with pytest.warns(RuntimeWarning, match="PEP 789"), in_disorder:
        anyio.run(main, backend="trio")
