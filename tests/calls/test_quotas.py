"""Get Quotas, as a whole or survey by survey."""

from __future__ import annotations

import gc
import gzip
import json
import logging
import pickle
import threading
import traceback
import tracemalloc
import weakref
from contextlib import aclosing, suppress
from itertools import count
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import doubles
import httpx
import inventories
import pytest
import respx
import wire

from sampling_async import (
    BadRequestError,
    BodyLimits,
    ClientClosedError,
    DecodeError,
    ForbiddenError,
    InvalidRequestError,
    Quotas,
    RetryPolicy,
    SamplingClient,
    SamplingError,
    ServerError,
    Survey,
    Timeouts,
    TransportError,
    TransportTimeoutError,
    UnexpectedStatusError,
    from_json,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

ONCE = RetryPolicy(max_attempts=1)
TAIL = b'],"CountryID":9,"CacheExpires":"2020-01-31T21:19:30Z"}'
HEAD = b'{"Surveys":['
CANARY = "canary-of-the-body"


def survey(number: int, **changes: Any) -> bytes:
    return json.dumps(inventories.survey(SurveyID=number, **changes)).encode()


def body_of(surveys: int = 3) -> bytes:
    return HEAD + b",".join(survey(number) for number in range(surveys)) + TAIL


class Parts(httpx.AsyncByteStream):
    """A body in parts, as another transport gives it: bytes, errors to raise, or functions to call."""

    def __init__(self, *parts: bytes | Exception | Callable[[], Any]) -> None:
        self._parts = list(parts)
        self.given = 0
        self.closed = 0

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        await anyio.lowlevel.checkpoint()
        while self._parts:
            part = self._parts.pop(0)
            if isinstance(part, Exception):
                raise part
            if isinstance(part, bytes):
                self.given += 1
                return part
            if (waits := part()) is not None:
                await waits
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self.closed += 1
        self._parts.clear()


def service(*streams: httpx.AsyncByteStream | httpx.Response) -> doubles.Service:
    answers = [
        each if isinstance(each, httpx.Response) else httpx.Response(200, stream=each) for each in streams
    ]
    return doubles.Service(*answers)


async def ids_of(client: SamplingClient, **options: Any) -> list[int]:
    async with aclosing(client.iter_surveys(**options)) as surveys:
        return [each.survey_id async for each in surveys]


async def read_by(client: SamplingClient, how: str) -> Any:
    """Read all surveys with one of the two methods."""
    if how == "get_quotas":
        return [each.survey_id for each in (await client.get_quotas()).surveys]
    return await ids_of(client)


both = pytest.mark.parametrize("how", ["get_quotas", "iter_surveys"])


def assert_idle(client: SamplingClient, where: object = "") -> None:
    """Check that no permit is held, nothing waits and no attempt is under way."""
    held = client._gate.running, client._gate.waiting, len(client._session._blocks)
    assert held == (0, 0, 0), (held, where)


def everything_shown(error: BaseException) -> str:
    """Return everything a log or a crash reporter could print about an error, except the frames of tests."""
    trace = traceback.TracebackException.from_exception(error, capture_locals=True)
    ours = [str(frame.locals) for frame in trace.stack if "sampling_async" in frame.filename]
    assert ours
    parts = [
        "".join(trace.format_exception_only()),
        *ours,
        repr(error),
        str(vars(error)),
        str(pickle.dumps(error)),
    ]
    chain: BaseException | None = error
    while chain is not None:
        parts += [repr(chain), repr(getattr(chain, "request", None))]
        chain = chain.__cause__ or chain.__context__
    return "\n".join(parts)


# --- The whole inventory


@both
@pytest.mark.parametrize("size", [1, 100, 10**6])
@pytest.mark.parametrize("document", [inventories.quotas(), inventories.quotas(Surveys=[]), {"Note": {}}])
async def test_a_body_in_parts_equals_the_body_in_one_piece(how, size, document):
    body = json.dumps({**document, **inventories.quotas(Surveys=document.get("Surveys", []))}).encode()
    parts = Parts(*(body[at : at + size] for at in range(0, len(body), size)))
    meant = from_json(Quotas, body)
    async with doubles.client(service(parts)) as client:
        if how == "get_quotas":
            assert await client.get_quotas() == meant
        else:
            assert [each async for each in client.iter_surveys()] == list(meant.surveys)
    assert parts.closed


@both
async def test_respx_and_mocks_of_httpx_are_served(how):
    with respx.mock:
        respx.get(path__startswith="/IPExternal").respond(content=body_of())
        async with SamplingClient(
            "https://service.example", panel_guid=doubles.PANEL, api_key=doubles.KEY
        ) as client:
            assert await read_by(client, how) == [0, 1, 2]
    async with doubles.client(doubles.Service(httpx.Response(200, content=body_of()))) as client:
        assert await read_by(client, how) == [0, 1, 2]


async def test_routables_are_requested_by_default():
    asked = doubles.Service(httpx.Response(200, content=body_of()))
    async with doubles.client(asked) as client:
        await ids_of(client)
        await ids_of(client, include_routables=False)
        with pytest.raises(InvalidRequestError, match="deadline"):
            await ids_of(client, deadline=0)
    flags = [request.url.params["includeRoutables"] for request in asked.requests]
    assert flags == ["true", "false"]


FRAMINGS = {
    "length": wire.answer,
    "chunked": lambda body: _head("Transfer-Encoding: chunked") + _chunked(body, 700),
    "small chunks": lambda body: _head("Transfer-Encoding: chunked") + _chunked(body, 3),
    "gzip": lambda body: wire.answer(gzip.compress(body), "200 OK", "Content-Encoding: gzip"),
    "chunked gzip": lambda body: (
        _head("Transfer-Encoding: chunked", "Content-Encoding: gzip") + _chunked(gzip.compress(body), 50)
    ),
    "close": lambda body: _head("Connection: close") + body,
}


def _head(*headers: str) -> bytes:
    return "\r\n".join(["HTTP/1.1 200 OK", *headers]).encode() + b"\r\n\r\n"


def _chunked(body: bytes, size: int) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def client_of(url: str, **options: Any) -> SamplingClient:
    time = doubles.FakeTime()
    given = {"clock": time.clock, "sleep": time.sleep, "random": lambda: 1.0}
    return SamplingClient(url, panel_guid=doubles.PANEL, api_key=doubles.KEY, **{**given, **options})


@both
@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("drip", [None, 997])
async def test_an_inventory_is_read_in_every_framing_over_a_socket(how, framing, drip):
    body = body_of(40)
    data = FRAMINGS[framing](body)

    def script(connection: wire.Connection) -> None:
        while connection.read_request() is not None:
            for at in range(0, len(data), drip or len(data)):
                connection.send(data[at : at + (drip or len(data))])
            if framing == "close":
                return

    with wire.serve(script) as url:
        async with client_of(url) as client:
            for _ in range(2):
                if how == "get_quotas":
                    assert await client.get_quotas() == from_json(Quotas, body)
                else:
                    assert await ids_of(client) == list(range(40))
            assert_idle(client)


# --- Survey by survey


async def test_the_first_survey_is_there_before_the_rest_is_sent():
    go = threading.Event()

    def script(connection: wire.Connection) -> None:
        connection.read_request()
        connection.send(_head("Connection: close") + HEAD + survey(1) + b",")
        if go.wait(10):
            connection.send(survey(2) + TAIL)

    with wire.serve(script) as url:
        async with client_of(url) as client, aclosing(client.iter_surveys()) as surveys:
            with anyio.fail_after(60):
                assert (await anext(surveys)).survey_id == 1
            go.set()
            assert [each.survey_id async for each in surveys] == [2]


@pytest.mark.parametrize(
    ("end", "read", "idle"),
    [(TAIL, 3, 1), (TAIL, 1, 0), (b"!" + TAIL, 3, 0), (b"", 3, 0)],
    ids=["read whole", "left early", "unreadable", "cut"],
)
async def test_a_connection_is_used_again_only_after_an_inventory_that_was_read_to_its_end(end, read, idle):
    """All of it has arrived by then, also where it is left early."""
    body = HEAD + b",".join(map(survey, range(3_000))) + end

    def script(connection: wire.Connection) -> None:
        while connection.read_request() is not None:
            connection.send(wire.answer(body))

    with wire.serve(script) as url:
        async with client_of(url) as client:
            with suppress(DecodeError):
                async with aclosing(client.iter_surveys()) as surveys:
                    async for each in surveys:
                        if read == 1 and each.survey_id == 1:
                            break
            assert client._session.engine.idle == idle


async def test_no_more_surveys_are_in_memory_than_arrived_together():
    parts = Parts(HEAD, *(survey(number) + b"," for number in range(100)), survey(100) + TAIL)
    alive: weakref.WeakSet[Survey] = weakref.WeakSet()
    most = total = 0
    async with doubles.client(service(parts)) as client, aclosing(client.iter_surveys()) as surveys:
        async for each in surveys:
            total += 1
            alive.add(each)
            del each
            gc.collect(0)
            most = max(most, len(alive))
    assert total == 101
    assert most < 5


async def test_other_calls_can_be_made_between_two_surveys():
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/Quotas"):
            return httpx.Response(200, stream=Parts(HEAD, survey(1) + b",", survey(2) + b",", survey(3), TAIL))
        return httpx.Response(200, json=doubles.bulk(request))

    async with doubles.client(doubles.Service(answer), max_concurrency=1) as client:
        invited = 0
        async with aclosing(client.iter_surveys()) as surveys:
            async for _ in surveys:
                with anyio.fail_after(60):
                    invited += len((await client.bulk_invite("m1", [2])).invited)
                assert client.snapshot().running == 0
        assert invited == 3
        assert_idle(client)


async def test_leaving_the_iteration_closes_the_connection_and_nothing_else():
    ended = threading.Event()

    def script(connection: wire.Connection) -> None:
        connection.read_request()
        connection.send(_head("Transfer-Encoding: chunked") + _chunked(HEAD + survey(1) + b",", 10**6)[:-5])
        if connection.read_request() is None:
            ended.set()

    with wire.serve(script) as url:
        async with client_of(url, max_concurrency=1) as client:
            for _ in range(2):
                async with aclosing(client.iter_surveys()) as surveys:
                    async for each in surveys:
                        assert each.survey_id == 1
                        break
                assert await anyio.to_thread.run_sync(ended.wait, 5)
                ended.clear()
                assert_idle(client)


async def test_a_stream_of_another_transport_is_closed_too():
    parts = Parts(HEAD, survey(1) + b",", survey(2) + b",", survey(3), TAIL)
    async with doubles.client(service(parts)) as client:
        async with aclosing(client.iter_surveys()) as surveys:
            await anext(surveys)
            assert not parts.closed
        assert parts.closed
        assert parts.given < 5
        async with aclosing(client.iter_surveys()):
            pass  # the iteration was never begun


# --- Failures


FAILURES = {
    "500": (httpx.Response(500), ServerError, 3),
    "503": (httpx.Response(503), ServerError, 3),
    "403": (httpx.Response(403), ForbiddenError, 1),
    "400": (httpx.Response(400, json={"ResultCode": 3, "Result": "PANEL_DOES_NOT_EXIST"}), BadRequestError, 1),
    "404": (httpx.Response(404), UnexpectedStatusError, 1),
    "error under 200": (httpx.Response(200, json={"ResultCode": 3, "Result": "NO"}), UnexpectedStatusError, 1),
    "html": (httpx.Response(200, text="<html>"), DecodeError, 2),
    "empty": (httpx.Response(200), DecodeError, 2),
    "cut": (httpx.Response(200, content=body_of()[:-9]), DecodeError, 2),
    "lost": (httpx.ReadError("x"), TransportError, 3),
    "slow": (httpx.ReadTimeout("x"), TransportTimeoutError, 3),
}


@both
@pytest.mark.parametrize("failure", FAILURES)
async def test_failures_before_the_first_survey_are_retried_and_raised_by_both_methods(how, failure):
    answer, error_class, attempts = FAILURES[failure]
    if failure == "cut" and how == "iter_surveys":
        attempts = 1  # its surveys were returned already
    asked = doubles.Service(lambda _: answer if isinstance(answer, httpx.Response) else None)
    if not isinstance(answer, httpx.Response):
        asked = doubles.Service(answer)
    async with doubles.client(asked) as client:
        with pytest.raises(error_class) as caught:
            await read_by(client, how)
        assert_idle(client)
    error = caught.value
    assert (type(error), error.endpoint, error.attempts, len(asked.requests)) == (
        error_class,
        "get_quotas",
        attempts,
        attempts,
    )


@both
async def test_the_inventory_is_read_after_passing_failures(how):
    streams = Parts(httpx.ReadError("x")), Parts(HEAD, httpx.ReadError("x")), Parts(body_of())
    async with doubles.client(service(*streams)) as client:
        assert await read_by(client, how) == [0, 1, 2]
    assert all(each.closed for each in streams)


async def test_failures_after_the_first_survey_are_raised_with_all_attributes():
    first = Parts(httpx.ReadError("x"))
    second = Parts(HEAD + survey(1) + b",", survey(2) + b",", httpx.ReadError(CANARY), survey(3) + TAIL)
    asked = service(first, second)
    got = []
    async with doubles.client(asked) as client:
        with pytest.raises(TransportError) as caught:
            async with aclosing(client.iter_surveys()) as surveys:
                async for each in surveys:
                    got.append(each.survey_id)
        assert_idle(client)
    error = caught.value
    assert got[0] == 1
    assert (error.endpoint, error.attempts, error.delivery) == ("get_quotas", 2, "unknown")
    assert (len(asked.requests), second.closed > 0, error.__cause__, error.__context__) == (2, True, None, None)
    assert CANARY not in everything_shown(error)
    assert doubles.KEY not in everything_shown(error)


@pytest.mark.parametrize("how", ["length", "chunked"])
async def test_a_body_that_is_cut_gives_the_surveys_before_and_an_error(how):
    data = FRAMINGS[how](body_of(5))
    at = data.index(b'"SurveyID": 3')

    def script(connection: wire.Connection) -> None:
        connection.read_request()
        connection.send(data[:at])

    got = []
    with wire.serve(script) as url:
        async with client_of(url) as client:
            with pytest.raises(TransportError) as caught:
                async with aclosing(client.iter_surveys()) as surveys:
                    async for each in surveys:
                        got.append(each.survey_id)
            assert_idle(client)
    assert got == [0, 1, 2][: len(got)]
    assert len(got) >= 2
    assert (caught.value.attempts, caught.value.delivery) == (1, "unknown")


def leaky(number: int) -> bytes:
    return survey(number, SurveyName=f"{CANARY} {doubles.KEY}", WaveID="x")


async def test_a_late_survey_that_cannot_be_read_is_named_and_not_shown():
    parts = Parts(HEAD + survey(0) + b",", leaky(1) + b",", survey(2) + TAIL)
    async with doubles.client(service(parts)) as client:
        with pytest.raises(DecodeError) as caught:
            await ids_of(client)
        shown = everything_shown(caught.value)
    assert str(caught.value).startswith("get_quotas: $.Surveys[1].WaveID: ")
    assert CANARY not in shown
    assert doubles.KEY not in shown
    assert parts.closed


@both
async def test_an_early_survey_that_cannot_be_read_is_not_shown_either(how):
    async with doubles.client(service(httpx.Response(200, content=HEAD + leaky(0) + TAIL))) as client:
        with pytest.raises(DecodeError) as caught:
            await read_by(client, how)
        shown = everything_shown(caught.value)
    assert CANARY not in shown
    assert doubles.KEY not in shown


@both
async def test_an_error_body_with_an_empty_list_is_an_error(how):
    document = {"Surveys": [], "ResultCode": 3, "Result": "PANEL_DOES_NOT_EXIST"}
    async with doubles.client(service(httpx.Response(200, json=document))) as client:
        with pytest.raises(UnexpectedStatusError):
            await read_by(client, how)


@both
async def test_a_body_beyond_its_limit_is_refused_permanently(how):
    asked = doubles.Service(lambda _: httpx.Response(200, stream=Parts(*[body_of(3)[:300]] * 9)))
    async with doubles.client(asked, limits=BodyLimits(quotas=1000)) as client:
        with pytest.raises(DecodeError, match="larger than 1000 bytes") as caught:
            await read_by(client, how)
    assert caught.value.permanent
    assert len(asked.requests) == 1


async def test_a_body_that_grows_beyond_its_limit_ends_there():
    parts = Parts(HEAD, *(survey(number) + b"," for number in range(9)))
    got = []
    async with doubles.client(service(parts), limits=BodyLimits(quotas=3000)) as client:
        with pytest.raises(DecodeError, match="larger than 3000 bytes"):
            async with aclosing(client.iter_surveys()) as surveys:
                async for each in surveys:
                    got.append(each.survey_id)
    assert got == [0, 1, 2][: len(got)]
    assert parts.closed


# --- Time


def later(time: doubles.FakeTime, seconds: float) -> Callable[[], None]:
    def pass_() -> None:
        time.now += seconds

    return pass_


async def test_the_time_of_the_consumer_between_surveys_does_not_count():
    time = doubles.FakeTime()
    parts = Parts(HEAD + survey(0) + b",", survey(1) + b",", survey(2) + b",", survey(3) + TAIL)
    async with doubles.client(service(parts), time, timeouts=Timeouts(wall=5)) as client:
        got = []
        async with aclosing(client.iter_surveys(deadline=6)) as surveys:
            async for each in surveys:
                got.append(each.survey_id)
                time.now += 1000
    assert got == [0, 1, 2, 3]


@pytest.mark.parametrize("limit", [{"deadline": 6}, {}])
async def test_the_time_of_the_service_counts_against_the_limits(limit):
    time = doubles.FakeTime()
    slow = [part for number in range(1, 9) for part in (later(time, 2), survey(number) + b",")]
    parts = Parts(HEAD + survey(0) + b",", *slow)
    got = []
    async with doubles.client(service(parts), time, timeouts=Timeouts(wall=6)) as client:
        with pytest.raises(TransportTimeoutError) as caught:
            async with aclosing(client.iter_surveys(**limit)) as surveys:
                async for each in surveys:
                    got.append(each.survey_id)
        assert_idle(client)
    assert 2 <= len(got) <= 5
    assert (caught.value.endpoint, caught.value.attempts, caught.value.delivery) == ("get_quotas", 1, "unknown")
    assert parts.closed


async def test_a_silent_service_is_given_up_at_the_wall_limit():
    parts = Parts(HEAD + survey(0) + b",", anyio.sleep_forever)
    async with doubles.client(service(parts), timeouts=Timeouts(wall=0.02), retry=ONCE) as client:
        with pytest.raises(TransportTimeoutError, match="wall limit"), anyio.fail_after(60):
            await ids_of(client)
    # On a busy machine the limit may pass before the body is there.
    assert parts.closed or not parts.given


@both
async def test_a_deadline_before_the_first_survey_counts(how):
    async with doubles.client(service(Parts(HEAD, anyio.sleep_forever)), retry=ONCE) as client:
        with pytest.raises(TransportTimeoutError), anyio.fail_after(60):
            if how == "get_quotas":
                await client.get_quotas(deadline=0.02)
            else:
                await ids_of(client, deadline=0.02)
        assert_idle(client)


# --- Closing and cancelling


async def test_closing_the_client_ends_the_iteration_at_its_next_step():
    def script(connection: wire.Connection) -> None:
        connection.read_request()
        connection.send(_head("Content-Length: 100000") + HEAD + survey(1) + b",")
        connection.read_request()

    with wire.serve(script) as url:
        client = client_of(url)
        async with aclosing(client.iter_surveys()) as surveys:
            assert (await anext(surveys)).survey_id == 1
            with anyio.fail_after(60):
                await client.aclose()
                with pytest.raises(ClientClosedError) as caught:
                    await anext(surveys)
        assert_idle(client)
    assert (caught.value.endpoint, caught.value.attempts, caught.value.delivery) == ("get_quotas", 1, "unknown")


async def test_closing_the_client_ends_a_wait_for_the_next_survey():
    caught = []

    async def read(client: SamplingClient, begun: anyio.Event) -> None:
        with pytest.raises(ClientClosedError):
            async with aclosing(client.iter_surveys()) as surveys:
                async for _ in surveys:
                    begun.set()
        caught.append(True)

    parts, begun = Parts(HEAD + survey(0) + b",", anyio.sleep_forever), anyio.Event()
    client = doubles.client(service(parts))
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read, client, begun)
            await begun.wait()
            await anyio.wait_all_tasks_blocked()
            await client.aclose()
    assert caught == [True]
    assert parts.closed


