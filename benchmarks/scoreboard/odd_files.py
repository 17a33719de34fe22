"""Files with drawn damage, given to commands: each is read or refused in words, and reading changes nothing.

The damage: other encodings, NUL, columns that stand twice, huge cells, numbers beyond any range, cut lines, and
pages of databases with other bytes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
import tempfile
import warnings
from collections import Counter
from contextlib import ExitStack, chdir
from pathlib import Path
from random import Random
from typing import Final
from unittest.mock import patch

from sampling_async import InviteRequest, to_json
from sampling_async.notifications import Inbox, OutcomeLedger
from sampling_async.simulator import Simulator
from scoreboard.board import Row, Run, exactly, published
from scoreboard.testkit import tool

cli: Final = tool("cli_kit")
notes: Final = tool("store_kit")
FAULT: Final = 70
HEAD: Final = 100
PAGE: Final = 4_096
NUMBERS: Final = (b"1e999", b"-1", b"99999999999999999999", b"NaN", b"1" * 400, b"0x1", b"")
ENCODINGS: Final = ("utf-16", "utf-8-sig", "latin-1", "utf-32", "cp500")
TEXTS: Final = (".csv", ".json", ".jsonl")
# What reads a file of the name.
COMMANDS: Final[dict[str, list[tuple[str, ...]]]] = {
    "panel.csv": [("match", "{}", "--inventory", "quotas.json", "--workers", "1")],
    "panel.jsonl": [("match", "{}", "--inventory", "quotas.json", "--workers", "1", "--allocate", "2")],
    "panel.parquet": [("match", "{}", "--inventory", "quotas.json", "--workers", "1")],
    "quotas.json": [("match", "panel.csv", "--inventory", "{}", "--workers", "1")],
    "bands.json": [("match", "panel.csv", "--inventory", "quotas.json", "--workers", "1", "--bands", "{}")],
    "rates.csv": [("quotas", "--currency-rates", "{}", "--json")],
    "requests.jsonl": [("fan-out", "{}"), ("bulk-invite", "m000001", "--file", "{}")],
    "n.db": [("outcomes", "--store", "{}"), ("notifications", "show", "--store", "{}")],
    "run.journal": [("outcomes", "--store", "{folder}/new.db", "--invites", "{}")],
    "out/campaign.ledger": [("campaign", "status", "{folder}/out"), ("campaign", "compare", "{folder}/out")],
}


def rows(run: Run) -> list[Row]:
    """Draw damaged files, and give each to a command."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    random, files = Random(run.seed), run.of(100, 5_000)
    faults, changed, codes = list[str](), list[str](), Counter[int]()
    with ExitStack() as blocks:
        folder = Path(blocks.enter_context(tempfile.TemporaryDirectory()))
        blocks.enter_context(chdir(folder))
        simulator = _right_files(folder)
        address = blocks.enter_context(simulator.serve())
        values = (address, simulator.panel_guid, simulator.api_key)
        blocks.enter_context(patch.dict(os.environ, dict(zip(cli.KEY_NAMES, values, strict=True))))
        for number in range(files):
            name, fault, is_changed, code = _tried(folder, random)
            codes[code] += 1
            if fault:
                faults.append(f"file {number}, {name}: {fault}")
            if is_changed:
                changed.append(f"file {number}, {name}")
    by_code = ", ".join(f"{count} with exit code {code}" for code, count in sorted(codes.items()))
    return [
        published("files with drawn damage, each given to a command", files, note=by_code),
        exactly(
            "commands that end with a traceback, or as a fault of the program",
            0,
            len(faults),
            note="; ".join(faults[:3]),
        ),
        exactly("files that reading has changed", 0, len(changed), note="; ".join(changed[:3])),
    ]


def _right_files(folder: Path) -> Simulator:
    """Write one right file of each kind, and serve what they are about."""
    simulator = Simulator(seed=4, surveys=6, members=12)
    lines = cli.panel_file(simulator, folder / "panel.jsonl").read_text().splitlines()
    cli.panel_file(simulator, folder / "panel.parquet")
    members = [
        {name: str(each) for name, each in json.loads(line).items() if not isinstance(each, list)}
        for line in lines
    ]
    (folder / "panel.csv").write_text(
        "".join(f"{','.join(row)}\n" for row in ([*members[0]], *(m.values() for m in members)))
    )
    (folder / "quotas.json").write_bytes(to_json(simulator.inventory))
    (folder / "bands.json").write_bytes((folder / "panel.bands.json").read_bytes())
    (folder / "rates.csv").write_text("CurrencyID,Rate,Name\n1,1,USD\n9,0.0064,JPY\n")
    quota_ids = cli.quota_ids(simulator, 20)
    requests = [{"MemberCode": code, "QuotaIDs": quota_ids} for code in simulator.members]
    (folder / "requests.jsonl").write_text("".join(json.dumps(each) + "\n" for each in requests))
    asyncio.run(_right_databases(folder, simulator))
    return simulator


