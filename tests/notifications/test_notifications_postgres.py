"""The store in PostgreSQL: servers that are away, hang or lose connections, and schemas of somebody else."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import anyio
import psycopg
import pytest
from store_kit import COMPLETION, PEER, SECRET, TERMINATE, Cluster, encoded, facts_of, missing, post, received
from test_notifications_outcomes import invited
from wire import free_port

from sampling_async import InvalidRequestError
from sampling_async.notifications import (
    Completion,
    HandlerPolicy,
    Inbox,
    Kind,
    OutcomeLedger,
    PostgresStore,
    SqliteStore,
    State,
    StoreConflictError,
    StoreError,
    UnknownNotification,
    Validity,
    _postgres,
    _psycopg,
    kept_secrets,
)
from sampling_async.notifications._facts import Receipt, Settled
from sampling_async.notifications._psycopg import LimitedConnection
from sampling_async.notifications._stores import in_transaction, store_of

pytestmark = pytest.mark.postgres
WAIT = 30.0


@pytest.fixture
def address(postgres):
    return postgres.new_dsn()


@pytest.fixture
def store(address):
    opened = PostgresStore(address)
    opened.open()
    yield opened
    opened.close()


@pytest.fixture
def cluster():
    """Start a server that the test may stop."""
    if reason := missing():
        pytest.skip(reason)
    made = Cluster()
    yield made
    made.remove()


def put(store, kind, fields, at=1.0):
    hit = Receipt(Kind(kind), at, encoded(fields), "", [], PEER)
    return in_transaction(store, lambda opened: received(opened, hit))


def claim(store, owner="me", now=10.0):
    return in_transaction(store, lambda opened: list(opened.claim(owner, [*Kind, None], now, now + 5.0, 100)))


def settle(store, fact, owner="me"):
    with store.transaction():
        return store.settle(owner, Settled(fact_id=fact.id, state=State.HANDLED))


def member(number):
    return {**COMPLETION, "UniqueCode": f"m-{number}"}


def inbox_at(store, **options):
    return Inbox(store, secrets=SECRET, **options)


# --- The address


def test_no_password_is_shown(postgres):
    store = PostgresStore(f"postgresql://me:s3cret-word@127.0.0.1:{free_port()}/x", timeout=2)
    assert "s3cret-word" not in repr(store)
    store.open()  # it is away, which is no error yet
    with pytest.raises(StoreError, match="cannot be opened: connection failed") as caught, store.transaction():
        pass
    assert "s3cret-word" not in str(caught.value)
    with pytest.raises(StoreError, match="cannot be read") as caught:
        list(store.facts())
    assert "s3cret-word" not in str(caught.value)
    store.close()


@pytest.mark.parametrize(
    "address",
    [
        "postgresql://me:s3cret-word@[::1/x",
        "postgresql://me:s3cret-word@host/x?no_such_option=1",
        "mysql://me:s3cret-word@host/x",
        7,
    ],
)
def test_an_address_that_cannot_be_read_is_not_shown(address):
    with pytest.raises(InvalidRequestError, match=r"the address of (a|the) database") as caught:
        PostgresStore(address)
    assert "s3cret-word" not in str(caught.value)


@pytest.mark.parametrize(
    "address",
    [
        "host=db.example user=me password=s3cret-word",
        " dbname = x password = s3cret-word",
        "password=s3cret-word",
        "service=night",
        "postgres:partner",
        "postgresql+psycopg://me:s3cret-word@host/x",
        "mysql://me:s3cret-word@host/x",
        "sqlite:///night.db",
        "MariaDB:me:s3cret-word@host",
    ],
)
def test_an_address_in_another_form_is_no_path(address, tmp_path, monkeypatch):
    """A file would be named by the password."""
    monkeypatch.chdir(tmp_path)
    for make in (inbox_at, OutcomeLedger):
        with pytest.raises(InvalidRequestError, match="looks like the address of a database") as caught:
            make(address)
        assert "s3cret-word" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["a=b.db", "night.db", "./host=x", "C:\\night.db", "my postgres.db", "x:y.db"])
def test_a_path_with_odd_characters_is_a_path(path):
    assert isinstance(store_of(path), SqliteStore)


def test_a_line_end_behind_an_address_or_a_path_is_no_part_of_it():
    assert repr(store_of("postgresql://me@host/x\n")) == "<PostgresStore postgresql://me@host/x (sampling)>"
    assert repr(store_of("night.db\n")) == repr(SqliteStore("night.db"))


@pytest.mark.parametrize(
    ("query", "way"),
    [
        ("pgbouncer=true", "leave it out"),
        ("ssl=require", "sslmode=require"),
        ("currentSchema=us", "schema=name"),
    ],
)
def test_a_parameter_of_another_driver_is_named(query, way):
    with pytest.raises(InvalidRequestError) as caught:
        PostgresStore(f"postgresql://me:s3cret-word@host/x?{query}")
    assert query.partition("=")[0] in str(caught.value)
    assert way in str(caught.value)
    assert "s3cret-word" not in str(caught.value)


@pytest.mark.parametrize("schema", ["Sampling", "a-b", "pg_own", "x" * 64, 'x"; DROP SCHEMA public; --'])
def test_a_schema_has_a_plain_name(schema):
    with pytest.raises(InvalidRequestError, match="schema must be a name"):
        PostgresStore("postgresql://host/x", schema=schema)


def test_the_schema_may_stand_in_the_address():
    assert PostgresStore("postgresql://host/x?sslmode=require&schema=us").schema == "us"
    assert PostgresStore("postgresql://host/x?schema=us", schema="uk").schema == "uk"
    store = PostgresStore("postgres://me@host:99/x")
    assert repr(store) == repr(store.copy()) == "<PostgresStore postgresql://me@host:99/x (sampling)>"


def test_without_psycopg_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sampling_async.notifications._psycopg", None)
    with pytest.raises(ImportError, match=r"sampling-async\[postgres\]"):
        PostgresStore("postgresql://host/x")


# --- Its tables


def test_tables_of_somebody_else_are_left_alone(postgres, address):
    schema = PostgresStore(address).schema
    for table in ("people (name TEXT)", "store (form TEXT)", "store (application TEXT, form BIGINT)"):
        postgres.query(f"CREATE SCHEMA {schema}; CREATE TABLE {schema}.{table}")
        with pytest.raises(StoreError, match="is a schema of something else; name another one"):
            PostgresStore(address).open()
        assert len(postgres.query(f"SELECT 1 FROM pg_tables WHERE schemaname = '{schema}'")) == 1
        postgres.query(f"DROP SCHEMA {schema} CASCADE")
    postgres.query(f"CREATE SCHEMA {schema}")  # by whoever may
    assert set(kept_secrets(address)) == set(Kind)


def test_a_newer_form_is_refused(postgres, address):
    store = PostgresStore(address)
    store.open()
    store.close()
    postgres.query(f"UPDATE {store.schema}.store SET form = 99")
    with pytest.raises(StoreError, match="made by a newer version"):
        store.copy().open()
    with pytest.raises(StoreError, match="made by a newer version"):
        list(store.copy().facts())


@pytest.mark.parametrize("form", ["five", "0", ""])
def test_a_form_that_is_no_number_of_a_form_is_refused(postgres, address, form):
    kept_secrets(address)
    store = PostgresStore(address)
    postgres.query(f"ALTER TABLE {store.schema}.store ALTER form TYPE TEXT")
    postgres.query(f"UPDATE {store.schema}.store SET form = '{form}'")
    with pytest.raises(StoreError, match=f"says that its form is '{form}', .* bring back a copy") as caught:
        store.open()
    assert caught.value.permanent


def test_a_store_without_tables_is_not_made_by_reading_it(postgres, address):
    with pytest.raises(StoreError, match="cannot be read: it has no tables"):
        list(PostgresStore(address).facts())
    schema = PostgresStore(address).schema
    assert postgres.query(f"SELECT to_regnamespace('{schema}')") == [(None,)]


def test_processes_that_start_at_once_make_the_tables_and_secrets_once(address):
    found, threads = [], []
    for _ in range(6):
        threads.append(threading.Thread(target=lambda: found.append(kept_secrets(address))))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert all(each == found[0] for each in found)
    assert all(len(secrets) == 1 for secrets in found[0].values())


def test_a_role_that_may_not_do_it_is_an_error_at_once(postgres, address):
    postgres.query("CREATE ROLE nobody_here LOGIN")
    with pytest.raises(StoreError, match="cannot be opened: permission denied"):
        PostgresStore(address.replace("sampling:s3cret-word@", "nobody_here@")).open()
    with pytest.raises(StoreError, match="does not exist"):
        PostgresStore(address.replace("sampling:s3cret-word@", "who@")).open()
    with pytest.raises(StoreError, match="does not exist"):
        PostgresStore(address.replace("/postgres?", "/no_such?")).open()


# --- Others at the same time


def test_a_conflict_is_tried_again(store):
    another = store.copy()
    another.open()
    barrier, tries = threading.Barrier(2, timeout=WAIT), []

    def work(opened, keys):
        def lock_both(it):
            tries.append(keys)
            it.lock(keys[0])
            if len(tries) <= 2:
                barrier.wait()
            it.lock(keys[1])

        in_transaction(opened, lock_both)

    thread = threading.Thread(target=work, args=(another, ("a", "b")))
    thread.start()
    work(store, ("b", "a"))
    thread.join()
    another.close()
    assert len(tries) == 3


def test_conflicts_without_end_are_an_error(store):
    def conflict(opened):
        opened.run("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END $$")

    with pytest.raises(StoreConflictError, match="again"):
        in_transaction(store, conflict)


def test_a_terminate_that_is_being_claimed_is_corrected(store):
    """The claim is not committed yet when the completion comes: then receiving waits for it."""
    put(store, "terminate", TERMINATE)
    another = store.copy()
    another.open()
    with another.transaction():
        (terminate,) = another.claim("other", [Kind.TERMINATE], 10.0, 15.0, 1)
        thread = threading.Thread(target=put, args=(store, "completion", COMPLETION))
        thread.start()
        wait_until(lambda: waiting_locks(another))
    thread.join()
    kinds = [(fact.kind, fact.corrects, fact.validity) for fact in store.facts()]
    assert kinds == [
        ("terminate", None, Validity.OVERRULED),
        ("completion", None, Validity.STANDS),
        ("terminate", terminate.id, Validity.OVERRULED),
    ]
    assert claim(store) == []
    settle(another, terminate, "other")
    another.close()


def waiting_locks(store):
    with store.reading("cannot be read") as run:
        return run("SELECT count(*) FROM pg_locks WHERE NOT granted").fetchone()[0]


def wait_until(is_so):
    until = time.monotonic() + WAIT
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_a_claim_does_not_wait_for_another_one(store):
    for number in range(3):
        put(store, "completion", member(number))
    another = store.copy()
    another.open()
    with another.transaction():
        first = another.claim("other", [Kind.COMPLETION], 10.0, 15.0, 2)
        assert [fact.id for fact in first] == [1, 2]
        assert [fact.id for fact in claim(store)] == [3]
    another.close()


# --- Errors


def test_a_connection_that_is_lost_in_a_transaction_is_an_error_and_nothing_is_stored(postgres, store):
    put(store, "completion", member(0))

    def lose():
        with store.transaction():
            hit = Receipt(Kind.COMPLETION, 1.0, encoded(member(1)))
            received(store, hit)
            ((number,),) = store.execute("SELECT pg_backend_pid()")
            postgres.query(f"SELECT pg_terminate_backend({number})")
            received(store, hit)

    with pytest.raises(StoreError, match="cannot be written"):
        lose()
    assert len(list(store.facts())) == 1
    assert put(store, "completion", member(1)) == ["new"]


def test_a_connection_that_was_lost_between_transactions_is_made_again(postgres, store):
    put(store, "completion", member(0))
    list(store.facts())  # a connection for reading is kept
    postgres.query("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name != ''")
    assert put(store, "completion", member(1)) == ["new"]
    assert len(list(store.facts())) == 2


def test_a_commit_whose_response_was_lost_doubles_nothing(store, monkeypatch):
    real, lost = _psycopg.LimitedConnection.commit_begun, []

    def commit(self):
        real(self)
        if not lost:
            lost.append(True)
            self.close()
            raise psycopg.OperationalError("the connection is lost")

    monkeypatch.setattr(_psycopg.LimitedConnection, "commit_begun", commit)
    with pytest.raises(StoreError, match="the connection is lost"):
        put(store, "completion", COMPLETION)
    assert put(store, "completion", COMPLETION) == ["repeated"]
    assert len(list(store.facts())) == 1


def test_an_error_that_somebody_swallows_is_not_taken_for_a_commit(store):
    def swallow():
        with store.transaction():
            store.keep_url("https://x")
            with suppress(psycopg.Error):
                store.run("SELECT 1 / 0")

    with pytest.raises(StoreError, match="the transaction was undone"):
        swallow()
    with store.transaction():
        assert store.url() is None


def test_errors_of_the_database_show_no_values(store):
    put(store, "completion", {**COMPLETION, "UniqueCode": "m-secret"})

    def insert():
        with store.transaction():
            store.execute("INSERT INTO facts SELECT * FROM facts")

    with pytest.raises(StoreError, match="duplicate key") as caught:
        insert()
    assert "m-secret" not in str(caught.value)


def test_a_lock_that_nobody_frees_is_an_error(store):
    brief = PostgresStore(f"{store_dsn(store)}", schema=store.schema, timeout=1)
    brief.open()
    with store.transaction():
        store.lock("facts")
        with pytest.raises(StoreError, match="timeout"):
            put(brief, "completion", COMPLETION)
    assert put(brief, "completion", COMPLETION) == ["new"]
    brief.close()


def store_dsn(store):
    options = store._options
    return f"postgresql://{options['user']}@{options['host']}:{options['port']}/{options['dbname']}"


async def test_a_service_starts_without_its_database_and_recovers(cluster, monkeypatch):
    monkeypatch.setattr(_postgres, "_AWAY_SECONDS", 0.0)
    cluster.stop()
    inbox, seen = inbox_at(cluster.dsn, handling=HandlerPolicy(poll=0.02)), []
    inbox.on(Completion)(seen.append)
    inbox.on(UnknownNotification)(seen.append)
    async with inbox:
        assert (await post(inbox, "completion", member(0))).status == 503
        with pytest.raises(StoreError):
            await inbox.status()
        cluster.start()
        assert (await post(inbox, "completion", member(0))).status == 200
        cluster.stop()
        assert (await post(inbox, "completion", member(1))).status == 503
        cluster.start()
        assert (await post(inbox, "completion", member(1))).status == 200
        with anyio.fail_after(WAIT):
            while (await inbox.status()).pending:  # noqa: ASYNC110  of a database
                await anyio.sleep(0.01)
    assert sorted(fact.notification.member_code for fact in seen) == ["m-0", "m-1"]
    facts = await facts_of(inbox)
    assert [fact.state for fact in facts] == [State.HANDLED] * 2


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are stopped by their IDs in /proc")
async def test_a_server_that_hangs_is_an_error_in_time(cluster):
    inbox = inbox_at(PostgresStore(cluster.dsn, timeout=1))
    async with inbox:
        assert (await post(inbox, "completion", member(0))).status == 200
        try:
            # The parent first: it starts no other then.
            signal_each([cluster.process_id], signal.SIGSTOP)
            signal_each(processes_of(cluster.process_id), signal.SIGSTOP)
            began = time.monotonic()
            assert (await post(inbox, "completion", member(1))).status == 503
            assert time.monotonic() - began < 15
        finally:
            signal_each(processes_of(cluster.process_id), signal.SIGCONT)
        until = time.monotonic() + WAIT
        while (await post(inbox, "completion", member(1))).status != 200:
            assert time.monotonic() < until
    assert len(await facts_of(inbox)) == 2


def signal_each(processes, number):
    for each in processes:
        with suppress(ProcessLookupError):  # some end by themselves
            os.kill(each, number)


def processes_of(parent):
    """Return a process and its children."""
    children = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            children.append(int(path.parent.name))
    return [parent, *children]


async def test_a_ledger_of_outcomes_takes_an_address(address):
    ledger = OutcomeLedger(address)
    assert await ledger.invited([]) == 0
    assert await ledger.rows() == []


async def test_the_rows_of_the_ledger_of_outcomes_are_read_in_parts(address, monkeypatch):
    """Psycopg reads the whole result of a query into memory."""
    monkeypatch.setattr(_postgres, "_PART", 3)
    ledger, sizes = OutcomeLedger(address), []
    await ledger.invited([invited(f"m-{number}") for number in range(10)])
    run = LimitedConnection.run

    def noted(self, query, values=()):
        cursor = run(self, query, values)
        if query.startswith("FETCH"):
            sizes.append(cursor.rowcount)
        return cursor

    monkeypatch.setattr(LimitedConnection, "run", noted)
    assert len(list(ledger.read_rows())) == 10
    assert sizes == [3, 3, 3, 1, 0]
    first = next(ledger.read_rows())  # the reader may stop early
    assert first.member_code == "m-0"
    assert len(await ledger.rows()) == 10
