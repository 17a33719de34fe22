"""What calls leave to the garbage collector: nothing. Each collection that they cause stops the event loop."""

from __future__ import annotations

import gc
from contextlib import contextmanager

import pytest

from sampling_async import BadRequestError, SamplingClient

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


@pytest.mark.asyncio
@pytest.mark.parametrize("call", [one, bulk, stream, quotas, surveys])
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
