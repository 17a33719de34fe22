"""Sources cut inputs into jobs: taken IDs are known at each moment, and the event loop is not blocked."""

from __future__ import annotations

from collections import Counter
from itertools import count, repeat

import anyio
import anyio.lowlevel
import pytest

from sampling_async import InvalidRequestError, InviteRequest
from sampling_async._bulk.source import MemberSource, PanelSource, checked_request
from sampling_async._pacing.stepwise import ENTRIES


def told(source: MemberSource | PanelSource) -> list[tuple[int, str]]:
    """Return the outcomes of IDs that were taken and not handed over."""
    return [(outcome.quota_id, outcome.status) for job in source.left() for outcome in job.left()]


def not_sent(*quota_ids: int) -> list[tuple[int, str]]:
    return [(quota_id, "not_sent") for quota_id in quota_ids]


async def test_a_member_source_reports_taken_ids_until_they_are_handed_over():
    source = MemberSource("m", iter([1, 2, 2, 3, 4]), size=2)
    assert told(source) == []
    job = await source.draw()
    assert told(source) == not_sent(1, 2)
    source.handed_over()
    assert told(source) == []
    assert (await source.draw()).chunk.quota_ids == (2, 3)
    assert job.chunk.quota_ids == (1, 2)


async def test_a_panel_source_reports_taken_ids_until_they_are_handed_over():
    source = PanelSource([InviteRequest("m", [1, 2, 3, 1]), InviteRequest("n", [4])], size=2)
    await source.draw()
    assert sorted(told(source)) == not_sent(1, 1, 2, 3)
    source.handed_over()
    assert told(source) == not_sent(3)
    await source.draw()
    source.handed_over()
    assert told(source) == []
    await source.draw()
    assert told(source) == not_sent(4)
    source.handed_over()
    assert await source.draw() is None


async def test_an_invalid_id_is_not_reported_and_earlier_ids_are():
    source = MemberSource("m", iter([1, 2, "x"]), size=10)
    with pytest.raises(InvalidRequestError):
        await source.draw()
    assert told(source) == not_sent(1, 2)


@pytest.mark.parametrize(
    "source",
    [
        lambda: PanelSource(repeat(InviteRequest("m", ())), size=10),
        lambda: MemberSource("m", repeat(5), size=10),
        lambda: MemberSource("m", _for_ever(), size=10),
    ],
    ids=["requests without IDs", "one ID for ever", "an async generator that never waits"],
)
async def test_an_input_that_never_fills_a_chunk_gives_others_their_turns(source):
    drawing = source()
    with anyio.fail_after(5), anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(drawing.draw)
            for _ in range(3):
                await anyio.lowlevel.checkpoint()
            scope.cancel()
    assert scope.cancelled_caught
    await drawing.aclose()


async def _for_ever():
    while True:
        yield 5


@pytest.mark.parametrize("kind", [list, iter, lambda ids: (each for each in ids), range])
async def test_a_large_request_is_checked_and_counted_in_pieces(kind):
    many = ENTRIES * 2
    request = await checked_request("m", range(1, many + 1) if kind is range else kind([*range(1, many), 7]))
    assert len(request.quota_ids) == many
    source = PanelSource([request], size=100)
    asked: dict[int, int] = {}
    jobs = 0
    while (job := await source.draw()) is not None:
        source.handed_over()
        assert len(job.chunk.quota_ids) <= 100
        asked |= Counter(job.chunk.each_place())
        jobs += 1
    assert sum(asked.values()) == many
    assert list(asked) == sorted(asked)
    assert jobs <= many / 100 + 4


@pytest.mark.parametrize("bad", [0, True, "7", 2**63])
async def test_a_bad_id_in_a_large_request_is_found(bad):
    with pytest.raises(InvalidRequestError):
        await checked_request("m", [*range(1, 10_000), bad])


async def test_a_bad_member_code_is_refused_before_the_ids_are_read():
    with pytest.raises(InvalidRequestError, match="member code"):
        await checked_request("..", count(1))