@pytest.fixture
def opened(monkeypatch) -> list[Any]:
    """Record all connections that are opened."""
    return doubles.connections_opened(monkeypatch)


def open_of(opened: list[Any]) -> int:
    return sum(each._sock.fileno() >= 0 for each in opened)


@both
@pytest.mark.parametrize("framing", ["length", "chunked gzip"])
async def test_cancellation_at_any_tick_leaves_nothing_open(how, framing, opened):
    data = FRAMINGS[framing](body_of(4))

    def script(connection: wire.Connection) -> None:
        while connection.read_request() is not None:
            connection.send(data[:700])
            connection.send(data[700:])

    with wire.serve(script) as url:
        async with client_of(url, max_concurrency=1, retry=ONCE) as client:
            for ticks in count():
                finished = []

                async def run(finished: list[int] = finished) -> None:
                    finished += await read_by(client, how)

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(run)
                    for _ in range(ticks):
                        await anyio.lowlevel.checkpoint()
                    tasks.cancel_scope.cancel()
                assert_idle(client, ticks)
                assert repr(client._session.engine) == f"<Engine: {open_of(opened)} idle>", ticks
                if finished or ticks == 60:
                    break
            with anyio.fail_after(60):
                assert await read_by(client, how) == [0, 1, 2, 3]
            assert ticks > 1  # some were cut off in the middle; a slow machine gets far in a tick
        assert open_of(opened) == 0


