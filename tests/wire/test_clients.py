"""Transports of httpx and httpx2, mocks that patch them, and where the package knows either."""

from __future__ import annotations

import ast
import json
import logging
import subprocess
import sys
import traceback
from pathlib import Path
from types import ModuleType

import doubles
import httpx
import httpx2
import pytest

import sampling_async
from sampling_async import (
    BadRequestError,
    InviteRequest,
    RetryPolicy,
    SamplingClient,
    ServerError,
    TransportError,
    TransportTimeoutError,
)
from sampling_async.simulator import Simulator

ROOT = Path(sampling_async.__file__).parent
LIBRARIES = [pytest.param(httpx, id="httpx"), pytest.param(httpx2, id="httpx2")]
ONCE = RetryPolicy(max_attempts=1)
OK = 200


def client_of(transport, **options):
    given = {"panel_guid": doubles.PANEL, "api_key": doubles.KEY, "retry": ONCE}
    return SamplingClient("https://service.example/prefix", transport=transport, **given | options)


def imports_of(path):
    """Return the modules that a file imports: at its top, in functions, and for types only."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def test_httpx_is_imported_by_the_wire_the_doctor_and_the_simulator_only():
    """A move to httpx2 would change their imports. No module imports httpx2: `_wire/clients.py` finds it."""
    users = {
        path.relative_to(ROOT).as_posix(): names
        for path in ROOT.rglob("*.py")
        if (names := {*imports_of(path)} & {"httpx", "httpx2", "httpcore", "httpcore2"})
    }
    assert {*users} - {user for user in users if user.startswith("_wire/")} == {
        "_cli/_doctor.py",
        "_cli/_doctor_findings.py",
        "simulator/_outbox.py",
        "simulator/_transport.py",
    }
    assert all(names == {"httpx"} for names in users.values())


def test_every_request_goes_through_an_httpx_client_without_the_transport_of_httpx():
    """`httpcore` is loaded by that transport only."""
    simulator = Simulator(surveys=2, members=2)
    code = f"""
import asyncio, sys
import httpx
from sampling_async import SamplingClient
from sampling_async._wire.clients import OwnClient
sent = []
async def send(self, request, **options):
    sent.append(request.method)
    return await inner(self, request, **options)
inner, OwnClient.send = OwnClient.send, send
assert issubclass(OwnClient, httpx.AsyncClient)
async def main():
    given = dict(panel_guid={simulator.panel_guid!r}, api_key={simulator.api_key!r})
    async with SamplingClient(sys.argv[1], **given) as client:
        quotas = await client.get_quotas()
        await client.get_settings()
        await client.bulk_invite("m000001", range(1, 201))
