"""Inventories of a given size, surveys first as the service has them, and what it costs to decode them."""

from __future__ import annotations

import gc
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import msgspec
from peers.sampling import quotas_of
from scoreboard.board import at_least, at_most

from sampling_async import to_json
from sampling_async._json.fast import KnownSurveys
from sampling_async.simulator import generate_inventory
from speed.canned_server import Address
from speed.contenders import AIOHTTP, HTTPX, OURS, PEERS, WHOLE, contender
from speed.measuring import Measured, Spread, Table, interleaved, ratio
from speed.remote import fresh

if TYPE_CHECKING:
    from collections.abc import Iterator

    from scoreboard.board import Run

    from sampling_async import Quotas
    from speed.measuring import Sample

SIZES: Final = (12, 60)
"""Megabytes: the size of a real panel's inventory, and five times that."""

_SEEDED_SURVEYS: Final = 600
_IDS: Final = frozenset({"SurveyID", "WaveID", "QuotaID", "LayerID", "SubQuotaID"})
_SHIFT: Final = 1_000_000

NOTE: Final = (
    "sampling_async reads as `get_quotas` does: in parts, between which it puts off full collections of "
    "Python's garbage collector that fall due. The others, and `from_json`, read in one call and pay for them "
    "within the sample. Such a collection visits all objects of the program; half of what msgspec Structs cost "
    "here is one."
)


def measure(run: Run) -> Measured:
    """Let each client decode the same bodies, each in its own process."""
    measured = Measured([], [], {}, notes=[NOTE])
    for megabytes, rounds in ((SIZES[0], run.of(2, 9)), *([(SIZES[1], 3)] if run.version == "long" else [])):
        samples = measured.samples[f"{megabytes} MB"] = _samples(megabytes, rounds)
        cpu = {name: [sample.cpu for sample in taken] for name, taken in samples.items()}
        structs, pydantic = ratio(cpu[OURS], cpu[AIOHTTP]), ratio(cpu[HTTPX], cpu[OURS])
        measured.goals += [
            at_most(f"CPU to read {megabytes} MB of inventory: msgspec Structs are 1", 1.0, structs.median),
            at_least("the same: times faster than pydantic", 3, pydantic.median),
        ]
        table = Table(f"An inventory of {megabytes} MB", ("client", "CPU ms", "times ours", "MB a second"))
        for name, taken in samples.items():
            spread = Spread.of(sample.cpu * 1000 for sample in taken)
            speed = round(megabytes / spread.median * 1000)
            table.rows.append((name, str(spread), str(ratio(cpu[name], cpu[OURS])), speed))
        measured.tables.append(table)
        refreshes = fresh(partial(_refreshes, megabytes, rounds))
        measured.goals.append(
            at_most(
                f"CPU of a refresh of {megabytes} MB in which 1 % of surveys changed: a full read is 1",
                0.15,
                ratio(refreshes["refresh"], refreshes["full"]).median,
            )
        )
    return measured


def _refreshes(megabytes: int, rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds of reading an inventory in full, and as a client that knows the one before."""
    body = inventory(megabytes)
    later, known = refreshed(body), KnownSurveys()
    before = quotas_of(body, known)

    def refresh() -> float:
        # What is known is that of the inventory before, in each round.
        _held = quotas_of(body, known)
        return _cpu(later, known)

    taken = interleaved({"full": lambda: _cpu(later, KnownSurveys()), "refresh": refresh}, rounds)
    assert len(quotas_of(later, known).surveys) == len(before.surveys)
    return taken


def _cpu(body: bytes, known: KnownSurveys) -> float:
    gc.collect()
    started = time.process_time()
    _quotas: Quotas = quotas_of(body, known)
    return time.process_time() - started


def _samples(megabytes: int, rounds: int) -> dict[str, list[Sample]]:
    with TemporaryDirectory() as folder, ExitStack() as stack:
        body = Path(folder) / "inventory.json"
        body.write_bytes(inventory(megabytes))
        processes = {
            name: stack.enter_context(contender(name, Address("http://127.0.0.1"))) for name in (*PEERS, WHOLE)
        }
        takers = {name: partial(each.call, "decode", body) for name, each in processes.items()}
        return interleaved(takers, rounds)


# --- The inventories


def inventory(megabytes: float) -> bytes:
    """Return a body of Get Quotas of this size. It is the same each time.

    The simulator generates some hundred surveys, which are repeated with other IDs: to generate all of them
    would take minutes.
    """
    made = msgspec.json.decode(to_json(generate_inventory(1, surveys=_SEEDED_SURVEYS)))
    size, surveys = 0, []
    for survey in _repeated(made["Surveys"]):
        surveys.append(survey)
        size += len(survey) + 1
        if size >= megabytes * 1e6:
            break
    country, expires = made["CountryID"], made["CacheExpires"]
    return b'{"Surveys":[%b],"CountryID":%d,"CacheExpires":"%b"}' % (
        b",".join(surveys),
        country,
        expires.encode(),
    )


def refreshed(body: bytes) -> bytes:
    """Return the inventory of a minute later: one survey in a hundred has changed."""
    made = msgspec.json.decode(body)
    for survey in made["Surveys"][::100]:
        survey["EstimatedCompletesRemaining"] += 1
    return msgspec.json.encode(made)


def _repeated(surveys: list[dict[str, Any]]) -> Iterator[bytes]:
    while True:
        for survey in surveys:
            yield msgspec.json.encode(survey)
            _shift(survey)


def _shift(value: Any) -> None:
    """Change all IDs, in place."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name in _IDS and inner:  # wave 0 means any wave
                value[name] = inner + _SHIFT
            else:
                _shift(inner)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for inner in value:
            _shift(inner)
