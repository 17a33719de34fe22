"""The order of the tasks that wait at a gate: kinds of work, their lanes, and how long each lane waited."""

from __future__ import annotations

import heapq
from collections import deque
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Final

from sampling_async._pacing.limit import BARELY, AdaptiveLimit, Pace
from sampling_async._pacing.timeline import BusyIntervals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from sampling_async._pacing.blocks import Block
    from sampling_async._pacing.loops import OneShotEvent

# Permits granted to interactive lanes in a row while other lanes wait: the tenth goes to another lane.
_MOST_IN_A_ROW: Final = 9

# The longest gap of a rate that is only guessed, in seconds, for a call that somebody waits for. For a bulk
# with a deadline, it is a tenth of what is left, if that is more.
_LONGEST_GUESS: Final = 0.25
_LONGEST_SHARE: Final = 0.1

# A call that somebody waits for, with a deadline, is late in the line after so many seconds, or this share of
# its time: then the newest go first. It leaves when less time is left than so many times what a call takes, and
# not before the larger share: what is known of the service may be long ago. If both shares were the same, all
# would leave before the newest go first, and those who are sent would have too little time left.
_LONG_WAIT: Final = 0.5
_LATE_SHARE: Final = 0.25
_LEAVING_SHARE: Final = 0.5
_UNUSUAL: Final = 2.0

_OLDEST: Final = 40  # one in so many is the oldest, if callers have no deadline: some may never give up

# Attempts that have no response at their deadline show overload for so many seconds. Then only those do that
# took much longer than the shortest time of a call.
_HOPELESS: Final = 15.0
_A_ROW: Final = 4  # responses that end a row of such attempts, though they hardly came in time

_LATEST: Final = 0.1  # the weight of the latest time in the moving average
_LATELY: Final = 10.0  # seconds for which a short time of a caller counts
_LEAST_TIME: Final = 0.1  # seconds that callers have at least: who gives up sooner did not wait for an answer


class Lane:
    """A queue at a gate for one kind of work. Lanes take turns, so a long queue does not delay a short one.

    A lane of weight 2 has about two turns for each turn of a lane of weight 1. A lane that requests one permit
    at a time gets only one of the permits that are released in the same moment.
    """

    def __init__(
        self,
        kind: str,
        weight: float = 1.0,
        *,
        patience: float = 0.0,
        until_closed: Callable[[float], Block] | None = None,
    ) -> None:
        self.kind = kind
        self.patience = patience  # seconds to wait during an outage
        # makes blocks that its client ends when it is closed; None if the gate is closed then
        self.until_closed = until_closed
        self.since = inf  # when it first waited for the end of an outage; its patience counts from then
        self.stride = 1.0 / weight
        self.turn = 0.0
        self.in_line = False
        self._waiting: deque[Waiter] = deque()
        self._newest_in_a_row = 0

    def __bool__(self) -> bool:
        """Return whether a waiter is in the queue. Waiters that gave up do not count, and are removed."""
        while self._waiting and self._waiting[0].gave_up:
            self._waiting.popleft()
        return bool(self._waiting)

    def join(self, waiter: Waiter) -> None:
        self._waiting.append(waiter)

    def first(self) -> Waiter:
        return self._waiting[0]

    def leave(self, *, is_late: bool = False) -> Waiter:
        """Take out the first waiter; if that one is late, the newest."""
        self._newest_in_a_row += 1
        if self._newest_in_a_row >= _OLDEST and self._waiting[0].time == inf:
            is_late = False
        if not is_late:
            self._newest_in_a_row = 0
            return self._waiting.popleft()
        while self._waiting[-1].gave_up:
            self._waiting.pop()
        return self._waiting.pop()


