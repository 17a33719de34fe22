"""Tables for data frames, and outcomes that are written as they come."""

from __future__ import annotations

import random
import signal
import stat
import traceback
from datetime import UTC, datetime

import anyio
import duckdb
import polars as pl
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from attrs import evolve
from docs_kit import ROOT
from panel_kit import all_of, campaign_of

from sampling_async import (
    BulkInviteResult,
    InvalidRequestError,
    Invite,
    InviteOutcome,
    InviteRequest,
    Journal,
    JournalError,
    TransportError,
    from_json,
    to_json,
)
from sampling_async.frames import write_parquet, write_postgres
from sampling_async.notifications import OutcomeLedger, StoreError
from sampling_async.simulator import Fault, Simulator

INVITE = Invite(7, 2, 41, 1.1, "https://s.example/1", 12, 35, 0.3)
ERROR = TransportError("cut", endpoint="bulk_invite", delivery="unknown")
OUTCOMES = (
    InviteOutcome("m1", 41, "invited", INVITE, 1, "SUCCESS"),
    InviteOutcome("m1", 42, "rejected", None, 28, "QUOTA_FULL"),
    InviteOutcome("m\ud800", 43, "unknown", error=ERROR, anomaly="odd", replayed=True),
)


@pytest.fixture
def sim():
    return Simulator(3, surveys=6, members=30)


def ids_of(sim):
    return [quota.quota_id for survey in sim.inventory.surveys for quota in survey.quotas]


def fan_out(sim, client, **options):
    return client.fan_out([InviteRequest(code, ids_of(sim)) for code in sim.members], **options)


# --- Tables


def test_the_page_names_each_column():
    page = (ROOT / "docs/howto/data-frames.md").read_text()
    columns = page.partition("A table of outcomes has the columns ")[2].partition(". ")[0]
    assert columns.split("`")[1::2] == BulkInviteResult(OUTCOMES).to_arrow().schema.names


def test_a_result_is_a_table_with_a_row_an_outcome():
    table = BulkInviteResult(OUTCOMES).to_arrow()
    invited, rejected, unknown = table.to_pylist()
    assert invited == {
        "member_code": "m1",
        "quota_id": 41,
        "status": "invited",
        "result_code": 1,
        "result": "SUCCESS",
        "survey_id": 7,
        "wave_id": 2,
        "url": "https://s.example/1",
        "partner_amount": 1.1,
        "member_amount": 0.3,
        "loi": 12,
        "ir": 35,
        "error": None,
        "anomaly": None,
        "replayed": False,
    }
    assert (rejected["result_code"], rejected["survey_id"], rejected["url"]) == (28, None, None)
    assert (unknown["error"], unknown["anomaly"], unknown["replayed"]) == (
        f"TransportError: {ERROR}",
        "odd",
        True,
    )
    assert unknown["member_code"] == "m?"  # what UTF-8 cannot hold


def test_inventories_are_a_table_with_a_row_a_quota(sim):
    table, quotas = sim.inventory.to_arrow(), [quota for each in sim.inventory.surveys for quota in each.quotas]
    assert table["quota_id"].to_pylist() == [quota.quota_id for quota in quotas]
    row, survey, quota = table.to_pylist()[0], sim.inventory.surveys[0], quotas[0]
    assert (row["survey_id"], row["loi"], row["ir"]) == (survey.survey_id, survey.loi, survey.ir)
    assert (row["price"], row["currency_id"]) == (survey.price.amount, survey.price.currency_id)
    assert row["survey_completes_required"] == survey.completes_required
    assert (row["layers"], row["device_type_ids"]) == (len(quota.layers), list(survey.device_type_ids))
    asked = {q.question_id for at in quota.layers for sub in at.sub_quotas for q in sub.questions_and_answers}
    assert set(row["question_ids"]) == asked


