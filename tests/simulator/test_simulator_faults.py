"""Faults and latency, in process: what a client sees, and what the ledger holds."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

import anyio.lowlevel
import attrs
import httpx
import pytest
from doubles import FakeTime

from sampling_async import BadRequestError, ResultCode
from sampling_async.simulator import Fault, FaultPlan, Latency, Simulator, generate_inventory, read_faults

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sampling_async import Quotas


class Naps:
    """A sleep that takes no time and records the requested seconds."""

    def __init__(self) -> None:
        self.taken: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.taken.append(seconds)
        await anyio.lowlevel.checkpoint()


def easy() -> Quotas:
    """Return an inventory that every member fits."""
    inventory = generate_inventory(0, surveys=8)
    surveys = (
        attrs.evolve(
            survey,
            quotas=tuple(attrs.evolve(quota, layers=()) for quota in survey.quotas[:1]),
            device_type_ids=(1, 2, 3),
            survey_wave_exclusions=(),
        )
        for survey in inventory.surveys
    )
    return attrs.evolve(inventory, surveys=tuple(surveys))


def simulator(*faults: Fault, **arguments: Any) -> Simulator:
    sim = Simulator(**{"inventory": easy(), "members": 3, "sleep": Naps(), **arguments}, faults=faults)
    for quota_id in sim.recontact_quota_ids:
        sim.set_recontact_members(quota_id, sim.members)
    return sim


def ids_of(sim: Simulator) -> list[int]:
    return [quota.quota_id for survey in sim.inventory.surveys for quota in survey.quotas]


async def ask(sim: Simulator, *, read: float | None = 5.0) -> httpx.Response:
    """Send one bulk invite for all quotas and one unknown ID."""
    path = f"/IPExternalSamplingService/ExternalSample/{sim.panel_guid}/m000001/Invites"
    headers = {"API_AUTH_KEY": sim.api_key}
    timeout = httpx.Timeout(5.0, read=read)
    async with httpx.AsyncClient(transport=sim.transport(), base_url=sim.base_url, timeout=timeout) as client:
        return await client.post(path, json={"QuotaIDs": [*ids_of(sim), 5]}, headers=headers)


async def items(sim: Simulator) -> list[dict[str, Any]]:
    return (await ask(sim)).json()["Invites"]


async def page(sim: Simulator, **query: Any) -> dict[str, Any]:
    path = f"/IPExternalSamplingService/ExternalSample/{sim.panel_guid}/Recontact"
    headers = {"API_AUTH_KEY": sim.api_key}
    async with httpx.AsyncClient(transport=sim.transport(), base_url=sim.base_url, headers=headers) as client:
        url = f"{path}/{sim.recontact_quota_ids[0]}/MemberCodes"
        return (await client.get(url, params=query)).json()


async def test_a_status_fault_before_the_work_leaves_only_the_request_in_the_ledger():
    sim = simulator(Fault.status(503, retry_after=2))
    response = await ask(sim)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "2"
    assert response.json() == {"Result": "TECHNICAL_ERROR", "ResultCode": 36}
    assert not sim.ledger.invites
    assert [(record.status, record.is_processed) for record in sim.ledger.requests] == [(503, False)]


async def test_a_status_fault_after_the_work_hides_real_invites():
    sim = simulator(Fault.status(500, html=True, when="after"))
    response = await ask(sim)
    assert response.headers["content-type"].startswith("text/html")
    assert len(sim.ledger.invites) == 8
    assert [(record.status, record.is_processed) for record in sim.ledger.requests] == [(500, True)]


@pytest.mark.parametrize(
    ("fault", "error", "invites"),
    [
        (Fault.cut(), httpx.RemoteProtocolError, 0),
        (Fault.cut(reset=True), httpx.ReadError, 0),
        (Fault.cut(when="after"), httpx.RemoteProtocolError, 8),
        (Fault.cut(when="after", reset=True), httpx.ReadError, 8),
        (Fault.cut(when="middle"), httpx.RemoteProtocolError, 8),
    ],
)
async def test_a_cut_raises_what_a_socket_raises(fault: Fault, error: type[Exception], invites: int):
    sim = simulator(fault)
    with pytest.raises(error):
        await ask(sim)
    assert len(sim.ledger.invites) == invites
    assert sim.ledger.requests[0].is_processed is bool(invites)
    assert sim.ledger.requests[0].status == (200 if fault.when == "middle" else None)


async def test_a_cut_in_the_middle_gives_the_status_and_half_of_the_body():
    sim = simulator(Fault.cut(when="middle"), gzip=False)
    path = f"/IPExternalSamplingService/ExternalSample/{sim.panel_guid}/Quotas"
    headers = {"API_AUTH_KEY": sim.api_key}
    received = b""
    async with httpx.AsyncClient(transport=sim.transport(), base_url=sim.base_url) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            async with client.stream("GET", path, headers=headers) as response:
                assert response.status_code == 200
                async for part in response.aiter_raw():
                    received += part
    assert len(received) == int(response.headers["content-length"]) // 2


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_delay_beyond_the_read_timeout_times_out_and_the_work_is_done(when: Literal["before", "after"]):
    naps = Naps()
    sim = simulator(Fault.delay(30, when=when), sleep=naps)
    with pytest.raises(httpx.ReadTimeout):
        await ask(sim, read=0.5)
    assert naps.taken == [0.5]
    assert len(sim.ledger.invites) == 8


async def test_a_client_that_waits_gets_its_response_after_all_delays():
    naps = Naps()
    sim = simulator(
        Fault.delay(1, when="before"), Fault.delay(2), Fault.delay(3), latency=Latency(a=0.5), sleep=naps
    )
    assert (await ask(sim, read=None)).status_code == 200
    assert naps.taken == [1, 5.5]


async def test_delays_add_up_until_something_is_sent():
    naps = Naps()
    sim = simulator(Fault.delay(3, when="before"), Fault.delay(3), sleep=naps)
    with pytest.raises(httpx.ReadTimeout):
        await ask(sim, read=5)
    assert naps.taken == [3, 2]


async def test_a_drip_sends_slices_and_restarts_the_read_timeout():
    naps = Naps()
    sim = simulator(Fault.drip(slices=5, pause=4), sleep=naps)
    response = await ask(sim, read=5)
    assert len(response.json()["Invites"]) == 9
    assert naps.taken == [4] * 4
    sim = simulator(Fault.drip(slices=5, pause=6), sleep=Naps())
    with pytest.raises(httpx.ReadTimeout):
        await ask(sim, read=5)


async def test_the_order_of_items_is_turned_or_shuffled():
    straight = [item["QuotaID"] for item in await items(simulator())]
    turned = [item["QuotaID"] for item in await items(simulator(Fault.wrong_order()))]
    shuffled = [item["QuotaID"] for item in await items(simulator(Fault.wrong_order(shuffled=True)))]
    assert turned == straight[::-1]
    assert shuffled not in (straight, turned)
    assert sorted(shuffled) == sorted(straight)


async def test_missing_items_were_processed():
    sim = simulator(Fault.missing(3))
    assert len(await items(sim)) == 6
    assert len(sim.ledger.invites) == 8


async def test_extra_items_were_neither_requested_nor_created():
    sim = simulator(Fault.extra(2))
    answered = await items(sim)
    extra = [item for item in answered if item["QuotaID"] not in {*ids_of(sim), 5}]
    assert len(answered) == 11
    assert len(extra) == 2
    assert not {item["Invite"]["URL"] for item in extra} & {entry.url for entry in sim.ledger.invites}


async def test_a_wrong_invite_differs_in_the_inner_id_only():
    answered = [item for item in await items(simulator(Fault.wrong_invite())) if item["Invite"]]
    assert len(answered) == 8
    assert all(item["QuotaID"] != item["Invite"]["QuotaID"] for item in answered)


async def test_contradicting_items_are_sent():
    sim = simulator(Fault.contradiction())
    assert {(item["ResultCode"], item["Invite"]) for item in await items(sim)} == {(1, None)}
    sim = simulator(Fault.contradiction("failure_with_invite"))
    answered = await items(sim)
    assert Counter(item["ResultCode"] for item in answered) == {9: 8, 10: 1}
    urls = {item["Invite"]["URL"] for item in answered}
    assert len(urls - {entry.url for entry in sim.ledger.invites}) == 1


@pytest.mark.parametrize(
    ("fault", "content", "content_type"),
    [
        (Fault.html(), b"<!DOCTYPE", "text/html"),
        (Fault.null(), b"null", "application/json"),
        (Fault.empty(), b"", "application/json"),
        (Fault.body(b"{", content_type="text/plain"), b"{", "text/plain"),
        (Fault.plaintext(), b'{"Invites"', "application/plaintext"),
    ],
)
async def test_a_200_can_have_another_body(fault: Fault, content: bytes, content_type: str):
    sim = simulator(fault)
    response = await ask(sim)
    assert response.status_code == 200
    assert response.content.startswith(content)
    assert response.headers["content-type"].startswith(content_type)
    assert len(sim.ledger.invites) == 8


async def test_a_stuck_cursor_repeats_the_first_page():
    sim = simulator(Fault.stuck_cursor().on("recontact_members", after=1))
    first = await page(sim, maxResults=1)
    second = await page(sim, maxResults=1, lastMemberCodeReceived=first["MemberCodes"][0])
    assert second == {**first, "HasAdditionalMembers": True}


async def test_an_empty_page_says_there_is_more():
    assert await page(simulator(Fault.empty_page())) == {
        "MaxResults": 0,
        "HasAdditionalMembers": True,
        "MemberCodes": [],
    }


async def test_alterations_follow_one_another_and_the_first_replacement_counts():
    answered = await items(simulator(Fault.missing(1), Fault.extra(3), Fault.plaintext()))
    assert len(answered) == 9 - 1 + 3
    assert (await ask(simulator(Fault.status(500), Fault.cut()))).status_code == 500


async def test_delays_and_cuts_work_under_another_server():
    """`sim.app` is an ordinary ASGI application; only the servers of the simulator can drop a connection."""
    naps = Naps()
    sim = simulator(Fault.delay(2), Fault.cut(when="after").on(after=1), sleep=naps)
    path = f"/IPExternalSamplingService/ExternalSample/{sim.panel_guid}/Quotas"
    headers = {"API_AUTH_KEY": sim.api_key}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(sim.app), base_url=sim.base_url) as client:
        assert (await client.get(path, headers=headers)).status_code == 200
        with pytest.raises(ConnectionAbortedError):
            await client.get(path, headers=headers)
    assert naps.taken == [2, 2]


async def test_generate_invite_can_name_the_wrong_quota_too():
    sim = simulator(Fault.wrong_invite())
    quota_id = ids_of(sim)[0]
    path = f"/IPExternalSamplingService/ExternalSample/{sim.panel_guid}/m000001/Invite/{quota_id}"
    headers = {"API_AUTH_KEY": sim.api_key}
    async with httpx.AsyncClient(transport=sim.transport(), base_url=sim.base_url) as client:
        answered = (await client.get(path, headers=headers)).json()
    assert answered["QuotaID"] != quota_id
    assert sim.ledger.invites[0].quota_id == quota_id


def strikes(fault: Fault, requests: int = 12, *, seed: int = 0) -> Iterator[int]:
    plan = FaultPlan([fault], seed=seed)
    return (number for number in range(1, requests + 1) if plan.draw("bulk_invite"))


@pytest.mark.parametrize(
    ("fault", "struck"),
    [
        (Fault.cut(), list(range(1, 13))),
        (Fault.cut().on(every=5), [5, 10]),
        (Fault.cut().on(after=10), [11, 12]),
        (Fault.cut().on(times=2), [1, 2]),
        (Fault.cut().on(every=2, after=3, times=3), [5, 7, 9]),
        (Fault.cut().on("get_quotas"), []),
        (Fault.cut().on(times=0), []),
        (Fault.cut().on(probability=0.0), []),
        (Fault.cut().on(probability=1.0), list(range(1, 13))),
    ],
)
def test_a_fault_affects_the_requests_it_is_limited_to(fault: Fault, struck: list[int]):
    assert list(strikes(fault)) == struck


def test_a_chance_follows_the_seed():
    fault = Fault.cut().on(probability=0.3)
    assert list(strikes(fault, 200)) == list(strikes(fault, 200))
    assert list(strikes(fault, 200)) != list(strikes(fault, 200, seed=1))
    assert 30 < len(list(strikes(fault, 200))) < 90


def test_a_fault_counts_requests_of_its_endpoint_only_and_faults_can_change():
    plan = FaultPlan([Fault.cut().on("get_quotas", after=1)])
    assert not plan.draw("bulk_invite")
    assert not plan.draw("get_quotas")
    assert plan.draw("get_quotas") == (Fault.cut().on("get_quotas", after=1),)
    assert [count for _, count in plan.struck()] == [1]
    assert len(plan) == 1
    plan.clear()
    assert not plan.draw("get_quotas")
    plan.add(Fault.html(), Fault.plaintext())
    assert len(plan.draw("get_settings")) == 2
    assert "kind='plaintext'" in repr(plan)


@pytest.mark.parametrize("limits", [{"every": 0}, {"after": -1}, {"times": -1}])
def test_limits_out_of_range_are_refused(limits: dict[str, int]):
    with pytest.raises(ValueError, match="must be >="):
        Fault.cut().on(**limits)


def test_a_call_costs_a_and_b_for_each_id():
    assert Latency(0.5, 0.01).seconds(100) == pytest.approx(1.5)
    assert Latency(0.5, 0.01).seconds(0) == 0.5
    with pytest.raises(ValueError, match="workers"):
        Latency(workers=0)


async def test_calls_wait_in_turn_for_a_worker():
    now, naps = 100.0, Naps()
    sim = simulator(latency=Latency(a=1.0, workers=2), sleep=naps, clock=lambda: now)
    for _ in range(5):
        await ask(sim)
    now = 102.5
    for _ in range(2):
        await ask(sim)
    assert naps.taken == [1, 1, 2, 2, 3, 1, 1.5]


async def test_without_a_number_of_workers_no_call_waits_for_another():
    naps = Naps()
    sim = simulator(latency=Latency(a=1.0), sleep=naps, clock=lambda: 100.0)
    for _ in range(3):
        await ask(sim)
    assert naps.taken == [1, 1, 1]


async def test_a_bulk_invite_costs_by_its_ids_and_other_calls_as_one():
    naps = Naps()
    sim = simulator(latency=Latency(a=1, b=10), sleep=naps)
    await ask(sim, read=None)
    assert naps.taken == [91]
    sim = simulator(latency=Latency(a=1, b=0.5), sleep=(naps := Naps()))
    await page(sim)
    assert naps.taken == [1.5]


@pytest.mark.parametrize(
    "fault",
    [
        Fault.status(503, retry_after=0),
        Fault.status(500, when="after"),
        Fault.cut(),
        Fault.cut(when="after"),
        Fault.cut(when="middle", reset=True),
        Fault.delay(60),
        Fault.html(),
        Fault.null(),
        Fault.missing(2),
        Fault.extra(2),
        Fault.wrong_order(shuffled=True),
        Fault.wrong_invite(),
        Fault.contradiction(),
        Fault.contradiction("failure_with_invite"),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.when}-{fault.variant}",
)
async def test_the_outcomes_of_the_client_are_true_under_every_fault(fault: Fault):
    sim = simulator(fault.on("bulk_invite", every=2), inventory=None, surveys=10)
    outcomes_seen: list[Any] = []
    time = FakeTime()
    async with sim.client(clock=time.clock, sleep=time.sleep) as client:
        ids = [quota.quota_id for survey in (await client.get_quotas()).surveys for quota in survey.quotas]
        for member_code in sim.members:
            outcomes_seen += await client.bulk_invite(member_code, ids, chunk_size=7)
    verdict = sim.ledger.check(outcomes_seen)
    assert verdict.ok, verdict
    assert sim.faults.struck()[0][1] > 0


def test_an_endpoint_that_does_not_exist_is_refused():
    with pytest.raises(
        ValueError, match="no endpoint 'bulk_invites'; the endpoints are get_quotas, bulk_invite"
    ):
        Fault.status(503).on("bulk_invites")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Fault.cut(when="during"),
        lambda: Fault.status(503, when="middle"),
        lambda: Fault.delay(1, when="middle"),
        lambda: Fault.cut().on(probability=5),
        lambda: Fault.drip(slices=0),
        lambda: Fault.missing(-1),
    ],
)
def test_an_invalid_fault_is_refused(make):
    with pytest.raises(ValueError, match=r"when|probability|slices|items"):
        make()


def test_limits_of_a_fault_add_up():
    fault = Fault.cut().on("bulk_invite").on(every=2)
    assert (fault.endpoint, fault.every, fault.times) == ("bulk_invite", 2, None)


# --- Refusals of a member and a quota


async def test_a_quota_is_refused_as_one_item_of_a_bulk():
    sim = simulator()
    wanted, *others = ids_of(sim)
    sim.faults.add(Fault.refusal(39).on(quota_id=wanted))
    outcomes_seen = {item["QuotaID"]: item["ResultCode"] for item in await items(sim)}
    assert outcomes_seen.pop(wanted) == 39
    assert [outcomes_seen[quota_id] for quota_id in others] == [1] * len(others)
    assert sim.ledger.count("m000001", wanted) == 0
    assert sim.ledger.count("m000001", others[0]) == 1


async def test_a_member_is_refused_and_others_are_not():
    sim = simulator(Fault.refusal(14).on(member_code="m000001"), Fault.refusal(22).on(quota_id=5))
    assert {item["QuotaID"] == 5: item["ResultCode"] for item in await items(sim)} == {True: 22, False: 14}
    async with sim.client() as client:
        result = await client.bulk_invite("m000002", ids_of(sim))
        assert len(result.invited) == len(result)
        with pytest.raises(BadRequestError, match="MEMBER_BLOCKED"):
            await client.generate_invite("m000001", ids_of(sim)[0])
        with pytest.raises(BadRequestError, match="NO_QUOTA_ID"):
            await client.generate_invite("m000002", 7)
        await client.get_settings()
    assert not any(entry.member_code == "m000001" for entry in sim.ledger.invites)


async def test_refusals_count_the_requests_they_fit():
    sim = simulator(members=1)
    wanted = ids_of(sim)[0]
    sim.faults.add(Fault.refusal(36).on("bulk_invite", quota_id=wanted, times=1))
    async with sim.client() as client:
        await client.bulk_invite("m000001", ids_of(sim)[1:])
        codes = [(await client.bulk_invite("m000001", [wanted]))[0].result_code for _ in range(2)]
    assert codes == [36, 1]
    assert sim.faults.struck()[0][1] == 1


async def test_other_faults_are_limited_to_a_member_too():
    sim = simulator(Fault.status(503).on(member_code="m000002"))
    assert (await ask(sim)).status_code == 200
    sim.faults.add(Fault.status(500).on(member_code="m000001"))
    assert (await ask(sim)).status_code == 500


async def test_a_whole_call_is_refused_with_a_code():
    sim = simulator(Fault.refusal(4).on("get_quotas"), Fault.refusal(6).on("recontact_members"))
    async with sim.client() as client:
        with pytest.raises(BadRequestError, match="PANEL_NOT_ES_ENABLED"):
            await client.get_quotas()
    assert (await page(sim))["ResultCode"] == 6


def test_a_fault_that_could_never_apply_is_refused():
    with pytest.raises(ValueError, match="cannot be 1"):
        Fault.refusal(1)
    with pytest.raises(ValueError, match="result_code must be of type int, not '9'"):
        Fault.refusal("9")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="quota_id must be of type int, not '5'"):
        Fault.refusal(9).on(quota_id="5")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="member_code must be of type str, not 7"):
        Fault.null().on(member_code=7)  # type: ignore[arg-type]


@pytest.mark.parametrize("status", [0, 100, 199, 600, 999, 503.0, "503", True])
def test_a_status_is_one_that_a_response_can_have(status):
    with pytest.raises(ValueError, match="answer_status must be a status from 200 to 599"):
        Fault.status(status)


@pytest.mark.parametrize("text", ["\u2013", "1\r\nX-A: b", "1\n", "\0"])
def test_a_retry_after_is_what_a_header_can_hold(text):
    with pytest.raises(ValueError, match="retry_after must be what a header can hold"):
        Fault.status(429, retry_after=text)


def test_a_retry_after_may_be_any_other_text():
    for text in ("soon", "Wed, 25 Nov 2026 12:00:00 GMT", "\xfc", ""):
        assert Fault.status(429, retry_after=text).retry_after == text


ARGUMENTS = {"body": (b"x",), "delay": (1,), "refusal": (39,), "status": (503,)}
CONSTRUCTORS = [name for name, made in vars(Fault).items() if isinstance(made, classmethod)]


async def seen(*faults: Fault) -> tuple[object, ...]:
    """Return what comes for a bulk invite and for two pages of a list, and how long it takes."""
    sim = simulator(*faults, sleep=(naps := Naps()))
    try:
        response = await ask(sim)
        code = next(iter(sim.members))
        pages = [await page(sim, maxResults=1), await page(sim, maxResults=1, lastMemberCodeReceived=code)]
    except (httpx.TransportError, ValueError) as exc:
        return (type(exc),)
    return response.status_code, response.headers["content-type"], response.content, pages, naps.taken


@pytest.mark.parametrize("name", CONSTRUCTORS)
async def test_each_fault_has_an_effect(name):
    """A new one gets it in `simulator/_faults.py` (the response) or `simulator/_app.py` (the connection)."""
    fault = getattr(Fault, name)(*ARGUMENTS.get(name, ()))
    assert await seen() == await seen()
    assert await seen(fault) != await seen()


async def test_a_fault_can_be_limited_to_one_panel():
    sim = Simulator(seed=1, surveys=2, members=2)
    other = sim.add_panel(members=2)
    (fault,) = read_faults(
        json.dumps(
            [
                {
                    "Fault": "status",
                    "Status": 400,
                    "ResultCode": 3,
                    "On": {"PanelGUID": f"{{{other.panel_guid.upper()}}}"},
                }
            ]
        )
    )
    assert fault == Fault.status(400, result_code=3).on(panel_guid=f"{{{other.panel_guid.upper()}}}")
    sim.faults.add(fault)
    async with sim.client() as first, sim.client(panel_guid=other.panel_guid, api_key=other.api_key) as second:
        for call in (second.get_quotas(), second.get_settings(), second.generate_invite("m000003", 1)):
            with pytest.raises(BadRequestError) as caught:
                await call
            assert caught.value.result_code == ResultCode.PANEL_DOES_NOT_EXIST
            assert caught.value.request_id.startswith("sim-")
        assert (await second.bulk_invite("m000003", [1, 2])).counts["not_sent"] == 2
        assert (await first.get_settings()).request_id == "sim-4"
    assert sim.faults.struck() == ((fault, 4),)
