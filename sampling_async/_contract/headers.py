"""Response headers that an operator's support asks for, and which of them names the request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

REQUEST_IDS: Final = (
    "x-request-id",
    "request-id",
    "x-correlation-id",
    "correlation-id",
    "x-amzn-requestid",
    "x-amz-request-id",
    "x-ms-request-id",
    "x-trace-id",
    "x-amzn-trace-id",
    "x-cloud-trace-context",
    "traceparent",
    "x-azure-ref",
    "x-amz-cf-id",
    "cf-ray",
)
"""Headers that name a request, the service's own first, then those of balancers and caches on the way."""

OF_INTEREST: Final = (
    *REQUEST_IDS,
    "date",
    "server",
    "via",
    "age",
    "retry-after",
    "x-ratelimit-limit",
    "x-ratelimit-remaining",
    "x-ratelimit-reset",
    "x-cache",
    "x-served-by",
    "content-type",
    "content-length",
)
"""All that are kept. Others may hold a session or a URL: Set-Cookie, Location."""

HeaderReader: TypeAlias = Callable[[], Mapping[str, str]]
"""Reads and cleans the headers of a response. Most responses need none, so this happens when they are read."""


def no_headers() -> Mapping[str, str]:
    return {}


def request_id_of(headers: Mapping[str, str]) -> str | None:
    return next((headers[name] for name in REQUEST_IDS if name in headers), None)
