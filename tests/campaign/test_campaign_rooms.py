"""Campaigns of several panels share the room of quotas: `Campaign(share_room=...)`."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter
from functools import partial

import anyio
import msgspec
import pyarrow as pa
import pytest
from attrs import evolve
from cli_kit import lines, run, served_panel
from panel_kit import all_of, campaign_of, panel_table
from store_kit import opened

from sampling_async import InvalidRequestError
from sampling_async.campaign import Limits
from sampling_async.matching import Allocate, PanelMatcher, QuotaIndex
from sampling_async.simulator import Simulator

DAY = 86_400.0
FEW = Allocate(3, overshoot=0.1)  # so that two panels want more than there is


def new_simulator(**more) -> Simulator:
    return Simulator(7, surveys=12, members=200, **more)


@pytest.fixture
def sim():
    return new_simulator()


def room_of(sim: Simulator) -> dict[int, int]:
    """Return how many invites each quota can use, as one campaign alone sees it."""
    return dict(PanelMatcher(QuotaIndex(sim.inventory), FEW).terms().rooms)


def halves(sim: Simulator) -> list[pa.Table]:
    """Return the panels of two campaigns: no member is in both."""
    table = panel_table(sim)
    return [table.slice(0, 100), table.slice(100)]


async def planned(*campaigns) -> Counter[int]:
    """Return how many pairs of each quota some campaigns have planned, by what is in their ledgers."""
    return Counter(itertools.chain.from_iterable(pa.table(each)["quota_id"].to_pylist() for each in campaigns))


def of_panels(sim, client, folder, store, **more):
    more = {"allocate": FEW, "share_room": store, "inventory": new_simulator().inventory, **more}
    return [
        campaign_of(sim, client, folder, panel=panel, ledger=folder / f"{at}.ledger", **more)
        for at, panel in enumerate(halves(sim))
    ]


def over(pairs: Counter[int], rooms: dict[int, int]) -> dict[int, int]:
    return {quota_id: count for quota_id, count in pairs.items() if count > rooms[quota_id]}


async def test_two_panels_plan_together_no_more_than_there_is_room_for(sim, tmp_path, new_address):
    rooms = room_of(sim)
    async with sim.client() as client:
        (tmp_path / "alone").mkdir()
        alone = of_panels(sim, client, tmp_path / "alone", None)
        shared = of_panels(sim, client, tmp_path, new_address())
        first, second = [await each.plan() for each in shared]
        for each in alone:
            await each.plan()
    assert over(await planned(*alone), rooms)  # without a store both plan for the same room
    assert not over(await planned(*shared), rooms)
    assert first.pairs > 50
    assert second.pairs > 50
    assert not first.warnings
    (told,) = second.warnings
    assert told.startswith(f"other campaigns hold room for {first.pairs:,} pairs in ")


async def test_two_that_plan_at_the_same_moment_do_not_take_the_same_room(sim, tmp_path, new_address):
    rooms, together = room_of(sim), threading.Barrier(2)
    has_met = set()

    def meet(name: int, members: int, _total) -> None:
        if members and name not in has_met:  # both have read what others hold by now
            has_met.add(name)
            together.wait(20)

    async with sim.client() as client:
        shared = of_panels(sim, client, tmp_path, new_address())
        async with anyio.create_task_group() as tasks:
            for at, each in enumerate(shared):
                tasks.start_soon(partial(each.plan, on_members=partial(meet, at)))
    assert has_met == {0, 1}
    pairs = await planned(*shared)
    assert pairs.total() > 100
    assert not over(pairs, rooms)


async def test_what_a_run_does_not_use_is_given_back_when_it_ends(sim, tmp_path, new_address):
    store = new_address()
    async with sim.client() as client:
        first, second = of_panels(sim, client, tmp_path, store)
        await first.plan()
        invited = [each for each in await all_of(first.run()) if each.status == "invited"]
        (told,) = (await second.plan()).warnings
    assert 0 < len(invited) < (await planned(first)).total()
    assert f"room for {len(invited):,} pairs" in told


async def test_a_campaign_that_is_never_run_holds_its_room_for_a_day(sim, tmp_path, new_address):
    now, store = [1e9], new_address()
    async with sim.client() as client:
        first, second = of_panels(sim, client, tmp_path, store, wall_clock=lambda: now[0])
        await first.plan()
        now[0] += DAY + 1
        assert not (await second.plan()).warnings


async def test_a_long_run_holds_its_room_by_noting_it_again(sim, tmp_path, new_address):
    now, store = [1e9], new_address()
    async with sim.client() as client:
        first, second = of_panels(sim, client, tmp_path, store, wall_clock=lambda: now[0])
        await first.plan()
        await first.limit(paused=True)
        async with first.run() as waiting:
            now[0] += DAY + 1
            plan = await second.plan()
            with anyio.fail_after(20):
                while not plan.warnings:
                    await anyio.sleep(0.05)
                    plan = await second.top_up()
            waiting.stop("seen")


async def test_a_top_up_replaces_what_the_campaign_held(sim, tmp_path, new_address):
    async with sim.client() as client:
        (first, second), rooms = of_panels(sim, client, tmp_path, new_address()), room_of(sim)
        await first.plan()
        await all_of(first.run())
        await second.plan()
        await first.top_up()
        held = [
            row for row in pa.table(first).to_pylist() if row["status"] in {"invited", "unknown", "pending"}
        ]
    pairs = Counter(row["quota_id"] for row in held) + await planned(second)
    assert not over(pairs, rooms)


async def test_another_service_has_other_quotas(sim, tmp_path, new_address):
    store = new_address()
    async with sim.client() as client, sim.client(base_url="https://other.example") as elsewhere:
        first, _ = of_panels(sim, client, tmp_path, store)
        (tmp_path / "other").mkdir()
        _, second = of_panels(sim, elsewhere, tmp_path / "other", store)
        await first.plan()
        assert not (await second.plan()).warnings


async def test_a_run_goes_on_without_its_store_and_says_so(sim, tmp_path, caplog):
    async with sim.client() as client:
        first, _ = of_panels(sim, client, tmp_path, tmp_path / "rooms.db")
        await first.plan()
        (tmp_path / "rooms.db").write_bytes(b"this is no database" * 100)
        with caplog.at_level(logging.WARNING):
            outcomes = await all_of(first.run())
    assert any(each.status == "invited" for each in outcomes)
    assert "shares is as it was noted before" in caplog.text


async def test_a_plan_needs_a_client_and_a_store_that_can_be_written(sim, tmp_path):
    made = partial(campaign_of, sim, folder=tmp_path, inventory=sim.inventory)
    with pytest.raises(InvalidRequestError, match="share_room needs a client"):
        await made(client=None, share_room=tmp_path / "rooms.db").plan()
    with pytest.raises(InvalidRequestError, match="store must be a path"):
        made(client=None, share_room=5)
    assert not (tmp_path / "run.ledger").exists()


def test_the_command_shares_room_and_a_later_call_remembers_the_store(tmp_path, monkeypatch):
    plan = ("campaign", "panel.jsonl", "--share-room", "rooms.db", "--dry-run", "--json", "--out")
    with served_panel(tmp_path, monkeypatch):
        first = run(*plan, "a")
        assert "rooms.db is new: no other campaign shares its room yet" in first.stderr
        assert "hold room" not in first.output
        assert f"hold room for {lines(first)[0]['Pairs']:,} pairs" in run(*plan, "b").output
        for folder in ("a", "b"):  # what they did not use is free again
            assert run("campaign", "--out", folder, "--yes").exit_code in {0, 1}
        third = run(*plan, "c")
        assert "hold room" in third.output
        assert lines(third)[0]["Pairs"] > 0


async def test_a_store_that_was_made_before_gets_its_table(sim, tmp_path, new_address):
    store = new_address()
    with opened(store) as mine:
        mine.execute("DROP TABLE rooms")
    async with sim.client() as client:
        first, second = of_panels(sim, client, tmp_path, store)
        await first.plan()
        assert (await second.plan()).warnings


async def test_reserves_use_room_that_is_left(sim, tmp_path, new_address):
    async with sim.client() as client:
        first, second = of_panels(sim, client, tmp_path, new_address(), limits=Limits(max_invites=20))
        await first.plan()
        await all_of(first.run())
        assert (await second.plan()).pairs


async def test_who_lost_its_room_is_told_to_plan_anew(sim, tmp_path, new_address, caplog):
    now, store = [1e9], new_address()
    async with sim.client() as client:
        first, second = of_panels(sim, client, tmp_path, store, wall_clock=lambda: now[0])
        await first.plan()
        now[0] += DAY + 1
        await second.plan()
        with caplog.at_level(logging.WARNING):
            await all_of(second.run())
            assert "held no room" not in caplog.text
            await all_of(first.run())
    assert "held no room any more, and others have planned for it" in caplog.text


async def test_the_room_of_a_survey_counts_quotas_that_have_closed_since(sim, tmp_path, new_address):
    whole = new_simulator().inventory
    rooms = {each.survey_id: 20 for each in whole.surveys}
    allocate = Allocate(3, room={quota.quota_id: 50 for each in whole.surveys for quota in each.quotas})
    allocate = evolve(allocate, survey_room=rooms)
    async with sim.client() as client:
        first, second = of_panels(sim, client, tmp_path, new_address(), allocate=allocate)
        await first.plan()
        fullest = (await planned(first)).most_common(1)[0][0]
        left = [
            msgspec.structs.replace(each, quotas=tuple(q for q in each.quotas if q.quota_id != fullest))
            for each in whole.surveys
        ]
        _, second = of_panels(sim, client, tmp_path, second._share_room, allocate=allocate, inventory=left)
        await second.plan()
    survey_of = {quota.quota_id: each.survey_id for each in whole.surveys for quota in each.quotas}
    of_surveys = Counter[int]()
    for quota_id, count in (await planned(first, second)).items():
        of_surveys[survey_of[quota_id]] += count
    assert max(of_surveys.values()) == 20


def test_a_store_of_room_is_a_file_in_a_folder_or_none(tmp_path, monkeypatch):
    plan = ("campaign", "panel.jsonl", "--dry-run", "--json", "--out")
    with served_panel(tmp_path, monkeypatch):
        for wrong in (".", "", "away/rooms.db"):
            refused = run(*plan, "a", "--share-room", wrong)
            assert refused.exit_code == 2
            assert "--share-room takes a file in a folder that is there" in refused.stderr
        assert run(*plan, "a", "--share-room", "none").exit_code == 0
    assert not (tmp_path / "none").exists()
