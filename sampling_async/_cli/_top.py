"""The command `top`: what a running client does, live, from the socket of `SamplingClient.serve_snapshots`."""

from __future__ import annotations

import json
import socket
import time
from itertools import chain
from math import isinf
from pathlib import Path  # noqa: TC003  typer reads it at run time
from typing import TYPE_CHECKING, Any, Final

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from sampling_async import InvalidRequestError, __version__
from sampling_async._cli import _rendering as show
from sampling_async._cli._connection import fail
from sampling_async._cli._options import argument, flag, option, takes
from sampling_async._cli._signals import INTERRUPTED
from sampling_async._cli._tally import DONE, INCOMPLETE, USAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rich.console import RenderableType

    State = Mapping[str, Any]
    """One line of the socket: the fields of `Snapshot`, and who the process is."""

CAMPAIGN_SOCKET: Final = "top.sock"  # in the folder of a campaign, while it runs
_PATIENCE: Final = 2.0  # seconds for one answer of the process
_LONGEST_LINE: Final = 2**20
_LONGEST_PAUSE: Final = 86_400.0
_NONE: Final = "-"
_LATENCY_COLUMNS: Final = (
    ("last 5 to 10 minutes", 0),
    ("answered", 3),
    ("p50", 1),
    ("p90", 4),
    ("p99", 0),
    ("longest", 2),
)


@takes(json="Print a line of JSON for each look, on a terminal too.")
def top(
    path: Path | None = argument("SOCKET", "The socket that the process serves.", default=None),
    every: float = option("SECONDS", "Seconds between two looks.", "--every", min=0.1, default=1.0),
    *,
    out: Path | None = option("DIR", "The folder of a campaign that runs, in place of SOCKET."),
    once: bool = flag("Look once, and end.", "--once"),
) -> None:
    """Show what a running client does: limits, waiting requests, latency, connections.

    A campaign shows itself in its folder. Any other program must do so:
    `async with client.serve_snapshots(SOCKET)`. Looking costs the program
    nothing else. The command ends with exit code 1 when the process goes
    away. Ctrl-C ends it too.
    """
    if not every <= _LONGEST_PAUSE:  # so that nan is refused too
        fail(f"--every takes seconds up to {_LONGEST_PAUSE:.0f}, which is a day", USAGE)
    if out is not None:
        if path is not None:
            raise InvalidRequestError("name a SOCKET, or the folder of a campaign with --out, and not both")
        path = out / CAMPAIGN_SOCKET
    elif path is None:
        raise InvalidRequestError("name the SOCKET of a program, or the folder of a campaign with --out")
    looks = _looks(path, every, is_once=once)
    first = next(looks)
    try:
        if show.as_lines():
            for state in chain([first], looks):
                show.emit_json(state)
        else:
            _show_live(first, looks, is_once=once)
    except KeyboardInterrupt:  # the usual end
        raise typer.Exit(INTERRUPTED) from None
    if not once:
        show.errors().print(show.plain(f"{path}: the process no longer answers"), soft_wrap=True)
    raise typer.Exit(DONE if once else INCOMPLETE)


class AnotherVersion(ValueError):  # noqa: N818  caught in this module
    """The process sent JSON that is not a snapshot of this version."""


def _looks(path: Path, every: float, *, is_once: bool) -> Iterator[State]:
    """Yield the state until the process goes away."""
    try:
        yield looked(path)
    except AnotherVersion:
        raise InvalidRequestError(
            f"{path}: what the process shows is not a snapshot of this version, {__version__}; use the command "
            "of the version that runs there"
        ) from None
    except TimeoutError:
        raise InvalidRequestError(
            f"{path}: the process there did not answer within {_PATIENCE:g} s: its event loop stands still. "
            "Try again"
        ) from None
    except (OSError, ValueError) as exc:
        if path.name == CAMPAIGN_SOCKET:
            raise InvalidRequestError(
                f"{path.parent}: no campaign runs there now, or its path is too long for a socket "
                f"({exc.__class__.__name__})"
            ) from None
        raise InvalidRequestError(
            f"{path}: no process shows its snapshots there ({exc.__class__.__name__}); in the program, use "
            f"`async with client.serve_snapshots({str(path)!r})`"
        ) from None
    while not is_once:
        time.sleep(every)
        try:
            yield looked(path)
        except TimeoutError:
            continue  # it is busy: its event loop stands still
        except (OSError, ValueError):
            return


