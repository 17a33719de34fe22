"""Sources cut inputs into jobs: taken IDs are known at each moment, and the event loop is not blocked."""

from __future__ import annotations

from collections import Counter
from itertools import count, repeat

import anyio
import anyio.lowlevel
import doubles
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sampling_async import InvalidRequestError, InviteOutcome, InviteRequest, JournalError, SamplingError
from sampling_async._bulk.options import spread
from sampling_async._bulk.source import FanOutSource, MemberSource, checked_request, counted_in_steps, source_of
from sampling_async._pacing.latency import Line
from sampling_async._pacing.steps import ENTRIES

LOST = SamplingError("lost", delivery="unknown")
REJECTED = InviteOutcome("m", 1, "rejected", None, 9, "QUOTA_NOT_LIVE")
DOUBTFUL = InviteOutcome("m", 2, "unknown", error=LOST)


class Kept:
    """A journal in memory with some outcomes of the member `m`. Chunks wait for each other if it is `busy`."""

    def __init__(self, *known: InviteOutcome, busy: bool = False, error: Exception | None = None) -> None:
        self._known = {outcome.quota_id: outcome for outcome in known}
        self._busy, self._error = busy, error
        self.in_flight: list[tuple[int, ...]] = []
        self.awaited: list[tuple[str, tuple[int, ...]]] = []
        self.recalled: list[dict[str, tuple[int, ...]]] = []

    async def settled(self, member_code, quota_ids):
        self.awaited.append((member_code, tuple(quota_ids)))
        if self._busy:
            await anyio.sleep_forever()

    def knows(self, member_code):
        return True

    def is_in_flight(self, member_code):
        return member_code == "flying"

    async def recall(self, pairs):
        if self._error is not None:
            raise self._error
        self.recalled.append({code: tuple(quota_ids) for code, quota_ids in pairs.items()})
        return {
            code: {quota_id: self._known[quota_id] for quota_id in quota_ids if quota_id in self._known}
            for code, quota_ids in pairs.items()
        }

    async def rest(self):
        return {}

    def asks_again(self, outcome):
        return outcome.status == "unknown"

    def take_up(self, chunk):
        self.in_flight.append(chunk.quota_ids)


def told(source: MemberSource | FanOutSource) -> list[tuple[int, str]]:
    """Return the outcomes of IDs that were taken and not handed over."""
    outcomes = [outcome for job in source.left() for outcome in job.left()]
    assert {outcome.member_code for outcome in outcomes} <= {"m", "n"}
    return [(outcome.quota_id, outcome.status) for outcome in outcomes]


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


async def test_the_id_that_was_read_last_is_reported_too():
    """A signal handler may raise between the reading of an ID and the next line."""
    source = MemberSource("m", iter([1, 2, 3]), size=3)
    for latest, left in ((7, not_sent(7)), ("no quota ID", [])):
        source._input.latest = latest
        assert told(source) == left
    source._places, source._input.latest = {7: 1, 8: 1}, 7
    assert told(source) == not_sent(7, 7, 8)


async def test_a_panel_source_reports_taken_ids_until_they_are_handed_over():
    source = FanOutSource([InviteRequest("m", [1, 2, 3, 1]), InviteRequest("n", [4])], size=2)
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


async def test_jobs_of_this_request_and_the_next_are_drawn_without_a_wait():
    requests = [InviteRequest("m", [1, 2, 3]), InviteRequest("n", [4, 4]), InviteRequest("o", [5])]
    source, drawn = FanOutSource(requests, size=2), []
    assert source.draw_now() is None  # the input is not open yet
    job = await source.draw()
    while job is not None:
        drawn.append((job.chunk.member_code, job.chunk.quota_ids, dict(job.chunk.repeated)))
        source.handed_over()
        job = source.draw_now()
    assert drawn == [("m", (1, 2), {}), ("m", (3,), {}), ("n", (4,), {4: 2}), ("o", (5,), {})]
    assert await source.draw() is None


