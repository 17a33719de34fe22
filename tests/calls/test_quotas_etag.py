"""Get Quotas with an ETag: a 304 stands for the inventory that the user still holds."""

from __future__ import annotations

import gc
import logging

import doubles
import httpx
import inventories
import pytest
import wire
from quotas_kit import LACKING, ONCE, Parts, body_of

from sampling_async import DecodeError, RetryPolicy, SamplingClient, UnexpectedStatusError

# --- Surveys that lack a value


async def test_a_strict_call_does_not_take_a_304_for_an_inventory_with_surveys_left_out():
    def answer(request: httpx.Request) -> httpx.Response:
        if "If-None-Match" in request.headers:
            return httpx.Response(304, headers={"ETag": '"first"'})
        return httpx.Response(200, content=LACKING, headers={"ETag": '"one"'})

    async with doubles.client(answer, retry=ONCE) as client:
        quotas = await client.get_quotas()
        assert (await client.get_quotas()) is quotas
        with pytest.raises(DecodeError):
            await client.get_quotas(strict=True)
        assert len(quotas.left_out) == 1


# --- ETag


class Tagging:
    """A service that gives an ETag, and answers 304 to a request that has it."""

    def __init__(self, etag: str | None = '"first"', surveys: int = 3) -> None:
        self.etag, self.surveys = etag, surveys
        self.known: list[str | None] = []
        self.statuses: list[int] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.known.append(request.headers.get("If-None-Match"))
        headers = {} if self.etag is None else {"ETag": self.etag}
        is_known = self.etag is not None and self.known[-1] == self.etag
        self.statuses.append(304 if is_known else 200)
        content = b"" if is_known else body_of(self.surveys)
        return httpx.Response(self.statuses[-1], headers=headers, content=content)


async def test_an_attempt_that_was_answered_with_304_says_so(caplog):
    caplog.set_level(logging.DEBUG, "sampling_async.calls")
    told = []
    async with doubles.client(Tagging(), on_attempt=told.append) as client:
        held = await client.get_quotas()
        assert await client.get_quotas() is held
    assert [(each.status, each.error) for each in told] == [(200, None), (304, None)]
    assert [record.ended for record in caplog.records] == ["200", "304"]


async def test_a_304_stands_for_the_inventory_that_the_user_still_holds():
    service = Tagging()
    async with doubles.client(service) as client:
        first = await client.get_quotas()
        assert await client.get_quotas() is first
        service.etag, service.surveys = 'W/"second"', 4
        second = await client.get_quotas()
        assert await client.get_quotas() is second
    assert (len(first.surveys), len(second.surveys)) == (3, 4)
    assert service.known == [None, '"first"', '"first"', 'W/"second"']
    assert service.statuses == [200, 304, 200, 304]


async def test_a_refusal_of_a_request_with_an_etag_is_a_refusal():
    service = Tagging()

    def refusing(request: httpx.Request) -> httpx.Response:
        response = service(request)
        return response if response.status_code == 200 else httpx.Response(401, content=body_of(3))

    def unasked(request: httpx.Request) -> httpx.Response:
        return httpx.Response(304)

    async with doubles.client(refusing, retry=RetryPolicy(max_attempts=1)) as client:
        held = await client.get_quotas()
        with pytest.raises(UnexpectedStatusError):
            await client.get_quotas()
        del held
    async with doubles.client(unasked, retry=RetryPolicy(max_attempts=1)) as client:
        with pytest.raises(UnexpectedStatusError) as caught:
            await client.get_quotas()
        assert caught.value.status == 304


async def test_no_etag_is_sent_if_the_service_gave_none_or_the_inventory_is_gone():
    service = Tagging(None)
    async with doubles.client(service) as client:
        held = [await client.get_quotas(), await client.get_quotas()]
        service.etag = '"first"'
        held.append(await client.get_quotas())
        await client.get_quotas(include_routables=False)  # another inventory
        held.clear()
        gc.collect()
        await client.get_quotas()
    assert service.known == [None] * 5


