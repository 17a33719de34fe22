"""Matching and asking on clusters: the recipes of the documentation, run on the engines themselves.

    recipe_spark.py, recipe_dask.py, recipe_ray.py   the recipes, as in the documentation
    recipe_dask_invites.py                        invites asked for by several processes
    recipe_dask_campaign.py                       a campaign in parts, each with its own ledger
    recipe_prefect.py, recipe_temporal.py         a campaign as one task of a durable engine
    clusters_kit.py                               a panel in files; compares every row with a single run

Spark, Ray and a cluster of Dask are for `nox -s distributed`; Dask in threads is in the ordinary tests too.
"""

from __future__ import annotations

from shutil import copytree

import pytest
from clusters_kit import write_panel


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    write_panel(folder)
    return folder


@pytest.fixture
def folder(written, tmp_path, monkeypatch):
    """Change to a folder with an inventory and a panel; return the folder."""
    copytree(written, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path
