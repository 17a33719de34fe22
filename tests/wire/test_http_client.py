"""A user's own httpx client: what it was configured with holds, and what is ours stays ours."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import ssl
import traceback

import anyio
import doubles
import httpx
import httpx2
import pytest
import respx
import trustme
import wire

from sampling_async import (
    BadRequestError,
    ClientClosedError,
    InvalidRequestError,
    InviteRequest,
    OutagePolicy,
    RetryPolicy,
    SamplingClient,
    SamplingError,
    ServerError,
    Timeouts,
    TransportError,
    TransportTimeoutError,
    sync,
)
from sampling_async.simulator import Simulator

LIBRARIES = [pytest.param(httpx, id="httpx"), pytest.param(httpx2, id="httpx2")]
ONCE = RetryPolicy(max_attempts=1)
HOME = "https://service.example/prefix"


def client_of(http_client, url=HOME, **options) -> SamplingClient:
    given = {"panel_guid": doubles.PANEL, "api_key": doubles.KEY, "retry": ONCE, "http_client": http_client}
    return SamplingClient(url, **given | options)


class Seen:
    """A handler for mocks that keeps the requests."""

    def __init__(self, answer=None, library=httpx) -> None:
        self.requests = []
        self._answer = answer or (lambda _: library.Response(200, json=[]))

    def __call__(self, request):
        self.requests.append(request)
        return self._answer(request)


@pytest.mark.parametrize("library", LIBRARIES)
async def test_what_the_client_is_configured_with_holds(library):
    seen, hooked = Seen(library=library), []

    async def on_request(request):
        hooked.append((request.method, dict(request.headers)))

    async def on_response(response):
        hooked.append(response.status_code)

    http_client = library.AsyncClient(
        transport=library.MockTransport(seen),
        headers={"X-Gateway": "g1", "User-Agent": "panel/1.4"},
        auth=("user", "word"),
        event_hooks={"request": [on_request], "response": [on_response]},
    )
    async with http_client, client_of(http_client) as client:
        await client.get_settings()
        http_client.headers["X-Gateway"] = "g2"  # also what is changed later
        await client.get_settings()
    first = seen.requests[0]
    assert type(first) is library.Request
    assert first.url.raw_path.startswith(b"/prefix/IntegratedPanelService/api/Settings?partnerGUID=")
    assert [each.headers["x-gateway"] for each in seen.requests] == ["g1", "g2"]
    assert first.headers["authorization"].startswith("Basic ")
    assert (first.headers["user-agent"], first.headers["api_auth_key"]) == ("panel/1.4", doubles.KEY)
    assert (first.headers["accept"], first.headers["accept-encoding"]) == ("application/json", "gzip")
    assert hooked[1] == 200
    assert hooked[0][0] == "GET"


@pytest.mark.parametrize("library", LIBRARIES)
async def test_the_key_is_added_behind_hooks_and_flows(library):
    shown = []

    async def on_request(request):
        shown.append(str(request.headers.raw))

    async def on_response(response):
        shown.append(str(response.request.headers.raw))

    class Flow(library.Auth):
        def auth_flow(self, request):
            shown.append(str(request.headers.raw))
            response = yield request
            shown.append(str(response.request.headers.raw))

    seen = Seen(library=library)
    hooks = {"request": [on_request], "response": [on_response]}
    http_client = library.AsyncClient(transport=library.MockTransport(seen), auth=Flow(), event_hooks=hooks)
    async with http_client, client_of(http_client) as client:
        await client.get_settings()
    assert len(shown) == 4
    assert not [each for each in shown if doubles.KEY in each]
    assert seen.requests[0].headers["api_auth_key"] == doubles.KEY


@pytest.mark.parametrize("library", LIBRARIES)
async def test_the_key_goes_to_its_origin_only_wherever_a_hook_or_a_flow_sends_the_request(library):
    async def elsewhere(request):
        if "Settings" in request.url.path:
            request.url = library.URL("https://other.example/x")

    class Renewing(library.Auth):
        def auth_flow(self, request):
            token = yield library.Request("POST", "https://token.example/", headers=request.headers)
            request.headers["Authorization"] = f"Bearer {token.status_code}"
            yield request
            request.url = library.URL("http://service.example/")  # not https
            yield request

    seen = Seen(library=library)
    http_client = library.AsyncClient(
        transport=library.MockTransport(seen),
        headers={"API_AUTH_KEY": "of somebody else"},
        auth=Renewing(),
        event_hooks={"request": [elsewhere]},
    )
    async with http_client, client_of(http_client) as client:
        await client.get_settings()
        with pytest.raises(SamplingError):
            await client.bulk_invite("m", [1])
            await client.generate_invite("m", 1)
    found = [(each.url.scheme, each.url.host, each.headers.get("api_auth_key")) for each in seen.requests]
    assert ("https", "token.example", None) in found
    assert ("https", "other.example", None) in found
    assert ("http", "service.example", None) in found
    assert {key for scheme, host, key in found if (scheme, host) == ("https", "service.example")} == {
        doubles.KEY
    }


@pytest.mark.parametrize("library", LIBRARIES)
async def test_mounts_choose_the_transport_and_get_the_key(library):
    seen = Seen(library=library)
    mounts = {"https://service.example": library.MockTransport(seen)}
    async with library.AsyncClient(mounts=mounts, trust_env=False) as http_client:
        async with client_of(http_client) as client:
            assert len(await client.get_settings()) == 0
    assert seen.requests[0].headers["api_auth_key"] == doubles.KEY


@pytest.mark.parametrize(
    "location", ["https://other.example/", "http://[broken", "https://b\u00fc\u0300..x/", "//", ""]
)
async def test_redirects_are_not_followed_and_a_bad_location_is_no_matter(location):
    seen = Seen(lambda _: httpx.Response(302, headers={"Location": location.encode()}))
    http_client = httpx.AsyncClient(transport=httpx.MockTransport(seen), follow_redirects=True)
    async with http_client, client_of(http_client) as client:
        with pytest.raises(SamplingError, match="answered 302"):
            await client.get_settings()
    assert len(seen.requests) == 1


async def test_each_attempt_has_our_time_limits():
    seen = Seen()
    http_client = httpx.AsyncClient(transport=httpx.MockTransport(seen), timeout=1)
    async with http_client, client_of(http_client, timeouts=Timeouts(connect=3, read=7, write=5)) as client:
        await client.get_settings()
    assert seen.requests[0].extensions["timeout"] == {"connect": 3, "pool": 3, "read": 7, "write": 5}


@pytest.mark.parametrize("library", LIBRARIES)
async def test_the_client_stays_open(library):
    http_client = library.AsyncClient(transport=library.MockTransport(Seen(library=library)))
    async with client_of(http_client) as client:
        await client.get_settings()
        quick = client.with_options(name="quick")
        await quick.get_settings()
        async with client.share(of=2) as share:
            await share.get_settings()
    assert not http_client.is_closed
    await http_client.aclose()


async def test_a_client_that_its_owner_closes_is_told_so():
    http_client = httpx.AsyncClient(transport=httpx.MockTransport(Seen()))
    async with client_of(http_client) as client:
        await client.get_settings()
        await http_client.aclose()
        with pytest.raises(ClientClosedError, match="closed by its owner") as caught:
            await client.generate_invite("m", 1)
        (outcome,) = await client.bulk_invite("m", [1])
    assert (caught.value.delivery, outcome.status) == ("not_sent", "not_sent")


def closed():
    client = httpx.AsyncClient()
    anyio.run(client.aclose)
    return client


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        (httpx.Client, "an httpx.Client blocks the event loop"),
        (httpx2.Client, "an httpx.Client blocks the event loop"),
        (lambda: httpx.AsyncClient, "must be an httpx.AsyncClient, or one of httpx2, not <class"),
        (lambda: "https://x", "must be an httpx.AsyncClient"),
        (lambda: httpx.MockTransport(Seen()), "must be an httpx.AsyncClient"),
        (closed, "http_client is closed"),
        (lambda: httpx.AsyncClient(base_url="https://other.example"), "another host than"),
        (lambda: httpx.AsyncClient(base_url="http://service.example"), "another host than"),
        (lambda: httpx.AsyncClient(params={"a": "b"}), "params, which would change every request"),
    ],
)
def test_a_client_that_cannot_serve_is_refused_with_the_reason(given, rule):
    with pytest.raises(InvalidRequestError, match=rule):
        client_of(given())


def test_a_base_url_of_the_service_changes_nothing():
    assert client_of(httpx.AsyncClient(base_url="https://service.example/api/"))


@pytest.mark.parametrize("option", [{"transport": httpx.MockTransport(Seen())}, {"proxy": "http://proxy:1"}])
def test_what_belongs_to_the_client_is_not_given_besides(option):
    with pytest.raises(InvalidRequestError, match="http_client"):
        client_of(httpx.AsyncClient(), **option)


def test_with_options_and_the_blocking_client_say_why_they_take_none():
    client = client_of(httpx.AsyncClient())
    with pytest.raises(InvalidRequestError, match="keep one limit together"):
        client.with_options(http_client=httpx.AsyncClient())
    given = {"panel_guid": doubles.PANEL, "api_key": doubles.KEY, "http_client": httpx.AsyncClient()}
    with pytest.raises(InvalidRequestError, match="runs one of its own in a thread"):
        sync.SamplingClient(HOME, **given)
    with pytest.raises(InvalidRequestError, match="runs one of its own in a thread"):
        sync.SamplingClient.from_env(base_url=HOME, **given)


def test_from_env_takes_one_and_leaves_the_proxy_of_the_environment_to_it(monkeypatch):
    monkeypatch.setenv("SAMPLING_PROXY", "nonsense")
    given = {"panel_guid": doubles.PANEL, "api_key": doubles.KEY, "http_client": httpx.AsyncClient()}
    assert SamplingClient.from_env(base_url=HOME, **given)


def test_a_client_serves_one_event_loop():
    http_client = httpx.AsyncClient(transport=httpx.MockTransport(Seen()))

    async def use():
        async with client_of(http_client) as client:
            await client.get_settings()

    asyncio.run(use())
    with pytest.raises(InvalidRequestError, match="another event loop"):
        asyncio.run(use())


def test_a_client_whose_connections_belong_to_another_event_loop_is_refused():
    http_client = httpx.AsyncClient(trust_env=False)
    with wire.serve(wire.serve_each(lambda _: wire.answer(b"[]"))) as url:

        async def use_alone():
            await http_client.get(url)

        async def use():
            async with client_of(http_client, url) as client:
                await client.get_settings()

        with asyncio.Runner() as first:
            first.run(use_alone())
            with pytest.raises(InvalidRequestError, match="another event loop"), asyncio.Runner() as second:
                second.run(use())
            first.run(http_client.aclose())


def test_a_pool_smaller_than_our_limit_is_said_once(caplog):
    small = httpx.AsyncClient(limits=httpx.Limits(max_connections=4))
    client = client_of(small, max_concurrency=16)
    client.with_options(name="view")
    (record,) = [each for each in caplog.records if each.name == "sampling_async.wire"]
    assert record.levelno == logging.WARNING
    assert "at most 4 connections, fewer than max_concurrency=16" in record.getMessage()
    caplog.clear()
    client_of(small, max_concurrency=4)
    client_of(httpx.AsyncClient(transport=httpx.MockTransport(Seen())), max_concurrency=512)
    assert not caplog.records


# --- Whether anything was sent --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failing", "delivery"),
    [
        ("hook", "not_sent"),
        ("flow", "not_sent"),
        ("response hook", "unknown"),
        ("flow behind a response", "unknown"),
    ],
)
async def test_an_error_of_the_users_code_says_whether_the_request_was_sent(failing, delivery):
    async def fail(_):
        raise LookupError(doubles.KEY)

    class Flow(httpx.Auth):
        def auth_flow(self, request):
            if failing == "flow":
                raise LookupError
            yield request
            if failing == "flow behind a response":
                raise LookupError

    hooks = {"request": [fail] * (failing == "hook"), "response": [fail] * (failing == "response hook")}
    transport = httpx.MockTransport(Seen(lambda request: httpx.Response(200, json=doubles.bulk(request))))
    async with httpx.AsyncClient(transport=transport, auth=Flow(), event_hooks=hooks) as http_client:
        async with client_of(http_client, outage=OutagePolicy(patience=0)) as client:
            result = await client.bulk_invite("m", [1, 2])
    assert {outcome.status for outcome in result} == {delivery}
    assert {type(outcome.error) for outcome in result} == {TransportError}
    assert doubles.KEY not in str(result[0].error)


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("library", LIBRARIES)
async def test_a_hook_that_calls_raise_for_status_leaves_the_refusal_what_it_is(library, is_read):
    async def checked(response):
        if is_read:
            await response.aread()
        response.raise_for_status()

    answers = iter([(400, {"Result": "NO_QUOTA_ID", "ResultCode": 10}), (503, {})])

    def answer(_):
        status, body = next(answers)
        return library.Response(status, stream=library.ByteStream(json.dumps(body).encode()))

    hooks = {"response": [checked]}
    transport = library.MockTransport(answer)
    async with library.AsyncClient(transport=transport, event_hooks=hooks) as http_client:
        async with client_of(http_client) as client:
            with pytest.raises(BadRequestError) as caught:
                await client.generate_invite("m", 1)
            with pytest.raises(ServerError):
                await client.generate_invite("m", 1)
    assert caught.value.result_code == (10 if is_read else None)


@pytest.mark.parametrize("library", LIBRARIES)
async def test_a_refused_token_is_no_response_of_the_service(library):
    class Token(library.Auth):
        def auth_flow(self, request):
            token = yield library.Request("POST", "https://token.example/")
            token.raise_for_status()
            yield request

    transport = library.MockTransport(Seen(lambda _: library.Response(403, json={}), library))
    async with library.AsyncClient(transport=transport, auth=Token()) as http_client:
        async with client_of(http_client, outage=OutagePolicy(patience=0)) as client:
            (outcome,) = await client.bulk_invite("m", [1])
    assert (outcome.status, type(outcome.error)) == ("not_sent", TransportError)
    assert "HTTPStatusError" in str(outcome.error)


async def test_a_mistake_in_a_hook_is_no_outage_to_wait_for():
    async def mistaken(request):
        request.headers["nothing"]

    transport = httpx.MockTransport(Seen())
    async with httpx.AsyncClient(transport=transport, event_hooks={"request": [mistaken]}) as http_client:
        given = {"panel_guid": doubles.PANEL, "api_key": doubles.KEY, "http_client": http_client}
        async with SamplingClient(HOME, **given) as client:
            with anyio.fail_after(30):
                result = await client.bulk_invite("m", range(1, 1001))
    assert {outcome.status for outcome in result} == {"not_sent"}
    assert "http_client raised KeyError before anything was sent" in str(result[0].error)


def unused_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def resets_at_once(connection: wire.Connection) -> None:
    connection.reset()


@contextlib.contextmanager
def refused():
    yield f"http://127.0.0.1:{unused_port()}", {}


@contextlib.contextmanager
def unknown_host():
    yield "https://no-such-host.invalid", {}


@contextlib.contextmanager
def certificate_refused():
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    with wire.serve(wire.Silent(), tls=context) as url:
        yield url.replace("http:", "https:").replace("127.0.0.1", "localhost"), {}


@contextlib.contextmanager
def reset_before_the_first_byte():
    with wire.serve(resets_at_once) as url:
        yield url.replace("http:", "https:"), {}


@contextlib.contextmanager
def proxy_refused():
    yield "https://service.example", {"proxy": f"http://127.0.0.1:{unused_port()}"}


@contextlib.contextmanager
def tunnel_refused():
    with wire.serve(wire.serve_each(lambda _: wire.answer(b"", "502 Bad Gateway"))) as url:
        yield "https://service.example", {"proxy": url}


@contextlib.contextmanager
def proxy_cuts_the_tunnel():
    def cut(connection):
        connection.read_request()
        connection.reset()

    with wire.serve(cut) as url:
        yield "https://service.example", {"proxy": url}


@contextlib.contextmanager
def cut_after_the_request():
    def cut(connection):
        connection.read_request()
        connection.reset()

    with wire.serve(cut) as url:
        yield url, {}


BEFORE = [
    refused,
    unknown_host,
    certificate_refused,
    reset_before_the_first_byte,
    proxy_refused,
    tunnel_refused,
    proxy_cuts_the_tunnel,
]


@pytest.mark.parametrize("by", ["http_client", "transport"])
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    ("stage", "status"), [*((each, "not_sent") for each in BEFORE), (cut_after_the_request, "unknown")]
)
async def test_httpcore_says_where_nothing_was_sent(library, stage, status, by):
    with stage() as (url, options):
        transport = library.AsyncHTTPTransport(trust_env=False, **options)
        http_client = library.AsyncClient(transport=transport) if by == "http_client" else None
        given = {"allow_http": True, "outage": OutagePolicy(patience=0)}
        given["transport"] = transport if by == "transport" else None
        async with client_of(http_client, url, **given) as client:
            result = await client.bulk_invite("member", [1, 2, 3])
        assert [outcome.status for outcome in result] == [status] * 3
        await transport.aclose()


async def test_a_full_pool_has_sent_nothing():
    with wire.serve(wire.Silent()) as url:
        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=1), trust_env=False) as http_client:
            timeouts = Timeouts(connect=0.05, read=0.3)
            async with client_of(http_client, url, timeouts=timeouts, max_concurrency=2) as client:
                found = []

                async def ask():
                    with pytest.raises(TransportTimeoutError) as caught:
                        await client.generate_invite("m", 1)
                    found.append(caught.value.delivery)

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(ask)
                    tasks.start_soon(ask)
    assert sorted(found) == ["not_sent", "unknown"]


async def test_what_a_flow_repeats_stays_sent():
    """The flow repeats the request after a 401, and there is no connection any more."""

    class Again(httpx.Auth):
        def auth_flow(self, request):
            yield request
            yield request

    def once(connection):
        connection.read_request()
        listener.close()
        connection.send(wire.answer(b"{}", "401 Unauthorized", "Connection: close"))

    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    def serve():
        sock, _ = listener.accept()
        with sock:
            once(wire.Connection(sock))

    async with httpx.AsyncClient(auth=Again(), trust_env=False) as http_client:
        async with client_of(http_client, url, outage=OutagePolicy(patience=0)) as client:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(anyio.to_thread.run_sync, serve)
                (outcome,) = await client.bulk_invite("m", [1])
    assert outcome.status == "unknown"


async def test_a_whole_fan_out_over_a_shared_client(tmp_path):
    simulator = Simulator(seed=5, surveys=4, members=6)
    with simulator.serve() as url:
        async with httpx.AsyncClient(trust_env=False) as http_client:
            given = {"panel_guid": simulator.panel_guid, "api_key": simulator.api_key}
            async with SamplingClient(url, http_client=http_client, **given) as client:
                quotas = await client.get_quotas()
                ids = [quota.quota_id for survey in quotas.surveys for quota in survey.quotas]
                requests = [InviteRequest(code, ids) for code in simulator.members]
                async with client.fan_out(requests, journal=tmp_path / "journal") as stream:
                    outcomes = [each async for each in stream]
            assert (await http_client.get(url)).status_code  # it still works
    assert len(outcomes) == len(ids) * len(simulator.members)
    assert {each.status for each in outcomes} <= {"invited", "rejected"}


async def test_a_subclass_that_ends_with_itself_is_not_ended_by_us():
    ended = []

    class Careful(httpx.AsyncClient):
        def __del__(self):
            ended.append(type(self).__name__)

    http_client = Careful(transport=httpx.MockTransport(Seen()))
    async with client_of(http_client) as client:
        await client.get_settings()
        assert not ended
    await http_client.aclose()


async def test_a_mock_that_patches_httpx_serves_a_user_client_with_the_key():
    async with httpx.AsyncClient() as http_client, client_of(http_client) as client:
        with respx.mock as router:
            route = router.get(path__regex="Settings").respond(json=[])
            await client.get_settings()
    assert route.calls[0].request.headers["api_auth_key"] == doubles.KEY


# --- Headers --------------------------------------------------------------------------------------------------


SECRET = "gateway-token-zykovqx"


@pytest.mark.parametrize("way", ["engine", "transport", "http_client"])
async def test_headers_and_user_agent_go_with_each_request(way):
    received = []
    reply = wire.kept(received, wire.answer(json.dumps([]).encode()))
    given = {"headers": {"X-Gateway": SECRET, "Authorization": "Bearer x"}, "user_agent": "panel/1.4"}
    with wire.serve(wire.serve_each(reply)) as url:
        http_client = httpx.AsyncClient(trust_env=False, headers={"X-Gateway": "of the client"})
        if way == "transport":
            given["transport"] = httpx.AsyncHTTPTransport(trust_env=False)
        async with client_of(http_client if way == "http_client" else None, url, **given) as client:
            await client.get_settings()
            await client.with_options(name="view").get_settings()
            assert SECRET not in f"{client!r} {vars(client)} {vars(client._session)}"
        await http_client.aclose()
    assert len(received) == 2
    for request in received:
        lines = request.decode().split("\r\n")
        found = {name.lower(): text for name, _, text in (line.partition(": ") for line in lines[1:])}
        assert (found["x-gateway"], found["authorization"], found["user-agent"]) == (
            SECRET,
            "Bearer x",
            "panel/1.4",
        )
        assert sum(line.lower().startswith("x-gateway") for line in lines) == 1


async def test_an_error_or_a_log_repeats_no_value_of_a_header(caplog):
    caplog.set_level(logging.DEBUG)
    body = json.dumps({"Result": f"no {SECRET}", "ResultCode": 77}).encode()
    with wire.serve(wire.serve_each(lambda _: wire.answer(body, "400 Bad Request"))) as url:
        async with client_of(None, url, headers={"X-Gateway": SECRET}) as client:
            with pytest.raises(BadRequestError) as caught:
                await client.generate_invite("m", 1)
    trace = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
    frames = [str(frame.locals) for frame in trace.stack if "sampling_async/_" in frame.filename]
    shown = [*frames, repr(caught.value), str(vars(caught.value))]
    assert frames
    assert not [each for each in (*shown, caplog.text) if SECRET in each]


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"headers": {"API_AUTH_KEY": SECRET}}, "cannot have API_AUTH_KEY"),
        ({"headers": {"content-LENGTH": SECRET}}, "cannot have content-LENGTH"),
        ({"headers": {"Host": SECRET}}, "cannot have Host"),
        ({"headers": {"User-Agent": SECRET}}, "give user_agent="),
        ({"headers": {"X Y": SECRET}}, "name that HTTP does not allow: 'X Y'"),
        ({"headers": {"X\r\nY": SECRET}}, "name that HTTP does not allow"),
        ({"headers": {"": SECRET}}, "name that HTTP does not allow"),
        ({"headers": {7: SECRET}}, "name that HTTP does not allow: 7"),
        ({"headers": {"X": f"{SECRET}\r\nY: z"}}, "value of X in headers must be a text of printable"),
        ({"headers": {"X": None}}, "value of X in headers must be a text"),
        ({"headers": {"X": 7}}, "value of X in headers must be a text"),
        ({"headers": {"X": ""}}, "value of X in headers must be a text of printable"),
        ({"headers": {"X": f" {SECRET}"}}, "value of X in headers must be a text of printable"),
        ({"headers": {"X": f"{SECRET}\u00fc"}}, "value of X in headers must be a text of printable"),
        ({"headers": [("X", SECRET)]}, "must be a mapping of names to texts, not a list"),
        ({"headers": SECRET}, "must be a mapping of names to texts, not a str"),
        ({"user_agent": "a\nb"}, "user_agent must be printable"),
        ({"user_agent": ""}, "user_agent must be printable"),
        ({"user_agent": 7}, "user_agent must be printable"),
    ],
)
def test_a_header_that_cannot_be_sent_is_refused_and_not_shown(given, rule):
    with pytest.raises(InvalidRequestError, match=rule) as caught:
        client_of(None, **given)
    trace = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
    frames = [frame for frame in trace.stack if "sampling_async/_" in frame.filename]
    assert SECRET not in f"{caught.value} {[frame.locals for frame in frames]}"


async def test_the_log_of_http_2_does_not_show_the_key(caplog):
    async with httpx.AsyncClient() as given, client_of(given):
        caplog.set_level(logging.DEBUG)
        log = logging.getLogger("hpack.hpack")
        log.debug("Adding %s=%s to the header table", b"API_AUTH_KEY".lower(), b"secret")
        log.debug("Adding %s=%s to the header table", b"accept", b"application/json")
    assert len(caplog.records) == 1
