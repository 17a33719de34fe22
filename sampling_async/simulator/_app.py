"""The ASGI application: it reads requests, applies faults, lets time pass and sends responses."""

from __future__ import annotations

import json
import zlib
from functools import cache, partial
from importlib.resources import files
from random import Random
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import attrs
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.routing import Route

from sampling_async.simulator._answers import JSON, ServiceResponse, encoded
from sampling_async.simulator._faults import altered
from sampling_async.simulator._service import ServiceCall
from sampling_async.simulator._transport import connection_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

    from sampling_async import Endpoint
    from sampling_async.simulator._clock import WorkQueue
    from sampling_async.simulator._faults import Fault, FaultKind, FaultPlan
    from sampling_async.simulator._ledger import Ledger
    from sampling_async.simulator._service import Service
    from sampling_async.simulator._transport import ClientConnection, Sleep

_PANEL_PATH: Final = "/IPExternalSamplingService/ExternalSample/{panel_guid}"
_GZIP_FROM: Final = 1024
_INT64: Final = 2**63
_INSTEAD: Final[tuple[FaultKind, ...]] = ("status", "body", "cut")
"""The kinds of faults that replace the response."""


class RawPath:
    """Middleware that routes by the raw path, so that an encoded slash does not split a segment."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Replace the decoded path by the raw one."""
        if scope["type"] == "http" and scope.get("raw_path"):
            scope["path"] = scope["raw_path"].decode("latin-1")
        await self._app(scope, receive, send)


