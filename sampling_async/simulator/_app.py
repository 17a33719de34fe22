"""The ASGI application: reads requests, lets faults strike and time pass, sends answers."""

from __future__ import annotations

import json
import zlib
from functools import cache
from importlib.resources import files
from random import Random
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import attrs
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.routing import Route

from sampling_async.simulator._alterations import altered
from sampling_async.simulator._answers import JSON, Answer, encoded
from sampling_async.simulator._service import Call
from sampling_async.simulator._transport import connection_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

    from sampling_async._errors import Endpoint
    from sampling_async.simulator._faults import Fault, FaultKind, FaultPlan
    from sampling_async.simulator._latency import WorkQueue
    from sampling_async.simulator._ledger import Ledger
    from sampling_async.simulator._service import Service
    from sampling_async.simulator._transport import Connection, Sleep

_PANEL_PATH: Final = "/IPExternalSamplingService/ExternalSample/{panel_guid}"
_GZIP_FROM: Final = 1024
_INT64: Final = 2**63
_INSTEAD: Final[tuple[FaultKind, ...]] = ("status", "body", "cut")
"""The kinds of faults that take the answer's place."""


class RawPath:
    """Routes by the path as it was sent, so that an encoded slash does not split a segment."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Put the raw path in the place of the decoded one."""
        if scope["type"] == "http" and scope.get("raw_path"):
            scope["path"] = scope["raw_path"].decode("latin-1")
        await self._app(scope, receive, send)


class ServiceApp:
    """The five endpoints over HTTP; every request to them goes the way of `_exchange`.

    Beside them stands `/openapi.json`, which describes them and is no part of the service: it needs no key, and
    neither the ledger nor the faults know of it.
    """

    def __init__(
        self,
        service: Service,
        *,
        ledger: Ledger,
        faults: FaultPlan,
        queue: WorkQueue,
        sleep: Sleep,
        gzip: bool,
        seed: int | str,
    ) -> None:
        self._service = service
        self._ledger = ledger
        self._faults = faults
        self._queue = queue
        self._sleep = sleep
        self._gzip = gzip
        self._random = Random(f"{seed}/alterations")  # noqa: S311  no secret
        self._zipped: tuple[bytes, bytes] = (b"", b"")

    def starlette(self) -> Starlette:
        """Return the application with its routes."""
        routes = [
            Route(f"{_PANEL_PATH}/Quotas", self._get_quotas, methods=["GET"]),
            Route(f"{_PANEL_PATH}/{{member_code}}/Invites", self._bulk_invite, methods=["POST"]),
            Route(f"{_PANEL_PATH}/{{member_code}}/Invite/{{quota_id}}", self._generate_invite, methods=["GET"]),
            Route("/IntegratedPanelService/api/Settings", self._get_settings, methods=["GET"]),
            Route(
                f"{_PANEL_PATH}/Recontact/{{quota_id}}/MemberCodes", self._recontact_members, methods=["GET"]
            ),
            Route("/openapi.json", _describe, methods=["GET"]),
        ]
        return Starlette(routes=routes, middleware=[Middleware(RawPath)])

    async def _get_quotas(self, request: Request) -> Response:
        return await self._exchange(request, _call(request, "get_quotas"))

    async def _bulk_invite(self, request: Request) -> Response:
        quota_ids = _quota_ids(await request.body())
        return await self._exchange(request, _call(request, "bulk_invite", quota_ids=quota_ids))

    async def _generate_invite(self, request: Request) -> Response:
        return await self._exchange(request, _call(request, "generate_invite", quota_ids=_path_id(request)))

    async def _get_settings(self, request: Request) -> Response:
        return await self._exchange(request, _call(request, "get_settings"))

    async def _recontact_members(self, request: Request) -> Response:
        return await self._exchange(request, _call(request, "recontact_members", quota_ids=_path_id(request)))

    async def _exchange(self, request: Request, call: Call) -> Response:
        """Answer a call as faults and latency have it.

        The service acts when the call arrives, apart from delays that come before; the time its work takes
        passes afterwards, so that a client that gives up early finds the work done, as at a real service.
        """
        connection = connection_of(request.scope)
        call = attrs.evolve(call, request_number=self._ledger.open_request())
        faults = self._faults.draw(call.endpoint)
        done_in = self._queue.admit(_cost_ids(call))
        early, late = (_delay(faults, when) for when in ("before", "after"))
        if early:
            try:
                await connection.pause(early, self._sleep)
            except BaseException:  # in process, a client that gives up; over a socket nobody would notice
                self._act(call, faults)
                raise
        answer = self._act(call, faults)
        if done_in + late > 0:
            await connection.pause(done_in + late, self._sleep)
        return self._reply(answer, faults, request, connection)

    def _act(self, call: Call, faults: Sequence[Fault]) -> Answer:
        """Do what the call asks, unless a fault comes before; return what is to be sent."""
        instead = _first(faults, *_INSTEAD)
        is_processed = instead is None or instead.when != "before"
        answer = Answer(b"")
        if is_processed:
            answer = self._processed(call, faults)
        if instead is not None and instead.kind != "cut":
            answer = _replaced(answer, instead)
        is_silent = instead is not None and instead.kind == "cut" and instead.when != "middle"
        self._ledger.record_request(
            call.request_number,
            call.endpoint,
            member_code=call.member_code,
            quota_ids=call.quota_ids or (),
            status=None if is_silent else answer.status,
            is_processed=is_processed,
        )
        return answer

    def _processed(self, call: Call, faults: Sequence[Fault]) -> Answer:
        if any(fault.kind == "stuck_cursor" for fault in faults):
            first = {name: value for name, value in call.query.items() if name != "lastMemberCodeReceived"}
            call = attrs.evolve(call, query=first)
        answer = self._service.answer(call)
        for fault in faults:
            answer = altered(answer, fault, self._random)
        return answer

    def _reply(
        self, answer: Answer, faults: Sequence[Fault], request: Request, connection: Connection
    ) -> Response:
        content = encoded(answer.body)
        headers = {"Content-Type": answer.content_type, **answer.headers}
        if self._gzip and len(content) > _GZIP_FROM and "gzip" in request.headers.get("accept-encoding", ""):
            content = self._compressed(content)
            headers["Content-Encoding"] = "gzip"
        if not faults:
            return Response(content, answer.status, headers)
        instead = _first(faults, *_INSTEAD)
        cut = instead if instead and instead.kind == "cut" else None
        reply = FaultyReply(content, answer.status, headers)
        return reply.struck(cut, _first(faults, "drip"), connection=connection, sleep=self._sleep)

    def _compressed(self, content: bytes) -> bytes:
        """Compress a body; that of Get Quotas, which stays the same object, only once."""
        if self._zipped[0] is not content:
            compressor = zlib.compressobj(1, wbits=31)  # 31: the gzip format
            self._zipped = (content, compressor.compress(content) + compressor.flush())
        return self._zipped[1]


