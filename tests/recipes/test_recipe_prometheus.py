"""Prometheus: the page of metrics has those of the client."""

from __future__ import annotations

import asyncio
from importlib import import_module

import httpx
import pytest

pytest.importorskip("opentelemetry.exporter.prometheus", reason="without the exporter for Prometheus")


def test_the_page_of_metrics_counts_requests(service):
    app = import_module("recipe_prometheus").app

    async def scraped():
        async with app.router.lifespan_context(app) as state:

            async def with_state(scope, receive, send):
                await app({**scope, "state": dict(state)}, receive, send)

            transport = httpx.ASGITransport(with_state)
            async with httpx.AsyncClient(transport=transport, base_url="http://partner") as browser:
                assert len((await browser.get("/surveys")).json()) == len(service.inventory.surveys)
                return (await browser.get("/metrics/")).text

    page = asyncio.run(scraped())
    assert "# TYPE http_client_request_duration_seconds histogram" in page
    assert "# TYPE sampling_limit gauge" in page
    assert next(iter(service.members)) not in page
