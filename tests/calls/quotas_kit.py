"""Inventories as bytes, and services that send them in parts."""

from __future__ import annotations

import gzip
import json
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import doubles
import httpx
import inventories
import pytest
import wire

from sampling_async import RetryPolicy, SamplingClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


ONCE = RetryPolicy(max_attempts=1)


TAIL = b'],"CountryID":9,"CacheExpires":"2020-01-31T21:19:30Z"}'


HEAD = b'{"Surveys":['


def survey(number: int, **changes: Any) -> bytes:
    return json.dumps(inventories.survey(SurveyID=number, **changes)).encode()


def body_of(surveys: int = 3) -> bytes:
    return HEAD + b",".join(survey(number) for number in range(surveys)) + TAIL


class Parts(httpx.AsyncByteStream):
    """A body in parts, as another transport gives it: bytes, errors to raise, or functions to call."""

    def __init__(self, *parts: bytes | Exception | Callable[[], Any]) -> None:
        self._parts = list(parts)
        self.given = 0
        self.closed = 0

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        await anyio.lowlevel.checkpoint()
        while self._parts:
            part = self._parts.pop(0)
            if isinstance(part, Exception):
                raise part
            if isinstance(part, bytes):
                self.given += 1
                return part
            if (waits := part()) is not None:
                await waits
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self.closed += 1
        self._parts.clear()


def service(*streams: httpx.AsyncByteStream | httpx.Response) -> doubles.Service:
    answers = [
        each if isinstance(each, httpx.Response) else httpx.Response(200, stream=each) for each in streams
    ]
    return doubles.Service(*answers)


async def ids_of(client: SamplingClient, **options: Any) -> list[int]:
    async with aclosing(client.iter_surveys(**options)) as surveys:
        return [each.survey_id async for each in surveys]


async def read_by(client: SamplingClient, how: str) -> Any:
    """Read all surveys with one of the two methods."""
    if how == "get_quotas":
        return [each.survey_id for each in (await client.get_quotas()).surveys]
    return await ids_of(client)


both = pytest.mark.parametrize("how", ["get_quotas", "iter_surveys"])


def assert_idle(client: SamplingClient, where: object = "") -> None:
    """Check that no permit is held, nothing waits and no attempt is under way."""
    held = client._gate.running, client._gate.waiting, len(client._session._blocks)
    assert held == (0, 0, 0), (held, where)


FRAMINGS = {
    "length": wire.answer,
    "chunked": lambda body: head("Transfer-Encoding: chunked") + chunked(body, 700),
    "small chunks": lambda body: head("Transfer-Encoding: chunked") + chunked(body, 3),
    "gzip": lambda body: wire.answer(gzip.compress(body), "200 OK", "Content-Encoding: gzip"),
    "chunked gzip": lambda body: (
        head("Transfer-Encoding: chunked", "Content-Encoding: gzip") + chunked(gzip.compress(body), 50)
    ),
    "close": lambda body: head("Connection: close") + body,
}


def head(*headers: str) -> bytes:
    return "\r\n".join(["HTTP/1.1 200 OK", *headers]).encode() + b"\r\n\r\n"


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def client_of(url: str, **options: Any) -> SamplingClient:
    time = doubles.FakeTime()
    given = {"clock": time.clock, "sleep": time.sleep, "random": lambda: 1.0}
    return SamplingClient(url, panel_guid=doubles.PANEL, api_key=doubles.KEY, **{**given, **options})


def without_quota_id(number: int) -> bytes:
    document = json.loads(survey(number))
    document["Quotas"][0]["QuotaID"] = None
    return json.dumps(document).encode()


LACKING = HEAD + b",".join([*map(survey, range(3)), without_quota_id(3), *map(survey, range(4, 40))]) + TAIL
