"""A service that costs very little CPU: it answers from memory, so that the client is what is measured.

It parses just enough of HTTP/1.1 to find the end of a request, and answers all five endpoints by the contract:
even quota IDs are invited, odd ones are not live. It has no state and no ledger, and refuses nothing. To test
behaviour, use the simulator.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from zlib import crc32

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection as Pipe

    from sampling_async.simulator import Latency

CODES_A_PAGE: Final = 10_000
_REMEMBERED: Final = 4096
_TARGET: Final = re.compile(rb"(GET|POST) (\S+) HTTP/1\.1\r\n")
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_HEAD: Final = (
    b"HTTP/1.1 %b\r\ncontent-type: application/json; charset=utf-8\r\n"
    b"date: Thu, 15 Jan 2026 09:30:12 GMT\r\nserver: canned\r\ncontent-length: %d\r\n\r\n"
)
_INVITED: Final = (
    '{"QuotaID":%d,"Invite":{"SurveyID":2407319,"WaveID":3021544,"QuotaID":%d,"PartnerAmount":1.75,'
    '"MemberAmount":0.5,"URL":"https://survey.example.com/start?s=2407319&q=%d&t=%08x5bd9cb469fa16570867728950e",'
    '"LOI":15,"IR":30},"ResultCode":1,"Result":"SUCCESS"}'
)
_NOT_LIVE: Final = '{"QuotaID":%d,"Invite":null,"ResultCode":9,"Result":"QUOTA_NOT_LIVE"}'


class Address(NamedTuple):
    """The address of a service, with the panel, the key and a known member."""

    url: str
    panel_guid: str = "11111111-2222-4333-8444-555555555555"
    api_key: str = "99999999-8888-4777-8666-555555555555"
    member_code: str = "m000001"


def bulk_answer(target: str, body: bytes) -> bytes:
    """Return the response of Bulk Invite to a request. Each member gets links of its own."""
    member = crc32(target.encode())
    quota_ids = json.loads(body)["QuotaIDs"]
    items = (_NOT_LIVE % id_ if id_ % 2 else _INVITED % (id_, id_, id_, member) for id_ in quota_ids)
    return f'{{"Invites":[{",".join(items)}]}}'.encode()


@dataclass(frozen=True)
class Canned:
    """The content of the service.

    Attributes:
        inventory: The body of Get Quotas.
        codes: The number of member codes in the recontact list.
        latency: The duration of calls, by the simulator's rules; None for as fast as possible.
    """

    inventory: bytes = b'{"CountryID":1,"CacheExpires":"2026-01-15T09:30:12Z","Surveys":[]}'
    codes: int = 0
    latency: Latency | None = None


class Connection(asyncio.Protocol):
    """One connection of a server. `answer` is called with the target and the body of each request."""

    def __init__(self) -> None:
        self._received = b""
        self.transport: Any = None

    def answer(self, target: str, body: bytes) -> None:
        """Answer a request, now or later."""
        raise NotImplementedError

    def connection_made(self, transport: Any) -> None:
        """Keep the new connection."""
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        """Answer each complete request."""
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = self._received[: end + 2]
            length = _LENGTH.search(head)
            whole = end + 4 + (int(length[1]) if length else 0)
            if len(self._received) < whole:
                return
            body, self._received = self._received[end + 4 : whole], self._received[whole:]
            target = _TARGET.match(head)
            assert target is not None, head
            self.answer(target[2].decode(), body)

    def send(self, body: bytes, status: bytes = b"200 OK") -> None:
        """Send a response, unless the client has gone."""
        if not self.transport.is_closing():
            self.transport.write(_HEAD % (status, len(body)) + body)


class _Canned(Connection):
    """A connection whose responses wait as long as a call for so many quota IDs takes from now, if at all."""

    def __init__(self, answers: _Answers, wait: Callable[[int], float] | None) -> None:
        super().__init__()
        self._answers = answers
        self._wait = wait

    def answer(self, target: str, body: bytes) -> None:
        answer = self._answers.to(target, body)
        if self._wait is None:
            self.send(answer)
        else:
            seconds = self._wait(body.count(b",") + 1)
            asyncio.get_running_loop().call_later(seconds, self.send, answer)


class _Answers:
    """The bodies of the responses."""

    def __init__(self, canned: Canned) -> None:
        self._inventory = canned.inventory
        self._codes = canned.codes
        self._bulks: OrderedDict[tuple[str, bytes], bytes] = OrderedDict()

    def to(self, target: str, body: bytes) -> bytes:
        """Return the response to a request."""
        if target.endswith("/Invites"):
            answer = self._bulks.get((target, body))
            if answer is None:
                answer = self._bulks[target, body] = bulk_answer(target, body)
                if len(self._bulks) > _REMEMBERED:
                    self._bulks.popitem(last=False)
            return answer
        if "/Quotas" in target:
            return self._inventory
        if "/Recontact/" in target:
            return self._page(target)
        if "/Invite/" in target:
            quota_id = int(target.rsplit("/", 1)[1])
            return json.dumps(json.loads(_INVITED % (quota_id, quota_id, quota_id, 0))["Invite"]).encode()
        return b'[{"Name":"Qualified URL","Description":"","Value":"https://example.com/q?pid=[pid]"}]'

    def _page(self, target: str) -> bytes:
        after = re.search(r"lastMemberCodeReceived=m(\d+)", target)
        asked = re.search(r"maxResults=(\d+)", target)
        size = min(CODES_A_PAGE, int(asked[1])) if asked else CODES_A_PAGE
        first = int(after[1]) + 1 if after else 1
        last = min(first + size - 1, self._codes)
        codes = ",".join(f'"m{number:09}"' for number in range(first, last + 1))
        more = "true" if last < self._codes else "false"
        return f'{{"MaxResults":{size},"HasAdditionalMembers":{more},"MemberCodes":[{codes}]}}'.encode()


def _connections(canned: Canned) -> Callable[[], Connection]:
    answers, wait = _Answers(canned), None
    if canned.latency is not None:
        from sampling_async.simulator._clock import WorkQueue  # noqa: PLC0415  not where nothing waits

        wait = WorkQueue(canned.latency, clock=asyncio.get_running_loop().time).admit
    return lambda: _Canned(answers, wait)


async def _serve(pipe: Pipe, make: Callable[..., Callable[[], Connection]], arguments: tuple[Any, ...]) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(make(*arguments), "127.0.0.1", 0, backlog=2048)
    pipe.send(server.sockets[0].getsockname()[1])
    closed = asyncio.Event()
    loop.add_reader(pipe.fileno(), closed.set)  # readable when the other end is closed
    await closed.wait()


def _run(pipe: Pipe, make: Callable[..., Callable[[], Connection]], arguments: tuple[Any, ...]) -> None:
    asyncio.run(_serve(pipe, make, arguments))


@contextmanager
def served(make: Callable[..., Callable[[], Connection]], *arguments: Any) -> Iterator[str]:
    """Run a service in its own process, in which `make` returns what makes a connection. Yield its URL."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs, make, arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        ours.close()
        process.join()


@contextmanager
def canned_service(canned: Canned | None = None) -> Iterator[Address]:
    """Run the service in its own process and yield its address."""
    with served(_connections, canned or Canned()) as url:
        yield Address(url)
