"""The running event loop, its time, its socket watchers, and its turns during long work."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from types import ModuleType
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
import trio

from sampling_async._pacing import loops as _loops
from sampling_async._pacing.loops import LoopClock, asyncio_loop, loop_clock, running_loop, runs_here
from sampling_async._pacing.steps import LoopYielder, let_go
from sampling_async._pacing.timeline import BusyIntervals
from sampling_async._wire.bodies import OnePart
from sampling_async._wire.reader import SocketReader, TooSlow
from sampling_async._wire.sockets import Wire

if TYPE_CHECKING:
    from collections.abc import Iterator


async def test_asyncio_loop_returns_the_loop_of_asyncio_or_none(anyio_backend_name):
    if anyio_backend_name == "asyncio":
        assert asyncio_loop() is running_loop() is asyncio.get_running_loop()
    else:
        assert asyncio_loop() is None
        assert running_loop() == anyio.lowlevel.current_token()


async def test_the_loop_is_found_whichever_libraries_are_loaded(anyio_backend_name, monkeypatch):
    monkeypatch.delitem(sys.modules, "trio" if anyio_backend_name == "asyncio" else "asyncio")
    assert (asyncio_loop() is None) is (anyio_backend_name == "trio")


@pytest.mark.asyncio
async def test_the_loop_is_found_while_another_thread_imports_trio(monkeypatch):
    monkeypatch.setitem(sys.modules, "trio.lowlevel", ModuleType("trio.lowlevel"))  # nothing of it has run yet
    assert asyncio_loop() is asyncio.get_running_loop()


def test_the_loop_is_found_in_a_callback_in_which_no_task_runs():
    found = []

    async def main() -> None:
        asyncio.get_running_loop().call_soon(lambda: found.append(asyncio_loop()))
        await asyncio.sleep(0)
        found.append(asyncio.get_running_loop())

    asyncio.run(main())  # not by anyio, which leaves a note in the context about which library runs
    assert found[0] is found[1]


async def test_the_clock_can_be_read_in_another_thread():
    clock = LoopClock()
    began = clock()
    assert began <= await anyio.to_thread.run_sync(clock) <= clock()


async def test_the_clock_is_that_of_anyio():
    clock = LoopClock()
    for _ in range(2):
        assert abs(clock() - anyio.current_time()) < 1


def test_the_clock_goes_on_while_a_callback_runs():
    uvloop = pytest.importorskip("uvloop")  # its own clock does not

    async def passed() -> float:
        clock = LoopClock()
        began = clock()
        time.sleep(0.0025)  # noqa: ASYNC251  what blocks the loop is measured too
        return clock() - began

    for factory in (asyncio.new_event_loop, uvloop.new_event_loop):
        with asyncio.Runner(loop_factory=factory) as runner:
            assert runner.run(passed()) >= 0.0025


def test_a_loops_usual_clock_is_read_directly():
    async def main() -> object:
        return loop_clock()

    class Own(asyncio.SelectorEventLoop):
        def time(self) -> float:
            return 17.0

    assert asyncio.run(main()) is time.monotonic
    with asyncio.Runner(loop_factory=Own) as runner:
        own = runner.run(main())
        assert own.__class__ is LoopClock
    for clock in (loop_clock(), trio.run(main)):
        assert isinstance(clock, LoopClock)


def test_the_clock_is_that_of_the_loop_in_which_it_was_first_read():
    clock = LoopClock()

    async def main() -> float:
        loop = asyncio.get_running_loop()
        loop.time = lambda: 17.0
        return clock()

    assert asyncio.run(main()) == clock() == 17.0


def test_a_loop_runs_in_its_own_thread_only():
    async def main() -> tuple[bool, bool]:
        loop = asyncio.get_running_loop()
        return runs_here(loop), await asyncio.to_thread(runs_here, loop)

    assert asyncio.run(main()) == (True, False)


def test_running_loops_are_distinguishable():
    async def seen() -> object:
        return running_loop()

    first, second = anyio.run(seen), anyio.run(seen, backend="trio")
    assert first not in (anyio.run(seen), second)
    assert second != anyio.run(seen, backend="trio")


def test_trio_in_guest_mode_on_asyncio_counts_as_trio():
    async def seen() -> object:
        return asyncio_loop(), LoopClock()() - trio.current_time() < 1

    async def host() -> object:
        loop, over = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
        trio.lowlevel.start_guest_run(
            seen, run_sync_soon_threadsafe=loop.call_soon_threadsafe, done_callback=over.set_result
        )
        return (await over).unwrap()

    assert asyncio.run(host()) == (None, True)


def test_asking_without_a_running_loop_is_an_error():
    with pytest.raises(RuntimeError):
        LoopClock()()


def test_asking_for_the_loop_loads_no_library():
    code = (
        "import sys, trio, sampling_async._pacing.loops as loops\n"
        "for name in [name for name in sys.modules if name.split('.')[0] == 'asyncio']: del sys.modules[name]\n"
        "async def main(): assert loops.asyncio_loop() is None and 'asyncio' not in sys.modules\n"
        "trio.run(main)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


# --- The socket reader on asyncio


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs


async def turns(number: int = 3) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def test_a_reader_waits_for_bytes_and_for_the_end(sockets):
    ours, theirs = sockets

    async def main() -> list[bytes]:
        wire, seen = Wire(ours), []
        for data in (b"a", b"b", b""):
            waiting = asyncio.create_task(wire.receive(5))
            await turns()
            assert not waiting.done()
            theirs.send(data) if data else theirs.close()
            seen.append(await waiting)
        wire.close()
        return seen

    assert asyncio.run(main()) == [b"a", b"b", b""]


def test_on_a_foreign_loop_the_socket_is_watched_anew_where_a_response_goes_on(sockets, monkeypatch):
    ours, theirs = sockets

    async def main() -> list[str]:
        loop, calls = asyncio.get_running_loop(), []
        wire = Wire(ours)
        reader = wire._waits
        reader._is_foreign = True
        for name in ("add_reader", "remove_reader"):
            method = getattr(loop, name)
            monkeypatch.setattr(
                loop, name, lambda *a, method=method, name=name: (calls.append(name), method(*a))
            )
        for request in (b"first", b"second"):
            await wire.send(request, lambda _: None)
            calls.append("sent")
            assert theirs.recv(9) == request
            for part in (b"a", b"b"):
                theirs.send(part)
                assert await wire.receive() == part
        monkeypatch.undo()
        wire.close()
        return calls

    anew = ["remove_reader", "add_reader"]
    assert asyncio.run(main()) == ["sent", "add_reader", *anew, "sent", *anew]


def test_unread_bytes_are_reported_twice_at_most(sockets):
    ours, theirs = sockets

    async def main() -> None:
        wire = Wire(ours)
        theirs.send(b"a")
        assert await wire.receive() == b"a"
        assert wire._waits._watched
        theirs.send(b"b")
        await turns()
        assert not wire._waits._watched
        assert await wire.receive() == b"b"
        assert wire._waits._watched
        wire.close()
        assert not wire._waits._watched
        wire.close()

    asyncio.run(main())


def test_bytes_that_nobody_waits_for_notify_nobody(sockets):
    ours, theirs = sockets

    async def main() -> list[object]:
        loop, wrong = asyncio.get_running_loop(), []
        loop.set_exception_handler(lambda _loop, context: wrong.append(context))
        reader = SocketReader(loop, ours.fileno())
        waiting = reader.readable(5, again=False)
        theirs.send(b"a")
        await waiting
        await turns()
        assert not reader._watched
        reader.close(ours, is_forked=False)
        return wrong

    assert asyncio.run(main()) == []


def test_a_wait_ends_at_its_limit_and_by_cancelling_and_the_next_one_works(sockets):
    ours, theirs = sockets

    async def main() -> bytes:
        wire = Wire(ours)
        with pytest.raises(TooSlow):
            await wire.receive(0.001)
        waiting = asyncio.create_task(wire.receive(5))
        await turns()
        waiting.cancel()
        theirs.send(b"a")  # reported while nothing waits
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return await wire.receive(5)

    assert asyncio.run(main()) == b"a"


def test_bytes_and_the_limit_in_one_turn_are_no_error(sockets):
    ours, _ = sockets

    async def main() -> None:
        loop = asyncio.get_running_loop()
        reader = SocketReader(loop, ours.fileno())
        waiting = asyncio.ensure_future(reader.readable(5, again=True))
        await turns()
        future = reader._future
        reader._notify()
        reader._notify()
        reader._deadline = 0.0
        reader._look_at_time()
        assert future.done()
        await waiting
        reader.close(ours, is_forked=False)

    asyncio.run(main())


class Timers:
    """A loop whose clock is set by hand: it shows the timer that is set."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.now = 100.0
        self.at: float | None = None
        self.set = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._loop, name)

    def time(self) -> float:
        return self.now

    def is_running(self) -> bool:
        return False  # this is not the loop that Python knows

    def call_at(self, when: float, _: object, *, context: object) -> Timers:
        self.at, self.set = when, self.set + 1
        return self

    def cancel(self) -> None:
        self.at = None