async def test_a_large_request_is_left_for_a_draw_that_can_wait():
    large = InviteRequest("n", [1, *range(1, ENTRIES + 1)])
    source = FanOutSource([InviteRequest("m", [1]), large, InviteRequest("o", [2])], size=ENTRIES)
    await source.draw()
    source.handed_over()
    for _ in range(2):
        assert source.draw_now() is None
        assert told(source) == not_sent(*large.quota_ids)
    assert (await source.draw()).chunk.member_code == "n"


async def test_what_is_wrong_in_the_next_request_is_found_without_a_wait():
    source = FanOutSource([InviteRequest("m", [1]), "n"], size=2)
    await source.draw()
    source.handed_over()
    with pytest.raises(InvalidRequestError, match="fan_out takes requests of the form"):
        source.draw_now()
    assert told(source) == []


async def test_with_a_journal_nothing_is_drawn_without_a_look_into_it():
    source = FanOutSource([InviteRequest("m", [3]), InviteRequest("m", [4])], size=2, replay=Kept(REJECTED))
    assert (await source.draw()).chunk.quota_ids == (3,)
    source.handed_over()
    assert source.draw_now() is None
    source._input.latest = InviteRequest("m", [5])  # as in the moment before it is looked up
    assert told(source) == [(5, "unknown")]


@pytest.mark.parametrize(("seconds", "is_drawn"), [(0.5, True), (0, False), (-1, False)])
async def test_nothing_is_drawn_after_the_deadline(seconds, is_drawn):
    remaining = [1.0]
    requests = [InviteRequest("m", [3]), InviteRequest("m", [4])]
    source = FanOutSource(requests, size=2, remaining=lambda: remaining[-1])
    assert (await source.draw()).chunk.quota_ids == (3,)
    source.handed_over()
    remaining.append(seconds)
    assert (source.draw_now() is not None) is is_drawn
    assert told(source) == (not_sent(4) if is_drawn else [])


async def test_ids_of_a_journal_are_answered_or_sent_again_and_only_sent_ones_are_in_flight():
    journal = Kept(REJECTED, DOUBTFUL)
    source = FanOutSource([InviteRequest("m", [1, 2, 3])], size=10, replay=journal)
    known, again, fresh = [await source.draw() for _ in range(3)]
    assert list(known.answered.outcomes()) == [REJECTED]
    assert {job.chunk.member_code for job in (known, again, fresh)} == {"m"}
    assert known.answered.answer.member_code == "m"
    assert (again.chunk.quota_ids, again.chunk.asked_before) == ((2,), True)
    assert (fresh.chunk.quota_ids, fresh.chunk.asked_before) == ((3,), False)
    assert journal.in_flight == [(2,), (3,)]
    assert journal.awaited == [("m", (1, 2, 3))]
    assert await source.draw() is None


async def test_what_a_journal_says_of_taken_ids_is_reported_and_ids_not_looked_up_are_unknown():
    journal = Kept(REJECTED, DOUBTFUL, busy=True)
    source = FanOutSource([InviteRequest("m", range(1, 1501))], size=10, replay=journal)
    with anyio.move_on_after(0):
        await source.draw()
    found = [(1, "rejected"), (2, "unknown"), *not_sent(*range(3, 1001))]
    assert told(source) == [*found, *((quota_id, "unknown") for quota_id in range(1001, 1501))]


async def drawn_from(source: FanOutSource) -> list[tuple[str, tuple[int, ...]]]:
    drawn = []
    while (job := await source.draw()) is not None:
        drawn.append((job.chunk.member_code, job.chunk.quota_ids))
        source.handed_over()
    return drawn


async def test_requests_of_different_members_are_looked_up_together():
    journal = Kept()
    requests = [InviteRequest(code, ids) for code, ids in {"a": [1], "b": [2, 2], "c": [1]}.items()]
    source = FanOutSource(requests, size=10, replay=journal)
    assert await drawn_from(source) == [("a", (1,)), ("b", (2,)), ("c", (1,))]
    assert journal.recalled == [{"a": (1,), "b": (2,), "c": (1,)}]
    assert journal.awaited == [("a", (1,)), ("b", (2,)), ("c", (1,))]


