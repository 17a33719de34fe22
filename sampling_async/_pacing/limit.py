"""The number of attempts to run at once, and the rate at which they may begin. No I/O: numbers in and out.

The limit starts at 8 and grows while the service responds as fast as at its best. It is halved when the service
shows overload, and lowered when responses take several times as long as at their best, before any times out,
because each timeout leaves up to a hundred invites that may exist. More quota IDs need more time, so a time is
compared with the line `a + b * IDs` through the shortest times seen. A limit alone is not enough for a service
that allows twenty requests a second and responds in a millisecond. So the rate at which attempts may begin is
derived from the refusals for load. An attempt that was not refused for load is *accepted*, whatever the
response.
"""

from __future__ import annotations

from collections import deque
from math import inf, sqrt
from typing import TYPE_CHECKING, Final

from attrs import define, field

from sampling_async._pacing.latency import LatencyLine

if TYPE_CHECKING:
    from collections.abc import Sequence

# Rates, in attempts a second.
_FIRST_RATE: Final = 10.0  # after the first refusal, if too few responses came before it to measure a rate
_LEAST_RATE: Final = 0.2
_LEAST_GUESSED_RATE: Final = 1.0  # the least rate that is only guessed

# How a rate is set by a refusal, and how it grows again.
_ENOUGH: Final = 8  # accepted attempts that are enough for a measurement
_SHY: Final = 0.97  # the factor for a measured rate: the limit gave more than that for a while
_FIRST_SHARE: Final = 0.9  # the share of a measured rate to begin with
_GUESSED_SHARE: Final = 0.3  # the factor for a rate that could not be measured
_REGAINED_AFTER: Final = 20  # accepted attempts until the rate is the measured one again
_DOUBLED_AFTER: Final = 120  # further ones until it is twice the measured one
_LEAST_GROWTH: Final = 0.03  # a second, for each one: a rate that is far too low must not stay so
# More of them for each attempt that the latest refusal cost: where refusals are dear, the limit is tried later.
_REGAINED_COST: Final = 3.0
_DOUBLED_COST: Final = 60.0
_UNSURE: Final = 6.0  # the first measurement is rough, so the limit is tried sooner
_UNSURE_FOR: Final = 12.0  # and after so many seconds the rate is twice as high, however few attempts there are

# A storm: several refusals, and nothing accepted in between. It says nothing of the rate. The pause before the
# next attempt doubles, in seconds. After it, the rate begins here and doubles with time up to that of before.
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 1.0
_CLIMB_FROM: Final = 4.0
_DOUBLED_IN: Final = 0.2
_MOST_DOUBLINGS: Final = 64.0

# Trouble: refusals with fewer seconds than this between two of them. It may have made the rate far too low. So,
# after a second without a refusal, the rate doubles with time, up to that of before. If that is refused, the
# next trial comes after twice as many seconds, and after some trials the low rate is believed.
_TROUBLE: Final = 5.0
_CALM: Final = 1.0
_LONGEST_CALM: Final = 2.0

# When it is tried without a rate: after so many refusals, if the rate fell to this share of the highest.
_REFUSALS: Final = 5
_FALLEN: Final = 0.9
_WEIGHED: Final = 3  # where refusals ask to wait: only if in the latest so many stretches, on average,
_DEAR: Final = 6.0  # fewer attempts were accepted than this, for each attempt that a refusal costs
_MOST_REFUSALS: Final = 20  # the number doubles up to this with each trial that shows that the rate matters
_LASTING: Final = 8  # stretches after which it was no trial any more
_AGAIN: Final = 2  # the number after that

# What shows that the rate matters: the latest stretches between refusals are too short.
_COMPARED: Final = 4
_LEAST_STRETCH: Final = 8  # accepted attempts
_SHORTER: Final = 0.4  # of the usual stretch
_SLOWER: Final = 0.5  # of what was accepted in a second with a rate
_RARE: Final = 0.25  # refusals for each accepted attempt
_FASTER: Final = 2.0  # shorter ones are enough if so many times as many attempts are accepted in a second

