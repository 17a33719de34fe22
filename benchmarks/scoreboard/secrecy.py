"""Search for the key and a member code, both unique texts, in everything that failing calls leave behind."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import pickle
import re
import socket
import subprocess
import sys
import traceback
from collections import Counter
from contextlib import aclosing, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import httpx
from peers import naive as naive_module
from peers.common import Address, Options, Peer
from peers.naive import NaiveClient
from peers.ours import OurClient

import sampling_async
from sampling_async import InviteRequest, SamplingClient
from sampling_async.simulator import Fault, Simulator
from scoreboard.board import Row, Run, at_least, exactly, missing, published
from scoreboard.replies import NOWHERE
from scoreboard.service import FIRST_QUOTA, open_inventory

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine

    Call = Callable[[], Coroutine[Any, Any, Any]]

KEY: Final = "c0ffee00-5ec2-4e7c-a11a-0ddba11deca1"
MEMBER: Final = "canary member/zykovqx"
"""No hexadecimal digits at its end: four of them also stand in some addresses of objects."""
CANARY: Final = Path(__file__).parents[2] / "tests" / "telemetry" / "agent_canary.py"
AGENTS: Final = ("sentry", "opentelemetry", "newrelic", "ddtrace")
CHANNELS: Final = ("log", "printed", "str", "repr", "attributes", "traceback", "pickle")
"""The places where neither may occur. `attributes` and `pickle` are those of errors."""


@dataclass
class Findings:
    """The findings, by channel.

    Attributes:
        texts: The number of texts searched.
        key: Hits of the key.
        member: Hits of the member code.
        elsewhere: Requests to another origin that carried the key.
        failures: The number of failed calls. All calls should fail.
    """

    texts: int = 0
    key: Counter[str] = field(default_factory=Counter)
    member: Counter[str] = field(default_factory=Counter)
    elsewhere: int = 0
    failures: int = 0

    def search(self, channel: str, text: str) -> None:
        """Search a text for both, in all encodings that may occur."""
        self.texts += 1
        self.key[channel] += _key_forms.search(text) is not None
        self.member[channel] += _member_forms.search(text) is not None

    def told(self) -> str:
        """Return the channels with findings."""
        found = [f"{name} in {channel}: {hits}" for name, channel, hits in self._hits() if hits]
        return ", ".join(found) or "nothing"

    def _hits(self) -> list[tuple[str, str, int]]:
        named = (("key", self.key), ("member", self.member))
        return [(name, channel, hits[channel]) for name, hits in named for channel in sorted(hits)]


_key_forms: Final = re.compile(f"{KEY}|{KEY.replace('-', '')}|{KEY[:13]}", re.IGNORECASE)
_member_forms: Final = re.compile(
    "|".join(re.escape(form) for form in (MEMBER, quote(MEMBER, safe=""), quote(MEMBER), "zykovqx")),
    re.IGNORECASE,
)


class Echoing(httpx.AsyncBaseTransport):
    """A service that repeats in every response the request's key and URL, which has the member code."""

    def __init__(self, status: int, *, content_type: str = "application/json") -> None:
        self._status = status
        self._content_type = content_type

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer with the request's key and URL."""
        member = MEMBER if _member_forms.search(str(request.url)) else "nobody"
        shown = f"key {request.headers.get('API_AUTH_KEY')} for {member} at {request.url}"
        body = json.dumps(
            {"Result": shown, "ResultCode": 9, "Message": shown, "Invites": shown, "QuotaID": shown}
        )
        if self._content_type != "application/json":
            body = f"<html><body>{shown}</body></html>"
        headers = {"Content-Type": self._content_type, "X-Echo": shown.encode("ascii", "replace").decode()}
        if 300 <= self._status < 400:
            headers["Location"] = f"http://elsewhere.example/?{quote(member)}"
        return httpx.Response(self._status, headers=headers, content=body.encode())


