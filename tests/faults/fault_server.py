"""A service on real sockets that misbehaves on request, and a ledger of what it really did.

A fault is a list of steps for one request and its response. Steps are made by the words in `WORDS`, which are
also the instructions of `conformance.json`:

    RIGHT = [read(), process(), answer()]
    [read(), process(), cut(40, "rst")]              the invites are made, the response is cut at byte 40
    [read(), reply(503, "busy")]                     read, and refused without being processed
    [read(), process(), answer(), till_next(), rst()]  a kept-alive connection that is dropped on its next use

The nth request gets the nth fault, and all later requests get `then`, on whatever connection they come. A
fault is chosen when the first byte of a request arrives, so it may respond before reading.

`Ledger.received` lists the requests that were read completely, `Ledger.processed` those that took effect, and
`Ledger.invites` every invite made. Even quota IDs are invited, odd ones are refused with result code 9.

The server runs in threads of its own (those of `wire.serve`), so tests on any event loop can use it.
"""

from __future__ import annotations

import gzip
import json
import re
import select
import socket
import ssl
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, Self, TypeAlias
from urllib.parse import parse_qs, quote, unquote

import doubles
import inventories
import trustme
import wire
from attrs import Factory, define, evolve, field, frozen
from doubles import until

Framing: TypeAlias = Literal["length", "chunked", "close", "gzip"]
FRAMINGS: tuple[Framing, ...] = ("length", "chunked", "close", "gzip")
ENDPOINTS = ("get_settings", "get_quotas", "generate_invite", "recontact_members", "bulk_invite")
RECONTACT_CODES = tuple(f"m{n:03}" for n in range(25))
_PAGE = 10
_SAMPLES = r"(?P<base>.*)/IPExternalSamplingService/ExternalSample/(?P<panel>[^/]+)"
_ROUTES = {
    "get_quotas": re.compile(rf"GET {_SAMPLES}/Quotas"),
    "bulk_invite": re.compile(rf"POST {_SAMPLES}/(?P<member>[^/]+)/Invites"),
    "generate_invite": re.compile(rf"GET {_SAMPLES}/(?P<member>[^/]+)/Invite/(?P<quota>\d+)"),
    "get_settings": re.compile(r"GET (?P<base>.*)/IntegratedPanelService/api/Settings"),
    "recontact_members": re.compile(rf"GET {_SAMPLES}/Recontact/(?P<quota>\d+)/MemberCodes"),
}


# --- Requests and their correct responses


@frozen
class Request:
    """A request, parsed."""

    endpoint: str
    method: str
    target: str
    headers: dict[str, str] = field(repr=False)  # names in lower case
    member_code: str | None = None
    quota_ids: tuple[int, ...] = ()
    query: dict[str, str] = Factory(dict)

    @classmethod
    def of(cls, raw: bytes) -> Self:
        head, _, body = raw.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        method, target, _version = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        path, _, query = target.partition("?")
        answers = {name: values[-1] for name, values in parse_qs(query).items()}
        for endpoint, route in _ROUTES.items():
            if found := route.fullmatch(f"{method} {path}"):
                named = found.groupdict()
                member = unquote(named["member"]) if "member" in named else None
                quota_ids = json.loads(body)["QuotaIDs"] if body else [int(named.get("quota", 0))]
                return cls(endpoint, method, target, headers, member, tuple(quota_ids), answers)
        return cls("unknown", method, target, headers, None, (), answers)

    @property
    def invites(self) -> list[tuple[str, int]]:
        """The invites that processing this request makes."""
        if self.endpoint not in {"bulk_invite", "generate_invite"} or self.member_code is None:
            return []
        return [(self.member_code, quota_id) for quota_id in self.quota_ids if quota_id % 2 == 0]


def invite_url(member_code: str, quota_id: int) -> str:
    """Return the link of an invite, which says whose it is."""
    return f"https://survey.example/{quote(member_code, safe='')}/{quota_id}"


def _invite(member_code: str, quota_id: int) -> dict[str, Any]:
    return doubles.invite(quota_id, URL=invite_url(member_code, quota_id))


