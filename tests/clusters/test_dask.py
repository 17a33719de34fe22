"""Dask: in threads, and on a cluster of two processes."""

from __future__ import annotations

import warnings

import pyarrow.dataset as ds
import pytest
from clusters_kit import check, needs, ran

from sampling_async import Quotas, from_json
from sampling_async.matching import Allocate, PanelMatcher, QuotaIndex

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
    from distributed import Client, LocalCluster  # noqa: PLC0415  where it is installed

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        assert len(client.nthreads()) == 2
        client.run(warnings.filterwarnings, "ignore", INPLACE, DeprecationWarning)
        check_all(folder, ran("dask"))
