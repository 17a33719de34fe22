"""`SamplingClient`: the public methods of the package, one or two for each endpoint of the contract."""

from __future__ import annotations

import os
import random as _random
import time
import weakref
from collections.abc import Collection
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Self, SupportsIndex

import anyio
from attrs import evolve

from sampling_async._bulk.clicks import ClickInvites
from sampling_async._bulk.inputs import AnyIterable, readable
from sampling_async._bulk.invites import Inviter
from sampling_async._bulk.options import BULK, BulkOptions, asked_pairs, options_of, total_of
from sampling_async._bulk.source import ChunkSource, FanOutSource, checked_request, source_of
from sampling_async._bulk.stream import OutcomeStream
from sampling_async._calls import reports
from sampling_async._calls.attempt import Feedback
from sampling_async._calls.call import Caller, Common, InviteOwners
from sampling_async._calls.quotas import QuotasReader, SurveyStream
from sampling_async._calls.recontact import PageReader, RecontactStream
from sampling_async._calls.reports import Hooks
from sampling_async._calls.retry import RetryBudget, RetryPolicy
from sampling_async._contract.checks import (
    number_above_0,
    require_flags,
    require_functions,
    require_instance,
    shown,
    text_of,
    whole_number,
)
from sampling_async._contract.errors import DecodeError, Endpoint, InvalidRequestError
from sampling_async._contract.logs import panel_name_of
from sampling_async._contract.records import safe_repr
from sampling_async._journal.run import Recorder, Replay
from sampling_async._json.converter import warm_up
from sampling_async._log import follow_environment
from sampling_async._pacing.gate import Gate, Permit
from sampling_async._pacing.loops import loop_clock
from sampling_async._pacing.outage import Away, Outage
from sampling_async._pacing.patience import OutagePolicy
from sampling_async._pacing.turns import Lane
from sampling_async._protocol import requests
from sampling_async._protocol.requests import MAX_QUOTA_IDS, InviteRequest, member_code_of, quota_id_of
from sampling_async._snapshot import Connections, Snapshot
from sampling_async._telemetry.providers import telemetry_of
from sampling_async._wire.address import (
    Secret,
    base_url_of,
    checked_headers,
    guid_of,
    hidden_headers,
    hide_secrets,
    idle_seconds_of,
    proxy_of,
    require_https_through,
)
from sampling_async._wire.bodies import BodyLimits
from sampling_async._wire.clients import checked_transport
from sampling_async._wire.given_client import checked_client
from sampling_async._wire.session import Session, Timeouts
from sampling_async._wire.trust import checked_context, context_of_files

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType

    from sampling_async._bulk.asked import RequestedPairs
    from sampling_async._bulk.options import Goal, Repeats
    from sampling_async._calls.reports import AttemptReport, CallReport
    from sampling_async._contract.checks import Text
    from sampling_async._contract.records import Invite, Quotas, RecontactMembers, Survey
    from sampling_async._contract.settings import PartnerSettings
    from sampling_async._journal.journal import Journal
    from sampling_async._pacing.latency import Percentiles
    from sampling_async._profiles.record import PanelProfile
    from sampling_async._protocol.results import BulkInviteResult
    from sampling_async._telemetry.otel import Telemetry
    from sampling_async._watch.watch import QuotaWatch
    from sampling_async._wire.clients import Transport
    from sampling_async._wire.given_client import HttpClient