class ServiceApp:
    """The five endpoints over HTTP. Every request to them passes through `_exchange`.

    The application also serves `/openapi.json`, which describes the endpoints. It is not part of the service:
    it needs no key, and its requests reach neither the ledger nor the faults.
    """

    def __init__(
        self,
        service: Service,
        *,
        ledger: Ledger,
        faults: FaultPlan,
        queue: WorkQueue,
        sleep: Sleep,
        clock: Callable[[], float],
        gzip: bool,
        seed: int | str,
    ) -> None:
        self._service = service
        self._ledger = ledger
        self._faults = faults
        self._queue = queue
        self._sleep = sleep
        self._clock = clock
        self._began = clock()
        self._gzip = gzip
        self._random = Random(f"{seed}/alterations")  # noqa: S311  no secret
        self._zipped: tuple[bytes, bytes] = (b"", b"")

    def starlette(self) -> Starlette:
        """Return the application with its routes."""
        routes = [
            _route("GET", f"{_PANEL_PATH}/Quotas", self._get_quotas),
            _route("POST", f"{_PANEL_PATH}/{{member_code}}/Invites", self._bulk_invite),
            _route("GET", f"{_PANEL_PATH}/{{member_code}}/Invite/{{quota_id}}", self._generate_invite),
            _route("GET", "/IntegratedPanelService/api/Settings", self._get_settings),
            _route("GET", f"{_PANEL_PATH}/Recontact/{{quota_id}}/MemberCodes", self._recontact_members),
            _route("GET", "/openapi.json", _describe),
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

    async def _exchange(self, request: Request, call: ServiceCall) -> Response:
        """Respond to a call, with the faults and the latency that apply to it.

        The service acts when the call arrives, or after the delays that come before acting. The time that its
        work takes passes afterwards. So a client that gives up early finds the work done, as at a real service.
        """
        connection = connection_of(request.scope)
        time = self._clock() - self._began
        call = attrs.evolve(call, request_number=self._ledger.open_request())
        faults = self._faults.draw(call.endpoint, member_code=call.member_code, quota_ids=call.quota_ids or ())
        record = partial(self._record, call, time, request)
        # Before the first await below, so that calls enter the queue in the order of their arrival.
        done_in = self._queue.admit(_cost_ids(call))
        early, late = (_delay(faults, when) for when in ("before", "after"))
        if early:
            try:
                await connection.pause(early, self._sleep)
            except BaseException:
                # In process, a client that gives up cancels the pause. The service still acts, as it would
                # over a socket, where it does not notice that the client is gone.
                self._perform(call, faults, record)
                raise
        answer = self._perform(call, faults, record)
        if done_in + late > 0:
            await connection.pause(done_in + late, self._sleep)
        return self._reply(answer, faults, request, connection)

    def _perform(
        self, call: ServiceCall, faults: Sequence[Fault], record: Callable[[int | None, bool], None]
    ) -> ServiceResponse:
        """Process a call, unless a fault prevents it, and return the response to send."""
        instead = _first(faults, *_INSTEAD)
        is_processed = instead is None or instead.when != "before"
        answer = ServiceResponse(b"")
        if is_processed:
            answer = self._processed(call, faults)
        if instead is not None and instead.kind != "cut":
            answer = _replaced(answer, instead)
        # A cut in the middle of the body sends a status first; the other cuts send nothing.
        is_silent = instead is not None and instead.kind == "cut" and instead.when != "middle"
        record(None if is_silent else answer.status, is_processed)
        return answer

    def _record(
        self,
        call: ServiceCall,
        time: float,
        request: Request,
        status: int | None,
        is_processed: bool,  # noqa: FBT001  partial gives the rest
    ) -> None:
        self._ledger.record_request(
            call.request_number,
            call.endpoint,
            member_code=call.member_code,
            quota_ids=call.quota_ids or (),
            status=status,
            is_processed=is_processed,
            time=time,
            query=call.query,
            headers=request.headers.raw,
        )

    def _processed(self, call: ServiceCall, faults: Sequence[Fault]) -> ServiceResponse:
        # Without its cursor the request gets the first page again.
        if any(fault.kind == "stuck_cursor" for fault in faults):
            first = {name: value for name, value in call.query.items() if name != "lastMemberCodeReceived"}
            call = attrs.evolve(call, query=first)
        refused: dict[int | None, int] = {}
        for fault in faults:
            if fault.kind == "refusal":
                refused.setdefault(fault.quota_id, fault.result_code)
        answer = self._service.answer(attrs.evolve(call, refused=refused) if refused else call)
        for fault in faults:
            answer = altered(answer, fault, self._random)
        return answer

    def _reply(
        self, answer: ServiceResponse, faults: Sequence[Fault], request: Request, connection: ClientConnection
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
        """Compress a body. The body of Get Quotas stays the same object, so it is compressed only once."""
        if self._zipped[0] is not content:
            # Level 1 is the fastest; wbits=31 selects the gzip format.
            compressor = zlib.compressobj(1, wbits=31)
            self._zipped = (content, compressor.compress(content) + compressor.flush())
        return self._zipped[1]


class FaultyReply(Response):
    """A response that may be sent in slices, or break off."""

    _cut: Fault | None
    _drip: Fault | None
    _connection: ClientConnection
    _sleep: Sleep

    def struck(
        self, cut: Fault | None, drip: Fault | None, *, connection: ClientConnection, sleep: Sleep
    ) -> FaultyReply:
        """Set the faults of sending."""
        self._cut, self._drip = cut, drip
        self._connection, self._sleep = connection, sleep
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, or as much of it as the faults allow."""
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
        # Divide and round up: 10 bytes in 4 slices are sent as 3, 3, 3 and 1.
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
    """Return the OpenAPI document of the five endpoints. It is read on first use: few tests need it."""
    return files("sampling_async.simulator").joinpath("openapi.json").read_bytes()


def _call(request: Request, endpoint: Endpoint, *, quota_ids: tuple[int, ...] | None = ()) -> ServiceCall:
    segments: dict[str, str] = request.path_params
    member_code = segments.get("member_code")
    panel_guid = segments.get("panel_guid", request.query_params.get("partnerGUID"))
    return ServiceCall(
        endpoint=endpoint,
        panel_guid=None if panel_guid is None else unquote(panel_guid),
        api_key=request.headers.get("api_auth_key"),
        member_code=None if member_code is None else unquote(member_code),
        quota_ids=quota_ids,
        query=dict(request.query_params) if request.scope["query_string"] else {},
    )


def _path_id(request: Request) -> tuple[int, ...] | None:
    text = unquote(request.path_params["quota_id"])
    # Any number of up to 18 digits fits 64 bits.
    if not (text.isascii() and text.isdecimal() and len(text) < 19):  # noqa: PLR2004  digits of 64 bits
        return None
    return (int(text),)


def _quota_ids(body: bytes) -> tuple[int, ...] | None:
    """Return the quota IDs of a bulk invite's body, or None if the body breaks the contract."""
    try:
        fields: Any = json.loads(body)
        quota_ids = tuple(fields["QuotaIDs"])
    except (ValueError, TypeError, KeyError):
        return None
    # Not isinstance(): JSON's true and false would count as whole numbers.
    if not all(type(each) is int and -_INT64 <= each < _INT64 for each in quota_ids):
        return None
    return quota_ids


def _first(faults: Sequence[Fault], *kinds: FaultKind) -> Fault | None:
    return next((fault for fault in faults if fault.kind in kinds), None)


def _cost_ids(call: ServiceCall) -> int:
    return len(call.quota_ids or ()) if call.endpoint == "bulk_invite" else 1


def _delay(faults: Sequence[Fault], when: str) -> float:
    return sum(fault.seconds for fault in faults if fault.kind == "delay" and fault.when == when)


def _replaced(answer: ServiceResponse, fault: Fault) -> ServiceResponse:
    headers = {} if fault.retry_after is None else {"Retry-After": str(fault.retry_after)}
    return attrs.evolve(
        answer,
        body=fault.content,
        status=fault.answer_status,
        content_type=fault.content_type,
        headers=headers,
    )


def _route(method: str, path: str, endpoint: Callable[[Request], Awaitable[Response]]) -> Route:
    route = Route(path, endpoint, methods=[method])
    # Starlette adds HEAD to GET, and one HEAD would make an invite.
    route.methods = {method}
    return route
