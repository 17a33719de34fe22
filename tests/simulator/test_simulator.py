"""The five endpoints of the simulator, in process, with httpx alone."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import anyio
import attrs
import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sampling_async import PartnerSettings, Quotas, RecontactMembers, from_json
from sampling_async.simulator import Participation, SimulatedMember, Simulator, generate_inventory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sampling_async import Quota, Survey


# Without lone surrogates, which no URL can hold, and without "." and "..", which are path segments.
ANY_CODE = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20).filter(
    lambda text: text not in {".", ".."}
)
SETTINGS = "/IntegratedPanelService/api/Settings"


def http(sim: Simulator, **headers: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=sim.transport(), base_url=sim.base_url, headers={"API_AUTH_KEY": sim.api_key, **headers}
    )


def panel_path(sim: Simulator, rest: str) -> str:
    return f"/IPExternalSamplingService/ExternalSample/{sim.panel_guid}/{rest}"


async def bulk(sim: Simulator, member_code: str, quota_ids: Sequence[int]) -> list[dict[str, Any]]:
    async with http(sim) as client:
        path = panel_path(sim, f"{quote(member_code, safe='')}/Invites")
        response = await client.post(path, json={"QuotaIDs": list(quota_ids)})
        assert response.status_code == 200, response.text
        return response.json()["Invites"]


async def codes(sim: Simulator, member_code: str, quota_ids: Sequence[int]) -> list[int]:
    return [item["ResultCode"] for item in await bulk(sim, member_code, quota_ids)]


def quotas_of(sim: Simulator) -> list[Quota]:
    return [quota for survey in sim.inventory.surveys for quota in survey.quotas]


def open_to_all(survey: Survey) -> Survey:
    """Return a survey without any condition."""
    everyone = tuple(attrs.evolve(quota, layers=()) for quota in survey.quotas)
    return attrs.evolve(
        survey, quotas=everyone, device_type_ids=(1, 2, 3), survey_wave_exclusions=(), is_survey_recontact=False
    )


def easy(*, surveys: int = 3, seed: int = 0) -> Quotas:
    """Return an inventory that every member fits."""
    inventory = generate_inventory(seed, surveys=surveys)
    return attrs.evolve(inventory, surveys=tuple(open_to_all(survey) for survey in inventory.surveys))


def first_quota(inventory: Quotas, **changes: Any) -> Quotas:
    """Return an inventory of one survey with one quota, with changes to the quota."""
    survey = inventory.surveys[0]
    quota = attrs.evolve(survey.quotas[0], **changes)
    return attrs.evolve(inventory, surveys=(attrs.evolve(survey, quotas=(quota,)),))


async def test_get_quotas_returns_the_live_inventory_in_the_order_of_real_bodies():
    sim = Simulator(surveys=8, members=1)
    async with http(sim) as client:
        response = await client.get(panel_path(sim, "Quotas"))
    assert from_json(Quotas, response.content) == sim.inventory
    assert list(response.json()) == ["Surveys", "CountryID", "CacheExpires"]
    assert response.json()["CacheExpires"] == "2026-01-15T09:30:12.5753276Z"
    assert {"SurveyTopic", "IsTqsSurvey"} <= response.json()["Surveys"][0].keys()


async def test_get_quotas_leaves_routable_questions_out_on_request():
    sim = Simulator(surveys=60, members=1)
    async with http(sim) as client:
        every = await client.get(panel_path(sim, "Quotas"), params={"includeRoutables": "true"})
        some = await client.get(panel_path(sim, "Quotas"), params={"includeRoutables": "False"})
        odd = await client.get(panel_path(sim, "Quotas"), params={"includeRoutables": "perhaps"})
    assert '"IsRoutable":true' in every.text
    assert '"IsRoutable":true' not in some.text
    assert odd.status_code == 400


@pytest.mark.parametrize(
    ("headers", "status"),
    [({"API_AUTH_KEY": "wrong"}, 403), ({"API_AUTH_KEY": ""}, 403), ({}, 200)],
)
async def test_a_missing_or_wrong_key_is_forbidden(headers: dict[str, str], status: int):
    sim = Simulator(surveys=1, members=1)
    async with http(sim, **headers) as client:
        assert (await client.get(panel_path(sim, "Quotas"))).status_code == status
        assert (await client.get(SETTINGS, params={"partnerGUID": sim.panel_guid})).status_code == status


async def test_an_unknown_panel_does_not_exist_and_a_key_opens_its_own_panel_only():
    sim = Simulator(surveys=1, members=1)
    other = sim.add_panel(members=2)
    async with http(sim) as client:
        unknown = await client.get(SETTINGS, params={"partnerGUID": "11111111-2222-4333-8444-555555555555"})
        none = await client.get(SETTINGS)
        foreign = await client.get(SETTINGS, params={"partnerGUID": other.panel_guid})
        own = await client.get(
            SETTINGS, params={"partnerGUID": other.panel_guid.upper()}, headers={"API_AUTH_KEY": other.api_key}
        )
    assert unknown.status_code == 400
    assert unknown.json() == {"Result": "PANEL_DOES_NOT_EXIST", "ResultCode": 3}
    assert (none.status_code, foreign.status_code, own.status_code) == (400, 403, 200)
    assert len(sim.panels) == 2
    assert not sim.panels[0].members.keys() & other.members.keys()


async def test_the_panels_of_a_partner_share_a_key():
    sim = Simulator(surveys=1, members=1)
    other = sim.add_panel(members=2, api_key=sim.api_key)
    async with http(sim) as client:
        for panel in (sim.panels[0], other):
            assert (await client.get(SETTINGS, params={"partnerGUID": panel.panel_guid})).status_code == 200


async def test_settings_hold_every_name_of_the_contract():
    sim = Simulator(surveys=1, members=1)
    async with http(sim) as client:
        response = await client.get(SETTINGS, params={"partnerGUID": sim.panel_guid})
    read = from_json(PartnerSettings, response.content)
    assert len(read) == len({setting.name for setting in read}) == 21
    assert read.panel_guid == sim.panel_guid
    assert read.qualified_url is not None
    assert read.qualified_url.for_member("a b").endswith("=a%20b")
    assert (read.max_surveys_to_fetch, read.quota_notifications_enabled) == (0, True)
    assert read.max_surveys_reached_url is None
    assert read.reference_data_api_auth_key not in {None, sim.api_key}
    assert all(setting.value is None or isinstance(setting.value, str) for setting in read)


async def test_a_bulk_invite_has_an_item_for_every_id_in_order_even_repeated_ones():
    sim = Simulator(inventory=easy(), members=1)
    quota = quotas_of(sim)[0].quota_id
    items = await bulk(sim, "m000001", [quota, 77, quota])
    assert [(item["QuotaID"], item["ResultCode"], item["Result"]) for item in items] == [
        (quota, 1, "SUCCESS"),
        (77, 10, "NO_QUOTA_ID"),
        (quota, 38, "SURVEY_TAKEN"),
    ]
    assert items[0]["Invite"]["URL"] == sim.ledger.invites[0].url
    assert items[0]["Invite"]["SurveyID"] == sim.ledger.invites[0].survey_id
    assert items[1]["Invite"] is None


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"null", b"[1]", b'{"QuotaIDs":null}', b'{"QuotaIDs":["1"]}', b'{"QuotaIDs":[true]}', b"\xff"]
    + [json.dumps({"QuotaIDs": ids}).encode() for ids in ([], [2**63], [1.5], list(range(101)))],
)
async def test_a_bulk_invite_that_breaks_the_contract_is_refused_as_a_whole(body: bytes):
    sim = Simulator(inventory=easy(), members=1)
    async with http(sim) as client:
        response = await client.post(panel_path(sim, "m000001/Invites"), content=body)
    assert response.status_code == 400
    assert response.json()["ResultCode"] in {10, 20}


async def test_a_hundred_ids_are_allowed():
    sim = Simulator(inventory=easy(), members=1)
    assert await codes(sim, "m000001", range(100)) == [10] * 100


async def test_a_member_gets_only_one_quota_of_a_survey():
    inventory = next(i for seed in range(99) if len((i := easy(seed=seed, surveys=2)).surveys[0].quotas) > 1)
    sim = Simulator(inventory=inventory, members=2)
    first, second = (quota.quota_id for quota in inventory.surveys[0].quotas[:2])
    other = inventory.surveys[1].quotas[0].quota_id
    assert await codes(sim, "m000001", [first, second, other]) == [1, 38, 1]
    assert await codes(sim, "m000002", [second]) == [1]


async def test_a_quota_fills_with_invites_and_leaves_the_inventory():
    sim = Simulator(inventory=first_quota(easy(), estimated_completes_remaining=2), members=3)
    quota = quotas_of(sim)[0]
    assert await codes(sim, "m000001", [quota.quota_id]) == [1]
    assert quotas_of(sim)[0].estimated_completes_remaining == 1
    assert await codes(sim, "m000002", [quota.quota_id]) == [1]
    assert sim.inventory.surveys == ()
    assert await codes(sim, "m000003", [quota.quota_id]) == [28]
    sim.open_quota(quota.quota_id, remaining=1)
    assert await codes(sim, "m000003", [quota.quota_id]) == [1]


async def test_a_survey_can_be_full_before_its_quotas_are():
    inventory = easy()
    limited = tuple(attrs.evolve(survey, estimated_completes_remaining=1) for survey in inventory.surveys)
    sim = Simulator(inventory=attrs.evolve(inventory, surveys=limited), members=2)
    quota_id = quotas_of(sim)[0].quota_id
    assert await codes(sim, "m000001", [quota_id]) == [1]
    assert await codes(sim, "m000002", [quota_id]) == [28]


async def test_a_closed_quota_is_not_live_until_it_is_opened():
    sim = Simulator(inventory=easy(), members=1)
    quota_id = quotas_of(sim)[0].quota_id
    sim.close_quota(quota_id)
    assert quota_id not in {quota.quota_id for quota in quotas_of(sim)}
    assert await codes(sim, "m000001", [quota_id]) == [9]
    sim.open_quota(quota_id)
    assert await codes(sim, "m000001", [quota_id]) == [1]
    with pytest.raises(KeyError, match="quota 5 is not in the inventory"):
        sim.close_quota(5)


async def test_devices_and_wave_exclusions_and_unknown_members_are_refused():
    inventory = generate_inventory(1, surveys=60)
    survey = next(s for s in inventory.surveys if s.survey_wave_exclusions and not s.is_survey_recontact)
    exclusion = survey.survey_wave_exclusions[0]
    everyone = attrs.evolve(open_to_all(survey), survey_wave_exclusions=(exclusion,), device_type_ids=(1,))
    took = Participation(exclusion.survey_id, exclusion.wave_id or 5, exclusion.participation_status_ids[0])
    members = [
        SimulatedMember("phone", {}, device_type_id=2),
        SimulatedMember("took", {}, participations=(took,)),
        SimulatedMember("ended otherwise", {}, participations=(attrs.evolve(took, status_id=77),)),
    ]
    sim = Simulator(inventory=attrs.evolve(inventory, surveys=(everyone,)), members=members)
    quota_id = everyone.quotas[0].quota_id
    assert await codes(sim, "phone", [quota_id]) == [31]
    assert await codes(sim, "took", [quota_id]) == [30]
    assert await codes(sim, "nobody", [quota_id, 5]) == [12, 12]
    assert await codes(sim, "ended otherwise", [quota_id]) == [1]


async def test_eligible_predicts_the_result_code_and_creates_nothing():
    sim = Simulator(3, surveys=10, members=15)
    seen: Counter[int] = Counter()
    for member_code in sim.members:
        for quota in quotas_of(sim):
            foretold = sim.eligible(member_code, quota.quota_id)
            assert await codes(sim, member_code, [quota.quota_id]) == [foretold]
            seen[foretold] += 1
    assert seen[1] == len(sim.ledger.invites)
    assert {1, 16, 38} <= seen.keys()


async def test_generate_invite_gives_an_invite_or_a_400_labelled_as_text():
    sim = Simulator(inventory=easy(), members=1)
    quota_id = quotas_of(sim)[0].quota_id
    async with http(sim) as client:
        made = await client.get(panel_path(sim, f"m000001/Invite/{quota_id}"))
        again = await client.get(panel_path(sim, f"m000001/Invite/{quota_id}"))
        unknown = await client.get(panel_path(sim, "m000001/Invite/5"))
        no_number = await client.get(panel_path(sim, "m000001/Invite/x"))
        nobody = await client.get(panel_path(sim, f"nobody/Invite/{quota_id}"))
    assert made.status_code == 200
    assert "SurveyId" in made.json()
    assert made.json()["URL"] == sim.ledger.invites[0].url
    assert sim.ledger.invites[0].endpoint == "generate_invite"
    refused = [again, unknown, no_number, nobody]
    assert [response.json()["ResultCode"] for response in refused] == [38, 10, 10, 12]
    assert {(r.status_code, r.headers["content-type"]) for r in refused} == {(400, "application/plaintext")}


async def test_recontact_members_come_in_pages_ordered_and_complete():
    sim = Simulator(surveys=5, members=50, recontact_page_size=4)
    quota_id = sim.recontact_quota_ids[0]
    wanted = ["b", "a/b c%é", "A", "10", "9", "m1", "m10", "m2", "zz"]
    sim.set_recontact_members(quota_id, wanted)
    read: list[str] = []
    query: dict[str, Any] = {}
    async with http(sim) as client:
        while True:
            response = await client.get(panel_path(sim, f"Recontact/{quota_id}/MemberCodes"), params=query)
            page = from_json(RecontactMembers, response.content)
            assert page.max_results == len(page.member_codes) <= 4
            read += page.member_codes
            if not page.has_additional_members:
                break
            query = {"lastMemberCodeReceived": read[-1]}
        single = await client.get(
            panel_path(sim, f"Recontact/{quota_id}/MemberCodes"), params={"maxResults": 1}
        )
    assert read == sorted(wanted)
    assert single.json() == {"MaxResults": 1, "HasAdditionalMembers": True, "MemberCodes": ["10"]}


async def test_recontact_refuses_other_quotas_and_odd_numbers():
    sim = Simulator(surveys=5, members=50)
    recontact = sim.recontact_quota_ids[0]
    ordinary = next(q.quota_id for q in quotas_of(sim) if q.quota_id not in sim.recontact_quota_ids)
    async with http(sim) as client:
        for quota_id, query, code in [
            (5, {}, 10),
            ("x", {}, 10),
            (ordinary, {}, 6),
            (recontact, {"maxResults": "0"}, 20),
            (recontact, {"maxResults": "9" * 5000}, 20),
        ]:
            response = await client.get(panel_path(sim, f"Recontact/{quota_id}/MemberCodes"), params=query)
            assert (response.status_code, response.json()["ResultCode"]) == (400, code)
    with pytest.raises(ValueError, match="does not belong to a recontact survey"):
        sim.set_recontact_members(ordinary, [])


async def test_a_recontact_quota_is_for_the_members_on_its_list():
    sim = Simulator(surveys=5, members=50)
    quota_id = sim.recontact_quota_ids[0]
    sim.set_recontact_members(quota_id, [])
    off = {sim.eligible(member_code, quota_id) for member_code in sim.members}
    sim.set_recontact_members(quota_id, sim.members)
    on = {sim.eligible(member_code, quota_id) for member_code in sim.members}
    assert 17 in off
    assert 1 not in off
    assert 17 not in on


@settings(max_examples=60)
@given(member_code=ANY_CODE)
def test_a_member_code_of_any_characters_reaches_the_service(member_code: str):
    sim = Simulator(inventory=easy(surveys=1), members=[SimulatedMember(member_code)])

    async def ask() -> list[int]:
        return await codes(sim, member_code, [quotas_of(sim)[0].quota_id])

    assert anyio.run(ask) == [1]
    assert sim.ledger.invites[0].member_code == member_code


async def test_segments_are_decoded_once_and_not_split_by_an_encoded_slash():
    members = [SimulatedMember("a/b c%é"), SimulatedMember("a%2Fb")]
    sim = Simulator(inventory=easy(surveys=2), members=members)
    quota_id = quotas_of(sim)[0].quota_id
    async with http(sim) as client:
        for segment in ("a%2Fb%20c%25%C3%A9", "a%252Fb"):
            response = await client.get(panel_path(sim, f"{segment}/Invite/{quota_id}"))
            assert response.status_code == 200, response.text
    assert [entry.member_code for entry in sim.ledger.invites] == ["a/b c%é", "a%2Fb"]


async def test_large_bodies_are_compressed_if_the_client_accepts_it():
    sim = Simulator(surveys=8, members=1)
    plain = Simulator(surveys=8, members=1, gzip=False)
    async with http(sim) as client, client.stream("GET", panel_path(sim, "Quotas")) as response:
        raw = b"".join([part async for part in response.aiter_raw()])
    async with http(sim, **{"Accept-Encoding": "identity"}) as client:
        unpacked = await client.get(panel_path(sim, "Quotas"))
    async with http(plain) as client:
        never = await client.get(panel_path(plain, "Quotas"))
    assert response.headers["content-encoding"] == "gzip"
    assert gzip.decompress(raw) == unpacked.content == never.content
    assert "content-encoding" not in unpacked.headers
    assert "content-encoding" not in never.headers


async def test_the_same_seed_and_requests_give_the_same_bytes():
    async def bodies(sim: Simulator) -> list[bytes]:
        async with http(sim) as client:
            answers = [await client.get(panel_path(sim, "Quotas"))]
            ids = [quota.quota_id for quota in quotas_of(sim)]
            for member_code in list(sim.members)[:5]:
                path = panel_path(sim, f"{member_code}/Invites")
                answers.append(await client.post(path, json={"QuotaIDs": ids[:100]}))
            answers.append(await client.get(SETTINGS, params={"partnerGUID": sim.panel_guid}))
            return [answer.content for answer in answers]

    assert await bodies(Simulator(5)) == await bodies(Simulator(5))
    assert Simulator(5).panel_guid != Simulator(6).panel_guid


def test_a_demo_shows_invites_and_several_kinds_of_refusal():
    sim = Simulator()
    seen = Counter(sim.eligible(member, quota.quota_id) for member in sim.members for quota in quotas_of(sim))
    assert 0.05 < seen[1] / seen.total() < 0.3
    assert {1, 16, 17, 30, 31, 41} <= seen.keys()


def test_quota_ids_and_member_codes_must_be_unique():
    inventory = easy()
    with pytest.raises(ValueError, match="occurs twice"):
        Simulator(inventory=attrs.evolve(inventory, surveys=inventory.surveys * 2))
    with pytest.raises(ValueError, match="occurs twice"):
        Simulator(members=[SimulatedMember("a"), SimulatedMember("a")])


def test_the_repr_shows_state_and_no_key():
    sim = Simulator(surveys=5, members=3)
    assert repr(sim).startswith("<Simulator seed=0 quotas=")
    assert sim.api_key not in repr(sim) + repr(sim.panels)


async def test_repeated_requests_do_not_rebuild_the_inventory():
    """The body of Get Quotas is the same object until a count moves."""
    sim = Simulator(surveys=5, members=1)
    first = sim._live.body(include_routables=True)
    assert sim._live.body(include_routables=True) is first
    sim.close_quota(quotas_of(sim)[0].quota_id)
    assert sim._live.body(include_routables=True) is not first


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ({"surveys": -1}, "at least 0"),
        ({"members": -1}, "at least 0"),
        ({"recontact_page_size": 0}, "at least 1"),
        ({"keep_requests": -1}, "keep_requests must be a whole number of at least 0, not -1"),
    ],
)
def test_invalid_numbers_are_refused(arguments, rule):
    with pytest.raises(ValueError, match=rule):
        Simulator(**arguments)