@pytest.mark.parametrize(
    ("date", "wanted"),
    [
        ("2020-01-31T21:19:30+02:00", datetime(2020, 1, 31, 19, 19, 30)),  # noqa: DTZ001  the column has no zone
        ("2020-01-31T21:19:30.5", datetime(2020, 1, 31, 21, 19, 30, 500_000)),  # noqa: DTZ001
    ],
)
def test_dates_with_a_zone_are_in_utc_and_others_as_written(sim, date, wanted):
    survey = sim.inventory.surveys[0]
    text = to_json(sim.inventory).decode()
    old = to_json(survey).decode().split('"ScheduledCompletionDate":"')[1].split('"')[0]
    read = from_json(type(sim.inventory), text.replace(old, date))
    assert read.to_arrow()["scheduled_completion_date"][0].as_py() == wanted


@pytest.mark.parametrize(
    ("year", "offset"), [("0001-01-01T00:00:00", "+09:00"), ("9999-12-31T23:59:59", "-09:00")]
)
def test_any_date_and_name_of_a_survey_is_taken(sim, year, offset):
    survey = evolve(
        sim.inventory.surveys[0],
        scheduled_completion_date=datetime.fromisoformat(year + offset),
        survey_name="a\ud800",
    )
    table = evolve(sim.inventory, surveys=(survey,))
    row = table.to_arrow().to_pylist()[0]
    assert (row["scheduled_completion_date"], row["survey_name"]) == (datetime.fromisoformat(year), "a?")
    assert "\ud800" not in table._repr_html_()
    assert "<caption>1 survey with" in table._repr_html_()
    assert "<caption>1 quota ID<" in BulkInviteResult(OUTCOMES[:1])._repr_html_()


@pytest.mark.parametrize("of", ["result", "quotas"])
def test_data_frames_read_them_as_they_are(sim, of):
    given = BulkInviteResult(OUTCOMES[:2]) if of == "result" else sim.inventory
    rows = given.to_arrow().num_rows
    assert rows > 1
    assert pl.DataFrame(given)["quota_id"].to_list() == given.to_arrow()["quota_id"].to_pylist()
    assert pa.table(given) == given.to_arrow()
    assert pa.RecordBatchReader.from_stream(given).read_all().num_rows == rows
    assert duckdb.sql("SELECT count(*) FROM given").fetchall() == [(rows,)]
    assert duckdb.from_arrow(given.to_arrow()).aggregate("count(*)").fetchall() == [(rows,)]
    assert len(given.to_arrow().to_pandas()) == rows


def test_empty_ones_have_their_columns_too():
    assert pl.DataFrame(BulkInviteResult()).columns == BulkInviteResult(OUTCOMES).to_arrow().schema.names


def test_a_result_is_still_a_sequence():
    result = BulkInviteResult(OUTCOMES)
    assert OUTCOMES[1] in result
    assert (result.index(OUTCOMES[1]), result.count(OUTCOMES[0])) == (1, 1)
    assert list(reversed(result)) == list(OUTCOMES[::-1])


async def test_a_journal_is_a_table(sim, tmp_path):
    journal = Journal(tmp_path / "run.journal")
    with pytest.raises(JournalError, match="does not exist"):
        pl.DataFrame(journal)
    async with sim.client() as client, fan_out(sim, client, journal=journal) as outcomes:
        seen = {(each.member_code, each.quota_id, each.status) async for each in outcomes}
    rows = pl.DataFrame(journal).select("member_code", "quota_id", "status").rows()
    assert (set(rows), len(rows)) == (seen, len(seen))
    assert pa.table(journal) == await journal.to_arrow()
    assert [each async for each in journal.outcomes()]  # it is not in use any more


async def test_a_stream_of_a_journal_that_is_dropped_leaves_it(sim, tmp_path):
    journal = Journal(tmp_path / "run.journal")
    async with sim.client() as client:
        await write_parquet(fan_out(sim, client, journal=journal), tmp_path / "a.parquet")
    reader = pa.RecordBatchReader.from_stream(journal)
    with pytest.raises(JournalError, match="in use"):
        await journal.counts()
    del reader
    assert sum((await journal.counts()).values()) == 30 * len(ids_of(sim))


