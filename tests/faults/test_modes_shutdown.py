"""Modes of interruption: all tasks cancelled at once, a handler that raises, a block left by the collector.

In none of them may an ID be lost, or be called `not_sent` that the service processed.
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


def _handing_over() -> str:
    """Return the place of the one line that has counted an outcome and not returned it yet."""
    lines, first = inspect.getsourcelines(OutcomeStream.__anext__)
    (at,) = [number for number, line in enumerate(lines, first) if line.strip() == "return outcome"]
    return f"{Path(inspect.getfile(OutcomeStream)).name}:{at} in __anext__"


HANDING_OVER = _handing_over()


class Taken:
    """Requests, and the pairs in them that were taken."""

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
    """Read a stream to its end; `seen` has all of it afterwards, whatever ends this."""
    try:
        async with outcomes:
            async for outcome in outcomes:
                seen.append(outcome)
    finally:
        seen += outcomes.left_over


def account(taken: Taken, seen: list[InviteOutcome], *, in_the_hand: int = 0) -> None:
    """Check that there is one outcome for each pair that was taken, but for what was just being handed over."""
    told = Counter((outcome.member_code, outcome.quota_id) for outcome in seen)
    missing, surplus = Counter(taken.pairs) - told, told - Counter(taken.pairs)
    assert missing.total() <= in_the_hand, f"in no account: {missing}"
    assert not surplus, f"told twice, or not taken: {surplus}"


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


# --- A signal handler that raises


class Alarm(Exception):  # noqa: N818  what an application calls it
    """What a handler of SIGALRM raises."""


def struck(server: FaultServer, raising: Raising, *, journal: Path | None = None) -> None:
    """Let a fan-out be struck by an exception, and check that what is said then is true.

    The event loop is run to its end as `asyncio.run` does: what is raised ends the program, or is caught.
    """
    taken, seen = Taken([f"a{raising.at}", f"b{raising.at}"], range(1, 5)), []

    async def main() -> None:
        client = client_of(server.url, max_concurrency=2)
        try:
            await read(client.fan_out(taken, chunk_size=2, journal=journal), seen)
        finally:
            await client.aclose()

    gc.disable()  # or the lines of finalizers would count, now and then
    try:
        with raising:
            asyncio.run(main())
    except BaseException as exc:
        if not isinstance(exc, type(raising.exception) | asyncio.CancelledError | RuntimeError):
            raise
        exc.__context__ = exc.__traceback__ = None  # whose frames hold connections open
    finally:
        gc.enable()
    raising.exception.__context__ = raising.exception.__traceback__ = None
    # An outcome is counted and then returned. CPython runs no signal handler between the two; a trace function,
    # which this sweep is made with, is called there.
    account(taken, seen, in_the_hand=raising.struck == HANDING_OVER)
    settle(server)
    assert server.ledger.lies(seen) == [], raising.struck
    assert max(server.ledger.invites.values(), default=0) <= 1, raising.struck


def again(server: FaultServer, raising: Raising, journal: Path) -> None:
    """Make a fan-out once more with the journal of one that was struck; nothing may be asked twice."""
    for thread in threading.enumerate():
        if thread.name == "sampling_async":  # which may be about to let go of the journal
            thread.join(5)
    gc.collect()  # what was struck on its way to letting go lets go with it
    taken, seen = Taken([f"a{raising.at}", f"b{raising.at}"], range(1, 5)), []

    async def main() -> None:
        async with client_of(server.url, max_concurrency=2) as client:
            await read(client.fan_out(taken, chunk_size=2, journal=journal), seen)

    asyncio.run(main())
    account(taken, seen)
    assert server.ledger.lies(seen) == [], raising.struck
    assert max(server.ledger.invites.values()) == 1, raising.struck


def settle(server: FaultServer) -> None:
    """Wait until the service has read what lay in its sockets, which our end has closed."""
    for attempt in range(20):
        if not server._open:
            return
        if attempt == 10:
            gc.collect()  # what was struck before it closed its connection is closed with it
        time.sleep(0.0005)


def strike_sweep(
    exception: type[BaseException], first: int = 0, every: int = 1, folder: Path | None = None
) -> tuple[int, list[str]]:
    """Strike a fan-out at one in `every` of its lines, the first and the last time it passes them.

    Args:
        exception: What strikes.
        first: The first moment.
        every: The distance between two.
        folder: Where given, each fan-out has a journal there, and is made once more after it was struck.

    Returns:
        How many moments were tried, and what was wrong after some of them.
    """
    wrong: list[str] = []
    gc.collect()
    gc.freeze()  # what there is by now need not be looked at again and again
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


# --- A block left by the garbage collector


async def outcomes(client: SamplingClient):
    """Read a stream as one should not: in a generator that may be left open."""
    async with client.stream_bulk_invite("m", range(1, 301), chunk_size=10) as stream:
        async for outcome in stream:
            yield outcome


def test_mode_40_a_fan_out_in_an_abandoned_generator_does_not_cancel_its_caller():
    """PEP 789: the loop ends the generator in a task of its own, some time after the host has left it."""

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

    # trio finds its stack of nurseries in disorder, and says so when the task ends, in one way or another.
    in_disorder = pytest.raises((RuntimeError, trio.TrioInternalError), match=r"Nursery|internal error")
    with pytest.warns(RuntimeWarning, match="PEP 789"), in_disorder:
        anyio.run(main, backend="trio")
