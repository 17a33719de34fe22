"""Response headers that an operator's support asks for, and which of them names the request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, TypeAlias

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

Headers: TypeAlias = Mapping[str, str]


class HasHeaders:
    """What a response came to, with headers of it."""

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def headers(self) -> Headers: ...

    @property
    def request_id(self) -> str | None:
        """The ID that the service, or else a proxy, gave the request in a header; None if there was none."""
        return request_id_of(self.headers)


def request_id_of(headers: Headers) -> str | None:
    return next((headers[name] for name in REQUEST_IDS if name in headers), None)


HeaderReader: TypeAlias = Callable[[], Headers]
"""Reads and cleans the headers of a response. Most responses need none, so this happens when they are read."""


def no_headers() -> Headers:
    return {}