class Raising(httpx.AsyncBaseTransport):
    """A transport whose errors quote the whole request."""

    def __init__(self, error: type[Exception]) -> None:
        self._error = error

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Raise."""
        raise self._error(f"{request.url} with {request.headers.get('API_AUTH_KEY')}")


def rows(run: Run) -> list[Row]:
    """Make failing calls with both clients, and search what they leave behind."""
    us = _search(OurClient, Path(sampling_async.__file__).parent, run.seed)
    them = _search(NaiveClient, Path(naive_module.__file__), run.seed)
    channels = ", ".join(CHANNELS)
    note = f"{us.texts:,} texts of {us.failures} failed calls: {channels}, locals; found, ours: {us.told()}"
    return [
        exactly("hits of the key", 0, us.key.total(), them.key.total(), note=f"{note}; naive: {them.told()}"),
        exactly(
            "hits of a member code",
            0,
            sum(us.member[channel] for channel in CHANNELS),
            sum(them.member[channel] for channel in CHANNELS),
            note=channels,
        ),
        exactly("requests that sent the key to another origin", 0, us.elsewhere, them.elsewhere),
        published(
            "member code in locals of the client's own frames",
            us.member["locals"],
            them.member["locals"],
            note="an argument of the caller; plain tracebacks do not show locals",
        ),
        *(row for agent in AGENTS for row in _watched(agent)),
        _own_telemetry(),
    ]


def _own_telemetry() -> Row:
    """Let our client make spans and metrics, and search them."""
    name = "hits in what telemetry=True makes for OpenTelemetry"
    try:
        us = _transmitted("opentelemetry", "telemetry")
    except subprocess.CalledProcessError as exc:
        return missing(name, "0", f"the canary ended with {exc.returncode}: {exc.stderr.strip()[-200:]}")
    note = f"key, member code, panel, URL; {us['texts']} texts, templates of addresses left out"
    return exactly(name, 0, sum(us["hits"].values()), note=note)


def _watched(agent: str) -> list[Row]:
    """Run our client, and a plain httpx client, under an agent of application monitoring."""
    name, found = f"hits in what {agent} would transmit", "key, member code, panel, URL"
    try:
        us = [_transmitted(agent, caller) for caller in ("engine", "transport", "loaded first")]
        them = _transmitted(agent, "plain")
    except subprocess.CalledProcessError as exc:
        return [missing(name, "0", f"the canary ended with {exc.returncode}: {exc.stderr.strip()[-200:]}")]
    texts = sum(each["texts"] for each in us)
    note = f"{found}; {texts} texts; over our engine, over httpx's, and loaded before the agent"
    hits = sum(sum(each["hits"].values()) for each in us)
    plainly = sum(them["hits"].values())
    return [
        exactly(name, 0, hits, plainly, note=note),
        at_least(f"the same of a plain httpx.AsyncClient: {agent} can hit", 1, plainly, note=found),
    ]


def _transmitted(agent: str, caller: str) -> dict[str, Any]:
    command = [sys.executable, str(CANARY), agent, caller]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _search(peer: type[Peer], package: Path, seed: int) -> Findings:
    findings, log = Findings(), io.StringIO()
    handler = logging.StreamHandler(log)
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    printed = io.StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            asyncio.run(_fail_in_all_ways(peer, package, findings, seed))
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    for line in log.getvalue().splitlines():
        findings.search("log", line)
    findings.search("printed", printed.getvalue())
    return findings


async def _fail_in_all_ways(peer: type[Peer], package: Path, findings: Findings, seed: int) -> None:
    statuses = (200, 301, 400, 403, 404, 429, 500, 503)
    transports: list[httpx.AsyncBaseTransport] = [
        *(Echoing(status) for status in statuses),
        *(Echoing(status, content_type="text/html") for status in statuses),
        *(
            Raising(error)
            for error in (httpx.ConnectError, httpx.ReadError, httpx.ReadTimeout, OSError, KeyError)
        ),
    ]
    address = Address(NOWHERE.url, NOWHERE.panel_guid, KEY)
    for transport in transports:
        await _calls(peer, address, Options(backoff=0.0, transport=transport), package, findings)
    await _calls(peer, Address(_refusing(), NOWHERE.panel_guid, KEY), Options(backoff=0.0), package, findings)
    await _over_sockets(peer, package, findings, seed)
    await _elsewhere(peer, findings)
    if peer is OurClient:
        _bad_arguments(package, findings)


def _refusing() -> str:
    """Return an address on which no server listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{sock.getsockname()[1]}"


async def _over_sockets(peer: type[Peer], package: Path, findings: Findings, seed: int) -> None:
    """Fail against a real server: one that refuses the key, and one that breaks off its responses."""
    faults = [
        Fault.cut(when="before"),
        Fault.cut(when="middle"),
        Fault.cut(when="after", reset=True),
        Fault.body(f'{{"Result":"{KEY}"'.encode()),
        Fault.delay(0.4),
    ]
    simulator = Simulator(seed, inventory=open_inventory(3, recontacts=1), members=1)
    with simulator.serve() as url:
        for fault in faults:
            simulator.faults.clear()
            simulator.faults.add(fault)
            address = Address(url, simulator.panel_guid, KEY)
            await _calls(peer, address, Options(read=0.1, patience=0.2, backoff=0.0), package, findings)
        simulator.faults.clear()
        await _calls(peer, Address(url, simulator.panel_guid, KEY), Options(backoff=0.0), package, findings)


