"""Redis and Kafka behind the inbox: each fact arrives, again after a failure, and is worked on once.

Redis is a real server, where it is installed. No broker of Kafka was at hand: its producer is a double
that has the signatures of the real one.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
import subprocess
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from unittest.mock import create_autospec

import pytest
from wire import free_port

from sampling_async.simulator import Notifying, Simulator


def simulated():
    return Simulator(seed=7, surveys=12, members=30, notifying=Notifying(completes=1.0, repeated=0.5))


async def completed(sim, app, inbox):
    """Request invites, let each end in a complete, and wait until these are handled."""
    quota_ids = [quota.quota_id for survey in sim.inventory.surveys for quota in survey.quotas]
    async with app.router.lifespan_context(app), sim.client() as client:
        for code in list(sim.members)[:5]:
            await client.bulk_invite(code, quota_ids)
        await sim.notifications.deliver(inbox)
        while any(kind.pending for kind in (await inbox.status()).by_kind.values() if kind.has_handler):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.fixture
def redis_server(tmp_path):
    if find_spec("redis") is None or shutil.which("redis-server") is None:
        pytest.skip("without redis, or without its server: apt-get install redis-server")
    port = free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        yield f"redis://127.0.0.1:{port}"
        server.terminate()


def connected(address):
    from redis import ConnectionError, Redis  # noqa: A004, PLC0415  only where redis is

    redis = Redis.from_url(address)
    for _ in range(500):
        try:
            redis.ping()
        except ConnectionError:
            time.sleep(0.01)
        else:
            return redis
    raise TimeoutError("the server did not start")


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_facts_go_through_redis_and_are_worked_on_once(redis_server, tmp_path, monkeypatch):
    monkeypatch.setenv("STORE", str(tmp_path / "notifications.db"))
    monkeypatch.setenv("REDIS", redis_server)
    sim = simulated()
    redis = connected(redis_server)
    recipe = import_module("recipe_redis")
    asyncio.run(completed(sim, recipe.app, recipe.inbox))

    redis.xgroup_create("sampling", "credits", id="0")
    for _, fields in redis.xrange("sampling", count=3):  # the inbox calls its handler at least once
        redis.xadd("sampling", fields)
    worked = []
    with sqlite3.connect(tmp_path / "book.db") as book:
        import_module("recipe_redis_reader").read(redis, book, lambda *fact: worked.append(fact), "worker-1")
    book.close()
    redis.close()
    assert len(worked) == len(sim.ledger.invites) > 5
    assert {kind for kind, _ in worked} == {"completion"}
    assert all("revenue" in json.loads(fact) for _, fact in worked)


@pytest.mark.skipif(find_spec("aiokafka") is None, reason="without aiokafka")
def test_facts_go_to_the_producer_of_kafka_again_after_a_failure(tmp_path, monkeypatch):
    import aiokafka  # noqa: PLC0415  only where it is

    monkeypatch.setenv("STORE", str(tmp_path / "notifications.db"))
    sent, failures = [], [ConnectionError("no broker")]

    async def send_and_wait(topic, value, *, key):
        if failures:
            raise failures.pop()
        sent.append((topic, json.loads(value), key.decode()))

    producer = create_autospec(aiokafka.AIOKafkaProducer, instance=True)
    producer.__aenter__.return_value = producer
    producer.send_and_wait.side_effect = send_and_wait
    monkeypatch.setattr(
        aiokafka, "AIOKafkaProducer", create_autospec(aiokafka.AIOKafkaProducer, return_value=producer)
    )
    monkeypatch.delitem(sys.modules, "recipe_kafka", raising=False)
    recipe = import_module("recipe_kafka")
    sim = simulated()
    asyncio.run(completed(sim, recipe.app, recipe.inbox))
    assert len({content["key"] for _, content, _ in sent}) == len(sim.ledger.invites) > 5
    assert all(content["fact"]["member_code"] == key for _, content, key in sent)
    assert {topic for topic, _, _ in sent} == {"sampling"}
    assert not failures
