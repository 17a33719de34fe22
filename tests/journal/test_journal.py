"""The journal: what a killed run leaves behind, and how the next run uses it."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import pickle
import sqlite3
import stat
import subprocess
import sys
import threading
from collections import Counter
from contextlib import closing
from operator import length_hint
from types import SimpleNamespace
from typing import TYPE_CHECKING, get_args
from weakref import ref

import anyio
import anyio.to_thread
import doubles
import httpx
import pytest
from attrs import evolve

from sampling_async import (
    ClientClosedError,
    InvalidRequestError,
    Invite,
    InviteOutcome,
    InviteRequest,
    Journal,
    JournalError,
    OutcomeStream,
    RetryPolicy,
    SamplingError,
)
from sampling_async._bulk.source import FanOutSource
from sampling_async._journal import file as _journal_file
from sampling_async._journal import lock as _journal_lock
from sampling_async._journal import mending
from sampling_async._journal import rows as _journal_rows
from sampling_async._journal import run as _journal_run
from sampling_async._journal.database import remove
from sampling_async._journal.file import JournalFile
from sampling_async._journal.journal import run_of
from sampling_async._journal.lines import lines_of, outcomes_of
from sampling_async._journal.lock import Damage, Header, JournalLock
from sampling_async._journal.rows import (
    ANSWERED,
    APPLICATION,
    SENT,
    JournaledRequest,
    JournalRows,
    Latest,
    Note,
)
from sampling_async._pacing.threads import in_thread
from sampling_async._protocol.requests import Chunk
from sampling_async._protocol.results import OutcomeStatus

if TYPE_CHECKING:
    from pathlib import Path

    from sampling_async._journal.run import JournalRun

ONCE = RetryPolicy(max_attempts=1)
PANEL = [InviteRequest(f"m{n}", range(1, 7)) for n in range(5)]


OWNER = "https://service.example", doubles.PANEL


class Ledger(doubles.Service):
    """A service that counts how often each member was asked about each quota."""

    def __init__(self, *answers) -> None:
        super().__init__(*(answers or (doubles.bulk,)))
        self.asked: Counter[tuple[str, int]] = Counter()

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        member_code = request.url.path.split("/")[-2]
        self.asked.update((member_code, quota_id) for quota_id in doubles.asked(request))
        return await super().__call__(request)


_OF_CLIENTS = ("retry", "panel_guid", "max_concurrency")


async def run(service, journal, requests=PANEL, take: int | None = None, **options) -> list[InviteOutcome]:
    """Run a panel; return the outcomes, or the first ones and the left-over ones."""
    options = {"chunk_size": 3} | options
    client_options = {name: options.pop(name) for name in _OF_CLIENTS if name in options}
    async with doubles.client(service, **client_options) as client:
        async with client.fan_out(requests, journal=journal, **options) as stream:
            outcomes = []
            async for outcome in stream:
                outcomes.append(outcome)
                if len(outcomes) == take:
                    break
        return outcomes + list(stream.left_over)


def facts(outcomes: list[InviteOutcome]) -> list[tuple]:
    return sorted((o.member_code, o.quota_id, o.status, o.invite and o.invite.url) for o in outcomes)


async def test_a_second_run_sends_nothing_and_returns_the_same_outcomes(tmp_path):
    service = Ledger()
    first = await run(service, tmp_path / "journal")
    second = await run(service, tmp_path / "journal")
    assert facts(first) == facts(second)
    assert set(service.asked.values()) == {1}
    assert len(service.requests) == 10


async def test_ids_left_over_by_a_run_are_sent_by_the_next(tmp_path):
    service = Ledger()
    first = await run(service, tmp_path / "journal", take=4, max_concurrency=1)
    assert "not_sent" in {outcome.status for outcome in first}
    second = await run(service, tmp_path / "journal")
    assert {outcome.status for outcome in second} <= {"invited", "rejected", "unknown"}
    assert len(second) == 30
    assert set(service.asked.values()) == {1}


async def test_outcomes_are_shown_when_they_are_on_disk_and_meanwhile_others_are_sent(tmp_path, monkeypatch):
    write, second, go_on = JournalFile.write, threading.Event(), threading.Event()
    commits: list[int] = []

    def slow(file: JournalFile) -> None:
        commits.append(file.noted)
        if len(commits) == 2:
            second.set()
            go_on.wait(60)
        write(file)

    monkeypatch.setattr(JournalFile, "write", slow)
    shown: list[InviteOutcome] = []

    async def show(stream: OutcomeStream) -> None:
        shown.extend([outcome async for outcome in stream])

    async with doubles.client(Ledger(), max_concurrency=1) as client:
        requests = [InviteRequest(f"m{number}", [1]) for number in range(2)]
        async with client.fan_out(requests, journal=tmp_path / "journal") as stream:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(show, stream)
                await anyio.to_thread.run_sync(second.wait)
                await anyio.wait_all_tasks_blocked()
                assert shown == []
                go_on.set()
    assert len(shown) == 2
    # The first request; its outcome together with the second request; the outcome of that.
    assert commits == [1, 3, 4]


async def test_additional_input_is_sent_by_the_next_run(tmp_path):
    service = Ledger()
    await run(service, tmp_path / "journal", PANEL[:2])
    outcomes = await run(service, str(tmp_path / "journal"), [*reversed(PANEL), InviteRequest("m0", [7, 1])])
    assert len(outcomes) == 32
    assert set(service.asked.values()) == {1}


def rows_of(path: Path) -> list[Note]:
    with closing(sqlite3.connect(path)) as database:
        database.text_factory = bytes
        return [Note(*row) for row in database.execute("SELECT kind, chunk, member_code, content FROM rows")]


def written_anew(path: Path, notes: list[Note]) -> None:
    """Leave a journal like a process that was killed after it had written these rows."""
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()
    journal = JournalFile(path, OWNER)
    journal.open()
    for note in notes:
        journal.note(*note)
    journal.leave()


def killed(path: Path, chunk: int | None = 1) -> None:
    """Remove all results, or those of one chunk, from a journal, as after a kill in the middle."""
    written_anew(path, [n for n in rows_of(path) if n.kind == SENT or chunk not in {None, n.chunk}])


async def test_ids_in_flight_at_a_kill_are_unknown_and_named(tmp_path):
    service = Ledger()
    await run(service, tmp_path / "journal", PANEL[:1])
    killed(tmp_path / "journal")
    outcomes = await run(service, tmp_path / "journal", PANEL[:1])
    unknown = [outcome for outcome in outcomes if outcome.status == "unknown"]
    assert [outcome.quota_id for outcome in unknown] == [1, 2, 3]
    assert "ended before it noted a response" in str(unknown[0].error)
    assert unknown[0].error.delivery == "unknown"
    assert set(service.asked.values()) == {1}


async def test_unknowns_are_sent_again_when_asked_and_stay_doubtful(tmp_path):
    service = Ledger()
    await run(service, tmp_path / "journal", PANEL[:1])
    killed(tmp_path / "journal")
    again = Journal(tmp_path / "journal", resend_unknown=True)
    outcomes = {o.quota_id: o for o in await run(service, again, PANEL[:1])}
    assert [service.asked["m0", quota_id] for quota_id in range(1, 7)] == [2, 2, 2, 1, 1, 1]
    assert [outcomes[i].status for i in (1, 2, 3)] == ["unknown", "invited", "unknown"]
    assert "an earlier invite may exist" in outcomes[2].anomaly
    assert outcomes[4].anomaly is None


@pytest.mark.parametrize("failure", [httpx.ConnectError("refused"), httpx.Response(403)])
async def test_ids_stay_unknown_after_a_failed_resend(tmp_path, failure):
    service = Ledger()
    await run(service, tmp_path / "journal", PANEL[:1])
    killed(tmp_path / "journal")
    again = Journal(tmp_path / "journal", resend_unknown=True)
    outcomes = await run(doubles.Service(failure), again, PANEL[:1], retry=ONCE)
    assert Counter(o.status for o in outcomes)["unknown"] == 3
    third = await run(service, tmp_path / "journal", PANEL[:1])
    assert Counter(o.status for o in third)["unknown"] == 3


async def test_ids_stay_unknown_after_a_stopped_resend(tmp_path):
    await run(Ledger(), tmp_path / "journal", PANEL[:1])
    killed(tmp_path / "journal", chunk=None)
    again = Journal(tmp_path / "journal", resend_unknown=True)
    outcomes = await run(doubles.Service(httpx.Response(403)), again, PANEL[:1], max_concurrency=1)
    assert {(outcome.status, outcome.error.delivery) for outcome in outcomes} == {("unknown", "unknown")}


async def test_the_next_run_sends_not_sent_ids_and_no_unknown_ids(tmp_path):
    answers = iter([httpx.Response(500), httpx.Response(429), *[doubles.bulk] * 99])

    def answer(request: httpx.Request):
        result = next(answers)
        return result(request) if callable(result) else result

    service = Ledger(answer)
    first = await run(service, tmp_path / "journal", PANEL[:1], retry=ONCE, max_concurrency=1)
    assert [outcome.status for outcome in sorted(first, key=lambda o: o.quota_id)] == ["unknown"] * 3 + [
        "not_sent"
    ] * 3
    second = {o.quota_id: o for o in await run(service, tmp_path / "journal", PANEL[:1])}
    assert [second[i].status for i in range(1, 7)] == ["unknown"] * 3 + ["invited", "rejected", "invited"]
    assert "500" in str(second[1].error)
    assert service.asked["m0", 1] == 1


async def test_a_repeated_member_is_sent_once_and_has_outcomes_at_each_place(tmp_path):
    service = Ledger()
    outcomes = await run(
        service,
        tmp_path / "journal",
        [PANEL[0], PANEL[0], InviteRequest("m0", [1, 1]), InviteRequest("m0", [])],
    )
    assert len(outcomes) == 14
    assert set(service.asked.values()) == {1}


async def test_cancelled_runs_write_down_their_outcomes(tmp_path):
    arrived = anyio.Event()

    async def silent(request: httpx.Request) -> httpx.Response:
        arrived.set()
        return await anyio.sleep_forever()

    async with doubles.client(silent, max_concurrency=1) as client:
        stream = client.fan_out(PANEL, journal=tmp_path / "journal", chunk_size=3)
        async with anyio.create_task_group() as tasks:

            async def consume() -> None:
                async with stream:
                    await anext(stream)

            tasks.start_soon(consume)
            await arrived.wait()
            tasks.cancel_scope.cancel()
    assert Counter(o.status for o in stream.left_over)["unknown"] == 3
    service = Ledger()
    outcomes = await run(service, tmp_path / "journal")
    kinds = Counter(outcome.status for outcome in outcomes)
    assert kinds["unknown"] == 3
    assert sum(service.asked.values()) == 27


async def test_a_closed_client_leaves_a_usable_journal(tmp_path):
    arrived = anyio.Event()

    async def silent(request: httpx.Request) -> httpx.Response:
        arrived.set()
        return await anyio.sleep_forever()

    client = doubles.client(silent, max_concurrency=1, retry=ONCE)
    async with client.fan_out(PANEL[:2], journal=tmp_path / "journal") as stream:
        await arrived.wait()
        await client.aclose()
        outcomes = [outcome async for outcome in stream]
    assert {type(outcome.error) for outcome in outcomes} == {ClientClosedError}
    service = Ledger()
    kinds = Counter(outcome.status for outcome in await run(service, tmp_path / "journal", PANEL[:2]))
    assert kinds["unknown"] == 6
    assert sum(service.asked.values()) == 6


async def test_a_journal_object_can_be_reused_and_shows_no_member(tmp_path):
    journal = Journal(tmp_path / "journal")
    for _ in range(2):
        await run(Ledger(), journal, PANEL[:1])
    assert repr(journal) == f"Journal('{tmp_path}/journal', resend_unknown=False)"


async def test_the_file_is_for_its_owner_only_and_holds_no_key(tmp_path):
    await run(Ledger(), tmp_path / "journal")
    for file in tmp_path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert doubles.KEY.encode() not in file.read_bytes()


async def test_rows_are_only_ever_added(tmp_path):
    await run(Ledger(), tmp_path / "journal", PANEL[:2])
    before = rows_of(tmp_path / "journal")
    await run(Ledger(), tmp_path / "journal", PANEL)
    assert rows_of(tmp_path / "journal")[: len(before)] == before


# --- Unusable journals


async def test_two_runs_cannot_use_one_journal(tmp_path):
    async with doubles.client(Ledger()) as client:
        journal = Journal(tmp_path / "journal")
        async with client.fan_out([], journal=journal):
            for other, by in (
                (journal, "fan-out; use a separate journal for each"),
                (tmp_path / "journal", "run"),
            ):
                with pytest.raises(JournalError, match=f"journal is in use by another {by}$") as caught:
                    async with client.fan_out([], journal=other):
                        pytest.fail("entered")
                assert caught.value.path == tmp_path / "journal"


OF_OTHERS = "journal was written for another service or panel; use a separate journal for each$"


async def test_a_journal_of_another_panel_is_refused(tmp_path):
    await run(Ledger(), tmp_path / "journal", PANEL[:1])
    with pytest.raises(JournalError, match=OF_OTHERS) as caught:
        await run(Ledger(), tmp_path / "journal", panel_guid=doubles.KEY)
    assert caught.value.path == tmp_path / "journal"
    await run(Ledger(), tmp_path / "journal", PANEL[:1], panel_guid=doubles.PANEL.upper())


def of_something_else(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE t (x)")
    database.close()


def of_an_earlier_form(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute(f"PRAGMA application_id = {APPLICATION}")
        database.execute("PRAGMA user_version = 1")
        database.execute("CREATE TABLE sent (chunk INTEGER PRIMARY KEY)")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (of_something_else, "journal is another program's database; give the journal another path$"),
        (of_an_earlier_form, "has file format 1"),
        (lambda path: path.write_bytes(b"x" * 5000), "not a database"),
        (lambda path: path.mkdir(), "cannot be used"),
    ],
)
def test_a_file_that_is_no_journal_is_refused_and_left_alone(tmp_path, make, reason):
    path = tmp_path / "journal"
    make(path)
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(JournalError, match=reason) as caught:
        anyio.run(run, Ledger(), path)
    assert caught.value.path == path
    assert str(path) in str(caught.value)
    assert (path.read_bytes() if path.is_file() else b"") == before
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def failing(*_: object) -> None:
    raise sqlite3.OperationalError


def full(*_: object) -> None:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    raise error


async def test_a_chunk_that_cannot_be_written_to_the_journal_is_not_sent(tmp_path, monkeypatch):
    service = Ledger()
    async with doubles.client(service) as client:
        stream = client.fan_out(PANEL, journal=Journal(tmp_path / "journal"), chunk_size=3)
        monkeypatch.setattr(JournalRows, "append", full)
        with pytest.raises(JournalError, match="disk is full"):
            async with stream:
                async for _ in stream:
                    pytest.fail("nothing was asked")
    # An earlier run may know a request whose place in the journal could not be read.
    assert {outcome.status for outcome in stream.left_over} <= {"not_sent", "unknown"}
    assert {outcome.status for outcome in stream.left_over if outcome.member_code == "m0"} == {"not_sent"}
    assert not service.requests


async def test_an_outcome_that_cannot_be_written_to_the_journal_is_not_lost(tmp_path, monkeypatch):
    append, calls = JournalRows.append, []

    def full_later(self, notes) -> None:
        calls.append(notes)
        if len(calls) > 1:
            full()
        append(self, notes)

    monkeypatch.setattr(JournalRows, "append", full_later)
    async with doubles.client(Ledger(), max_concurrency=1) as client:
        stream = client.fan_out(PANEL[:1], journal=tmp_path / "journal")
        seen = []
        with pytest.raises(JournalError):
            async with stream:
                async for outcome in stream:
                    seen.append(outcome)
    assert Counter(o.status for o in [*seen, *stream.left_over]) == {"invited": 3, "rejected": 3}


async def test_a_journal_that_could_not_be_written_can_be_used_again(tmp_path, monkeypatch):
    journal, service = Journal(tmp_path / "journal"), Ledger()
    with monkeypatch.context() as broken:
        broken.setattr(JournalRows, "append", full)
        with pytest.raises(JournalError):
            await run(service, journal)
    await run(service, journal, PANEL[:2])
    assert len(await run(service, tmp_path / "journal")) == 30
    assert set(service.asked.values()) == {1}


async def test_an_error_of_the_input_propagates(tmp_path):
    def broken():
        yield PANEL[0]
        raise SamplingError("of the input")

    with pytest.raises(SamplingError, match="of the input"):
        await run(Ledger(), tmp_path / "journal", broken())


async def test_ids_known_from_an_earlier_run_are_never_reported_as_not_sent(tmp_path):
    """A request that waits for an equal one is cancelled: its IDs have the outcomes of the journal."""
    await run(Ledger(), tmp_path / "journal", PANEL[:1])
    arrived = anyio.Event()

    async def silent(request: httpx.Request) -> httpx.Response:
        arrived.set()
        return await anyio.sleep_forever()

    requests = [InviteRequest("m0", range(1, 10)), InviteRequest("m0", range(1, 10))]
    async with doubles.client(silent) as client:
        stream = client.fan_out(requests, journal=tmp_path / "journal")
        async with anyio.create_task_group() as tasks:

            async def consume() -> None:
                async with stream:
                    await anyio.sleep_forever()

            tasks.start_soon(consume)
            await arrived.wait()
            tasks.cancel_scope.cancel()
    told = {(o.quota_id, o.status) for o in stream.left_over if o.quota_id < 7}
    assert told == {(i, "rejected" if i % 2 else "invited") for i in range(1, 7)}


@pytest.mark.parametrize("moment", ["load", "make"])
async def test_a_run_cancelled_during_opening_releases_the_journal(tmp_path, monkeypatch, moment):
    if moment == "load":
        await run(Ledger(), tmp_path / "journal", PANEL[:1])
    work, working, go_on = getattr(JournalRows, moment), threading.Event(), threading.Event()

    def slow(self, *args) -> None:
        working.set()
        go_on.wait(60)
        work(self, *args)

    monkeypatch.setattr(JournalRows, moment, slow)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, Ledger(), Journal(tmp_path / "journal"))
        await in_thread(working.wait, 5)
        tasks.cancel_scope.cancel()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(go_on_later, go_on)
        monkeypatch.undo()
        assert (
            len(await run(Ledger(), tmp_path / "journal")) == 30
        )  # waits for the thread that releases the file


async def go_on_later(go_on: threading.Event) -> None:
    await anyio.sleep(0.01)
    go_on.set()


async def test_a_path_is_a_file_whatever_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (":memory:", "file:x?mode=memory", "blocked and locked"):
        service = Ledger()
        for _ in range(2):
            await run(service, name, PANEL[:1])
        assert set(service.asked.values()) == {1}
    with pytest.raises(JournalError, match="No such file"):
        await run(Ledger(), tmp_path / "locked" / "journal")


@pytest.mark.parametrize(
    ("path", "what"),
    [
        *((text, "this text") for text in ("", "a\0b", "\ud800")),
        (b"journal", "bytes"),
        (7, "int"),
        (None, "NoneType"),
        (os.DirEntry, "type"),
    ],
)
def test_an_invalid_path_is_refused_at_once(path, what):
    with pytest.raises(InvalidRequestError) as caught:
        Journal(path)
    rule = "a journal's path must be a str or a path object, not empty and without NUL"
    assert str(caught.value) == f"{rule}, not {what}"


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
    assert {o.quota_id: o.replayed for o in outcomes} == {i: i > 3 for i in range(1, 7)}
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


async def read(journal: Journal, *args) -> list[InviteOutcome]:
    return [outcome async for outcome in journal.outcomes(*args)]


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
    load, working, go_on = JournalRows.load, threading.Event(), threading.Event()

    def slow(self, *args) -> None:
        working.set()
        go_on.wait(60)
        load(self, *args)

    monkeypatch.setattr(JournalRows, "load", slow)
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
    requests, working, go_on = JournalRows.requests, threading.Event(), threading.Event()

    def slow(self, *args):
        working.set()
        go_on.wait(60)
        return requests(self, *args)

    monkeypatch.setattr(JournalRows, "requests", slow)
    outcomes = Journal(tmp_path / "journal").outcomes()
    await cancelled_once(working, outcomes)
    go_on.set()
    assert len([outcome async for outcome in outcomes]) == 30
    with pytest.raises(StopAsyncIteration):
        await anext(outcomes)


async def test_an_unreadable_journal_is_refused(tmp_path):
    with pytest.raises(JournalError, match="does not exist"):
        await Journal(tmp_path / "journal").counts()
    assert not list(tmp_path.iterdir())
    await run(Ledger(), tmp_path / "journal")
    with closing(sqlite3.connect(tmp_path / "journal")) as database:
        database.execute("UPDATE rows SET content = x'00' WHERE row = 3")
        database.commit()
    outcomes = Journal(tmp_path / "journal").outcomes()
    with pytest.raises(JournalError, match="is damaged: row 3"):
        await anext(outcomes)
    assert [outcome async for outcome in outcomes] == []
    assert len(await run(Ledger(), Journal(tmp_path / "journal", accept_damage=True))) == 30
    assert sum((await Journal(tmp_path / "journal").counts()).values()) == 30


def test_a_journal_shows_only_its_public_names():
    assert {name for name in dir(Journal) if not name.startswith("_")} == {
        "backup",
        "counts",
        "erase",
        "outcomes",
        "path",
        "to_arrow",
    }


# --- What is under way


async def opened(path: Path, **options) -> JournalRun:
    journal = run_of(Journal(path, **options))
    journal.claim(*OWNER)
    await journal.open()
    return journal


def answers(member_code: str, quota_ids) -> list[InviteOutcome]:
    error = SamplingError("lost", endpoint="bulk_invite", delivery="unknown")
    invite = Invite(7, 8, 1, 1.5, "https://survey.example/1", 10, 30)
    kinds = [
        InviteOutcome(member_code, 1, "invited", invite, 1, "SUCCESS", anomaly="odd: \ud800"),
        InviteOutcome(member_code, 2, "rejected", None, 9, "G\u00dcLTIG"),
        InviteOutcome(member_code, 3, "unknown", None, 500, None, error),
        InviteOutcome(member_code, 4, "not_sent"),
    ]
    return [evolve(kinds[quota_id % 4], quota_id=quota_id) for quota_id in quota_ids]


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


def told(outcome: InviteOutcome) -> tuple:
    error = outcome.error and (str(outcome.error), outcome.error.delivery)
    return evolve(outcome, error=None), error


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


async def test_a_row_damaged_after_opening_is_named_and_not_shown(tmp_path):
    journal = await opened(tmp_path / "journal")
    chunk = Chunk("m0", (1,))
    journal.note_answered(journal.note_sent(chunk), answers("m0", [1]))
    await journal.written()
    rows = journal._file._rows._database
    for statement in (
        "UPDATE rows SET content = replace(content, 're', '\"')",
        "DELETE FROM rows WHERE row = 2",
    ):
        rows.execute(statement)
        with pytest.raises(JournalError, match=r"journal has been damaged since it was opened: .*") as caught:
            await journal.recall({"m0": [1]})
        assert caught.value.path == tmp_path / "journal"
        assert caught.value.__context__ is None or "survey" not in repr(caught.value.__context__)
    await journal.close()


async def test_a_journal_that_is_not_open_raises_an_error(tmp_path):
    journal = run_of(Journal(tmp_path / "journal"))
    await journal.close()
    with pytest.raises(JournalError, match="is not open") as refused:
        await journal.recall({"m0": [1]})
    assert refused.value.path == tmp_path / "journal"
    with pytest.raises(JournalError, match=r"journal is not open$"):
        journal.note_sent(Chunk("m0", (1,)))


# --- Releasing the file


@pytest.mark.asyncio
@pytest.mark.parametrize("cancels", [1, 2, 3, 7])
async def test_a_close_that_is_cancelled_again_and_again_still_releases_the_file(
    tmp_path, monkeypatch, cancels
):
    let_go, go_on = JournalFile._let_go, threading.Event()

    def slow(self) -> None:
        if self is file:  # files of earlier tests may be collected now
            go_on.wait(60)
        let_go(self)

    journal = await opened(tmp_path / "journal")
    file = journal._file
    journal.note_sent(Chunk("m0", (1,)))
    monkeypatch.setattr(JournalFile, "_let_go", slow)
    task = asyncio.ensure_future(journal.close())
    for _ in range(cancels):
        await asyncio.sleep(0.001)
        task.cancel()
    await asyncio.sleep(0.001)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    journal = await opened(tmp_path / "journal")
    assert [*(await journal.recall({"m0": [1]}))["m0"]] == [1]
    await journal.close()
    # Undo this while `file` is alive. Otherwise its `__del__` would call `slow` while both are destroyed, which
    # crashes Python 3.11.
    monkeypatch.undo()


@pytest.mark.asyncio
async def test_rows_are_written_once_if_the_waiter_is_cancelled(tmp_path, monkeypatch):
    append, writing, go_on = JournalRows.append, threading.Event(), threading.Event()

    def slow(self, notes) -> None:
        writing.set()
        go_on.wait(60)
        append(self, notes)

    journal = await opened(tmp_path / "journal")
    monkeypatch.setattr(JournalRows, "append", slow)
    journal.note_sent(Chunk("m0", (1,)))
    task = asyncio.ensure_future(journal.written())
    await in_thread(writing.wait, 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    journal.note_sent(Chunk("m0", (2,)))
    go_on.set()
    await journal.written()
    await journal.close()
    assert [note.chunk for note in rows_of(tmp_path / "journal")] == [1, 2]


def test_a_journal_is_released_after_its_event_loop_ended(tmp_path):
    file = JournalFile(tmp_path / "journal", OWNER)
    file.open()
    del file
    gc.collect()
    assert len(anyio.run(run, Ledger(), tmp_path / "journal")) == 30


async def test_a_failure_on_leaving_is_raised_bare(tmp_path, monkeypatch):
    monkeypatch.setattr(JournalRows, "append", full)
    async with doubles.client(Ledger()) as client:
        with pytest.raises(JournalError, match="disk is full") as caught:
            async with client.fan_out(PANEL, journal=tmp_path / "journal"):
                await anyio.sleep(0.005)
                raise KeyError("of the block")
    assert isinstance(caught.value.__context__, KeyError)
    monkeypatch.undo()
    assert len(await run(Ledger(), tmp_path / "journal")) == 30


def test_an_opening_abandoned_before_it_began_opens_nothing(tmp_path):
    file = JournalFile(tmp_path / "journal", OWNER)
    file.abandon()
    file.open()
    assert not list(tmp_path.iterdir())
    with pytest.raises(JournalError, match="is not open"):
        file.write()


def test_an_opening_abandoned_at_its_last_moment_releases_the_file(tmp_path, monkeypatch):
    file, opened = JournalFile(tmp_path / "journal", OWNER), JournalFile._open

    def given_up(self) -> None:
        opened(self)
        self.abandon()  # from another thread, which finds the file in use

    monkeypatch.setattr(JournalFile, "_open", given_up)
    file.open()
    monkeypatch.undo()
    assert len(anyio.run(run, Ledger(), tmp_path / "journal")) == 30
    with pytest.raises(JournalError, match="is not open"):
        file.write()


def test_a_forked_child_shares_nothing_of_the_file_of_its_parent(tmp_path, monkeypatch):
    file = JournalFile(tmp_path / "journal", OWNER)
    file.open()
    file.note(SENT, 1, b"m0", b"[1]")
    file.write()
    files = [file, JournalFile(tmp_path / "other", OWNER)]
    monkeypatch.setattr(_journal_file, "_files", {id(file): ref(file) for file in files})
    _journal_file._forget_all()  # as after a fork, see test_journal_faults
    assert file.is_gone
    file.leave()
    assert (tmp_path / "journal-wal").exists()


def test_a_lock_file_removed_while_it_was_being_locked_is_no_lock(tmp_path, monkeypatch):
    lock, removed = _journal_lock._lock, []

    def late(file: int) -> None:
        lock(file)
        if not removed:
            removed.append((tmp_path / "journal-lock").unlink())

    monkeypatch.setattr(_journal_lock, "_lock", late)
    taken = JournalLock(tmp_path / "journal")
    taken.take()
    with pytest.raises(JournalError, match="in use"):
        JournalLock(tmp_path / "journal").take()
    taken.release()
    taken.release()


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def fail(_file: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(_journal_lock, "_lock", fail)
    with pytest.raises(JournalError, match="cannot be used: No locks available"):
        JournalFile(tmp_path / "journal", OWNER).open()


def test_rows_are_counted_as_noted_and_written(tmp_path):
    file = JournalFile(tmp_path / "journal", OWNER)
    file.open()
    for chunk in range(1, 5):
        file.note(SENT, chunk, b"m0", b"[%d]" % chunk)
        if not chunk % 2:
            assert (file.noted, file.written) == (chunk, chunk - 2)
            file.write()
            assert (file.noted, file.written) == (chunk, chunk)
    file.leave()
    with pytest.raises(JournalError, match=r"journal is not open$") as caught:
        file.write()
    assert caught.value.path == tmp_path / "journal"


def test_a_journal_that_was_closed_is_on_disk_with_its_lock_file(tmp_path, monkeypatch):
    headers, write = [], JournalLock.write

    def written(self, header, *, durably=False) -> None:
        headers.append((header.rows, bool(durably)))
        write(self, header, durably=durably)

    monkeypatch.setattr(JournalLock, "write", written)
    file = JournalFile(tmp_path / "journal", OWNER)
    file.open()
    assert headers[0] == (0, True)
    file.note(SENT, 1, b"m0", b"[1]")
    file.leave()
    assert headers[-1] == (1, True)


async def test_an_error_of_sqlite_while_outcomes_are_looked_up_names_the_journal(tmp_path, monkeypatch):
    journal = await opened(tmp_path / "journal")

    monkeypatch.setattr(JournalRows, "recall", failing)
    with pytest.raises(JournalError, match="journal cannot be used: SQLite says") as caught:
        await journal.recall({"m0": [1]})
    assert caught.value.path == tmp_path / "journal"
    await journal.close()


def test_a_file_that_is_gone_is_not_listed_any_more(tmp_path):
    file = JournalFile(tmp_path / "journal", OWNER)
    number = id(file)
    assert _journal_file._files[number]() is file
    del file
    gc.collect()
    assert number not in _journal_file._files


def test_a_brief_look_at_the_lock_is_waited_for(tmp_path, monkeypatch):
    now, other, lock = [100.0], JournalLock(tmp_path / "journal"), JournalLock(tmp_path / "journal")
    waits = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        now[0] += seconds
        if len(waits) == 3:
            other.release()

    monkeypatch.setattr(_journal_lock, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    other.take()
    lock.take()
    assert waits == pytest.approx([0.005] * 3)
    with pytest.raises(JournalError, match=r"journal is in use by another run$") as caught:
        other.take()
    assert caught.value.path == tmp_path / "journal"
    assert 10 <= len(waits) - 3 <= 11  # until the brief time is over
    lock.release()


def test_the_line_of_a_lock_file_is_that_of_journals_that_are_there():
    line = _journal_lock._line(Header(7, bytes(range(16))))
    assert line == (
        b"sampling_async journal form 2 rows 00000000000000000007 digest 000102030405060708090a0b0c0d0e0f "
        b"check ede98472b8a09684\n"
    )


async def test_what_is_written_is_not_written_again(tmp_path, monkeypatch):
    journal = await opened(tmp_path / "journal")
    writes, write = [], JournalFile.write

    def noted(self) -> None:
        writes.append(None)
        write(self)

    monkeypatch.setattr(JournalFile, "write", noted)
    journal.note_sent(Chunk("m0", (1,)))
    for _ in range(2):
        await journal.written()
    assert len(writes) == 1
    await journal.close()


async def test_a_failed_write_names_the_journal(tmp_path, monkeypatch):
    journal = await opened(tmp_path / "journal")
    monkeypatch.setattr(JournalRows, "append", full)
    journal.note_sent(Chunk("m0", (1,)))
    with pytest.raises(JournalError, match="journal cannot be used: the disk is full") as caught:
        await journal.written()
    assert caught.value.path == tmp_path / "journal"
    monkeypatch.undo()
    await journal.close()


def test_the_lock_file_of_a_new_journal_is_on_disk_before_its_tables(tmp_path, monkeypatch):
    steps, write, make = [], JournalLock.write, JournalRows.make

    def written(self, header, *, durably=False) -> None:
        steps.append(("header", bool(durably)))
        write(self, header, durably=durably)

    def made(self, *args) -> None:
        steps.append("tables")
        make(self, *args)

    monkeypatch.setattr(JournalLock, "write", written)
    monkeypatch.setattr(JournalRows, "make", made)
    file = JournalFile(tmp_path / "journal", OWNER)
    file.open()
    assert steps[:2] == [("header", True), "tables"]
    file.leave()


async def test_an_empty_result_is_not_written(tmp_path):
    journal = await opened(tmp_path / "journal")
    journal.note_answered(1, [])
    await journal.close()
    assert not rows_of(tmp_path / "journal")


# --- Copies


async def test_a_copy_of_a_journal_in_use_is_complete(tmp_path):
    service, copy = Ledger(), tmp_path / "copy"
    async with doubles.client(service) as client:
        journal = Journal(tmp_path / "journal")
        async with client.fan_out(PANEL, journal=journal, chunk_size=3) as stream:
            first = [await anext(stream) for _ in range(7)]
            for _ in range(2):  # the second copy replaces the first
                await journal.backup(copy)
    known = {(o.member_code, o.quota_id) for o in await run(Ledger(httpx.Response(403)), copy) if o.invite}
    assert {(o.member_code, o.quota_id) for o in first if o.invite} <= known
    for file in tmp_path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


async def test_a_journal_that_nobody_uses_can_be_copied(tmp_path):
    service = Ledger()
    first = await run(service, tmp_path / "journal")
    await Journal(tmp_path / "journal").backup(str(tmp_path / "copy"))
    assert facts(await run(service, tmp_path / "copy")) == facts(first)
    assert set(service.asked.values()) == {1}


async def test_a_copy_replaces_all_that_belongs_to_an_earlier_one(tmp_path):
    await run(Ledger(), tmp_path / "journal")
    await Journal(tmp_path / "journal").backup(tmp_path / "copy")
    # What a process leaves that used the earlier copy, or was killed while it made one.
    for end in ("-wal", "-part", "-part-wal"):
        (tmp_path / f"copy{end}").write_bytes(b"of an earlier copy")
    with (tmp_path / "copy-lock").open("ab") as lock:
        lock.write(b"and more")
    await Journal(tmp_path / "journal").backup(tmp_path / "copy")
    assert {file.name for file in tmp_path.glob("copy*")} == {"copy", "copy-lock"}
    assert facts(await read(Journal(tmp_path / "copy"))) == facts(await read(Journal(tmp_path / "journal")))


@pytest.mark.parametrize(("method", "named"), [("_opened", "journal"), ("copy", "copy")])
async def test_an_error_in_copying_names_the_file_that_it_is_about(tmp_path, monkeypatch, method, named):
    await run(Ledger(), tmp_path / "journal")

    monkeypatch.setattr({"_opened": JournalFile, "copy": JournalRows}[method], method, failing)
    with pytest.raises(JournalError, match="SQLite says") as caught:
        await Journal(tmp_path / "journal").backup(tmp_path / "copy")
    assert caught.value.path == tmp_path / named
    assert not list(tmp_path.glob("copy-part*"))  # with member codes


async def test_a_journal_that_cannot_be_copied_is_refused(tmp_path):
    with pytest.raises(JournalError, match=r"journal does not exist$") as caught:
        await Journal(tmp_path / "journal").backup(tmp_path / "copy")
    assert caught.value.path == tmp_path / "journal"
    (tmp_path / "empty").touch()
    with pytest.raises(JournalError, match=r"empty is empty$") as caught:
        await Journal(tmp_path / "empty").backup(tmp_path / "copy")
    assert caught.value.path == tmp_path / "empty"
    journal = Journal(tmp_path / "journal")
    run_of(journal).claim(*OWNER)
    await run_of(journal).open()
    (tmp_path / "letter").write_text("kept")
    with pytest.raises(JournalError, match="letter exists already, and is not a journal"):
        await journal.backup(tmp_path / "letter")
    assert (tmp_path / "letter").read_text() == "kept"
    for taken, reason in [(journal.path, "in use"), (tmp_path / "none" / "copy", "No such file")]:
        with pytest.raises(JournalError, match=reason):
            await journal.backup(taken)
    with pytest.raises(InvalidRequestError):
        await journal.backup("a\0b")
    with pytest.raises(JournalError, match="in use"):
        await Journal(journal.path).backup(tmp_path / "copy")
    await run_of(journal).close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["empty", "journal", "journal-lock", "letter"]


def test_a_lock_reports_whether_anybody_has_it(tmp_path):
    lock, other = JournalLock(tmp_path / "journal"), JournalLock(tmp_path / "journal")
    assert not other.is_taken()  # there is no file yet
    lock.take()
    assert other.is_taken()
    lock.release()
    assert not other.is_taken()
    assert not other.is_taken()  # looking does not take it
    other.take()
    other.release()


def test_two_may_look_at_a_lock_at_once(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl", reason="Windows has no shared locks")
    lock, flock, seen = JournalLock(tmp_path / "journal"), fcntl.flock, []
    (tmp_path / "journal-lock").touch()

    def during(file: int, kind: int) -> None:
        flock(file, kind)
        if not seen:
            seen.append(True)
            seen.append(lock.is_taken())

    monkeypatch.setattr(fcntl, "flock", during)
    assert not lock.is_taken()
    assert seen == [True, False]


@pytest.mark.skipif(sys.platform == "win32", reason="it knows no forks")
def test_a_child_does_not_keep_the_lock_of_a_parent_that_was_killed(tmp_path):
    """A pool of processes may outlive a campaign that is killed; another run of it must not wait for them."""
    code = """
