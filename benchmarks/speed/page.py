"""The page: goals first, then all sections, the plots, and how to read them."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import TYPE_CHECKING, Any, Final

from scoreboard.board import beginning, met, shown, table

if TYPE_CHECKING:
    from speed.plots import Plot
    from speed.sections import Section

LIBRARIES: Final = (
    *("msgspec", "attrs", "anyio", "httptools", "httpx", "httpcore", "aiohttp", "httpx-aiohttp"),
    *("pydantic", "pyreqwest", "uvloop", "openapi-python-client"),
)
HOW_TO_READ: Final = """\
**What is measured.** `sampling_async` as it comes, over real sockets on loopback, beside three other clients
in `benchmarks/peers/`: *aiohttp + msgspec*, by hand, the fastest that can be written in an afternoon; *httpx
+ pydantic*, as most are written; *openapi-python-client*, generated from the simulator's OpenAPI document.
Each cuts into requests of 100 IDs, bounds what runs at once with pools as wide, reads every answer into
models of the same fields, and matches it to the IDs asked. Ours makes an outcome for each ID besides. The
service answers from memory, half of the IDs with an invite (`benchmarks/speed/canned_server.py`); where times
are said, it waits as the simulator does.

**What is not.** Faults and what is said about them: that is the scoreboard's page. TLS, real networks, gzip.
What the service costs: it has a process of its own.

**Why CPU time, and why ratios.** Wall time on loopback is mostly the service's and the machine's. CPU time of
the client's process, with all its threads, is what a program pays that does other work beside. It too depends
on the machine, on its neighbours and on how warm it is; compare within this page, never between machines.
Goals are therefore set for ratios.

**Rounds.** All that is compared is sampled in turns, one sample of each in every round, each time beginning
with another one; a ratio is taken within a round, and its median over the rounds is what counts. Figures are
medians, with the lower and upper quartile in brackets: where these lie far apart, the machine was restless.
Every client has a process of its own, is warmed up, and is asked a few uncounted requests before each sample,
since idle connections are closed after seconds; garbage is collected before each. All samples are in the JSON
file beside this page.

**Again.** `python benchmarks/speed` makes this page, in twelve minutes or so; the command below a title
makes its section alone; `--quick` is for a first look. Needs the dependency group `bench`."""


def markdown(head: dict[str, Any], sections: list[Section], plots: list[Plot]) -> list[str]:
    """Return the lines of the page."""
    about = "Written by `python benchmarks/speed`; every figure was measured in this run."
    rows = [row for section in sections for row in section.measured.goals]
    goals = [
        (row.name, row.goal, shown(row.ours, row.unit), met(row), row.note, f"`{section.command}`")
        for section in sections
        for row in section.measured.goals
    ]
    lines = beginning("Speed", about, head, rows, f"{head['version']} run")
    lines += table(("what", "goal", "measured", "met", "note", "command"), goals)
    for section in sections:
        lines += ["", f"## {section.title}", "", f"`{section.command}` ({section.seconds:.0f} s)"]
        for each in section.measured.tables:
            lines += ["", f"**{each.title}**", "", *table(each.columns, each.rows)]
        for note in section.measured.notes:
            lines += ["", note]
    lines += ["", "## Plots"]
    for plot in plots:
        lines += ["", f"![{plot.title}]({plot.file})", "", plot.caption]
    return [*lines, "", "## How to read this", "", HOW_TO_READ]


def document(head: dict[str, Any], sections: list[Section]) -> str:
    """Return the results as JSON, with all samples. A list of numbers is on one line."""
    text = json.dumps(
        {"run": head, "sections": [_plain(section) for section in sections]}, indent=1, ensure_ascii=False
    )
    return re.sub(r"\[[-\d.e,\s]+\]", lambda found: re.sub(r"\s+", " ", found[0]), text)


def _plain(value: Any) -> Any:
    """Return a value as JSON types, with numbers rounded to their precision."""
    if dataclasses.is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return value
