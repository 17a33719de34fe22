"""Measure the CPU time of importing the client, matching alone, and the libraries under the client.

python benchmarks/import_time.py [--runs 15]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile

SUBJECTS = {
    "libraries": "import httpx, cattrs, anyio",
    "package": "import sampling_async",
    "client": "from sampling_async import SamplingClient",
    "first client": (
        "from uuid import UUID; from sampling_async import SamplingClient;"
        " SamplingClient('https://s.example', panel_guid=UUID(int=1), api_key=UUID(int=2))"
    ),
    "blocking": "from sampling_async.sync import SamplingClient",
    "matching": "from sampling_async.matching import QuotaIndex",
}


def cpu_milliseconds(statement: str, byte_code: str) -> float:
    """Return the CPU time of an import in a fresh interpreter. Its byte code is kept in a folder."""
    code = f"import time; t = time.process_time(); {statement}; print(time.process_time() - t)"
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": byte_code}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    return float(done.stdout) * 1000


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15)
    runs = parser.parse_args().runs
    times: dict[str, list[float]] = {name: [] for name in SUBJECTS}
    with tempfile.TemporaryDirectory() as byte_code:
        for counted in range(-1, runs):  # the first round writes the byte code
            for name, statement in SUBJECTS.items():
                measured = cpu_milliseconds(statement, byte_code)
                if counted >= 0:
                    times[name].append(measured)
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, statement in SUBJECTS.items():
        spread = f"{min(times[name]):.0f} to {max(times[name]):.0f}"
        print(f"{name:12} {statement[:50]:50} {medians[name]:6.1f} ms CPU (median of {runs}; {spread})")
    for name in ("package", "client", "first client", "blocking", "matching"):
        print(f"{name} by the libraries: {medians[name] / medians['libraries']:.2f}")


if __name__ == "__main__":
    main()
