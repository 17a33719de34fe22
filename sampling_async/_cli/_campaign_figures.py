"""The figures of a campaign while it runs, and the display that shows them."""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Final, Self

import anyio
from attrs import frozen
from rich.live import Live

from sampling_async._cli import _campaign_view as view
from sampling_async._cli import _rendering as show
from sampling_async._cli._connection import silence_stdout
from sampling_async._cli._tally import Tally
from sampling_async.campaign import Pairs

if TYPE_CHECKING:
    from collections.abc import Callable

    from sampling_async import InviteOutcome, SamplingClient
    from sampling_async.campaign import CampaignRun

_WINDOW: Final = 10.0
"""Seconds over which rates are averaged."""

_REDRAWN: Final = 0.25
_LINES: Final = 2.0


@frozen(kw_only=True)
class Figures:
    """Where a run stands at one moment.

    Attributes:
        state: `asking`, why it waits, or how it has ended.
        reason: Why it has ended although pairs are pending.
        pairs: The pairs of the campaign, by what became of them.
        members: Members asked for, in all runs.
        requests: Requests sent, in all runs.
        invites_per_second: Invites a second, as an average of the last seconds.
        requests_per_second: The same of requests.
        limit: How many requests the client now sends at once.
        expected_value: What the invites are expected to bring.
        currency_id: The currency; None if there are several.
        seconds_left: How long the rest takes at this pace; None if that is not known.
        refusals: Code, name and number of the refusals of this run, the most frequent first.
    """

    state: str
    reason: str
    pairs: Pairs
    members: int
    requests: int
    invites_per_second: float
    requests_per_second: float
    limit: float
    expected_value: float
    currency_id: int | None
    seconds_left: float | None
    refusals: tuple[tuple[int | None, str | None, int], ...]


class RunMetrics:
    """Reads the figures of a run.

    Args:
        run: The run, open.
        client: Its client.
        currency_id: The currency of the campaign.

    Attributes:
        tally: The outcomes of this run.
        state: How it has ended; None while it goes on.
    """

    def __init__(self, run: CampaignRun, client: SamplingClient, currency_id: int | None) -> None:
        self.tally = Tally()
        self.state: str | None = None
        self._run, self._client, self._currency_id = run, client, currency_id
        self._refusals: Counter[tuple[int | None, str | None]] = Counter()
        # Moment, invites, requests and pairs that were done by then.
        self._samples: deque[tuple[float, int, int, int]] = deque()
        self._measure()

    def add(self, outcome: InviteOutcome) -> None:
        """Count an outcome."""
        self.tally.add(outcome)
        if outcome.status == "rejected":
            self._refusals[outcome.result_code, outcome.result] += 1

    def read(self) -> Figures:
        """Return the figures of now."""
        run = self._run
        invites, requests, done = self._measure()
        pairs, waits = run.pairs, run.waiting_for
        # During a wait nobody knows how long it lasts.
        left = self._seconds_left(invites, done) if pairs.pending and waits in {None, "rate"} else None
        return Figures(
            state=self.state or ("stopping" if run.reason else waits or "asking"),
            reason=run.reason,
            pairs=pairs,
            members=run.members,
            requests=run.requests,
            invites_per_second=invites,
            requests_per_second=requests,
            limit=self._client.snapshot().limit,
            expected_value=run.expected_value,
            currency_id=self._currency_id,
            seconds_left=None if self.state else left,
            refusals=tuple((code, name, count) for (code, name), count in self._refusals.most_common()),
        )

    def _seconds_left(self, invites: float, done: float) -> float | None:
        """Return how long the pending pairs take, or the invites up to the cap if that is reached earlier."""
        pairs, cap = self._run.pairs, self._run.limits.max_invites
        ways = [(pairs.pending, done)]
        if cap is not None:
            ways.append((max(0, cap - pairs.invited - pairs.unknown), invites))
        return min((count / rate for count, rate in ways if rate), default=None)

    def _measure(self) -> tuple[float, float, float]:
        """Take a sample, and return invites, requests and pairs that are done, each a second."""
        now, pairs, samples = time.monotonic(), self._run.pairs, self._samples
        samples.append((now, pairs.invited, self._run.requests, pairs.planned - pairs.pending))
        while now - samples[0][0] > _WINDOW and len(samples) > 2:  # noqa: PLR2004  a rate needs two
            samples.popleft()
        seconds = max(now - samples[0][0], 1e-3)
        invites, requests, done = (
            (last - first) / seconds if seconds >= _REDRAWN / 2 else 0.0
            for first, last in zip(samples[0][1:], samples[-1][1:], strict=True)
        )
        return invites, requests, max(done, 0.0)


class Display:
    """Shows a run: live on a terminal, and as lines of JSON on stdout. A context manager.

    Args:
        read: Returns the figures.
        as_lines: Whether to write lines of JSON.
    """

    def __init__(self, read: Callable[[], Figures], *, as_lines: bool) -> None:
        self._read = read
        self._as_lines = as_lines
        console = show.stderr_console()
        # Lines of JSON and a live display on one screen would write into each other.
        is_live = console.is_terminal and not console.quiet and (not as_lines or show.stdout_is_file())
        self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False)
        self._is_live = is_live
        self._line_due = time.monotonic() + _LINES

    def __enter__(self) -> Self:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_live:
            self._live.stop()

    async def keep(self) -> None:
        """Show the figures until this is cancelled."""
        while True:
            if self._is_live:
                self._live.update(view.figures_view(self._read()), refresh=True)
            if self._as_lines and not show.is_quiet() and time.monotonic() >= self._line_due:
                self._line_due += _LINES
                self.write_line()
            await anyio.sleep(_REDRAWN)

    def write_line(self) -> None:
        """Write a line of JSON, if lines are wanted. A reader that went away does not end a campaign."""
        if not self._as_lines:
            return
        try:
            show.emit_json(view.figures_json(self._read()))
        except BrokenPipeError:
            self._as_lines = False
            silence_stdout()
