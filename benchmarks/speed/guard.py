"""Guard the speed that was reached: two ratios of CPU time in one run, with a margin for any machine.

    python benchmarks/speed/guard.py

This does not tell how fast the client is; `python benchmarks/speed` does. The limits are twice the values
measured there. A busy machine slows all clients of a round down, so it does not pass a limit; a change that
doubles the cost of a request does. The exit code is 1 if a limit is passed in all of three tries.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # there, the modules of this folder are a package

from speed.bulk import samples_of  # noqa: E402
from speed.canned_server import canned_service  # noqa: E402
from speed.contenders import AIOHTTP, HTTPX, OURS  # noqa: E402
from speed.measuring import ratio  # noqa: E402

TRIES: Final = 3
ROUNDS: Final = 5
REQUESTS: Final = 100
MOST_OF_AIOHTTP: Final = 2.4
LEAST_OF_HTTPX: Final = 4.5


def main() -> int:
    """Measure until the limits are kept, at most three times. Return the exit code."""
    with canned_service() as address:
        for _ in range(TRIES):
            taken = samples_of((OURS, AIOHTTP, HTTPX), address, REQUESTS, ROUNDS)
            cpu = {name: [sample.cpu for sample in samples] for name, samples in taken.items()}
            dearer, cheaper = ratio(cpu[OURS], cpu[AIOHTTP]).median, ratio(cpu[HTTPX], cpu[OURS]).median
            print(
                f"CPU a bulk request: {dearer:.2f} of {AIOHTTP} (at most {MOST_OF_AIOHTTP}), "
                f"{cheaper:.2f} times less than {HTTPX} (at least {LEAST_OF_HTTPX})"
            )
            if dearer <= MOST_OF_AIOHTTP and cheaper >= LEAST_OF_HTTPX:
                return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
