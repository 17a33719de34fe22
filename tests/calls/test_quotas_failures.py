"""Get Quotas that fails, takes too long, or is cancelled: what is raised, and what stays open."""

from __future__ import annotations

import gc
import pickle
import traceback
import tracemalloc
from contextlib import aclosing
from itertools import count
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import doubles
import httpx
import pytest
import wire
from quotas_kit import (
    FRAMINGS,
    HEAD,
    ONCE,
    TAIL,
    Parts,
    assert_idle,
    body_of,
    both,
    client_of,
    head,
    ids_of,
    read_by,
    service,
    survey,
)

from sampling_async import (
    BadRequestError,
    BodyLimits,
    ClientClosedError,
    DecodeError,
    ForbiddenError,
    SamplingClient,
    SamplingError,
    ServerError,
    Timeouts,
    TransportError,
    TransportTimeoutError,
    UnexpectedStatusError,
)

if TYPE_CHECKING:
    from collections.abc import Callable


CANARY = "canary-of-the-body"


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
        connection.send(head("Content-Length: 100000") + HEAD + survey(1) + b",")
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


# --- ETag


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