class Waiter:
    """A task that waits for a permit. `grant` grants it.

    It joined the line at `since`, and had so much `time` then, in seconds; without a deadline infinite.
    """

    __slots__ = ("came", "gave_up", "grant", "since", "time", "woken")

    def __init__(self, grant: Callable[[], object], came: int, since: float, time: float) -> None:
        self.since = since
        self.time = time
        self.grant = grant
        self.came = came  # a serial number: lower is earlier
        self.woken: OneShotEvent | None = None  # created only if the task has to wait
        self.gave_up = False

    def is_late(self, now: float, callers: float) -> bool:
        """Return whether it has waited for long, for the time it has; without a deadline, others have."""
        time = self.time if self.time < inf else callers
        return time < inf and now - self.since >= min(_LONG_WAIT, _LATE_SHARE * time)

    def wake(self) -> None:
        if self.woken is not None:
            self.woken.set()


class LeastTime:
    """The least time that a caller had, in seconds, of those of the latest seconds."""

    def __init__(self) -> None:
        self._seconds, self._until = inf, -inf

    def note(self, seconds: float, now: float) -> None:
        seconds = max(seconds, _LEAST_TIME)
        if seconds <= self._seconds or now >= self._until:
            self._seconds, self._until = seconds, now + _LATELY

    def at(self, now: float) -> float:
        return self._seconds if now < self._until else inf


class WorkKind:
    """The state of one kind of work at a gate."""

    def __init__(self, name: str, maximum: int, shares: int = 1) -> None:
        self.adaptive = AdaptiveLimit(maximum, shares)
        self.pace = Pace(shares)
        self.held: set[object] = set()  # its permits
        # Of those, the one that waits for its turn by the pace, and uses no turn if it gives up. Only one may:
        # the others of this kind stay in the line, and leave the gate's places to other kinds.
        self.next_to_begin: object = None
        # Of those, the ones granted before the last outage ended. Their attempts may hang for long, which says
        # nothing about the service after the outage, so they do not count in the limit.
        self.stale: set[object] = set()
        self.interactive = Lane(name)  # for calls that a caller waits for
        # a heap of the other lanes with waiters, ordered by turn
        self.lanes: list[tuple[float, int, Lane]] = []
        self._best = inf  # the shortest time of a call
        self._cut_off_at = inf  # when the first attempt since a response in good time had none at its deadline
        self._hardly = 0  # responses since the latest of them
        self.usual = 0.0  # seconds that a call takes, as a moving average; of a bulk request, see `LatencyLine`
        self.held_until = -inf  # when the latest hold ends
        self.shut = BusyIntervals()  # when waiters waited for the end of a hold or an outage
        self.reported_at = -inf  # when an attempt of this kind last reported overload
        self.lowered_at = -inf  # when the limit was last lowered because other kinds reported overload
        self.spread = 0.0  # seconds after a hold within which its waiters resume

    def took(self, seconds: float, callers: float) -> None:
        self.usual += _LATEST * (seconds - self.usual) if self.usual else seconds
        self._best = min(self._best, seconds)
        self._hardly += 1
        if seconds <= BARELY * callers or self._hardly >= _A_ROW:
            self._cut_off_at = inf

    def rest(self, seconds: float, now: float) -> None:
        """Let no attempt begin for a while after one that took `seconds`, if the limit is below 1."""
        if rest := self.adaptive.rest(seconds):
            self.pace.rest(now + rest)

    def was_cut_off(self, seconds: float, now: float) -> bool:
        """Record an attempt that had no response at its deadline; return whether that shows overload.

        One of them may be chance. But if a service goes on with requests that nobody waits for, all that come
        after them are late, and no response ever shows that. If it lasts, or it had next to no time, the
        deadline may be too short for any service.
        """
        self.usual = max(self.usual, self.usual + _LATEST * (seconds - self.usual))
        self._hardly = 0
        if self._cut_off_at == inf:
            self._cut_off_at = now
            return False
        is_new = now - self._cut_off_at < _HOPELESS and seconds >= _LEAST_TIME
        return is_new or seconds > _UNUSUAL * self._best

    def leaves_after(self, left: float) -> float:
        """Return after how many seconds in the line a call that somebody waits for has too little time left."""
        return left - min(_UNUSUAL * self.usual, _LEAVING_SHARE * left)

    def wait_by_pace(self, now: float, lane: Lane, remaining: float, *, is_held: bool = False) -> float:
        """Return the seconds until a permit's turn by the pace: soon, if the rate is only guessed."""
        pace, longest = self.pace, inf
        if not pace.delays:
            return 0.0
        if not pace.is_measured:
            longest = _LONGEST_GUESS
            if lane is not self.interactive:
                longest = max(longest, _LONGEST_SHARE * remaining)
        is_second = self.next_to_begin is not None and not is_held
        return pace.wait(now, longest) + (min(longest, pace.gap) if is_second else 0.0)

    @property
    def has_room(self) -> bool:
        return self.next_to_begin is None and len(self.held) - len(self.stale) < self.adaptive.limit


