"""Celery: a task is delivered to a worker, and delivered again after a crash."""

from __future__ import annotations

from importlib import import_module

import pytest

pytest.importorskip("celery", reason="without Celery")


@pytest.mark.filterwarnings("ignore")  # of Celery and what it is built on
def test_a_worker_requests_a_part_once_though_it_is_delivered_twice(service, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BROKER", "memory://")
    monkeypatch.setenv("BACKEND", "cache+memory://")
    recipe = import_module("recipe_celery")
    from celery.contrib.testing.worker import start_worker  # noqa: PLC0415  only where Celery is

    quota_ids = [quota.quota_id for survey in service.inventory.surveys for quota in survey.quotas]
    pairs = [[code, quota_ids] for code in list(service.members)[:5]]
    with start_worker(recipe.app, pool="solo", perform_ping_check=False, loglevel="CRITICAL"):
        first = recipe.invite.delay("part-1", pairs).get(timeout=30)
        sent = len(service.ledger.requests(endpoint="bulk_invite"))
        second = recipe.invite.delay("part-1", pairs).get(timeout=30)
    assert sum(first.values()) == 5 * len(quota_ids)
    assert second == first
    assert len(service.ledger.requests(endpoint="bulk_invite")) == sent > 0
