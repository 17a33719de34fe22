"""Measure whether a compiled module of our own would pay: the bulk, pure and compiled by Cython, in turn.

    pip install cython setuptools aiohttp
    python benchmarks/compiled.py [--rounds 7]

Needs a C compiler. Copies of the package are compiled as they are, without a change of the code: all modules
that a bulk request goes through, or only those with few coroutines. Each measurement is a process of its own:
the CPU time of a bulk of 300 requests, every outcome looked at, divided by that of aiohttp with msgspec in
the same process.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PLAIN: Final = (
    *("_pacing/gate", "_pacing/limit", "_pacing/outage"),
    *("_protocol/bulk_reply", "_protocol/requests", "_protocol/results"),
    *("_wire/http1", "_pacing/turns"),
)
"""Modules of plain functions, for the most part."""

COROUTINES: Final = (
    *("_bulk/invites", "_bulk/job", "_bulk/options", "_bulk/source", "_bulk/stream", "_calls/call"),
    *("_pacing/background", "_pacing/blocks"),
    *("_wire/connection", "_wire/engine", "_wire/reader", "_wire/session", "_wire/sockets"),
)
"""The rest, without `_pacing/jobs`: it asks coroutines for their state, which those of Cython do not tell."""

KINDS: Final = {"pure": (), "plain functions compiled": PLAIN, "all compiled": (*PLAIN, *COROUTINES)}

BUILD: Final = """
import sys
from Cython.Build import cythonize
from setuptools import Extension, setup

modules = sys.argv.pop().split()
found = [Extension(f"sampling_async.{m.replace('/', '.')}", [f"sampling_async/{m}.py"]) for m in modules]
options = {"language_level": 3, "compiler_directives": {"annotation_typing": False}, "quiet": True}
setup(name="compiled", packages=[], ext_modules=cythonize(found, **options))
"""

MEASURE: Final = """
import asyncio, json, sys
sys.path[:0] = [".", "benchmarks"]
from peers.aiohttp_msgspec import AiohttpClient
from peers.sampling import SamplingAsync
from speed.canned_server import canned_service
from speed.measuring import Watch

async def main(address):
    taken = {}
    for client in (SamplingAsync, AiohttpClient):
        async with client(*address[:3], 64) as running:
            for _ in range(8):
                watch = Watch()
                await running.bulk(address.member_code, range(1, 30_001))
                taken.setdefault(client.name, []).append(watch.sample().cpu)
    return {name: min(each) for name, each in taken.items()}

if __name__ == "__main__":
    with canned_service() as address:
        print(json.dumps(asyncio.run(main(address))))
"""


def made(folder: Path, modules: tuple[str, ...]) -> Path:
    """Copy the package and what measures it, and compile some of its modules."""
    for name in ("sampling_async", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    (folder / "measure.py").write_text(MEASURE, encoding="utf-8")
    if modules:
        (folder / "build.py").write_text(BUILD, encoding="utf-8")
        command = [sys.executable, "build.py", "build_ext", "--inplace", "-j2", " ".join(modules)]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as name:
        folders = {kind: made(Path(name, str(at)), KINDS[kind]) for at, kind in enumerate(KINDS)}
        for _ in range(rounds):
            for kind, folder in folders.items():
                command = [sys.executable, "measure.py"]
                done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
                cpu = json.loads(done.stdout)
                times[kind].append(cpu["sampling_async"] / cpu["aiohttp + msgspec"])
    for kind, ratios in times.items():
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(
            f"{kind:25} {statistics.median(ratios):.2f} (median of {rounds}; {spread}); aiohttp + msgspec is 1"
        )


if __name__ == "__main__":
    main()
