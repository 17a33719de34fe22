"""A database of SQLite: private, on disk when a transaction ends, patient with other processes."""

from __future__ import annotations

import sqlite3
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sampling_async._journal import database as _database
from sampling_async._journal.database import connected, failing, make_durable, patiently, transaction
from sampling_async._journal.rows import MemberFilter
from sampling_async._private_files import make_private
from sampling_async.notifications import StoreError

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "file"
    make_private(path)
    return path


def table_in(path):
    with closing(connected(path, 0)) as database:
        database.execute("CREATE TABLE numbers (number INTEGER UNIQUE)")


def numbers_in(path):
    with closing(connected(path, 0)) as database:
        return [number for (number,) in database.execute("SELECT number FROM numbers")]


def test_a_file_is_made_for_its_owner_only_and_only_where_there_is_none(path):
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        make_private(path)


def test_a_connection_makes_no_file(tmp_path):
    with pytest.raises(sqlite3.OperationalError, match="unable to open"):
        connected(tmp_path / "none", 0)
    assert not (tmp_path / "none").exists()


def test_a_connection_may_be_used_in_any_thread(path):
    table_in(path)
    with closing(connected(path, 0)) as database, ThreadPoolExecutor(1) as thread:
        assert thread.submit(lambda: list(database.execute("SELECT number FROM numbers"))).result() == []


def test_what_was_committed_is_durable_and_others_read_while_one_writes(path):
    table_in(path)
    with closing(connected(path, 0)) as database:
        for _ in range(2):  # the second time, it is so already
            make_durable(database, 0)
        assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert database.execute("PRAGMA synchronous").fetchone() == (2,)
        with transaction(database):
            database.execute("INSERT INTO numbers VALUES (1)")
            assert numbers_in(path) == []
        assert numbers_in(path) == [1]


@pytest.mark.parametrize("way", ["INSERT", "INSERT OR ROLLBACK"])  # the second rolls back by itself
def test_a_transaction_that_fails_leaves_nothing_and_raises_its_own_error(path, way):
    table_in(path)
    with closing(connected(path, 0)) as database:
        database.execute("INSERT INTO numbers VALUES (1)")
        with pytest.raises(sqlite3.IntegrityError), transaction(database):
            database.execute("INSERT INTO numbers VALUES (2)")
            database.execute(f"{way} INTO numbers VALUES (1)")
        assert numbers_in(path) == [1]
        with transaction(database):
            database.execute("INSERT INTO numbers VALUES (3)")
    assert numbers_in(path) == [1, 3]


def test_a_transaction_whose_database_was_closed_raises_what_ended_it(path):
    database = connected(path, 0)
    with pytest.raises(KeyboardInterrupt), transaction(database):
        database.close()
        raise KeyboardInterrupt


class Time:
    """A clock that only `sleep` moves; `then` happens when it is slept for the second time."""

    def __init__(self, then=lambda: None):
        self.now = 0.0
        self.then = then
        self.slept = 0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        assert 0 < seconds < 1
        self.now += seconds
        self.slept += 1
        if self.slept == 2:
            self.then()


def test_opening_waits_for_another_process(path, monkeypatch):
    table_in(path)
    with closing(connected(path, 0)) as other, closing(connected(path, 0)) as database:
        other.execute("BEGIN IMMEDIATE")
        time = Time(then=lambda: other.execute("COMMIT"))
        monkeypatch.setattr(_database, "time", time)
        make_durable(database, 5.0)
        assert time.slept == 2
        assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_opening_does_not_wait_for_ever_and_not_for_other_errors(path, monkeypatch):
    time = Time()
    monkeypatch.setattr(_database, "time", time)
    with closing(connected(path, 0)) as other, closing(connected(path, 0)) as database:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            patiently(lambda: database.execute("PRAGMA journal_mode = WAL"), 5.0)
        assert 5.0 < time.now < 5.1
        before = time.slept
        with pytest.raises(sqlite3.OperationalError, match="syntax"):
            patiently(lambda: database.execute("COME ON"), 5.0)
        assert time.slept == before


def test_a_damaged_schema_is_an_error_although_python_cannot_decode_what_sqlite_says(path):
    with closing(connected(path, 1.0)) as database:
        database.execute("CREATE TABLE one (a)")
        database.execute("PRAGMA writable_schema = ON")
        database.execute("UPDATE sqlite_master SET name = CAST(x'74ff' AS TEXT), sql = 'CREATE TABL one (a)'")
    with (
        pytest.raises(StoreError, match="cannot be read: it is damaged"),
        failing("cannot be read", StoreError),
    ):
        with closing(connected(path, 1.0)) as database:
            database.execute("SELECT * FROM sqlite_master").fetchall()


@given(st.sets(st.binary(max_size=12)))
def test_each_member_that_was_added_is_known(codes):
    members = MemberFilter()
    for code in codes:
        members.add(code)
    assert all(code in members for code in codes)


def test_few_others_are_taken_for_members_however_many_there_are():
    members, count = MemberFilter(), 200_000  # more than the first field has room for
    for number in range(count):
        members.add(b"m%d" % number)
    assert all(b"m%d" % number in members for number in range(0, count, 97))
    taken = sum(b"n%d" % number in members for number in range(20_000))
    assert taken < 200  # one in 100; about one in 400 is what the sizes give
    assert sum(map(len, members._fields)) < 1_000_000