class FairQueue:
    """The order in which permits are granted to those who wait for them.

    Interactive lanes go first: a waiter there gets the next permit that is released, unless an earlier waiter
    of an interactive lane is before it. If interactive waiters never stop coming, one permit in ten still goes
    to the other lanes. These take turns by weight. Within a lane, the first to come is the first served. But
    if the first of an interactive lane has waited for long, there is more work than can be done in time. Then
    the newest is served, because it has the most time left. Without a deadline, its time is the least that
    other callers had of late: until their deadline, or until their host cancelled them.
    """

    def __init__(self, kinds: Mapping[str, WorkKind]) -> None:
        self._kinds = kinds
        self.in_a_row = 0  # permits granted to interactive lanes since the last one to another lane
        self._now = 0.0  # the turn of the lane that was served last: the clock of the turns
        self._joined = count()

    def join(self, lane: Lane, grant: Callable[[], object], since: float = 0.0, time: float = inf) -> Waiter:
        waiter = Waiter(grant, next(self._joined), since, time)
        lane.join(waiter)
        self._put_in_line(lane)
        return waiter

    def lanes(self) -> Iterator[Lane]:
        for kind in self._kinds.values():
            yield kind.interactive
            yield from (lane for _, _, lane in kind.lanes)

    def next(self) -> Lane | None:
        """Return the lane whose turn it is, of those with a waiter that their kind has room for."""
        # Interactive lanes first, up to nine permits in a row; then another lane; then interactive lanes again,
        # without that bound, if no other lane can use a permit.
        interactive = self.first_interactive()
        if interactive is not None and self.in_a_row < _MOST_IN_A_ROW:
            return interactive
        return self._first_in_line() or interactive

    def first_interactive(self) -> Lane | None:
        """Return the interactive lane of a kind with room in which somebody has waited longest."""
        first: Lane | None = None
        for kind in self._kinds.values():
            lane = kind.interactive
            if lane and kind.has_room and (first is None or lane.first().came < first.first().came):
                first = lane
        return first

    def _first_in_line(self) -> Lane | None:
        first: WorkKind | None = None
        for kind in self._kinds.values():
            while kind.lanes and not kind.lanes[0][2]:  # its waiters have given up
                heapq.heappop(kind.lanes)[2].in_line = False
            if kind.lanes and kind.has_room and (first is None or kind.lanes[0] < first.lanes[0]):
                first = kind
        return None if first is None else first.lanes[0][2]

    def count(self, lane: Lane) -> None:
        kind = self._kinds[lane.kind]
        if lane is kind.interactive:
            self.in_a_row += 1
            return
        self.in_a_row = 0
        # Each served lane moves back by its stride, 1 / weight. So with weights 2 and 1 the turns are
        # 0, 0.5, 1, 1.5, 2 and 0, 1, 2: the first lane is served twice as often.
        self._now, _, _ = heapq.heappop(kind.lanes)
        lane.in_line = False
        lane.turn = self._now + lane.stride
        self._put_in_line(lane)

    def _put_in_line(self, lane: Lane) -> None:
        kind = self._kinds[lane.kind]
        if lane is not kind.interactive and not lane.in_line and lane:
            lane.in_line = True
            # A lane that was empty for some time has not saved up turns: it begins at the current turn.
            lane.turn = max(lane.turn, self._now)
            heapq.heappush(kind.lanes, (lane.turn, next(self._joined), lane))
