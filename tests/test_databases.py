"""Databases as they are: behind a pooler, replicated, in other languages and encodings."""

from __future__ import annotations

import threading

import anyio
import psycopg
import pytest
from notifications_kit import COMPLETION, encoded, entries_of

from sampling_async import InviteOutcome
from sampling_async.frames import write_postgres
from sampling_async.notifications import Kind, PostgresStore, Receipt, StoreError
from sampling_async.notifications._store import in_transaction

pytestmark = pytest.mark.postgres


def put(store, name):
    hit = Receipt(Kind.COMPLETION, 1.0, encoded({**COMPLETION, "UniqueCode": name}), "", [], "peer")
    return in_transaction(store, lambda opened: list(opened.receive(hit, entries_of(hit))))


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

        for store in stores:
            store.open()
        threads = [threading.Thread(target=work, args=(store,)) for store in stores]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for store in stores:
            store.close()
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
