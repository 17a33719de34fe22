"""Mocks that fail a test: the test sees that failure, and a fan-out still accounts for every ID."""

from __future__ import annotations

import traceback
from collections import Counter

import doubles
import httpx
import pytest
import respx

from sampling_async import InviteRequest, Journal, SamplingClient, TransportError, TransportTimeoutError

PANEL = [InviteRequest(f"m{number}", [1, 2, 3]) for number in range(20)]


class Mock:
    """Answers bulk invites, except those of a member, for which it raises."""

    def __init__(self, error: BaseException, *, member: str = "m7") -> None:
        self.error = error
        self.member = f"/{member}/"
        self.requests = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests += 1
        if self.member in request.url.path:
            raise self.error
        return httpx.Response(200, json=doubles.bulk(request))


def asserting(_: httpx.Request) -> httpx.Response:
    given = "GET"
    assert given == "POST", "the handler wants another method"
    raise NotImplementedError


def failures():
    return [AssertionError("of assert"), pytest.fail.Exception("of pytest")]


@pytest.mark.anyio
@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.get_settings(),
        lambda client: client.get_quotas(),
        lambda client: client.generate_invite("m", 1),
        lambda client: client.bulk_invite("m", [1]),
        lambda client: client.bulk_invite("m", range(1, 500)),
        lambda client: anext(client.recontact_members(1)),
        lambda client: anext(client.recontact_pages(1)),
    ],
)
async def test_an_assertion_of_a_handler_is_raised_by_the_call_with_its_place(call):
    async with doubles.client(asserting) as client:
        with pytest.raises(AssertionError, match="the handler wants another method") as caught:
            await call(client)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert frames[-1].name == "asserting"


@pytest.mark.anyio
@pytest.mark.parametrize("error", failures())
@pytest.mark.parametrize("journal", [False, True])
async def test_a_fan_out_gives_each_id_its_outcome_and_then_raises_the_failure(error, journal, tmp_path):
    mock, outcomes = Mock(error), []
    given = {"journal": tmp_path / "journal"} if journal else {}
    async with doubles.client(mock) as client:
        async with client.fan_out(PANEL, **given) as stream:
            with pytest.raises(type(error), match=str(error)):
                async for outcome in stream:
                    outcomes.append(outcome)
    assert Counter((each.member_code, each.quota_id) for each in outcomes) == Counter(
        (request.member_code, quota_id) for request in PANEL for quota_id in request.quota_ids
    )
    assert {each.member_code for each in outcomes if each.status == "unknown"} == {"m7"}
    assert {type(each.error) for each in outcomes if each.error is not None} == {TransportError}
    assert mock.requests == len(PANEL)  # nothing is repeated
    if journal:
        kept = [each async for each in Journal(tmp_path / "journal").outcomes()]
        assert Counter(each.status for each in kept) == Counter(each.status for each in outcomes)


@pytest.mark.anyio
@pytest.mark.parametrize("error", failures())
async def test_a_block_that_is_left_early_raises_the_failure(error):
    async with doubles.client(Mock(error, member="m0")) as client:
        with pytest.raises(type(error), match=str(error)):
            async with client.fan_out(PANEL) as stream:
                while (await anext(stream)).member_code != "m0":
                    pass


@pytest.mark.anyio
async def test_a_failure_of_the_block_itself_comes_first():
    async with doubles.client(Mock(AssertionError("of the mock"), member="m0")) as client:
        with pytest.raises(LookupError):
            async with client.fan_out(PANEL) as stream:
                await anext(stream)
                raise LookupError


@pytest.mark.anyio
async def test_a_request_that_respx_does_not_know_is_raised_as_it_says():
    async with SamplingClient(
        "https://service.example", panel_guid=doubles.PANEL, api_key=doubles.KEY
    ) as client:
        with respx.mock(assert_all_called=False) as router:
            router.get(path__regex="/Nothing")
            with pytest.raises(AssertionError, match="not mocked"):
                await client.get_settings()


@pytest.mark.anyio
@pytest.mark.parametrize("is_given", [False, True])
async def test_pytest_httpx_serves_the_default_client_and_one_of_the_user(httpx_mock, is_given):
    httpx_mock.add_response(json={"Invites": [doubles.item(1, 1)]}, match_headers={"API_AUTH_KEY": doubles.KEY})
    given = {"panel_guid": doubles.PANEL, "api_key": doubles.KEY}
    async with httpx.AsyncClient() as http_client:
        given["http_client"] = http_client if is_given else None
        async with SamplingClient("https://service.example", **given) as client:
            (outcome,) = await client.bulk_invite("m/1", [1])
    assert outcome.status == "invited"
    assert httpx_mock.get_requests()[0].url.raw_path.endswith(b"/m%2F1/Invites")


@pytest.mark.anyio
async def test_a_request_that_pytest_httpx_does_not_know_is_an_assertion_with_its_explanation():
    def handler(request: httpx.Request) -> httpx.Response:
        raise httpx.TimeoutException(
            f"No response can be found for GET request on {request.url}", request=request
        )

    async with doubles.client(handler) as client:
        with pytest.raises(AssertionError, match="No response can be found for GET request on https://"):
            await client.get_settings()


@pytest.mark.anyio
async def test_other_exceptions_of_a_mock_stay_failures_of_the_network():
    async def late(_: httpx.Request) -> httpx.Response:
        raise httpx.TimeoutException("it took too long")

    async def lost(_: httpx.Request) -> httpx.Response:
        raise KeyError("member")

    async with doubles.client(late) as client:
        with pytest.raises(TransportTimeoutError):
            await client.get_settings()
    async with doubles.client(lost) as client:
        with pytest.raises(TransportError, match="KeyError"):
            await client.get_settings()
