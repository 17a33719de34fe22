"""The plan of a campaign beside its floor: the same panel read and matched, and the same rows written bare.

The inventory and the members are the simulator's, with participations in the panel. A larger panel has the same
twenty thousand members several times, under other codes.
"""

from __future__ import annotations

import asyncio
import sqlite3
import statistics
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from scoreboard.board import Row, at_most
from scoreboard.testkit import tool
from speed.measuring import Watch, peak_mib
from speed.remote import fresh

from sampling_async.campaign import Campaign
from sampling_async.matching import Allocate, PanelMatcher, QuestionKinds, QuotaIndex, TopK
from sampling_async.simulator import AGE_BANDS, generate_inventory, generate_members

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from sampling_async import Quotas

SEED: Final = 19
SURVEYS: Final = 800
AGE: Final = 1001538
MEMBERS: Final = 300_000
SMALL, LARGE = 100_000, 1_000_000
DIFFERENT: Final = 20_000
PER_MEMBER: Final = 5
ROUNDS: Final = 3


def of_planning(members: int = MEMBERS) -> Iterator[Row]:
    """Yield the rows."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        panels = {size: folder / f"{size}.parquet" for size in (members, SMALL, LARGE)}
        fresh(write_panels, panels)
        plans, floors = [], []
        for _ in range(ROUNDS):
            plans.append(fresh(planned, panels[members], folder / "ledger"))
            floors.append(fresh(floor, panels[members], folder / "ledger"))
        shares = {step: statistics.median(each[step] for each in floors) for step in floors[0]}
        seconds = statistics.median(each["seconds"] for each in plans)
        quotas, pairs = plans[0]["quotas"], plans[0]["pairs"]
        small, large = (fresh(planned, panels[size], folder / "other") for size in (SMALL, LARGE))
    yield at_most(
        f"plan of {members:,} members x {quotas:,} quotas in a ledger, by its floor",
        2.5,
        seconds / sum(shares.values()),
        note=f"{seconds:.1f} s by {sum(shares.values()):.1f}: "
        + ", ".join(f"{step} {each:.1f}" for step, each in shares.items())
        + f"; {pairs:,} pairs; plan {plans[0]['digest']}",
    )
    yield at_most(f"plan of {LARGE:,} members", 60.0, large["seconds"], unit="s", note="CPU")
    yield at_most(
        f"peak memory of {LARGE:,} members by that of {SMALL:,}",
        1.15,
        large["mib"] / small["mib"],
        note=f"{large['mib']:.0f} by {small['mib']:.0f} MiB, all of the process",
    )


def inventory() -> Quotas:
    """Return the simulator's inventory."""
    return generate_inventory(SEED, surveys=SURVEYS)


def write_panels(panels: dict[int, Path]) -> None:
    """Write panels of some sizes."""
    people = generate_members(SEED, members=DIFFERENT, inventory=inventory())
    some = tool("panel_kit").table_of(people).drop_columns("member_code")
    for size, path in panels.items():
        schema = pa.schema([pa.field("member_code", pa.string()), *some.schema])
        with pq.ParquetWriter(path, schema) as writer:
            for start in range(0, size, DIFFERENT):
                codes = pa.array([f"m{number:08}" for number in range(start, min(size, start + DIFFERENT))])
                rows = some.slice(0, len(codes))
                writer.write_table(pa.table([codes, *rows.columns], schema=schema))


def planned(path: Path, ledger: Path) -> dict[str, Any]:
    """Plan a campaign; return the CPU seconds and the peak memory, and what is in the plan."""
    index = index_of()
    ledger.unlink(missing_ok=True)
    campaign = Campaign(None, str(path), index, ledger=ledger, allocate=Allocate(PER_MEMBER))
    watch = Watch()
    plan = asyncio.run(campaign.plan())
    taken = {"seconds": watch.sample().cpu, "mib": peak_mib(), "quotas": len(index), "pairs": plan.pairs}
    return taken | {"digest": digest(ledger)}


def digest(ledger: Path) -> str:
    """Return a text that is the same for equal plans."""
    found = 0
    with sqlite3.connect(ledger) as database:
        for table in ("members", "pairs", "quotas", "terms"):
            for row in database.execute(f"SELECT * FROM {table}"):
                found = (found * 31 + zlib.crc32(repr(row).encode())) % 2**61
    return f"{found:x}"


def index_of() -> QuotaIndex:
    """Return the index of the inventory."""
    return QuotaIndex(inventory(), kinds=QuestionKinds.default().with_age(AGE, AGE_BANDS))


def floor(path: Path, ledger: Path) -> dict[str, float]:
    """Return the CPU seconds of each step that a plan cannot do without; none of them knows of the others."""
    index = index_of()
    matcher = PanelMatcher(index, TopK(PER_MEMBER))
    watch = Watch()
    table = pq.read_table(path)
    taken = {"read": watch.sample().cpu}
    watch = Watch()
    for _ in matcher.run(table.drop_columns(["participations"])):
        pass
    taken["match"] = watch.sample().cpu
    with sqlite3.connect(ledger) as database:
        tables = [sql for (sql,) in database.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")]
        members = database.execute("SELECT code, reserves FROM members ORDER BY id").fetchall()
        pairs = database.execute("SELECT member, quota, plan, rank, certain FROM pairs").fetchall()
    bare = ledger.with_suffix(".floor")
    bare.unlink(missing_ok=True)
    database = sqlite3.connect(bare)
    for pragma in ("journal_mode = WAL", "synchronous = FULL"):
        database.execute(f"PRAGMA {pragma}")
    for sql in tables:
        database.execute(sql)
    taken["members"] = written(database, "members (code, reserves) VALUES (?, ?)", members)
    columns = "pairs (member, quota, plan, rank, certain) VALUES (?, ?, ?, ?, ?)"
    taken["pairs"] = written(database, columns, pairs)
    database.close()
    return taken


def written(database: sqlite3.Connection, where: str, rows: Iterable[tuple[Any, ...]]) -> float:
    """Insert rows in one transaction; return the CPU seconds."""
    watch = Watch()
    with database:
        database.executemany(f"INSERT INTO {where}", rows)
    return watch.sample().cpu
