"""Failure modes of lifetimes: callers who leave early, cancel, close too soon or come back too late."""

from __future__ import annotations

import ast
import gc
import warnings
from contextlib import aclosing
from pathlib import Path

import anyio
import doubles
import pytest
from fault_server import PROCESSED, RECONTACT_CODES, RIGHT, FaultServer, answer, rst, silence, wait
from kit import ONCE, assert_idle, call, client_of

import sampling_async
from sampling_async import ClientClosedError, InvalidRequestError, TransportError

# --- 13: interrupted lists


async def test_mode_13_only_the_failed_page_is_requested_again():
    faults = [RIGHT] * 6 + [[*PROCESSED, rst()]]
    with FaultServer(*faults) as server:
        async with client_of(server.url) as client:
            codes = [code async for code in client.recontact_members(5, max_results=3)]
    assert codes == list(RECONTACT_CODES)
    asked = [request.query.get("lastMemberCodeReceived") for request in server.ledger.received]
    assert asked == [None, *RECONTACT_CODES[2:18:3], *RECONTACT_CODES[17:24:3]]


@pytest.mark.parametrize("ahead", [False, True], ids=["pages", "pages read ahead"])
async def test_mode_13_a_failed_list_resumes_where_it_stopped(ahead):
    faults = [RIGHT] * 2 + [[*PROCESSED, rst()]]
    codes: list[str] = []
    with FaultServer(*faults) as server:
        async with client_of(server.url, retry=ONCE) as client:
            while not codes or codes[-1] != RECONTACT_CODES[-1]:
                after = codes[-1] if codes else None
                try:
                    if ahead:
                        async with client.stream_recontact_members(5, max_results=3, after=after) as stream:
                            async for code in stream:
                                codes.append(code)
                    else:
                        async for code in client.recontact_members(5, max_results=3, after=after):
                            codes.append(code)
                except TransportError:
                    assert len(codes) == 6
    assert codes == list(RECONTACT_CODES)


@pytest.mark.parametrize("taken", [1, 3, 4, 24])
async def test_mode_13_a_caller_who_leaves_and_resumes_misses_no_member(taken):
    codes: list[str] = []
    with FaultServer() as server:
        async with client_of(server.url, max_concurrency=1) as client:
            async with aclosing(client.recontact_members(5, max_results=3)) as first:
                async for code in first:
                    codes.append(code)
                    if len(codes) == taken:
                        break
            assert_idle(client)
            codes += [code async for code in client.recontact_members(5, after=codes[-1])]
    assert codes == list(RECONTACT_CODES)


@pytest.mark.asyncio  # trio warns about async generators that are not closed
async def test_mode_13_a_break_without_closing_holds_nothing_and_causes_no_warning():
    with FaultServer() as server, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        async with client_of(server.url, max_concurrency=1) as client:
            for pages in (client.recontact_pages(5), client.recontact_members(5)):
                async for _ in pages:
                    break
            del pages
            gc.collect()
            assert_idle(client)
            assert len(await client.get_settings()) == 2
    assert [str(warning.message) for warning in warned] == []


# --- 14: generators and scopes


_SCOPES = {
    "CancelScope",
    "create_task_group",
    "fail_after",
    "move_on_after",
    "open_nursery",
    "timeout",
    "TaskGroup",
    "until_closed",
}
_MANAGERS = {"asynccontextmanager", "contextmanager"}


def yields_in_scopes(tree: ast.AST) -> list[str]:
    """Return the functions that yield inside a cancel scope or task group and are no context managers."""
    found = []
    for function in ast.walk(tree):
        if not isinstance(function, ast.AsyncFunctionDef) or _names(function.decorator_list) & _MANAGERS:
            continue
        for block in ast.walk(function):
            scoped = isinstance(block, ast.With | ast.AsyncWith) and _names(block.items) & _SCOPES
            if scoped and any(isinstance(node, ast.Yield) for node in ast.walk(block)):
                found.append(function.name)
    return found


def _names(nodes: list) -> set[str]:
    walked = [node for top in nodes for node in ast.walk(top)]
    attributes = {node.attr for node in walked if isinstance(node, ast.Attribute)}
    return attributes | {node.id for node in walked if isinstance(node, ast.Name)}


def test_mode_14_no_generator_yields_inside_a_scope():
    folder = Path(sampling_async.__file__).parent
    found = {path.name: yields_in_scopes(ast.parse(path.read_text("utf-8"))) for path in folder.rglob("*.py")}
    assert len(found) > 15
    assert {name: functions for name, functions in found.items() if functions} == {}
    bad = "async def f():\n  async with anyio.create_task_group():\n    yield 1"
    assert yields_in_scopes(ast.parse(bad)) == ["f"]


@pytest.mark.parametrize("how", ["break", "raise", "cancel", "aclose elsewhere"])
async def test_mode_14_a_stream_can_be_left_in_any_way(how):
    with FaultServer() as server:
        client = client_of(server.url, max_concurrency=2)
        seen = []

        async def use(outcomes) -> None:
            async with outcomes:
                async for outcome in outcomes:
                    seen.append(outcome)
                    if len(seen) == 5:
                        if how == "break":
                            break
                        if how == "raise":
                            raise LookupError("mine")
                        if how == "cancel":
                            tasks.cancel_scope.cancel()
                            await anyio.sleep_forever()
                        tasks.start_soon(client.aclose)

        outcomes = client.stream_bulk_invite("m1", range(1, 101), chunk_size=10)
        caught: BaseException | None = None
        async with anyio.create_task_group() as tasks:
            try:
                await use(outcomes)
            except LookupError as error:
                caught = error
        assert (caught is not None) == (how == "raise")
        account = [*seen, *outcomes.left_over]
        assert sorted(outcome.quota_id for outcome in account) == list(range(1, 101))
        assert server.ledger.lies(account) == []
        assert_idle(client)
        await client.aclose()


