"""Responses that may be those to another request: their connection is not used again."""

from __future__ import annotations

import gzip
import json
import re
import threading
import time
from contextlib import aclosing
from typing import TYPE_CHECKING

import anyio
import doubles
import pytest
import wire
from wire_kit import Counted, FakeConnection, client_of, client_served_by, decoded_after, engine_of, engine_with

from sampling_async import PagingError, RetryPolicy, SamplingError

if TYPE_CHECKING:
    from collections.abc import Callable


async def test_a_surplus_response_in_the_same_packet_is_discarded_with_its_connection():
    stale = wire.answer(b'[{"Name": "stale", "Description": "", "Value": ""}]')
    script = Counted(wire.answer(b"[]") + stale)
    async with client_served_by(script) as client:
        for _ in range(3):
            assert len(await client.get_settings()) == 0
    assert script.requests == [1, 1, 1]


REFUSED = b'{"Result": "QUOTA_NOT_LIVE", "ResultCode": 9}'


@pytest.mark.parametrize(
    ("answers", "connections"),
    [
        ([wire.answer(REFUSED, "400 Bad Request")], [3]),  # in the service's own words
        ([wire.answer(b"<html>", "400 Bad Request")], [1, 1, 1]),
        *(
            ([wire.answer(REFUSED, status)], [1, 1, 1])
            for status in ("429 Too Many", "500 Oops", "502 Bad Gateway", "503 Away", "504 Timeout", "404 No")
        ),
        ([wire.answer(b"<html>")], [1, 1, 1]),
        ([wire.answer(b'{"Invites": [{"QuotaID": 8, "ResultCode": 9, "Invite": null}]}')], [1, 1, 1]),
        ([wire.answer(b'{"Invites": [{"QuotaID": 7, "ResultCode": 9, "Invite": null}]}')], [3]),
    ],
)
async def test_after_what_may_be_no_response_to_the_request_the_connection_is_not_used_again(
    answers, connections
):
    script = Counted(*answers)
    async with client_served_by(script) as client:
        for _ in range(3):
            await client.bulk_invite("m1", [7])
    assert script.requests == connections


async def test_the_right_response_after_another_one_is_never_taken_for_that_to_the_next_request():
    """A gateway gives up on a request, keeps the connection, and passes on the late response."""

    def late(connection: wire.Connection) -> None:
        owed: list[bytes] = []
        while (request := connection.read_request()) is not None:
            member = request.split(b" ")[1].split(b"/")[-2]
            item = doubles.item(7, code=1, Invite=doubles.invite(7, URL=f"https://s.example/{member.decode()}"))
            own = wire.answer(json.dumps({"Invites": [item]}).encode())
            if owed:
                connection.send(owed.pop())
            else:
                owed.append(own)
                connection.send(wire.answer(b"<html>", "504 Timeout"))

    with wire.serve(late) as url:
        async with client_of(url) as client:
            for member in ("alice", "bob", "carol"):
                (outcome,) = await client.bulk_invite(member, [7])
                assert outcome.invite is None or outcome.invite.url.endswith(member)


async def test_a_refusal_together_with_another_response_proves_nothing():
    script = Counted(wire.answer(REFUSED, "408 Too Late") + wire.answer(b"[]"))
    async with client_served_by(script, retry=RetryPolicy(max_attempts=3)) as client:
        (outcome,) = await client.bulk_invite("m1", [7])
    assert outcome.status == "unknown"
    assert script.requests == [1]


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
async def test_no_other_request_gets_a_connection_before_its_response_is_judged(encoding):
    """Reading a gzip body gives others a turn, and they wait for a connection."""

    def odd(request: bytes) -> bytes:
        items = [doubles.item(int(each)) for each in re.findall(rb"\d+", request.rpartition(b"[")[2])]
        body = json.dumps({"Invites": [*items, doubles.item(999)]}).encode()
        if encoding == "gzip":
            return wire.answer(gzip.compress(body), "200 OK", "Content-Encoding: gzip")
        return wire.answer(body)

    connections: list[int] = []

    def script(connection: wire.Connection) -> None:
        place = len(connections)
        connections.append(0)
        while (request := connection.read_request()) is not None:
            connections[place] += 1
            connection.send(odd(request))

    async with client_served_by(script, max_concurrency=4) as client:
        with anyio.fail_after(10):
            outcomes = await client.bulk_invite("m1", range(1, 61), chunk_size=1)
    assert {outcome.status for outcome in outcomes} == {"rejected"}
    assert set(connections) == {1}