_TIMER_LATENESS: Final = 0.002  # seconds by which timers fire late
NEXT_TO_NOTHING: Final = 1e-9  # seconds by which they fire early: sleeping for so short a time is spinning


class Pace:
    """The rate at which attempts may begin. There is none until the service refuses attempts for load.

    A refusal sets the rate to a little less than that of the attempts accepted before it. From there it grows:
    slowly at first, since the limit is near, and later ever faster. If too few attempts were accepted to
    measure a rate, it falls by more, and grows fast until the next refusal. Refusals may have another cause:
    one node of several may refuse everything. Then a lower rate does not lead to more accepted attempts between
    two refusals. So if the rate has fallen, attempts run without a rate on trial, for as long as about as many
    are accepted between two refusals as before.

    In a storm, all are refused at whatever rate. Then the rate stays known, and each attempt is a probe. After
    the first that is accepted, time alone raises the rate to what it was, however few attempts there are.

    Attributes:
        delays: Whether there is a rate, or a rest that has not ended.
    """

    def __init__(self, shares: int = 1) -> None:
        self.delays = False
        self._shares = shares
        self._rate = inf  # a second, at the latest refusal: measured or guessed
        self._is_measured = False
        self._is_sure = False  # whether it was measured again with a measured one
        self._stretch = _Stretch(inf)  # since the latest refusal
        self._refused_at = inf  # when that came
        self._is_resumed = False  # whether an attempt has begun since
        self._held_until = -inf
        self._held_for = 0.0  # seconds that the service asked to wait at the latest refusal
        self._cost = 0.0  # the attempts that the latest refusal cost, because the service asked to wait
        self._accepted_at: deque[float] = deque(maxlen=_ENOUGH)
        self._next_at = -inf
        self._rests_until = -inf
        self._latest_at = -inf  # when the latest attempt began, or was refused
        self._in_a_row = 0  # refusals since an attempt was accepted that began after a refusal
        self._is_dry = False  # whether nothing was accepted since the latest refusal
        self._pause = 0.0  # seconds between two attempts in a storm; 0 if there is none
        self._climb, self._climbs_since = inf, -inf  # after a storm: the rate, until it is the known one again
        self._before = inf  # the rate before trouble
        self._calm = _CALM  # seconds without a refusal after which that is tried again
        self._well_for = 0.0  # seconds with attempts, since the latest refusal
        self._is_tried = False
        self._lift = 1.0  # the factor that time adds to the known rate
        self._stretches: deque[_Stretch] = deque(maxlen=_MOST_REFUSALS)  # the latest, since the latest trial
        self._highest = 0.0  # the highest rate since then
        self._needed = _REFUSALS
        self._unpaced: _Unpaced | None = None

    @property
    def is_measured(self) -> bool:
        return self._is_measured and self._unpaced is None and not self._pause and self._climb == inf

    @property
    def spares_limit(self) -> bool:
        """Whether the number of attempts at once is not the cause of refusals: the rate is, or chance."""
        if self._unpaced is not None:
            return self._unpaced.is_rare
        return self._is_measured or self._pause > 0

    @property
    def rate(self) -> float:
        return min(self._climb, self._known_rate * self._lift)

    @property
    def gap(self) -> float:
        """The seconds from the beginning of one attempt to that of the next."""
        return max(self._pause, 1 / self.rate)

    @property
    def _known_rate(self) -> float:
        if self._rate == inf or self._unpaced is not None:
            return inf
        accepted = self._stretch.accepted * self._shares if self._is_resumed else 0
        if not self._is_measured:
            return self._rate * (1 + accepted / _ENOUGH)
        # With a measured rate of 100 a second: 90 right after the refusal, 100 after 20 accepted attempts, then
        # growing with their cube: 101 after 50, 200 after 140. A hold of one second costs 100 attempts: then it
        # is 100 after 320, and 120 after 3,900, which is half a minute later. For low rates, the second term is
        # the larger one: it grows by 0.03 a second with each accepted attempt.
        cost = self._cost if self._is_sure else self._cost / _UNSURE
        regained_after = _REGAINED_AFTER + _REGAINED_COST * cost
        beyond = accepted - regained_after
        if beyond < 0:
            more = (1 - _FIRST_SHARE) * beyond / regained_after
        else:
            more = (beyond / (_DOUBLED_AFTER + _DOUBLED_COST * cost)) ** 3
        growth = _LEAST_GROWTH / (1 + cost)
        return max(self._rate * (1 + more), self._rate * _FIRST_SHARE + growth * accepted)

    def refused(self, now: float, *, is_news: bool = True) -> None:
        """Record a load rejection.

        Only the first one of the attempts that run at once `is_news`: the others say the same.
        """
        self._stretch.refused += 1
        if not is_news:
            return
        self._in_a_row += 1
        if self._in_a_row > 1 and self._unpaced is None:
            # Nothing that began since the latest refusal was accepted, so nothing is known of the rate. It is a
            # storm if nothing that was under way was accepted either.
            if self._is_dry:
                self._pause = min(_LONGEST_PAUSE, max(_FIRST_PAUSE, 2 * self._pause))
        elif self._unpaced is None or not self._unpaced.goes_on(self._stretch, now):
            self._end_trial(now)
            before, is_tried = self.rate, self._is_tried
            if not (is_tried and self._is_measured):  # such a trial says nothing new of the rate
                self._set_rate(now)
            self._note_trouble(now, before, is_tried=is_tried)
            self._stretches.append(self._stretch)
            if self._slowing_does_not_help():
                self._unpaced = _Unpaced(self._stretches, now)
        self._refused_at, self._latest_at, self._is_dry = now, now, True
        self._is_resumed, self._is_tried = False, False
        self._climb, self._lift, self._well_for = inf, 1.0, 0.0
        self.delays = self._unpaced is None or self._rests_until > now
        self._next_at = max(self._next_at, now + self.gap) if self._unpaced is None else now

    def _set_rate(self, now: float) -> None:
        """Measure the rate of what was let through since the latest refusal, or guess it."""
        rate, stretch = self.rate, self._stretch
        if min(stretch.let_through, len(self._accepted_at)) < _ENOUGH:
            # Too few for a measurement: a measured rate falls a little, a guessed one by much.
            known = self._known_rate * (_FIRST_SHARE if self._is_measured else _GUESSED_SHARE)
            self._rate = known if rate < inf else _FIRST_RATE
        elif self._is_measured:
            # It has hardly changed, so all since the latest refusal count. What the service asked to wait does
            # not: with that, each refusal would look like a lower rate.
            self._rate = _SHY * sqrt(rate * min(rate, stretch.let_through / max(now - stretch.began, 1e-6)))
            self._is_sure = True
        else:
            # A guessed rate has risen fast, so only the latest 8 accepted attempts, with 7 gaps between them,
            # show how far.
            latest = (_ENOUGH - 1) / max(now - self._accepted_at[0], 1e-6)
            # Without a rate so far, this is no measurement: the first attempts were accepted before the service
            # applied any limit.
            self._is_measured, self._is_sure = rate < inf, False
            if self._is_measured:
                # The latest ones took what the limit had saved up for a burst, and over the whole time it was
                # not used up. The limit is between the two. Of a hold, half counts: it saved up meanwhile.
                mean = stretch.let_through / max(now - self._refused_at - 0.5 * self._held_for, 1e-6)
                latest = min(rate, sqrt(latest * min(latest, mean)))
            self._rate = latest
        self._rate = max(self._rate, _LEAST_RATE if self._is_measured else _LEAST_GUESSED_RATE)
        self._highest = max(self._highest, self._rate)

    def _note_trouble(self, now: float, before: float, *, is_tried: bool) -> None:
        """Remember the rate of before while refusals follow each other, and what a trial of it has shown."""
        if is_tried:
            self._calm *= 2
            if self._cost or self._calm > _LONGEST_CALM:  # it was dear, or tried often: so it is the new rate
                self._before = self._rate
        elif self._refused_at == inf or now - self._refused_at > _TROUBLE:
            self._before, self._calm = self._rate if self._is_measured else before, _CALM

    def _slowing_does_not_help(self) -> bool:
        """Return whether to try it without a rate: it has fallen, and attempts are refused all the same."""
        if len(self._stretches) < self._needed or self._rate > _FALLEN * self._highest:
            return False
        latest = [stretch.accepted for stretch in list(self._stretches)[-_WEIGHED:]]
        return self._cost == 0 or sum(latest) < _DEAR * self._cost * len(latest)

    def _end_trial(self, now: float) -> None:
        if self._unpaced is None:
            return
        if self._unpaced.count > _LASTING:
            # What was known of the rate is long ago. What was accepted without one is known.
            self._rate, self._is_measured, self._needed = self._unpaced.per_second(now), True, _AGAIN
        else:
            self._needed = min(_MOST_REFUSALS, 2 * self._needed)
        self._stretches.clear()
        self._highest, self._unpaced = 0.0, None

    def answered(self, now: float, *, is_news: bool = True) -> None:
        """Record an accepted attempt. Only one that began after the latest refusal `is_news` of a storm."""
        self._stretch.accepted += 1
        self._in_a_row, self._is_dry = self._in_a_row * (not is_news), False
        if self._pause and is_news:
            self._pause, self._climb, self._climbs_since = 0.0, _CLIMB_FROM, now
        self._accepted_at.append(now)

    def held(self, until: float) -> None:
        self._held_until = max(self._held_until, until)

    def rest(self, until: float) -> None:
        """Let no attempt begin until a moment, whatever the rate."""
        self.delays, self._rests_until = True, max(self._rests_until, until)

    def end_rest(self) -> None:
        self._rests_until = -inf

    def wait(self, now: float, longest: float = inf) -> float:
        """Return the seconds until the next attempt may begin, at most `longest` after the latest one."""
        wait = max(self._rests_until, min(self._next_at, self._latest_at + longest)) - now
        return wait if wait > NEXT_TO_NOTHING else 0.0

    def begin(self, now: float) -> None:
        if not self._is_resumed:
            # What was under way at the refusal has counted for the stretch before.
            self._stretch, self._is_resumed = _Stretch(now), True
            self._held_for = max(0.0, min(now, self._held_until) - self._refused_at)
            self._cost = self._held_for * self._rate if self._rate < inf else 0.0
        self._stretch.begun += 1
        # A client that rests learns nothing: of a long time without attempts, only a second counts.
        self._well_for += min(_CALM, max(0.0, now - max(self._latest_at, self._held_until)))
        self._latest_at = now
        if self._climb < inf:
            doublings = min(_MOST_DOUBLINGS, (now - self._climbs_since) / _DOUBLED_IN)
            climb = _CLIMB_FROM * 2**doublings
            self._climb = climb if climb < self._known_rate else inf
        self._lift_with_time()
        if self.delays:
            gap = self.gap
            # The next attempt may begin one gap after this one was due. If this one is much later than due, the
            # gap counts from now: time without attempts does not allow a burst later. Only the lateness of the
            # timer is made up for, at most 2 ms or a tenth of the gap, or the rate would always be too low.
            # If this one is earlier, because the rate is only guessed, the gap counts from now as well: the
            # turns of those who did not wait would add up, and outlast the guess.
            due = min(now, max(self._next_at, now - min(_TIMER_LATENESS, gap / 10)))
            self._next_at = due + gap
            self.delays = gap > 0  # without a rate, it was on for a rest

    def _lift_with_time(self) -> None:
        """Let time raise the rate: after trouble to that of before, and a rough measurement beyond it."""
        known, self._lift = self._known_rate, 1.0
        self._is_tried = self._well_for > self._calm and known < self._before
        if self._is_tried:
            doublings = min(_MOST_DOUBLINGS, (self._well_for - self._calm) / _DOUBLED_IN)
            self._lift = min(self._before / known, 2**doublings)
        elif self._is_measured and not self._is_sure:
            self._lift += (self._well_for / _UNSURE_FOR) ** 3