async def test_mode_14_the_time_of_the_consumer_does_not_count_against_the_next_page():
    with FaultServer() as server:
        limits = sampling_async.Timeouts(read=0.1, wall=0.1)
        async with client_of(server.url, timeouts=limits, retry=ONCE) as client:
            pages = 0
            async for _ in client.recontact_pages(5, max_results=13):
                pages += 1
                await anyio.sleep(0.11)
    assert pages == 2


# --- 29: the caller's deadline


@pytest.mark.parametrize("answered", [0, 1, 3])
async def test_mode_29_outcomes_after_a_deadline_are_complete_and_true(answered):
    slow = [*PROCESSED, silence()]

    async def deadline(caller: anyio.CancelScope) -> None:
        await server.has_received(answered + 2)
        await doubles.until(lambda: len(seen) == 10 * answered)
        caller.cancel()

    with FaultServer(*[RIGHT] * answered, then=slow) as server:
        async with client_of(server.url, max_concurrency=2) as client:
            seen = []
            outcomes = client.stream_bulk_invite("m1", range(1, 101), chunk_size=10)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(deadline, tasks.cancel_scope)
                async with outcomes:
                    async for outcome in outcomes:
                        seen.append(outcome)
            assert tasks.cancel_scope.cancel_called
            assert_idle(client)
    assert len(seen) == 10 * answered
    left = outcomes.left_over
    assert sorted(outcome.quota_id for outcome in (*seen, *left)) == list(range(1, 101))
    assert server.ledger.lies([*seen, *left]) == []
    assert sum(outcome.status == "unknown" for outcome in left) == 20
    assert len(server.ledger.received) == answered + 2


async def test_mode_29_a_cancelled_wait_for_the_permit_leaves_the_others_in_line():
    order = []
    with FaultServer([*PROCESSED, wait(0.01), answer()]) as server:
        async with client_of(server.url, max_concurrency=1) as client:

            async def one(name: str) -> None:
                await client.get_settings()
                order.append(name)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(one, "first")
                async with anyio.create_task_group() as hasty:
                    hasty.start_soon(one, "cancelled")
                    await anyio.sleep(0.002)
                    tasks.start_soon(one, "second")
                    hasty.cancel_scope.cancel()
            assert_idle(client)
    assert order == ["first", "second"]


# --- 30: closing the client


async def test_mode_30_closing_ends_running_and_waiting_calls_with_the_same_error():
    errors = []
    with FaultServer(then=[*PROCESSED, silence()]) as server:
        client = client_of(server.url, max_concurrency=1)

        async def one(endpoint: str) -> None:
            with pytest.raises(ClientClosedError) as caught:
                await call(client, endpoint)
            errors.append(caught.value)

        async with anyio.create_task_group() as tasks:
            for endpoint in ("generate_invite", "get_settings", "recontact_members"):
                tasks.start_soon(one, endpoint)
            await server.has_received(1)
            with anyio.fail_after(60):
                async with anyio.create_task_group() as closing:
                    closing.start_soon(client.aclose)
                    closing.start_soon(client.aclose)
    waiting = "not_sent", "the client is closed; make a new one"
    running = "unknown", "the client was closed during the call"
    assert sorted((error.delivery, error.args[0]) for error in errors) == [waiting, waiting, running]


async def test_mode_30_closing_in_mid_bulk_gives_an_account_and_no_error():
    with FaultServer(RIGHT, then=[*PROCESSED, silence()]) as server:
        client = client_of(server.url, max_concurrency=2)
        async with anyio.create_task_group() as tasks:

            async def close() -> None:
                await server.has_received(3)
                await client.aclose()

            tasks.start_soon(close)
            with anyio.fail_after(60):
                result = await client.bulk_invite("m1", range(1, 101), chunk_size=10)
    assert [outcome.quota_id for outcome in result] == list(range(1, 101))
    assert (len(result.unknown), len(result.not_sent)) == (20, 70)
    assert server.ledger.lies(result) == []


async def test_mode_30_a_closed_client_refuses_every_call():
    with FaultServer() as server:
        client = client_of(server.url)
        await client.get_settings()
        await client.aclose()
        await client.aclose()
        for endpoint in ("get_settings", "get_quotas", "generate_invite", "recontact_members"):
            with pytest.raises(ClientClosedError, match="is closed") as caught:
                await call(client, endpoint)
            assert caught.value.delivery == "not_sent"
        result = await client.bulk_invite("m1", [2])
        assert result.resendable() == (2,)
    assert len(server.ledger.received) == 1


@pytest.mark.parametrize("first", ["asyncio", "trio"])
@pytest.mark.parametrize("second", ["asyncio", "trio"])
def test_mode_30_a_second_event_loop_is_refused(first, second):
    with FaultServer([*PROCESSED, answer("close")]) as server:
        client = client_of(server.url)
        assert len(anyio.run(client.get_settings, backend=first)) == 2
        with pytest.raises(InvalidRequestError, match="another event loop"):
            anyio.run(client.get_settings, backend=second)
        anyio.run(client.aclose)
    assert len(server.ledger.received) == 1


async def test_mode_30_a_client_works_before_its_block_and_closes_after_it():
    with FaultServer() as server:
        client = client_of(server.url)
        assert len(await client.get_settings()) == 2
        async with client:
            assert len(await client.get_settings()) == 2
        with pytest.raises(ClientClosedError):
            await client.get_settings()
