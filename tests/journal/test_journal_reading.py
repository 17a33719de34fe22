"""Outcomes of a journal that are read: without a run, from earlier runs, and by the run itself."""

from __future__ import annotations

import threading
from collections import Counter
from operator import length_hint
from typing import get_args

import anyio
import anyio.lowlevel
import anyio.to_thread
import doubles
import httpx
import pytest
from attrs import evolve
from journal_kit import (
    ONCE,
    PANEL,
    Ledger,
    answers,
    facts,
    failing,
    go_on_later,
    held_up,
    killed,
    opened,
    read,
    run,
    told,
)

from sampling_async import InviteOutcome, InviteRequest, Journal, JournalError, SamplingError
from sampling_async._bulk.source import FanOutSource
from sampling_async._journal import rows as _journal_rows
from sampling_async._journal import run as _journal_run
from sampling_async._journal.file import JournalFile
from sampling_async._journal.lines import lines_of, outcomes_of
from sampling_async._journal.rows import JournaledRequest, JournalRows
from sampling_async._pacing.threads import in_thread
from sampling_async._protocol.requests import Chunk
from sampling_async._protocol.results import OutcomeStatus

# --- Replayed outcomes of earlier runs


async def test_outcomes_of_an_earlier_run_are_replayed_and_those_of_this_run_are_not(tmp_path):
    service = Ledger()
    first = await run(service, tmp_path / "journal", [PANEL[0], PANEL[0]])
    assert len(first) == 12
    assert not any(outcome.replayed for outcome in first)  # the second six are from the journal of this run
    killed(tmp_path / "journal")
    second = await run(service, Journal(tmp_path / "journal"), [PANEL[0], PANEL[1], PANEL[1]])
    assert {(o.member_code, o.replayed) for o in second} == {("m0", True), ("m1", False)}
    assert {o.status for o in second if o.replayed} == {"invited", "rejected", "unknown"}


async def test_outcomes_of_ids_sent_again_are_not_replayed(tmp_path):
    service = Ledger()
    await run(service, tmp_path / "journal", PANEL[:1])
    killed(tmp_path / "journal")
    journal = Journal(tmp_path / "journal", resend_unknown=True)
    outcomes = await run(service, journal, PANEL[:1])
    assert sorted((o.quota_id, o.replayed) for o in outcomes) == [(i, i > 3) for i in range(1, 7)]
    again = await run(service, tmp_path / "journal", PANEL[:1])  # with a new Journal object
    assert all(outcome.replayed for outcome in again)
    once_more = await run(
        service, journal, PANEL[:1]
    )  # an earlier run of the same object counts as earlier too
    assert {o.quota_id for o in once_more if o.replayed} >= {4, 5, 6}


async def test_left_over_outcomes_from_a_journal_are_marked_as_replayed(tmp_path):
    await run(Ledger(), tmp_path / "journal", PANEL[:1])
    async with doubles.client(Ledger()) as client:
        async with client.fan_out(PANEL[:1], journal=tmp_path / "journal") as stream:
            seen = [await anext(stream)]
    assert all(outcome.replayed for outcome in (*seen, *stream.left_over))
    assert len(stream.left_over) == 5


async def test_a_reopened_run_replays_none_of_its_own_outcomes(tmp_path):
    await run(Ledger(), tmp_path / "journal", PANEL[:1])
    journal = await opened(tmp_path / "journal")
    journal.note_answered(journal.note_sent(Chunk("m1", (1,))), answers("m1", [1]))
    for goes_on, replayed in ((True, False), (False, True)):
        await journal.close()
        await journal.open(goes_on=goes_on)
        assert {o.replayed for o in (await journal.recall({"m1": [1]}))["m1"].values()} == {replayed}
        assert {o.replayed for o in (await journal.recall({"m0": range(1, 7)}))["m0"].values()} == {True}
    await journal.close()


async def test_outcomes_of_a_journal_are_read_without_a_run(tmp_path):
    service = Ledger()
    journal = Journal(tmp_path / "journal")
    await run(service, journal)
    killed(tmp_path / "journal", chunk=3)
    known = await read(journal)
    assert len(known) == len({(o.member_code, o.quota_id) for o in known}) == 30
    counts = Counter(o.status for o in known)
    assert counts["unknown"] == 3
    assert all(outcome.replayed for outcome in known)
    assert "ended before it noted a response" in str(next(o for o in known if not o.result_code).error)
    assert facts(await run(service, journal)) == facts(known)
    assert await journal.counts() == dict.fromkeys(("not_sent",), 0) | Counter(o.status for o in known)
    assert facts(await read(journal, "m2")) == facts([o for o in known if o.member_code == "m2"])
    assert not await read(journal, "m")
    assert set(service.asked.values()) == {1}


