"""A service in memory for routers: an inventory, and what each quota answers."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import doubles
import httpx
from panel_kit import GENDER, MALE, NOW, quota, row, sub_quota, survey
from store_kit import post

from sampling_async import Price, Quotas, RetryPolicy, to_json
from sampling_async.matching import LiveIndex, Member
from sampling_async.routing import SurveyRouter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

MEMBER = Member("m-1", {GENDER: MALE})
NOT_SENT = httpx.Response(429)
LONG = 60.0  # no click of the tests takes so long


class Clock:
    """Seconds since 1970, as a test sets them: at noon of a UTC day."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0 // 86_400 * 86_400 + 43_200

    def __call__(self) -> float:
        return self.now


class Panel:
    """A service whose quotas take men. Each is in a survey of its own, and the later one is paid better.

    Attributes:
        answers: What a quota answers: a result code, a response, an exception, or an event to wait for before
            the invite comes; or a tuple of an event and one of the others.
        instead: What its invites say in place of the survey and quota that were requested.
        asked: The pairs that were requested, in their order.
    """

    def __init__(self, *quota_ids: int, **changes: Any) -> None:
        self.inventory = Quotas(
            surveys=tuple(
                survey(
                    quota([sub_quota(row(GENDER, MALE))], quota_id=quota_id),
                    survey_id=quota_id * 100,
                    price=Price(float(quota_id), 1),
                    **changes,
                )
                for quota_id in quota_ids
            ),
            country_id=1,
            cache_expires=NOW,
        )
        self.answers: dict[int, Any] = {}
        self.asked: list[tuple[str, int]] = []
        self.instead: dict[str, int] = {}
        self.is_away = False
        self.began = anyio.Event()

    def survey_of(self, quota_id: int) -> int:
        for each in self.inventory.surveys:
            if any(one.quota_id == quota_id for one in each.quotas):
                return each.survey_id
        return quota_id * 100

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        await anyio.lowlevel.checkpoint()
        if self.is_away:
            raise httpx.ConnectError("refused")
        if request.method == "GET":
            body = b"[]" if "Settings" in request.url.path else to_json(self.inventory)
            return httpx.Response(200, content=body, headers={"Content-Type": "application/json"})
        member, items = request.url.path.split("/")[-2], []
        self.asked += [(member, quota_id) for quota_id in doubles.asked(request)]
        self.began.set()
        for quota_id in doubles.asked(request):
            answer = self.answers.get(quota_id, 1)
            if isinstance(answer, anyio.Event):
                answer = (answer, 1)
            if isinstance(answer, tuple):
                event, answer = answer
                await event.wait()
            if isinstance(answer, Exception):
                raise answer
            if isinstance(answer, httpx.Response):
                return answer
            item = doubles.item(quota_id, answer)
            if item["Invite"]:
                survey_id = self.survey_of(quota_id)
                url = f"https://survey.example/{member}/{quota_id}/{len(self.asked)}"
                item["Invite"] |= {"SurveyID": survey_id, "WaveID": 1, "URL": url, **self.instead}
            items.append(item)
        return httpx.Response(200, json={"Invites": items})


@asynccontextmanager
async def live_of(panel: Panel, **options: Any) -> AsyncIterator[tuple[Any, LiveIndex]]:
    """Yield a client and a live index that is ready."""
    options = {"clock": None, "sleep": anyio.sleep, "retry": RetryPolicy(max_attempts=1), **options}
    async with (
        doubles.client(panel, **options) as client,
        client.watch_quotas(every=3600) as watch,
        LiveIndex(watch) as live,
    ):
        if not panel.is_away:
            await live.ready(timeout=30)
        yield client, live


@asynccontextmanager
async def router_of(panel: Panel, store: Any = None, **options: Any) -> AsyncIterator[SurveyRouter]:
    async with live_of(panel) as (client, live), SurveyRouter(client, live, store=store, **options) as router:
        yield router


async def click(router: SurveyRouter, member: Member = MEMBER, within: float = LONG, **options: Any) -> Any:
    return await router.route(member, within=within, **options)


def ids(offers: Any) -> list[int]:
    return [offer.quota_id for offer in offers]


async def ended(inbox: Any, kind: Any, quota_id: int, *, member: str = "m-1", **more: Any) -> None:
    """Post a notification that a survey has ended for a member."""
    fields = {"UniqueCode": member, "SurveyId": quota_id * 100, "WaveId": 1, "QuotaID": quota_id, **more}
    assert (await post(inbox, kind, fields)).status == 200
