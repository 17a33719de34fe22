"""The clients that are compared, each in its own process."""

from __future__ import annotations

import asyncio
import importlib
import time
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from speed.measuring import Watch, attempts, percentiles
from speed.remote import remote

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from speed.canned_server import Address
    from speed.measuring import Sample
    from speed.remote import Remote

OURS: Final = "sampling_async"
AIOHTTP: Final = "aiohttp + msgspec"
HTTPX: Final = "httpx + pydantic"
GENERATED: Final = "openapi-python-client"
PEERS: Final = {
    OURS: "sampling:SamplingAsync",
    AIOHTTP: "aiohttp_msgspec:AiohttpClient",
    HTTPX: "httpx_pydantic:HttpxClient",
    GENERATED: "generated:GeneratedClient",
}
"""The module of each client. A process imports only the one that it measures."""

COUNTED: Final = "sampling_async, invites and counts"
WHOLE: Final = "sampling_async, from_json"
WORKERS: Final = "aiohttp + msgspec, a task a place"
BARE: Final = "asyncio.Protocol + httptools + msgspec"
_BEST: Final = {WORKERS: "aiohttp_msgspec:AiohttpWorkers", BARE: "bare_protocol:BareProtocol"}
_VARIANTS: Final = {
    **PEERS,
    **_BEST,
    COUNTED: "sampling:SamplingAsyncCounted",
    WHOLE: "sampling:SamplingAsyncWhole",
}

GIVEN: Final = "http_client=httpx.AsyncClient()"
ENGINES: Final = (
    "httpx.AsyncHTTPTransport",
    GIVEN,
    "httpx_aiohttp.AiohttpTransport",
    "pyreqwest's HttpxTransport",
)
UVLOOP: Final = "its own, under uvloop"
_CHUNK: Final = 100
_SETTLING: Final = {HTTPX: 1.5, ENGINES[0]: 1.5, GIVEN: 1.5}
"""Seconds of load until a pool has closed the connections that it does not need."""


class Peer(Protocol):
    """A client that is measured: an async context manager."""

    name: str

    def __init__(self, url: str, panel_guid: str, api_key: str, width: int) -> None: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc_info: object) -> None: ...

    async def bulk(self, member_code: str, quota_ids: Sequence[int]) -> int:
        """Request invites for all quota IDs and return the number of invites."""
        ...

    async def invite(self, member_code: str, quota_id: int) -> str:
        """Make one Generate Invite and return its link."""
        ...

    def decode_quotas(self, body: bytes) -> Any:
        """Get and decode an inventory."""
        ...


def peer(name: str) -> type[Peer]:
    """Return the class of a client."""
    module, found = _VARIANTS[name].split(":")
    made: type[Peer] = getattr(importlib.import_module(f"peers.{module}"), found)
    return made


class Contender:
    """A client in this process, with an event loop. One instance is open for each width that was measured.

    Args:
        name: The client, or an engine: then it is our client with that engine.
        address: The service.
    """

    def __init__(self, name: str, address: Address) -> None:
        self._name = name
        self._make: Any = peer(name if name in _VARIANTS else OURS)
        self._access = address[:3]
        self._member_code = address.member_code
        self._runner = asyncio.Runner(loop_factory=_uvloop if name == UVLOOP else None)
        self._open: dict[int, Peer] = {}

    def bulk(self, requests: int, width: int) -> Sample:
        """Time a bulk. A few requests before it replace connections that are too old."""
        return self._runner.run(self._bulk(requests, width))

    def burst(self, requests: int, width: int) -> Sample:
        """Time a new client from its making to the end of a bulk."""
        return self._runner.run(self._burst(requests, width))

    async def _burst(self, requests: int, width: int) -> Sample:
        watch = Watch()
        async with self._opened(width) as new:
            await self._ask(requests, new)
            return watch.sample()

    async def _warm_up(self, width: int) -> None:
        if width not in self._open:
            self._open[width] = await self._opened(width).__aenter__()
            await self._ask(
                2 * width, self._open[width]
            )  # until a client with an adaptive limit has reached its width
        settled = time.monotonic() + _SETTLING.get(self._name, 0.0)
        await self._ask(width, self._open[width])
        while time.monotonic() < settled:
            await self._ask(width, self._open[width])

    async def _bulk(self, requests: int, width: int) -> Sample:
        await self._warm_up(width)
        watch = Watch()
        await self._ask(requests, self._open[width])
        return watch.sample()

    def _opened(self, width: int) -> Peer:
        over = {} if self._name in _VARIANTS else _engine(self._name, width + 2)
        opened: Peer = self._make(*self._access, width, **over)
        return opened

    def single(self, requests: int) -> Sample:
        """Time calls of one quota ID, one after the other."""
        return self._runner.run(self._single(requests))

    async def _single(self, requests: int) -> Sample:
        if 1 not in self._open:
            self._open[1] = await self._opened(1).__aenter__()
        ask = self._open[1].invite
        for quota_id in range(1, 21):
            await ask(self._member_code, quota_id)
        watch = Watch()
        for quota_id in range(1, requests + 1):
            await ask(self._member_code, quota_id)
        return watch.sample()

    def close(self) -> None:
        """Close all clients."""
        for each in self._open.values():
            self._runner.run(_closed(each))
        self._runner.close()

    async def _ask(self, requests: int, client: Peer) -> None:
        ids = requests * _CHUNK
        invited = await client.bulk(self._member_code, range(1, ids + 1))
        if invited != ids // 2:
            raise ValueError(f"{self._name}: {invited} of {ids} quota IDs were invited")

    def percentiles(self, requests: int, width: int) -> dict[str, float]:
        """Return percentiles of the milliseconds of our requests, in a bulk like those that were timed."""
        self._runner.run(self._warm_up(width))
        with attempts() as seconds:
            self._runner.run(self._ask(requests, self._open[width]))
        return percentiles(seconds)

    def decode(self, body: Path) -> Sample:
        """Time the decoding of an inventory, without its release."""
        content = body.read_bytes()
        watch = Watch()
        _read = self._reader.decode_quotas(content)
        return watch.sample()

    @cached_property
    def _reader(self) -> Peer:
        return self._opened(1)


@contextmanager
def contender(name: str, address: Address) -> Iterator[Remote]:
    """Start a `Contender` in its own process."""
    with remote(Contender, name, address) as process:
        try:
            yield process
        finally:
            process.call("close")


async def _closed(found: Peer) -> None:
    await found.__aexit__(None, None, None)


def _engine(name: str, connections: int) -> dict[str, Any]:
    """Return what gives our client another engine; nothing for its own. Each is imported when it is used."""
    import httpx  # noqa: PLC0415

    limits = httpx.Limits(
        max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=1
    )
    if name == "httpx.AsyncHTTPTransport":
        return {"transport": httpx.AsyncHTTPTransport(limits=limits)}
    if name == GIVEN:
        return {"http_client": httpx.AsyncClient(limits=limits)}
    if name == "httpx_aiohttp.AiohttpTransport":
        from httpx_aiohttp import AiohttpTransport  # noqa: PLC0415

        return {"transport": AiohttpTransport(limits=limits)}
    if name == "pyreqwest's HttpxTransport":
        from pyreqwest.client import ClientBuilder  # noqa: PLC0415
        from pyreqwest.compatibility.httpx import HttpxTransport  # noqa: PLC0415

        return {"transport": HttpxTransport(ClientBuilder().max_connections(connections).build())}
    return {}


def _uvloop() -> asyncio.AbstractEventLoop:
    import uvloop  # noqa: PLC0415  not everywhere

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