async def test_a_campaign_and_a_ledger_of_outcomes_are_tables(sim, tmp_path):
    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path)
        await campaign.plan()
        outcomes = await all_of(campaign.run())
    pairs = pl.DataFrame(campaign)
    assert sorted(pairs.filter(pairs["status"] == "invited")["quota_id"]) == sorted(
        each.quota_id for each in outcomes if each.status == "invited"
    )
    ledger = OutcomeLedger(tmp_path / "notifications.db")
    await ledger.invited(outcomes, at=datetime(2026, 1, 1, tzinfo=UTC))
    rows = pl.DataFrame(ledger)
    assert rows["ending"].unique().to_list() == ["open"]
    assert pa.table(ledger) == await ledger.to_arrow()


# --- Written as they come


async def test_a_fan_out_is_written_to_parquet(sim, tmp_path):
    path = tmp_path / "night.parquet"
    async with sim.client() as client:
        counts = await write_parquet(fan_out(sim, client), path, rows=100)
    table = pq.read_table(path)
    assert table.num_rows == sum(counts.values()) == 30 * len(ids_of(sim))
    assert table["status"].to_pylist().count("invited") == counts["invited"] == len(sim.ledger.invites)
    assert pq.ParquetFile(path).num_row_groups > 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


async def test_an_entered_stream_and_any_other_source_are_taken_too(sim, tmp_path):
    async with sim.client() as client, fan_out(sim, client) as outcomes:
        first = await anext(outcomes)
        counts = await write_parquet(outcomes, tmp_path / "rest.parquet")
    assert sum(counts.values()) == 30 * len(ids_of(sim)) - 1
    assert (first.member_code, first.quota_id) not in {
        (row["member_code"], row["quota_id"]) for row in pq.read_table(tmp_path / "rest.parquet").to_pylist()
    }

    async def some():
        yield OUTCOMES[0]

    assert (await write_parquet(some(), tmp_path / "some.parquet"))["invited"] == 1


@pytest.mark.parametrize("name", ["night.parquet", "night.parquet.part"])
async def test_a_file_that_is_there_is_kept_and_nothing_is_sent(sim, tmp_path, name):
    (tmp_path / name).write_text("invites of yesterday")
    async with sim.client() as client:
        with pytest.raises(InvalidRequestError, match=r"already exists; name another|may hold invites"):
            await write_parquet(fan_out(sim, client), tmp_path / "night.parquet")
    assert (tmp_path / name).read_text() == "invites of yesterday"
    assert sim.ledger.requests == ()


async def test_a_file_is_replaced_when_the_new_one_is_complete(sim, tmp_path):
    path = tmp_path / "night.parquet"
    path.write_text("old")
    async with sim.client() as client:
        stream = fan_out(sim, client)
        with anyio.CancelScope() as scope:

            async def cut():
                async with stream:
                    async for outcome in stream:
                        yield outcome
                        scope.cancel()

            await write_parquet(cut(), path, replace=True)
        assert path.read_text() == "old"
        (tmp_path / "night.parquet.part").unlink()
        await write_parquet(fan_out(sim, client), path, replace=True)
    assert pq.read_table(path).num_rows == 30 * len(ids_of(sim))


