"""What members got in earlier nights is not planned again: `Campaign(leave_out=...)`."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from attrs import evolve
from cli_kit import lines, run, served_panel
from panel_kit import AGES, all_of, campaign_of, locked, panel_table
from store_kit import COMPLETION, SECRET, post

from sampling_async import InvalidRequestError, Invite, InviteOutcome, ResultCode
from sampling_async.campaign import erase_from_ledger
from sampling_async.matching import LiveIndex, Member
from sampling_async.notifications import Inbox, OutcomeLedger
from sampling_async.routing import SurveyRouter
from sampling_async.simulator import Fault, Notifying, Simulator

if TYPE_CHECKING:
    from pathlib import Path

    from sampling_async.campaign import Campaign


def new_simulator(**more) -> Simulator:
    return Simulator(7, surveys=30, members=120, **more)


SURVEYS = {
    quota.quota_id: each.survey_id for each in new_simulator().inventory.surveys for quota in each.quotas
}


@pytest.fixture
def sim():
    return new_simulator()


async def night(sim, client, folder: Path, name: str, **more) -> tuple[Campaign, list]:
    """Plan and run a whole night; return its campaign and outcomes."""
    (folder / name).mkdir()
    campaign = campaign_of(sim, client, folder, ledger=folder / name / "campaign.ledger", **more)
    await campaign.plan()
    return campaign, await all_of(campaign.run())


async def planned(campaign: Campaign) -> set[tuple[str, int]]:
    """Return the pairs of a member and a survey that a campaign has planned."""
    await campaign.plan()
    pairs = pa.table(campaign).select(["member_code", "quota_id"]).to_pylist()
    return {(pair["member_code"], SURVEYS[pair["quota_id"]]) for pair in pairs}


def held_by(outcomes) -> set[tuple[str, int]]:
    return {(each.member_code, each.invite.survey_id) for each in outcomes}


def refused(outcomes, code: int) -> int:
    return sum(outcome.result_code == code for outcome in outcomes)


async def test_a_second_night_requests_nothing_that_the_first_one_got(sim, tmp_path):
    async with sim.client() as client:
        _, first = await night(sim, client, tmp_path, "monday")
        _, alone = await night(sim, client, tmp_path, "alone")
        _, second = await night(
            sim, client, tmp_path, "tuesday", leave_out=[tmp_path / "monday", tmp_path / "alone"]
        )
    assert sum(outcome.status == "invited" for outcome in first) > 100
    assert refused(alone, ResultCode.SURVEY_TAKEN) > 20
    assert refused(second, ResultCode.SURVEY_TAKEN) == 0


async def test_a_folder_of_nights_a_ledger_and_several_are_left_out_and_the_own_ledger_is_not(sim, tmp_path):
    async with sim.client() as client:
        nights = tmp_path / "nights"
        nights.mkdir()
        _, first = await night(sim, client, nights, "monday")
        for name, where in (("all", nights), ("one", nights / "monday" / "campaign.ledger")):
            (nights / name).mkdir()
            campaign = campaign_of(
                sim, client, tmp_path, ledger=nights / name / "campaign.ledger", leave_out=[where]
            )
            pairs = await planned(campaign)
            got = {(each.member_code, SURVEYS[each.quota_id]) for each in first if each.invite}
            assert pairs
            assert got
            assert pairs.isdisjoint(got)
            # Its own plan is no earlier night: with the folder that it stands in, it is planned anew.
            assert (await campaign.top_up()).pairs
            shutil.rmtree(nights / name)


@pytest.mark.parametrize(
    ("code", "is_final"),
    [
        (ResultCode.QUOTA_FULL, False),
        (ResultCode.MAX_DAILY_EXCEEDED, False),
        (ResultCode.SURVEY_TAKEN, True),
        (ResultCode.MEMBER_DOES_NOT_MATCH_QUOTA, True),
    ],
)
async def test_only_a_refusal_for_good_leaves_a_survey_out(sim, tmp_path, code, is_final):
    sim.faults.add(Fault.refusal(code).on("bulk_invite"))
    async with sim.client() as client:
        campaign, outcomes = await night(sim, client, tmp_path, "monday", max_turns=1)
        pairs = await planned(
            campaign_of(sim, client, tmp_path, ledger=tmp_path / "2", leave_out=[campaign.ledger])
        )
    refused_there = {
        (each.member_code, SURVEYS[each.quota_id]) for each in outcomes if each.result_code == code
    }
    assert refused_there
    assert refused_there.isdisjoint(pairs) is is_final


async def test_another_wave_of_a_survey_is_another_survey(sim, tmp_path):
    async with sim.client() as client:
        surveys = (await client.get_quotas()).surveys
        campaign, outcomes = await night(sim, client, tmp_path, "monday", inventory=surveys)
        next_wave = [evolve(each, wave_id=each.wave_id + 1) for each in surveys]
        held = {(each.member_code, SURVEYS[each.quota_id]) for each in outcomes if each.invite}
        same, following = [
            await planned(
                campaign_of(
                    sim, client, tmp_path, inventory=each, ledger=tmp_path / name, leave_out=[campaign.ledger]
                )
            )
            for name, each in (("same", surveys), ("next", next_wave))
        ]
    assert held.isdisjoint(same)
    assert held & following


async def test_what_was_unknown_and_what_another_process_requests_now_is_left_out(sim, tmp_path):
    async with sim.client() as client:
        sim.faults.add(Fault.missing(100).on("bulk_invite"))
        campaign, first = await night(sim, client, tmp_path, "monday")
        sim.faults.clear()
        unknown = {(each.member_code, SURVEYS[each.quota_id]) for each in first}
        assert {each.status for each in first} == {"unknown"}
        second = campaign_of(sim, client, tmp_path, leave_out=[campaign.ledger])
        assert (await planned(second)).isdisjoint(unknown)

        # The second one has not sent anything. While a run has it, it will.
        third = campaign_of(sim, client, tmp_path, ledger=tmp_path / "3", leave_out=[second.ledger])
        fourth = campaign_of(sim, client, tmp_path, ledger=tmp_path / "4", leave_out=[second.ledger])
        assert not (await planned(third)).isdisjoint(await planned(second))
        with locked(second.ledger):
            pairs = await planned(fourth)
        assert pairs.isdisjoint(await planned(second))


async def test_a_store_knows_invites_ends_and_links(tmp_path, new_address):
    sim, store = new_simulator(notifying=Notifying(survey_seconds=1)), new_address()
    inbox = Inbox(store, secrets="a-secret-of-this-test")
    async with (
        inbox,
        sim.client() as client,
        client.watch_quotas() as watch,
        LiveIndex(watch, kinds=AGES) as live,
    ):
        await live.ready()
        _, first = await night(sim, client, tmp_path, "monday", panel=panel_table(sim, 60))
        invited = [outcome for outcome in first if outcome.invite]
        recorded, others = invited[::2], invited[1::2]
        await OutcomeLedger(store).invited(recorded)
        clicked = list(sim.members.values())[60]
        async with SurveyRouter(client, live, store=store) as router:
            route = await router.route(
                Member(clicked.member_code, clicked.profile, device_type=clicked.device_type_id)
            )
        assert route.invite is not None
        before = await planned(campaign_of(sim, client, tmp_path, ledger=tmp_path / "2", leave_out=[store]))
        await sim.notifications.deliver(inbox)
        after = await planned(campaign_of(sim, client, tmp_path, ledger=tmp_path / "3", leave_out=[store]))
    assert before.isdisjoint(held_by(recorded))
    assert (clicked.member_code, route.invite.survey_id) not in before
    assert not before.isdisjoint(held_by(others))
    assert after.isdisjoint(held_by(others))  # by their ends


async def test_a_service_that_names_the_original_survey_always_leaves_out_no_other_wave(sim, tmp_path):
    store = tmp_path / "store.db"
    async with Inbox(store, secrets=SECRET) as inbox, sim.client() as client:
        surveys = (await client.get_quotas()).surveys
        _, outcomes = await night(sim, client, tmp_path, "monday", inventory=surveys)
        invited = [outcome for outcome in outcomes if outcome.invite]
        for each in invited:
            place = {"SurveyId": each.invite.survey_id, "WaveId": each.invite.wave_id, "QuotaID": each.quota_id}
            fields = {**COMPLETION, **place, "UniqueCode": each.member_code}
            fields["OriginalSurveyID"] = each.invite.survey_id
            assert (await post(inbox, "completion", fields)).status == 200
        next_wave = [evolve(each, wave_id=each.wave_id + 1) for each in surveys]
        pairs = await planned(campaign_of(sim, client, tmp_path, inventory=next_wave, leave_out=[store]))
    assert pairs & held_by(invited)


@pytest.mark.parametrize("letter", ["m", "\u4e2d"])
async def test_long_member_codes_are_known_again(sim, tmp_path, letter):
    store, table = tmp_path / "store.db", panel_table(sim, 1)
    code = letter * 300
    table = table.set_column(table.schema.get_field_index("member_code"), "member_code", pa.array([code]))
    waves = {each.survey_id: each.wave_id for each in sim.inventory.surveys}
    async with sim.client() as client:
        alone = await planned(campaign_of(sim, client, tmp_path, panel=table, ledger=tmp_path / "1"))
        survey = min(survey for _, survey in alone)
        invite = Invite(survey, waves[survey], 1, 1.0, "https://x", 5, 50)
        await OutcomeLedger(store).invited([InviteOutcome(code, 1, "invited", invite)])
        more = {"panel": table, "ledger": tmp_path / "2", "leave_out": [store]}
        pairs = await planned(campaign_of(sim, client, tmp_path, **more))
    assert pairs
    assert (code, survey) not in pairs


async def test_a_ledger_from_before_settling_is_left_out_reported_and_erased_from(sim, tmp_path):
    async with sim.client() as client:
        campaign, outcomes = await night(sim, client, tmp_path, "monday")
        with closing(sqlite3.connect(campaign.ledger)) as database:
            database.execute("DROP TABLE settled")
        assert (await campaign.summary()).settled == 0
        pairs = await planned(campaign_of(sim, client, tmp_path, leave_out=[campaign.ledger]))
        assert pairs.isdisjoint(held_by(each for each in outcomes if each.invite))
        assert erase_from_ledger(campaign.ledger, outcomes[0].member_code)


async def test_a_night_that_is_away_is_said_and_one_that_was_never_planned_is_none(sim, tmp_path):
    async with sim.client() as client:
        await night(sim, client, tmp_path, "monday")
        (tmp_path / "tuesday").mkdir()
        (tmp_path / "tuesday" / "campaign.ledger").touch(mode=0o600)
        (tmp_path / "notes.txt").touch()
        assert await planned(campaign_of(sim, client, tmp_path, ledger=tmp_path / "1", leave_out=[tmp_path]))
        (tmp_path / "wednesday").symlink_to(tmp_path / "away")
        with pytest.raises(InvalidRequestError, match=r"leave_out: .*wednesday cannot be read: No such file"):
            await campaign_of(sim, client, tmp_path, ledger=tmp_path / "2", leave_out=[tmp_path]).plan()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "missing", "missing cannot be read: No such file or directory"),
        (lambda folder: folder, "holds no campaign: neither it nor a folder in it has one"),
    ],
)
async def test_what_cannot_be_left_out_is_named(sim, tmp_path, make, message):
    folder = tmp_path / "empty"
    folder.mkdir()
    async with sim.client() as client:
        with pytest.raises(InvalidRequestError, match=message):
            await campaign_of(sim, client, tmp_path, leave_out=[make(folder)]).plan()
        with pytest.raises(InvalidRequestError, match="leave_out must be a list of paths and stores"):
            campaign_of(sim, client, tmp_path, leave_out=str(folder))


async def test_a_ledger_of_another_panel_is_refused(sim, tmp_path):
    async with sim.client() as client:
        surveys = (await client.get_quotas()).surveys
        campaign, _ = await night(sim, client, tmp_path, "monday", inventory=surveys)
        other = client.with_options(panel_guid="00000000-0000-4000-8000-00000000000a")
        with pytest.raises(InvalidRequestError, match="another service or panel, whose members are others"):
            await campaign_of(sim, other, tmp_path, inventory=surveys, leave_out=[campaign.ledger]).plan()


def test_the_command_leaves_out_nights_and_the_stores_that_it_is_given(tmp_path, monkeypatch):
    with served_panel(tmp_path, monkeypatch):
        assert run("campaign", "panel.jsonl", "--out", "nights/1", "--yes").exit_code == 0
        plan = ("campaign", "panel.jsonl", "--dry-run", "--json", "--out")
        (alone,) = lines(run(*plan, "nights/2"))
        (left,) = lines(run(*plan, "nights/3", "--leave-out", "nights/1"))
        assert left["Pairs"] < alone["Pairs"]
        run("campaign", "--out", "nights/3", "--yes")
        (found,) = lines(run("campaign", "status", "nights/3", "--json"))
        assert "SURVEY_TAKEN" not in str(found)
        assert run("outcomes", "--store", "store.db", "--invites", "nights/1/campaign.ledger").exit_code == 0
        (by_default,) = lines(run(*plan, "nights/4", "--notifications", "store.db"))
        (asked_not_to,) = lines(run(*plan, "nights/5", "--notifications", "store.db", "--leave-out", "none"))
        assert by_default["Pairs"] < asked_not_to["Pairs"]
        wrong = run(*plan, "nights/6", "--leave-out", "nights/0")
        assert wrong.exit_code == 2
        assert "nights/0 cannot be read: No such file or directory" in " ".join(wrong.stderr.split())
        both = run(*plan, "nights/6", "--leave-out", "nights/1", "--leave-out", "None")
        assert (both.exit_code, "or none alone" in both.stderr) == (2, True)