import os, pathlib, sys, time
from sampling_async._journal.lock import JournalLock

lock = JournalLock(pathlib.Path(sys.argv[1]))
lock.take()
if not os.fork():
    os.close(1)
    time.sleep(30)
    os._exit(0)
os.write(1, b"forked")
os.kill(os.getpid(), 9)
"""
    journal = tmp_path / "journal"
    command = [sys.executable, "-c", code, str(journal)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    assert (done.returncode, done.stdout) == (-9, b"forked")
    lock = JournalLock(journal)
    lock.take()
    lock.release()


def test_pages_that_sqlite_finds_damaged_are_damage_even_if_all_rows_can_be_read(tmp_path):
    path = tmp_path / "journal"
    file = JournalFile(path, OWNER)
    file.open()
    file.note(SENT, 1, b"m", b"[1]")
    file.leave()
    content = bytearray(path.read_bytes())
    content[36:40] = (7).to_bytes(4, "big")  # the number of free pages, of which there are none
    path.write_bytes(content)
    text = r"journal is damaged: SQLite finds damaged pages in the file\. Keep"
    with pytest.raises(JournalError, match=text) as caught:
        JournalFile(path, OWNER).open()
    assert caught.value.path == path


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


def test_a_line_that_cannot_be_read_is_an_error_about_its_journal(tmp_path):
    with pytest.raises(JournalError, match=r"opened: a response cannot be read$") as caught:
        list(outcomes_of("m", {5: b"[5,"}, tmp_path / "journal", replayed=True))
    assert caught.value.path == tmp_path / "journal"


def test_the_chain_of_digests_is_that_of_journals_that_are_there():
    """If these bytes change, the form of the file has another number."""
    row = 1, b"sent", 1, "m\u00fc".encode(), b"[1, 2]"
    assert _journal_rows._chained(bytes(16), row).hex() == "1badf27332713ab81001e5b2d3d60d85"
    for at in range(5):
        assert not _journal_rows._chained(bytes(16), (*row[:at], None, *row[at + 1 :]))


@pytest.mark.parametrize("asked", [[2, 3], [2, 3, 4, 5], [2, 3, 4, 5, 6], [2, 3, 4, 5, 6, 7]])
def test_each_quota_has_its_line_or_none(asked):
    content = b'\n[1,"a"]\n[2,"b"]\n[12,"c"]'
    assert dict(_journal_rows._lines(content, asked)) == {**dict.fromkeys(asked), 2: b'[2,"b"]'}


def test_a_row_that_sqlite_cannot_read_is_named(tmp_path):
    class Broken:
        def execute(self, *_: object):
            yield 1, b"sent", 1, b"m", b"[1]", b""
            raise sqlite3.DatabaseError

    (tmp_path / "journal").touch()
    rows = JournalRows(tmp_path / "journal")
    database, rows._database = rows._database, Broken()
    found = rows._found(1)
    assert next(found)[0] == 1
    with pytest.raises(Damage, match=r"^row 2 cannot be read$"):
        next(found)
    rows._database = database
    rows.close()


def test_a_check_that_nobody_waits_for_ends_early(tmp_path):
    file = JournalFile(tmp_path / "journal", OWNER)
    file.open()
    file.note(SENT, 1, b"m", b"[1]")
    file.leave()
    rows = JournalRows(tmp_path / "journal")
    with pytest.raises(JournalError, match=r"journal is no longer needed: its user stopped waiting$") as caught:
        rows.load(Header(1, b""), lambda: False)
    assert caught.value.path == tmp_path / "journal"
    rows.close()


def test_an_owner_that_is_no_text_is_another_one(tmp_path):
    path = tmp_path / "journal"
    anyio.run(run, Ledger(), path)
    for column in ("base_url", "panel_guid"):
        with closing(sqlite3.connect(path)) as database:
            database.execute(f"UPDATE owner SET {column} = CAST(x'ff' AS TEXT)")
            database.commit()
        with pytest.raises(JournalError, match=OF_OTHERS):
            JournalFile(path, OWNER).open()


def test_only_ids_that_a_quota_may_have_are_read_from_a_doubtful_row():
    largest = 2**63 - 1
    for content in (
        b"[0, 1, %d, %d]" % (largest, largest + 1),
        b"\n[0,\n[1,\n[%d,\n[%d," % (largest, largest + 1),
    ):
        assert mending._ids_of(Note(SENT, 1, b"m", content)) == {1, largest}


def test_doubtful_rows_become_chunks_of_their_own_behind_all_others():
    class Mended:
        chunks = 7

        def recall(self, member_code: bytes, _: set[int]) -> dict[int, Latest]:
            return {1: Latest(3, b'[1,"invited",null]'), 2: Latest(3, None)} if member_code == b"a" else {}

    doubtful = [Note(SENT, 2, b"a", b"[2, 1]"), Note(SENT, 2, b"b", b"[1]"), Note(ANSWERED, 2, b"b", b"\n[2,")]
    assert list(mending._unknown(doubtful, Mended())) == [
        Note(SENT, 8, b"a", b"[2]"),
        Note(SENT, 9, b"b", b"[1]"),
        Note(SENT, 10, b"b", b"[2]"),
    ]


@pytest.mark.parametrize(
    ("damaged", "expected", "found"),
    [
        ({2}, 5, [(1, True), (3, False), (4, True), (5, True)]),
        ({2, 3}, 5, [(1, True), (4, False), (5, True)]),
        ({4}, 5, [(1, True), (2, True), (3, True), (5, False)]),
        ({4}, 4, [(1, True), (2, True), (3, True)]),  # nothing is expected behind it
        ({5}, 5, [(1, True), (2, True), (3, True), (4, True)]),
    ],
)
def test_rows_behind_unreadable_ones_are_salvaged(tmp_path, monkeypatch, damaged, expected, found):
    file = JournalFile(tmp_path / "journal", OWNER)
    file.open()
    for chunk in range(1, 6):
        file.note(SENT, chunk, b"m0", b"[%d]" % chunk)
    file.leave()
    of_rows = JournalRows._found

    def broken(self, row: int):
        for each in of_rows(self, row):
            if each[0] in damaged:
                raise Damage(f"row {each[0]} cannot be read")
            yield each

    monkeypatch.setattr(JournalRows, "_found", broken)
    rows = JournalRows(tmp_path / "journal")
    assert [(note.chunk, is_sound) for note, is_sound in rows.salvaged(expected)] == found
    rows.close()


# --- What is left of a damaged file


def changed(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))


async def mended(path: Path, caplog) -> tuple[int, str]:
    """Return how many outcomes a damaged journal still has, and the warning about it."""
    ledger = Ledger()
    with pytest.raises(JournalError, match="is damaged"):
        await run(ledger, path)
    assert not ledger.asked
    outcomes = await run(ledger, Journal(path, accept_damage=True))
    assert len(outcomes) == 30
    replayed = sum(outcome.replayed for outcome in outcomes)
    assert sum(ledger.asked.values()) == 30 - replayed
    return replayed, caplog.text


async def test_a_journal_without_its_last_page_keeps_the_others(tmp_path, caplog):
    path = tmp_path / "journal"
    long = [InviteRequest(f"{'m' * 900}{number}", range(1, 4)) for number in range(10)]
    await run(Ledger(), path, long)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 4096)
    with pytest.raises(JournalError, match="is damaged"):
        await run(Ledger(), path, long)
    outcomes = await run(Ledger(), Journal(path, accept_damage=True), long)
    assert 0 < sum(outcome.replayed for outcome in outcomes) <= 30
    assert "a damaged journal was mended" in caplog.text


@pytest.mark.parametrize("new", [b"CREATE TABLX rows", b"CREATE T\xe2BLE rows", b"\0" * 17])
async def test_a_journal_with_a_broken_first_page_keeps_all_rows(tmp_path, caplog, new):
    await run(Ledger(), tmp_path / "journal")
    changed(tmp_path / "journal", b"CREATE TABLE rows", new)
    replayed, warning = await mended(tmp_path / "journal", caplog)
    assert replayed == 30
    assert "a damaged journal was mended: 20 rows of 20" in warning
    assert not (tmp_path / "journal-again").exists()


async def test_a_journal_of_which_nothing_can_be_read_is_not_begun_anew(tmp_path):
    path = tmp_path / "journal"
    await run(Ledger(), path)
    path.write_bytes(b"\1" * path.stat().st_size)
    ledger = Ledger()
    with pytest.raises(JournalError, match="nothing in it can be read; to ask again for what its 20 rows"):
        await run(ledger, Journal(path, accept_damage=True))
    assert not ledger.asked
    assert set(path.read_bytes()) == {1}
    path.unlink()
    (tmp_path / "journal-lock").unlink()
    assert len(await run(ledger, path)) == 30


def test_a_database_is_removed_with_all_files_of_sqlite(tmp_path):
    for end in ("", "-wal", "-shm", "-journal"):
        (tmp_path / f"database{end}").touch()
    remove(tmp_path / "database")
    assert list(tmp_path.iterdir()) == []


def test_an_error_that_says_nothing_about_damage_is_reported_as_it_is(tmp_path, monkeypatch):
    path = tmp_path / "journal"
    file = JournalFile(path, OWNER)
    file.open()
    file.note(SENT, 1, b"m", b"[1]")
    file.leave()

    def has_none(_: JournalRows) -> bool:
        full = sqlite3.OperationalError("full")
        full.sqlite_errorcode, full.sqlite_errorname = sqlite3.SQLITE_FULL, "SQLITE_FULL"
        raise full

    monkeypatch.setattr(JournalRows, "has_none", has_none)
    with pytest.raises(JournalError, match="cannot be used: the disk is full"):
        JournalFile(path, OWNER, accept_damage=True).open()
    assert not (tmp_path / "journal-damaged").exists()


# --- Erasing


async def all_of(stream):
    async with stream as outcomes:
        return [outcome async for outcome in outcomes]


async def test_a_member_is_erased_and_the_others_stay(tmp_path):
    path = tmp_path / "journal"
    requests = [InviteRequest(code, [2, 4, 5]) for code in ("m-1", "erased-canary", "m-3")]
    service = doubles.Service(doubles.bulk)
    async with doubles.client(service) as client:
        await all_of(client.fan_out(requests, journal=path))
        journal = Journal(path)
        assert await journal.erase("erased-canary") == 2  # a request and its response
        assert await journal.erase("erased-canary") == 0
        left = [outcome async for outcome in journal.outcomes()]
        assert {outcome.member_code for outcome in left} == {"m-1", "m-3"}
        assert await journal.counts() == {"invited": 4, "rejected": 2, "not_sent": 0, "unknown": 0}
        sent = len(service.requests)
        others = [each for each in requests if each.member_code != "erased-canary"]
        again = await all_of(client.fan_out(others, journal=path))
        assert len(service.requests) == sent
        assert len(again) == 6
    assert not [file for file in tmp_path.iterdir() if b"erased-canary" in file.read_bytes()]


async def test_nothing_is_erased_from_a_journal_in_use_or_of_nobody(tmp_path):
    async with doubles.client(doubles.Service(doubles.bulk)) as client:
        async with client.fan_out([InviteRequest("m-1", [2])], journal=tmp_path / "journal") as outcomes:
            async for _ in outcomes:
                with pytest.raises(JournalError, match="in use"):
                    await Journal(tmp_path / "journal").erase("m-1")
    with pytest.raises(JournalError, match="does not exist"):
        await Journal(tmp_path / "another").erase("m-1")


async def test_a_journal_that_cannot_be_erased_from_stays_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "journal"
    async with doubles.client(doubles.Service(doubles.bulk)) as client:
        await all_of(client.fan_out([InviteRequest(code, [2]) for code in ("m-1", "m-2")], journal=path))
    before = path.read_bytes()

    def fail(*_):
        raise sqlite3.OperationalError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(JournalRows, "append", fail)
        with pytest.raises(JournalError):
            await Journal(path).erase("m-1")
    assert path.read_bytes() == before
    assert await Journal(path).counts() == {"invited": 2, "rejected": 0, "not_sent": 0, "unknown": 0}
    assert {file.name for file in tmp_path.iterdir()} == {"journal", "journal-lock"}


# --- What the journal has and the input has not


async def test_a_resumed_run_ends_with_what_its_input_has_not_any_more(tmp_path, caplog):
    """Quotas close between two runs: their links are paid for."""
    path, service = tmp_path / "j", Ledger()
    first = await run(service, path)
    shorter = [InviteRequest(f"m{n}", range(4, 9)) for n in range(1, 6)]
    second = await run(service, path, shorter)
    assert max(service.asked.values()) == 1
    of_input = {(f"m{n}", quota_id) for n in range(1, 6) for quota_id in range(4, 9)}
    before = {(each.member_code, each.quota_id): each for each in first}
    assert {(each.member_code, each.quota_id) for each in second} == of_input | before.keys()
    assert len(second) == len(of_input | before.keys())
    rest = [each for each in second if (each.member_code, each.quota_id) not in of_input]
    assert all(each.replayed for each in rest)
    assert {(each.member_code, each.quota_id) for each in rest} == before.keys() - of_input
    assert facts(rest) == facts([before[each.member_code, each.quota_id] for each in rest])
    (warning,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert f"{len(rest)} recorded outcomes are of pairs that the input has not" in warning


async def test_the_rest_has_what_was_in_flight_and_not_what_was_never_sent(tmp_path):
    path = tmp_path / "j"
    first = await run(Ledger(), path, PANEL[:1])
    killed(path)
    await run(Ledger(httpx.ConnectError("refused")), Journal(path, only_input=True), PANEL[1:2], retry=ONCE)
    rest = await run(Ledger(), path, [])
    unknown = [("m0", quota_id, "unknown", None) for quota_id in (1, 2, 3)]
    assert facts(rest) == [*unknown, *facts([each for each in first if each.quota_id > 3])]


async def test_there_is_no_rest_while_the_input_may_have_more(tmp_path):
    """After a deadline, nobody knows what the input would have had."""
    path = tmp_path / "j"
    await run(Ledger(), path)

    async def slow():
        yield PANEL[0]
        await anyio.sleep(60)

    outcomes = await run(Ledger(), path, slow(), deadline=0.05)
    assert {each.member_code for each in outcomes} <= {"m0"}


async def test_the_rest_is_left_out_if_only_the_input_counts(tmp_path):
    path, service = tmp_path / "j", Ledger()
    await run(service, path)
    outcomes = await run(service, Journal(path, only_input=True), PANEL[:2])
    assert facts(outcomes) == facts(await run(service, tmp_path / "another", PANEL[:2]))


async def test_pairs_of_this_run_are_no_rest_also_if_the_journal_is_used_again(tmp_path):
    path, service = tmp_path / "j", Ledger()
    journal = Journal(path)
    assert len(await run(service, journal, PANEL[:2])) == 12
    assert len(await run(service, journal, PANEL[2:])) == 30
    assert len(await run(service, journal, PANEL)) == 30
    assert max(service.asked.values()) == 1


async def test_unknown_pairs_that_are_sent_again_are_no_rest(tmp_path):
    path = tmp_path / "j"
    await run(Ledger(), path, PANEL[:1])
    killed(path)
    again = await run(Ledger(), Journal(path, resend_unknown=True), PANEL[:1])
    assert sorted(each.quota_id for each in again) == [1, 2, 3, 4, 5, 6]
    assert {each.quota_id for each in again if not each.replayed} == {1, 2, 3}


async def test_a_large_rest_comes_in_parts_and_a_cancelled_reading_loses_none(tmp_path, monkeypatch):
    monkeypatch.setattr(_journal_rows, "_TOGETHER", 4)
    path, service, requests = tmp_path / "j", Ledger(), [InviteRequest(f"m{n}", range(1, 7)) for n in range(50)]
    await run(service, path, requests)
    journal = Journal(path)
    await journal_opened(journal)
    working = run_of(journal)
    found = []
    while rest := await _rest_after_a_cancellation(working):
        found += [(code, quota_id) for code, known in rest.items() for quota_id in known]
    await working.close()
    assert sorted(found) == sorted((each.member_code, id_) for each in requests for id_ in each.quota_ids)


async def journal_opened(journal: Journal) -> None:
    working = run_of(journal)
    working.claim(*OWNER)
    await working.open()


async def _rest_after_a_cancellation(working: JournalRun):
    with anyio.CancelScope() as scope:
        scope.cancel()
        await working.rest()
    return await working.rest()


async def test_progress_counts_the_rest(tmp_path):
    path = tmp_path / "j"
    await run(Ledger(), path)
    async with (
        doubles.client(Ledger()) as client,
        client.fan_out(PANEL[:1], journal=path) as stream,
    ):
        async for _ in stream:
            pass
        progress = stream.progress
    assert (progress.taken, progress.answered, progress.replayed, progress.total) == (30, 30, 30, 30)
    assert progress.seconds_left == 0.0