@pytest.mark.parametrize("rows", [1, 10_000])
async def test_after_a_cancellation_the_part_accounts_for_each_id_taken(sim, tmp_path, rows):
    sim.faults.add(Fault.delay(30).on("bulk_invite", after=5))
    async with sim.client() as client:
        stream = fan_out(sim, client)
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:

                async def cancel_later():
                    while stream.progress.answered < 40:  # noqa: ASYNC110  a stream has no event for that
                        await anyio.sleep(0.001)
                    scope.cancel()

                tasks.start_soon(cancel_later)
                with pytest.raises(anyio.get_cancelled_exc_class()) as caught:
                    await write_parquet(stream, tmp_path / "night.parquet", rows=rows)
                assert "night.parquet.part" in caught.value.__notes__[0]
                raise caught.value
    part = pq.read_table(tmp_path / "night.parquet.part").to_pylist()
    pairs = [(row["member_code"], row["quota_id"]) for row in part]
    assert len(pairs) == len(set(pairs)) == stream.progress.taken
    assert {invite.quota_id for invite in sim.ledger.invites} <= {
        row["quota_id"] for row in part if row["status"] in {"invited", "unknown"}
    }


async def test_what_came_before_an_error_of_the_input_is_written(sim, tmp_path):
    def requests():
        yield InviteRequest("m000001", ids_of(sim))
        raise KeyError("panel")

    async with sim.client() as client:
        with pytest.raises(KeyError):
            await write_parquet(client.fan_out(requests()), tmp_path / "night.parquet")
    assert pq.read_table(tmp_path / "night.parquet.part").num_rows == len(ids_of(sim))


async def nobody():
    for _ in ():
        yield OUTCOMES[0]


async def nothing_but(error):
    for _ in ():
        yield OUTCOMES[0]
    raise error


@pytest.mark.parametrize("name", ["", "folder"])
async def test_a_folder_in_place_of_the_file_is_noticed_before_anything_is_sent(
    sim, tmp_path, name, monkeypatch
):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    async with sim.client() as client:
        with pytest.raises(InvalidRequestError, match="is a folder"):
            await write_parquet(fan_out(sim, client), name, replace=True)
    assert sim.ledger.requests == ()


async def test_a_source_that_fails_at_once_leaves_nothing_that_the_next_try_meets(tmp_path):
    for _ in range(2):
        with pytest.raises(KeyError) as caught:
            await write_parquet(nothing_but(KeyError("panel")), tmp_path / "night.parquet")
        assert caught.value.__notes__ == ["nothing was written"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="files have no greatest size here")
async def test_on_a_full_disk_the_note_says_what_is_lost(tmp_path):
    import resource  # noqa: PLC0415  only on Unix

    async def outcomes():
        for number in range(20):
            yield InviteOutcome(
                f"m{number}", number, "rejected", None, 28, random.Random(number).randbytes(300).hex()
            )

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, before[1]))
    try:
        with pytest.raises(OSError, match="too large") as caught:
            await write_parquet(outcomes(), tmp_path / "night.parquet", rows=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)
    (note,) = caught.value.__notes__
    assert note.startswith("1 outcome could not be written")
    assert "night.parquet.part has no end and cannot be read" in note


@pytest.fixture
def database(postgres):
    """Return an address and a schema of its own, and a connection to it."""
    dsn, _, schema = postgres.new_dsn().partition("?schema=")
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {schema}")
        connection.execute(f"SET search_path = {schema}")
        yield dsn, schema, connection


@pytest.mark.postgres
async def test_a_fan_out_is_written_to_postgres(sim, database):
    dsn, schema, connection = database
    async with sim.client() as client:
        counts = await write_postgres(fan_out(sim, client), dsn, table="night", schema=schema, rows=100)
    found = connection.execute("SELECT status, count(*) FROM night GROUP BY 1").fetchall()
    assert dict(found) == {status: count for status, count in counts.items() if count}
    invites = connection.execute(
        "SELECT member_code, quota_id, url FROM night WHERE status = 'invited'"
    ).fetchall()
    assert sorted(invites) == sorted((each.member_code, each.quota_id, each.url) for each in sim.ledger.invites)


