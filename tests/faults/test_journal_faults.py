"""Journals that are damaged, copied in use, forked, killed, or opened by other processes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import anyio
import doubles
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sampling_async import Invite, InviteOutcome, Journal, JournalError
from sampling_async._journal import mending
from sampling_async._journal.file import JournalFile
from sampling_async._journal.journal import run_of
from sampling_async._journal.lines import lines_of
from sampling_async._journal.lock import Damage, Header, JournalLock
from sampling_async._journal.rows import ANSWERED, SENT, JournalRows

OWNER = "https://service.example", doubles.PANEL
MEMBERS = [f"member-{number}" for number in range(4)]
QUOTAS = range(1, 61)
SECRETS = ("member-", "survey.example")


def outcome(member_code: str, quota_id: int) -> InviteOutcome:
    if quota_id % 3:
        return InviteOutcome(member_code, quota_id, "rejected", None, 9, "QUOTA_NOT_LIVE")
    invite = Invite(7, 8, quota_id, 1.5, f"https://survey.example/{quota_id}", 10, 30, 0.5)
    return InviteOutcome(member_code, quota_id, "invited", invite, 1, "SUCCESS")


def note(file: JournalFile, chunk: int, member_code: str, quota_ids: range, *, answered: bool = True) -> None:
    code = member_code.encode()
    file.note(SENT, chunk, code, json.dumps(list(quota_ids)).encode())
    if answered:
        lines = lines_of(outcome(member_code, quota_id) for quota_id in quota_ids)
        file.note(ANSWERED, chunk, code, lines)


def fill(path: Path, *, and_go: bool) -> JournalFile:
    """Write a journal whose last rows are in the WAL file and whose last chunk is in flight."""
    for half in (0, 2):
        file = JournalFile(path, OWNER)
        file.open()
        for member_code in MEMBERS[half : half + 2]:
            for start in QUOTAS[::20]:
                is_last = (member_code, start) == (MEMBERS[-1], QUOTAS[::20][-1])
                note(file, file.chunks + 1, member_code, range(start, start + 20), answered=not is_last)
                file.write()
        if and_go or not half:
            file.leave()
    return file


@pytest.fixture(scope="module")
def killed():
    """Give a folder with the journal of a killed process."""
    with tempfile.TemporaryDirectory() as folder:
        file = fill(Path(folder) / "running", and_go=False)
        shutil.copytree(folder, Path(folder) / "killed")
        file.leave()
        kept = Path(folder) / "killed"
        for each in list(kept.iterdir()):
            each.rename(kept / each.name.replace("running", "journal"))
        yield kept


def told(path: Path, **options) -> dict[tuple[str, int], InviteOutcome]:
    """Return the outcomes that a journal reports to a run."""

    async def main() -> dict[tuple[str, int], InviteOutcome]:
        journal = run_of(Journal(path, **options))
        journal.claim(*OWNER)
        await journal.open()
        try:
            recalled = await journal.recall(dict.fromkeys(MEMBERS, QUOTAS))
            known = [recalled[member_code].values() for member_code in MEMBERS]
            return {(each.member_code, each.quota_id): each for some in known for each in some}
        finally:
            await journal.close()

    return anyio.run(main)


def facts(known: dict[tuple[str, int], InviteOutcome]) -> dict[tuple[str, int], tuple]:
    return {pair: (o.status, o.invite, o.result_code, o.result, o.anomaly) for pair, o in known.items()}


EXPECTED = {
    (member_code, quota_id): ("unknown", None, None, None, None)
    if (member_code, quota_id > 40) == (MEMBERS[-1], True)
    else (o.status, o.invite, o.result_code, o.result, None)
    for member_code in MEMBERS
    for quota_id in QUOTAS
    if (o := outcome(member_code, quota_id))
}


def copy_of(killed: Path, folder: str) -> Path:
    shutil.copytree(killed, folder, dirs_exist_ok=True)
    return Path(folder) / "journal"


def test_the_journal_of_a_killed_process_is_complete(killed, tmp_path):
    assert (killed / "journal-wal").stat().st_size > 0
    assert facts(told(copy_of(killed, tmp_path))) == EXPECTED


def refusal(path: Path) -> str:
    """Return the error text with which a journal is refused; empty if it is accepted."""
    text = ""
    try:
        known = facts(told(path))
    except JournalError as exc:
        text = str(exc)
    else:
        assert known == EXPECTED
    assert not any(secret in text for secret in SECRETS)
    return text


def is_noticed(path: Path) -> str:
    """Return the error text; check that it shows no secret and that a second attempt gives the same."""
    text = refusal(path)
    assert text
    assert refusal(path) == text
    return text


def doubted(path: Path) -> None:
    """Continue with the readable rows: each outcome is as before, or unknown."""
    known = facts(told(path, accept_damage=True))
    assert all(fact in {EXPECTED[pair], ("unknown", None, None, None, None)} for pair, fact in known.items())
    assert facts(told(path)) == known  # the journal is repaired from now on


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_flipped_byte_is_noticed_or_does_no_harm(killed, data):
    with tempfile.TemporaryDirectory() as folder:
        path = copy_of(killed, folder)
        file = path.with_name(data.draw(st.sampled_from(["journal", "journal-wal", "journal-lock"])))
        content = bytearray(file.read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        file.write_bytes(content)
        text = refusal(path)
        if "is damaged" in text:
            doubted(path)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(["journal", "journal-wal", "journal-lock"]), st.floats(0.0, 1.0, exclude_max=True))
def test_a_truncated_file_is_detected_or_harmless(killed, name, kept):
    with tempfile.TemporaryDirectory() as folder:
        path = copy_of(killed, folder)
        os.truncate(path.with_name(name), int(path.with_name(name).stat().st_size * kept))
        if refusal(path):
            doubted(path)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda path: path.unlink(), "missing, but 23 rows had been written"),
        (lambda path: path.write_bytes(b""), "empty, but 23 rows had been written"),
        (lambda path: path.with_name("journal-wal").unlink(), "the last 11 of 23 rows are missing"),
        (lambda path: path.with_name("journal-wal").write_bytes(b""), "the last 11 of 23 rows are missing"),
        (lambda path: path.with_name("journal-lock").unlink(), "journal-lock, which belongs to it, is missing"),
        (
            lambda path: path.with_name("journal-lock").write_bytes(b"?" * 99),
            "journal-lock, which belongs to it",
        ),
        (lambda path: path.write_bytes(b"?" * 9999), "SQLite cannot read it"),
        (
            lambda path: (path.unlink(), path.with_name("journal-lock").unlink()),
            "journal-wal, which belongs to",
        ),
    ],
)
def test_a_missing_row_or_file_is_named(killed, tmp_path, damage, text):
    path = copy_of(killed, tmp_path)
    damage(path)
    said = is_noticed(path)
    assert text in said
    assert "accept_damage=True" in said
    doubted(path)


def changed(killed, tmp_path, statement: str) -> Path:
    """Return a copy of a journal after some statements of SQL."""
    path = copy_of(killed, tmp_path)
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.executescript(statement)
    return path


@pytest.mark.parametrize(
    ("statement", "text"),
    [
        ("DELETE FROM rows WHERE row = 7", "row 7 is missing"),
        ("UPDATE rows SET content = CAST('{[' AS BLOB) WHERE row = 8", "row 8 was changed"),
        ("UPDATE rows SET content = replace(content, 'invited', 'not_sent') WHERE row = 2", "row 2"),
        ("UPDATE rows SET member_code = x'ff' WHERE row = 2", "row 2 was changed"),
        ("UPDATE rows SET content = 7 WHERE row = 2", "row 2 was changed"),
        ("UPDATE rows SET digest = 7 WHERE row = 2", "row 2 was changed"),
        ("UPDATE rows SET content = 'x' WHERE row % 2", "row 1 was changed"),
        ("DELETE FROM rows WHERE row > 21", "the last 2 of 23 rows are missing"),
        ("DELETE FROM owner", "is damaged: the service and panel it was written for cannot be read."),
        ("PRAGMA application_id = 5", "is damaged: the mark of a journal in the file was changed."),
        ("PRAGMA user_version = 5", "is damaged: the number of the file format was changed."),
    ],
)
def test_a_changed_row_is_detected(killed, tmp_path, statement, text):
    path = changed(killed, tmp_path, statement)
    assert text in is_noticed(path)
    doubted(path)
    assert Path(f"{path}-damaged").exists()


@pytest.mark.parametrize(
    ("statement", "text"),
    [
        ("DELETE FROM rows", "the last 23 of 23 rows are missing"),
        ("DROP TABLE rows", "SQLite cannot read it"),
        ("DROP TABLE rows; DROP TABLE owner", "it has no rows, but 23 rows"),
    ],
)
def test_a_file_without_any_row_is_not_begun_anew(killed, tmp_path, statement, text):
    path = changed(killed, tmp_path, statement)
    assert text in is_noticed(path)
    with pytest.raises(JournalError, match="nothing in it can be read; to ask again for what its 23 rows"):
        JournalFile(path, OWNER, accept_damage=True).open()


def test_the_newest_rows_of_a_file_that_is_gone_are_kept_beside_the_mended_one(killed, tmp_path, monkeypatch):
    path = copy_of(killed, tmp_path)
    newest = Path(f"{path}-wal").read_bytes()
    path.unlink()
    durable, write = [], JournalLock.write

    def noted(lock: JournalLock, header: Header, *, durably: bool = False) -> None:
        durable.append(bool(durably))
        write(lock, header, durably=durably)

    monkeypatch.setattr(JournalLock, "write", noted)
    file = JournalFile(path, OWNER, accept_damage=True)
    file.open()
    assert durable == [True]
    file.leave()
    kept = Path(f"{path}-damaged-wal")
    assert (kept.read_bytes(), stat.S_IMODE(kept.stat().st_mode)) == (newest, 0o600)


def test_ids_of_doubtful_rows_are_unknown_and_not_sent_again(killed, tmp_path):
    path = copy_of(killed, tmp_path)
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("UPDATE rows SET content = CAST('{[' AS BLOB) WHERE row = 8")  # a result
        database.execute(
            "UPDATE rows SET chunk = 99 WHERE row = 3"
        )  # a sent chunk whose result is in the journal
        database.execute(
            "UPDATE rows SET digest = x'00' WHERE row IN (9, 10)"
        )  # both, so the next row is doubtful too
        database.execute("UPDATE rows SET chunk = 98 WHERE row = 23")  # a chunk in flight
        database.commit()
    known = facts(told(path, accept_damage=True))
    unknown = {pair for pair in EXPECTED if known[pair] != EXPECTED[pair]}
    assert unknown == {(MEMBERS[1], quota_id) for quota_id in range(1, 41)}
    assert {known[pair][0] for pair in unknown} == {"unknown"}


def test_rows_are_salvaged_without_the_owner_and_beyond_what_the_size_suggests(killed, tmp_path, monkeypatch):
    monkeypatch.setattr(mending, "_SMALLEST_ROW", 10**9)  # most rows may be in the `-wal` file
    monkeypatch.setattr(mending, "_AT_ONCE", 4)
    path = copy_of(killed, tmp_path)
    Path(f"{path}-mended").write_bytes(b"of a run that was killed while it mended")
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("DROP TABLE owner")
        database.execute("UPDATE rows SET chunk = x'00' WHERE row = 3")
        database.commit()
    several, append = [], JournalRows.append
    expected, salvaged = [], JournalRows.salvaged

    def noted(self, notes) -> None:
        notes = tuple(notes)
        several.append(len(notes))
        append(self, notes)

    def found(self, most: int):
        expected.append(most)
        return salvaged(self, most)

    monkeypatch.setattr(JournalRows, "append", noted)
    monkeypatch.setattr(JournalRows, "salvaged", found)
    known = facts(told(path, accept_damage=True))
    assert {pair for pair in EXPECTED if known[pair][0] != "unknown"} >= {
        pair for pair in EXPECTED if pair[0] != MEMBERS[0] and EXPECTED[pair][0] != "unknown"
    }
    assert expected == [23]  # the rows that the lock file names
    assert set(several[:-2]) == {4}
    assert not Path(f"{path}-mended").exists()


def test_rows_newer_than_the_header_are_accepted_if_they_continue_the_chain(killed, tmp_path):
    """After a loss of power the header may be older than the rows."""
    file = JournalFile(tmp_path / "journal", OWNER)
    file.open()
    older = (tmp_path / "journal-lock").read_bytes()
    note(file, 1, MEMBERS[0], range(1, 21))
    file.leave()
    (tmp_path / "journal-lock").write_bytes(older)
    assert len(told(tmp_path / "journal")) == 20
    assert (tmp_path / "journal-lock").read_bytes() != older
    (tmp_path / "journal-lock").write_bytes((killed / "journal-lock").read_bytes())
    assert "the last 21 of 23 rows are missing" in is_noticed(tmp_path / "journal")
    other = JournalFile(tmp_path / "other", OWNER)
    other.open()
    note(other, 1, MEMBERS[0], range(1, 21), answered=False)
    other.leave()
    shutil.copy(tmp_path / "other-lock", tmp_path / "journal-lock")
    assert "is damaged: the rows and the lock file do not belong together." in is_noticed(tmp_path / "journal")


def test_a_damaged_journal_of_another_panel_is_refused(killed, tmp_path):
    path = copy_of(killed, tmp_path)
    path.with_name("journal-lock").write_bytes(b"?")
    before = path.read_bytes()
    file = JournalFile(path, (OWNER[0], doubles.KEY), accept_damage=True)
    with pytest.raises(JournalError, match="another service or panel"):
        file.open()
    assert not Path(f"{path}-damaged").exists()
    assert path.read_bytes()[:20] == before[:20]
    assert facts(told(path, accept_damage=True)) == EXPECTED


def test_a_journal_that_cannot_be_repaired_is_refused(killed, tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise Damage("row 1 is missing")

    monkeypatch.setattr(JournalRows, "load", fail)
    with pytest.raises(JournalError, match="is damaged: row 1 is missing"):
        told(copy_of(killed, tmp_path), accept_damage=True)


def test_a_transaction_that_sqlite_rolled_back_is_not_rolled_back_again(tmp_path):
    file = JournalFile(tmp_path / "journal", OWNER)
    file.open()
    rows = file._rows._database
    rows.execute("CREATE TRIGGER full BEFORE INSERT ON rows BEGIN SELECT RAISE(ROLLBACK, 'member-7'); END")
    note(file, 1, MEMBERS[0], range(1, 3))
    with pytest.raises(JournalError, match="cannot be used: SQLite says SQLITE_CONSTRAINT") as caught:
        file.write()
    assert "member-7" not in str(caught.value)
    rows.execute("DROP TRIGGER full")
    file.leave()
    assert len(told(tmp_path / "journal")) == 2


# --- Second openings, from this process and others

TRY: str = """
import sys
from pathlib import Path
from sampling_async import JournalError
from sampling_async._journal.file import JournalFile
try:
    JournalFile(Path(sys.argv[1]), ("https://service.example", sys.argv[2])).open()