async def test_a_stream_that_takes_its_time_to_close_is_closed_by_a_cancelled_task_too():
    class Slow(Parts):
        async def aclose(self) -> None:
            await anyio.lowlevel.checkpoint()
            await super().aclose()

    parts = Slow(HEAD, survey(1) + b",", survey(2) + b",", survey(3), TAIL)
    async with doubles.client(service(parts)) as client:
        with anyio.CancelScope() as scope:
            async with aclosing(client.iter_surveys()) as surveys:
                await anext(surveys)
                scope.cancel()
                await anyio.lowlevel.checkpoint()
        assert parts.closed
        assert scope.cancelled_caught


async def test_cancellation_at_any_tick_closes_streams_of_other_transports():
    for ticks in count():
        parts = Parts(HEAD, survey(0) + b",", survey(1) + b",", survey(2) + TAIL)
        got: list[int] = []
        async with doubles.client(service(parts), max_concurrency=1) as client:

            async def run(client: SamplingClient = client, got: list[int] = got) -> None:
                async with aclosing(client.iter_surveys()) as surveys:
                    async for each in surveys:
                        got.append(each.survey_id)
                        await anyio.lowlevel.checkpoint()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run)
                for _ in range(ticks):
                    await anyio.lowlevel.checkpoint()
                tasks.cancel_scope.cancel()
            assert_idle(client, ticks)
            assert parts.closed or not parts.given, ticks
        if len(got) == 3:
            break
    assert ticks > 5