async def test_the_inventory_is_read_whole_now_and_then_in_case_the_etag_never_changes():
    service, time = Tagging(), doubles.FakeTime()
    async with doubles.client(service, time) as client:
        held = await client.get_quotas()
        time.now += 599
        assert await client.get_quotas() is held
        time.now += 1
        again = await client.get_quotas()
        time.now += 599
        assert await client.get_quotas() is again
    assert service.statuses == [200, 304, 200, 304]


@pytest.mark.parametrize("etag", ["no-quotes", '"two""', '"a b"', '"' + "x" * 300 + '"', '"\x7f"', "*", '"é"'])
async def test_an_etag_that_is_none_is_not_sent_back(etag):
    service = Tagging()
    service.etag = etag.encode("latin-1")
    async with doubles.client(service) as client:
        held = [await client.get_quotas(), await client.get_quotas()]
    assert service.known == [None, None]
    assert held[0].surveys == held[1].surveys


async def test_a_body_that_was_cut_is_not_taken_for_the_inventory_of_its_etag():
    """The second attempt gets a 304 for the old inventory, and the new ETag is forgotten."""
    old, new = {"ETag": '"old"'}, {"ETag": '"new"'}
    handler = doubles.Service(
        httpx.Response(200, headers=old, content=body_of(3)),
        httpx.Response(200, headers=new, stream=Parts(body_of(4)[:-200], httpx.ReadError("cut"))),
        httpx.Response(304, headers=old),
        httpx.Response(200, headers=new, content=body_of(4)),
    )
    async with doubles.client(handler) as client:
        first = await client.get_quotas()
        assert await client.get_quotas() is first
        assert len((await client.get_quotas()).surveys) == 4
    assert [each.headers.get("If-None-Match") for each in handler.requests] == [None, '"old"', '"old"', '"old"']


async def test_a_304_over_a_real_socket_leaves_the_connection_open():
    requests: list[bytes] = []

    def reply(request: bytes) -> bytes:
        requests.append(request)
        if b'If-None-Match: "first"' not in request:
            return wire.answer(body_of(), "200 OK", 'ETag: "first"')
        # A 304 may have the length of the body that it does not have.
        return b'HTTP/1.1 304 Not Modified\r\nETag: "first"\r\nContent-Length: 5000\r\n\r\n'

    connections = 0

    def script(connection: wire.Connection) -> None:
        nonlocal connections
        connections += 1
        wire.serve_each(reply)(connection)

    with wire.serve(script) as address:
        async with SamplingClient(address, panel_guid=doubles.PANEL, api_key=doubles.KEY, retry=ONCE) as client:
            first = await client.get_quotas()
            assert await client.get_quotas() is first
            assert await client.get_quotas() is first
    assert (len(requests), connections) == (3, 1)


async def test_a_watch_asks_with_the_etag():
    service = Tagging()
    async with doubles.client(service) as client, client.watch_quotas() as watch:
        await watch.ready()
        first = await watch.refresh()
        assert await watch.refresh() is first
    assert service.statuses[0] == 200
    assert set(service.statuses[1:]) == {304}


@pytest.mark.parametrize("etag", [None, '"1"'])
async def test_surveys_that_have_not_changed_are_the_same_objects(etag):
    body = inventories.quotas(*[inventories.survey(SurveyID=number) for number in range(1, 4)])
    requests = []

    def answer(request):
        requests.append(request)
        return httpx.Response(200, json=body, headers={} if etag is None else {"ETag": etag})

    async with doubles.client(answer) as client:
        before = await client.get_quotas()
        body["Surveys"][1]["LOI"] += 1
        after = await client.get_quotas()
    are_the_same = [one is other for one, other in zip(before.surveys, after.surveys, strict=True)]
    assert are_the_same == [True, False, True]
    assert [request.headers.get("If-None-Match") for request in requests] == [None, etag]
