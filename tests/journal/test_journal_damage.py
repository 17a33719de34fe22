"""Damaged journals: what is refused, what is named, and what can be saved."""

from __future__ import annotations

import pickle
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import pytest
from journal_kit import OWNER, PANEL, Ledger, answers, killed, opened, run

from sampling_async import InviteRequest, Journal, JournalError
from sampling_async._journal import mending
from sampling_async._journal import rows as _journal_rows
from sampling_async._journal.database import remove
from sampling_async._journal.file import JournalFile
from sampling_async._journal.lock import Damage, Header
from sampling_async._journal.rows import ANSWERED, APPLICATION, SENT, JournalRows, Latest, Note
from sampling_async._protocol.requests import Chunk

if TYPE_CHECKING:
    from pathlib import Path


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


# --- Unusable journals


def of_something_else(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE t (x)")
    database.close()


def of_something_private(path: Path) -> None:
    of_something_else(path)
    path.chmod(0o600)  # as a journal is


def of_an_earlier_form(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute(f"PRAGMA application_id = {APPLICATION}")
        database.execute("PRAGMA user_version = 1")
        database.execute("CREATE TABLE sent (chunk INTEGER PRIMARY KEY)")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (of_something_else, "journal is another program's database; give the journal another path$"),
        (of_something_private, "journal is another program's database; give the journal another path$"),
        (of_an_earlier_form, "journal has file format 1"),
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


# --- Replayed outcomes of earlier runs


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


# --- What is under way


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


# --- Copies


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