@both
async def test_a_large_part_does_not_block_the_event_loop(how):
    """Some transports give the whole body at once."""
    turns = 0
    over = anyio.Event()

    async def others() -> None:
        nonlocal turns
        while not over.is_set():
            turns += 1
            await anyio.lowlevel.checkpoint()

    async with doubles.client(doubles.Service(httpx.Response(200, content=body_of(1500)))) as client:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(others)
            assert len(await read_by(client, how)) == 1500
            over.set()
    assert turns >= len(body_of(1500)) // 2**17 > 5


async def test_every_error_is_one_of_this_package():
    async with doubles.client(service(Parts(HEAD + survey(0) + b",", RuntimeError(CANARY)))) as client:
        with pytest.raises(SamplingError) as caught:
            await ids_of(client)
    assert CANARY not in str(caught.value)


# --- Surveys that lack a value


def without_quota_id(number: int) -> bytes:
    document = json.loads(survey(number))
    document["Quotas"][0]["QuotaID"] = None
    return json.dumps(document).encode()


QUOTA_ID_OF_3 = "$.Surveys[3].Quotas[0].QuotaID"
LACKING = HEAD + b",".join([*map(survey, range(3)), without_quota_id(3), *map(survey, range(4, 40))]) + TAIL
OTHERS = [number for number in range(40) if number != 3]


