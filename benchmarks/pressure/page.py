"""The page of figures, its picture and its raw numbers."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from scoreboard.board import beginning, met, shown, table, written

from pressure import goals

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from scoreboard.board import Row

    from pressure.runs import Results
    from pressure.trial import Seen

_WORST: Final = 8
PICTURE: Final = "pressure.png"

ABOUT: Final = """\
The client is the real one, with its default options: gate, limit, pace, retries, outage. Only its transport
and its clock are models (`benchmarks/pressure/service.py`, `tests/faults/virtual_time.py`). A request takes
0.1 s, within a tenth; a refusal comes after 10 ms; a request that waits for a worker waits there, and is
worked on even if the client has given up. Clicks are `generate_invite(deadline=...)` and come at random. The
load is given by what the service takes from a client of that width. A fan-out has forty quota IDs for each
member, four in a request. A trouble begins after five seconds. Views are two of one client, with clicks on
both. Shares are four of `share(of=4)`.

The matrix is not the whole product: each service meets each load, and the widths, times and kinds of clients
take turns over them. Overload meets each width and time. Some clicks have no `deadline=`: their host cancels
them after their time, as with `asyncio.timeout`.

- **What was possible** is what a scheduler answers that knows the service (`possible.py`). It has the
  client's width, sends a request only if a worker and a token are free, knows how long each will take and
  when the trouble begins and ends, and chooses the click whose deadline is nearest of those that will be
  answered in time. When a trouble begins, as many requests wait there as it works on, and are worked on
  meanwhile. Only what is answered before the end of a trial counts, for both. A client that sends more at once
  than its width (`max_concurrency`, by up to two clicks), or has more in the service's line when a trouble
  begins, can have a little more than 1.
- **Recovered** is the time from the end of the trouble, or of the last Retry-After, to the first second in
  which 0.9 of the old rate is answered, or 0.9 of what the scheduler answers in that second if that is less.
- **Wasted** are requests that a caller or a time limit gave up before their response.
- **Silent** is the longest time in which nothing is sent though callers wait, fewer requests than
  `max_concurrency` are under way, no Retry-After holds, and no outage is noticed.
- **Both move** is the share of spans of two seconds in which both a click and a request of the fan-out are
  answered, without the trouble and three seconds after it."""

ABOUT_PEERS: Final = """\
`aiohttp` cannot run on a modelled transport, so a semaphore, first come first served, with a time for each
call stands for it. Of botocore's adaptive mode, the rate limiter and the backoff are its own classes; its
bucket, which blocks a thread, is asked again when it has a token. The last one repeats a call until its time
is over. In this model a refusal costs the service nothing. So who asks on and on during a storm is first when
it ends: see the refused requests."""


def write(folder: Path, head: dict[str, Any], rows: Sequence[Row], results: Results) -> None:
    """Write the page, the picture and the numbers."""
    has_picture = find_spec("matplotlib") is not None
    folder.mkdir(parents=True, exist_ok=True)
    if has_picture:
        from pressure.picture import draw  # noqa: PLC0415  matplotlib is optional

        draw([each for each in results.peers if not isinstance(each, str)], folder / PICTURE)
    document = {
        "run": head,
        "figures": [asdict(row) for row in rows],
        "cells": [_numbers(seen) for seen in results.cells],
        "peers": [_numbers(seen) for seen in results.peers if not isinstance(seen, str)],
    }
    lines = _lines(head, rows, results, has_picture=has_picture)
    written(folder, "pressure", lines, json.dumps(document, indent=1))


def _lines(head: dict[str, Any], rows: Sequence[Row], results: Results, *, has_picture: bool) -> list[str]:
    more = (f"seed {head['seed']}", f"{len(results.cells)} cells", f"{head['cpu']} s of CPU")
    lines = beginning("Under pressure", _WRITTEN, head, rows, *more)
    cells = [(row.name, row.goal, _number(row), met(row), row.note) for row in rows]
    lines += table(("what", "goal", "measured", "met", "note"), cells)
    if has_picture:
        lines += ["", f"![Answered and sent a second, in and after a storm]({PICTURE})", "", _CAPTION]
    lines += ["", "## The worst cells", "", ABOUT]
    overloaded = [seen for seen in results.cells if seen.cell.load >= 2]
    troubled = [seen for seen in results.cells if seen.recovered is not None]
    both = [seen for seen in results.cells if seen.progress is not None]
    lines += _worst("Goodput at load 2 and 10", overloaded, lambda seen: seen.goodput)
    lines += _worst("Recovered latest", troubled, lambda seen: -goals.recovered(seen))
    lines += _worst("Most requests wasted", results.cells, lambda seen: -goals.wasted(seen))
    lines += _worst("Longest silence", results.cells, lambda seen: -goals.silent(seen))
    lines += _worst("A click and a fan-out, the least of both", both, lambda seen: seen.progress or 0.0)
    return [*lines, "", "## Beside other clients", "", ABOUT_PEERS, "", *of_peers(results.peers)]


_WRITTEN: Final = (
    "Written by `python benchmarks/pressure`; every figure was measured in this run, in virtual time."
)
_CAPTION: Final = (
    "Clicks of 2 s at half of what the service takes, beside a fan-out, and a storm of 429 from the fifth "
    "second to the ninth. Above, what is answered in time; below, what is sent: the storm refuses all of it."
)
_COLUMNS: Final = ("goodput", "recovered", "wasted", "silent", "both move", "refused")


def _worst(title: str, seen: Sequence[Seen], measure: Callable[[Seen], float]) -> list[str]:
    worst = sorted(seen, key=measure)[:_WORST]
    return [
        "",
        f"### {title}",
        "",
        *table(("cell", *_COLUMNS), [(each.cell.name, *_cells(each)) for each in worst]),
    ]


def of_peers(seen: Sequence[Seen | str]) -> list[str]:
    """Return the table of clients; of one that was not measured, the reason."""
    rows = [
        (each, *("" for _ in range(len(_COLUMNS) + 1)))
        if isinstance(each, str)
        else (each.cell.name, each.who, *_cells(each))
        for each in seen
    ]
    return table(("cell", "who", *_COLUMNS), rows)


def _cells(seen: Seen) -> tuple[str, ...]:
    return (
        f"{seen.goodput:.2f}",
        "" if seen.recovered is None else _seconds(seen.recovered),
        f"{goals.wasted(seen):.1f} %",
        f"{seen.silent:.2f} s",
        "" if seen.progress is None else f"{seen.progress:.2f}",
        f"{len(seen.refused):,}",
    )


def _seconds(seconds: float) -> str:
    return "not in the trial" if seconds == float("inf") else f"{seconds:.1f} s"


def _number(row: Row) -> str:
    return "never in the trial" if row.ours == float("inf") else shown(row.ours, row.unit)


def _numbers(seen: Seen) -> dict[str, Any]:
    recovered = seen.recovered
    return {
        "cell": seen.cell.name,
        "who": seen.who,
        "answered": len(seen.answered),
        "possible": seen.possible.count,
        "recovered": "never" if recovered == float("inf") else recovered,
        "sent": len(seen.sent),
        "refused": len(seen.refused),
        "wasted": seen.wasted,
        "silent": seen.silent,
        "progress": seen.progress,
        "late": seen.late,
    }
