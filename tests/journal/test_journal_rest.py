"""What a journal has and the input of a run has not any more."""

from __future__ import annotations

import anyio
import anyio.to_thread
import doubles
import httpx
from journal_kit import ONCE, PANEL, Ledger, facts, killed, opened, run

from sampling_async import InviteRequest, Journal


async def test_a_resumed_run_ends_with_what_its_input_has_not_any_more(tmp_path, caplog):
    """Quotas close between two runs: their links are paid for."""
    path, service = tmp_path / "j", Ledger()
    first = await run(service, path)
    shorter = [InviteRequest(f"m{n}", range(4, 9)) for n in range(1, 6)]
    second = await run(service, path, shorter)
    assert max(service.asked.values()) == 1
    of_input = {(f"m{n}", quota_id) for n in range(1, 6) for quota_id in range(4, 9)}
    before = {(each.member_code, each.quota_id): each for each in first}
    assert {(each.member_code, each.quota_id) for each in second} == of_input | before.keys()
    assert len(second) == len(of_input | before.keys())
    rest = [each for each in second if (each.member_code, each.quota_id) not in of_input]
    assert all(each.replayed for each in rest)
    assert {(each.member_code, each.quota_id) for each in rest} == before.keys() - of_input
    assert facts(rest) == facts([before[each.member_code, each.quota_id] for each in rest])
    (warning,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert f"{len(rest)} recorded outcomes are of pairs that the input has not" in warning


async def test_the_rest_has_what_was_in_flight_and_not_what_was_never_sent(tmp_path):
    path = tmp_path / "j"
    first = await run(Ledger(), path, PANEL[:1])
    killed(path)
    await run(Ledger(httpx.ConnectError("refused")), Journal(path, only_input=True), PANEL[1:2], retry=ONCE)
    rest = await run(Ledger(), path, [])
    unknown = [("m0", quota_id, "unknown", None) for quota_id in (1, 2, 3)]
    assert facts(rest) == [*unknown, *facts([each for each in first if each.quota_id > 3])]


async def test_there_is_no_rest_while_the_input_may_have_more(tmp_path):
    """After a deadline, nobody knows what the input would have had."""
    path = tmp_path / "j"
    await run(Ledger(), path)

    async def slow():
        yield PANEL[0]
        await anyio.sleep(60)

    outcomes = await run(Ledger(), path, slow(), deadline=0.05)
    assert {each.member_code for each in outcomes} <= {"m0"}


async def test_the_rest_is_left_out_if_only_the_input_counts(tmp_path):
    path, service = tmp_path / "j", Ledger()
    await run(service, path)
    outcomes = await run(service, Journal(path, only_input=True), PANEL[:2])
    assert facts(outcomes) == facts(await run(service, tmp_path / "another", PANEL[:2]))


async def test_pairs_of_this_run_are_no_rest_also_if_the_journal_is_used_again(tmp_path):
    path, service = tmp_path / "j", Ledger()
    journal = Journal(path)
    assert len(await run(service, journal, PANEL[:2])) == 12
    assert len(await run(service, journal, PANEL[2:])) == 30
    assert len(await run(service, journal, PANEL)) == 30
    assert max(service.asked.values()) == 1


async def test_a_large_rest_comes_in_parts_and_a_cancelled_reading_loses_none(tmp_path, monkeypatch):
    monkeypatch.setattr("sampling_async._journal.rows._TOGETHER", 4)
    path, service, requests = tmp_path / "j", Ledger(), [InviteRequest(f"m{n}", range(1, 7)) for n in range(50)]
    await run(service, path, requests)
    working = await opened(path)
    found = []
    while rest := await _rest_after_a_cancellation(working):
        found += [(code, quota_id) for code, known in rest.items() for quota_id in known]
    await working.close()
    assert sorted(found) == sorted((each.member_code, id_) for each in requests for id_ in each.quota_ids)


async def _rest_after_a_cancellation(working):
    with anyio.CancelScope() as scope:
        scope.cancel()
        await working.rest()
    return await working.rest()


async def test_progress_counts_the_rest(tmp_path):
    path = tmp_path / "j"
    await run(Ledger(), path)
    async with (
        doubles.client(Ledger()) as client,
        client.fan_out(PANEL[:1], journal=path) as stream,
    ):
        async for _ in stream:
            pass
        progress = stream.progress
    assert (progress.taken, progress.answered, progress.replayed, progress.total) == (30, 30, 30, 30)
    assert progress.seconds_left == 0.0
