"""Dask: in threads, and on a cluster of two processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import warnings
from collections import Counter
from threading import Thread

import doubles
import pyarrow.dataset as ds
import pytest
from cli_kit import point_at
from clusters_kit import check, cluster_of_two, needs, ran

from sampling_async import Journal, Quotas, from_json
from sampling_async.matching import Allocate, PanelMatcher, QuotaIndex
from sampling_async.simulator import Latency, Simulator

# Dask uses pandas in ways that pandas 3.1 deprecates.
INPLACE = r"The inplace keyword in DataFrame\.(re)?set_index"
pytestmark = pytest.mark.filterwarnings(f"ignore:{INPLACE}:DeprecationWarning")


def check_all(folder, variables):
    """Compare the results of the recipe, its allocation included, with those of a single machine."""
    check(folder, variables)
    index = QuotaIndex(from_json(Quotas, (folder / "inventory.json").read_bytes()))
    panel = ds.dataset(sorted((folder / "panel").iterdir())).to_table()
    whole = PanelMatcher(index, Allocate(5)).run(panel).read_all()
    assert variables["allocated"] == whole
    assert whole.column("certain").to_numpy().sum() > 100


@needs("dask", "pandas")
def test_dask_in_threads_gives_the_same_results(folder):
    check_all(folder, ran("dask"))


@needs("dask", "pandas")
def test_numpy_data_frames_with_gaps_give_the_same_results(folder):
    import dask.dataframe as dd  # noqa: PLC0415  where it is installed

    index = QuotaIndex(from_json(Quotas, (folder / "inventory.json").read_bytes()))
    matcher = PanelMatcher(index)
    panel = dd.read_parquet([str(file) for file in sorted((folder / "panel").iterdir())])
    assert "float64" in set(map(str, panel.partitions[0].compute().dtypes))

    def counted(members):
        return matcher.run(members).read_pandas()

    parts = panel.map_partitions(counted, meta=matcher.schema.empty_table().to_pandas()).compute()
    whole = matcher.run(ds.dataset(folder / "panel").to_table()).read_all()
    assert matcher.merged(parts) == whole


@needs("dask", "pandas", "distributed")
def test_dask_on_a_cluster_of_two_processes_gives_the_same_results(folder):
    with cluster_of_two() as client:
        client.run(warnings.filterwarnings, "ignore", INPLACE, DeprecationWarning)
        check_all(folder, ran("dask"))


class Asking:
    """A folder with requests of 40 members in four files, as the recipe reads them, and a service for them."""

    def __init__(self, folder) -> None:
        self.sim = sim = Simulator(seed=17, surveys=10, members=40, latency=Latency(a=0.05))
        sim.app = self.in_flight = doubles.InFlight(sim.app)
        # Read before the run: the inventory does not show quotas that are full.
        quota_ids = [quota.quota_id for survey in sim.inventory.surveys for quota in survey.quotas]
        self.pairs = {(member, quota_id) for member in sim.members for quota_id in quota_ids}
        lines = [json.dumps({"MemberCode": member, "QuotaIDs": quota_ids}) for member in sim.members]
        (folder / "requests").mkdir()
        for part in range(4):
            (folder / "requests" / f"{part}.jsonl").write_text("\n".join(lines[part::4]))

    def check(self, variables) -> Counter[tuple[str, int]]:
        """Compare what the recipe says with the ledger; return how often each pair was asked for."""
        outcomes, counts = asyncio.run(self._recorded(variables["files"])), variables["counts"]
        assert {(outcome.member_code, outcome.quota_id) for outcome in outcomes} == self.pairs
        assert counts == Counter(outcome.status for outcome in outcomes)
        assert counts.total() == len(self.pairs)
        assert self.sim.ledger.check(outcomes).ok
        requests = self.sim.ledger.requests
        return Counter((each.member_code, quota_id) for each in requests for quota_id in each.quota_ids)

    async def _recorded(self, files):
        return [outcome for file in files async for outcome in Journal(f"{file}.journal").outcomes()]


@pytest.fixture
def asking(tmp_path, monkeypatch):
    """Change to a folder with requests, and serve a service for them."""
    monkeypatch.chdir(tmp_path)
    asking = Asking(tmp_path)
    with asking.sim.serve() as base_url:
        point_at(monkeypatch, asking.sim, base_url)  # workers get the environment of this process
        yield asking


@needs("dask", "distributed")
def test_invites_requested_by_two_processes_keep_one_limit(asking):
    with cluster_of_two():
        variables = ran("dask_invites", ("LIMIT = 64", "LIMIT = 6"))
        again = ran("dask_invites")
    assert variables["shares"] == 2
    assert 3 < asking.in_flight.most <= 6  # one worker alone has three at most
    assert asking.check(variables) == Counter(asking.pairs)  # each pair once, in both runs together
    assert set(variables["counts"]) == {"invited", "rejected"}
    assert variables["counts"]["invited"] == len(asking.sim.ledger.invites)
    assert again["counts"] == variables["counts"]


@needs("dask", "distributed")
def test_no_pair_is_requested_twice_if_a_worker_is_killed(asking):
    with cluster_of_two() as client:
        pid = next(iter(client.run(os.getpid).values()))

        def kill():
            while asking.sim.ledger.request_count < 6:
                time.sleep(0.01)
            os.kill(pid, signal.SIGKILL)

        killer = Thread(target=kill, daemon=True)
        killer.start()
        variables = ran("dask_invites", ("LIMIT = 64", "LIMIT = 2"))
        killer.join()
        assert pid not in client.run(os.getpid).values()
    # A request that was on its way when the worker was killed may not have arrived. It is `unknown`.
    assert set(asking.check(variables).values()) == {1}
