"""What a journal costs: fan-outs of requests of five quota IDs, with one and without."""

from __future__ import annotations

import shutil
import tempfile
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Final

from scoreboard.board import at_most

from sampling_async import InviteRequest, Journal
from speed.canned_server import canned_service
from speed.measuring import Measured, Spread, Table, Watch, interleaved, microseconds, ratio
from speed.ours import OurClient
from speed.remote import remote

if TYPE_CHECKING:
    from collections.abc import Iterator

    from scoreboard.board import Run

    from speed.measuring import Sample

WIDTHS: Final = (8, 64)
IDS: Final = 5
KINDS: Final = {
    "plain": "without a journal",
    "new": "with a new journal",
    "resumed": "with the journal of an earlier run of the same members, about other quotas",
}
_MOST: Final = 2.0
"""Times a fan-out without a journal."""

NOTE: Final = (
    f"Each request is for another member, and has {IDS} quota IDs that no other request has. The journal is in "
    "the folder for temporary files. With that of an earlier run, each request is looked up in it."
)


class Journaling(OurClient):
    """Fans out with a journal and without, in the same process."""

    def prepare(self, requests: int) -> None:
        """Write the journal of the earlier run, and reach the full width."""
        self._folder = Path(tempfile.mkdtemp())
        self._ids = count(1)
        self._earlier = self._folder / "earlier"
        for path in (None, self._earlier):
            self.runner.run(self._fan_out(requests, path))

    def cost(self, kind: str, requests: int) -> Sample:
        """Return the cost of a fan-out of a kind."""
        path = None if kind == "plain" else self._folder / f"{kind}-{next(self._ids)}"
        if kind == "resumed":
            for end in ("", "-lock"):
                shutil.copy(f"{self._earlier}{end}", f"{path}{end}")
        watch = Watch()
        self.runner.run(self._fan_out(requests, path))
        return watch.sample()

    def finish(self) -> None:
        """Remove the journals."""
        shutil.rmtree(self._folder)

    async def _fan_out(self, requests: int, path: Path | None) -> None:
        answered = 0
        journal = None if path is None else Journal(path)
        async with self.client.fan_out(self._requests(requests), journal=journal) as outcomes:
            async for outcome in outcomes:
                answered += outcome.status in {"invited", "rejected"} and not outcome.replayed
        if answered != requests * IDS:
            raise ValueError(f"{answered} of {requests * IDS} quota IDs were answered")

    def _requests(self, requests: int) -> Iterator[InviteRequest]:
        ids = self._ids
        return (InviteRequest(f"m{number:06}", [next(ids) for _ in range(IDS)]) for number in range(requests))


def measure(run: Run) -> Measured:
    """Measure the three kinds at each width, interleaved."""
    requests, rounds = run.of((1_000, 3), (5_000, 7))
    samples: dict[int, dict[str, list[Sample]]] = {}
    with canned_service() as address:
        for width in WIDTHS:
            with remote(Journaling, address, width) as process:
                process.call("prepare", requests)
                takers = {kind: partial(process.call, "cost", kind, requests) for kind in KINDS}
                samples[width] = interleaved(takers, rounds)
                process.call("finish")
    table = Table(
        f"Fan-outs of {requests:,} requests of {IDS} quota IDs",
        ("width", "kind", "CPU us a request", "by plain"),
    )
    goals = []
    for width, taken in samples.items():
        cost = {kind: microseconds(each, requests) for kind, each in taken.items()}
        for kind, meaning in KINDS.items():
            times = ratio(cost[kind], cost["plain"])
            table.rows.append((width, meaning, str(Spread.of(cost[kind])), str(times)))
            if kind != "plain":
                goals.append(
                    at_most(f"CPU of a request {meaning}, {width} wide, by one without", _MOST, times.median)
                )
    return Measured(goals=goals, tables=[table], samples={"samples": samples}, notes=[NOTE])