@pytest.mark.parametrize(
    ("body", "encoding"), [(gzip.compress(b"{}")[:-3], "gzip"), (b"x", "br")], ids=["cut", "unknown"]
)
async def test_a_failed_attempt_leaves_the_connection_of_the_attempt_before_to_others(body, encoding):
    """It was released with the refusal, and a request of somebody else is waiting on it."""
    passing = wire.answer(b'{"Result":"TECHNICAL_ERROR","ResultCode":36}', "400 Bad Request")
    broken = wire.answer(body, "200 OK", f"Content-Encoding: {encoding}")
    answers, is_over = [passing, broken], threading.Event()

    def script(connection: wire.Connection) -> None:
        while (request := connection.read_request()) is not None:
            if b"/Invite/" in request:
                connection.send(answers.pop(0))
            else:
                is_over.wait(10)
                connection.send(wire.bulk_answer(request))

    with wire.serve(script) as url:
        retry = RetryPolicy(max_attempts=2)
        outcomes = []

        async def until_the_other_uses_it(_: float) -> None:
            tasks.start_soon(ask)
            await doubles.until(lambda: not engine_of(client).idle)

        async def ask() -> None:
            outcomes.extend(await client.bulk_invite("m2", [7]))

        async with client_of(url, retry=retry, sleep=until_the_other_uses_it) as client:
            async with anyio.create_task_group() as tasks:
                with pytest.raises(SamplingError):
                    await client.generate_invite("m1", 7)
                is_over.set()
    assert [outcome.status for outcome in outcomes] == ["rejected"]


def shifted(padding: int, tell: Callable[[str], object] = bool) -> Callable[[wire.Connection], None]:
    """Return a gateway that repeats its first response on a connection, and is one behind from then on.

    Args:
        padding: Makes its late responses longer.
        tell: Called with the member of each request.
    """

    def script(connection: wire.Connection) -> None:
        before = None
        while (request := connection.read_request()) is not None:
            member = request.split(b"/Invites")[0].rpartition(b"/")[2].decode()
            tell(member)
            item = doubles.item(
                7, code=1, Invite=doubles.invite(7, URL=f"https://s.example/{before or member}")
            )
            body = {"Invites": [item], "Padding": "x" * padding if before else ""}
            connection.send(wire.answer(json.dumps(body).encode()))
            before = member

    return script


async def test_no_member_gets_the_invite_of_another_while_a_response_is_decoded_in_a_thread(monkeypatch):
    judging, others_ask = threading.Event(), threading.Event()

    def first(body: bytes) -> None:
        if len(body) > 1_000_000:
            judging.set()
            others_ask.wait(10)

    decoded_after(monkeypatch, first)
    with wire.serve(shifted(3_000_000, lambda member: others_ask.set() if member == "m3" else None)) as url:
        async with client_of(url) as client:
            await client.bulk_invite("m1", [7])
            seen = {}

            async def ask(member: str) -> None:
                (seen[member],) = await client.bulk_invite(member, [7])

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask, "m2")
                await doubles.until(judging.is_set)
                tasks.start_soon(ask, "m3")
            assert (seen["m2"].status, seen["m3"].status) == ("unknown", "invited")
            assert seen["m3"].invite.url.endswith("m3")


