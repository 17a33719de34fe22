"""Valid documents with random mutations, and random arguments: only the package's own errors may be raised."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections import Counter
from contextlib import aclosing
from inspect import isawaitable
from random import Random
from typing import TYPE_CHECKING, Any, Final

import httpx
from peers.common import Options
from peers.naive import NaiveClient
from pydantic import ValidationError

from sampling_async import (
    Invite,
    InviteRequest,
    PartnerSettings,
    Quotas,
    RecontactMembers,
    RetryPolicy,
    SamplingClient,
    SamplingError,
    Timeouts,
    from_json,
    to_json,
)
from sampling_async.simulator import Simulator
from scoreboard import virtual
from scoreboard.board import Row, Run, at_least, exactly
from scoreboard.replies import NOWHERE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping

    from sampling_async import OutcomeStream

    Call = Callable[[], Coroutine[Any, Any, Any]]

NAIVE_TYPED: Final = (httpx.HTTPError, ValidationError)
"""The errors that a user of the naive client would catch."""

JUNK: Final = (
    *(None, True, False, 0, -1, 1.5, 10**30, -(2**63), 2**53 + 1, float("nan"), float("inf"), ""),
    *(" ", "1", "é\u202e\x00", "\ud800", "x" * 5_000, "2026-13-45T99:99:99Z"),
    *("99999999999999999999", [], {}, [[]], {"": None}, {"QuotaID": {"QuotaID": 1}}),
)
ARGUMENTS: Final = (
    *JUNK,
    *(".", "..", "/", "a/b?c#d", "m\r\nX: y", b"bytes", object(), (1, 2), {1, 2}, range(3)),
    *([1, "2", None], [1, 1, 1], [0], [2**63], [True], "http://", "https://[::1", "http://a b/"),
    *("https://user:pw@host/", "//host", "https://host:99999/", "javascript:alert(1)"),
    *("1f0c3a52-7d16-4b9e-9d3f-6a1c2b3d4e5f", InviteRequest("m1", [1])),
)
STATUSES: Final = (
    *(100, 200, 200, 200, 200, 204, 206, 301, 304, 400, 403, 404, 408, 418, 429, 500, 502, 503),
    599,
)
HEADERS: Final = {
    "Retry-After": (
        *("", "0", "-1", "1e9", "9" * 400, "soon", "Fri, 31 Dec 9999 23:59:59 GMT", "0x1", "\u0663", "nan"),
    ),
    "Date": ("", "yesterday", "Mon, 01 Jan 0001 00:00:00 +2359", "Thu, 32 Foo 2026 25:61:61 GMT", "\xff"),
    "Content-Type": ("", "text/html", "application/json; charset=utf-7", "application/json; charset=nonsense"),
    "Content-Encoding": ("gzip", "deflate", "br", "zstd", "identity", "gzip, gzip", "nonsense"),
    "Content-Length": ("0", "1", "99999999999999999999", "-1", "abc"),
    "Location": ("http://elsewhere.example/", "\xff", "//", "javascript:x"),
    "Set-Cookie": ("a=b", "=", "a=b; domain=.example; expires=never"),
}
RECORDS: Final = (Quotas, Invite, PartnerSettings, RecontactMembers)


def rows(run: Run) -> list[Row]:
    """Give all inputs to both clients."""
    examples = run.of(20_000, 500_000)
    documents = asyncio.run(_right_documents(run.seed))
    crashes: Counter[str] = Counter()
    answers, arguments = examples * 2 // 5, examples // 5
    records = examples - answers - arguments
    _read_records(documents, records, run.seed, crashes)
    virtual.run(_answer_badly(documents, answers, run.seed, crashes))
    virtual.run(_ask_badly(arguments, run.seed, crashes))
    naive_crashes: Counter[str] = Counter()
    virtual.run(_answer_naive_badly(documents, answers, run.seed, naive_crashes))
    note = (
        f"naive: on the answers alone, other than httpx.HTTPError and ValidationError: {_told(naive_crashes)}"
    )
    if crashes:
        note = f"ours: {_told(crashes)}; {note}"
    return [
        at_least(
            "bad inputs",
            examples,
            records + answers + arguments,
            answers,
            note=f"{records:,} to the codec, {answers:,} answers to calls, {arguments:,} arguments",
        ),
        exactly("errors that are not the client's own", 0, crashes.total(), naive_crashes.total(), note=note),
    ]


def _told(crashes: Counter[str]) -> str:
    return "; ".join(f"{name} ({times:,})" for name, times in crashes.most_common(5))


def _source(seed: int, kind: str, number: int) -> Random:
    """Return the random generator of one example, so that the example can be repeated alone."""
    return Random(f"{seed}/{kind}/{number}")


async def _right_documents(seed: int) -> dict[str, bytes]:
    """Return one valid response of each endpoint."""
    simulator = Simulator(seed, surveys=2, members=20, gzip=False)
    quota_id = simulator.inventory.surveys[0].quotas[0].quota_id
    panel = f"/IPExternalSamplingService/ExternalSample/{simulator.panel_guid}"
    headers = {"API_AUTH_KEY": simulator.api_key}
    quota_ids = [quota.quota_id for survey in simulator.inventory.surveys for quota in survey.quotas]
    async with httpx.AsyncClient(
        transport=simulator.transport(), base_url=simulator.base_url, headers=headers
    ) as client:
        quotas = await client.get(f"{panel}/Quotas")
        # Of the first member that is invited to anything.
        for member in simulator.members:
            bulk = await client.post(f"{panel}/{member}/Invites", json={"QuotaIDs": quota_ids})
            if invites := [item["Invite"] for item in bulk.json()["Invites"] if item["Invite"]]:
                break
        settings = await client.get("/IntegratedPanelService/api/Settings?partnerGUID=" + simulator.panel_guid)
        refused = await client.get(f"{panel}/{member}/Invite/{quota_id}")
    codes = {"MaxResults": 3, "HasAdditionalMembers": True, "MemberCodes": ["m1", "m2", "m3"]}
    return {
        "quotas": quotas.content,
        "bulk": bulk.content,
        "settings": settings.content,
        "invite": json.dumps(invites[0]).encode(),
        "recontact": json.dumps(codes).encode(),
        "refusal": refused.content,
    }


# --- Mutations


def mutated(body: bytes, random: Random) -> bytes:
    """Return a document with an error in its values or in its bytes."""
    if random.random() < 0.6:
        document = json.loads(body)
        for _ in range(random.choice((1, 1, 1, 2, 5))):
            document = _with_junk(document, random)
        text = json.dumps(document, ensure_ascii=random.random() < 0.5)
        encoding = random.choice(("utf-8", "utf-8", "utf-8", "utf-16", "utf-8-sig", "latin-1"))
        return text.encode(encoding, "replace" if encoding == "latin-1" else "surrogatepass")
    match random.randrange(7):
        case 0:
            return body[: random.randrange(len(body))]
        case 1:
            return random.randbytes(random.randrange(200))
        case 2:
            at = random.randrange(len(body))
            return body[:at] + random.randbytes(random.randint(1, 4)) + body[at + random.randrange(3) :]
        case 3:
            return random.choice((b"[", b'{"a":', b'[{"Invites":')) * random.choice((10, 2_000, 20_000))
        case 4:
            return body + body
        case 5:
            return body.replace(b"1", b"9" * random.choice((20, 400, 5_000)), 3)
        case _:
            return random.choice(
                (b"", b"null", b"NaN", b'"', b"\xef\xbb\xbf", b"<html>", b"-", b"1e999", b"[]")
            )


def _with_junk(document: Any, random: Random) -> Any:
    """Return a document in which one value is replaced, removed, doubled or renamed."""
    if isinstance(document, dict) and document and random.random() < 0.9:
        key = random.choice(sorted(document))
        changed = dict(document)
        match random.randrange(6):
            case 0:
                del changed[key]
            case 1:
                changed[key.swapcase()] = changed.pop(key)
            case 2:
                changed[key] = random.choice(JUNK)
            case _:
                changed[key] = _with_junk(changed[key], random)
        return changed
    if isinstance(document, list) and document and random.random() < 0.9:
        at = random.randrange(len(document))
        match random.randrange(4):
            case 0:
                return document[:at] + document[at + 1 :]
            case 1:
                return [*document, document[at]]
            case _:
                return [*document[:at], _with_junk(document[at], random), *document[at + 1 :]]
    return random.choice(JUNK)


class Garbling(httpx.AsyncBaseTransport):
    """A transport that returns the next prepared response."""

    def __init__(self) -> None:
        self.status = 200
        self.body = b""
        self.headers: list[tuple[bytes, bytes]] = []

    def prepare(self, documents: Mapping[str, bytes], name: str, random: Random) -> None:
        """Make the next response: mostly of the right kind, sometimes of another."""
        source = name if random.random() < 0.85 else random.choice(sorted(documents))
        self.body = mutated(documents[source], random) if random.random() < 0.95 else documents[source]
        self.status = random.choice(STATUSES) if random.random() < 0.3 else 200
        struck = [each for each in HEADERS if random.random() < 0.08]
        self.headers = [
            (each.encode(), random.choice(HEADERS[each]).encode("utf-8", "replace")) for each in struck
        ]
        if "Content-Encoding" in struck and random.random() < 0.5:
            self.body = gzip.compress(self.body, 1)[: random.randint(5, 10_000)]

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer."""
        body = httpx.ByteStream(self.body)
        return httpx.Response(self.status, headers=self.headers, stream=body, request=request)


