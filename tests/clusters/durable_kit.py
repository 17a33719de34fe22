"""A panel in a file and a service that is served, for campaigns that are one task of a durable engine."""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing

import pyarrow.parquet as pq
from panel_kit import panel_table

from sampling_async.simulator import Fault, Latency, Simulator


class Night:
    """A panel of 120 members in a folder, and a service for it."""

    def __init__(self, folder) -> None:
        self.panel, self.folder = str(folder / "panel.parquet"), str(folder / "night")
        self.ledger = folder / "night" / "campaign.ledger"
        (folder / "night").mkdir()
        self.sim = Simulator(seed=7, surveys=30, members=120, latency=Latency(a=0.05))
        pq.write_table(panel_table(self.sim), self.panel)

    def refuse_once(self, after: int) -> None:
        """Answer a request with 403, which ends a run: no other can succeed."""
        self.sim.faults.add(Fault.status(403).on("bulk_invite", after=after, times=1))

    @property
    def requests(self):
        return self.sim.ledger.requests(endpoint="bulk_invite")

    def check(self, pairs, *, runs: int) -> None:
        """Compare the pairs with both ledgers: that of the campaign and that of the service."""
        with closing(sqlite3.connect(self.ledger)) as database:
            states = Counter(state for (state,) in database.execute("SELECT state FROM pairs"))
            assert database.execute("SELECT count(*) FROM runs").fetchone() == (runs,)
        assert Counter(pairs) - Counter(planned=pairs["planned"]) == states
        assert pairs["planned"] == states.total() > 120
        made = Counter((invite.member_code, invite.quota_id) for invite in self.sim.ledger.invites)
        assert set(made.values()) == {1}
        assert states["invited"] <= made.total() <= states["invited"] + states["unknown"]