def right_document(request: Request) -> tuple[int, Any]:
    """Return the correct status and document for a request."""
    if request.headers.get("api_auth_key") != doubles.KEY:
        return 403, {"Result": "FORBIDDEN", "ResultCode": 2}
    match request.endpoint:
        case "get_quotas":
            return 200, inventories.quotas()
        case "get_settings":
            return 200, [
                {
                    "Name": "Qualified URL",
                    "Description": "on completing",
                    "Value": "https://panel.example/[pid]",
                },
                {"Name": "Max Surveys To Fetch", "Description": "", "Value": None},
            ]
        case "recontact_members":
            after, size = (
                request.query.get("lastMemberCodeReceived", ""),
                request.query.get("maxResults", _PAGE),
            )
            rest = [code for code in RECONTACT_CODES if code > after]
            return 200, doubles.page(*rest[: int(size)], more=len(rest) > int(size))
        case "generate_invite" if request.invites:
            return 200, _invite(*request.invites[0])
        case "generate_invite":
            return 400, {"Result": "QUOTA_NOT_LIVE", "ResultCode": 9}
        case "bulk_invite":
            items = [doubles.item(quota_id, 9 if quota_id % 2 else 1) for quota_id in request.quota_ids]
            for item in items:
                if item["Invite"]:
                    item["Invite"] = _invite(request.member_code or "", item["QuotaID"])
            return 200, {"Invites": items}
    return 404, {"Result": "NOT_FOUND", "ResultCode": 404}


