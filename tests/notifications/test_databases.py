"""Databases as they are: behind a pooler, replicated, in other languages and encodings."""

from __future__ import annotations

import threading
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from types import SimpleNamespace

import anyio
import psycopg
import pytest
from store_kit import COMPLETION, Cluster, encoded, german_server, missing, received

from sampling_async import InvalidRequestError, InviteOutcome
from sampling_async.campaign._rooms import SharedRoom
from sampling_async.frames import write_postgres
from sampling_async.notifications import Kind, OutcomeLedger, PostgresStore, StoreError
from sampling_async.notifications._facts import Receipt
from sampling_async.notifications._psycopg import LimitedConnection, failing
from sampling_async.notifications._stores import in_transaction

pytestmark = pytest.mark.postgres


def put(store, name):
    store.open()
    hit = Receipt(Kind.COMPLETION, 1.0, encoded({**COMPLETION, "UniqueCode": name}), "", [], "peer")
    return in_transaction(store, lambda opened: received(opened, hit))


def outcome(code="m-1"):
    return InviteOutcome(code, 1, "rejected", None, 28, "CLOSED")


async def each(*outcomes):
    for one in outcomes:
        yield one


# --- Behind a pooler


def test_stores_behind_a_pooler_of_transactions_keep_to_their_schemas(postgres):
    with postgres.pooler("transaction") as dsn:
        stores = [PostgresStore(dsn, schema=schema) for schema in ("pooled_de", "pooled_us")]
        errors = []

        def work(store):
            try:
                for number in range(40):
                    assert put(store, f"{store.schema}-{number}") == ["new"]
                    assert all(fact.notification.member_code[:9] == store.schema for fact in store.facts())
            except BaseException as exc:
                errors.append(exc)
                raise

        threads = [threading.Thread(target=work, args=(store,)) for store in stores]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for store in stores:
            store.close()
            ledger = OutcomeLedger(store)
            assert len(list(ledger.read_rows())) == 40
            assert store.prune(datetime.now(UTC)) == 40
        assert errors == []
        # Nothing is left for others who share the connections to the server.
        with psycopg.connect(dsn, autocommit=True, prepare_threshold=None) as another:
            for name, wanted in (("search_path", '"$user", public'), ("statement_timeout", "0")):
                assert another.execute(f"SHOW {name}").fetchone() == (wanted,)
    for store in stores:
        rows = postgres.query(f"SELECT count(*) FROM {store.schema}.facts")
        assert rows == [(40,)]


async def test_outcomes_behind_a_pooler_are_written_to_their_schema(postgres):
    postgres.query("CREATE SCHEMA IF NOT EXISTS written_de; CREATE SCHEMA IF NOT EXISTS written_us")
    with postgres.pooler("transaction") as dsn:
        async with anyio.create_task_group() as tasks:
            for schema in ("written_de", "written_us"):
                outcomes = [outcome(schema)] * 30

                async def write(schema=schema, outcomes=outcomes):
                    await write_postgres(each(*outcomes), dsn, schema=schema, rows=1)

                tasks.start_soon(write)
    for schema in ("written_de", "written_us"):
        rows = postgres.query(f"SELECT member_code, count(*) FROM {schema}.sampling_outcomes GROUP BY 1")
        assert rows == [(schema, 30)]
    postgres.query("DROP SCHEMA written_de CASCADE; DROP SCHEMA written_us CASCADE")


def test_a_pooler_of_statements_is_refused_at_the_start(postgres):
    with postgres.pooler("statement") as dsn, pytest.raises(StoreError, match="pool_mode") as caught:
        PostgresStore(dsn).open()
    assert caught.value.permanent


@pytest.mark.parametrize("auth", ["scram-sha-256", "md5"])
def test_a_pooler_refuses_a_wrong_password_at_once(postgres, auth):
    with postgres.pooler("transaction", auth) as dsn:
        store = PostgresStore(f"{dsn}?schema=behind_{auth[:3]}")
        assert put(store, "m-1") == ["new"]
        store.close()
        for wrong in ("sampling:wrong", "sampling", "ghost:s3cret-word"):
            with pytest.raises(StoreError, match="cannot be opened") as caught:
                PostgresStore(dsn.replace("sampling:s3cret-word", wrong)).open()
            assert caught.value.permanent