async def test_a_call_that_is_cancelled_while_its_response_is_decoded_gives_no_connection_back(monkeypatch):
    entered, goes_on = threading.Event(), threading.Event()

    def slow(*_: object) -> None:
        entered.set()
        goes_on.wait(10)

    monkeypatch.setattr("sampling_async._calls.attempt.Attempts._decoded", slow)
    async with client_served_by(shifted(3_000_000)) as client:
        monkeypatch.setattr("sampling_async._calls.attempt._THREADED_BYTES", 1)
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                await client.bulk_invite("m1", [7])

            tasks.start_soon(ask)
            await doubles.until(entered.is_set)
            tasks.cancel_scope.cancel()
        goes_on.set()
        assert engine_of(client).idle == 0
        assert engine_of(client).traffic.closed == engine_of(client).traffic.opened == 1


@pytest.mark.parametrize("body", [b"<html>", b'{"Invites":[]}'])
async def test_the_connection_of_a_probe_is_not_used_again(body):
    async with client_served_by(Counted(wire.answer(body))) as client:
        away = await client._send_probe(1.0)
        assert (away is None) == (body != b"<html>")
        assert engine_of(client).idle == 0


async def test_a_connection_whose_response_was_judged_late_is_closed_and_teaches_nothing():
    engine = engine_with()
    late, in_time = FakeConnection(4.0), FakeConnection(3.99)
    engine.release(late)
    engine.release(in_time)
    assert (late.done, in_time.done, list(engine._idle)) == (["closed"], [], [in_time])
    assert engine._idle_time.limit == 4.0


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_close_by_the_server_while_a_response_is_judged_is_seen_when_it_comes(monkeypatch):
    """The engine learns the idle time from it, and does not keep the connection."""
    seen = threading.Event()

    def script(connection: wire.Connection) -> None:
        connection.send(wire.answer(b"[]" + b" " * 2_000_000)) if connection.read_request() else None
        time.sleep(0.12)

    decoded_after(monkeypatch, lambda _: seen.wait(10))
    async with client_served_by(script) as client:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.get_settings)
            await doubles.until(lambda: engine_of(client).traffic.closed == 1)
            seen.set()
        assert engine_of(client).idle == 0
        assert 0.05 < engine_of(client)._idle_time.limit < 1.0


async def test_a_call_that_is_left_in_its_pause_closes_no_connection_of_others():
    """The refusal before the pause was judged, and its connection is used by somebody else."""
    passing = wire.answer(b'{"Result":"TECHNICAL_ERROR","ResultCode":36}', "400 Bad Request")
    cut, answers = b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n{", threading.Event()
    inventories = [cut, passing]

    def script(connection: wire.Connection) -> None:
        while (request := connection.read_request()) is not None:
            if b"/Quotas" in request:
                connection.send(inventories.pop(0))
                if len(inventories) == 1:
                    return
            else:
                answers.wait(10)
                connection.send(wire.bulk_answer(request))

    with wire.serve(script) as url:
        outcomes, pauses = [], []

        async def pause(_: float) -> None:
            pauses.append(None)
            if len(pauses) == 2:
                tasks.start_soon(ask)
                await doubles.until(lambda: not engine_of(client).idle)
                tasks.cancel_scope.cancel()
                await anyio.sleep_forever()

        async def ask() -> None:
            with anyio.CancelScope(shield=True):
                outcomes.extend(await client.bulk_invite("m2", [7]))

        async def read() -> None:
            async with aclosing(client.iter_surveys()) as surveys:
                try:
                    await anext(surveys)
                finally:
                    answers.set()

        async with client_of(url, retry=RetryPolicy(max_attempts=3), sleep=pause) as client:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read)
    assert [outcome.status for outcome in outcomes] == ["rejected"]


async def test_the_connection_of_a_page_that_may_be_that_of_another_call_is_not_used_again():
    page = json.dumps(doubles.page("a", "b", more=True)).encode()
    async with client_served_by(Counted(wire.answer(page))) as client:
        with pytest.raises(PagingError, match="the same code as an earlier page"):
            _ = [code async for code in client.recontact_members(7)]
        assert engine_of(client).idle == 0