@both
@pytest.mark.parametrize("size", [7, 10**6])
async def test_a_survey_with_a_null_is_left_out_and_named(how, size, caplog):
    parts = Parts(*(LACKING[at : at + size] for at in range(0, len(LACKING), size)))
    async with doubles.client(service(parts)) as client:
        assert await read_by(client, how) == OTHERS
    rule = f"get_quotas: {QUOTA_ID_OF_3}: expected a whole number, found null"
    assert caplog.messages == [f"a survey is left out, the others are read: {rule}"]
    assert caplog.records[0].levelname == "WARNING"


@pytest.mark.parametrize("before", [b"", b'"N":{},'])  # read in parts, and as a whole
@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"Price": None}, "Price"),
        ({"Price": {"Amount": None, "CurrencyID": 1}}, "Price.Amount"),
        ({"Quotas": None}, "Quotas"),
        ({"Quotas": [None]}, "Quotas[0]"),
        ({"Quotas": [{}]}, "Quotas[0].QuotaID"),
        ({"LOI": None}, "LOI"),
        ({"ScheduledCompletionDate": None}, "ScheduledCompletionDate"),
        ({"DeviceTypeIDs": [1, None]}, "DeviceTypeIDs[1]"),
    ],
)
async def test_what_is_left_out_is_in_the_inventory(before, changes, path):
    body = LACKING.replace(HEAD, b"{" + before + HEAD[1:]).replace(survey(1), survey(1, **changes))
    async with doubles.client(doubles.Service(httpx.Response(200, content=body))) as client:
        quotas = await client.get_quotas()
        told: list[DecodeError] = []
        assert await ids_of(client, on_left_out=told.append) == [each.survey_id for each in quotas.surveys]
    assert [error.path for error in quotas.left_out] == [f"$.Surveys[1].{path}", QUOTA_ID_OF_3]
    assert [error.path for error in told] == [f"$.Surveys[1].{path}", QUOTA_ID_OF_3]
    assert [each.survey_id for each in quotas.surveys] == [number for number in OTHERS if number != 1]


