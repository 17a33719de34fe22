"""Guard the speed that was reached: ratios of CPU time in one run, with a margin for any machine.

    python benchmarks/speed/guard.py

This does not tell how fast the client is; `python benchmarks/speed` does. The limits are twice the values
measured there. A busy machine slows all clients of a round down, so it does not pass a limit; a change that
doubles the cost of a request does. The exit code is 1 if a limit is passed in all of three tries.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # there, the modules of this folder are a package

from speed import beside_plain, bulk  # noqa: E402
from speed.campaign import Campaigner  # noqa: E402
from speed.canned_server import Address, canned_service  # noqa: E402
from speed.contenders import AIOHTTP, BARE, HTTPX, OURS, WORKERS  # noqa: E402
from speed.journal import Journaling  # noqa: E402
from speed.measuring import ratio  # noqa: E402

if TYPE_CHECKING:
    from speed.measuring import Sample

TRIES: Final = 3
ROUNDS: Final = 5
REQUESTS: Final = 100
LONG_REQUESTS: Final = 1_000  # of what also has a cost for each run
LIMITS: Final = {
    AIOHTTP: 2.1,
    WORKERS: 1.9,
    BARE: 4.6,
    HTTPX: 0.22,
    "new": 3.1,
    "resumed": 3.8,
    "campaign": 4.6,
}
"""The most that we may cost by each other client, and that a fan-out may cost by a plain one."""


def main() -> int:
    """Measure until the limits are kept, at most three times. Return the exit code."""
    with canned_service() as address:
        for _ in range(TRIES):
            found = ratios(address)
            for name, value in found.items():
                print(f"CPU a request by {name}: {value:.2f} (at most {LIMITS[name]})")
            if all(value <= LIMITS[name] for name, value in found.items()):
                return 0
    return 1


def ratios(address: Address) -> dict[str, float]:
    """Return what a bulk costs by other clients, and a journal and a campaign by a plain fan-out."""
    found = {}
    taken = bulk.samples_of((OURS, AIOHTTP, WORKERS, BARE, HTTPX), address, REQUESTS, ROUNDS)
    for name in (AIOHTTP, WORKERS, BARE, HTTPX):
        found[name] = _ratio(taken[OURS], taken[name])
    for make, kinds in ((Journaling, ("new", "resumed")), (Campaigner, ("campaign",))):
        all_kinds = ("plain", *kinds)
        taken = beside_plain.samples_of(
            make, address, all_kinds, width=bulk.WIDTH, requests=LONG_REQUESTS, rounds=ROUNDS
        )
        found |= {kind: _ratio(taken[kind], taken["plain"]) for kind in kinds}
    return found


def _ratio(ours: list[Sample], other: list[Sample]) -> float:
    return ratio(*([sample.cpu for sample in samples] for samples in (ours, other))).median


if __name__ == "__main__":
    sys.exit(main())
