# facts_to_redis.py
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from attrs import asdict
from redis.asyncio import Redis
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
STREAM = "sampling"
redis = Redis.from_url(os.environ.get("REDIS", "redis://127.0.0.1"))
inbox = Inbox(STORE, secrets=kept_secrets(STORE))


@inbox.on(Completion, Terminate, Reconciliation)
async def forward(fact: Fact[Completion | Terminate | Reconciliation]) -> None:
    """Add the fact to the stream. If Redis is away this raises, and the inbox calls it again later."""
    content = json.dumps(asdict(fact.notification), default=str)
    await redis.xadd(STREAM, {"key": fact.key, "kind": str(fact.kind), "fact": content})


@inbox.on(UnknownNotification)
async def look(fact: Fact[UnknownNotification]) -> None:
    """Notify somebody: the store keeps what was not understood."""


@asynccontextmanager
async def lifespan(_: Starlette) -> AsyncIterator[None]:
    async with redis, inbox:
        yield


app = Starlette(routes=[Mount("/events", inbox.app)], lifespan=lifespan)