async def test_the_latest_outcome_counts_and_each_pair_once(tmp_path):
    answers = iter([httpx.Response(429), httpx.Response(500), *[doubles.bulk] * 9])
    service = Ledger(
        lambda request: (answer := next(answers)) and (answer(request) if callable(answer) else answer)
    )
    journal = Journal(tmp_path / "journal", resend_unknown=True)
    one = [InviteRequest("m0", [1, 2])]
    told = []
    for _ in range(3):
        await run(service, journal, one, retry=ONCE)
        told.append([(o.quota_id, o.status) for o in await read(journal)])
    assert told == [
        [(1, "not_sent"), (2, "not_sent")],
        [(1, "unknown"), (2, "unknown")],
        [(1, "unknown"), (2, "invited")],  # a rejection proves nothing after an unknown outcome
    ]
    assert await journal.counts() == {"invited": 1, "rejected": 0, "not_sent": 0, "unknown": 1}


async def test_a_large_journal_is_read_part_by_part(tmp_path, monkeypatch):
    written = await opened(tmp_path / "journal")
    for number in range(60):
        quota_ids = tuple(range(number * 100 + 1, number * 100 + 101))
        chunk = Chunk("m0", quota_ids)
        written.note_answered(written.note_sent(chunk), answers("m0", quota_ids))
    await written.close()
    parts, requests = [], JournalRows.requests

    def noted(self, *args):
        found = requests(self, *args)
        parts.append(sum(len(request.lines) for request in found))
        return found

    monkeypatch.setattr(JournalRows, "requests", noted)
    known = await read(Journal(tmp_path / "journal"))
    assert [outcome.quota_id for outcome in known] == list(range(1, 6001))
    assert list(map(told, known[:4])) == [
        (evolve(outcome, replayed=True), error) for outcome, error in map(told, answers("m0", range(1, 5)))
    ]
    assert parts == [1000] * 6 + [0]


async def test_the_counts_of_all_parts_are_added(tmp_path, monkeypatch):
    service = Ledger()
    outcomes = await run(service, tmp_path / "journal")  # ten chunks of three quotas
    monkeypatch.setattr(_journal_rows, "_TOGETHER", 4)
    sizes, requests = [], JournalRows.requests

    def noted(self, *args):
        found = requests(self, *args)
        sizes.append(len(found))
        return found

    monkeypatch.setattr(JournalRows, "requests", noted)
    counts = await Journal(tmp_path / "journal").counts()
    assert counts == dict.fromkeys(get_args(OutcomeStatus), 0) | Counter(o.status for o in outcomes)
    assert sizes == [2] * 5 + [0]


@pytest.mark.parametrize("read_all", [read, lambda journal: journal.counts()])
async def test_an_error_of_sqlite_while_reading_names_the_journal(tmp_path, monkeypatch, read_all):
    await run(Ledger(), tmp_path / "journal")

    monkeypatch.setattr(JournalRows, "requests", failing)
    with pytest.raises(JournalError, match=r"journal cannot be used: SQLite says") as caught:
        await read_all(Journal(tmp_path / "journal"))
    assert caught.value.path == tmp_path / "journal"


async def test_a_line_that_cannot_be_read_names_the_journal_that_is_read(tmp_path, monkeypatch):
    await run(Ledger(), tmp_path / "journal")
    monkeypatch.setattr(JournalRows, "requests", lambda *_: [JournaledRequest(1, b"m0", {1: b"[1,"})])
    with pytest.raises(JournalError, match="a response cannot be read") as caught:
        await read(Journal(tmp_path / "journal"))
    assert caught.value.path == tmp_path / "journal"


