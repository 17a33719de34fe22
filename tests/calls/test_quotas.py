"""Get Quotas, as a whole or survey by survey."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from contextlib import aclosing, suppress

import anyio
import anyio.lowlevel
import doubles
import httpx
import inventories
import pytest
import respx
import wire
from quotas_kit import (
    FRAMINGS,
    HEAD,
    TAIL,
    Parts,
    assert_idle,
    body_of,
    both,
    chunked,
    client_of,
    head,
    ids_of,
    read_by,
    service,
    survey,
)

from sampling_async import DecodeError, InvalidRequestError, Quotas, SamplingClient, Survey, from_json

# --- The whole inventory


@both
@pytest.mark.parametrize("size", [1, 100, 10**6])
@pytest.mark.parametrize("document", [inventories.quotas(), inventories.quotas(Surveys=[]), {"Note": {}}])
async def test_a_body_in_parts_equals_the_body_in_one_piece(how, size, document):
    body = json.dumps({**document, **inventories.quotas(Surveys=document.get("Surveys", []))}).encode()
    parts = Parts(*(body[at : at + size] for at in range(0, len(body), size)))
    meant = from_json(Quotas, body)
    async with doubles.client(service(parts)) as client:
        if how == "get_quotas":
            assert await client.get_quotas() == meant
        else:
            assert [each async for each in client.iter_surveys()] == list(meant.surveys)
    assert parts.closed


@both
async def test_respx_and_mocks_of_httpx_are_served(how):
    with respx.mock:
        respx.get(path__startswith="/IPExternal").respond(content=body_of())
        async with SamplingClient(
            "https://service.example", panel_guid=doubles.PANEL, api_key=doubles.KEY
        ) as client:
            assert await read_by(client, how) == [0, 1, 2]
    async with doubles.client(doubles.Service(httpx.Response(200, content=body_of()))) as client:
        assert await read_by(client, how) == [0, 1, 2]


async def test_routables_are_requested_by_default():
    asked = doubles.Service(httpx.Response(200, content=body_of()))
    async with doubles.client(asked) as client:
        await ids_of(client)
        await ids_of(client, include_routables=False)
        with pytest.raises(InvalidRequestError, match="deadline"):
            await ids_of(client, deadline=0)
    flags = [request.url.params["includeRoutables"] for request in asked.requests]
    assert flags == ["true", "false"]


@both
@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("drip", [None, 997])
async def test_an_inventory_is_read_in_every_framing_over_a_socket(how, framing, drip):
    body = body_of(40)
    data = FRAMINGS[framing](body)

    def script(connection: wire.Connection) -> None:
        while connection.read_request() is not None:
            for at in range(0, len(data), drip or len(data)):
                connection.send(data[at : at + (drip or len(data))])
            if framing == "close":
                return

    with wire.serve(script) as url:
        async with client_of(url) as client:
            for _ in range(2):
                if how == "get_quotas":
                    assert await client.get_quotas() == from_json(Quotas, body)
                else:
                    assert await ids_of(client) == list(range(40))
            assert_idle(client)


# --- Survey by survey


async def test_the_first_survey_is_there_before_the_rest_is_sent():
    go = threading.Event()

    def script(connection: wire.Connection) -> None:
        connection.read_request()
        connection.send(head("Connection: close") + HEAD + survey(1) + b",")
        if go.wait(10):
            connection.send(survey(2) + TAIL)

    with wire.serve(script) as url:
        async with client_of(url) as client, aclosing(client.iter_surveys()) as surveys:
            with anyio.fail_after(60):
                assert (await anext(surveys)).survey_id == 1
            go.set()
            assert [each.survey_id async for each in surveys] == [2]


@pytest.mark.parametrize(
    ("end", "read", "idle"),
    [(TAIL, 3, 1), (TAIL, 1, 0), (b"!" + TAIL, 3, 0), (b"", 3, 0)],
    ids=["read whole", "left early", "unreadable", "cut"],
)
async def test_a_connection_is_used_again_only_after_an_inventory_that_was_read_to_its_end(end, read, idle):
    """All of it has arrived by then, also where it is left early."""
    body = HEAD + b",".join(map(survey, range(3_000))) + end

    def script(connection: wire.Connection) -> None:
        while connection.read_request() is not None:
            connection.send(wire.answer(body))

    with wire.serve(script) as url:
        async with client_of(url) as client:
            with suppress(DecodeError):
                async with aclosing(client.iter_surveys()) as surveys:
                    async for each in surveys:
                        if read == 1 and each.survey_id == 1:
                            break
            assert client._session.engine.idle == idle


async def test_no_more_surveys_are_in_memory_than_arrived_together():
    parts = Parts(HEAD, *(survey(number) + b"," for number in range(100)), survey(100) + TAIL)
    alive: weakref.WeakSet[Survey] = weakref.WeakSet()
    most = total = 0
    async with doubles.client(service(parts)) as client, aclosing(client.iter_surveys()) as surveys:
        async for each in surveys:
            total += 1
            alive.add(each)
            del each
            gc.collect(0)
            most = max(most, len(alive))
    assert total == 101
    assert most < 5


async def test_other_calls_can_be_made_between_two_surveys():
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/Quotas"):
            return httpx.Response(200, stream=Parts(HEAD, survey(1) + b",", survey(2) + b",", survey(3), TAIL))
        return httpx.Response(200, json=doubles.bulk(request))

    async with doubles.client(doubles.Service(answer), max_concurrency=1) as client:
        invited = 0
        async with aclosing(client.iter_surveys()) as surveys:
            async for _ in surveys:
                with anyio.fail_after(60):
                    invited += len((await client.bulk_invite("m1", [2])).invited)
                assert client.snapshot().running == 0
        assert invited == 3
        assert_idle(client)


async def test_leaving_the_iteration_closes_the_connection_and_nothing_else():
    ended = threading.Event()

    def script(connection: wire.Connection) -> None:
        connection.read_request()
        connection.send(head("Transfer-Encoding: chunked") + chunked(HEAD + survey(1) + b",", 10**6)[:-5])
        if connection.read_request() is None:
            ended.set()

    with wire.serve(script) as url:
        async with client_of(url, max_concurrency=1) as client:
            for _ in range(2):
                async with aclosing(client.iter_surveys()) as surveys:
                    async for each in surveys:
                        assert each.survey_id == 1
                        break
                assert await anyio.to_thread.run_sync(ended.wait, 5)
                ended.clear()
                assert_idle(client)


async def test_a_stream_of_another_transport_is_closed_too():
    parts = Parts(HEAD, survey(1) + b",", survey(2) + b",", survey(3), TAIL)
    async with doubles.client(service(parts)) as client:
        async with aclosing(client.iter_surveys()) as surveys:
            await anext(surveys)
            assert not parts.closed
        assert parts.closed
        assert parts.given < 5
        async with aclosing(client.iter_surveys()):
            pass  # the iteration was never begun