@pytest.mark.parametrize("before", [b"", b'"N":{},'])
async def test_strict_calls_raise_the_error_of_a_survey_that_would_be_left_out(before):
    body = LACKING.replace(HEAD, b"{" + before + HEAD[1:])
    async with doubles.client(doubles.Service(httpx.Response(200, content=body)), retry=ONCE) as client:
        for read in (client.get_quotas(strict=True), ids_of(client, strict=True)):
            with pytest.raises(DecodeError) as caught:
                await read
            assert caught.value.path == QUOTA_ID_OF_3
        assert not from_json(Quotas, body_of()).left_out


@both
@pytest.mark.parametrize("before", [b"", b'"N":{},'])
async def test_an_inventory_whose_surveys_would_all_be_left_out_is_refused(how, before):
    body = b"{" + before + HEAD[1:] + without_quota_id(0) + b"," + without_quota_id(1) + TAIL
    async with doubles.client(doubles.Service(httpx.Response(200, content=body)), retry=ONCE) as client:
        with pytest.raises(DecodeError) as caught:
            await read_by(client, how)
    assert caught.value.path == "$.Surveys[0].Quotas[0].QuotaID"


@both
@pytest.mark.parametrize("before", [b"", b'"N":{},'])
@pytest.mark.parametrize("value", ["3", 1.5, [], {}])
async def test_a_survey_with_a_value_of_another_kind_is_not_left_out(how, before, value):
    body = b"{" + before + HEAD[1:] + survey(0) + b"," + survey(1, LOI=value) + TAIL
    async with doubles.client(doubles.Service(httpx.Response(200, content=body)), retry=ONCE) as client:
        with pytest.raises(DecodeError) as caught:
            await read_by(client, how)
    assert caught.value.path == "$.Surveys[1].LOI"


async def test_many_surveys_that_are_left_out_are_counted_in_the_log(caplog):
    body = HEAD + b",".join([survey(0), *map(without_quota_id, range(1, 31))]) + TAIL
    async with doubles.client(doubles.Service(httpx.Response(200, content=body))) as client:
        quotas = await client.get_quotas()
    assert len(quotas.left_out) == 30
    assert len(caplog.messages) == 11
    assert caplog.messages[-1] == "30 surveys of 31 are left out"


async def test_a_survey_is_left_out_again_and_read_when_it_is_whole():
    bodies = [LACKING, LACKING, LACKING.replace(without_quota_id(3), survey(3))]
    async with doubles.client(service(*[httpx.Response(200, content=body) for body in bodies])) as client:
        first, second, third = [await client.get_quotas() for _ in bodies]
    assert len(first.left_out) == len(second.left_out) == 1
    assert second.surveys[0] is first.surveys[0]
    assert (len(third.surveys), third.left_out) == (40, ())


