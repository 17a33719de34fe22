"""A campaign in parts: each is asked for by a process of a Dask cluster, with a ledger of its own."""

import asyncio
import time
from collections import Counter
from pathlib import Path

from attrs import asdict
from distributed import Client

from sampling_async import Quotas, SamplingClient, from_json, to_json
from sampling_async.campaign import Campaign, LedgerError
from sampling_async.matching import Allocate, PanelMatcher, QuotaIndex

LIMIT = 64  # requests in flight, all processes together
PAUSE = 30  # seconds until a part is tried again
PER_MEMBER = 5
panels = sorted(map(str, Path("panel").absolute().glob("*.parquet")))  # each member in one of them
night = Path("night").absolute()  # for the ledgers, on a disk that all workers share


async def read_inventory(file):
    async with SamplingClient.from_env() as client:
        quotas = await client.get_quotas()
    file.with_suffix(".new").write_bytes(to_json(quotas))
    file.with_suffix(".new").replace(file)


def divided(rooms, part, parts):
    """Give a part its share of each room, and some parts one more, so that the shares add up to the room."""
    return {id_: room // parts + ((id_ + part) % parts < room % parts) for id_, room in rooms.items()}


def allocation(quotas, part, parts):
    terms = PanelMatcher(QuotaIndex(quotas), Allocate(PER_MEMBER)).terms()
    rooms, survey_rooms = (divided(each, part, parts) for each in (terms.rooms, terms.survey_rooms))
    return Allocate(PER_MEMBER, room=rooms, survey_room=survey_rooms)


async def asked(panel, part, parts, shares):
    quotas = from_json(Quotas, (night / "inventory.json").read_bytes())
    allocate = allocation(quotas, part, parts)
    async with SamplingClient.from_env(max_concurrency=LIMIT).share(of=shares) as client:
        campaign = Campaign(client, panel, quotas, ledger=night / f"part-{part}.ledger", allocate=allocate)
        await campaign.plan()  # or the plan that is in the ledger
        async with campaign.run() as run:
            async for _ in run:
                pass
    return Counter(asdict(run.pairs)), run.reason


def asked_by_worker(panel, part, parts, shares):
    try:
        return asyncio.run(asked(panel, part, parts, shares))
    except LedgerError:
        # Dask may take a worker for lost that still asks. Then its ledger is locked, and Dask tries again.
        time.sleep(PAUSE)
        raise


cluster = Client.current()
shares = sum(cluster.nthreads().values())  # so many parts run at the same time, each with its client
parts = len(panels)
night.mkdir(exist_ok=True)
if not (night / "inventory.json").exists():  # all parts divide the same rooms, in all runs
    asyncio.run(read_inventory(night / "inventory.json"))
futures = cluster.map(asked_by_worker, panels, range(parts), parts=parts, shares=shares, retries=20, pure=False)
ended = cluster.gather(futures)
pairs = sum((of_part for of_part, _ in ended), Counter())
reasons = {reason for _, reason in ended if reason}  # why pairs are pending: run this again later