asyncio.run(main())
print(sent, sorted({{"httpx2", "httpcore", "httpcore2"}} & set(sys.modules)))
"""
    with simulator.serve() as url:
        done = subprocess.run([sys.executable, "-c", code, url], capture_output=True, text=True, check=True)
    assert done.stdout == "['GET', 'GET', 'POST', 'POST'] []\n"


@pytest.mark.parametrize("library", LIBRARIES)
async def test_a_mock_gets_requests_of_its_own_library(library):
    seen = []

    def answer(request):
        seen.append(request)
        return library.Response(200, json=doubles.bulk(request))

    async with client_of(library.MockTransport(answer)) as client:
        result = await client.bulk_invite("m/1", [1, 2])
    assert [outcome.quota_id for outcome in result] == [1, 2]
    (request,) = seen
    assert type(request) is library.Request
    assert str(request.url).startswith("https://service.example/prefix/IPExternalSamplingService/")
    assert request.url.raw_path.endswith(b"/m%2F1/Invites")
    assert json.loads(request.content) == {"QuotaIDs": [1, 2]}
    assert request.headers["API_AUTH_KEY"] == doubles.KEY
    assert request.headers["content-length"] == str(len(request.content))
    assert set(request.extensions["timeout"]) == {"connect", "write", "read", "pool"}


@pytest.mark.parametrize("way", ["transport", "http_client"])
@pytest.mark.parametrize("library", LIBRARIES)
async def test_the_traceback_of_a_mock_that_fails_a_test_shows_no_key(library, way):
    def fail(_):
        raise AssertionError

    transport = library.MockTransport(fail)
    http_client = library.AsyncClient(transport=transport) if way == "http_client" else None
    async with client_of(transport if http_client is None else None, http_client=http_client) as client:
        with pytest.raises(AssertionError) as caught:
            await client.get_settings()
    shown = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
    assert doubles.KEY not in "".join(shown.format())
    # Each `send` of this package is there once, where it raises again. The frame that called the mock is cut.
    senders = [frame for frame in shown.stack if frame.filename.endswith(("/clients.py", "/given_client.py"))]
    assert [frame.name for frame in senders].count("send") == 1


@pytest.mark.parametrize("library", LIBRARIES)
async def test_an_asgi_application_is_served(library):
    simulator = Simulator(seed=3, surveys=5, members=5)
    transport = library.ASGITransport(simulator.app)
    given = {"panel_guid": simulator.panel_guid, "api_key": simulator.api_key, "transport": transport}
    async with SamplingClient(simulator.base_url, **given) as client:
        quotas = await client.get_quotas()
        quota_ids = [quota.quota_id for survey in quotas.surveys for quota in survey.quotas]
        async with client.fan_out(InviteRequest(code, quota_ids) for code in simulator.members) as outcomes:
            assert len([outcome async for outcome in outcomes]) == 5 * len(quota_ids)
        with pytest.raises(BadRequestError):
            await client.generate_invite("m000001", 2**40)
        assert client.snapshot().connections is None


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    ("name", "kind", "delivery"),
    [
        ("ConnectError", TransportError, "not_sent"),
        ("ConnectTimeout", TransportTimeoutError, "not_sent"),
        ("PoolTimeout", TransportTimeoutError, "not_sent"),
        ("ProxyError", TransportError, "not_sent"),
        ("ReadError", TransportError, "unknown"),
        ("ReadTimeout", TransportTimeoutError, "unknown"),
        ("WriteError", TransportError, "unknown"),
        ("RemoteProtocolError", TransportError, "unknown"),
        ("UnsupportedProtocol", TransportError, "unknown"),
    ],
)
async def test_errors_of_a_transport_are_classified_alike(library, name, kind, delivery):
    def fail(_):
        raise getattr(library, name)(f"with {doubles.KEY}")

    async with client_of(library.MockTransport(fail)) as client:
        with pytest.raises(TransportError) as caught:
            await client.generate_invite("m", 1)
    assert (type(caught.value), caught.value.delivery) == (kind, delivery)
    assert name in str(caught.value)
    assert doubles.KEY not in str(caught.value)


@pytest.mark.parametrize("library", LIBRARIES)
async def test_a_body_that_breaks_off_is_a_failure(library):
    class Broken(library.AsyncByteStream):
        async def __aiter__(self):
            yield b"[{"
            raise library.ReadError("cut")

    for status in (OK, 500):
        response = library.Response(status, stream=Broken())
        async with client_of(library.MockTransport(lambda _, response=response: response)) as client:
            with pytest.raises(TransportError if status == OK else ServerError):
                await client.get_settings()


async def test_a_refusal_whose_body_raises_anything_else_is_a_failure_too():
    class Wrong(httpx.AsyncByteStream):
        async def __aiter__(self):
            yield b"{"
            raise LookupError

    async with client_of(httpx.MockTransport(lambda _: httpx.Response(400, stream=Wrong()))) as client:
        with pytest.raises(TransportError, match="LookupError"):
            await client.get_settings()


@pytest.mark.parametrize("library", LIBRARIES)
async def test_a_real_socket_of_the_library_carries_requests_and_writes_no_log(library, caplog):
    caplog.set_level(logging.DEBUG)
    simulator = Simulator(seed=3, surveys=2, members=2)

    class ByClient(library.AsyncBaseTransport):
        """A transport that uses a client, which logs addresses."""

        def __init__(self):
            self.client = library.AsyncClient(trust_env=False)

        async def handle_async_request(self, request):
            return await self.client.send(request, stream=True)

        async def aclose(self):
            await self.client.aclose()

    with simulator.serve() as url:
        given = {"panel_guid": simulator.panel_guid, "api_key": simulator.api_key, "transport": ByClient()}
        async with SamplingClient(url, **given) as client:
            assert len(await client.bulk_invite("member-canary", [1])) == 1
    own = [record for record in caplog.records if record.name in {"httpx", "httpx2"}]
    assert not [record for record in own if "member-canary" in record.getMessage()]


@pytest.mark.parametrize("library", LIBRARIES)
async def test_a_patched_engine_of_a_library_answers(library, monkeypatch):
    async def answer(_transport, request):
        assert type(request) is library.Request
        return library.Response(200, json=[])

    async with client_of(None) as client:
        monkeypatch.setattr(library.AsyncHTTPTransport, "handle_async_request", answer)
        assert len(await client.get_settings()) == 0


async def test_an_object_with_the_methods_gets_requests_of_httpx():
    class Own:
        async def handle_async_request(self, request):
            assert type(request) is httpx.Request
            return httpx.Response(200, json=[])

        async def aclose(self):
            pass

    async with client_of(Own()) as client:
        assert len(await client.get_settings()) == 0


@pytest.mark.skipif(not hasattr(httpx2, "alias_httpx"), reason="this httpx2 has no such function")
def test_an_application_that_calls_httpx2_by_the_name_of_httpx_uses_our_engine():
    simulator = Simulator(surveys=2, members=2)
    code = f"""
import httpx2
httpx2.alias_httpx()
import asyncio, httpx, sys
from sampling_async import SamplingClient
async def main():
    given = dict(panel_guid={simulator.panel_guid!r}, api_key={simulator.api_key!r})
    async with SamplingClient(sys.argv[1], **given) as client:
        await client.get_settings()
        print(client.snapshot().connections.opened)
    mock = httpx.MockTransport(lambda _: httpx.Response(200, json=[]))
    async with SamplingClient(sys.argv[1], transport=mock, **given) as client:
        print(len(await client.get_settings()))
asyncio.run(main())
"""
    with simulator.serve() as url:
        done = subprocess.run([sys.executable, "-c", code, url], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "0"]


@pytest.mark.parametrize("name", ["httpx", "httpcore"])
async def test_a_library_that_another_thread_is_importing_is_not_looked_at(name, monkeypatch):
    simulator = Simulator(surveys=2, members=2)
    with simulator.serve() as url:
        async with SamplingClient(url, panel_guid=simulator.panel_guid, api_key=simulator.api_key) as client:
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
            assert await client.get_settings()