except JournalError as exc:
    sys.exit(str(exc))
"""


def refused(path: Path) -> bool:
    """Return whether another process is refused access to a journal."""
    done = subprocess.run(
        [sys.executable, "-c", TRY, str(path), doubles.PANEL], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 or "in use" in done.stderr, done.stderr
    return done.returncode != 0


def second_fan_out(path: Path) -> None:
    with pytest.raises(JournalError, match="in use"):
        JournalFile(path, OWNER).open()


def through_a_link(path: Path) -> None:
    link = path.with_name("link")
    link.symlink_to(path)
    second_fan_out(link)


def by_another_name(path: Path) -> None:
    other = path.with_name("other")
    os.link(path, other)
    with pytest.raises(JournalError, match="hard link") as caught:
        JournalFile(other, OWNER).open()
    assert caught.value.path == other
    other.unlink()


def by_sqlite(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path, timeout=0)) as database:
        with contextlib.suppress(sqlite3.OperationalError):
            database.execute("SELECT count(*) FROM rows").fetchall()


@pytest.mark.parametrize(
    "look",
    [
        lambda path: shutil.copy(path, path.with_name("copy")),
        lambda path: path.read_bytes(),
        second_fan_out,
        through_a_link,
        by_another_name,
        by_sqlite,
    ],
)
def test_a_second_look_at_the_file_does_not_release_its_lock(tmp_path, look):
    path = tmp_path / "journal"
    file = JournalFile(path, OWNER)
    file.open()
    note(file, 1, MEMBERS[0], range(1, 21))
    file.write()
    look(path)
    assert refused(path)
    note(file, 2, MEMBERS[1], range(1, 21))
    file.leave()
    assert len(told(path)) == 40
    assert not refused(path)


FOLDERS = [str(folder) for folder in Path(__file__).parents[:2]]  # of the modules that the programs import
FORK = """
import os, signal, sys, time
from pathlib import Path
sys.path[:0] = sys.argv[3:]
from test_journal_faults import MEMBERS, OWNER, JournalError, JournalFile, note
file = JournalFile(Path(sys.argv[1]), OWNER)
file.open()
note(file, 1, MEMBERS[0], range(1, 21))
file.write()
child = os.fork()
if not child:
    try:
        file.write()
    except JournalError:
        if sys.argv[2] == "exits":
            file.leave()
            sys.exit(3)
        os.close(1)
        os.close(2)
        time.sleep(60)
    os._exit(4)
