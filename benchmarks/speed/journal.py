"""What a journal costs: fan-outs of requests of five quota IDs, with one and without."""

from __future__ import annotations

import shutil
import tempfile
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sampling_async import InviteRequest, Journal
from speed.beside_plain import IDS, beside_plain
from speed.measuring import Measured, Watch
from speed.ours import OurClient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from scoreboard.board import Run

    from speed.measuring import Sample

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
        self._requests, self._folder = requests, Path(tempfile.mkdtemp())
        self._ids = count(1)
        self._earlier = self._folder / "earlier"
        for path in (None, self._earlier):
            self.runner.run(self._fan_out(path))

    def cost(self, kind: str) -> Sample:
        """Return the cost of a fan-out of a kind."""
        path = None if kind == "plain" else self._folder / f"{kind}-{next(self._ids)}"
        if kind == "resumed":
            for end in ("", "-lock"):
                shutil.copy(f"{self._earlier}{end}", f"{path}{end}")
        watch = Watch()
        self.runner.run(self._fan_out(path))
        return watch.sample()

    def finish(self) -> None:
        """Remove the journals."""
        shutil.rmtree(self._folder)

    async def _fan_out(self, path: Path | None) -> None:
        answered = 0
        journal = None if path is None else Journal(path, only_input=True)  # not the earlier run's
        async with self.client.fan_out(self._new_requests(), journal=journal) as outcomes:
            async for outcome in outcomes:
                answered += outcome.status in {"invited", "rejected"} and not outcome.replayed
        if answered != self._requests * IDS:
            raise ValueError(f"{answered} of {self._requests * IDS} quota IDs were answered")

    def _new_requests(self) -> Iterator[InviteRequest]:
        ids = self._ids
        return (
            InviteRequest(f"m{number:06}", [next(ids) for _ in range(IDS)]) for number in range(self._requests)
        )


def measure(run: Run) -> Measured:
    """Measure the three kinds."""
    goal = "CPU of a request {}, {} wide, by one without"
    title = "Fan-outs of {:,} requests of {} quota IDs"
    return beside_plain(run, Journaling, KINDS, most=_MOST, goal=goal, title=title, note=NOTE)