# --- The inputs


def _read_records(documents: Mapping[str, bytes], examples: int, seed: int, crashes: Counter[str]) -> None:
    names = sorted(documents)
    for number in range(examples):
        random = _source(seed, "record", number)
        body = mutated(documents[names[number % len(names)]], random)
        record = (
            RECORDS[number % len(RECORDS)] if random.random() < 0.3 else RECORD_OF[names[number % len(names)]]
        )
        try:
            to_json(from_json(record, body))
        except SamplingError:
            pass
        except Exception as exc:  # noqa: BLE001  this is what is looked for
            _note(crashes, exc, f"record {number}")


RECORD_OF: Final[Mapping[str, Any]] = {
    "quotas": Quotas,
    "bulk": Invite,
    "settings": PartnerSettings,
    "invite": Invite,
    "recontact": RecontactMembers,
    "refusal": Invite,
}


async def _answer_badly(
    documents: Mapping[str, bytes], examples: int, seed: int, crashes: Counter[str]
) -> None:
    service = Garbling()
    async with _client(service) as client:
        calls = _calls(client)
        for number in range(examples):
            random = _source(seed, "answer", number)
            name = random.choice(sorted(calls))
            service.prepare(documents, name, random)
            await _tried(calls[name], (SamplingError,), f"answer {number} to {name}", crashes)