async def test_reading_keeps_runs_out_and_runs_keep_reading_out(tmp_path):
    journal = Journal(tmp_path / "journal")
    async with doubles.client(Ledger()) as client:
        async with client.fan_out(PANEL[:1], journal=journal) as stream:
            for reading in (read(journal), journal.counts(), read(Journal(journal.path))):
                with pytest.raises(JournalError, match="in use"):
                    await reading
            await journal.backup(tmp_path / "copy")
            assert await anext(stream)
    assert await read(Journal(tmp_path / "copy")) is not None
    outcomes = journal.outcomes()
    await anext(outcomes)
    with pytest.raises(JournalError, match="in use"):
        await run(Ledger(), journal)
    del outcomes  # when the iterator is dropped, it releases the file at once
    assert len(await run(Ledger(), journal)) == 30


async def test_cancelled_reading_releases_the_journal(tmp_path, monkeypatch):
    await run(Ledger(), tmp_path / "journal")
    working, go_on = held_up(monkeypatch, JournalRows, "load")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read, Journal(tmp_path / "journal"))
        await in_thread(working.wait, 5)
        tasks.cancel_scope.cancel()
    monkeypatch.undo()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(go_on_later, go_on)
        assert (await Journal(tmp_path / "journal").counts())["unknown"] == 0


async def cancelled_once(working: threading.Event, outcomes) -> None:
    """Begin to read, and be cancelled when a thread is at work."""
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anext, outcomes)
            while not working.is_set():  # noqa: ASYNC110  a thread sets it
                await anyio.sleep(0.001)
            scope.cancel()
    assert scope.cancelled_caught


async def test_reading_can_continue_after_a_cancellation_while_the_file_was_being_opened(tmp_path, monkeypatch):
    """It is opened anew. Before, reading went on as if the journal were empty."""
    await run(Ledger(), tmp_path / "journal")
    opened, working, go_on, is_over = JournalFile.open, threading.Event(), threading.Event(), threading.Event()

    def slow(self):
        if working.is_set():
            return opened(self)
        working.set()
        go_on.wait(60)
        try:
            return opened(self)
        finally:
            is_over.set()

    monkeypatch.setattr(JournalFile, "open", slow)
    outcomes = Journal(tmp_path / "journal").outcomes()
    await cancelled_once(working, outcomes)
    go_on.set()
    await anyio.to_thread.run_sync(is_over.wait, 5)
    assert len([outcome async for outcome in outcomes]) == 30


async def test_reading_can_continue_after_a_cancellation(tmp_path, monkeypatch):
    await run(Ledger(), tmp_path / "journal")
    working, go_on = held_up(monkeypatch, JournalRows, "requests")
    outcomes = Journal(tmp_path / "journal").outcomes()
    await cancelled_once(working, outcomes)
    go_on.set()
    assert len([outcome async for outcome in outcomes]) == 30
    with pytest.raises(StopAsyncIteration):
        await anext(outcomes)


# --- What is under way


@pytest.mark.parametrize("asked", [[1, 2, 3], range(1, 41), [0, 99]])
async def test_outcomes_are_read_back_unchanged(tmp_path, asked):
    journal = await opened(tmp_path / "journal")
    for start in (1, 21):
        chunk = Chunk("m\u00fc", tuple(range(start, start + 20)))
        number = journal.note_sent(chunk)
        journal.note_answered(number, answers(chunk.member_code, chunk.quota_ids))
    known = (await journal.recall({"m\u00fc": asked}))["m\u00fc"]
    expected = [each for each in answers("m\u00fc", asked) if each.quota_id < 41 and each.status != "not_sent"]
    assert list(map(told, sorted(known.values(), key=lambda o: o.quota_id))) == list(
        map(told, expected if 99 not in asked else [])
    )
    assert await journal.recall({"m": asked}) == {"m": {}}
    await journal.close()


async def test_looking_up_a_pair_costs_the_same_in_a_large_journal(tmp_path):
    journal = await opened(tmp_path / "journal")
    costs = []
    for chunks in (10, 1_000):
        for number in range(chunks):  # chunks of one member, interleaved with others
            quota_ids = tuple(range(number + 1, number + 100_001, 10_000))
            journal.note_answered(journal.note_sent(Chunk("m0", quota_ids)), answers("m0", quota_ids))
        await journal.recall({"m0": [1]})  # the newest rows come into the index
        steps = []
        for database in (journal._file._rows._database, journal._file._rows._index):
            database.set_progress_handler(lambda steps=steps: steps.append(1), 1)
        assert len((await journal.recall({"m0": [5, 10_005, 20_005]}))["m0"]) == 3
        costs.append(len(steps))
        for database in (journal._file._rows._database, journal._file._rows._index):
            database.set_progress_handler(None, 1)
    assert costs[1] < 2 * costs[0]
    await journal.close()


