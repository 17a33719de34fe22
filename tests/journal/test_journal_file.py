"""The file of a journal and its lock: who has it, when it is written, and when it is let go."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import sqlite3
import stat
import subprocess
import sys
import threading
from collections import Counter
from contextlib import closing
from hashlib import blake2b
from types import SimpleNamespace
from weakref import ref

import anyio
import anyio.to_thread
import doubles
import pytest
from journal_kit import OF_OTHERS, OWNER, PANEL, Ledger, full, go_on_later, held_up, opened, rows_of, run

from sampling_async import (
    InvalidRequestError,
    InviteOutcome,
    InviteRequest,
    Journal,
    JournalError,
    OutcomeStream,
)
from sampling_async._journal import file as _journal_file
from sampling_async._journal import lock as _journal_lock
from sampling_async._journal.file import JournalFile
from sampling_async._journal.journal import run_of
from sampling_async._journal.lock import Header, JournalLock
from sampling_async._journal.rows import SENT, JournalRows
from sampling_async._pacing.threads import in_thread
from sampling_async._protocol.requests import Chunk


async def test_the_file_is_for_its_owner_only_and_holds_no_key(tmp_path):
    await run(Ledger(), tmp_path / "journal")
    for file in tmp_path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert doubles.KEY.encode() not in file.read_bytes()


# --- Unusable journals


@pytest.mark.parametrize("moment", ["load", "make"])
async def test_a_run_cancelled_during_opening_releases_the_journal(tmp_path, monkeypatch, moment):
    if moment == "load":
        await run(Ledger(), tmp_path / "journal", PANEL[:1])
    working, go_on = held_up(monkeypatch, JournalRows, moment)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, Ledger(), Journal(tmp_path / "journal"))
        await in_thread(working.wait, 5)
        tasks.cancel_scope.cancel()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(go_on_later, go_on)
        monkeypatch.undo()
        assert (
            len(await run(Ledger(), tmp_path / "journal")) == 30
        )  # waits for the thread that lets the file go


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
        *((text, "this text") for text in ("", "/", "a\0b", "\ud800")),
        (b"journal", "bytes"),
        (7, "int"),
        (None, "NoneType"),
        (os.DirEntry, "type"),
    ],
)
def test_an_invalid_path_is_refused_at_once(path, what):
    with pytest.raises(InvalidRequestError) as caught:
        Journal(path)
    rule = "a journal's path must be a str or a path object that names a file, without NUL"
    assert str(caught.value) == f"{rule}, not {what}"


# --- What is under way


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
    journal = await opened(tmp_path / "journal")
    writing, go_on = held_up(monkeypatch, JournalRows, "append")
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


def test_the_lock_file_is_on_disk_before_the_tables_and_again_when_the_journal_is_closed(tmp_path, monkeypatch):
    steps, write, make = [], JournalLock.write, JournalRows.make

    def written(self, header, *, durably=False) -> None:
        steps.append((header.rows, bool(durably)))
        write(self, header, durably=durably)

    def made(self, *args) -> None:
        steps.append("tables")
        make(self, *args)

    monkeypatch.setattr(JournalLock, "write", written)
    monkeypatch.setattr(JournalRows, "make", made)
    file = JournalFile(tmp_path / "journal", OWNER)
    file.open()
    assert steps[:2] == [(0, True), "tables"]
    file.note(SENT, 1, b"m0", b"[1]")
    file.leave()
    assert steps[-1] == (1, True)


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


async def test_an_empty_result_is_not_written(tmp_path):
    journal = await opened(tmp_path / "journal")
    journal.note_answered(1, [])
    await journal.close()
    assert not rows_of(tmp_path / "journal")


# --- Copies


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


def test_an_owner_that_is_no_text_is_another_one(tmp_path):
    path = tmp_path / "journal"
    anyio.run(run, Ledger(), path)
    for column in ("base_url", "panel_guid"):
        with closing(sqlite3.connect(path)) as database:
            database.execute(f"UPDATE owner SET {column} = CAST(x'ff' AS TEXT)")
            database.commit()
        with pytest.raises(JournalError, match=OF_OTHERS):
            JournalFile(path, OWNER).open()


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


async def test_a_chunk_that_cannot_be_written_to_the_journal_is_not_sent(tmp_path, monkeypatch):
    service = Ledger()
    async with doubles.client(service) as client:
        stream = client.fan_out(PANEL, journal=Journal(tmp_path / "journal"), chunk_size=3)
        monkeypatch.setattr(JournalRows, "append", full)
        with pytest.raises(JournalError, match="journal cannot be used: the disk is full") as caught:
            async with stream:
                async for _ in stream:
                    pytest.fail("nothing was asked")
    assert caught.value.path == tmp_path / "journal"
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


# --- Files of others


@pytest.mark.parametrize("accepts", [True, False])
async def test_a_database_beside_any_lock_file_is_another_programs(tmp_path, accepts):
    path = tmp_path / "app.db"
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE precious (x)")
    path.chmod(0o664)
    (tmp_path / "app.db-lock").write_bytes(b"pid 17")
    before = path.read_bytes()
    with pytest.raises(JournalError, match="is another program's database") as caught:
        await Journal(path, accept_damage=accepts).counts()
    assert caught.value.path == path
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (before, 0o664)


async def test_a_copy_replaces_no_file_of_another_program(tmp_path):
    await run(Ledger(), tmp_path / "journal")
    other = tmp_path / "other.mdb"
    other.write_bytes(b"precious data of another program" * 10)
    (tmp_path / "other.mdb-lock").write_bytes(b"pid 17")
    with pytest.raises(JournalError, match="exists already, and is not a journal"):
        await Journal(tmp_path / "journal").backup(other)
    assert other.read_bytes().startswith(b"precious")


async def test_a_journal_whose_two_files_are_lost_is_not_begun_anew(tmp_path):
    path = tmp_path / "journal"
    await run(Ledger(), path)
    for file in (path, tmp_path / "journal-lock"):
        file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(JournalError, match="nothing in it can be read"):
        await run(Ledger(), Journal(path, accept_damage=True))


async def test_a_journal_of_a_later_form_is_no_damage(tmp_path):
    path, lock = tmp_path / "journal", tmp_path / "journal-lock"
    await run(Ledger(), path)
    line = lock.read_bytes()[:-17].replace(b"form 2", b"form 3")
    lock.write_bytes(line + blake2b(line, digest_size=8).hexdigest().encode() + b"\n")
    with pytest.raises(JournalError, match="journal has file format 3, but this version reads only format 2"):
        await Journal(path).counts()


@pytest.mark.parametrize("name", ["resend_unknown", "accept_damage", "only_input"])
def test_a_text_is_no_flag(tmp_path, name):
    with pytest.raises(InvalidRequestError, match=f"{name} must be True or False, not 'false'"):
        Journal(tmp_path / "journal", **{name: "false"})


async def test_one_journal_serves_no_two_panels(tmp_path):
    """The stream that is entered counts, and not the one that was made last."""
    journal, service = Journal(tmp_path / "journal"), doubles.Service(doubles.bulk)
    other = doubles.client(service, panel_guid="11111111-2222-3333-4444-555555555555")
    async with doubles.client(service) as client, other:
        first = client.fan_out([InviteRequest("m", [1])], journal=journal)
        second = other.fan_out([InviteRequest("m", [1])], journal=journal)
        async with first:
            assert [outcome.quota_id async for outcome in first] == [1]
        with pytest.raises(JournalError, match="another service or panel"):
            await second.__aenter__()