async def _answer_naive_badly(
    documents: Mapping[str, bytes], examples: int, seed: int, crashes: Counter[str]
) -> None:
    service = Garbling()
    async with NaiveClient(NOWHERE, Options(backoff=0.0, transport=service)) as client:
        calls: dict[str, Call] = {
            "quotas": client.quotas,
            "bulk": lambda: client.bulk_invite("m1", [1, 2, 3]),
            "settings": client.settings,
            "invite": lambda: client.invite("m1", 1),
            "recontact": lambda: _first(client.recontact(1)),
        }
        for number in range(examples):
            random = _source(seed, "answer", number)
            name = random.choice(sorted(calls))
            service.prepare(documents, name, random)
            await _tried(calls[name], NAIVE_TYPED, name, crashes)


async def _ask_badly(examples: int, seed: int, crashes: Counter[str]) -> None:
    service = Garbling()
    service.body = b'{"Invites":[]}'
    async with _client(service) as client:
        for number in range(examples):
            random = _source(seed, "argument", number)
            await _tried(_bad_call(client, random), (SamplingError,), f"argument {number}", crashes)


def _bad_call(client: SamplingClient, random: Random) -> Call:
    """Return a call with mostly invalid arguments."""
    first, second, third = (_argument(random) for _ in range(3))

    async def outcomes_of(stream: OutcomeStream) -> int:
        async with stream as outcomes:
            return len([outcome async for outcome in outcomes])

    def given(**arguments: Any) -> SamplingClient:
        right = {"panel_guid": NOWHERE.panel_guid, "api_key": NOWHERE.api_key}
        return SamplingClient(**{"base_url": NOWHERE.url, **right, **arguments})

    async def make() -> object:
        # Called in here, so that an error before the coroutine exists is caught too.
        made = random.choice(
            (
                lambda: client.bulk_invite(first, second),
                lambda: client.bulk_invite("m1", [1, 2], chunk_size=third),
                lambda: client.generate_invite(first, second),
                lambda: _first(client.recontact_members(first, max_results=second, after=third)),
                lambda: outcomes_of(client.fan_out(first)),
                lambda: outcomes_of(client.fan_out([InviteRequest(first, second)])),
                lambda: outcomes_of(client.stream_bulk_invite(first, second)),
                lambda: given(base_url=first),
                lambda: given(panel_guid=first, api_key=second),
                lambda: given(max_concurrency=third),
            )
        )()
        return await made if isawaitable(made) else made

    return make


def _argument(random: Random) -> Any:
    if random.random() < 0.2:
        return "".join(chr(random.randrange(0x3000)) for _ in range(random.randrange(12)))
    if random.random() < 0.2:
        return "https://" + "".join(random.choice("ab.:/@[]%?#\\ \t1-") for _ in range(random.randrange(20)))
    return random.choice(ARGUMENTS)


def _client(service: httpx.AsyncBaseTransport) -> SamplingClient:
    return SamplingClient(
        NOWHERE.url,
        panel_guid=NOWHERE.panel_guid,
        api_key=NOWHERE.api_key,
        transport=service,
        retry=RetryPolicy(max_attempts=1),
        timeouts=Timeouts(),
    )


def _calls(client: SamplingClient) -> dict[str, Call]:
    return {
        "quotas": client.get_quotas,
        "bulk": lambda: client.bulk_invite("m1", [1, 2, 3]),
        "settings": client.get_settings,
        "invite": lambda: client.generate_invite("m1", 1),
        "recontact": lambda: _first(client.recontact_members(1)),
    }


async def _first(codes: AsyncGenerator[str, None]) -> str | None:
    async with aclosing(codes):
        return await anext(codes, None)


async def _tried(call: Call, typed: tuple[type[Exception], ...], what: str, crashes: Counter[str]) -> None:
    try:
        repr(await call())
    except typed:
        pass
    except Exception as exc:  # noqa: BLE001  this is what is looked for
        _note(crashes, exc, what)


def _note(crashes: Counter[str], exc: Exception, what: str) -> None:
    """Count a crash by its kind. The first example of each kind is noted."""
    kind = type(exc).__name__
    known = next((each for each in crashes if each.startswith(kind)), None)
    crashes[known or f"{kind} at {what}"] += 1