def framed(status: int, body: bytes, framing: Framing = "length") -> bytes:
    """Return a response that marks its end in one of four ways."""
    line = f"{status} Said"
    if framing == "length":
        return wire.answer(body, line)
    if framing == "gzip":
        return wire.answer(gzip.compress(body, mtime=0), line, "Content-Encoding: gzip")
    head = f"HTTP/1.1 {line}\r\nContent-Type: application/json\r\n".encode()
    if framing == "close":
        return head + b"Connection: close\r\n\r\n" + body
    pieces = [body[start : start + 50] for start in range(0, len(body), 50)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


@define
class Ledger:
    """What really happened at the service."""

    received: list[Request] = Factory(list)
    processed: list[Request] = Factory(list)
    invites: Counter[tuple[str, int]] = Factory(Counter)

    def process(self, request: Request) -> None:
        self.processed.append(request)
        self.invites.update(request.invites)

    def lies(self, outcomes: Iterable[Any]) -> list[str]:
        """Return each claim of an outcome that the ledger denies; `unknown` claims nothing."""
        found = []
        for outcome in outcomes:
            made = self.invites[outcome.member_code, outcome.quota_id] > 0
            whose = invite_url(outcome.member_code, outcome.quota_id)
            if outcome.status == "invited" and not made:
                found.append(f"quota {outcome.quota_id}: invited, and no invite was made")
            if outcome.status == "invited" and outcome.invite.url != whose:
                found.append(f"quota {outcome.quota_id}: invited with the invite of somebody else")
            if outcome.status in {"rejected", "not_sent"} and made:
                found.append(f"quota {outcome.quota_id}: {outcome.status}, and an invite was made")
        return found


# --- Steps


@define(eq=False)
class Exchange:
    """One request and its response, as steps see them."""

    connection: wire.Connection
    ledger: Ledger
    lock: threading.Lock
    request: Request | None = None
    over: bool = False

    def send(self, data: bytes) -> None:
        self.connection.send(data)

    def right(self, framing: Framing = "length", **changes: Any) -> bytes:
        """Return the correct response to the request, or to a changed one."""
        assert self.request is not None, "read() must come before a response"
        status, document = right_document(evolve(self.request, **changes))
        return framed(status, json.dumps(document).encode(), framing)

    def drain(self) -> None:
        """Read until the client goes away."""
        with suppress(OSError):
            while self.connection.sock.recv(65536):
                pass
        self.over = True

    def wait_for_bytes(self) -> None:
        sock = self.connection.sock
        if not (self.connection._buffer or (isinstance(sock, ssl.SSLSocket) and sock.pending())):
            poll = select.poll()
            poll.register(sock, select.POLLIN)
            poll.poll()


Step: TypeAlias = Callable[[Exchange], None]
Fault: TypeAlias = Sequence[Step]
WORDS: dict[str, Callable[..., Step]] = {}


def _word(act: Callable[..., None]) -> Callable[..., Step]:
    def bound(*args: Any) -> Step:
        return lambda exchange: act(exchange, *args)

    bound.__doc__ = act.__doc__
    WORDS[act.__name__] = bound
    return bound


def fault_of(instructions: Iterable[Sequence[Any]]) -> Fault:
    """Return the fault that instructions spell out: `[["read"], ["cut", 40, "rst"]]`."""
    return [WORDS[name](*args) for name, *args in instructions]


@_word
def read(exchange: Exchange) -> None:
    """Read the request whole and note it as received."""
    raw = exchange.connection.read_request()
    if raw is None:
        exchange.over = True
        return
    exchange.request = Request.of(raw)
    with exchange.lock:
        exchange.ledger.received.append(exchange.request)


@_word
def process(exchange: Exchange) -> None:
    """Let the request have its effect: invites are made, and noted."""
    if exchange.request is not None and right_document(exchange.request)[0] != 403:
        with exchange.lock:
            exchange.ledger.process(exchange.request)


@_word
def answer(exchange: Exchange, framing: Framing = "length") -> None:
    """Send the correct response: framing `length`, `chunked`, `close` or `gzip`."""
    exchange.send(exchange.right(framing))
    if framing == "close":
        _close(exchange)


@_word
def reply(
    exchange: Exchange, status: int, body: str = "", content_type: str = "application/json", *headers: str
) -> None:
    """Send a given response."""
    data = body.encode()
    lines = [
        f"HTTP/1.1 {status} Said",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(data)}",
        *headers,
    ]
    exchange.send("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + data)


@_word
def send(exchange: Exchange, data: str | bytes) -> None:
    """Send bytes as they are."""
    exchange.send(data if isinstance(data, bytes) else data.encode("latin-1"))


@_word
def fin(exchange: Exchange) -> None:
    """Close the connection."""
    _close(exchange)


def _close(exchange: Exchange) -> None:
    with suppress(OSError):
        exchange.connection.sock.shutdown(socket.SHUT_RDWR)
    exchange.connection.sock.close()
    exchange.over = True


@_word
def rst(exchange: Exchange) -> None:
    """Reset the connection."""
    exchange.connection.reset()
    exchange.over = True


@_word
def half_close(exchange: Exchange) -> None:
    """Close the sending direction only, and continue to read."""
    exchange.connection.sock.shutdown(socket.SHUT_WR)
    exchange.drain()


@_word
def silence(exchange: Exchange) -> None:
    """Send nothing more until the client goes away."""
    exchange.drain()


@_word
def wait(_exchange: Exchange, seconds: float) -> None:
    """Do nothing for a while."""
    time.sleep(seconds)


@_word
def till_next(exchange: Exchange) -> None:
    """Wait for the first byte of the next request, and leave it unread."""
    exchange.wait_for_bytes()


@_word
def slices(exchange: Exchange, size: int, seconds: float, framing: Framing = "length") -> None:
    """Send the correct response in slices with a wait after each; size 1 is a drip."""
    data = exchange.right(framing)
    for start in range(0, len(data), size):
        exchange.send(data[start : start + size])
        time.sleep(seconds)


@_word
def cut(exchange: Exchange, at: int, how: Literal["fin", "rst"], framing: Framing = "length") -> None:
    """Send the correct response up to byte `at` (from its end, if negative) and close or reset."""
    exchange.send(exchange.right(framing)[:at])
    _close(exchange) if how == "fin" else exchange.connection.reset()
    exchange.over = True


@_word
def cut_gzip(exchange: Exchange, lost: int) -> None:
    """Send a gzip body without its last bytes; Content-Length is that of what is sent."""
    assert exchange.request is not None
    status, document = right_document(exchange.request)
    body = gzip.compress(json.dumps(document).encode(), mtime=0)[:-lost]
    exchange.send(wire.answer(body, f"{status} Said", "Content-Encoding: gzip"))


@_word
def broken_chunk(exchange: Exchange) -> None:
    """Send a chunked response in which the length of the second chunk is not a number."""
    head, mark, rest = exchange.right("chunked").partition(b"\r\n\r\n")
    exchange.send(head + mark + rest[:56] + b"zz\r\n" + rest[56:])
    _close(exchange)


@_word
def twin(exchange: Exchange) -> None:
    """Send the correct response and, in the same packet, the response that another member would get."""
    exchange.send(exchange.right() + exchange.right(member_code="stranger"))


@_word
def surplus(exchange: Exchange) -> None:
    """Send, without a request, the response that another member would get."""
    exchange.send(exchange.right(member_code="stranger"))


@_word
def answer_about(exchange: Exchange, shift: int) -> None:
    """Send a correct response to a request about other quota IDs."""
    assert exchange.request is not None
    exchange.send(exchange.right(quota_ids=tuple(quota_id + shift for quota_id in exchange.request.quota_ids)))


@_word
def flood(exchange: Exchange, headers: int, size: int) -> None:
    """Send the correct response with many headers of a given size."""
    line, _, rest = exchange.right().partition(b"\r\n")
    exchange.send(line + b"\r\n" + b"".join(b"X-%d: %b\r\n" % (n, b"x" * size) for n in range(headers)) + rest)


@_word
def endless(exchange: Exchange, framing: Literal["close", "chunked"] = "close") -> None:
    """Send endless JSON until the client goes away."""
    piece = b" " * 65536
    head = (
        b"HTTP/1.1 200 OK\r\n" + (b"Transfer-Encoding: chunked\r\n" if framing == "chunked" else b"") + b"\r\n"
    )
    exchange.send(head)
    while True:
        exchange.send(b"10000\r\n%b\r\n" % piece if framing == "chunked" else piece)


@_word
def interim(exchange: Exchange, status: int) -> None:
    """Send an interim response: 100, 102 or 103."""
    exchange.send(f"HTTP/1.1 {status} Interim\r\n\r\n".encode())


RIGHT: Fault = [read(), process(), answer()]
PROCESSED: Fault = [read(), process()]


def changed(change: Callable[[Any, Request], Any]) -> Fault:
    """Return a fault that processes a request correctly and changes the document of the response."""

    def send_changed(exchange: Exchange) -> None:
        assert exchange.request is not None
        status, document = right_document(exchange.request)
        body = json.dumps(change(document, exchange.request)).encode()
        exchange.send(framed(status, body))

    return [*PROCESSED, send_changed]


# --- The server


@define(eq=False)
class FaultServer:
    """A service on a socket: `with FaultServer(fault, ..., then=RIGHT) as server: ... server.url`.

    Attributes:
        faults: The faults for the next requests, one each.
        then: The fault for all later requests.
        opened: How many connections there were.
        most_open: The highest number of open connections.
        done: How many faults have been played to their end.
    """

    faults: deque[Fault] = field(converter=deque)
    then: Fault = field(factory=lambda: RIGHT)
    tls: ssl.SSLContext | None = None
    ledger: Ledger = Factory(Ledger)
    url: str = field(default="", init=False)
    opened: int = field(default=0, init=False)
    most_open: int = field(default=0, init=False)
    done: int = field(default=0, init=False)
    _open: int = field(default=0, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)
    _serving: Any = field(default=None, init=False)

    def __init__(self, *faults: Fault, then: Fault = RIGHT, tls: ssl.SSLContext | None = None) -> None:
        self.__attrs_init__(faults, then, tls)

    def __enter__(self) -> Self:
        self._serving = wire.serve(self._converse, tls=self.tls)
        self.url = self._serving.__enter__().replace("localhost", "127.0.0.1")
        return self

    def __exit__(self, *args: object) -> None:
        self._serving.__exit__(*args)

    async def has_received(self, requests: int) -> None:
        """Wait until this many requests were read."""
        await until(lambda: len(self.ledger.received) >= requests)

    async def has_done(self, faults: int) -> None:
        """Wait until this many faults were played to their end, such as the close after a response."""
        await until(lambda: self.done >= faults)

    def _converse(self, connection: wire.Connection) -> None:
        with self._lock:
            self.opened += 1
            self._open += 1
            self.most_open = max(self.most_open, self._open)
        try:
            over = False
            while not over:
                exchange = Exchange(connection, self.ledger, self._lock)
                exchange.wait_for_bytes()
                for step in self._next_fault():
                    step(exchange)
                    if exchange.over:
                        break
                over = exchange.over
                with self._lock:
                    self.done += 1
        finally:
            with self._lock:
                self._open -= 1

    def _next_fault(self) -> Fault:
        with self._lock:
            return self.faults.popleft() if self.faults else self.then


# --- Faults before there is a connection


@contextmanager
def black_hole() -> Iterator[str]:
    """Give an address whose host drops packets: its queue is full and nobody accepts."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        fillers = [socket.socket() for _ in range(8)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        try:
            yield f"http://127.0.0.1:{full.getsockname()[1]}"
        finally:
            for filler in fillers:
                filler.close()


def refused() -> str:
    """Return an address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        return f"http://127.0.0.1:{closed.getsockname()[1]}"


@contextmanager
def tls_server(fault: str, *faults: Fault, then: Fault = RIGHT) -> Iterator[tuple[FaultServer, str, str]]:
    """Run a server with a fault of TLS; gives it, its https address and the file of authorities to trust.

    Faults: `none`, `wrong_host`, `expired`, `unknown_authority`, `plain_text`.
    """
    trusted, stranger = trustme.CA(), trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["h2", "http/1.1"])
    issuer = stranger if fault == "unknown_authority" else trusted
    past = datetime.now(UTC) - timedelta(days=2)
    dates = {"not_before": past - timedelta(days=9), "not_after": past} if fault == "expired" else {}
    issuer.issue_cert("other.example" if fault == "wrong_host" else "127.0.0.1", **dates).configure_cert(
        context
    )
    with trusted.cert_pem.tempfile() as authorities:
        tls = None if fault == "plain_text" else context
        with FaultServer(*faults, then=then, tls=tls) as server:
            yield server, server.url.replace("http:", "https:"), authorities