# --- Refusals, in any language


REFUSED = {
    "pw:wrong@{host}/postgres": True,
    "pw@{host}/postgres": True,  # no password
    "ghost:x@{host}/postgres": True,
    "who@{host}/postgres": True,  # no such role, where none needs a password
    "nowhere@{host}/postgres": True,  # in no line of pg_hba.conf
    "pw:right@{host}/no_such": True,
    "sampling@{host}/no_such": True,
    "sampling@127.0.0.1:1/sampling": False,  # away
    "sampling@no-authentication.invalid/x": False,
    "sampling@{host}/postgres?target_session_attrs=standby": False,
    "sampling@{host}/postgres?sslmode=require": False,
}


def is_refused(store) -> bool:
    """Return whether the store is refused at once; else it counts as away, and an inbox answers 503."""
    try:
        store.open()
    except StoreError as exc:
        return exc.permanent
    assert store._away
    store.close()
    return False


@pytest.fixture(scope="module")
def german():
    if reason := missing():
        pytest.skip(reason)
    with german_server() as cluster:
        yield cluster


@pytest.mark.parametrize("address", REFUSED)
def test_a_refusal_is_told_from_a_server_that_is_away(german, address):
    """A connection that fails has no SQLSTATE, and the words are of the server's language."""
    store = PostgresStore(f"postgresql://{address.format(host=f'127.0.0.1:{german.port}')}")
    assert is_refused(store) is REFUSED[address]


@pytest.mark.parametrize(
    ("said", "is_refused"),
    [
        ("FATAL:  la base de données « panel » n'existe pas", True),
        ("FATAL:  \u062f\u0627\u062f\u0647 «panel»", True),
        ("FATAL:  no such database: panel", True),  # PgBouncer
        ("FATAL:  login rejected", True),  # PgBouncer, by its pg_hba file
        ("FATAL:  server login has been failing, try again later", False),  # PgBouncer, of its server
        ("FATAL:  panels are away", False),
        ("could not translate panel", False),  # libpq
    ],
)
def test_a_refusal_names_whom_it_refuses(said, is_refused):
    failed = f'connection to server at "panel", port 5432 failed: {said}\n'
    connection = SimpleNamespace(error_message=failed.encode(), user=b"me", db=b"panel", needs_password=False)
    with pytest.raises(StoreError) as caught, failing("cannot be opened", "x"):
        raise psycopg.OperationalError(failed, pgconn=connection)
    assert caught.value.permanent is is_refused


def test_a_server_that_is_full_is_away(german):
    with ExitStack() as blocks:
        with suppress(psycopg.Error):
            while True:
                blocks.enter_context(psycopg.connect(german.dsn))
        store = PostgresStore(german.dsn)
        store.open()
        assert store._away
        store.close()


def test_a_value_that_no_address_has_is_refused_with_the_address():
    with pytest.raises(InvalidRequestError, match="address of the database cannot be read"):
        PostgresStore("postgresql://me:s3cret-word@host/x?sslmode=sometimes")


# --- Replicated


def test_a_database_that_publishes_all_tables_takes_each_change():
    """PostgreSQL refuses to change or delete rows of a table that is published and has no identity."""
    if reason := missing():
        pytest.skip(reason)
    cluster = Cluster("wal_level = logical")
    try:
        store = PostgresStore(cluster.dsn)
        assert put(store, "m-1") == ["new"]
        store.close()
        without = (
            "SELECT relname FROM pg_class AS c WHERE relnamespace = 'sampling'::regnamespace AND relkind = 'r'"
            " AND NOT EXISTS (SELECT 1 FROM pg_index AS i WHERE i.indrelid = c.oid AND i.indisprimary)"
        )
        assert cluster.query(without) == []
        cluster.query("CREATE PUBLICATION everything FOR ALL TABLES")
        store = store.copy()
        assert put(store, "m-2") == ["new"]
        store.close()
    finally:
        cluster.remove()