def test_one_timer_serves_many_waits(sockets):
    ours, _ = sockets

    async def main() -> None:
        timers = Timers()
        reader = SocketReader(timers, ours.fileno())
        for limit in (5.0, 5.0, 7.0):  # each wait ends early, and the timer of the first stays
            waiting = asyncio.ensure_future(reader.readable(limit, again=True))
            await turns()
            reader._notify()
            await waiting
            timers.now += 1.0
        assert (timers.at, timers.set) == (105.0, 1)
        waiting = asyncio.ensure_future(reader.readable(6.0, again=True))  # until 109
        await turns()
        timers.now = 105.0
        reader._look_at_time()
        assert (timers.at, waiting.done()) == (109.0, False)
        timers.now = 109.0
        reader._look_at_time()
        with pytest.raises(TooSlow):
            await waiting
        reader._look_at_time()  # nothing waits
        waiting = asyncio.ensure_future(reader.readable(9.0, again=True))
        await turns()
        reader._notify()
        await waiting
        assert timers.at == 118.0
        waiting = asyncio.ensure_future(reader.readable(1.0, again=True))  # sooner than the timer
        await turns()
        assert timers.at == 110.0
        reader._notify()
        await waiting
        reader.close(ours, is_forked=False)
        assert timers.at is None

    asyncio.run(main())