class FaultyReply(Response):
    """An answer that may come in slices, or break off."""

    _cut: Fault | None
    _drip: Fault | None
    _connection: Connection
    _sleep: Sleep

    def struck(
        self, cut: Fault | None, drip: Fault | None, *, connection: Connection, sleep: Sleep
    ) -> FaultyReply:
        """Set what goes wrong with the sending."""
        self._cut, self._drip = cut, drip
        self._connection, self._sleep = connection, sleep
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, or what the faults leave of it."""
        cut = self._cut
        if cut is None and self._drip is None:
            await super().__call__(scope, receive, send)
        elif cut is not None and (cut.when != "middle" or not self.body):
            await self._connection.cut(reset=bool(cut.variant))
        else:
            await self._send_slices(cut, send)

    async def _send_slices(self, cut: Fault | None, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        content = self.body[: len(self.body) // 2] if cut else self.body
        size = max(1, -(-len(content) // (self._drip.slices if self._drip else 1)))
        for start in range(0, len(content), size):
            if start and self._drip:
                await self._connection.pause(self._drip.seconds, self._sleep)
            part = content[start : start + size]
            await send({"type": "http.response.body", "body": part, "more_body": True})
        if cut:
            await self._connection.cut(reset=bool(cut.variant))
        else:
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _describe(_request: Request) -> Response:
    return Response(_openapi(), media_type=JSON)


@cache
def _openapi() -> bytes:
    """Return the OpenAPI document of the five endpoints; most simulators are never asked for it."""
    return files("sampling_async.simulator").joinpath("openapi.json").read_bytes()


def _call(request: Request, endpoint: Endpoint, *, quota_ids: tuple[int, ...] | None = ()) -> Call:
    segments: dict[str, str] = request.path_params
    member_code = segments.get("member_code")
    panel_guid = segments.get("panel_guid", request.query_params.get("partnerGUID"))
    return Call(
        endpoint=endpoint,
        panel_guid=None if panel_guid is None else unquote(panel_guid),
        api_key=request.headers.get("api_auth_key"),
        member_code=None if member_code is None else unquote(member_code),
        quota_ids=quota_ids,
        query=dict(request.query_params) if request.scope["query_string"] else {},
    )


def _path_id(request: Request) -> tuple[int, ...] | None:
    text = unquote(request.path_params["quota_id"])
    if not (text.isascii() and text.isdecimal() and len(text) < 19):  # noqa: PLR2004  digits of 64 bits
        return None
    return (int(text),)


def _quota_ids(body: bytes) -> tuple[int, ...] | None:
    """Return the quota IDs of a bulk invite's body; None if it is not what the contract says."""
    try:
        fields: Any = json.loads(body)
        quota_ids = tuple(fields["QuotaIDs"])
    except (ValueError, TypeError, KeyError):
        return None
    if not all(type(each) is int and -_INT64 <= each < _INT64 for each in quota_ids):
        return None
    return quota_ids


def _first(faults: Sequence[Fault], *kinds: FaultKind) -> Fault | None:
    return next((fault for fault in faults if fault.kind in kinds), None)


def _cost_ids(call: Call) -> int:
    return len(call.quota_ids or ()) if call.endpoint == "bulk_invite" else 1


def _delay(faults: Sequence[Fault], when: str) -> float:
    return sum(fault.seconds for fault in faults if fault.kind == "delay" and fault.when == when)


def _replaced(answer: Answer, fault: Fault) -> Answer:
    headers = {} if fault.retry_after is None else {"Retry-After": str(fault.retry_after)}
    return attrs.evolve(
        answer,
        body=fault.content,
        status=fault.answer_status,
        content_type=fault.content_type,
        headers=headers,
    )