def looked(path: Path) -> State:
    with socket.socket(socket.AF_UNIX) as sock:
        until = time.monotonic() + _PATIENCE
        sock.settimeout(_PATIENCE)
        sock.connect(str(path))
        line = b""
        while not line.endswith(b"\n") and (part := sock.recv(_LONGEST_LINE)):
            line += part
            if len(line) > _LONGEST_LINE:
                break
            sock.settimeout(max(0.001, until - time.monotonic()))  # of the whole answer, not of each part
    try:
        state: State = json.loads(line)
    except RecursionError:
        raise AnotherVersion from None
    # The view reads all that is shown. A process of another version may lack some of it.
    try:
        view(state, state, 1.0)
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError):
        raise AnotherVersion from None
    return state


def _show_live(first: State, looks: Iterator[State], *, is_once: bool) -> None:
    screen = show.screen()
    if is_once:
        screen.print(view(first, None, 0.0, screen.width))
        return
    before, at = first, time.monotonic()
    shown, hint = view(first, None, 0.0, screen.width), Text("Ctrl-C ends it", "dim")
    with Live(Group(shown, hint), console=screen, auto_refresh=False) as live:
        for state in looks:
            now = time.monotonic()
            shown = view(state, before, now - at, screen.width)
            live.update(Group(shown, hint), refresh=True)
            before, at = state, now
        live.update(shown, refresh=True)


def view(state: State, before: State | None, seconds: float, width: int = 80) -> RenderableType:
    # `before` is the state of some seconds ago; None for the first.
    def rate(read: Callable[[State], float], unit: str = "") -> str:
        # Another process at the same socket counts from 0, and may have connections where the first had none.
        if before is None or seconds <= 0 or not (before["connections"] or not state["connections"]):
            return _NONE
        more = read(state) - read(before)
        return _NONE if before["pid"] != state["pid"] or more < 0 else f"{number(more / seconds)}{unit}/s"

    about = f"  process {state['pid']}  sampling-async {state['version']}"
    whose = " at ".join(filter(None, (state.get("name"), str(state["host"]))))
    title = Text.assemble(show.plain(whose, "bold"), show.plain(about))
    pace, tokens, bulk = state["requests_per_second"], state["retry_tokens"], _NONE
    if state["seconds_per_request"] is not None:
        bulk = f"{duration(state['seconds_per_request'])} + {duration(state['seconds_per_id'])} a quota ID"
    rows = [
        ("running", f"{state['running']} of {state['max_concurrency']}, limit {state['limit']}"),
        ("waiting", f"{state['waiting']}"),
        ("breaker", "closed" if state["breaker"] == "closed" else f"OPEN for {state['away_for']:.0f} s"),
        ("hold", f"{state['held_for']:.1f} s" if state["held_for"] else "none"),
        ("pace", "not limited" if pace is None else f"{number(pace)} bulk invites a second"),
        # JSON has no infinity, so it is null there.
        ("retry tokens", "unlimited" if tokens is None or isinf(tokens) else number(tokens)),
        ("attempts", f"{state['attempts']:,}, {rate(lambda each: each['attempts'])}"),
        ("failures", f"{state['failures']:,}, {rate(lambda each: each['failures'])}"),
        ("too late", f"{state['too_late']:,}, {rate(lambda each: each['too_late'])}"),
        ("unused invites", f"{state['unused_invites']:,}"),
        ("bulk invite", bulk),
    ]
    wires = state["connections"]
    if wires is not None:
        sent = rate(lambda each: each["connections"]["bytes_sent"] / 1000, " kB")
        came = rate(lambda each: each["connections"]["bytes_received"] / 1000, " kB")
        rows += [
            ("connections", f"{wires['open']} open, {wires['idle']} idle"),
            ("", f"{wires['opened']:,} opened, {wires['reused']:,} times used again"),
            ("bytes", f"{sent} sent, {came} received"),
        ]
    beside = show.new_table("", "")
    beside.show_header = False
    for name, value in rows:
        beside.add_row(Text(name, "dim"), show.plain(value))
    if not state["latency"]:
        return Group(title, beside, Text("no request was answered in the last minutes", "dim"))
    endpoints = [
        (
            show.plain(endpoint).plain,
            f"{found['count']:,}",
            *(duration(found[column]) for column in ("p50", "p90", "p99", "longest")),
        )
        for endpoint, found in sorted(state["latency"].items())
    ]
    return Group(title, beside, show.fitting_table(endpoints, _LATENCY_COLUMNS, width))


def number(value: float) -> str:
    """Return a number with three digits or more: 0.25, 41.2, 1,234."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"  # noqa: PLR2004


def duration(seconds: float) -> str:
    """Return a duration with its unit: 0.42 ms, 41.2 ms, 1.20 s."""
    return f"{number(seconds)} s" if seconds >= 1 else f"{number(seconds * 1000)} ms"
