"""What the converter costs: beside the fast decoder alone, and beside cattrs' own converter for msgspec.

    python benchmarks/codec.py [--inventory FILE] [--rounds 501]

In each round, every reader reads the same body a few times, in one process, without the garbage collector.
The numbers are medians of CPU time, and of the quotients in a round. FILE is the body of a Get Quotas; else
the simulator makes one. The last line says what a full garbage collection takes while inventories are held.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from datetime import datetime
from functools import partial
from operator import truediv
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
from cattrs.gen import make_dict_structure_fn, override
from cattrs.preconf.msgspec import make_converter as make_preconf

from sampling_async import Invite, Quotas, from_json, make_converter, to_json
from sampling_async._contract.records import RECORDS, wire_name
from sampling_async._json import fast
from sampling_async._json.rules import answer_values, date_time
from sampling_async.simulator import Simulator

if TYPE_CHECKING:
    from collections.abc import Callable

    from cattrs.preconf.msgspec import MsgspecJsonConverter

IDS: Final = range(1_000_001, 1_000_101)
HELD_BYTES: Final = 250 * 10**6


@attrs.frozen
class Item:
    """An item of a bulk response, as one writes it for cattrs."""

    quota_id: int
    invite: Invite | None
    result_code: int
    result: str | None = None


@attrs.frozen
class Reply:
    """A bulk response, likewise."""

    invites: tuple[Item, ...]


def preconf() -> MsgspecJsonConverter:
    """Return cattrs' converter for msgspec with our names, and our rules where the types alone would not do."""
    converter = make_preconf()
    converter.register_structure_hook(datetime, lambda value, _: date_time(value))
    for record in (*RECORDS, Item, Reply):
        overrides: dict[str, Any] = {
            each.name: override(
                rename=wire_name(each.name),
                # The simulator and real services write no nulls, but both write answer values as one text.
                struct_hook=_values if each.name == "answer_values" else None,
            )
            for each in attrs.fields(attrs.resolve_types(record))
        }
        converter.register_structure_hook(record, make_dict_structure_fn(record, converter, **overrides))
    return converter


def _values(value: object, _: object) -> tuple[str, ...]:
    return answer_values(value)


def reply(code: int) -> bytes:
    """Return a bulk response of 100 invites, or of 100 rejections with another code than 1."""
    url = "https://survey.example/start?m=0123456789abcdef&q={}"
    items = [
        {
            "QuotaID": quota_id,
            "Invite": json.loads(to_json(Invite(7, 1, quota_id, 1.25, url.format(quota_id), 12, 35, 0.5)))
            if code == 1
            else None,
            "ResultCode": code,
            "Result": "SUCCESS" if code == 1 else "QUOTA_NOT_LIVE",
        }
        for quota_id in IDS
    ]
    return json.dumps({"Invites": items}).encode()


def microseconds(read: Callable[[], object], times: int) -> float:
    """Return the CPU time of a call, after one that warms the caches of the processor."""
    read()
    began = time.process_time()
    for _ in range(times):
        read()
    return (time.process_time() - began) / times * 1e6


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inventory", type=Path, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=501)
    options = parser.parse_args()
    file = options.inventory
    inventory = to_json(Simulator(seed=0).inventory) if file is None else file.read_bytes()
    ours, theirs = make_converter(), preconf()
    print("| body | KB | decoder alone, us | converter | by the decoder | preconf.msgspec | by the decoder |")
    print("|---|---|---|---|---|---|---|")
    for name, body, wanted, alone, theirs_of, times in (
        ("bulk, 100 invites", reply(1), fast.WireReply, fast.read_bulk, Reply, 10),
        ("bulk, 100 rejections", reply(9), fast.WireReply, fast.read_bulk, Reply, 20),
        ("Get Quotas", inventory, Quotas, partial(fast.read, Quotas), Quotas, 2),
    ):
        readers = (
            partial(alone, body),
            partial(ours.structure, body, wanted),
            partial(theirs.loads, body, theirs_of),
        )
        measured: list[list[float]] = [[], [], []]
        for number in range(options.rounds):
            gc.collect()
            gc.disable()
            for at in ((0, 1, 2), (1, 0, 2))[number % 2]:
                measured[at].append(microseconds(readers[at], times))
            gc.enable()
        first, second, third = map(statistics.median, measured)
        ratios = [
            statistics.median(map(truediv, other, measured[0]))  # of each round, since a machine's speed drifts
            for other in measured[1:]
        ]
        print(
            f"| {name} | {len(body) / 1024:.0f} | {first:.1f} | {second:.1f} | {ratios[0]:.3f} "
            f"| {third:.1f} | {ratios[1]:.1f} |"
        )
    before = len(gc.get_objects())
    held = [from_json(Quotas, inventory) for _ in range(HELD_BYTES // len(inventory))]
    gc.collect()  # in which tuples of what cannot refer to them are forgotten
    began = time.perf_counter()
    gc.collect()
    print(
        f"{len(held)} inventories, {HELD_BYTES // 10**6} MB, are held: {len(gc.get_objects()) - before:,} "
        f"objects for the garbage collector, {(time.perf_counter() - began) * 1000:.0f} ms a full collection"
    )


if __name__ == "__main__":
    main()
