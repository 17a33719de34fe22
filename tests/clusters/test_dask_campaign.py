"""A campaign in parts on a Dask cluster of two processes: rooms, limits, ledgers and kills."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import doubles
import pyarrow.parquet as pq
import pytest
from cli_kit import point_at
from clusters_kit import cluster_of_two, needs, ran
from panel_kit import locked, panel_table

from sampling_async.matching import Allocate, PanelMatcher, QuotaIndex
from sampling_async.simulator import Latency, Simulator

pytestmark = needs("dask", "distributed")

PARTS = 4


class Night:
    """A folder with a panel of 400 members in four files, and a service with some rooms too small for it."""

    def __init__(self, folder) -> None:
        self.folder = folder / "night"
        self.sim = sim = Simulator(seed=17, surveys=6, members=400, latency=Latency(a=0.02))
        sim.app = self.in_flight = doubles.InFlight(sim.app)
        self.terms = PanelMatcher(QuotaIndex(sim.inventory), Allocate(5)).terms()
        panel = panel_table(sim)
        (folder / "panel").mkdir()
        for part in range(PARTS):
            pq.write_table(panel.slice(part * 100, 100), folder / "panel" / f"{part}.parquet")
        pq.write_table(panel, folder / "panel.parquet")

    def rows(self, query):
        """Return the rows of a query of all ledgers."""
        found = []
        for part in range(PARTS):
            database = sqlite3.connect(self.folder / f"part-{part}.ledger")
            found += database.execute(query).fetchall()
            database.close()
        return found

    def check(self, variables) -> None:
        """Compare what the recipe says with all ledgers: its own and that of the service."""
        pairs = variables["pairs"]
        assert variables["reasons"] == set()
        assert pairs["planned"] == pairs.total() - pairs["planned"] > 400
        assert pairs["pending"] == 0
        states = Counter(state for (state,) in self.rows("SELECT state FROM pairs"))
        assert states == pairs - Counter(planned=pairs["planned"])
        # No pair twice, and all invites are known or may be.
        made = Counter((invite.member_code, invite.quota_id) for invite in self.sim.ledger.invites)
        assert set(made.values()) == {1}
        assert pairs["invited"] <= made.total() <= pairs["invited"] + pairs["unknown"]
        requests = self.sim.ledger.requests(endpoint="bulk_invite")
        asked = Counter((each.member_code, quota_id) for each in requests for quota_id in each.quota_ids)
        assert set(asked.values()) == {1}
        # The shares of the parts are the rooms, and no quota is filled beyond its own.
        rooms = Counter()
        for quota_id, room in self.rows("SELECT id, room FROM quotas"):
            rooms[quota_id] += room
        assert rooms == self.terms.rooms
        invited = Counter(quota_id for _, quota_id in made)
        assert all(count <= rooms[quota_id] for quota_id, count in invited.items())
        planned = Counter(quota_id for (quota_id,) in self.rows("SELECT quota FROM pairs"))
        assert any(planned[quota_id] >= room > 50 for quota_id, room in rooms.items()), "no room was too small"


@pytest.fixture
def night(tmp_path, monkeypatch):
    """Change to a folder with a panel, and serve a service for it."""
    monkeypatch.chdir(tmp_path)
    night = Night(tmp_path)
    with night.sim.serve() as base_url:
        point_at(monkeypatch, night.sim, base_url)  # workers get the environment of this process
        yield night


def test_a_campaign_in_parts_keeps_rooms_and_one_limit_and_asks_once(night):
    with cluster_of_two():
        variables = ran("dask_campaign", ("LIMIT = 64", "LIMIT = 6"))
        requests = night.sim.ledger.request_count
        again = ran("dask_campaign")
    assert variables["shares"] == 2
    night.check(variables)
    assert 3 < night.in_flight.most <= 6  # one worker alone has three at most
    assert again["pairs"] == variables["pairs"]
    assert night.sim.ledger.request_count == requests
    rooms = {7: 0, 8: 1, 9: 5, 10: 12, 11: 77}
    for parts in (1, 2, 3, 7):
        shares = [variables["divided"](rooms, part, parts) for part in range(parts)]
        assert {id_: sum(share[id_] for share in shares) for id_ in rooms} == rooms
        assert all(max(of) - min(of) <= 1 for of in zip(*(share.values() for share in shares), strict=True))


def test_a_part_may_be_a_query_for_every_fourth_row_of_one_file(night):
    files = 'sorted(map(str, Path("panel").absolute().glob("*.parquet")))'
    table = "read_parquet('{file}', file_row_number=true)"
    queries = f"""[
        f"SELECT * FROM {table} WHERE file_row_number % {PARTS} = {{part}}"
        for file in [Path("panel.parquet").absolute()]
        for part in range({PARTS})
    ]"""
    with cluster_of_two():
        variables = ran("dask_campaign", (files, queries))
    night.check(variables)
    assert len(night.rows("SELECT code FROM members")) == len(set(night.rows("SELECT code FROM members")))


def test_a_killed_worker_loses_nothing(night):
    with cluster_of_two() as client:
        pid = next(iter(client.run(os.getpid).values()))

        def kill():
            while night.sim.ledger.request_count < 20:
                time.sleep(0.01)
            os.kill(pid, signal.SIGKILL)

        killer = Thread(target=kill, daemon=True)
        killer.start()
        variables = ran("dask_campaign", ("LIMIT = 64", "LIMIT = 2"))
        killer.join()
        assert pid not in client.run(os.getpid).values()
    night.check(variables)
    assert len(night.rows("SELECT id FROM runs")) == PARTS + 1  # the part that was lost had two


def test_a_part_that_a_lost_worker_still_has_is_tried_again(night):
    night.folder.mkdir()
    (night.folder / "part-2.ledger").touch()
    with cluster_of_two(), ThreadPoolExecutor(1) as threads:
        with locked(night.folder / "part-2.ledger"):
            done = threads.submit(ran, "dask_campaign", ("PAUSE = 30", "PAUSE = 0.2"))
            time.sleep(3)
            is_done = done.done()
        night.check(done.result())
    assert not is_done
