"""The client: what it promises to its user."""

from __future__ import annotations

import os
import random as _random
from collections.abc import Collection
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Final, Self, SupportsIndex
from weakref import WeakValueDictionary

import anyio

from sampling_async import _protocol
from sampling_async._bodies import BodyLimits
from sampling_async._bulk import OutcomeStream
from sampling_async._calls import Caller
from sampling_async._chunks import (
    ChunkSource,
    Goal,
    PanelSource,
    checked_request,
    source_of,
    spread,
    total_of,
)
from sampling_async._codec import warm_up
from sampling_async._configuration import (
    Secret,
    base_url_of,
    guid_of,
    idle_seconds_of,
    must_be_safe_through,
    proxy_of,
)
from sampling_async._errors import Endpoint, InvalidRequestError
from sampling_async._gate import Gate, Lane, Permit
from sampling_async._inputs import AnyIterable, readable
from sampling_async._invites import Inviter
from sampling_async._journal import Journal, run_of
from sampling_async._loops import current_time
from sampling_async._outage import Outage
from sampling_async._policy import OutagePolicy, RetryPolicy, Timeouts
from sampling_async._protocol import MAX_QUOTA_IDS, InviteRequest, member_code_of, quota_id_of
from sampling_async._quotas import SurveyStream, read_quotas
from sampling_async._recontact import PageReader, RecontactStream
from sampling_async._session import Session, Track
from sampling_async._snapshot import Snapshot
from sampling_async._trust import checked_context, context_of_files

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
    from types import TracebackType
    from uuid import UUID

    import httpx

    from sampling_async._journal_run import JournalRun
    from sampling_async._models import Invite, Quotas, RecontactMembers, Survey
    from sampling_async._outcomes import BulkInviteResult
    from sampling_async._settings import PartnerSettings

_SPARE_CONNECTIONS = 2
_LEAST_SHARE: Final = 1e-6
BULK: Final[Endpoint] = "bulk_invite"