async def test_a_strict_call_does_not_take_a_304_for_an_inventory_with_surveys_left_out():
    def answer(request: httpx.Request) -> httpx.Response:
        if "If-None-Match" in request.headers:
            return httpx.Response(304)
        return httpx.Response(200, content=LACKING, headers={"ETag": '"one"'})

    async with doubles.client(answer, retry=ONCE) as client:
        quotas = await client.get_quotas()
        assert (await client.get_quotas()) is quotas
        with pytest.raises(DecodeError):
            await client.get_quotas(strict=True)
        assert len(quotas.left_out) == 1


# --- ETag


class Tagging:
    """A service that gives an ETag, and answers 304 to a request that has it."""

    def __init__(self, etag: str | None = '"first"', surveys: int = 3) -> None:
        self.etag, self.surveys = etag, surveys
        self.known: list[str | None] = []
        self.statuses: list[int] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.known.append(request.headers.get("If-None-Match"))
        headers = {} if self.etag is None else {"ETag": self.etag}
        is_known = self.etag is not None and self.known[-1] == self.etag
        self.statuses.append(304 if is_known else 200)
        content = b"" if is_known else body_of(self.surveys)
        return httpx.Response(self.statuses[-1], headers=headers, content=content)


async def test_an_attempt_that_was_answered_with_304_says_so(caplog):
    caplog.set_level(logging.DEBUG, "sampling_async.calls")
    told = []
    async with doubles.client(Tagging(), on_attempt=told.append) as client:
        held = await client.get_quotas()
        assert await client.get_quotas() is held
    assert [(each.status, each.error) for each in told] == [(200, None), (304, None)]
    assert [record.ended for record in caplog.records] == ["200", "304"]


async def test_a_304_stands_for_the_inventory_that_the_user_still_holds():
    service = Tagging()
    async with doubles.client(service) as client:
        first = await client.get_quotas()
        assert await client.get_quotas() is first
        service.etag, service.surveys = 'W/"second"', 4
        second = await client.get_quotas()
        assert await client.get_quotas() is second
    assert (len(first.surveys), len(second.surveys)) == (3, 4)
    assert service.known == [None, '"first"', '"first"', 'W/"second"']
    assert service.statuses == [200, 304, 200, 304]


async def test_a_refusal_of_a_request_with_an_etag_is_a_refusal():
    service = Tagging()

    def refusing(request: httpx.Request) -> httpx.Response:
        response = service(request)
        return response if response.status_code == 200 else httpx.Response(401, content=body_of(3))

    def unasked(request: httpx.Request) -> httpx.Response:
        return httpx.Response(304)

    async with doubles.client(refusing, retry=RetryPolicy(max_attempts=1)) as client:
        held = await client.get_quotas()
        with pytest.raises(UnexpectedStatusError):
            await client.get_quotas()
        del held
    async with doubles.client(unasked, retry=RetryPolicy(max_attempts=1)) as client:
        with pytest.raises(UnexpectedStatusError) as caught:
            await client.get_quotas()
        assert caught.value.status == 304


async def test_no_etag_is_sent_if_the_service_gave_none_or_the_inventory_is_gone():
    service = Tagging(None)
    async with doubles.client(service) as client:
        held = [await client.get_quotas(), await client.get_quotas()]
        service.etag = '"first"'
        held.append(await client.get_quotas())
        await client.get_quotas(include_routables=False)  # another inventory
        held.clear()
        gc.collect()
        await client.get_quotas()
    assert service.known == [None] * 5


async def test_the_inventory_is_read_whole_now_and_then_in_case_the_etag_never_changes():
    service, time = Tagging(), doubles.FakeTime()
    async with doubles.client(service, time) as client:
        held = await client.get_quotas()
        time.now += 599
        assert await client.get_quotas() is held
        time.now += 1
        again = await client.get_quotas()
        time.now += 599
        assert await client.get_quotas() is again
    assert service.statuses == [200, 304, 200, 304]


@pytest.mark.parametrize("etag", ["no-quotes", '"two""', '"a b"', '"' + "x" * 300 + '"', '"\x7f"', "*", '"é"'])
async def test_an_etag_that_is_none_is_not_sent_back(etag):
    service = Tagging()
    service.etag = etag.encode("latin-1")
    async with doubles.client(service) as client:
        held = [await client.get_quotas(), await client.get_quotas()]
    assert service.known == [None, None]
    assert held[0].surveys == held[1].surveys


async def test_a_304_that_was_not_requested_is_a_refusal():
    handler = doubles.Service(httpx.Response(304, headers={"ETag": '"first"'}))
    async with doubles.client(handler) as client:
        with pytest.raises(UnexpectedStatusError, match="304"):
            await client.get_quotas()


