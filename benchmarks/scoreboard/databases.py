"""Databases as they are: behind PgBouncer, published, in another language, and with a COMMIT without an answer.

It starts a PostgreSQL server of its own. What is not installed is skipped, and the rows say so.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from random import Random
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

from sampling_async.frames import write_postgres
from sampling_async.notifications import OutcomeLedger, PostgresStore, StoreError, erase_member
from scoreboard.board import Row, Run, exactly, published
from scoreboard.testkit import tool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

kit: Final = tool("store_kit")
SCHEMAS: Final = ("store_de", "store_us", "store_jp")


def rows(run: Run) -> list[Row]:
    """Start a server, and count what goes wrong."""
    if reason := kit.missing():
        return [published("databases", f"skipped: {reason}")]
    logging.disable(logging.WARNING)
    random = Random(run.seed)
    hits, lost = run.of(15, 500), run.of(10, 300)
    tests = tool("test_databases")
    server = kit.Cluster("wal_level = logical")
    try:
        found = [
            *_pooled(server, tests, hits),
            *_published(server, tests),
            *_unanswered(server, tests, random, lost),
        ]
    finally:
        server.remove()
    with kit.german_server() as german:
        host = f"127.0.0.1:{german.port}"
        wrong = [
            address
            for address, wanted in tests.REFUSED.items()
            if tests.is_refused(PostgresStore(f"postgresql://{address.format(host=host)}")) is not wanted
        ]
    what = "wrong passwords, unknown users and databases; a server that is away or not the right one"
    return [
        *found,
        published("addresses of a server that speaks German", len(tests.REFUSED), note=what),
        exactly(
            "refusals taken for a server that is away, or the other way round",
            0,
            len(wrong),
            note="; ".join(wrong),
        ),
    ]


def _pooled(server: Any, tests: Any, hits: int) -> list[Row]:
    """Let stores of several schemas write and read at once behind PgBouncer."""
    if kit.pooler_program() is None:
        return [published("stores behind PgBouncer", "skipped: pgbouncer is not installed")]

    def work(schema: str) -> int:
        store, strange = PostgresStore(dsn, schema=schema), 0
        for number in range(hits):
            tests.put(store, f"{schema}-{number}")
            codes = [fact.notification.member_code for fact in store.facts()]
            strange += len(codes) != number + 1 or any(not code.startswith(schema) for code in codes)
        store.close()
        return strange

    with server.pooler("transaction") as dsn, ThreadPoolExecutor(len(SCHEMAS)) as pool:
        strange = sum(pool.map(work, SCHEMAS))
    stored = sum(server.query(f"SELECT count(*) FROM {schema}.facts")[0][0] for schema in SCHEMAS)
    with server.pooler("transaction", "scram-sha-256") as dsn:
        wrong = PostgresStore(dsn.replace("s3cret-word", "wrong"))
        taken = 0 if tests.is_refused(wrong) else 1
    note = f"{len(SCHEMAS)} stores in one database at once, pool_mode = transaction"
    return [
        exactly("notifications stored behind PgBouncer", hits * len(SCHEMAS), stored, note=note),
        exactly("readings that miss one, or show one of another schema", 0, strange),
        exactly("wrong passwords there that are taken for a server that is away", 0, taken),
    ]


def _published(server: Any, tests: Any) -> list[Row]:
    """Change a store in each way while all tables are published."""
    store = PostgresStore(server.dsn, schema="published")
    tests.put(store, "m-1")
    server.query("CREATE PUBLICATION everything FOR ALL TABLES")
    changes = (
        lambda: tests.put(store, "m-2"),
        lambda: asyncio.run(OutcomeLedger(store).invited([_invited()])),
        lambda: asyncio.run(OutcomeLedger(store).entered("m-1", 1)),
        lambda: erase_member(store, "m-1"),
        lambda: store.prune(datetime.now(UTC)),
    )
    refused = []
    for change in changes:
        try:
            change()
        except StoreError as exc:
            refused.append(str(exc)[:200])
    store.close()
    server.query("DROP PUBLICATION everything")
    return [
        published("kinds of change to a store whose tables are all published", len(changes)),
        exactly("of these, refused by the server", 0, len(refused), note="; ".join(refused)),
    ]


def _invited() -> Any:
    return tool("test_notifications_outcomes").invited("m-1", 1)


def _unanswered(server: Any, tests: Any, random: Random, times: int) -> list[Row]:
    """Lose the answer to a COMMIT that was drawn, or the COMMIT itself, while outcomes are written."""
    psycopg, driver = tool("psycopg"), tool("sampling_async.notifications._psycopg")
    commit, number, told = driver.LimitedConnection.commit_begun, 0, 0
    server.query("CREATE SCHEMA outcomes")

    def failing(connection: Any) -> None:
        nonlocal left
        left -= 1
        is_lost, was_written = left == 0, random.random() < 0.5
        if not is_lost or was_written:
            commit(connection)
        if is_lost:
            connection.close()
            raise psycopg.OperationalError("the connection is lost")

    async def outcomes() -> AsyncIterator[Any]:
        for place in range(5):
            yield tests.outcome(f"m-{number}-{place}")

    for number in range(times):  # noqa: B007  read in `outcomes`
        left = random.randrange(2, 5)
        with patch.object(driver.LimitedConnection, "commit_begun", failing):
            try:
                asyncio.run(write_postgres(outcomes(), server.dsn, schema="outcomes", rows=2))
            except StoreError as exc:
                told += "may have been written, or not" in str(exc)
    twice = server.query(
        "SELECT count(*) FROM"
        " (SELECT 1 FROM outcomes.sampling_outcomes GROUP BY member_code HAVING count(*) > 1) AS twice"
    )
    return [
        exactly("a COMMIT without an answer: runs of write_postgres that say so", times, told),
        exactly("outcomes that stand there twice", 0, int(twice[0][0])),
    ]