async def _right_databases(folder: Path, simulator: Simulator) -> None:
    kit = tool("panel_kit")
    (folder / "out").mkdir()
    quota_ids = cli.quota_ids(simulator)
    async with simulator.client() as client, Inbox(folder / "n.db", secrets=notes.SECRET) as inbox:
        await notes.post(inbox, "completion", notes.COMPLETION)
        requests = [InviteRequest(code, quota_ids) for code in simulator.members]
        async with client.fan_out(requests, journal=folder / "run.journal") as outcomes:
            invites = [each async for each in outcomes]
        await OutcomeLedger(folder / "n.db").invited(invites)
        campaign = kit.campaign_of(simulator, client, folder, ledger=folder / "out" / "campaign.ledger")
        await campaign.plan()
        await kit.all_of(campaign.run())


def _tried(folder: Path, random: Random) -> tuple[str, str, bool, int]:
    """Give a command a damaged file; return which, the fault, whether it has changed, the exit code."""
    name = random.choice(sorted(COMMANDS))
    damaged, fault = random.choice((_in_text, _in_bytes)) if name.endswith(TEXTS) else _in_bytes, ""
    place = folder / "odd"
    shutil.rmtree(place, ignore_errors=True)
    odd = place / name
    odd.parent.mkdir(parents=True)
    body = damaged((folder / name).read_bytes(), random)
    odd.write_bytes(body)
    command = [each.format(odd, folder=place) for each in random.choice(COMMANDS[name])]
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    code = -1
    try:
        done = cli.run(*command)
        code = done.exit_code
        fault = done.stderr.splitlines()[-1] if code == FAULT or "Traceback" in done.stderr else ""
    except Exception as exc:  # noqa: BLE001  this is what is looked for
        fault = f"{type(exc).__name__}: {exc}"[:200]
    changed = any(not path.exists() or path.read_bytes() != held for path, held in before.items())
    return name, fault, changed, code


def _in_text(body: bytes, random: Random) -> bytes:
    """Return a text as other programs write it, and as nobody should."""
    lines = body.splitlines(keepends=True) or [b""]
    at = random.randrange(len(lines))
    match random.randrange(7):
        case 0:
            return body.decode().encode(random.choice(ENCODINGS), "replace")
        case 1:  # the first column, or key, stands twice
            mark = b"," if b"," in lines[0] else b":"
            first = lines[0].strip(b"{\n").partition(mark)[0]
            return b"".join([first + mark + lines[0], *lines[1:]])
        case 2:
            lines[at] = (
                lines[at].replace(b'"', b'"' + b"x" * 300_000, 1)
                if b'"' in lines[at]
                else b"x" * 300_000 + lines[at]
            )
        case 3:
            return re.sub(rb"\d+", lambda _: random.choice(NUMBERS), body, count=random.choice((1, 3, 1_000)))
        case 4:
            lines[at] = lines[at][: random.randrange(len(lines[at]) or 1)]
        case 5:
            lines[at] = b"\0" + lines[at] + b"\0"
        case _:
            lines = [b"[" * random.choice((1, 5_000)), *lines]
    return b"".join(lines)


def _in_bytes(body: bytes, random: Random) -> bytes:
    """Return bytes that a disk or a transfer has damaged; of a database not a cell, which no check can tell."""
    at = random.randrange(len(body))
    match random.randrange(4):
        case 0:
            return body[:at]
        case 1:
            at -= at % PAGE
            return body[:at] + random.randbytes(PAGE) + body[at + PAGE :]
        case 2:
            return random.randbytes(random.randrange(5_000))
        case _:
            changed = bytearray(body)
            for _ in range(random.choice((1, 10, 200))):
                changed[random.randrange(min(len(body), HEAD))] = random.randrange(256)
            return bytes(changed)
