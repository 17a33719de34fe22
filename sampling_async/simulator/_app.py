"""The ASGI application: it reads requests, applies faults, lets time pass and sends responses."""

from __future__ import annotations

import json
import zlib
from array import array
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import attrs
from attrs import define, field
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.routing import Route

from sampling_async import Invite, RecontactMembers, ResultCode
from sampling_async._contract.structs import replace
from sampling_async.simulator._answers import JSON, PLAINTEXT, BulkItem, ServiceResponse, encoded
from sampling_async.simulator._ledger import RequestRecord
from sampling_async.simulator._service import ServiceCall
from sampling_async.simulator._transport import connection_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from random import Random

    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

    from sampling_async import Endpoint
    from sampling_async.simulator._clock import WorkQueue
    from sampling_async.simulator._faults import Fault, FaultKind, FaultPlan
    from sampling_async.simulator._ledger import Ledger
    from sampling_async.simulator._service import Service
    from sampling_async.simulator._transport import ClientConnection, Sleep

_PANEL_PATH: Final = "/IPExternalSamplingService/ExternalSample/{panel_guid}"
_PATHS: Final[dict[Endpoint, str]] = {
    "get_quotas": f"{_PANEL_PATH}/Quotas",
    "bulk_invite": f"{_PANEL_PATH}/{{member_code}}/Invites",
    "generate_invite": f"{_PANEL_PATH}/{{member_code}}/Invite/{{quota_id}}",
    "get_settings": "/IntegratedPanelService/api/Settings",
    "recontact_members": f"{_PANEL_PATH}/Recontact/{{quota_id}}/MemberCodes",
}
_GZIP_FROM: Final = 1024
_INT64: Final = 2**63
_INSTEAD: Final[tuple[FaultKind, ...]] = ("status", "body", "cut")
"""The kinds of faults that replace the response."""


