"""A service that is away for three seconds, and a gateway that allows twenty requests per second."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from sampling_async import InviteRequest, RetryPolicy, SamplingClient
from scoreboard.board import Row, Run, at_least, at_most, exactly, published
from scoreboard.testkit import tool

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTH: Final = 8
ENOUGH: Final = 5
AWAY: Final = 3.0
NOTICED: Final = 2.0
RATE: Final = 20
LIMITS: Final = f"limit_req_zone $server_port zone=all:1m rate={RATE}r/s;"
IDS: Final = 100
DIRECT: Final = RetryPolicy(unprocessed={408, 425, 429, 503})


@dataclass
class Trial:
    """The result of a fan-out.

    Attributes:
        statuses: How many quota IDs had each status.
        lies: Outcomes that contradict the ledger.
        seconds: Its duration.
        noticed: Seconds from the return of the service to the first response.
    """

    statuses: Counter[str] = field(default_factory=Counter)
    lies: int = 0
    seconds: float = 0.0
    noticed: float | None = None


def rows(run: Run) -> list[Row]:
    """Measure without nginx, and with it if it is installed."""
    found = _outage_rows("connection refused and cut", _outage(run.of(0, 4_000), None))
    if tool("real_proxies").installed("nginx") is None:
        return [*found, published("behind nginx", "not measured: nginx (a Debian package) is not installed")]
    found += _outage_rows("502 of nginx", _outage(run.of(0, 4_000), {}))
    for instead, title in (
        ("200 '<p>Back soon'", "page of nginx, 200"),
        ("302 /maintenance", "302 of nginx"),
        ("404", "404 of nginx"),
    ):
        away = f"location @away {{ default_type text/html; return {instead}; }}"
        options = {"location": "error_page 502 504 = @away;", "server": away}
        # They do not lower the limit as a 502 does, so others are sent until five have failed.
        found += _outage_rows(title, _outage(run.of(0, 4_000), options), more=ENOUGH - 1)
    requests = run.of(200, 600)
    for status, policy, title in (
        (429, None, "429"),
        (503, DIRECT, "503 counted as a refusal"),
        (503, None, "503 that proves nothing"),
    ):
        trial = _limited(requests, status, policy)
        name = f"nginx lets {RATE} requests a second through, {requests} asked, {title}"
        answered = trial.statuses["invited"] + trial.statuses["rejected"]
        found.append(at_least(f"{name}: of the allowed rate", 0.9, answered / 2 / trial.seconds / RATE))
        if policy is None and status == 503:
            # 3 % of them; in the short version also those at the start, before the rate is known.
            most, share = run.of(8.0, 3.0), 100 * trial.statuses["unknown"] / trial.statuses.total()
            found.append(at_most("the same: `unknown`", most, share, unit="%"))
        else:
            found.append(exactly("the same: IDs without a response", 0, 2 * requests - answered))
        found.append(exactly("the same: lies", 0, trial.lies))
    return found


def _outage_rows(how: str, trial: Trial, more: int = 1) -> list[Row]:
    name, window = f"service away for {AWAY:.0f} s ({how})", (WIDTH + more) * IDS
    asked = f"{trial.statuses.total():,} IDs in {trial.seconds:.0f} s, {WIDTH} requests at once"
    note = f"one window of requests and {more} more; {asked}"
    return [
        at_most(f"{name}: IDs `unknown`", window, trial.statuses["unknown"], note=note),
        exactly(f"{name}: IDs `not_sent`", 0, trial.statuses["not_sent"]),
        exactly(f"{name}: lies", 0, trial.lies),
        at_most(f"{name}: return noticed after", NOTICED, trial.noticed or 999.0, unit="s"),
    ]


def _outage(members: int, behind: dict[str, str] | None) -> Trial:
    """Fan out members until the service has responded again for a while, and at least this many.

    Args:
        members: The least number.
        behind: The options of nginx in front of the service; None without it.
    """
    with tool("backend").Backend(0.002) as backend, _in_front(backend.url, behind) as url:
        trial = Trial()

        def requests() -> Iterator[InviteRequest]:
            number = 0
            while number < members or time.perf_counter() < backend.back_at + NOTICED:
                number += 1
                yield InviteRequest(f"m{number}", range(1, IDS + 1))

        def seen(outcome: Any) -> None:
            since = time.perf_counter() - backend.back_at
            if since > 0 and trial.noticed is None and outcome.status in {"invited", "rejected"}:
                trial.noticed = since

        with backend.outage(1.0, AWAY):
            asyncio.run(_asked(url, requests(), trial, backend.ledger, seen))
        return trial


def _limited(requests: int, status: int, policy: RetryPolicy | None) -> Trial:
    location = f"limit_req zone=all burst=5; limit_req_status {status};"
    with (
        tool("backend").Backend() as backend,
        _in_front(backend.url, {"http": LIMITS, "location": location}) as url,
    ):
        trial = Trial()
        asked = (InviteRequest(f"m{number}", [2, 3]) for number in range(requests))
        asyncio.run(_asked(url, asked, trial, backend.ledger, retry=policy))
        return trial


@contextmanager
def _in_front(url: str, nginx: dict[str, str] | None) -> Iterator[str]:
    with nullcontext(url) if nginx is None else tool("real_proxies").nginx(url, **nginx) as address:
        yield address


async def _asked(
    url: str, requests: Iterator[InviteRequest], trial: Trial, ledger: Any, seen: Any = None, **options: Any
) -> None:
    known = tool("doubles")
    began = time.perf_counter()
    client = SamplingClient(url, panel_guid=known.PANEL, api_key=known.KEY, max_concurrency=WIDTH, **options)
    async with client, client.fan_out(requests) as outcomes:
        async for outcome in outcomes:
            trial.statuses[outcome.status] += 1
            trial.lies += len(ledger.lies([outcome])) if outcome.status != "unknown" else 0
            if seen is not None:
                seen(outcome)
    trial.seconds = time.perf_counter() - began