@pytest.mark.parametrize("later", ["a", "flying"])
async def test_a_request_whose_outcomes_may_still_change_is_looked_up_in_its_turn(later):
    """A second one of the same member, or one about a member with a request in flight."""
    journal = Kept()
    requests = [InviteRequest(code, [1]) for code in ("a", "b", later, "c")]
    assert len(await drawn_from(FanOutSource(requests, size=10, replay=journal))) == 4
    assert journal.recalled == [{"a": (1,), "b": (1,)}, {later: (1,), "c": (1,)}]


async def test_no_more_than_a_thousand_ids_are_looked_up_at_once():
    journal = Kept()
    requests = [InviteRequest(code, range(1, 401)) for code in "abc"]
    assert len(await drawn_from(FanOutSource(requests, size=400, replay=journal))) == 3
    assert [[*each] for each in journal.recalled] == [["a", "b"], ["c"]]


async def test_what_is_wrong_with_an_input_is_raised_after_what_came_before(monkeypatch):
    def failing():
        yield InviteRequest("a", [1])
        yield InviteRequest("b", [1])
        raise OSError("the disk is gone")

    for requests, error in (
        (failing(), OSError),
        ([InviteRequest("a", [1]), InviteRequest("b", [1]), "c"], InvalidRequestError),
    ):
        source = FanOutSource(requests, size=10, replay=Kept())
        for code in "ab":
            assert (await source.draw()).chunk.member_code == code
            source.handed_over()
        with pytest.raises(error):
            await source.draw()
        assert told(source) == []


async def test_requests_that_are_looked_up_together_are_reported_each_for_its_member():
    journal = Kept(busy=True)
    source = FanOutSource([InviteRequest("m", [1]), InviteRequest("n", [1])], size=10, replay=journal)
    with anyio.move_on_after(0):
        await source.draw()
    assert told(source) == not_sent(1, 1)
    assert {job.chunk.member_code for job in source.left()} == {"m", "n"}


async def test_a_member_that_a_journal_does_not_know_is_not_looked_up(monkeypatch):
    journal = Kept()
    monkeypatch.setattr(journal, "knows", lambda code: code == "b")
    source = FanOutSource([InviteRequest(code, [1]) for code in "acb"], size=10, replay=journal)
    assert (await source.draw()).chunk.member_code == "a"
    source.handed_over()
    assert source.draw_now().chunk.member_code == "c"
    source.handed_over()
    assert source.draw_now() is None
    assert await drawn_from(source) == [("b", (1,))]
    assert journal.recalled == [{"b": (1,)}]
    assert journal.in_flight == [(1,)] * 3


async def test_ids_are_unknown_if_the_journal_cannot_be_read():
    source = FanOutSource([InviteRequest("m", [1, 2])], size=10, replay=Kept(error=JournalError("gone")))
    with pytest.raises(JournalError):
        await source.draw()
    assert told(source) == [(1, "unknown"), (2, "unknown")]
    errors = {str(outcome.error) for job in source.left() for outcome in job.left()}
    assert errors == {"bulk_invite: interrupted before the journal was read: an earlier run may have sent this"}


async def test_ids_of_a_request_that_is_being_counted_are_not_sent():
    source = FanOutSource([InviteRequest("m", range(1, ENTRIES * 2))], size=100)
    with anyio.move_on_after(0):
        await source.draw()
    assert told(source) == not_sent(*range(1, ENTRIES * 2))


@pytest.mark.parametrize("length", [10, 20_000])
async def test_the_ids_of_a_collection_are_cut_as_the_best_size_says(length):
    asked = []

    def size_of(quota_ids: int) -> int:
        asked.append(quota_ids)
        return 4

    source = source_of("m", range(1, length + 1), size=10, size_of=size_of, remaining=None)
    assert (await source.draw()).chunk.quota_ids == (1, 2, 3, 4)
    assert asked == [length]
    await source.aclose()


