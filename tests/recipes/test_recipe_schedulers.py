"""Airflow and Dagster: a campaign is one task, which runs with the tool itself."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

import pyarrow.parquet as pq
import pytest
from docs_kit import ROOT
from panel_kit import panel_table

NIGHT = "2026-01-05"


@pytest.fixture
def nights(service, tmp_path, monkeypatch):
    """Write the panel into a folder of nights; return the folder."""
    pq.write_table(panel_table(service), tmp_path / "panel.parquet")
    monkeypatch.setenv("NIGHTS", str(tmp_path))
    return tmp_path


@pytest.mark.filterwarnings("ignore")  # of Dagster and what it is built on
@pytest.mark.skipif(find_spec("dagster") is None, reason="without Dagster")
def test_dagster_makes_the_invites_of_a_night(service, nights, monkeypatch):
    monkeypatch.setenv("DAGSTER_DISABLE_TELEMETRY", "true")
    recipe = import_module("recipe_dagster")
    from dagster import materialize  # noqa: PLC0415  only where Dagster is

    done = materialize([recipe.invites], partition_key=NIGHT)
    pairs = done.output_for_node("invites")
    assert pairs["invited"] == len(service.ledger.invites) > 20
    assert pairs["pending"] == 0
    assert (nights / NIGHT / "report.html").is_file()
    again = materialize([recipe.invites], partition_key=NIGHT)  # requests nothing twice
    assert again.output_for_node("invites") == pairs


@pytest.mark.skipif(find_spec("airflow") is None, reason="without Airflow: it needs a venv of its own")
def test_airflow_makes_the_invites_of_a_night(service, nights):
    recipes = ROOT / "tests" / "recipes"
    dags = nights / "dags"
    dags.mkdir()
    (dags / "sampling_night.py").write_text((recipes / "recipe_airflow.py").read_text())
    (nights / "night.py").write_text((recipes / "night.py").read_text())
    env = {
        **os.environ,
        "AIRFLOW_HOME": str(nights / "airflow"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(dags),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "PYTHONPATH": str(nights),
    }
    for words in (["db", "migrate"], ["dags", "reserialize"], ["dags", "test", "sampling_night", NIGHT]):
        done = subprocess.run(
            [sys.executable, "-m", "airflow", *words], env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert (nights / NIGHT / "report.html").is_file()
    assert len(service.ledger.invites) > 20
