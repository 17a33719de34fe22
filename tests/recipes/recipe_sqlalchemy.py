# panel_from_sqlalchemy.py
import asyncio
import os
from collections.abc import Iterator

import pyarrow as pa
from sqlalchemy import Column, Engine, Integer, MetaData, String, Table, create_engine, select

from sampling_async import SamplingClient
from sampling_async.matching import Allocate, PanelMatcher, QuotaIndex

members = Table(
    "members",
    MetaData(),
    Column("code", String, primary_key=True),
    Column("device", Integer),
    Column("age", Integer),
    Column("gender", Integer),
    Column("postal_code", String),
)
# Each column gets the name that the matcher knows: that of its question.
PANEL = select(
    members.c.code.label("member_code"),
    members.c.device.label("device_type"),
    members.c.age.label("1001538"),
    members.c.gender.label("1001007"),
    members.c.postal_code.label("1001042"),
)
SCHEMA = pa.schema(
    {
        "member_code": pa.string(),
        "device_type": pa.int64(),
        "1001538": pa.int64(),
        "1001007": pa.int64(),
        "1001042": pa.string(),
    }
)


def panel(engine: Engine) -> Iterator[pa.RecordBatch]:
    """Read the panel from the database, 50,000 members at a time, as record batches."""
    with engine.connect().execution_options(yield_per=50_000) as connection:
        for rows in connection.execute(PANEL).mappings().partitions():
            yield pa.RecordBatch.from_pylist(rows, SCHEMA)


async def night(engine: Engine) -> dict[str, int]:
    async with SamplingClient.from_env() as client:
        index = await asyncio.to_thread(QuotaIndex, await client.get_quotas())
        matcher = PanelMatcher(index, Allocate(5))
        # The panel is read twice: for a sample, which sets the prices, and for the requests.
        matcher = await asyncio.to_thread(matcher.derive_prices, panel(engine))
        counts = {"invited": 0, "rejected": 0, "not_sent": 0, "unknown": 0}
        async with client.fan_out(matcher.requests(panel(engine)), journal="night.journal") as outcomes:
            async for outcome in outcomes:
                counts[outcome.status] += 1
        return counts


if __name__ == "__main__":
    asyncio.run(night(create_engine(os.environ["DATABASE_URL"])))