# --- Releasing the file


async def test_an_error_of_sqlite_while_outcomes_are_looked_up_names_the_journal(tmp_path, monkeypatch):
    journal = await opened(tmp_path / "journal")

    monkeypatch.setattr(JournalRows, "recall", failing)
    with pytest.raises(JournalError, match="journal cannot be used: SQLite says") as caught:
        await journal.recall({"m0": [1]})
    assert caught.value.path == tmp_path / "journal"
    await journal.close()


# --- Copies


def test_a_line_with_an_error_is_as_short_as_the_others():
    error = SamplingError("gone", endpoint="bulk_invite", delivery="unknown")
    assert lines_of([InviteOutcome("m", 5, "unknown", error=error, anomaly="late")]) == (
        b'\n[5,"unknown",null,null,null,["gone","unknown"],"late"]'
    )


@pytest.mark.parametrize(
    ("replayed", "text"),
    [
        (True, "bulk_invite: sent by an earlier run, which ended before it noted a response"),
        (False, "bulk_invite: sent, and the response has not come yet"),
    ],
)
def test_an_id_without_a_line_is_unknown_and_says_why(tmp_path, replayed, text):
    (outcome,) = outcomes_of("m", {5: None}, tmp_path / "journal", replayed=replayed)
    assert (outcome.quota_id, outcome.status, outcome.replayed) == (5, "unknown", replayed)
    assert (str(outcome.error), outcome.error.endpoint, outcome.error.delivery) == (
        text,
        "bulk_invite",
        "unknown",
    )


async def test_a_pair_that_is_under_way_is_waited_for_and_counts_as_unknown(tmp_path):
    journal = await opened(tmp_path / "journal")
    chunk, same = Chunk("m0", (1, 2)), Chunk("m0", (1, 2))
    await journal.settled("m0", [1, 2])
    journal.take_up(chunk)
    number = journal.note_sent(chunk)
    journal.settle(same)  # settles an equal chunk that was never taken up
    assert {o.status for o in (await journal.recall({"m0": [1, 2]}))["m0"].values()} == {"unknown"}
    for quota_ids in ([2], range(1, 30_000), iter([1])):
        with anyio.move_on_after(0.005) as scope:
            await journal.settled("m0", quota_ids)
        assert scope.cancelled_caught
    await journal.settled("m0", [3])
    await journal.settled("m1", [1])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(journal.settled, "m0", [1, 2])
        await anyio.lowlevel.checkpoint()
        journal.note_answered(number, answers("m0", [1, 2]))
        journal.settle(same)
        journal.settle(chunk)
        journal.settle(chunk)
    await journal.close()


async def test_a_member_with_nothing_in_flight_is_forgotten(tmp_path):
    journal = await opened(tmp_path / "journal")
    chunks = Chunk("m0", (1, 2)), Chunk("m0", (3,))
    for chunk in chunks:
        journal.take_up(chunk)
    journal.settle(chunks[0])
    assert journal._in_flight == {"m0": {3: chunks[1]}}
    journal.settle(chunks[1])
    assert not journal._in_flight
    await journal.close()


async def test_checking_many_pairs_gives_the_event_loop_turns(tmp_path, monkeypatch):
    monkeypatch.setattr(_journal_run, "_AT_ONCE", 2)
    journal = await opened(tmp_path / "journal")
    asked, seen = iter(range(1, 7)), []

    async def look() -> None:
        while (left := length_hint(asked)) > 0:
            seen.append(left)
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(journal.settled, "m0", asked)
        tasks.start_soon(look)
    assert {2, 4} & set(seen)
    await journal.close()


async def test_a_wait_for_an_unsettled_pair_can_be_cancelled(tmp_path):
    journal = await opened(tmp_path / "journal")
    journal.take_up(Chunk("m0", (1,)))
    source = FanOutSource([InviteRequest("m0", [1, 2])], size=3, replay=journal)
    with anyio.move_on_after(0.005) as scope:
        await source.draw()
    assert scope.cancelled_caught
    left = {outcome.quota_id: outcome.status for job in source.left() for outcome in job.left()}
    assert left == {1: "not_sent", 2: "not_sent"}
    await journal.close()
