"""A panel in several files, the recipes that match it, and the results of a single machine."""

from __future__ import annotations

import os
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from panel_kit import table_of

from sampling_async import Quotas, from_json, to_json
from sampling_async.matching import Allocate, Counts, PanelMatcher, QuotaIndex, Sample, TopK
from sampling_async.simulator import generate_inventory, generate_members

HERE = Path(__file__).parent
MEMBERS = 3000
ENDS = (0, 1100, 1101, 2000, MEMBERS, MEMBERS)  # where files end: one file has one member, one has none
OUTPUTS = {"best": TopK(20), "counts": Counts(), "sample": Sample(100)}
ORDERS = {
    "best": [("member_code", "ascending")],
    "counts": [],  # the order is part of the promise
    "sample": [("quota_id", "ascending"), ("certain", "descending"), ("priority", "ascending")],
}


def needs(*modules: str) -> pytest.MarkDecorator:
    """Skip if an engine is not installed; under `nox -s distributed` a missing engine is an error."""
    missing = [module for module in modules if find_spec(module) is None]
    return pytest.mark.skipif(bool(missing) and "EVERY_ENGINE" not in os.environ, reason=f"without {missing}")


def write_panel(folder: Path) -> None:
    """Write an inventory, and a panel in files of several sizes."""
    inventory = generate_inventory(17, surveys=60)
    members = generate_members(17, members=MEMBERS, inventory=inventory)
    panel = table_of(members)
    (folder / "inventory.json").write_bytes(to_json(inventory))
    (folder / "panel").mkdir()
    for at, (first, end) in enumerate(pairwise(ENDS)):
        pq.write_table(panel.slice(first, end - first), folder / "panel" / f"{at}.parquet")


def ran(engine: str, changes: tuple[str, str] = ("", "")) -> dict[str, Any]:
    """Run a recipe with the path of the panel replaced; return its variables."""
    text = (HERE / f"recipe_{engine}.py").read_text()
    assert changes[0] in text
    code = compile(text.replace(*changes) if changes[0] else text, f"recipe_{engine}.py", "exec")
    variables: dict[str, Any] = {"__name__": "__main__"}  # so that functions are sent by value
    exec(code, variables)
    return variables


@contextmanager
def cluster_of_two():
    from distributed import Client, LocalCluster  # noqa: PLC0415  where it is installed

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        assert len(client.nthreads()) == 2
        yield client


def check(folder: Path, variables: dict[str, Any]) -> None:
    """Compare every row of the result of a recipe, in a variable or in files, with that of a single machine."""
    index = QuotaIndex(from_json(Quotas, (folder / "inventory.json").read_bytes()))
    panel = ds.dataset(folder / "panel").to_table()
    assert len(panel) == MEMBERS
    for name, output in OUTPUTS.items():
        matcher = PanelMatcher(index, output)
        whole = matcher.run(panel).read_all()
        assert len(whole) > 100
        made = variables[name] if name in variables else ds.dataset(folder / name).to_table()
        made = made.select(matcher.schema.names).cast(matcher.schema)
        if ORDERS[name]:
            made, whole = made.sort_by(ORDERS[name]), whole.sort_by(ORDERS[name])
        assert made.to_pylist() == whole.to_pylist()


def check_allocation(folder: Path, variables: dict[str, Any]) -> None:
    """Compare an allocation with that of one machine, which reads the members in the order of their codes."""
    index = QuotaIndex(from_json(Quotas, (folder / "inventory.json").read_bytes()))
    panel = ds.dataset(folder / "panel").to_table().sort_by("member_code")
    whole = PanelMatcher(index, Allocate(5)).run(panel).read_all()
    assert variables["allocated"] == whole
    assert sum(map(len, whole.column("quota_ids").to_pylist())) > MEMBERS
