# facts_to_kafka.py
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiokafka import AIOKafkaProducer
from attrs import asdict
from starlette.applications import Starlette
from starlette.routing import Mount

from sampling_async.notifications import (
    Completion,
    Fact,
    Inbox,
    Reconciliation,
    Terminate,
    UnknownNotification,
    kept_secrets,
)

STORE = os.environ.get("STORE", "notifications.db")
TOPIC = "sampling"
inbox = Inbox(STORE, secrets=kept_secrets(STORE))
producers: list[AIOKafkaProducer] = []


@inbox.on(Completion, Terminate, Reconciliation)
async def forward(fact: Fact[Completion | Terminate | Reconciliation]) -> None:
    """Send the fact, and wait until the brokers have it. If this raises, the inbox calls it again later."""
    content = {"key": fact.key, "kind": str(fact.kind), "fact": asdict(fact.notification)}
    member = fact.notification.member_code.encode()  # one partition, and so one order, for each member
    await producers[0].send_and_wait(TOPIC, json.dumps(content, default=str).encode(), key=member)


@inbox.on(UnknownNotification)
async def look(fact: Fact[UnknownNotification]) -> None:
    """Notify somebody: the store keeps what was not understood."""


@asynccontextmanager
async def lifespan(_: Starlette) -> AsyncIterator[None]:
    servers = os.environ.get("KAFKA", "127.0.0.1:9092")
    async with AIOKafkaProducer(bootstrap_servers=servers, acks="all", enable_idempotence=True) as producer:
        producers[:] = [producer]
        async with inbox:
            yield


app = Starlette(routes=[Mount("/events", inbox.app)], lifespan=lifespan)