def test_tables_whose_policies_decide_row_by_row_are_written(postgres):
    """PostgreSQL refuses COPY there."""
    store = PostgresStore(postgres.dsn, schema="by_row")
    assert put(store, "m-1") == ["new"]
    store.close()
    postgres.query("CREATE ROLE writer LOGIN; GRANT USAGE ON SCHEMA by_row TO writer")
    postgres.query("GRANT ALL ON ALL TABLES IN SCHEMA by_row TO writer")
    postgres.query("GRANT ALL ON ALL SEQUENCES IN SCHEMA by_row TO writer")
    for table in ("facts", "receipts", "rooms"):
        postgres.query(f"ALTER TABLE by_row.{table} ENABLE ROW LEVEL SECURITY")
        postgres.query(f"CREATE POLICY every ON by_row.{table} USING (true) WITH CHECK (true)")
    other = PostgresStore(postgres.dsn.replace("sampling:s3cret-word", "writer"), schema="by_row")
    assert put(other, "m-2") == ["new"]
    assert [fact.notification.member_code for fact in other.facts()] == ["m-1", "m-2"]
    # Whoever may not make tables may share room.
    rooms = SharedRoom(other.copy(), "https://service.example", "first")
    rooms.take(SimpleNamespace(read=lambda *_: [(1, 2, 3)]), 0.0)
    assert SharedRoom(store.copy(), "https://service.example", "second").of_others(1.0) == {(1, 2): 3}
    other.close()


# --- Outcomes


@pytest.fixture
def table(postgres):
    """Return a function for the numbers of rows that outcomes have."""
    postgres.query("CREATE SCHEMA IF NOT EXISTS tables")
    yield lambda: postgres.query(
        "SELECT member_code, count(*) FROM tables.sampling_outcomes GROUP BY 1 ORDER BY 1"
    )
    postgres.query("DROP SCHEMA tables CASCADE")


async def test_outcomes_whose_commit_has_no_answer_are_not_written_twice(postgres, table, monkeypatch):
    real, commits = LimitedConnection.commit_begun, []

    def commit(self):
        real(self)
        commits.append(True)
        if len(commits) == 2:  # after that of the opening
            self.close()
            raise psycopg.OperationalError("the connection is lost")

    monkeypatch.setattr(LimitedConnection, "commit_begun", commit)
    with pytest.raises(StoreError, match="may have been written, or not: the connection is lost") as caught:
        await write_postgres(each(outcome("m-1"), outcome("m-2")), postgres.dsn, schema="tables", rows=2)
    assert caught.value.__notes__ == ['2 outcomes may have been written to "sampling_outcomes", or not']
    assert table() == [("m-1", 1), ("m-2", 1)]


async def test_a_connection_that_is_lost_between_two_bulks_is_made_again(postgres, table):
    async def outcomes():
        yield outcome("m-1")
        postgres.query("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name != ''")
        yield outcome("m-2")

    await write_postgres(outcomes(), postgres.dsn, schema="tables", rows=1)
    assert table() == [("m-1", 1), ("m-2", 1)]


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
async def test_a_database_that_cannot_hold_every_text_is_refused_at_the_start(postgres, encoding):
    name = f"in_{encoding.lower()}"
    if not postgres.query(f"SELECT 1 FROM pg_database WHERE datname = '{name}'"):
        locales = "LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
        postgres.query(f"CREATE DATABASE {name} ENCODING '{encoding}' {locales}")
    dsn = postgres.dsn.replace("/postgres", f"/{name}")
    with pytest.raises(StoreError, match=f"encoding {encoding}, .* CREATE DATABASE name ENCODING 'UTF8'"):
        await write_postgres(each(outcome("m-\u0416")), dsn)
    with pytest.raises(StoreError, match=f"encoding {encoding}") as caught:
        PostgresStore(dsn).open()
    assert caught.value.permanent
