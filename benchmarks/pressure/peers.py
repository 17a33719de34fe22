"""Other clients in the same cells, over the same modelled transport.

`aiohttp` itself cannot run on a modelled transport: it speaks to sockets only. What stands for it is what its
users write around it: a semaphore, first come first served, and a time for each call. Of botocore's adaptive
mode, the rate limiter is its own (`ClientRateLimiter`, `CubicCalculator`, `RateClocker`, `TokenBucket`), and so
is the backoff. Its bucket blocks the thread; here the task sleeps until the bucket has a token, and asks again.
Its retry quota of 500 tokens is left out: these runs would not use it up.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from importlib.util import find_spec
from itertools import count
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final

import httpx
from scoreboard.testkit import tool

from pressure.askers import QUOTA_ID, URL, Asker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from pressure.cells import Cell
    from pressure.service import ServiceModel

_PATH: Final = "/IPExternalSamplingService/ExternalSample"
_THROTTLED: Final = frozenset({429, 503})
_ATTEMPTS: Final = 3
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 2.0
_MOMENT: Final = 1e-6

SEMAPHORE: Final = "semaphore, as with aiohttp"
ADAPTIVE: Final = "botocore's adaptive mode"
FIFO: Final = "FIFO, endless retries"


class SemaphorePeer(Asker):
    """At most so many requests at once, first come first served. A refused call fails."""

    def __init__(self, model: ServiceModel, cell: Cell, seed: int) -> None:
        known = tool("doubles")
        self._random = Random(f"peer {seed}").random
        self._path = f"{URL}{_PATH}/{known.PANEL}"
        self._http = httpx.AsyncClient(transport=model, headers={"API_AUTH_KEY": known.KEY}, timeout=30)
        self._places, self._width = asyncio.Semaphore(cell.width), cell.width

    async def click(self, member: str, deadline: float) -> bool:
        """Request one invite within a time."""
        try:
            async with asyncio.timeout(deadline):
                return await self._call(member)
        except TimeoutError:
            return False

    def bulks(self) -> list[AsyncIterator[bool]]:
        """Return a worker for each place."""
        return [self._one_by_one(number) for number in range(self._width)]

    async def _one_by_one(self, number: int) -> AsyncIterator[bool]:
        for at in count():
            yield await self._call(f"bulk-{number}-{at}")

    async def _call(self, member: str) -> bool:
        return await self._send(member) == 200

    async def _send(self, member: str) -> int:
        """Send a request, and return the status; 0 if there was no connection."""
        async with self._places:
            try:
                response = await self._http.get(f"{self._path}/{member}/Invite/{QUOTA_ID}")
            except httpx.TransportError:
                return 0
            return response.status_code


class FifoPeer(SemaphorePeer):
    """The same, with retries until the time of the call is over."""

    async def _call(self, member: str) -> bool:
        for attempt in count():
            if await self._send(member) == 200:
                return True
            await asyncio.sleep(self._random() * min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(attempt, 10)))
        return False


class AdaptivePeer(SemaphorePeer):
    """The same, with botocore's rate limiter before each attempt, and three attempts with its backoff."""

    def __init__(self, model: ServiceModel, cell: Cell, seed: int) -> None:
        from botocore.retries import adaptive, bucket, standard, throttling  # noqa: PLC0415  optional

        super().__init__(model, cell, seed)
        clock = SimpleNamespace(current_time=asyncio.get_running_loop().time)
        detector = SimpleNamespace(is_throttling_error=lambda *, status: status in _THROTTLED)
        self._clock, self._bucket = clock, bucket.TokenBucket(max_rate=1, clock=clock)
        # As `register_retry_handler` of botocore puts it together.
        self._limiter = adaptive.ClientRateLimiter(
            rate_adjustor=throttling.CubicCalculator(starting_max_rate=0, start_time=clock.current_time()),
            rate_clocker=adaptive.RateClocker(clock),
            token_bucket=self._bucket,
            throttling_detector=detector,
            clock=clock,
        )
        self._backoff = standard.ExponentialBackoff(max_backoff=20, random=self._random)
        self._is_throttled = False  # the limiter is off before the first refusal
        self._line = asyncio.Lock()

    async def _call(self, member: str) -> bool:
        for attempt in range(1, _ATTEMPTS + 1):
            await self._token()
            status = await self._send(member)
            self._limiter.on_receiving_response(status=status)
            self._is_throttled |= status in _THROTTLED
            if status == 200:
                return True
            if attempt < _ATTEMPTS:
                await asyncio.sleep(
                    self._backoff.delay_amount(SimpleNamespace(attempt_number=attempt, http_response=None))
                )
        return False

    async def _token(self) -> None:
        from botocore.exceptions import CapacityNotAvailableError  # noqa: PLC0415  optional

        if not self._is_throttled:
            return
        async with self._line:
            while True:
                try:
                    self._bucket.acquire(block=False)
                except CapacityNotAvailableError:
                    missing = max(0.0, 1 - self._bucket.available_capacity)
                    await asyncio.sleep(missing / self._bucket.max_rate + _MOMENT)
                else:
                    return


def without(peer: str) -> str:
    """Return why a peer cannot run, or an empty text."""
    if peer == ADAPTIVE and find_spec("botocore") is None:
        return "not measured: botocore (dependency group `bench`) is not installed"
    return ""


def opened(peer: str) -> Callable[[ServiceModel, Cell, int], AbstractAsyncContextManager[Asker]]:
    """Return what opens a peer."""

    @asynccontextmanager
    async def opens(model: ServiceModel, cell: Cell, seed: int) -> AsyncIterator[Asker]:
        yield PEERS[peer](model, cell, seed)

    return opens


PEERS: Final[dict[str, type[SemaphorePeer]]] = {
    SEMAPHORE: SemaphorePeer,
    ADAPTIVE: AdaptivePeer,
    FIFO: FifoPeer,
}
