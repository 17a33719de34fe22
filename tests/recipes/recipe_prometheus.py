# metrics_service.py
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from opentelemetry import metrics
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import make_asgi_app
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

from sampling_async import SamplingClient

metrics.set_meter_provider(MeterProvider(metric_readers=[PrometheusMetricReader()]))


@asynccontextmanager
async def lifespan(_: Starlette) -> AsyncIterator[dict[str, SamplingClient]]:
    async with SamplingClient.from_env(telemetry=True) as client:
        yield {"client": client}


async def surveys(request: Request) -> JSONResponse:
    quotas = await request.state.client.get_quotas()
    return JSONResponse([survey.survey_id for survey in quotas.surveys])


app = Starlette(routes=[Route("/surveys", surveys), Mount("/metrics", make_asgi_app())], lifespan=lifespan)
