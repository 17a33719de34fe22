"""A `SurveyRouter` in virtual time: its store commits in the thread of the event loop.

Otherwise a commit takes real time, in which virtual time runs on: what happens would depend on the disk.
"""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import anyio
import httpx
from routing_kit import MEMBER, Clock, Panel

from sampling_async.matching import LiveIndex, Member
from sampling_async.notifications._committer import Committer
from sampling_async.routing import SurveyRouter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from sampling_async import SamplingClient


class _CommitterInLoop(Committer):
    """Runs each operation at once, in a transaction of its own."""

    def start(self) -> None:
        self._store.open()
        self._is_open = True

    def stop(self) -> None:
        self._is_open = False
        self._store.close()

    def _put(self, job: Any) -> None:
        super()._put(job)
        self._jobs.put(None)  # the thread's work ends behind this job
        self._work()


class _AtOnce:
    """In place of the threads that wait for work: each piece of work is done at once."""

    def pop(self) -> _AtOnce:
        return self

    def put(self, work: Callable[[], object]) -> None:
        work()


@contextmanager
def threads_in_loop() -> Iterator[None]:
    """Have the router's store, and what the client does in threads, run in the thread of the event loop."""
    with (
        patch("sampling_async.routing._router.Committer", _CommitterInLoop),
        patch("sampling_async._pacing.threads._idle", _AtOnce()),
    ):
        yield


class PanelBehind(httpx.AsyncBaseTransport):
    """A panel for routers whose invites pass through a modelled service, which delays or refuses them."""

    def __init__(self, service: httpx.AsyncBaseTransport, panel: Panel) -> None:
        self._service, self._panel = service, panel

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith("/Quotas"):
            response = await self._service.handle_async_request(request)
            if response.status_code != 200 or request.method == "GET":
                return response
        await request.aread()
        return await self._panel(request)


@asynccontextmanager
async def virtual_router(
    make_client: Callable[[httpx.AsyncBaseTransport], SamplingClient], service: httpx.AsyncBaseTransport
) -> AsyncIterator[SurveyRouter]:
    """Yield a router whose only time is that of the event loop, which is virtual."""
    noon = Clock().now
    with threads_in_loop():
        async with (
            make_client(PanelBehind(service, Panel(2, 4, 6))) as client,
            client.watch_quotas(every=1e6) as watch,
            LiveIndex(watch) as live,
        ):
            await live.ready(timeout=30)
            clock = lambda: noon + anyio.current_time()  # noqa: E731
            async with SurveyRouter(client, live, store=None, clock=clock) as router:
                yield router


def member_of(number: int) -> Member:
    """Return a member who fits each quota of the panel."""
    return Member(f"m-{number}", MEMBER.profile)