class _Stretch:
    """The attempts between two refusals."""

    def __init__(self, began: float) -> None:
        self.began = began
        # An attempt that is under way when the next refusal comes may still be accepted, and then counts too.
        self.begun = self.accepted = self.refused = 0

    @property
    def let_through(self) -> int:
        """How many were accepted, those included that are under way."""
        return max(self.accepted, self.begun - self.refused)


class _Unpaced:
    """The attempts without a rate, in stretches, compared with the stretches before."""

    def __init__(self, stretches: Sequence[_Stretch], now: float) -> None:
        self.count = 0
        self._compared = len(stretches)
        accepted = sum(stretch.accepted for stretch in stretches)
        self._usual = accepted / len(stretches)
        self._before = accepted / max(now - stretches[0].began, 1e-6)
        self._began, self._accepted = now, 0
        self._latest: deque[_Stretch] = deque(maxlen=_COMPARED)

    @property
    def is_rare(self) -> bool:
        accepted, refused = self._sums()
        return refused <= _RARE * accepted

    def _sums(self) -> tuple[int, int]:
        accepted = sum(stretch.accepted for stretch in self._latest)
        return accepted, sum(stretch.refused for stretch in self._latest)

    def per_second(self, now: float) -> float:
        return max(_LEAST_RATE, self._accepted / max(now - self._began, 1e-6))

    def goes_on(self, stretch: _Stretch, now: float) -> bool:
        """Record a stretch; return False if the latest ones show that the rate matters."""
        self.count += 1
        self._accepted += stretch.accepted
        self._latest.append(stretch)
        accepted, refused = self._sums()
        seconds = now - self._latest[0].began
        stretch_enough = max(_LEAST_STRETCH, _SHORTER * self._usual)
        enough = max(len(self._latest) * stretch_enough, _SLOWER * self._before * seconds)
        # One of them may be short by chance.
        is_as_before = accepted >= enough * (1 - 1 / len(self._latest))
        is_faster = accepted >= _FASTER * max(_FIRST_RATE, self._before) * seconds
        if 2 * accepted < refused - 2 or not (is_as_before or is_faster):
            return False
        self._usual += (stretch.accepted - self._usual) / (self._compared + self.count)
        return True


