"""Two processes with one journal, after the file was opened in different ways; and damage to its files.

A process runs a panel with a journal. Meanwhile the file is opened in another way: by a copy, a second fan-out,
`open`, SQLite, a backup, a fork. Then another process is started with the same panel and the same journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any, Final, TypeAlias

import httpx
from speed.remote import fresh

from sampling_async import InviteRequest, Journal, JournalError
from scoreboard.board import Row, Run, at_least, exactly
from scoreboard.testkit import tool

doubles: Final = tool("doubles")

MEMBERS: Final = 20
QUOTAS: Final = 100
CHUNK: Final = 10
Pairs: TypeAlias = "Counter[tuple[str, int]]"
Look: TypeAlias = Callable[[Path], Any]


def rows(run: Run) -> list[Row]:
    """Open running journals in different ways, then damage some journals."""
    rounds = run.of(2, 20)
    with tempfile.TemporaryDirectory() as folder:
        tries = [
            _tried(Path(folder) / f"{name}{number}", name) for number in range(rounds) for name in sorted(LOOKS)
        ]
        flips, noticed, wrong = _damaged(Path(folder) / "damaged", run.of(150, 3_000), run.seed)
        kinds = {name: _is_noticed(Path(folder) / "kinds", damage) for name, damage in DAMAGE.items()}
    unnoticed = ", ".join(name for name, is_noticed in kinds.items() if not is_noticed)
    note = f"{rounds} rounds of {', '.join(sorted(LOOKS))}; {MEMBERS} members and {QUOTAS} IDs each"
    return [
        at_least(
            "attempts to open a running journal in another way", rounds * len(LOOKS), len(tries), note=note
        ),
        exactly("other processes let in", 0, sum(was_let_in for was_let_in, _, _ in tries)),
        exactly("pairs asked twice", 0, sum(twice for _, twice, _ in tries)),
        exactly("files malformed in the end", 0, sum(malformed for _, _, malformed in tries)),
        exactly("kinds of damage noticed", len(kinds), sum(kinds.values()), note=unnoticed or ", ".join(kinds)),
        exactly(
            "flipped bytes that changed an outcome of a journal",
            0,
            wrong,
            note=f"of {flips} in any of its files, {noticed} were refused, and the others do no harm",
        ),
    ]


# --- Other ways to open the file


def _copy(path: Path) -> None:
    shutil.copy(path, path.with_name("copy"))


def _fan_out(path: Path) -> None:
    if _run(path)[0]:
        raise RuntimeError("a second fan-out of the same process was let in")


def _sqlite(path: Path) -> None:
    database = sqlite3.connect(path, timeout=0)
    with contextlib.closing(database), contextlib.suppress(sqlite3.OperationalError):
        database.execute("SELECT count(*) FROM sqlite_master").fetchall()


def _fork(_path: Path) -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)


LOOKS: Final[dict[str, Look | None]] = {
    "a copy": _copy,
    "open and read": Path.read_bytes,
    "a second fan-out": _fan_out,
    "SQLite": _sqlite,
    "a fork": _fork,
    "a backup": None,  # through the journal in use
}


def _panel() -> list[InviteRequest]:
    return [InviteRequest(f"m{number:04}", range(1, QUOTAS + 1)) for number in range(MEMBERS)]


def _tried(path: Path, look: str) -> tuple[bool, int, bool]:
    """Run a panel, open its journal meanwhile, and start a second process.

    Returns:
        Whether the second process was admitted, how many pairs were sent twice, whether the file is malformed.
    """
    asked: Pairs = Counter()
    was_let_in = asyncio.run(_first(path, look, asked))
    asked.update(_run(path)[1])
    with contextlib.closing(sqlite3.connect(path)) as database:
        is_whole = database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    return was_let_in, sum(times > 1 for times in asked.values()), not is_whole


async def _first(path: Path, look: str, asked: Pairs) -> bool:
    """Run half of a panel, open its journal, let another process try, and run the rest."""
    journal = Journal(path)
    async with (
        doubles.client(_counting(asked), max_concurrency=4) as client,
        client.fan_out(_panel(), journal=journal, chunk_size=CHUNK) as stream,
    ):
        for _ in range(MEMBERS * QUOTAS // 2):
            await anext(stream)
        act = LOOKS[look]
        if act is None:
            await journal.backup(path.with_name(f"{path.name}-copy"))
        else:
            await asyncio.to_thread(act, path)
        was_let_in, others = await asyncio.to_thread(fresh, _run, path)
        asked.update(others)
        async for _ in stream:
            pass
    return was_let_in


def _counting(asked: Pairs) -> Callable[[httpx.Request], Awaitable[httpx.Response]]:
    async def answer(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0.001)
        member_code = request.url.path.split("/")[-2]
        asked.update((member_code, quota_id) for quota_id in doubles.asked(request))
        return httpx.Response(200, json=doubles.bulk(request))

    return answer


async def _asked(path: Path) -> tuple[bool, Pairs]:
    """Run the panel. Return whether the journal admitted this run, and the pairs that were sent."""
    asked: Pairs = Counter()
    try:
        await _outcomes(_counting(asked), path, _panel())
    except JournalError:
        return False, asked
    return True, asked


async def _outcomes(
    service: Any, path: Path, panel: list[InviteRequest], then: Callable[[], Any] = tuple
) -> dict[Any, Any]:
    """Run a panel to its end, and call a function before the journal is released."""
    async with (
        doubles.client(service) as client,
        client.fan_out(panel, journal=path, chunk_size=CHUNK) as stream,
    ):
        known = {(o.member_code, o.quota_id): (o.status, o.invite) async for o in stream}
        then()
    return known


def _run(path: Path) -> tuple[bool, Pairs]:
    return asyncio.run(_asked(path))


# --- Damage


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x55
    path.write_bytes(content)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


_WAYS: Final = {"cut": _cut, "flipped": _flip, "emptied": _empty, "deleted": Path.unlink}
_FILES: Final = {"": "the file", "-wal": "its last rows", "-lock": "the file beside it"}
DAMAGE: Final = {
    f"{name} {way}": (end, act) for end, name in _FILES.items() for way, act in _WAYS.items()
}  # each is done to a journal after a SIGKILL


def _killed(path: Path) -> dict[Any, Any]:
    """Make a journal like that of a killed process. Return its outcomes."""

    def keep() -> None:
        for end in _FILES:
            shutil.copy(f"{path}{end}", f"{path}-kept{end}")

    service = doubles.Service(doubles.bulk)
    asyncio.run(_outcomes(service, path, _panel()[:3]))
    return asyncio.run(_outcomes(service, path, _panel()[:6], keep))


def _told(path: Path) -> dict[Any, Any] | None:
    """Return the outcomes that a run gets from a journal; None if the journal is refused."""
    service = doubles.Service(httpx.Response(403))  # IDs that are not in the journal end as not_sent
    try:
        return asyncio.run(_outcomes(service, path, _panel()[:6]))
    except JournalError:
        return None


def _restore(kept: Path, path: Path) -> None:
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()
    for end in _FILES:
        shutil.copy(f"{kept}{end}", f"{path}{end}")


def _is_noticed(path: Path, damage: tuple[str, Callable[[Path], Any]]) -> bool:
    kept = path.with_name(f"{path.name}-kept")
    if not kept.exists():
        _killed(path)
    again = path.with_name("again")
    _restore(kept, again)
    end, act = damage
    act(again.with_name(again.name + end))
    return _told(again) is None


def _damaged(path: Path, flips: int, seed: int) -> tuple[int, int, int]:
    """Flip bytes, one at a time. Return how many, how many of them were refused, and how many led to a lie."""
    known, random, noticed, wrong = _killed(path), Random(seed), 0, 0
    again = path.with_name("flipped")
    for _ in range(flips):
        _restore(path.with_name(f"{path.name}-kept"), again)
        file = again.with_name(again.name + random.choice(list(_FILES)))
        content = bytearray(file.read_bytes())
        content[random.randrange(len(content))] ^= random.randrange(1, 256)
        file.write_bytes(content)
        told = _told(again)
        noticed += told is None
        wrong += told is not None and told != known
    return flips, noticed, wrong
