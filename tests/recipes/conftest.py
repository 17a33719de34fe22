"""The client inside of other tools: the recipes of the documentation, run with these tools.

    partner/                            a Django project: clicks, notifications, a command for the night
    recipe_celery.py                    tasks that share one limit, and are delivered again after a crash
    night.py, recipe_airflow.py, recipe_dagster.py    a campaign each night
    recipe_sqlalchemy.py                a panel from a database
    recipe_redis.py, recipe_kafka.py    facts of the inbox in a queue
    recipe_prometheus.py                metrics

`nox -s recipes` installs the tools, except Airflow, which pins hundreds of libraries: it has a venv of its own.
A test without its tool is skipped and says so.
"""

from __future__ import annotations

import pytest
from cli_kit import point_at

from sampling_async.simulator import Simulator


@pytest.fixture
def service(monkeypatch):
    """Serve a simulator, and set the three variables that `from_env` reads; return the simulator."""
    sim = Simulator(seed=7, surveys=12, members=30)
    with sim.serve() as base_url:
        point_at(monkeypatch, sim, base_url)
        yield sim
