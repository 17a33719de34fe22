"""The client: what it promises to its user, and the recontact pager."""

from __future__ import annotations

import os
import random as _random
from collections import deque
from typing import TYPE_CHECKING, Any, Self, SupportsIndex

import anyio

from sampling_async import _protocol
from sampling_async._bodies import BodyLimits
from sampling_async._bulk import AnyIterable, ChunkSource, OutcomeStream, source_of
from sampling_async._calls import Caller
from sampling_async._configuration import Secret, base_url_of, guid_of
from sampling_async._errors import InvalidRequestError, PagingError
from sampling_async._outcomes import BulkInviteResult
from sampling_async._policy import RetryPolicy, Timeouts
from sampling_async._protocol import MAX_QUOTA_IDS, Cursor, InviteRequest, member_code_of, quota_id_of
from sampling_async._scheduler import Gate, ReadAhead
from sampling_async._session import Session, Track

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
    from types import TracebackType
    from uuid import UUID

    import httpx

    from sampling_async._models import Invite, Quotas, RecontactMembers
    from sampling_async._settings import PartnerSettings

_SPARE_CONNECTIONS = 2


class SamplingClient:
    """A client of one External Sampling Service for one partner panel.

    Make one for each event loop and share it: all its calls run under one limit. Use it as
    `async with SamplingClient(...) as client`, or call `aclose()` when done.

    Args:
        base_url: The service's address, without the paths of the contract. https, or http for loopback.
        panel_guid: The PanelGUID, issued by the operator for a panel and culture.
        api_key: The API_AUTH_KEY, a Guid. It is sent to `base_url` only, and no repr or error shows it.
        max_concurrency: How many requests may be in flight at once, over all calls of this client.
        timeouts: Time limits of an attempt.
        retry: Whether and how failed calls are repeated.
        limits: Bounds of an answer's body, in bytes.
        transport: Something of httpx that carries the requests in place of its own engine: a proxy, a mock,
            an ASGI application. Proxies of the environment are not used.
        allow_http: Let the key travel in the clear to hosts other than loopback.
        clock: Seconds from any start; default, the event loop's.
        sleep: Waits a number of seconds; default, the event loop's.
        random: Draws from 0 to 1, for the jitter of the backoff.

    Raises:
        InvalidRequestError: An argument is not what it must be. Keys and addresses are not repeated.
    """

    def __init__(
        self,
        base_url: str,
        *,
        panel_guid: str | UUID,
        api_key: str | UUID,
        max_concurrency: int = 8,
        timeouts: Timeouts | None = None,
        retry: RetryPolicy | None = None,
        limits: BodyLimits | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        allow_http: bool = False,
        clock: Callable[[], float] = anyio.current_time,
        sleep: Callable[[float], Awaitable[object]] = anyio.sleep,
        random: Callable[[], float] = _random.random,
    ) -> None:
        key = guid_of(api_key, "api_key")
        del api_key  # the frames of an error below may be reported with their locals
        if not isinstance(max_concurrency, int) or isinstance(max_concurrency, bool) or max_concurrency < 1:
            raise InvalidRequestError(f"max_concurrency is a whole number above 0, not {max_concurrency!r}")
        self._panel_guid = guid_of(panel_guid, "panel_guid").reveal()
        self._base_url = base_url_of(base_url, allow_http=allow_http)
        self._session = Session(
            self._base_url,
            key,
            timeouts=timeouts or Timeouts(),
            limits=limits or BodyLimits(),
            connections=max_concurrency + _SPARE_CONNECTIONS,
            transport=transport,
        )
        self._gate = Gate(max_concurrency, clock=clock, sleep=sleep)
        self._caller = Caller(
            self._session, self._gate, retry or RetryPolicy(), clock=clock, sleep=sleep, random=random
        )

    @classmethod
    def from_env(cls, **overrides: Any) -> Self:
        """Make a client from SAMPLING_BASE_URL, SAMPLING_PANEL_GUID and SAMPLING_API_KEY.

        Args:
            overrides: Arguments of the constructor, `base_url` included; they count over the environment.

        Raises:
            InvalidRequestError: A variable is missing, or an argument is not what it must be.
        """
        if overrides.get("api_key"):  # first of all: reports of errors show the locals of frames
            overrides["api_key"] = Secret.of(overrides["api_key"])
        names = {name: f"SAMPLING_{name.upper()}" for name in ("base_url", "panel_guid", "api_key")}
        missing = [
            name for name, variable in names.items() if not (overrides.get(name) or os.environ.get(variable))
        ]
        if missing:
            variables, arguments = ", ".join(names[name] for name in missing), ", ".join(missing)
            raise InvalidRequestError(f"missing in the environment: {variables}; set them, or give {arguments}")
        for name, variable in names.items():
            overrides[name] = overrides.get(name) or os.environ[variable]
        overrides["api_key"] = Secret.of(overrides["api_key"])
        return cls(overrides.pop("base_url"), **overrides)

    def __repr__(self) -> str:
        if not hasattr(self, "_caller"):
            return "<SamplingClient: not made>"
        state = "closed" if self._session.closed else f"{self._gate.running} of {self._gate.limit} running"
        return f"<SamplingClient {self._base_url.host}: {state}, {self._gate.waiting} waiting>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the client. Calls that still run end with `ClientClosedError`; may be called twice."""
        self._gate.unhold()
        await self._session.aclose()

    async def get_quotas(self, *, include_routables: bool = True) -> Quotas:
        """Return the surveys and quotas that need supply (endpoint Get Quotas).

        Args:
            include_routables: Whether conditions on routable questions are part of the answer.

        Raises:
            SamplingError: The call failed; it is repeated before as `RetryPolicy` says.
        """
        return await self._caller.run(
            _protocol.get_quotas(self._panel_guid, include_routables=include_routables)
        )

    async def generate_invite(self, member_code: str, quota_id: SupportsIndex) -> Invite:
        """Return an invite of one member to one quota (endpoint Generate Invite).

        Raises:
            InvalidRequestError: The member code or quota ID cannot be sent.
            BadRequestError: The service refused; `result_code` says why, see `ResultCode`.
            SamplingError: The call failed. With `delivery == "unknown"` an invite may exist.
        """
        call = _protocol.generate_invite(self._panel_guid, member_code_of(member_code), quota_id_of(quota_id))
        return await self._caller.run(call)

    async def bulk_invite(
        self, member_code: str, quota_ids: Iterable[SupportsIndex], *, chunk_size: int = MAX_QUOTA_IDS
    ) -> BulkInviteResult:
        """Ask invites of one member to many quotas, in parallel requests (endpoint Bulk Invite).

        Failures of requests become outcomes, not exceptions; after a 403 no more are sent.

        Args:
            member_code: The member.
            quota_ids: Any number of quota IDs. A repeated one is sent once and answered at each of its places.
            chunk_size: Quota IDs a request, 1 to 100.

        Returns:
            One outcome for each ID given, in its order.

        Raises:
            InvalidRequestError: The member code or a quota ID cannot be sent; nothing was.
        """
        request = InviteRequest(member_code, quota_ids)
        async with self.fan_out([request], chunk_size=chunk_size) as stream:
            outcomes = {outcome.quota_id: outcome async for outcome in stream}
        return BulkInviteResult((outcomes[quota_id] for quota_id in request.quota_ids), stream.unrequested)

    def stream_bulk_invite(
        self, member_code: str, quota_ids: AnyIterable[SupportsIndex], *, chunk_size: int = MAX_QUOTA_IDS
    ) -> OutcomeStream:
        """Ask invites of one member to many quotas and yield the outcomes as they finish.

            async with client.stream_bulk_invite(member_code, quota_ids) as outcomes:
                async for outcome in outcomes: ...

        Args:
            member_code: The member.
            quota_ids: Quota IDs, iterable or async iterable, without end if need be: memory does not grow with
                them. A collection is checked whole at once, and an ID repeated in it is sent once; from an
                iterator, IDs are sent once within a chunk. An async generator is closed at the end.
            chunk_size: Quota IDs a request, 1 to 100. A request is sent when its chunk is full, the last when
                the input ends.

        Raises:
            InvalidRequestError: The member code or an ID of a collection cannot be sent; nothing was.
        """
        return self._stream(*source_of(member_code, quota_ids, _size(chunk_size)))

    def fan_out(
        self, requests: AnyIterable[InviteRequest], *, chunk_size: int = MAX_QUOTA_IDS
    ) -> OutcomeStream:
        """Ask invites of many members, each to its quotas, and yield the outcomes as they finish.

            async with client.fan_out(requests) as outcomes:
                async for outcome in outcomes: ...

        Args:
            requests: `InviteRequest(member_code, quota_ids)`, iterable or async iterable; memory does not grow
                with them. An ID repeated within a request is sent once. An async generator is closed at the
                end.
            chunk_size: Quota IDs a request, 1 to 100; a request to the service is about one member.

        Raises:
            InvalidRequestError: While iterating: something else than an InviteRequest was given.
        """
        source = ChunkSource(_size(chunk_size))
        return self._stream(source, source.of_panel(requests))

    def _stream(self, source: ChunkSource, chunks: AsyncGenerator[_protocol.Chunk, None]) -> OutcomeStream:
        return OutcomeStream(self._caller, self._gate, self._panel_guid, source, chunks)

    async def get_settings(self) -> PartnerSettings:
        """Return the partner's settings (endpoint Get Settings).

        Raises:
            SamplingError: The call failed; it is repeated before as `RetryPolicy` says.
        """
        return await self._caller.run(_protocol.get_settings(self._panel_guid))

    async def recontact_pages(
        self, quota_id: SupportsIndex, *, max_results: int | None = None, after: str | None = None
    ) -> AsyncGenerator[RecontactMembers, None]:
        """Yield the members wanted back for a recontact quota, page by page (Get Recontact Members For Quota).

        Args:
            quota_id: A quota of a survey with `is_survey_recontact`.
            max_results: Member codes a page; keep it under 10000. None: the service's own default.
            after: The last member code already received, to resume after it.

        Raises:
            InvalidRequestError: An argument cannot be sent.
            PagingError: The list does not advance; its `cursor` resumes it.
            SamplingError: A page could not be read; only that page was repeated before.
        """
        cursor, read = self._pager(quota_id, max_results, after)
        while not cursor.done:
            yield await read()

    async def recontact_members(
        self, quota_id: SupportsIndex, *, max_results: int | None = None, after: str | None = None
    ) -> AsyncGenerator[str, None]:
        """Yield the codes of the members wanted back for a recontact quota.

        Pages are read one after the other as codes are taken. Breaking off at any code is safe; resume with
        `after=` that code. Arguments and errors are those of `recontact_pages`.
        """
        cursor, read = self._pager(quota_id, max_results, after)
        while not cursor.done:
            for member_code in (await read()).member_codes:
                yield member_code

    def stream_recontact_members(
        self, quota_id: SupportsIndex, *, max_results: int | None = None, after: str | None = None
    ) -> RecontactStream:
        """Yield member codes like `recontact_members`, reading the next page while this one is worked on.

            async with client.stream_recontact_members(quota_id) as codes:
                async for code in codes: ...

        Arguments and errors are those of `recontact_pages`.
        """
        return RecontactStream(self.recontact_pages(quota_id, max_results=max_results, after=after))

    def _pager(
        self, quota_id: SupportsIndex, max_results: int | None, after: str | None
    ) -> tuple[Cursor, Callable[[], Awaitable[RecontactMembers]]]:
        """Return a cursor, and what reads the page after it and moves it on."""
        quota = quota_id_of(quota_id)
        if max_results is not None and not (type(max_results) is int and max_results > 0):
            raise InvalidRequestError(f"max_results is a whole number above 0, not {max_results!r}")
        cursor = Cursor(None if after is None else member_code_of(after))

        async def read() -> RecontactMembers:
            call = _protocol.recontact_members(
                self._panel_guid, quota, max_results=max_results, after=cursor.after
            )
            track = Track()
            page = await self._caller.run(call, track=track)
            try:
                return cursor.advance(page)
            except PagingError as exc:
                exc.attempts = track.attempts
                raise

        return cursor, read


class RecontactStream:
    """Member codes of a recontact quota, read one page ahead: see `stream_recontact_members`.

    Attributes:
        last_taken: The last member code handed over, to resume with `after=`; None before the first.
    """

    def __init__(self, pages: AsyncGenerator[RecontactMembers, None]) -> None:
        self.last_taken: str | None = None
        self._pages = ReadAhead(pages)
        self._codes: deque[Iterator[str]] = deque()

    async def __aenter__(self) -> Self:
        await self._pages.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._pages.__aexit__(exc_type, exc, traceback)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        while True:
            while self._codes:
                for code in self._codes[0]:
                    self.last_taken = code
                    return code
                self._codes.popleft()
            page = await self._pages.next()
            if page is None:
                raise StopAsyncIteration
            self._codes.append(iter(page.member_codes))


def _size(chunk_size: int) -> int:
    if type(chunk_size) is not int or not 1 <= chunk_size <= MAX_QUOTA_IDS:
        raise InvalidRequestError(f"chunk_size is a whole number from 1 to {MAX_QUOTA_IDS}, not {chunk_size!r}")
    return chunk_size