@pytest.mark.postgres
async def test_a_second_run_appends_and_columns_of_ones_own_stay(sim, database):
    dsn, schema, connection = database
    async with sim.client() as client:
        for _ in range(2):
            await write_postgres(fan_out(sim, client), dsn, schema=schema)
            connection.execute("ALTER TABLE sampling_outcomes ADD COLUMN IF NOT EXISTS night int DEFAULT 5")
    found = connection.execute("SELECT count(*), min(night) FROM sampling_outcomes").fetchone()
    assert found == (60 * len(ids_of(sim)), 5)


@pytest.mark.postgres
async def test_a_table_of_somebody_else_is_refused_before_anything_is_sent(sim, database):
    dsn, schema, connection = database
    connection.execute("CREATE TABLE sampling_outcomes (other int)")
    async with sim.client() as client:
        with pytest.raises(StoreError, match='column "member_code"') as caught:
            await write_postgres(fan_out(sim, client), dsn, schema=schema)
    assert (sim.ledger.requests, caught.value.permanent) == ((), True)


@pytest.mark.postgres
async def test_a_table_whose_columns_have_other_types_is_refused_before_anything_is_sent(sim, database):
    dsn, schema, connection = database
    await write_postgres(nobody(), dsn, schema=schema)
    connection.execute("ALTER TABLE sampling_outcomes ALTER COLUMN member_code TYPE integer USING 1")
    async with sim.client() as client:
        with pytest.raises(StoreError, match='column "member_code" is of type integer') as caught:
            await write_postgres(fan_out(sim, client), dsn, schema=schema)
    assert (sim.ledger.requests, caught.value.__notes__) == ((), ["nothing was written"])


@pytest.mark.postgres
async def test_words_of_sql_are_tables_and_any_text_is_stored(database):
    dsn, schema, connection = database

    async def outcomes():
        for code in ("m\ud800", "m\0", "m\t\n\\N"):
            yield InviteOutcome(code, 1, "rejected", None, 28, "\\N")

    await write_postgres(outcomes(), dsn, schema=schema, table="order")
    found = connection.execute('SELECT member_code, result FROM "order"').fetchall()
    assert found == [(code, "\\N") for code in ("m\\ud800", "m\\x00", "m\t\n\\N")]


@pytest.mark.postgres
async def test_a_link_with_a_nul_leads_where_it_led(database):
    dsn, schema, connection = database
    invite = evolve(INVITE, url="https://click.example/a\0b?c=%5C")
    outcome = InviteOutcome("m", 41, "invited", invite, 1, "SUCCESS")

    async def outcomes():
        yield outcome

    await write_postgres(outcomes(), dsn, schema=schema)
    found = connection.execute("SELECT url FROM sampling_outcomes").fetchall()
    assert found == [("https://click.example/a%00b?c=%5C",)]


@pytest.mark.postgres
@pytest.mark.parametrize("seconds", [0.0, 5.0])
async def test_what_has_come_is_stored_after_a_second(sim, database, seconds):
    dsn, schema, connection = database
    ticks, stored = iter(range(10**6)), []

    async def outcomes():
        for _ in range(3):
            stored.append(len(connection.execute("SELECT 1 FROM sampling_outcomes").fetchall()))
            yield OUTCOMES[0]

    await write_postgres(outcomes(), dsn, schema=schema, clock=lambda: next(ticks) * seconds)
    assert stored == ([0, 1, 2] if seconds else [0, 0, 0])


async def test_a_database_that_is_away_is_noticed_before_anything_is_sent(sim):
    async with sim.client() as client:
        with pytest.raises(StoreError, match="cannot be reached") as caught:
            await write_postgres(fan_out(sim, client), "postgresql://u:hunter2@127.0.0.1:1/x")
        assert "hunter2" not in str(caught.value)
        shown = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
        frames = "".join(shown.format())
        assert "in write_postgres" in frames
        assert "dsn = " not in frames
        assert "'password'" not in frames
        with pytest.raises(InvalidRequestError, match="small letters"):
            await write_postgres(fan_out(sim, client), "postgresql://u@127.0.0.1/x", table="a; drop table b")
    assert sim.ledger.requests == ()
