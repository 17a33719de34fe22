"""Prefect: a campaign as one task, whose retry goes on from the ledger."""

from __future__ import annotations

import warnings

import pytest
from cli_kit import point_at
from durable_kit import Night

pytest.importorskip("prefect", reason="without prefect")
import recipe_prefect

pytestmark = pytest.mark.asyncio  # Prefect runs on asyncio only


@pytest.fixture
def night(tmp_path, monkeypatch):
    night = Night(tmp_path)
    with night.sim.serve() as base_url:
        point_at(monkeypatch, night.sim, base_url)
        yield night


@pytest.fixture
def prefect_server(monkeypatch, tmp_path):
    """Start Prefect's own server for tests, with its files in a folder of the test."""
    for name, value in {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Prefect and what it is built on
        try:
            from prefect.testing.utilities import prefect_test_harness  # noqa: PLC0415
        except (ImportError, TypeError) as exc:
            pytest.skip(f"Prefect's server does not go with a library that is installed: {exc}")
        with prefect_test_harness():
            yield


async def test_the_task_itself_ends_with_an_error_and_goes_on_when_it_is_called_again(night):
    night.refuse_once(after=10)
    with pytest.raises(RuntimeError, match="403"):
        await recipe_prefect.ask.fn(night.panel, night.folder)
    before = len(night.requests)
    pairs = await recipe_prefect.ask.fn(night.panel, night.folder)
    assert pairs["pending"] == 0
    assert len(night.requests) > before >= 10
    night.check(pairs, runs=2)
    assert (night.ledger.parent / "report.html").exists()
    asked = len(night.requests)
    assert await recipe_prefect.ask.fn(night.panel, night.folder) == pairs  # and asks nobody
    assert len(night.requests) == asked


@pytest.mark.filterwarnings("ignore")  # of Prefect and what it is built on
async def test_prefect_tries_again_what_ended_early_in_the_same_flow(prefect_server, night):
    assert (recipe_prefect.ask.retries, recipe_prefect.ask.retry_delay_seconds) == (20, 600)
    night.refuse_once(after=10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe_prefect.ask, "retry_delay_seconds", 0.1)
        pairs = await recipe_prefect.ask_for_a_panel(night.panel, night.folder)
    assert pairs["pending"] == 0
    night.check(pairs, runs=2)
