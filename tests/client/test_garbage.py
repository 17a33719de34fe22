"""What calls leave to the garbage collector: nothing. Each collection that they cause stops the event loop."""

from __future__ import annotations

import gc
from contextlib import contextmanager, suppress

import doubles
import pytest
import wire

from sampling_async import BadRequestError, RetryPolicy, SamplingClient, SamplingError

# The simulator and its server run in this process too.
OF_OTHERS = ("sampling_async.simulator",)


@contextmanager
def cycles():
    """Give a list, and fill it with the client's own objects that only a collection could have freed."""
    found: list[object] = []
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found += [each for each in gc.garbage if _is_ours(type(each).__module__)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def _is_ours(module: str) -> bool:
    return module.startswith(("sampling_async.", "httptools")) and not module.startswith(OF_OTHERS)


async def one(client, member, ids):
    try:
        await client.generate_invite(member, ids[0])
    except BadRequestError:
        return


async def bulk(client, member, ids):
    await client.bulk_invite(member, ids)


async def stream(client, member, ids):
    async with client.stream_bulk_invite(member, ids) as outcomes:
        async for _ in outcomes:
            pass


async def quotas(client, member, ids):
    await client.get_quotas()


async def surveys(client, member, ids):
    async for _ in client.iter_surveys():
        pass


async def left_early(client, member, ids):
    async with client.stream_bulk_invite(member, ids * 20) as outcomes:
        await anext(outcomes)


@pytest.mark.asyncio
@pytest.mark.parametrize("call", [one, bulk, stream, quotas, surveys, left_early])
async def test_a_call_leaves_nothing_to_the_garbage_collector(served, call):
    simulator, base_url = served
    member = next(iter(simulator.members))
    access = {"panel_guid": simulator.panel_guid, "api_key": simulator.api_key}
    async with SamplingClient(base_url=base_url, **access) as client:
        ids = [quota.quota_id for survey in (await client.get_quotas()).surveys for quota in survey.quotas]
        await call(client, member, ids)  # what is made once is made now
        with cycles() as found:
            await call(client, member, ids)
    assert found == []


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n[",
        b"HTTP/1.1 200 OK\r\n\r\n[]",
        b"no HTTP",
        wire.answer(b"[]") + b"more",
        wire.answer(b"[]", "200 OK", "Connection: close"),
        wire.answer(b"[]", "500 Oops"),
    ],
    ids=["none", "cut", "until the end", "not HTTP", "surplus", "closes", "failure"],
)
async def test_a_lost_or_new_connection_leaves_nothing_to_the_garbage_collector(answer):
    def script(connection: wire.Connection) -> None:
        if connection.read_request():
            connection.send(answer)

    with wire.serve(script) as url:
        async with SamplingClient(
            url, panel_guid=doubles.PANEL, api_key=doubles.KEY, retry=RetryPolicy(max_attempts=1)
        ) as client:
            for _ in range(2):
                with cycles() as found, suppress(SamplingError):
                    await client.get_settings()
    assert found == []
