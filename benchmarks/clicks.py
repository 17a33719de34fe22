"""Clicks of members beside a campaign on the same client: how many get a link in time, and what it costs.

    python benchmarks/clicks.py                              # 1,000 a second for a minute, twice
    python benchmarks/clicks.py --rate 100 --seconds 20
    python benchmarks/clicks.py --only router --rate 20 --seconds 10 --surveys 3300  # `offers`, of 8,000 quotas
    python benchmarks/clicks.py --store postgresql://...

The service answers after 50 to 400 ms, refuses 5 % of the pairs and surveys that the member has an invite of,
and is away for 10 s in the middle. Each member clicks some three times; one click in ten is a double click, and
seven links in ten are entered. A campaign asks for bulks of 100 on the same client all the time. The router is
measured first, then the click page that partners write (`peers/click_page.py`). Each has a service of its own,
whose ledger says what was really requested and made.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar, Final
from urllib.request import urlopen

import anyio
from attrs import define, field
from peers.click_page import ClickPage
from scoreboard.board import table
from speed.canned_server import Connection, served

from sampling_async import InviteRequest, OutagePolicy, SamplingClient, to_json
from sampling_async.matching import LiveIndex, Member
from sampling_async.routing import SurveyRouter
from sampling_async.simulator import generate_inventory, generate_members

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

SEED: Final = 7
PANEL, KEY = "aaaaaaaa-1111-2222-3333-444444444444", "bbbbbbbb-5555-6666-7777-888888888888"
FASTEST, SLOWEST = 0.05, 0.4
REFUSED: Final = 0.05
AWAY_SECONDS: Final = 10.0
WITHIN: Final = 2.0
CLICKS_A_MEMBER: Final = 3
DOUBLE: Final = 0.1
ENTERED: Final = 0.7
SLICE: Final = 0.01  # seconds; the clicks of one are begun together


# --- The service, in a process of its own


class Service(Connection):
    """One connection. It answers each request in its turn, from memory."""

    asked: ClassVar[Counter[tuple[str, int]]] = Counter()
    made: ClassVar[Counter[tuple[str, int]]] = Counter()
    taken: ClassVar[set[tuple[str, int]]] = set()
    inventory = b""
    away: tuple[float, float] = (0.0, 0.0)
    random = random.Random(SEED)

    def answer(self, target: str, body: bytes) -> None:
        """Answer a request, or a question about the run."""
        if target == "/away":
            Service.away = (time.monotonic(), time.monotonic() + AWAY_SECONDS)
            self.send(b"[]")
        elif target == "/made":
            pairs = [[*pair, count, self.made[pair]] for pair, count in self.asked.items()]
            self.send(json.dumps(pairs).encode())
        elif self.away[0] <= time.monotonic() < self.away[1]:
            self.send(b"{}", b"503 Service Unavailable")
        elif not body:
            self.send(b"[]" if "Settings" in target else self.inventory)
        else:
            wait = self.random.uniform(FASTEST, SLOWEST)
            asyncio.get_running_loop().call_later(
                wait, self._invite, target.split("/")[-2], json.loads(body)["QuotaIDs"]
            )

    def _invite(self, member: str, quota_ids: list[int]) -> None:
        items = []
        for quota_id in quota_ids:
            survey = member, SURVEY_OF[quota_id]
            self.asked[member, quota_id] += 1
            if survey in self.taken or self.random.random() < REFUSED:
                items.append({"QuotaID": quota_id, "Invite": None, "ResultCode": 11, "Result": "REFUSED"})
                continue
            self.made[member, quota_id] += 1
            self.taken.add(survey)
            url = f"https://survey.example/{member}/{quota_id}/{self.made[member, quota_id]}"
            numbers = {"SurveyID": SURVEY_OF[quota_id], "WaveID": 1, "QuotaID": quota_id, "LOI": 10, "IR": 30}
            invite = {**numbers, "MemberAmount": 0.0, "PartnerAmount": 1.5, "URL": url}
            items.append({"QuotaID": quota_id, "Invite": invite, "ResultCode": 1, "Result": "SUCCESS"})
        self.send(json.dumps({"Invites": items}).encode())


SURVEY_OF: Final[dict[int, int]] = {}


def service_of(surveys: int) -> type[Service]:
    """Return the service of so many surveys."""
    inventory = generate_inventory(SEED, surveys=surveys)
    Service.inventory = to_json(inventory)
    SURVEY_OF.update(
        (quota.quota_id, survey.survey_id) for survey in inventory.surveys for quota in survey.quotas
    )
    return Service


# --- The clicks


@define
class Clicks:
    """What became of the clicks of a run."""

    link: list[float] = field(factory=list)  # seconds until a link
    all: list[float] = field(factory=list)
    without: int = 0
    without_while_away: int = 0
    shown: set[str] = field(factory=set)
    away: tuple[float, float] = (0.0, 0.0)

    def add(self, began: float, url: str | None) -> None:
        """Record a click that has ended."""
        now = time.monotonic()
        self.all.append(now - began)
        if url is not None:
            self.link.append(now - began)
            self.shown.add(url)
        else:
            self.without += 1
            # One that began just before the outage waits for a response that does not come.
            self.without_while_away += self.away[0] - WITHIN <= began <= self.away[1] + 1


async def click(
    member: Member,
    route: Callable[..., Awaitable[str | None]],
    enter: Callable[[Member], Awaitable[object]],
    clicks: Clicks,
    *,
    times: int,
) -> None:
    """Click once or twice at the same moment, and perhaps enter the link."""

    async def once() -> str | None:
        began = time.monotonic()
        url = await route(member)
        clicks.add(began, url)
        return url

    urls = await asyncio.gather(*[once() for _ in range(times)])
    if any(urls) and random.random() < ENTERED:
        await enter(member)


async def campaign(client: SamplingClient, quota_ids: list[int], rate: float, counted: Counter[str]) -> None:
    """Ask for bulks of 100, so many a second, without end."""

    async def requests() -> AsyncIterator[InviteRequest]:
        number = 0
        while True:
            number += 1
            await asyncio.sleep(1 / rate)
            yield InviteRequest(f"campaign{number}", random.sample(quota_ids, 100))

    async with client.fan_out(requests()) as outcomes:
        async for outcome in outcomes:
            counted[outcome.status] += 1


async def run(  # noqa: C901, PLR0915  one run, from top to bottom
    by: str, url: str, arguments: argparse.Namespace, store: str
) -> dict[str, Any]:
    """Run the clicks of one way, and return its figures."""
    inventory = generate_inventory(SEED, surveys=arguments.surveys)
    wanted = int(arguments.rate * arguments.seconds / (1 + DOUBLE))
    members = [
        Member(each.member_code, each.profile)
        for each in generate_members(SEED, members=max(50, wanted // CLICKS_A_MEMBER), inventory=inventory)
    ]
    quota_ids = [quota.quota_id for survey in inventory.surveys for quota in survey.quotas]
    clicks, counted = Clicks(), Counter[str]()
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(
            SamplingClient(
                url, panel_guid=PANEL, api_key=KEY, max_concurrency=arguments.places, outage=OutagePolicy()
            )
        )
        watch = await stack.enter_async_context(client.watch_quotas())
        live = await stack.enter_async_context(LiveIndex(watch))
        await live.ready(timeout=60)
        if by == "router":
            router = await stack.enter_async_context(SurveyRouter(client, live, store=store))
            last: dict[str, Any] = {}

            async def route(member: Member) -> str | None:
                found = await router.route(member, within=WITHIN)
                if found.url is not None:
                    last[member.member_code] = found
                return found.url

            async def enter(member: Member) -> None:
                if member.member_code in last:  # not entered already, by another click of the same moment
                    await last.pop(member.member_code).entered()
        else:
            page = ClickPage(client.with_options(outage=OutagePolicy(patience=0)), live)
            route = partial(page.route, within=WITHIN)

            async def enter(member: Member) -> None:
                await page.entered(member.member_code)

        beside = asyncio.create_task(campaign(client, quota_ids, arguments.bulks, counted))
        chosen = random.Random(SEED)
        cpu, began, made = time.process_time(), time.monotonic(), 0
        is_away = False
        tasks: set[asyncio.Task[None]] = set()
        while (passed := time.monotonic() - began) < arguments.seconds:
            if not is_away and passed > arguments.seconds / 2:
                is_away, clicks.away = True, (time.monotonic(), time.monotonic() + AWAY_SECONDS)
                await anyio.to_thread.run_sync(lambda: urlopen(f"{url}/away").read())
            while made < passed * arguments.rate:
                times = 2 if chosen.random() < DOUBLE else 1
                made += times
                member = members[chosen.randrange(len(members))]
                task = asyncio.create_task(click(member, route, enter, clicks, times=times))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await asyncio.sleep(SLICE)
        if tasks:
            await asyncio.wait(set(tasks))
        cpu = time.process_time() - cpu
        beside.cancel()
        await asyncio.wait([beside])
        statuses = ""
        spare = None
        fitting = offering = ""
        if by == "router":
            spare = router.status.unused
            statuses = ", ".join(f"{count:,} {status}" for status, count in router.status.clicks.items())
            fitting = int(
                median(len(found.certain) + len(found.possible) for found in map(live.match, members))
            )
            offering = 1000 * median(seconds_of(router.offers, each) for each in members)
    with urlopen(f"{url}/made") as response:  # noqa: ASYNC210  its own, and nothing else runs
        pairs = [each for each in json.load(response) if not each[0].startswith("campaign")]
    invites, twice = sum(made for *_, made in pairs), sum(asked > 1 for *_, asked, _ in pairs)
    link, every = sorted(clicks.link), sorted(clicks.all)
    return {
        "clicks": len(every),
        "routed, % of those outside the outage": 100
        * len(link)
        / max(1, len(link) + clicks.without - clicks.without_while_away),
        "routed, % of all": 100 * len(link) / len(every),
        "time to link, median ms": 1000 * link[len(link) // 2],
        "time to link, 99 % ms": 1000 * link[len(link) * 99 // 100],
        "ended within the time, %": 100 * sum(seconds <= WITHIN + 0.05 for seconds in every) / len(every),
        "longest click, ms": 1000 * every[-1],
        "invites made": invites,
        "unused, a click": (invites - len(clicks.shown)) / len(every),
        "made and not known to the page": "" if spare is None else invites - len(clicks.shown) - spare,
        "pairs that were requested twice": twice,
        "pairs with two invites": sum(made > 1 for *_, made in pairs),
        "ended as": statuses,
        f"`offers`, median ms; {len(quota_ids):,} quotas": offering,
        "quotas that a member fits, median": fitting,
        "bulk outcomes a second beside it": sum(counted.values()) / arguments.seconds,
        "CPU of the process, ms a click, the campaign included": 1000 * cpu / len(every),
    }


def seconds_of(function: Callable[..., object], *values: object) -> float:
    """Return how long a call takes."""
    began = time.perf_counter()
    function(*values)
    return time.perf_counter() - began


def main() -> None:
    """Run both ways, each with a service of its own, and print the figures beside each other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=1000.0, help="clicks a second")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--places", type=int, default=512, help="max_concurrency of the client")
    parser.add_argument("--bulks", type=float, default=50.0, help="bulks of the campaign a second")
    parser.add_argument("--surveys", type=int, default=300, help="surveys of the service")
    parser.add_argument("--store", help="where the router keeps links; default: a SQLite file")
    parser.add_argument("--only", choices=["router", "page"])
    arguments = parser.parse_args()
    found = {}
    for by in ("router", "page"):
        if arguments.only in (None, by):
            with tempfile.TemporaryDirectory() as folder, served(service_of, arguments.surveys) as url:
                store = arguments.store or str(Path(folder) / "links.db")
                found[by] = asyncio.run(run(by, url, arguments, store))
    rows = [(name, *(figures[name] for figures in found.values())) for name in next(iter(found.values()))]
    title = f"{arguments.rate:,.0f} clicks a second for {arguments.seconds:g} s"
    print(*table((title, *found), rows), sep="\n")


if __name__ == "__main__":
    main()
