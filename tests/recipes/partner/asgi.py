# asgi.py
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from django.core.asgi import get_asgi_application
from starlette.applications import Starlette
from starlette.routing import Mount

from sampling_async import SamplingClient
from sampling_async.matching import LiveIndex
from sampling_async.routing import SurveyRouter

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "partner.settings")


@asynccontextmanager
async def lifespan(_: Starlette) -> AsyncIterator[dict[str, SurveyRouter]]:
    async with (
        SamplingClient.from_env() as client,
        client.watch_quotas(every=60) as watch,
        LiveIndex(watch) as live,
        SurveyRouter(client, live, store=os.environ.get("LINKS", "links.db")) as router,
    ):
        yield {"router": router}  # in the state of each request


# Django has no lifespan, in which a client could be opened and closed. Starlette has one.
application = Starlette(routes=[Mount("/", get_asgi_application())], lifespan=lifespan)
