"""Failure modes of interruption: signal handlers that raise between any two lines of an attempt.

A handler runs wherever the interpreter happens to be, and its exception is raised there. The reported delivery
must be true all the same: not_sent only if the service did not get the request. And nothing is sent twice.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

import anyio
import doubles
import pytest
from fault_server import FaultServer
from kit import client_of
from raising import Raising

from sampling_async import OutagePolicy, SamplingError
from sampling_async._pacing.outage import Away, Outage
from sampling_async._protocol.requests import bulk_invite

SENDING = {
    "_calls/call.py",
    "_pacing/background.py",
    "_wire/session.py",
    "_wire/engine.py",
    "_wire/failures.py",
    "_wire/http1.py",
    "_wire/sockets.py",
}
EVERY = 7
"""Of all lines a test tries one in so many, each test others; a sweep of all takes minutes."""


class Alarm(Exception):  # noqa: N818  what an application calls it
    """The exception of a SIGALRM handler."""


def in_a_timer_of_the_loop(raising: Raising) -> bool:
    """Return whether asyncio called the interrupted code; it logs the exception instead of raising it."""
    return raising.struck is not None and raising.struck.endswith(("in _tell", "in _time_out"))


class Struck:
    """A call that is interrupted by an exception before one of its lines, and its result.

    Attributes:
        raising: The exception and its place.
        track: What the client knows about the request.
        caught: The exception that the call raised, if any.
    """

    def __init__(self, server: FaultServer, raising: Raising, *, backend: str, warm: bool) -> None:
        client = client_of(server.url)
        self.raising, self.track = raising, client._caller.track("bulk_invite")
        self.caught: BaseException | None = None
        self._member, self._ledger = f"m{raising.at}", server.ledger

        async def main() -> None:
            if warm:
                await client.get_settings()
            call = bulk_invite(doubles.PANEL, self._member, (2, 3))
            permit = client._interactive("bulk_invite", None)
            gc.disable()  # otherwise lines of finalizers might count
            try:
                with raising:
                    await client._caller.call(call, permit, self.track)
            except Exception as exc:  # noqa: BLE001  looked at below
                self.caught = exc
            finally:
                gc.enable()

        try:
            anyio.run(main, backend=backend)
        except BaseException as exc:  # noqa: BLE001
            self.caught = exc
        without_frames(self.caught)
        anyio.run(client.aclose)
        self._settle(server)

    @property
    def processed(self) -> int:
        """The number of times that the service has made the invite so far."""
        return self._ledger.invites[self._member, 2]

    @staticmethod
    def _settle(server: FaultServer) -> None:
        """Wait until the service has read all that is left in its sockets, which our end has closed."""
        time.sleep(0.0005)
        for attempt in range(1000):
            if not server._open:
                return
            if attempt == 10:
                gc.collect()  # closes connections that an interrupted call left open
            time.sleep(0.0005)
        raise AssertionError("a connection was left open")

    @property
    def lie(self) -> str | None:
        """Return what is wrong with the reported delivery; empty if nothing is."""
        said = {self.track.delivery}
        if isinstance(self.caught, SamplingError):
            said = {self.caught.delivery}
        if self.processed > 1 or (self.processed and "not_sent" in said):
            return f"{self.raising.struck}: {said}, and {self.processed} times processed"
        return None


def swept(server: FaultServer, exception: type[BaseException], first: int, **options) -> list[Struck]:
    """Interrupt a call before one in `EVERY` of its lines."""
    trials: list[Struck] = []
    for at in count(first, EVERY):
        raising = Raising(
            exception("struck"), at, where=lambda file, _: "/".join(file.split("/")[-2:]) in SENDING
        )
        trials.append(Struck(server, raising, **options))
        if raising.struck is None:
            return trials
    raise AssertionError


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::RuntimeWarning")  # of interrupted calls
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("exception", [Alarm, KeyboardInterrupt, SystemExit, TimeoutError])
def test_mode_39_the_reported_delivery_is_true_whichever_line_is_interrupted(exception, backend, warm, caplog):
    caplog.set_level(logging.CRITICAL)
    first = [Alarm, KeyboardInterrupt, SystemExit, TimeoutError].index(exception)
    with FaultServer() as server:
        trials = swept(server, exception, first, backend=backend, warm=warm)
    assert [trial.lie for trial in trials if trial.lie] == []
    assert {trial.processed for trial in trials} == {0, 1}
    unheard = [
        f"{trial.raising.struck}: {trial.caught!r}"
        for trial in trials[:-1]
        if not holds(trial.caught, exception) and not in_a_timer_of_the_loop(trial.raising)
    ]
    assert unheard == [], unheard


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("exception", [Alarm, BrokenPipeError])
def test_mode_39_a_sent_request_does_not_look_unsent_if_the_result_of_send_is_lost(exception, backend):
    """A handler that writes to a broken pipe raises the same exception as a broken connection."""
    with FaultServer() as server:
        trials = swept_by_instructions(server, exception, "send", backend)
    assert [trial.lie for trial in trials if trial.lie] == []
    assert {trial.processed for trial in trials} == {0, 1}


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_mode_39_an_exception_is_not_taken_for_a_system_that_lacks_the_check_of_a_response(backend):
    """The check asks the kernel, which may refuse with an OSError; a TimeoutError of a handler is one too."""
    with FaultServer() as server:
        *trials, whole = swept_by_instructions(server, TimeoutError, "_check_request_arrived", backend)
    assert trials
    assert [trial.raising.struck for trial in trials if trial.caught is None] == []
    assert whole.caught is None


def swept_by_instructions(
    server: FaultServer, exception: type[BaseException], function: str, backend: str
) -> list[Struck]:
    """Interrupt a call before each instruction of one function of the sockets, and then not at all."""

    def where(file: str, name: str) -> bool:
        return file.endswith("_wire/sockets.py") and name == function

    # Python 3.12.1 tells of the instructions of a function from its second run on.
    never = Raising(exception(32, "of a log"), 1_000_000, instructions=True, where=where)
    Struck(server, never, backend=backend, warm=True)
    trials: list[Struck] = []
    while not trials or trials[-1].raising.struck:
        raising = Raising(exception(32, "of a log"), len(trials), instructions=True, where=where)
        trials.append(Struck(server, raising, backend=backend, warm=True))
    return trials


def without_frames(exc: BaseException | None) -> None:
    """Release the frames of an exception, because they hold connections."""
    if exc is not None:
        exc.__traceback__ = None
        for other in (exc.__context__, exc.__cause__, *getattr(exc, "exceptions", ())):
            without_frames(other)


def holds(caught: BaseException | None, exception: type[BaseException]) -> bool:
    """Return whether the exception was raised, possibly in a group or as a complaint of the event loop."""
    while caught is not None and not isinstance(caught, exception):
        in_group = isinstance(caught, BaseExceptionGroup)
        caught = caught.exceptions[0] if in_group else caught.__context__
    return caught is not None


@pytest.mark.parametrize("failures", [1, 3])
def test_mode_41_an_outage_ends_wherever_a_handler_raises_as_it_begins(failures):
    """The service responds to the next probe; a failure or two are a suspicion only."""

    def where(file: str, _function: str) -> bool:
        return Path(file).name == "outage.py"

    async def interrupted(at: int) -> bool:
        time = doubles.FakeTime()
        answers = [Away(), None]

        async def ask(_seconds: float) -> Away | None:
            return answers.pop(0)

        outage = Outage(
            OutagePolicy(failures=3), ask, under_way=9, clock=time.clock, sleep=time.sleep, random=lambda: 1.0
        )
        for _ in range(failures - 1):
            outage.failed("gone", time.now)
        with suppress(Alarm), Raising(Alarm(), at, instructions=True, where=where) as raising:
            outage.failed("gone", time.now)
        await outage.probe_if_stuck(lambda: True)
        assert await outage.over(600.0, 0.0), raising.struck
        return raising.struck is not None

    async def sweep() -> int:
        for at in count():
            if not await interrupted(at):
                return at
        raise AssertionError

    assert asyncio.run(sweep()) > 30
