"""The journal: what a killed run leaves behind, and how the next run uses it."""

from __future__ import annotations

from collections import Counter

import anyio
import anyio.to_thread
import doubles
import httpx
import pytest
from journal_kit import OF_OTHERS, ONCE, PANEL, Ledger, facts, killed, rows_of, run

from sampling_async import (
    ClientClosedError,
    InviteRequest,
    Journal,
    JournalError,
    SamplingError,
)


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


async def test_additional_input_is_sent_by_the_next_run(tmp_path):
    service = Ledger()
    await run(service, tmp_path / "journal", PANEL[:2])
    outcomes = await run(service, str(tmp_path / "journal"), [*reversed(PANEL), InviteRequest("m0", [7, 1])])
    assert len(outcomes) == 32
    assert set(service.asked.values()) == {1}


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


async def test_a_journal_of_another_panel_is_refused(tmp_path):
    await run(Ledger(), tmp_path / "journal", PANEL[:1])
    with pytest.raises(JournalError, match=OF_OTHERS) as caught:
        await run(Ledger(), tmp_path / "journal", panel_guid=doubles.KEY)
    assert caught.value.path == tmp_path / "journal"
    await run(Ledger(), tmp_path / "journal", PANEL[:1], panel_guid=doubles.PANEL.upper())


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


# --- Replayed outcomes of earlier runs


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