_START: Final = 8  # the first limit, of all shares together
_LONGEST_REST: Final = 1.0  # seconds: somebody always tries
OVERLOADED: Final = 0.5  # the factor for the limit after an overload

# Ratios of a response's time to the expected one. Up to the first, the limit grows by 1 with each response; up
# to the second, by about 1 with each full set of responses; above the third, it is lowered. Responses that take
# more than a share of the time that callers have let it grow slowly, or not at all.
_AT_EASE: Final = 1.25
_GROWING: Final = 2.0
_TOO_SLOW: Final = 3.0

_HARMLESS: Final = 1 / 20  # of the time limit: a response this fast is never too slow
_FELT: Final = 1 / 4  # of the time that callers have: not this fast either
BARELY: Final = 1 / 2  # of the time that callers have: with one more in the line, they would give up
_LONG: Final = 2.0  # seconds that callers have, or more
_REGAINED: Final = 1 / 4  # of a limit below 1, with each response that is not as fast as ever
_WELL_AFTER: Final = 16  # responses since the limit was lowered: then callers seem to bear what is usual


@define
class AdaptiveLimit:
    """A limit, at most a maximum, that adapts to the load that the service can take.

    Of one of four shares it may be 1/4, a share of the time: nothing is sent for 0.6 s after an attempt of 0.2
    s. Otherwise, if a service works on one request at once, four would keep all callers waiting for too long.
    """

    maximum: int
    shares: int = 1  # how many clients share what the service can take, this one included
    latency: LatencyLine = field(factory=LatencyLine, init=False)
    # The number of overloads and outages so far that changed the limit. Several attempts of one generation may
    # report the same overload, and only the first report changes the limit.
    generation: int = field(default=0, init=False)
    _limit: float = field(init=False)
    _ratio: float = field(default=0.0, init=False)  # of the previous response
    _since: int = field(default=0, init=False)  # responses since the limit was last lowered
    _careful_from: float = field(default=inf, init=False)  # the limit above which it grows slowly

    def __attrs_post_init__(self) -> None:
        self._limit = float(min(max(1, _START // self.shares), self.maximum))

    @property
    def limit(self) -> int:
        return max(1, int(self._limit))

    def rest(self, seconds: float) -> float:
        """Return the seconds without an attempt that follow one that took `seconds`."""
        return min(_LONGEST_REST, seconds * (1.0 / self._limit - 1.0)) if self._limit < 1.0 else 0.0

    def overloaded(self, generation: int, share: float = OVERLOADED, *, is_careful: bool = False) -> None:
        """Record that an attempt of a generation overloaded the service; `share` of the limit is left."""
        if generation == self.generation:
            if share < 1.0:
                self._since = 0
            if is_careful:
                self._limit = self._careful_from = max(1.0 / self.shares, self._limit * share)
            else:
                self._limit = max(min(1.0, self._limit), self._limit * share)
            self.generation += 1

    def start_again(self) -> None:
        """Begin again with one attempt at a time, because the service's capacity is now unknown."""
        self._limit, self._since = 1.0, 0
        self.generation += 1

    def answered(self, generation: int, running: int) -> None:
        self._grow(1.0 / self._limit, generation, running)

    def answered_in(
        self,
        seconds: float,
        *,
        quota_ids: int,
        patience: float,
        callers: float,
        generation: int,
        running: int,
        among: int,
    ) -> None:
        """Record the success of an attempt to ask for invites, and its time.

        `patience` is its time limit, `callers` the least time of those who wait. `among` attempts ran when it
        was started and `running` when it ended, itself included.
        """
        expected = self.latency.line
        self.latency.add(quota_ids, seconds, alone=running == among == 1)
        felt = _FELT * min(callers, _LONG) if callers < inf else inf
        is_fast = seconds <= min(felt, _HARMLESS * patience)
        ratio = _AT_EASE if expected is None or is_fast else seconds / max(expected(quota_ids), 1e-9)
        before, self._ratio = self._ratio, ratio
        self._since += 1
        if self._limit < 1.0:
            # Whatever it took, it came. What only this limit can measure must not keep it low.
            self._grow(1.0 if ratio <= _AT_EASE else _REGAINED * self._limit, generation, running)
        # One slow response may be chance, so the previous one must have been slow as well.
        elif ratio > _TOO_SLOW and before > _GROWING:
            # If 8 ran and took 4 times as long, the service worked on 8 / 4 = 2 at once. The limit becomes
            # twice that, 4, so that the service always has the next one waiting.
            self._limit = self._careful_from = min(self._limit, max(1.0, _GROWING * among / ratio))
        elif ratio <= _AT_EASE and self._limit < self._careful_from and seconds <= _FELT * callers:
            self._grow(1.0, generation, running)
        elif (ratio <= _GROWING and seconds <= BARELY * callers) or (
            ratio <= _AT_EASE and self._since > _WELL_AFTER
        ):
            self._grow(1.0 / self._limit, generation, running)

    def _grow(self, step: float, generation: int, running: int) -> None:
        # If less than half of the limit was used, the response says nothing about a higher limit.
        if generation == self.generation and running * 2 >= self.limit:
            self._limit = min(float(self.maximum), self._limit + min(step, self._limit))