async def test_a_deadline_before_the_first_item_is_the_end_of_the_input():
    async def never():
        await anyio.sleep_forever()
        yield 1

    source = MemberSource("m", never(), size=2, remaining=lambda: 1e-9)
    assert await source.draw() is None
    await source.aclose()


async def test_an_invalid_id_is_not_reported_and_earlier_ids_are():
    source = MemberSource("m", iter([1, 2, "x"]), size=10)
    with pytest.raises(InvalidRequestError):
        await source.draw()
    assert told(source) == not_sent(1, 2)


@pytest.mark.parametrize(
    "source",
    [
        lambda: FanOutSource(repeat(InviteRequest("m", ())), size=10),
        lambda: MemberSource("m", repeat(5), size=10),
        lambda: MemberSource("m", _for_ever(), size=10),
    ],
    ids=["requests without IDs", "one ID for ever", "an async generator that never waits"],
)
async def test_an_input_that_never_fills_a_chunk_gives_others_their_turns(source):
    drawing = source()
    with anyio.fail_after(60), anyio.CancelScope() as scope:
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
    source = FanOutSource([request], size=100)
    asked: dict[int, int] = {}
    jobs = 0
    while (job := await source.draw()) is not None:
        source.handed_over()
        assert len(job.chunk.quota_ids) <= 100
        assert not asked.keys() & set(job.chunk.quota_ids)  # each ID is sent once
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


async def test_no_dict_of_a_large_request_has_more_entries_than_grow_in_no_time():
    chunks = await counted_in_steps(InviteRequest("m", range(1, 2 * ENTRIES + 1)))
    assert [len(chunk.quota_ids) for chunk in chunks] == [ENTRIES, ENTRIES]


async def test_an_iterator_of_many_ids_is_checked_some_at_a_time(monkeypatch):
    steps = doubles.steps_of_turns(monkeypatch)
    await checked_request("m", iter(range(1, 10_000)))
    assert steps == [4096] * 4  # three parts, and the copy


@pytest.mark.parametrize("remaining", [None, lambda: 60.0])
async def test_an_async_input_that_ends_has_no_more(remaining):
    async def none():
        return
        yield

    source = FanOutSource(none(), size=9, remaining=remaining)
    assert await source.draw() is None


async def test_an_item_that_is_no_request_is_described_in_full():
    with pytest.raises(InvalidRequestError) as caught:
        await FanOutSource(["m"], size=9).draw()
    assert str(caught.value) == (
        "fan_out takes requests of the form InviteRequest(member_code, quota_ids), not str"
    )


@pytest.mark.parametrize(("seconds", "read"), [(0.5, 1), (0, 0)])
async def test_nothing_is_read_after_the_deadline(seconds, read):
    source = FanOutSource([InviteRequest("m", [3])], size=2, remaining=lambda: seconds)
    assert (await source.draw() is not None) is bool(read)


class Requests:
    """An async iterable that makes a generator for each reader."""

    closed = 0

    async def __aiter__(self):
        try:
            while True:
                yield InviteRequest("m", [3])
        finally:
            self.closed += 1


async def test_an_input_is_closed_with_its_source_whether_it_was_read_or_not():
    requests = Requests()
    source = FanOutSource(requests, size=2)
    await source.draw()
    await source.aclose()
    assert requests.closed == 1
    unread = aiter(Requests())
    await FanOutSource(unread, size=2).aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(unread)


@given(st.integers(1, 300), st.integers(1, 9), st.integers(1, 100), st.floats(0, 2), st.floats(0, 2))
def test_no_chunk_is_larger_than_allowed(quota_ids, slots, largest, a, b):
    size = spread(quota_ids, slots=slots, line=Line(a, b), largest=largest)
    assert 1 <= size <= largest