class RawPath:
    """Middleware that routes by the raw path, so that an encoded slash does not split a segment."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope.get("raw_path"):
            scope["path"] = scope["raw_path"].decode("latin-1")
        await self._app(scope, receive, send)


@define(eq=False)
class ServiceApp:
    """The five endpoints over HTTP. Every request to them passes through `_respond`.

    The application also serves `/openapi.json`, which describes the endpoints. It is not part of the service:
    it needs no key, and its requests reach neither the ledger nor the faults.
    """

    _service: Service
    _ledger: Ledger
    _faults: FaultPlan
    _queue: WorkQueue
    _sleep: Sleep
    _clock: Callable[[], float]
    _gzip: bool
    _random: Random  # of what faults alter
    _zipped: tuple[bytes, bytes] = (b"", b"")
    _began: float = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._began = self._clock()

    def starlette(self) -> Starlette:
        routes = [_route(path, partial(self._respond, endpoint)) for endpoint, path in _PATHS.items()]
        return Starlette(routes=[*routes, _route("/openapi.json", _describe)], middleware=[Middleware(RawPath)])

    async def _respond(self, endpoint: Endpoint, request: Request) -> Response:
        """Respond to a request, with the faults and the latency that apply to it.

        The time that its work takes passes after the service has acted: a client that gives up early finds the
        work done, as at a real service.
        """
        quota_ids: tuple[int, ...] | None = ()
        if endpoint == "bulk_invite":
            quota_ids = _quota_ids(await request.body())
        elif "quota_id" in request.path_params:
            quota_ids = _path_id(request)
        segments: dict[str, str] = request.path_params
        member_code = segments.get("member_code")
        panel_guid = segments.get("panel_guid", request.query_params.get("partnerGUID"))
        call = ServiceCall(
            endpoint=endpoint,
            panel_guid=None if panel_guid is None else unquote(panel_guid),
            api_key=request.headers.get("api_auth_key"),
            member_code=None if member_code is None else unquote(member_code),
            quota_ids=quota_ids,
            query=dict(request.query_params) if request.scope["query_string"] else {},
            request_number=self._ledger.open_request(),
        )
        connection = connection_of(request.scope)
        time = self._clock() - self._began
        faults = self._faults.draw(
            call.endpoint,
            panel_guid=call.panel_guid,
            member_code=call.member_code,
            quota_ids=call.quota_ids or (),
        )
        headers = request.headers.raw
        record = partial(
            RequestRecord,
            number=call.request_number,
            endpoint=call.endpoint,
            member_code=call.member_code,
            quota_ids=array("q", call.quota_ids or ()),
            time=time,
            query=call.query,
            headers=tuple((name, b"<hidden>" if name == b"api_auth_key" else value) for name, value in headers),
        )
        # Before the first await below, so that calls enter the queue in the order of their arrival.
        done_in = self._queue.admit(len(call.quota_ids or ()) if call.endpoint == "bulk_invite" else 1)
        delays = [fault for fault in faults if fault.kind == "delay"]
        early, late = (sum(each.seconds for each in delays if each.when == at) for at in ("before", "after"))
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
        return self._reply(answer, call.request_number, faults, request, connection)

    def _perform(
        self, call: ServiceCall, faults: Sequence[Fault], record: Callable[..., RequestRecord]
    ) -> ServiceResponse:
        """Process a call, unless a fault prevents it, and return the response to send."""
        instead = _first(faults, *_INSTEAD)
        is_processed = instead is None or instead.when != "before"
        answer = ServiceResponse(b"")
        if is_processed:
            answer = self._processed(call, faults)
        if instead is not None and instead.kind != "cut":
            headers = {} if instead.retry_after is None else {"Retry-After": str(instead.retry_after)}
            answer = ServiceResponse(instead.content, instead.answer_status, instead.content_type, headers)
        # A cut in the middle of the body sends a status first; the other cuts send nothing.
        is_silent = instead is not None and instead.kind == "cut" and instead.when != "middle"
        status = None if is_silent else answer.status
        self._ledger.record_request(record(status=status, is_processed=is_processed))
        return answer

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
        self,
        answer: ServiceResponse,
        number: int,
        faults: Sequence[Fault],
        request: Request,
        connection: ClientConnection,
    ) -> Response:
        content = encoded(answer.body)
        headers = {"Content-Type": answer.content_type, "X-Request-ID": f"sim-{number}", **answer.headers}
        if self._gzip and len(content) > _GZIP_FROM and "gzip" in request.headers.get("accept-encoding", ""):
            content = self._compressed(content)
            headers["Content-Encoding"] = "gzip"
        if not faults:
            return Response(content, answer.status, headers)
        return FaultyReply((content, answer.status, headers), faults, connection, self._sleep)

    def _compressed(self, content: bytes) -> bytes:
        """Compress a body. The body of Get Quotas stays the same object, so it is compressed only once."""
        if self._zipped[0] is not content:
            # Level 1 is the fastest; wbits=31 selects the gzip format.
            compressor = zlib.compressobj(1, wbits=31)
            self._zipped = (content, compressor.compress(content) + compressor.flush())
        return self._zipped[1]


class FaultyReply(Response):
    """A response that may be sent in slices, or break off."""

    def __init__(
        self,
        answer: tuple[bytes, int, dict[str, str]],
        faults: Sequence[Fault],
        connection: ClientConnection,
        sleep: Sleep,
    ) -> None:
        super().__init__(*answer)
        instead = _first(faults, *_INSTEAD)
        self._cut = instead if instead and instead.kind == "cut" else None
        self._drip = _first(faults, "drip")
        self._connection, self._sleep = connection, sleep

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
    document = files("sampling_async.simulator").joinpath("openapi.json")
    return Response(document.read_bytes(), media_type=JSON)


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
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    # Not isinstance(): JSON's true and false would count as whole numbers.
    if not all(type(each) is int and -_INT64 <= each < _INT64 for each in quota_ids):
        return None
    return quota_ids


def _first(faults: Sequence[Fault], *kinds: FaultKind) -> Fault | None:
    return next((fault for fault in faults if fault.kind in kinds), None)


def _route(path: str, endpoint: Callable[[Request], Awaitable[Response]]) -> Route:
    method = "POST" if path.endswith("/Invites") else "GET"
    route = Route(path, endpoint, methods=[method])
    # Starlette adds HEAD to GET, and one HEAD would make an invite.
    route.methods = {method}
    return route


def altered(answer: ServiceResponse, fault: Fault, random: Random) -> ServiceResponse:
    """Return a response changed by a fault, or unchanged if the fault does not apply to it."""
    if fault.kind == "plaintext":
        return attrs.evolve(answer, content_type=PLAINTEXT)
    body = answer.body
    if isinstance(body, list) and fault.kind in _OF_ITEMS:
        return attrs.evolve(answer, body=_OF_ITEMS[fault.kind](body, fault, random))
    if isinstance(body, Invite) and fault.kind == "wrong_invite":
        return attrs.evolve(answer, body=_mislabelled(body))
    if isinstance(body, RecontactMembers) and fault.kind == "empty_page":
        return attrs.evolve(answer, body=RecontactMembers(0, has_additional_members=True, member_codes=()))
    if isinstance(body, RecontactMembers) and fault.kind == "stuck_cursor":
        return attrs.evolve(answer, body=attrs.evolve(body, has_additional_members=True))
    return answer


def made_up_invite(quota_id: int, random: Random) -> Invite:
    url = f"https://entry.example/survey?invite={random.getrandbits(96):024x}&quota={quota_id}"
    return Invite(
        survey_id=random.randint(2500000, 2599999),
        wave_id=random.randint(790000, 799999),
        quota_id=quota_id,
        partner_amount=1.0,
        url=url,
        loi=10,
        ir=50,
    )


def _thinned(items: list[BulkItem], fault: Fault, random: Random) -> list[BulkItem]:
    left_out = set(random.sample(range(len(items)), min(fault.items, len(items))))
    return [item for position, item in enumerate(items) if position not in left_out]


def _padded(items: list[BulkItem], fault: Fault, random: Random) -> list[BulkItem]:
    asked = {item.quota_id for item in items}
    padded = list(items)
    while len(padded) < len(items) + fault.items:
        quota_id = random.randint(9000000, 9999999)
        # A drawn ID that was requested would be no extra item, so draw again.
        if quota_id not in asked:
            item = BulkItem(quota_id, 1, made_up_invite(quota_id, random))
            padded.insert(random.randint(0, len(padded)), item)
    return padded


def _mislabelled(invite: Invite) -> Invite:
    return replace(invite, quota_id=invite.quota_id + 1)


def _contradicted(items: list[BulkItem], fault: Fault, random: Random) -> list[BulkItem]:
    if fault.variant == "success_without_invite":
        return [BulkItem(item.quota_id, 1) for item in items]
    # Items that succeeded keep their real invite; the others get one that the ledger does not hold.
    return [
        BulkItem(
            item.quota_id,
            ResultCode.QUOTA_NOT_LIVE if item.result_code == ResultCode.SUCCESS else item.result_code,
            item.invite or made_up_invite(item.quota_id, random),
        )
        for item in items
    ]


_OF_ITEMS: Final[dict[str, Callable[[list[BulkItem], Fault, Random], list[BulkItem]]]] = {
    "wrong_order": lambda items, fault, random: (
        random.sample(items, len(items)) if fault.variant == "shuffled" else items[::-1]
    ),
    "missing": _thinned,
    "extra": _padded,
    # The QuotaID of the item itself stays right: only the invite inside contradicts it.
    "wrong_invite": lambda items, _fault, _random: [
        item._replace(invite=item.invite and _mislabelled(item.invite)) for item in items
    ],
    "contradiction": _contradicted,
}