def test_a_wire_can_be_closed_after_its_loop_is_closed(sockets):
    ours, theirs = sockets

    async def main() -> Wire:
        wire = Wire(ours)
        theirs.send(b"a")
        await wire.receive()
        return wire

    asyncio.run(main()).close()
    assert ours.fileno() == -1


async def test_bytes_that_tls_has_decrypted_are_returned_without_waiting(monkeypatch):
    class Pending:
        def pending(self) -> int:
            return 1

        def recv(self, _: int) -> bytes:
            return b"a"

    wire = Wire.__new__(Wire)
    wire._sock = wire._tls = Pending()
    wire._waits, wire._asked = None, 0
    assert await wire.receive() == b"a"


# --- Turns for the event loop during long work


class Rounds:
    """The clock that the work reads, and the turns that it gives."""

    def __init__(self) -> None:
        self.now, self.readings, self.given = 0.0, 0, 0

    def read(self) -> float:
        self.readings += 1
        return self.now

    async def give(self) -> None:
        self.given += 1


@pytest.fixture
def rounds(monkeypatch):
    made = Rounds()
    monkeypatch.setattr(_loops.time, "perf_counter", made.read)
    monkeypatch.setattr(_loops.anyio.lowlevel, "checkpoint", made.give)
    return made


@pytest.mark.parametrize("worth", [1, 3, 16, 500])
async def test_the_clock_is_read_once_in_sixteen_steps(rounds, worth):
    turns = LoopYielder()
    assert rounds.readings == 1
    for _ in range(480):
        await (turns.step() if worth == 1 else turns.step(worth))
    # Three steps at a time are 18 when they are enough.
    assert rounds.readings - 1 == {1: 30, 3: 80, 16: 480, 500: 480}[worth]


async def test_fifteen_steps_are_not_enough_to_read_the_clock(rounds):
    turns = LoopYielder()
    for _ in range(15):
        await turns.step()
    assert rounds.readings == 1
    await turns.step()
    assert rounds.readings == 2


@pytest.mark.parametrize(("took", "given"), [(0.0039, 0), (0.004, 0), (0.0041, 2)])
async def test_after_more_than_four_milliseconds_the_loop_goes_round_twice(rounds, took, given):
    turns = LoopYielder()
    rounds.now += took
    await turns.step(16)
    assert rounds.given == given
    await turns.step(16)  # it counts from the turn that was given
    assert rounds.given == given


async def test_time_is_counted_since_the_latest_turn(rounds):
    turns = LoopYielder()
    for _ in range(10):
        rounds.now += 0.003
        await turns.step(16)
    assert rounds.given == 5 * 2


async def test_a_list_is_let_go_of_in_steps(rounds):
    items = [object() for _ in range(9)]
    await let_go(items)
    assert items == []
    assert rounds.readings == 1 + 9


async def test_a_body_of_one_part_is_read_with_async_for_and_stays_at_its_end():
    source = OnePart(b"whole")
    assert [each async for each in source] == [b"whole"]
    with pytest.raises(StopAsyncIteration):
        await anext(source)
    await anyio.lowlevel.checkpoint()


# --- The spans of time in which somebody waited


def test_waits_that_overlap_are_one_span():
    waits = BusyIntervals()
    waits.begin("a", 1.0)
    waits.begin("b", 2.0)
    waits.end("a", 3.0)
    waits.end("a", 3.5)  # again
    waits.end("b", 4.0)
    waits.begin("c", 6.0)
    waits.end("c", 7.0)
    assert waits.within(0.0, 9.0) == 4.0
    assert waits.within(1.5, 6.5) == 3.0
    assert waits.within(4.0, 6.0) == 0.0
    assert waits.within(5.0, 5.5) == 0.0


def test_a_span_that_lasts_counts_up_to_the_moment():
    waits = BusyIntervals()
    waits.begin("a", 1.0)
    assert (waits.within(0.0, 3.0), waits.within(2.0, 3.0), waits.within(0.0, 0.5)) == (2.0, 1.0, 0.0)


def test_only_the_latest_waits_are_known():
    waits = BusyIntervals()
    for at in range(300):
        waits.begin("a", at)
        waits.end("a", at + 0.5)
    assert waits.within(0.0, 300.0) == 128.0
    assert waits.within(0.0, 44.0) == 0.0
    assert waits.within(43.0, 45.0) == 0.5


async def test_objects_are_let_go_one_by_one():
    items: list[object] = [object() for _ in range(100)]
    await let_go(items)
    assert items == []