async def test_a_body_that_was_cut_is_not_taken_for_the_inventory_of_its_etag():
    """The second attempt gets a 304 for the old inventory, and the new ETag is forgotten."""
    old, new = {"ETag": '"old"'}, {"ETag": '"new"'}
    handler = doubles.Service(
        httpx.Response(200, headers=old, content=body_of(3)),
        httpx.Response(200, headers=new, stream=Parts(body_of(4)[:-200], httpx.ReadError("cut"))),
        httpx.Response(304, headers=old),
        httpx.Response(200, headers=new, content=body_of(4)),
    )
    async with doubles.client(handler) as client:
        first = await client.get_quotas()
        assert await client.get_quotas() is first
        assert len((await client.get_quotas()).surveys) == 4
    assert [each.headers.get("If-None-Match") for each in handler.requests] == [None, '"old"', '"old"', '"old"']


async def test_a_304_over_a_real_socket_leaves_the_connection_open():
    requests: list[bytes] = []

    def reply(request: bytes) -> bytes:
        requests.append(request)
        if b'If-None-Match: "first"' not in request:
            return wire.answer(body_of(), "200 OK", 'ETag: "first"')
        # A 304 may have the length of the body that it does not have.
        return b'HTTP/1.1 304 Not Modified\r\nETag: "first"\r\nContent-Length: 5000\r\n\r\n'

    connections = 0

    def script(connection: wire.Connection) -> None:
        nonlocal connections
        connections += 1
        wire.serve_each(reply)(connection)

    with wire.serve(script) as address:
        async with SamplingClient(address, panel_guid=doubles.PANEL, api_key=doubles.KEY, retry=ONCE) as client:
            first = await client.get_quotas()
            assert await client.get_quotas() is first
            assert await client.get_quotas() is first
    assert (len(requests), connections) == (3, 1)


async def test_a_watch_asks_with_the_etag():
    service = Tagging()
    async with doubles.client(service) as client, client.watch_quotas() as watch:
        await watch.ready()
        first = await watch.refresh()
        assert await watch.refresh() is first
    assert service.statuses[0] == 200
    assert set(service.statuses[1:]) == {304}


@pytest.mark.parametrize("etag", [None, '"1"'])
async def test_surveys_that_have_not_changed_are_the_same_objects(etag):
    body = inventories.quotas(*[inventories.survey(SurveyID=number) for number in range(1, 4)])
    requests = []

    def answer(request):
        requests.append(request)
        return httpx.Response(200, json=body, headers={} if etag is None else {"ETag": etag})

    async with doubles.client(answer) as client:
        before = await client.get_quotas()
        body["Surveys"][1]["LOI"] += 1
        after = await client.get_quotas()
    are_the_same = [one is other for one, other in zip(before.surveys, after.surveys, strict=True)]
    assert are_the_same == [True, False, True]
    assert [request.headers.get("If-None-Match") for request in requests] == [None, etag]


@pytest.mark.parametrize("ends", ["cut", "bad survey", "bad end", "no list at first"])
async def test_an_error_of_the_iteration_keeps_neither_the_body_nor_the_surveys(ends):
    """Whoever collects errors keeps their tracebacks too."""
    bad = b"," + survey(2, LOI="x", SurveyName="y" * 300_000)
    body = {
        "cut": HEAD + survey(1) + bad[:-9],
        "bad survey": HEAD + survey(1) + bad + TAIL,
        "bad end": HEAD + survey(1) + TAIL.replace(b"9", b'"%b"' % (b"9" * 300_000)),
        "no list at first": b'{"N":{},"Surveys":[' + survey(1) + bad + TAIL,
    }[ends]
    errors: list[DecodeError] = []

    async def once(client: SamplingClient) -> None:
        with pytest.raises(DecodeError) as caught:
            async for _ in client.iter_surveys():
                pass
        errors.append(caught.value)

    async with doubles.client(lambda _: httpx.Response(200, stream=Parts(body)), retry=ONCE) as client:
        await once(client)
        gc.collect()
        with doubles.MemoryPeak():
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(5):
                await once(client)
            gc.collect()
            kept = tracemalloc.get_traced_memory()[0] - before
    assert len(errors) == 6
    assert kept < 300_000


async def test_a_stream_that_goes_on_after_it_was_closed_is_not_read_for_long(monkeypatch):
    """A stub of a transport may be a generator, which nothing closes."""
    monkeypatch.setattr("sampling_async._wire.bodies._ENDING_SECONDS", 0.05)
    read: list[int] = []

    class Endless(httpx.AsyncByteStream):
        async def __aiter__(self):
            yield HEAD + survey(1) + b"," + survey(2) + b","
            for number in count(3):
                await anyio.sleep(0.02)
                read.append(number)
                yield survey(number) + b","

    with anyio.fail_after(60):
        async with doubles.client(lambda _: httpx.Response(200, stream=Endless())) as client:
            async with aclosing(client.iter_surveys()) as surveys:
                assert (await anext(surveys)).survey_id == 1
    assert len(read) < 5