if sys.argv[2] == "exits":
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
note(file, 2, MEMBERS[1], range(1, 21))
file.write()
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.parametrize("child", ["exits", "stays"])
def test_a_forked_child_leaves_file_and_lock_to_its_parent(tmp_path, child):
    path = tmp_path / "journal"
    done = subprocess.run(
        [sys.executable, "-c", FORK, str(path), child, *FOLDERS],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    try:
        assert len(told(path)) == 40
    finally:
        if child == "stays":
            os.kill(int(done.stdout), signal.SIGKILL)


EXIT = """
import asyncio, os, signal, sys, threading
sys.path[:0] = sys.argv[2:]
import doubles, httpx
from sampling_async import InviteRequest
from sampling_async._journal.rows import JournalRows

append = JournalRows.append
def slow(self, notes):
    while True:  # a signal that comes just before the event loop begins to wait is seen only when it wakes
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(0.1)

def end(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(7)

async def main():
    signal.signal(signal.SIGTERM, end)
    JournalRows.append = slow
    async with doubles.client(doubles.Service(doubles.bulk)) as client:
        async with client.fan_out([InviteRequest("m1", [1])], journal=sys.argv[1]) as stream:
            async for _ in stream:
                pass

loop = asyncio.new_event_loop()
loop.run_until_complete(main())
"""


def test_a_process_ends_even_if_its_journal_hangs(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", EXIT, str(tmp_path / "journal"), *FOLDERS],
        capture_output=True,
        check=False,
        timeout=15,
    )
    assert done.returncode == 7, done.stderr
