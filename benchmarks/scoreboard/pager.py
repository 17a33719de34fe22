"""Read recontact lists over real sockets, with faults, breaks and resumptions, and compare the rows."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs

import httpx
from peers.common import Options, Peer
from peers.naive import NaiveClient
from peers.ours import OurClient
from pydantic import ValidationError

from sampling_async import SamplingError
from sampling_async.simulator import Fault, Simulator
from scoreboard.board import Row, Run, at_least, exactly, published
from scoreboard.service import FIRST_QUOTA, Remote, open_inventory, service

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

LISTS: Final = 10
RESUMPTIONS: Final = 2_000
"""A reader that gets more codes than this counts as endless."""

_EXPECTED: Final = (SamplingError, httpx.HTTPError, ValidationError, IndexError)
"""The errors that users would catch before resuming. The naive pager raises IndexError for an empty page."""


@dataclass
class Count:
    """The result of reading some lists."""

    served: int = 0
    lost: int = 0
    doubled: int = 0
    resumed: int = 0
    foreign: int = 0


def rows(run: Run) -> list[Row]:
    """Measure both clients and compare."""
    total = run.of(100_000, 1_000_000)
    counts = []
    for peer in (OurClient, NaiveClient):
        with service(build, run.seed, total // LISTS) as remote:
            counts.append(asyncio.run(_read_all(remote, peer, run.seed, total // LISTS)))
    us, them = counts
    note = "cut, reset, 500, 503, page, null, empty page, slow, cursor row repeated"
    return [
        at_least("rows served, by pages of 50 to 10,000", total, us.served, them.served, note=note),
        exactly("lost", 0, us.lost, them.lost),
        exactly("doubled", 0, us.doubled, them.doubled),
        exactly("rows of no list", 0, us.foreign, them.foreign),
        published("breaks and errors, resumed after the last row", us.resumed, them.resumed),
    ]


def build(seed: int, size: int) -> Simulator:
    """Make a simulator with recontact lists and a fault in every sixth page."""
    faults = [
        Fault.cut(when="before"),
        Fault.cut(when="after"),
        Fault.cut(when="middle", reset=True),
        Fault.cut(when="middle"),
        Fault.status(500),
        Fault.status(503, retry_after=0.01),
        Fault.html(),
        Fault.null(),
        Fault.empty_page(),
        Fault.delay(0.02),
    ]
    turn = 6 * len(faults)
    simulator = Simulator(
        seed,
        inventory=open_inventory(LISTS, recontacts=LISTS),
        members=1,
        gzip=False,
        faults=[
            fault.on("recontact_members", every=turn, after=6 * place) for place, fault in enumerate(faults)
        ],
    )
    for number in range(LISTS):
        simulator.set_recontact_members(FIRST_QUOTA + number, codes_of(number, size))
    simulator.app.add_middleware(RepeatedCursor, seed=seed)
    return simulator


def codes_of(number: int, size: int) -> list[str]:
    """Return the codes of a list. Some of them must be encoded in a URL."""
    odd = ("{:07}", "{:07} b", "{:07}+&=", "{:07}%2F", "{:07}é")
    return [f"{number}-" + odd[place % 5 if place % 50 < 5 else 0].format(place) for place in range(size)]


class RepeatedCursor:
    """A service that sometimes begins a page with the code that the client received last."""

    def __init__(self, app: ASGIApp, seed: int) -> None:
        self._app = app
        self._random = Random(seed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. One page in five begins with the cursor's code."""
        asked = parse_qs(scope.get("query_string", b"").decode(), encoding="utf-8")
        cursor = asked.get("lastMemberCodeReceived")
        start: list[Message] = []

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                start.append(message)
                return
            if start:
                begun = start.pop()
                if begun["status"] == 200 and not message.get("more_body"):
                    message = {**message, "body": _with_row(message["body"], cursor[0] if cursor else "")}
                    kept = [(name, value) for name, value in begun["headers"] if name != b"content-length"]
                    length = str(len(message["body"])).encode()
                    begun = {**begun, "headers": [*kept, (b"content-length", length)]}
                await send(begun)
            await send(message)

        struck = cursor is not None and self._random.random() < 0.2
        await self._app(scope, receive, send_on if struck else send)


def _with_row(body: bytes, cursor: str) -> bytes:
    try:
        document: Any = json.loads(body)
        document["MemberCodes"] = [cursor, *document["MemberCodes"]]
    except (ValueError, TypeError, KeyError):
        return body
    return json.dumps(document).encode()


async def _read_all(remote: Remote, peer: type[Peer], seed: int, size: int) -> Count:
    random, count = Random(seed), Count()
    async with peer(remote.address, Options(backoff=0.01)) as client:
        for number in range(LISTS):
            truth = set(codes_of(number, size))
            read = Counter(await _read(client, FIRST_QUOTA + number, size, random, count))
            count.served += read.total()
            count.lost += len(truth - read.keys())
            count.foreign += len(read.keys() - truth)
            count.doubled += sum(times - 1 for times in read.values())
    return count


async def _read(client: Peer, quota_id: int, size: int, random: Random, count: Count) -> list[str]:
    """Read a list to its end. Reading stops at random and after errors, and resumes after the last code."""
    read: list[str] = []
    for _ in range(RESUMPTIONS):
        patience = random.randint(1, size)
        page_size = random.choice((50, 200, 1_000, 3_000, 10_000))
        after = read[-1] if read else None
        try:
            async with aclosing(client.recontact(quota_id, page_size=page_size, after=after)) as codes:
                async for code in codes:
                    read.append(code)
                    patience -= 1
                    if not patience:
                        break
                else:
                    return read
        except _EXPECTED:
            pass
        count.resumed += 1
    return read