class SamplingClient:
    """A client of one External Sampling Service for one partner panel.

    Make one client for each event loop and share it: one limit applies to all its calls. Use it as
    `async with SamplingClient(...) as client`, or call `aclose()` at the end.

    Args:
        base_url: The service's address, without the paths of the contract. It must be https; http is allowed
            for loopback.
        panel_guid: The PanelGUID, issued by the operator for a panel and culture.
        api_key: The API_AUTH_KEY, a Guid. It is sent to `base_url` only, and no repr or error shows it.
        max_concurrency: The most requests that may be in flight at once, over all calls of this client. If it
            is 8 or more, up to two single calls may exceed it while bulks run. Below it, the limit adapts to
            what the service can take, see `snapshot()`. For several processes that keep one limit together, see
            `share()`.
        timeouts: Time limits of one attempt.
        retry: Whether and how failed calls are repeated.
        outage: What to do during an outage of the service.
        limits: The largest response bodies that are accepted, in bytes.
        http_client: An `httpx.AsyncClient` of yours, or one of httpx2, that sends the requests, with all that
            it was configured with: headers, `auth=`, event hooks, mounts, proxies, TLS, HTTP/2. It is never
            closed by this client. The address, the key (to `base_url` only), the time limits and that redirects
            are not followed stay as they are here. Default: a client of this package's own, over an engine that
            knows whether anything was sent.
        transport: A transport of httpx or httpx2, such as a mock or an ASGI application. It is short for
            `http_client=httpx.AsyncClient(transport=...)`, but it is closed with this client, and agents that
            watch httpx learn nothing. It has its own settings for proxy and TLS.
        headers: More headers for each request, such as a gateway in front of the service asks for. No log or
            error shows their values.
        user_agent: The User-Agent. Default: `sampling-async/` and its version.
        proxy: An HTTP proxy, `http://host:3128` or `http://user:password@host:3128`; no repr or error shows
            the credentials. For an https service the proxy opens a tunnel (CONNECT) and cannot read the
            traffic; for an http service it sends the requests itself. `from_env` reads SAMPLING_PROXY from the
            environment; HTTPS_PROXY is not used.
        ssl_context: The TLS settings, for private authorities or client certificates. The client sets it to
            offer HTTP/1.1 by ALPN. Default: certifi's authorities, or those in SSL_CERT_FILE or SSL_CERT_DIR.
        idle_seconds: How long an idle connection is kept. Choose less than the time after which the service
            closes it. If the service closes connections sooner, the client reuses them for less time.
        allow_http: Allow to send the key unencrypted to hosts other than loopback.
        name: The name of the panel, such as "us", if you have several clients. It appears in the repr, in log
            messages, in `sampling-async top`, and as `sampling.panel` in spans and metrics.
        telemetry: Whether to make spans and metrics for OpenTelemetry (extra `otel`), or a `Telemetry` with
            providers of your own.
        on_attempt: Called after each attempt, with an `AttemptReport`.
        on_outcome: Called after each call, and after each request of a bulk, with a `CallReport`. Both hooks
            are plain functions that must return at once. If one raises, this is logged once, and the call goes
            on.
        clock: Returns seconds from any start; default, the event loop's clock.
        sleep: Waits a number of seconds; default, the event loop's sleep.
        random: Returns numbers from 0 to 1, for the jitter of the backoff.

    Raises:
        InvalidRequestError: An argument is invalid. The message never repeats keys and addresses.
    """

    def __init__(
        self,
        base_url: Text,
        *,
        panel_guid: Text,
        api_key: Text,
        max_concurrency: int = 8,
        timeouts: Timeouts | None = None,
        retry: RetryPolicy | None = None,
        outage: OutagePolicy | None = None,
        limits: BodyLimits | None = None,
        http_client: HttpClient | None = None,
        transport: Transport | None = None,
        headers: Mapping[str, Text] | None = None,
        user_agent: str | None = None,
        proxy: Text | None = None,
        ssl_context: ssl.SSLContext | None = None,
        idle_seconds: float = 4.0,
        allow_http: bool = False,
        name: str | None = None,
        telemetry: bool | Telemetry = False,
        on_attempt: Callable[[AttemptReport], object] | None = None,
        on_outcome: Callable[[CallReport], object] | None = None,
        clock: Callable[[], float] | None = None,
        sleep: Callable[[float], Awaitable[object]] = anyio.sleep,
        random: Callable[[], float] = _random.random,
    ) -> None:
        key, way = Secret.of(api_key), None if proxy is None else Secret.of(proxy)
        hidden = hidden_headers(headers)
        # Error reports may show the local variables of each frame. So the plain texts are deleted before any
        # check below can raise.
        del api_key, proxy, headers
        more, agent = checked_headers(hidden, user_agent)
        key = guid_of(key, "api_key")
        whole_number(max_concurrency, "max_concurrency")
        require_instance(allow_http, bool, "allow_http", "True or False")
        _require_policies(timeouts, retry, outage)
        require_instance(limits, BodyLimits | None, "limits", "a BodyLimits, such as BodyLimits(decoded=2**26)")
        require_functions(on_attempt=on_attempt, on_outcome=on_outcome, clock=clock, or_none=True)
        require_functions(sleep=sleep, random=random)
        self._name = panel_name_of(name)
        self._panel_guid = guid_of(panel_guid, "panel_guid").reveal()
        self._base_url = base_url_of(base_url, allow_http=allow_http)
        if http_client is not None and transport is not None:
            raise InvalidRequestError("give http_client or transport, not both: a client has its own transport")
        yours = "http_client" if http_client is not None else "transport" if transport is not None else ""
        if yours and (way is not None or ssl_context is not None):
            raise InvalidRequestError(
                f"proxy and ssl_context cannot be combined with your own {yours}; give them to that {yours}"
            )
        way_out = None if way is None else proxy_of(way)
        if way_out is not None:
            require_https_through(way_out, self._base_url, allow_http=allow_http)
        # What `share` makes another session with. Of the key and the proxy's password it holds `Secret`s only.
        self._new_session = partial(
            Session,
            self._base_url,
            key,
            timeouts=timeouts or Timeouts(),
            limits=limits or BodyLimits(),
            http_client=None if http_client is None else checked_client(http_client, self._base_url),
            transport=None if transport is None else checked_transport(transport),
            headers=more,
            user_agent=agent,
            idle_seconds=idle_seconds_of(idle_seconds),
            proxy=way_out,
            tls=None if ssl_context is None else checked_context(ssl_context),
        )
        self._outage_policy, self._retry_policy = outage or OutagePolicy(), retry or RetryPolicy()
        self._clock, self._sleep, self._random = clock, sleep, random
        self._telemetry = telemetry_of(telemetry)
        self._on_attempt, self._on_outcome = on_attempt, on_outcome
        warm_up()
        follow_environment()
        self._make_parts(max_concurrency)

    def _make_parts(self, max_concurrency: int, shares: int = 1) -> None:
        """Make the parts that no client shares but its views: connections, limits, the retry budget."""
        self._is_view = False
        clock, sleep, random = self._clock or loop_clock(), self._sleep, self._random
        self._session = self._new_session(concurrency=max_concurrency)
        self._outage = Outage(
            self._outage_policy,
            self._send_probe,
            under_way=max_concurrency,
            clock=clock,
            sleep=sleep,
            random=random,
            name=self._name,
        )
        self._gate = Gate(
            max_concurrency,
            clock=clock,
            sleep=sleep,
            random=random,
            outage=self._outage,
            shares=shares,
            name=self._name,
        )
        self._gate.kind(BULK)  # made here, because `snapshot` may look for it in another thread
        self._common = Common(
            InviteOwners(), Feedback(self._gate, self._outage), RetryBudget(self._retry_policy)
        )
        self._make_caller(_gauges(weakref.ref(self)))

    def _make_caller(self, gauges: Callable[[], Mapping[str, float]] | None) -> None:
        """Make the parts that each client has of its own."""
        self._caller = Caller(
            self._session,
            self._gate,
            self._outage,
            self._retry_policy,
            self._common,
            clock=self._gate.clock,
            sleep=self._sleep,
            random=self._random,
            patience=self._outage_policy.patience,
            hooks=self._new_hooks(gauges),
            name=self._name,
        )
        self._quotas = QuotasReader(self._caller)

    def _new_hooks(self, gauges: Callable[[], Mapping[str, float]] | None) -> Hooks | None:
        telemetry = self._telemetry or reports.instrumented
        if telemetry is None and self._on_attempt is None and self._on_outcome is None:
            return None
        url, spans = self._base_url, None
        if telemetry is not None:
            port = url.port or {"https": 443, "http": 80}[url.scheme]
            spans = telemetry.of_client(url.host, port, gauges, self._name)
        return Hooks(self._on_attempt, self._on_outcome, spans, self._name)

    @classmethod
    def from_env(cls, *, profile: str | PanelProfile | None = None, **overrides: Any) -> Self:
        """Make a client from SAMPLING_BASE_URL, SAMPLING_PANEL_GUID and SAMPLING_API_KEY, or from a profile.

        Three more variables are optional: SAMPLING_PROXY is the `proxy`; SAMPLING_CA_FILE is a PEM file of the
        authorities to trust, in place of all others; SAMPLING_CLIENT_CERT is a PEM file with a client
        certificate and its key, not encrypted. All three are ignored if `http_client` or `transport` is given,
        and the two files are ignored if `ssl_context` is given.

        Args:
            profile: The name of a panel in the file of profiles, or a `PanelProfile`. It gives address, panel
                and key, and more. Default: SAMPLING_PROFILE. With an empty name, no profile is used.
            overrides: Arguments of the constructor, `base_url` included. They replace the environment's values.

        Raises:
            InvalidRequestError: A variable is missing, an argument is invalid, or a file cannot be used. The
                message names the variable and the file. Or an argument or a variable names another address or
                panel than the profile.
        """
        # This comes first: error reports may show the local variables of this frame.
        hide_secrets(overrides)
        from sampling_async._profiles.file import completed, proxy_setting, setting  # noqa: PLC0415  as for watches

        panel = completed(profile, overrides)
        names = {name: f"SAMPLING_{name.upper()}" for name in ("base_url", "panel_guid", "api_key")}
        missing = [
            name for name, variable in names.items() if not (overrides.get(name) or os.environ.get(variable))
        ]
        if missing:
            variables, arguments = ", ".join(names[name] for name in missing), ", ".join(missing)
            raise InvalidRequestError(
                f"the environment has no {variables}; set what is missing, or give {arguments}"
            )
        for name, variable in names.items():
            overrides[name] = overrides.get(name) or os.environ[variable]
        overrides["api_key"] = Secret.of(overrides["api_key"])
        if overrides.get("transport") is None and overrides.get("http_client") is None:
            if overrides.get("proxy") is None:
                overrides["proxy"] = proxy_setting(panel)
            if overrides.get("ssl_context") is None:
                files = (setting(panel, name) for name in ("ca_file", "client_cert"))
                overrides["ssl_context"] = context_of_files(*files)
        return cls(**overrides)

    def share(self, of: int) -> Self:
        """Make a client with the same settings and a share of this one's `max_concurrency`.

        It is for programs of several processes (workers of Dask, Ray, Celery) that keep one limit together. If
        each of 8 workers does this, they have at most 64 requests in flight:

            async with SamplingClient.from_env(max_concurrency=64).share(of=8) as client: ...

        `max_concurrency` is divided, and rounded down: a third of 10 is 3. So is the number of requests with
        which a client begins, but each begins with one at least. The new client is independent.
        It has its own connections, and its owner must close it. It measures for itself: its limit below
        `max_concurrency`, its requests per second, and outages, in which each share sends its own probe. Each
        share has a whole retry budget of its own (`RetryPolicy.budget`), so 8 shares may make 8 times the
        retries. This client may be unused, in use or closed.

        A subclass's `__init__` is not called. What it set on this client is the same object in the new one.

        Args:
            of: The number of shares, 1 or more: how many clients run at the same time, over all processes.

        Raises:
            InvalidRequestError: `of` is no whole number from 1, or larger than `max_concurrency`. Or this
                client was given a `transport`: it would be closed with the first of the clients.
        """
        whole_number(of, "of")
        maximum = self._gate.maximum
        if of > maximum:
            raise InvalidRequestError(
                f"of must be at most max_concurrency, which is {maximum}, not {shown(of)}: each share needs at "
                "least one request, and the sum of the shares must not exceed the limit; raise max_concurrency "
                "to the number of shares, or make fewer of them"
            )
        if self._new_session.keywords["transport"] is not None:
            raise InvalidRequestError(
                "share() cannot share a transport, because that is closed with its client; give http_client=, "
                f"or each client its own transport and max_concurrency={maximum // of}"
            )
        # Not `type(self)(...)`: a subclass may take other arguments, and may refuse to be copied or pickled.
        share = object.__new__(type(self))
        vars(share).update(vars(self))
        share._make_parts(maximum // of, shares=self._gate.shares * of)
        return share

    def with_options(
        self,
        *,
        name: str | None = None,
        panel_guid: Text | None = None,
        timeouts: Timeouts | None = None,
        retry: RetryPolicy | None = None,
        outage: OutagePolicy | None = None,
        on_attempt: Callable[[AttemptReport], object] | None = None,
        on_outcome: Callable[[CallReport], object] | None = None,
        http_client: None = None,
    ) -> Self:
        """Make a client with other options over the same connections.

        Both keep one limit together: `max_concurrency`, what was measured of the service, its holds and its
        outages. So five panels, or a campaign and the clicks of a web page, share what the service can take:

            quick = client.with_options(name="clicks", outage=OutagePolicy(patience=0))
            panels = [client.with_options(name=name, panel_guid=guid) for name, guid in guids.items()]

        What is not given is taken from this client. Closing the new client ends its own calls and leaves this
        one open. Closing the one that was made first closes all. A new client need not be closed.

        A subclass's `__init__` is not called. What it set on this client is the same object in the new one.

        Args:
            name: As for the constructor.
            panel_guid: Another panel with the same API_AUTH_KEY. A refused panel does not stop the others.
            timeouts: Time limits of one attempt.
            retry: Whether and how failed calls are repeated. The new client gets a retry budget of its own.
            outage: How long bulks wait for the end of an outage (`patience`). When an outage begins, and how it
                is probed, is up to the first client.
            on_attempt: As for the constructor, in place of this client's hook.
            on_outcome: Likewise.
            http_client: Is refused: another one has other connections, whose limit the two could not keep
                together.

        Raises:
            InvalidRequestError: An argument is invalid.
        """
        if http_client is not None:
            raise InvalidRequestError(
                "with_options() takes no http_client: both clients use the connections of the first one, and "
                "keep one limit together; give http_client= to another SamplingClient"
            )
        _require_policies(timeouts, retry, outage)
        require_functions(on_attempt=on_attempt, on_outcome=on_outcome, or_none=True)
        view = object.__new__(type(self))
        vars(view).update(vars(self))
        view._name = panel_name_of(name) or self._name
        if panel_guid is not None:
            view._panel_guid = guid_of(panel_guid, "panel_guid").reveal()
        view._outage_policy = outage or self._outage_policy
        if retry is not None:
            view._retry_policy, view._common = retry, evolve(self._common, budget=RetryBudget(retry))
        view._on_attempt, view._on_outcome = on_attempt or self._on_attempt, on_outcome or self._on_outcome
        timeouts = timeouts or self._session.timeouts
        view._new_session = partial(self._new_session, timeouts=timeouts)  # for `share`
        view._session = self._session.view(timeouts)
        view._is_view = True
        view._make_caller(None)
        return view

    @property
    def name(self) -> str | None:
        """The name of the panel, as given."""
        return self._name

    @safe_repr
    def __repr__(self) -> str:
        state = "closed" if self._session.closed else f"{self._gate.at_work} of {self._gate.maximum} running"
        whose = f"{self._name} at {self._base_url.host}" if self._name else self._base_url.host
        return f"<SamplingClient {whose}: {state}, {self._gate.in_wait} waiting>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the client. Running calls end with `ClientClosedError`. This may be called more than once.

        The clients that `with_options` made from it are closed too. One of those is closed alone.
        """
        # This wakes the tasks that wait for a hold to end. They resume in the next await, and find the session
        # closed by then.
        if not self._is_view:
            self._gate.close(wakes=self._session.is_in_its_loop)
        await self._session.aclose()

    async def _send_probe(self, seconds: float) -> Away | None:
        """Send Get Settings once, to find out whether an outage has ended; see `Outage`."""
        return await self._caller.attempts.probe(requests.get_settings(self._panel_guid), seconds)

    def snapshot(self) -> Snapshot:
        """Return the client's state now: limits, waiting attempts, retries left, latency, connections."""
        limit, rate = self._gate.kind(BULK).adaptive, self._gate.kind(BULK).pace.rate
        line = limit.latency.line
        return Snapshot(
            limit=limit.limit,
            max_concurrency=limit.maximum,
            running=self._gate.at_work,
            waiting=self._gate.in_wait,
            held_for=self._gate.held_for(),
            breaker="open" if self._outage.is_on else "closed",
            away_for=self._outage.away_for(),
            requests_per_second=None if rate == inf else rate,
            retry_tokens=self._caller.budget.tokens,
            seconds_per_request=None if line is None else line.a,
            seconds_per_id=None if line is None else line.b,
            attempts=self._caller.feedback.ended,
            failures=self._caller.feedback.failed,
            too_late=self._caller.feedback.too_late,
            unused_invites=self._caller.feedback.unused,
            latency=self._latency(),
            connections=self._connections(),
        )

    def serve_snapshots(self, path: str | os.PathLike[str]) -> AbstractAsyncContextManager[object]:
        """Show this client's snapshots to other processes while the block is open.

            async with SamplingClient.from_env() as client, client.serve_snapshots("/run/user/1000/night.sock"):
                ...

        `sampling-async top /run/user/1000/night.sock` then shows them live. Nothing is computed until somebody
        connects. Only the same user can connect; a line holds numbers and the host of the service.

        Args:
            path: The path of a Unix socket to make, of at most about 100 characters. A socket that is there is
                replaced.

        Raises:
            OSError: When the block is entered, the socket cannot be made.
        """
        from sampling_async._telemetry.board import SnapshotServer  # noqa: PLC0415  few need it

        return SnapshotServer(path, self._base_url.host, self._name, self.snapshot)

    def _latency(self) -> dict[Endpoint, Percentiles]:
        latency: dict[Endpoint, Percentiles] = {}
        # A copy in one step: another thread may ask, while the loop's adds an endpoint.
        for endpoint, histogram in tuple(self._caller.feedback.latency.items()):
            percentiles = histogram.percentiles(self._gate.clock())
            if percentiles is not None:
                latency[endpoint] = percentiles
        return latency

    def _connections(self) -> Connections | None:
        engine = self._session.engine
        if engine is None:
            return None
        traffic = engine.traffic
        return Connections(
            open=traffic.opened - traffic.closed,
            idle=engine.idle,
            opened=traffic.opened,
            reused=traffic.reused,
            bytes_sent=traffic.sent,
            bytes_received=traffic.received,
        )

    def _interactive(self, endpoint: Endpoint, deadline: float | None) -> Permit:
        return Permit(self._gate, self._gate.kind(endpoint).interactive, self._until(deadline))

    def _until(self, deadline: float | None) -> float:
        if deadline is None:
            return inf
        return self._gate.clock() + number_above_0(deadline, "deadline", "seconds")

    async def get_quotas(
        self, *, include_routables: bool = True, deadline: float | None = None, strict: bool = False
    ) -> Quotas:
        """Return the surveys and quotas that need supply (endpoint Get Quotas).

        What you still hold of an earlier inventory is not decoded again where it is the same. If the service
        gives an ETag, the next call sends it, and a 304 returns the inventory that you hold. After ten minutes
        of 304 the inventory is read whole again.

        A survey with a null where the interface has a value, or without the field, is left out, and a warning
        names its path (`$.Surveys[3].Quotas[0].QuotaID`). `quotas.left_out` has an error for each such survey.

        Args:
            include_routables: Whether the response includes conditions on routable questions.
            deadline: Seconds the whole call may take: queueing, attempts and the pauses between them.
            strict: Raise the `DecodeError` of such a survey, and leave out none.

        Raises:
            SamplingError: The call failed after its retries.
            DecodeError: The response breaks the interface in another way, or all its surveys are left out.
        """
        call = requests.get_quotas(self._panel_guid, include_routables=include_routables, strict=strict)
        return await self._quotas.get(call, self._interactive(call.endpoint, deadline), strict=strict)

    async def iter_surveys(
        self,
        *,
        include_routables: bool = True,
        deadline: float | None = None,
        strict: bool = False,
        on_left_out: Callable[[DecodeError], object] | None = None,
    ) -> AsyncGenerator[Survey, None]:
        """Yield the surveys of Get Quotas as they arrive, and keep only the latest part of them in memory.

        The call is repeated as `RetryPolicy` says until the first surveys arrive. A failure after that is
        raised. To stop early, use `contextlib.aclosing`, which closes the connection at once; without it, the
        connection stays open until the generator is collected. The service has to wait while you work on a
        survey. If that is not acceptable, use `get_quotas()`.

        Args:
            include_routables: Whether the response includes conditions on routable questions.
            deadline: Seconds the whole call may take. Your own time between surveys does not count.
            strict: As for `get_quotas`.
            on_left_out: Called with the error of each survey that is left out.

        Raises:
            SamplingError: The call failed, or the response ended too early. Surveys yielded before are valid.
        """
        call = requests.get_quotas(self._panel_guid, include_routables=include_routables, strict=strict)
        permit, reported = self._interactive(call.endpoint, deadline), 0
        stream = SurveyStream(self._caller, call, permit, strict=strict)
        try:
            while True:
                surveys = await stream.next()
                if on_left_out is not None:
                    for error in stream.left_out[reported:]:
                        on_left_out(error)
                    reported = len(stream.left_out)
                if not surveys:
                    return
                # By index, and forgotten: the frame is in the traceback of an error, and who keeps the error
                # would keep its variables.
                for at in range(len(surveys)):
                    yield surveys[at]
                del surveys
        finally:
            await stream.aclose()

    def watch_quotas(
        self,
        every: float = 60.0,
        *,
        include_routables: bool = True,
        strict: bool = False,
        max_age: float | None = None,
        cache: str | os.PathLike[str] | None = None,
        cache_max_age: float = 86_400.0,
        wall_clock: Callable[[], float] = time.time,
    ) -> QuotaWatch:
        """Poll Get Quotas in the background, and hold the newest good inventory.

            async with client.watch_quotas() as watch:
                await watch.ready()
                async with watch.changes() as changes:
                    async for change in changes: ...

        Args:
            every: Seconds from a success to the next poll, give or take 10 %.
            include_routables: As for `get_quotas`.
            strict: As for `get_quotas`: a poll with such a survey fails, and the inventory before it stays.
            max_age: Seconds after which an inventory that cannot be renewed counts as failing. Default: ten
                times `every`.
            cache: A file that keeps the last good inventory for the next start. It is loaded as stale. Only its
                owner can read it. A file that cannot be used is ignored, and a warning is logged.
            cache_max_age: Seconds after which the inventory of that file is too old; default, one day.
            wall_clock: Returns seconds since 1970, to compare with times of other clocks.

        Raises:
            InvalidRequestError: A number is not above 0, or `cache` is no path.
        """
        # Imported here: a process that only asks for invites starts sooner without watches and journals.
        from sampling_async._watch.cache import CacheFile  # noqa: PLC0415
        from sampling_async._watch.watch import QuotaWatch  # noqa: PLC0415

        file = None
        require_flags(include_routables=include_routables, strict=strict)
        number_above_0(cache_max_age, "cache_max_age", "seconds")
        if cache is not None:
            owner = f"{self._base_url} {self._panel_guid} {include_routables}"
            file = CacheFile(cache, owner, cache_max_age)
        return QuotaWatch(
            partial(self.get_quotas, include_routables=include_routables, strict=strict),
            every=every,
            max_age=max_age,
            cache=file,
            clock=self._gate.clock,
            sleep=self._sleep,
            random=self._random,
            wall_clock=wall_clock,
        )

    async def generate_invite(
        self, member_code: Text, quota_id: SupportsIndex, *, deadline: float | None = None
    ) -> Invite:
        """Return an invite of one member to one quota (endpoint Generate Invite).

        Args:
            member_code: The member.
            quota_id: The quota.
            deadline: Seconds the whole call may take: queueing, attempts and the pauses between them.

        Raises:
            InvalidRequestError: The member code or quota ID cannot be sent.
            BadRequestError: The service refused; `result_code` says why, see `ResultCode`.
            SamplingError: The call failed. With `delivery == "unknown"` an invite may exist.
        """
        member_code = member_code_of(member_code)
        call = requests.generate_invite(self._panel_guid, member_code, quota_id_of(quota_id))
        track, started = self._caller.track(call.endpoint), self._caller.clock()

        def check(invite: Invite) -> None:
            self._caller.assign_links(member_code, (invite.url,), call, track, path="$.URL", started=started)

        return await self._caller.call(call, self._interactive(call.endpoint, deadline), track, check=check)

    async def bulk_invite(
        self,
        member_code: Text,
        quota_ids: Iterable[SupportsIndex],
        *,
        chunk_size: int = MAX_QUOTA_IDS,
        goal: Goal | None = None,
        deadline: float | None = None,
        weight: float = 1.0,
    ) -> BulkInviteResult:
        """Request invites of one member to many quotas, in parallel requests (endpoint Bulk Invite).

        A failed request becomes outcomes, not an exception. After a 403 no more requests are sent.

        Args:
            member_code: The member.
            quota_ids: Any number of quota IDs. A repeated ID is sent once, and its outcome appears at each of
                its places.
            chunk_size: Quota IDs in one request, 1 to 100.
            goal: "throughput", the default, sends as few requests as possible. "first" uses smaller chunks if
                permits are free, so that the last response comes as early as possible: 100 IDs with 8 free
                permits become 8 requests.
            deadline: Seconds until all outcomes must be known. With a deadline the default goal is "first". IDs
                not sent in time end `not_sent`; IDs sent and without a response in time end `unknown`.
            weight: The share of permits, compared with other running bulks, which have 1. It is approximate.

        Returns:
            One outcome for each ID given, in the order given.

        Raises:
            InvalidRequestError: The member code or a quota ID cannot be sent. Nothing was sent.
        """
        options, began = self._options(chunk_size, goal, deadline, weight), self._gate.clock()
        request = await checked_request(member_code, quota_ids)
        source = FanOutSource([request], size=options.size, size_of=options.size_of)
        async with self._stream(self._inviter(), source, options, len(request.quota_ids)) as stream:
            return await stream.result(request, began)

    def _for_clicks(self) -> ClickInvites:
        """Return the requests for members who wait: in no outage, and not again what may have worked."""
        once = evolve(self._retry_policy, retry_ambiguous=False) if self._retry_policy.retry_ambiguous else None
        view = self.with_options(outage=OutagePolicy(patience=0), retry=once)
        return ClickInvites(view._inviter, view._gate, view._session.until_closed, view._caller.feedback)

    def stream_bulk_invite(
        self,
        member_code: Text,
        quota_ids: AnyIterable[SupportsIndex],
        *,
        chunk_size: int = MAX_QUOTA_IDS,
        goal: Goal | None = None,
        deadline: float | None = None,
        weight: float = 1.0,
    ) -> OutcomeStream:
        """Request invites of one member to many quotas and yield the outcomes as they finish.

            async with client.stream_bulk_invite(member_code, quota_ids) as outcomes:
                async for outcome in outcomes: ...

        Args:
            member_code: The member.
            quota_ids: Quota IDs, iterable or async iterable. The input may be endless: memory does not grow
                with it. A collection is checked completely before anything is sent, and an ID repeated in it is
                sent once. With an iterator, an ID repeated within one chunk is sent once. An async generator is
                closed at the end.
            chunk_size: As for `bulk_invite`. A request is sent when its chunk is full, the last one when the
                input ends.
            goal: As for `bulk_invite`. "first" needs a collection, because the number of IDs must be known.
            deadline: As for `bulk_invite`. After it, nothing more is read from an iterator.
            weight: As for `bulk_invite`.

        Raises:
            InvalidRequestError: The member code or an ID of a collection cannot be sent. Nothing was sent.
        """
        options, inviter = self._options(chunk_size, goal, deadline, weight), self._inviter()
        source = source_of(
            member_code,
            readable(quota_ids, "quota_ids"),
            size=options.size,
            size_of=options.size_of,
            remaining=self._remaining(options, inviter),
        )
        total = len(quota_ids) if isinstance(quota_ids, Collection) else None
        return self._stream(inviter, source, options, total)

    def fan_out(
        self,
        requests: AnyIterable[InviteRequest],
        *,
        chunk_size: int = MAX_QUOTA_IDS,
        goal: Goal | None = None,
        deadline: float | None = None,
        weight: float = 1.0,
        journal: str | os.PathLike[str] | Journal | Recorder | None = None,
        repeats: Repeats = "once",
    ) -> OutcomeStream:
        """Request invites of many members, each to its own quotas, and yield the outcomes as they finish.

            async with client.fan_out(requests) as outcomes:
                async for outcome in outcomes: ...

        Args:
            requests: `InviteRequest(member_code, quota_ids)`, iterable or async iterable. A pair of member and
                quota is sent once, see `repeats`. An async generator is closed at the end.
            chunk_size: As for `bulk_invite`. One request to the service is about one member.
            goal: As for `bulk_invite`.
            deadline: As for `bulk_invite`. After it, nothing more is read from an iterator.
            weight: As for `bulk_invite`.
            journal: A file that records what is sent and what came back. If the run is killed, start it again
                with the same input and the same journal: recorded outcomes are returned from the journal, IDs
                in flight at that time are `unknown`, and the remaining IDs are sent. What is recorded and not
                in the input comes last. See `Journal`. A campaign gives its ledger here.
            repeats: What happens to a pair that comes again in a later request. "once": it is not sent again,
                and its later place gets the outcome of the first; if that one ended `not_sent`, the later place
                is sent. "ask": it is sent again, which may make a second invite. An ID repeated within one
                request is sent once in any case. With a journal, "once" holds for all of its runs. Without one,
                the pairs are kept in memory, up to a bound: 9 bytes an ID in requests of 100 (360 in requests
                of one), up to 64 MiB, which is 7 million IDs (165,000), and 330 bytes an invite, for the latest
                100,000. Of older invites a repetition is only noticed: it is not sent, and is `unknown`. A
                repetition of older requests is sent again; that this may happen is logged once.

        Raises:
            InvalidRequestError: `repeats` is neither of the two, or is "ask" with a journal, which sends each
                pair once. While iterating: an item of the input is not an InviteRequest.
            JournalError: When entering the block, the journal cannot be used. While iterating or when leaving,
                it could not be written.
        """
        recorder = None if journal is None else _recorder_of(journal)
        replay = recorder if isinstance(recorder, Replay) else None
        asked = asked_pairs(repeats, has_journal=recorder is not None)
        if recorder is not None:
            recorder.claim(str(self._base_url), self._panel_guid)
        options = self._options(chunk_size, goal, deadline, weight)
        inviter = self._inviter(recorder, replay, asked)
        source = FanOutSource(
            readable(requests, "requests"),
            size=options.size,
            size_of=options.size_of,
            remaining=None if isinstance(requests, Collection) else self._remaining(options, inviter),
            replay=replay,
            asked=asked,
        )
        return self._stream(inviter, source, options, total_of(requests))

    def _options(
        self, chunk_size: int, goal: Goal | None, deadline: float | None, weight: float
    ) -> BulkOptions:
        return options_of(self._gate, self._until(deadline), chunk_size=chunk_size, goal=goal, weight=weight)

    def _remaining(self, options: BulkOptions, inviter: Inviter) -> Callable[[], float]:
        """Return a function that returns the seconds in which an iterator may still be read."""
        # After an outage that was too long, the result is -inf: reading more IDs has no use.
        return lambda: -inf if inviter.has_given_up else options.until - self._gate.clock()

    def _inviter(
        self,
        recorder: Recorder | None = None,
        replay: Replay | None = None,
        asked: RequestedPairs | None = None,
    ) -> Inviter:
        base_url = str(self._base_url)
        return Inviter(self._caller, self._panel_guid, recorder, replay, asked, base_url=base_url)

    def _stream(
        self, inviter: Inviter, source: ChunkSource, options: BulkOptions, total: int | None
    ) -> OutcomeStream:
        until_closed = self._session.until_closed if self._is_view else None
        lane = Lane(BULK, options.share, patience=self._outage_policy.patience, until_closed=until_closed)
        permit = partial(Permit, self._gate, lane, options.until)
        # One job more than can run: while all permits are held, the next job is drawn and waits for a permit.
        # As many again may wait for the disk.
        window = self._gate.maximum * (2 if inviter.is_recorded else 1) + 1
        return OutcomeStream(inviter, source, permit, window=window, total=total, clock=self._gate.clock)

    async def get_settings(self, *, deadline: float | None = None) -> PartnerSettings:
        """Return the partner's settings (endpoint Get Settings).

        Args:
            deadline: Seconds the whole call may take: queueing, attempts and the pauses between them.

        Raises:
            SamplingError: The call failed after its retries.
        """
        call = requests.get_settings(self._panel_guid)
        return await self._caller.call(call, self._interactive(call.endpoint, deadline))

    async def recontact_pages(
        self,
        quota_id: SupportsIndex,
        *,
        max_results: int | None = None,
        after: Text | None = None,
        deadline: float | None = None,
    ) -> AsyncGenerator[RecontactMembers, None]:
        """Yield the members of a recontact quota, page by page (endpoint Get Recontact Members For Quota).

        Args:
            quota_id: A quota of a survey with `is_survey_recontact`.
            max_results: Member codes in one page; keep it under 10000. None: the service's own default.
            after: The last member code already received. The list continues after it.
            deadline: Seconds that reading one page may take. Your own time between pages does not count.

        Raises:
            InvalidRequestError: An argument cannot be sent.
            PagingError: The list does not advance. To resume later, use the error's `cursor` as `after`.
            SamplingError: A page could not be read after its retries. Only that page was repeated.
        """
        reader = self._reader(quota_id, max_results, after, deadline)
        while not reader.done:
            yield await reader.read()

    async def recontact_members(
        self,
        quota_id: SupportsIndex,
        *,
        max_results: int | None = None,
        after: Text | None = None,
        deadline: float | None = None,
    ) -> AsyncGenerator[str, None]:
        """Yield the codes of the members of a recontact quota.

        The next page is read when all codes of the current page were taken. You may stop at any code and resume
        later with `after=` that code. Arguments and errors are those of `recontact_pages`.
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
        after: Text | None = None,
        deadline: float | None = None,
    ) -> RecontactStream:
        """Yield member codes like `recontact_members`, and read the next page while you work on this one.

            async with client.stream_recontact_members(quota_id) as codes:
                async for code in codes: ...

        Arguments and errors are those of `recontact_pages`.
        """
        pages = self.recontact_pages(quota_id, max_results=max_results, after=after, deadline=deadline)
        return RecontactStream(pages, text_of(after))

    def _reader(
        self, quota_id: SupportsIndex, max_results: int | None, after: Text | None, deadline: float | None
    ) -> PageReader:
        lane = Lane("recontact_members")

        def permit() -> Permit:
            # Each page gets a new deadline.
            return Permit(self._gate, lane, self._until(deadline))

        return PageReader(
            self._caller, self._panel_guid, quota_id, max_results=max_results, after=after, permit=permit
        )


def _require_policies(
    timeouts: Timeouts | None, retry: RetryPolicy | None, outage: OutagePolicy | None
) -> None:
    require_instance(timeouts, Timeouts | None, "timeouts", "a Timeouts, such as Timeouts(read=30)")
    require_instance(retry, RetryPolicy | None, "retry", "a RetryPolicy, such as RetryPolicy(max_attempts=3)")
    require_instance(outage, OutagePolicy | None, "outage", "an OutagePolicy, such as OutagePolicy(patience=5)")


def _recorder_of(journal: str | os.PathLike[str] | Journal | Recorder) -> Recorder:
    if isinstance(journal, Recorder):
        return journal
    from sampling_async._journal.journal import Journal, run_of  # noqa: PLC0415  as for watches

    return run_of(journal if isinstance(journal, Journal) else Journal(journal))


def _gauges(client: weakref.ref[SamplingClient]) -> Callable[[], Mapping[str, float]]:
    """Return a function that reads the values of the gauges. It does not keep the client alive."""

    def read() -> Mapping[str, float]:
        alive = client()
        if alive is None:
            return {"limit": 0, "waiting": 0, "retry_tokens": 0}
        now = alive.snapshot()
        return {"limit": now.limit, "waiting": now.waiting, "retry_tokens": now.retry_tokens}

    return read
