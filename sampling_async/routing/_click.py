"""The clicks of one member for the same, at the same moment: they share what comes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import anyio
from anyio.lowlevel import checkpoint
from attrs import define, field

from sampling_async._pacing.loops import Notifier, OneShotEvent
from sampling_async.notifications._entries import member_text
from sampling_async.routing._route import RouteStatus

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from anyio.abc import TaskGroup

    from sampling_async import Invite
    from sampling_async.matching import Member

_STORING_SECONDS: Final = 0.02  # kept of the time for the store
_WATCH_SECONDS: Final = 1.0  # for which it is waited for what may be leased by another clock
_MOST_KNOWN: Final = 100_000  # invites and questions that are remembered in memory
_AT_ONCE: Final = 50  # clicks that go on in one turn of the event loop


@define(eq=False)
class Flight:
    """What clicks of a member wait for, and how far it is.

    Attributes:
        clicks: The clicks that wait.
        ends_at: When the last of them stops waiting, by the event loop's clock.
    """

    member: Member
    quota_ids: tuple[int, ...] | None
    began: float  # in seconds since 1970
    watches_until: float  # by the event loop's clock
    ends_at: float
    clicks: dict[OneShotEvent, None] = field(factory=dict)
    asked: int = 0
    unclear: int = 0
    is_asking: bool = False  # a request is on its way
    is_refused: bool = False  # no quota is left, or all were refused
    is_busy: bool = False  # another process is asking for the member
    invite: Invite | None = None
    quota_id: int = 0  # for which it was requested; the service may have chosen another one
    is_repeat: bool = False
    takes_links: bool = True
    failure: Exception | None = None

    @property
    def status(self) -> RouteStatus:
        if self.invite is not None:
            return RouteStatus.ROUTED
        if self.is_asking or self.unclear or self.is_busy:
            return RouteStatus.UNCLEAR
        return RouteStatus.NONE_OPEN if self.is_refused else RouteStatus.UNAVAILABLE

    @property
    def left(self) -> float:
        """The seconds that are left for requests; 0 if no click waits any more."""
        return self.ends_at - anyio.current_time() - _STORING_SECONDS if self.clicks else 0.0

    async def wait(self, seconds: float) -> None:
        """Wait as one of its clicks until it has ended, or for some seconds."""
        click = OneShotEvent()
        self.clicks[click] = None
        try:
            with anyio.move_on_after(seconds):
                await click.wait()
        finally:
            self.clicks.pop(click, None)

    def let_go(self) -> None:
        for click in self.clicks:
            click.set()


@define
class MemberLine:
    """The flights of a member, one after the other, and for each wish the latest that clicks can share."""

    flights: list[Flight] = field(factory=list)
    open: dict[tuple[int, ...] | None, Flight] = field(factory=dict)


def _are_same(one: Member, other: Member) -> bool:
    try:
        return one is other or one == other
    except ValueError:  # of answers that are arrays
        return False


class Flights:
    """The flights of all members: those of one member go one after the other, and clicks share them.

    Args:
        fly: Does what the clicks of a flight wait for.
    """

    def __init__(self, fly: Callable[[Flight], Awaitable[None]]) -> None:
        self._fly = fly
        self._lines: dict[str, MemberLine] = {}
        self._ended = Notifier()

    def board(
        self, tasks: TaskGroup, member: Member, quota_ids: tuple[int, ...] | None, began: float, seconds: float
    ) -> tuple[Flight, bool]:
        """Return the flight for a click that waits for some seconds, and whether it is its first."""
        line, now = self._lines.get(member.member_code), anyio.current_time()
        flight = None if line is None else line.open.get(quota_ids)
        # One that all clicks have left asks for nothing more. This click gets its own, after that one.
        if flight is not None and flight.clicks and _are_same(flight.member, member):
            flight.ends_at = max(flight.ends_at, now + seconds)
            return flight, False
        flight = Flight(member, quota_ids, began, now + min(_WATCH_SECONDS, seconds / 2), now + seconds)
        if line is None:
            line = self._lines[member.member_code] = MemberLine()
            # In a task of its own: it goes on if clicks are cancelled, or end before the response comes.
            tasks.start_soon(self._serve, member.member_code, line)
        line.open[quota_ids] = flight
        line.flights.append(flight)
        return flight, True

    async def over(self) -> None:
        """Wait until all have ended."""
        while self._lines:
            await self._ended.wait()

    def release(self) -> None:
        """Let all clicks go on, although nothing will come any more."""
        for line in self._lines.values():
            for flight in line.flights:
                flight.let_go()
        self._lines.clear()

    async def _serve(self, member_code: str, line: MemberLine) -> None:
        while line.flights:
            flight = line.flights[0]
            await self._fly(flight)
            if line.open.get(flight.quota_ids) is flight:
                del line.open[flight.quota_ids]
            for number, click in enumerate(tuple(flight.clicks), 1):
                click.set()
                if number % _AT_ONCE == 0:  # there may be thousands
                    await checkpoint()
            del line.flights[0]
        del self._lines[member_code]
        self._ended.notify()


def shorten(known: dict[Any, Any]) -> None:
    """Forget the oldest of what would take ever more memory."""
    while len(known) > _MOST_KNOWN:
        del known[next(iter(known))]


class UnusedInvites:
    """Invites that no click has got: of requests that ended too late, or that brought more than one.

    Args:
        count: Adds to the count of the client.
    """

    def __init__(self, count: Callable[[int], None]) -> None:
        self._count = count
        self._pairs: dict[tuple[str, int], None] = {}  # by the member's text, the oldest first

    def __len__(self) -> int:
        return len(self._pairs)

    def add(self, member_code: str, quota_id: int) -> None:
        self._pairs[member_text(member_code), quota_id] = None
        self._count(1)
        shorten(self._pairs)

    def use(self, pairs: Iterable[tuple[str, int]]) -> None:
        """Count invites as used, as far as they are among these; members are texts of the store."""
        for pair in pairs:
            if pair in self._pairs:
                del self._pairs[pair]
                self._count(-1)