async def _elsewhere(peer: type[Peer], findings: Findings) -> None:
    """Count the requests that follow a redirect to another origin with the key."""
    seen: list[httpx.Request] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(307, headers={"Location": "http://elsewhere.example/"})

    options = Options(backoff=0.0, transport=httpx.MockTransport(answer))
    async with peer(Address(NOWHERE.url, NOWHERE.panel_guid, KEY), options) as client:
        for call in (client.settings, client.quotas, lambda: client.invite(MEMBER, 1)):
            try:
                await call()
            except Exception:  # noqa: BLE001  only where the requests went counts here
                continue
    findings.elsewhere += sum(
        request.url.host != "localhost" and "API_AUTH_KEY" in request.headers for request in seen
    )


async def _calls(
    peer: type[Peer], address: Address, options: Options, package: Path, findings: Findings
) -> None:
    """Make every kind of call and search what comes out. All calls should fail."""
    async with peer(address, options) as client:
        calls: list[Call] = [
            client.settings,
            client.quotas,
            lambda: client.invite(MEMBER, FIRST_QUOTA),
            lambda: _first(client.recontact(FIRST_QUOTA, after=MEMBER)),
            lambda: asyncio.wait_for(client.invite(MEMBER, FIRST_QUOTA), 0.02),
        ]
        for call in calls:
            await _failed(call, package, findings)
        if isinstance(client, OurClient):
            await _our_outcomes(client.client, package, findings)
        else:
            await client.invite_all([(MEMBER, [FIRST_QUOTA, FIRST_QUOTA + 1])])
        findings.search("repr", repr(client) + repr(vars(client)) if peer is NaiveClient else repr(client))
    if isinstance(client, OurClient):
        await _failed(client.settings, package, findings)  # the client is closed here


async def _our_outcomes(client: SamplingClient, package: Path, findings: Findings) -> None:
    findings.search("repr", repr(client))
    findings.search("repr", repr(InviteRequest(MEMBER, [1])))
    result = await client.bulk_invite(MEMBER, [FIRST_QUOTA, FIRST_QUOTA + 1])
    findings.search("repr", repr(result) + repr(list(result)))
    for outcome in result:
        if outcome.error is not None:
            _search_error(outcome.error, package, findings)
    try:
        result.raise_for_incomplete()
    except sampling_async.SamplingError as exc:
        findings.search("str", str(exc))
        findings.search("repr", repr(exc))


def _bad_arguments(package: Path, findings: Findings) -> None:
    """Give the key and the member code as wrong arguments."""
    attempts: list[Callable[[], object]] = [
        lambda: SamplingClient(NOWHERE.url, panel_guid=NOWHERE.panel_guid, api_key=KEY + "0"),
        lambda: SamplingClient(NOWHERE.url, panel_guid="x", api_key=KEY),
        lambda: SamplingClient("http://u:p@localhost", panel_guid=NOWHERE.panel_guid, api_key=KEY),
        lambda: SamplingClient("http://far.example", panel_guid=NOWHERE.panel_guid, api_key=KEY),
        lambda: SamplingClient(NOWHERE.url, panel_guid=NOWHERE.panel_guid, api_key=KEY, max_concurrency=0),
        lambda: InviteRequest(MEMBER + "\n", [1]),
        lambda: InviteRequest(MEMBER, ["x"]),  # type: ignore[list-item]
    ]
    for attempt in attempts:
        try:
            attempt()
        except Exception as exc:  # noqa: BLE001  every error is searched
            _search_error(exc, package, findings)


async def _failed(call: Call, package: Path, findings: Findings) -> None:
    try:
        answer = await call()
    except Exception as exc:  # noqa: BLE001  every error is searched
        findings.failures += 1
        _search_error(exc, package, findings)
    else:
        findings.search("repr", repr(answer))


def _search_error(exc: BaseException, package: Path, findings: Findings) -> None:
    findings.search("str", str(exc))
    findings.search("repr", repr(exc))
    findings.search("attributes", repr(vars(exc)))
    findings.search("traceback", "".join(traceback.format_exception(exc)))
    findings.search("locals", _locals(exc, package))
    try:
        pickled = pickle.dumps(exc)
    except Exception:  # noqa: BLE001  what cannot be pickled shows nothing
        return
    findings.search("pickle", pickled.decode("latin-1"))


def _locals(exc: BaseException | None, package: Path) -> str:
    """Return the local variables in the client's frames of an error and its causes, as in error reports."""
    texts: list[str] = []
    while exc is not None:
        for frame, _ in traceback.walk_tb(exc.__traceback__):
            if Path(frame.f_code.co_filename).is_relative_to(package):
                texts += [_safe_repr(value) for value in frame.f_locals.values()]
        exc = exc.__cause__ or exc.__context__
    return "\n".join(texts)


def _safe_repr(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # noqa: BLE001  a repr that fails shows nothing
        return ""


async def _first(codes: AsyncGenerator[str, None]) -> str | None:
    async with aclosing(codes):
        return await anext(codes, None)