class SamplingClient:
    """A client of one External Sampling Service for one partner panel.

    Make one for each event loop and share it: all its calls run under one limit. Use it as
    `async with SamplingClient(...) as client`, or call `aclose()` when done.

    Args:
        base_url: The service's address, without the paths of the contract. https, or http for loopback.
        panel_guid: The PanelGUID, issued by the operator for a panel and culture.
        api_key: The API_AUTH_KEY, a Guid. It is sent to `base_url` only, and no repr or error shows it.
        max_concurrency: How many requests may be in flight at once, over all calls of this client. Below it,
            the limit adapts to what the service can take, see `snapshot()`.
        timeouts: Time limits of an attempt.
        retry: Whether and how failed calls are repeated.
        outage: What to do when the service is away.
        limits: Bounds of an answer's body, in bytes.
        transport: Something of httpx that carries the requests in place of its own engine: a mock, an ASGI
            application. It brings its own proxy and TLS.
        proxy: An HTTP proxy, `http://host:3128` or `http://user:password@host:3128`; no repr or error shows
            the credentials. What is https goes through it unseen (CONNECT), and it fetches what is http. Of
            the environment, `from_env` reads SAMPLING_PROXY; HTTPS_PROXY is not used.
        ssl_context: How TLS is spoken: private authorities, client certificates. It is set to offer HTTP/1.1
            by ALPN. Default: certifi's authorities, or those that SSL_CERT_FILE or SSL_CERT_DIR names.
        idle_seconds: How long an unused connection is kept. Keep it below the time after which the service
            closes one; where it closes them sooner, the client learns to use them for less.
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
        outage: OutagePolicy | None = None,
        limits: BodyLimits | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        proxy: str | None = None,
        ssl_context: ssl.SSLContext | None = None,
        idle_seconds: float = 4.0,
        allow_http: bool = False,
        clock: Callable[[], float] = current_time,
        sleep: Callable[[float], Awaitable[object]] = anyio.sleep,
        random: Callable[[], float] = _random.random,
    ) -> None:
        key, way = Secret.of(api_key), None if proxy is None else Secret.of(proxy)
        # The frames of an error may be reported with their locals, also where one of these is mistyped.
        del api_key, proxy
        key = guid_of(key, "api_key")
        if not isinstance(max_concurrency, int) or isinstance(max_concurrency, bool) or max_concurrency < 1:
            raise InvalidRequestError(f"max_concurrency is a whole number above 0, not {max_concurrency!r}")
        self._panel_guid = guid_of(panel_guid, "panel_guid").reveal()
        self._base_url = base_url_of(base_url, allow_http=allow_http)
        if transport is not None and (way is not None or ssl_context is not None):
            raise InvalidRequestError(
                "proxy and ssl_context are not for a transport of your own: give them to that"
            )
        way_out = None if way is None else proxy_of(way)
        if way_out is not None:
            must_be_safe_through(way_out, self._base_url, allow_http=allow_http)
        self._session = Session(
            self._base_url,
            key,
            timeouts=timeouts or Timeouts(),
            limits=limits or BodyLimits(),
            connections=max_concurrency + _SPARE_CONNECTIONS,
            transport=transport,
            idle_seconds=idle_seconds_of(idle_seconds),
            proxy=way_out,
            tls=None if ssl_context is None else checked_context(ssl_context),
        )
        self._outage = Outage(
            outage or OutagePolicy(),
            self._ask_whether_away,
            under_way=max_concurrency,
            clock=clock,
            sleep=sleep,
            random=random,
        )
        self._gate = Gate(max_concurrency, clock=clock, sleep=sleep, random=random, outage=self._outage)
        self._known = WeakValueDictionary[bytes, "Survey"]()  # surveys read before that somebody still has
        warm_up()
        policy = retry or RetryPolicy()
        self._caller = Caller(
            self._session, self._gate, self._outage, policy, clock=clock, sleep=sleep, random=random
        )

    @classmethod
    def from_env(cls, **overrides: Any) -> Self:
        """Make a client from SAMPLING_BASE_URL, SAMPLING_PANEL_GUID and SAMPLING_API_KEY.

        The way to the service may be set too: SAMPLING_PROXY as `proxy`; SAMPLING_CA_FILE, a PEM file of the
        authorities to trust in place of all others; SAMPLING_CLIENT_CERT, a PEM file with a client certificate
        and its key, not encrypted. They are not looked at where `transport` is given, nor the files with
        `ssl_context`.

        Args:
            overrides: Arguments of the constructor, `base_url` included; they count over the environment.

        Raises:
            InvalidRequestError: A variable is missing, an argument is not what it must be, or a file cannot be
                used; the text names the variable and the file.
        """
        for name in ("api_key", "proxy"):  # first of all: reports of errors show the locals of frames
            if overrides.get(name):
                overrides[name] = Secret.of(overrides[name])
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
        if overrides.get("transport") is None:
            if overrides.get("proxy") is None and os.environ.get("SAMPLING_PROXY"):
                overrides["proxy"] = Secret.of(os.environ["SAMPLING_PROXY"])
            if overrides.get("ssl_context") is None:
                files = (os.environ.get(name) for name in ("SAMPLING_CA_FILE", "SAMPLING_CLIENT_CERT"))
                overrides["ssl_context"] = context_of_files(*files)
        return cls(overrides.pop("base_url"), **overrides)

    def __repr__(self) -> str:
        if not hasattr(self, "_caller"):
            return "<SamplingClient: not made>"
        state = "closed" if self._session.closed else f"{self._gate.running} of {self._gate.maximum} running"
        return f"<SamplingClient {self._base_url.host}: {state}, {self._gate.waiting} waiting>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the client. Calls that still run end with `ClientClosedError`; may be called twice."""
        self._gate.close(wakes=self._session.is_at_home)
        await self._session.aclose()

    async def _ask_whether_away(self, seconds: float) -> float | None:
        """Ask Get Settings once; see `Outage`."""
        return await self._caller.ask_whether_away(_protocol.get_settings(self._panel_guid), seconds)

    def snapshot(self) -> Snapshot:
        """Return what the client is doing now: its limit, what runs and waits, retries left, latency."""
        limit, rate = self._gate.kind(BULK).adaptive, self._gate.kind(BULK).pace.rate
        line = limit.latency.line
        return Snapshot(
            limit=limit.limit,
            max_concurrency=limit.maximum,
            running=self._gate.running,
            waiting=self._gate.waiting,
            held_for=self._gate.held_for(),
            away_for=self._outage.away_for(),
            requests_per_second=None if rate == inf else rate,
            retry_tokens=self._caller.budget.tokens,
            seconds_per_request=None if line is None else line.a,
            seconds_per_id=None if line is None else line.b,
        )

    def _interactive(self, endpoint: Endpoint, deadline: float | None) -> Permit:
        return Permit(self._gate, self._gate.kind(endpoint).interactive, self._until(deadline))

    def _until(self, deadline: float | None) -> float:
        if deadline is None:
            return inf
        return self._gate.clock() + _positive(deadline, "deadline", "seconds")

    async def get_quotas(self, *, include_routables: bool = True, deadline: float | None = None) -> Quotas:
        """Return the surveys and quotas that need supply (endpoint Get Quotas).

        Args:
            include_routables: Whether conditions on routable questions are part of the answer.
            deadline: Seconds the call may take in all: waiting, attempts and the waits between them.

        Raises:
            SamplingError: The call failed; it is repeated before as `RetryPolicy` says.
        """
        call = _protocol.get_quotas(self._panel_guid, include_routables=include_routables)
        return await self._caller.run(
            call, self._interactive(call.endpoint, deadline), read=partial(read_quotas, known=self._known)
        )

    async def iter_surveys(
        self, *, include_routables: bool = True, deadline: float | None = None
    ) -> AsyncGenerator[Survey, None]:
        """Yield the surveys of Get Quotas as they arrive, with no more of them in memory than came together.

        The call is repeated as `RetryPolicy` says until the first surveys are there; what fails after that is
        raised. Breaking off closes the connection; do so through `contextlib.aclosing`, or at the end of a loop
        that is left early the connection stays open until the generator is collected. The service waits while
        you work on a survey: if it may not, use `get_quotas()`.

        Args:
            include_routables: Whether conditions on routable questions are part of the answer.
            deadline: Seconds the call may take in all; your own time between surveys does not count.

        Raises:
            SamplingError: The call failed, or the answer broke off; surveys yielded before are good.
        """
        call = _protocol.get_quotas(self._panel_guid, include_routables=include_routables)
        stream = SurveyStream(self._caller, call, self._interactive(call.endpoint, deadline))
        try:
            while surveys := await stream.next():
                for survey in surveys:
                    yield survey
        finally:
            await stream.aclose()

    async def generate_invite(
        self, member_code: str, quota_id: SupportsIndex, *, deadline: float | None = None
    ) -> Invite:
        """Return an invite of one member to one quota (endpoint Generate Invite).

        Args:
            member_code: The member.
            quota_id: The quota.
            deadline: Seconds the call may take in all: waiting, attempts and the waits between them.

        Raises:
            InvalidRequestError: The member code or quota ID cannot be sent.
            BadRequestError: The service refused; `result_code` says why, see `ResultCode`.
            SamplingError: The call failed. With `delivery == "unknown"` an invite may exist.
        """
        call = _protocol.generate_invite(self._panel_guid, member_code_of(member_code), quota_id_of(quota_id))
        track, started = Track(), self._caller.clock()
        invite = await self._caller.run(call, self._interactive(call.endpoint, deadline), track)
        self._caller.hand(member_code, (invite.url,), call, track, path="$.URL", started=started)
        return invite

    async def bulk_invite(
        self,
        member_code: str,
        quota_ids: Iterable[SupportsIndex],
        *,
        chunk_size: int = MAX_QUOTA_IDS,
        goal: Goal | None = None,
        deadline: float | None = None,
        weight: float = 1.0,
    ) -> BulkInviteResult:
        """Ask invites of one member to many quotas, in parallel requests (endpoint Bulk Invite).

        Failures of requests become outcomes, not exceptions; after a 403 no more are sent.

        Args:
            member_code: The member.
            quota_ids: Any number of quota IDs. A repeated one is sent once and answered at each of its places.
            chunk_size: Quota IDs a request, 1 to 100.
            goal: "throughput", the default, sends as few requests as can be. "first" cuts them smaller where
                slots are free, so that the last answer comes as early as can be: 100 IDs over 8 free slots are
                8 requests.
            deadline: Seconds until all of it must be known; the goal is "first" then, unless given. What was
                not sent in time ends `not_sent`; what was sent and not answered in time, `unknown`. All of the
                input is taken first.
            weight: The share of slots beside that of other bulks that run, which have 1. It is approximate.

        Returns:
            One outcome for each ID given, in its order.

        Raises:
            InvalidRequestError: The member code or a quota ID cannot be sent; nothing was.
        """
        until, size = self._until(deadline), _size(chunk_size)
        size_of = self._size_of(size, goal, until)
        request = await checked_request(member_code, quota_ids)
        source = PanelSource([request], size=size, size_of=size_of)
        total = len(request.quota_ids)
        async with self._stream(self._inviter(), source, until, weight, total) as stream:
            return await stream.result(request)

    def stream_bulk_invite(
        self,
        member_code: str,
        quota_ids: AnyIterable[SupportsIndex],
        *,
        chunk_size: int = MAX_QUOTA_IDS,
        goal: Goal | None = None,
        deadline: float | None = None,
        weight: float = 1.0,
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
            goal: "throughput", the default, sends as few requests as can be. "first" cuts them smaller where
                slots are free, so that the last answer comes as early as can be: 100 IDs over 8 free slots are
                8 requests.
                It needs a collection: of what can be read only once, nobody knows how many are to come.
            deadline: Seconds until all of it must be known; the goal is "first" then, unless given. What was
                not sent in time ends `not_sent`; what was sent and not answered in time, `unknown`. Of an input
                that can be read only once, nothing more is taken after it.
            weight: The share of slots beside that of other bulks that run, which have 1. It is approximate.

        Raises:
            InvalidRequestError: The member code or an ID of a collection cannot be sent; nothing was.
        """
        until, size, inviter = self._until(deadline), _size(chunk_size), self._inviter()
        source = source_of(
            member_code,
            readable(quota_ids, "quota_ids"),
            size=size,
            size_of=self._size_of(size, goal, until),
            remaining=self._remaining(until, inviter),
        )
        total = len(quota_ids) if isinstance(quota_ids, Collection) else None
        return self._stream(inviter, source, until, weight, total)

    def fan_out(
        self,
        requests: AnyIterable[InviteRequest],
        *,
        chunk_size: int = MAX_QUOTA_IDS,
        goal: Goal | None = None,
        deadline: float | None = None,
        weight: float = 1.0,
        journal: str | os.PathLike[str] | Journal | None = None,
    ) -> OutcomeStream:
        """Ask invites of many members, each to its quotas, and yield the outcomes as they finish.

            async with client.fan_out(requests) as outcomes:
                async for outcome in outcomes: ...

        Args:
            requests: `InviteRequest(member_code, quota_ids)`, iterable or async iterable; memory does not grow
                with them. An ID repeated within a request is sent once. An async generator is closed at the
                end.
            chunk_size: Quota IDs a request, 1 to 100; a request to the service is about one member.
            goal: "throughput", the default, sends as few requests as can be. "first" cuts them smaller where
                slots are free, so that the last answer comes as early as can be: 100 IDs over 8 free slots are
                8 requests.
            deadline: Seconds until all of it must be known; the goal is "first" then, unless given. What was
                not sent in time ends `not_sent`; what was sent and not answered in time, `unknown`. Of an input
                that can be read only once, nothing more is taken after it.
            weight: The share of slots beside that of other bulks that run, which have 1. It is approximate.
            journal: A file to write down what is sent and answered. A run that was killed is started again with
                the same input and the same journal: answers are handed over from it, what was in flight is
                `unknown`, and the rest is sent. See `Journal`.

        Raises:
            InvalidRequestError: While iterating: something else than an InviteRequest was given.
            JournalError: On entering, the journal cannot be used; while iterating or on leaving, it could not
                be written.
        """
        run: JournalRun | None = None
        if journal is not None:
            run = run_of(journal if isinstance(journal, Journal) else Journal(journal))
            run.claim(str(self._base_url), self._panel_guid)
        until, size, inviter = self._until(deadline), _size(chunk_size), self._inviter(run)
        source = PanelSource(
            readable(requests, "requests"),
            size=size,
            size_of=self._size_of(size, goal, until),
            remaining=None if isinstance(requests, Collection) else self._remaining(until, inviter),
            journal=run,
        )
        return self._stream(inviter, source, until, weight, total_of(requests))

    def _size_of(self, size: int, goal: Goal | None, until: float) -> Callable[[int], int] | None:
        """Return what gives the size to cut a number of quota IDs into now, where it is not always the same."""
        if goal not in {"throughput", "first", None}:
            raise InvalidRequestError(f'goal is "throughput" or "first", not {goal!r}')
        if goal == "throughput" or (goal is None and until == inf):
            return None
        bulk = self._gate.kind(BULK)

        def size_of(quota_ids: int) -> int:
            room = min(bulk.adaptive.limit - len(bulk.held), self._gate.maximum - self._gate.running)
            free = 0 if self._gate.waiting else room
            return spread(quota_ids, slots=max(1, free), line=bulk.adaptive.latency.line, largest=size)

        return size_of

    def _remaining(self, until: float, inviter: Inviter) -> Callable[[], float]:
        """Return what tells for how many seconds more an input is to be read that can be read only once."""
        return lambda: -inf if inviter.has_given_up else until - self._gate.clock()

    def _inviter(self, journal: JournalRun | None = None) -> Inviter:
        return Inviter(self._caller, self._panel_guid, journal)

    def _stream(
        self, inviter: Inviter, source: ChunkSource, until: float, weight: float, total: int | None
    ) -> OutcomeStream:
        lane = Lane(BULK, _share(weight), patience=self._outage.policy.patience)
        permit = partial(Permit, self._gate, lane, until)
        window, clock = self._gate.maximum + 1, self._gate.clock
        return OutcomeStream(inviter, source, permit, window=window, total=total, clock=clock)

    async def get_settings(self, *, deadline: float | None = None) -> PartnerSettings:
        """Return the partner's settings (endpoint Get Settings).

        Args:
            deadline: Seconds the call may take in all: waiting, attempts and the waits between them.

        Raises:
            SamplingError: The call failed; it is repeated before as `RetryPolicy` says.
        """
        call = _protocol.get_settings(self._panel_guid)
        return await self._caller.run(call, self._interactive(call.endpoint, deadline))

    async def recontact_pages(
        self,
        quota_id: SupportsIndex,
        *,
        max_results: int | None = None,
        after: str | None = None,
        deadline: float | None = None,
    ) -> AsyncGenerator[RecontactMembers, None]:
        """Yield the members wanted back for a recontact quota, page by page (Get Recontact Members For Quota).

        Args:
            quota_id: A quota of a survey with `is_survey_recontact`.
            max_results: Member codes a page; keep it under 10000. None: the service's own default.
            after: The last member code already received, to resume after it.
            deadline: Seconds that reading one page may take in all; your own time between pages does not count.

        Raises:
            InvalidRequestError: An argument cannot be sent.
            PagingError: The list does not advance; its `cursor` resumes it.
            SamplingError: A page could not be read; only that page was repeated before.
        """
        reader = self._reader(quota_id, max_results, after, deadline)
        while not reader.done:
            yield await reader.read()

    async def recontact_members(
        self,
        quota_id: SupportsIndex,
        *,
        max_results: int | None = None,
        after: str | None = None,
        deadline: float | None = None,
    ) -> AsyncGenerator[str, None]:
        """Yield the codes of the members wanted back for a recontact quota.

        Pages are read one after the other as codes are taken. Breaking off at any code is safe; resume with
        `after=` that code. Arguments and errors are those of `recontact_pages`.
        """
        reader = self._reader(quota_id, max_results, after, deadline)
        while not reader.done:
            for member_code in (await reader.read()).member_codes:
                yield member_code

    def stream_recontact_members(
        self,
        quota_id: SupportsIndex,
        *,
        max_results: int | None = None,
        after: str | None = None,
        deadline: float | None = None,
    ) -> RecontactStream:
        """Yield member codes like `recontact_members`, reading the next page while this one is worked on.

            async with client.stream_recontact_members(quota_id) as codes:
                async for code in codes: ...

        Arguments and errors are those of `recontact_pages`.
        """
        pages = self.recontact_pages(quota_id, max_results=max_results, after=after, deadline=deadline)
        return RecontactStream(pages, after)

    def _reader(
        self, quota_id: SupportsIndex, max_results: int | None, after: str | None, deadline: float | None
    ) -> PageReader:
        self._until(deadline)  # refuses one that is none now, not at the first page
        lane = Lane("recontact_members")

        def permit() -> Permit:
            return Permit(self._gate, lane, self._until(deadline))

        return PageReader(
            self._caller, self._panel_guid, quota_id, max_results=max_results, after=after, permit=permit
        )


def _positive(value: float, name: str, what: str) -> float:
    try:
        number = None if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
    except OverflowError:  # of a whole number beyond 10**308
        number = None
    if number is None or not number > 0:
        shown = "one beyond all floats" if type(value) is int and number is None else repr(value)
        raise InvalidRequestError(f"{name} is {what} above 0, not {shown}")
    return number


def _share(weight: float) -> float:
    share = _positive(weight, "weight", "a share")
    if not _LEAST_SHARE <= share <= 1 / _LEAST_SHARE:
        raise InvalidRequestError(
            f"weight is a share from {_LEAST_SHARE} to {1 / _LEAST_SHARE:.0f}, not {weight!r}"
        )
    return share


def _size(chunk_size: int) -> int:
    if type(chunk_size) is not int or not 1 <= chunk_size <= MAX_QUOTA_IDS:
        raise InvalidRequestError(f"chunk_size is a whole number from 1 to {MAX_QUOTA_IDS}, not {chunk_size!r}")
    return chunk_size
