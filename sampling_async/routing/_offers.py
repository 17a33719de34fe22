"""Which quotas a member fits now, what each is worth, and how many to ask for at once.

The first two come from the live index and the store. How many: few enough that nobody wastes invites, enough to
end in time.
"""

from __future__ import annotations

import heapq
import logging
from math import ceil, inf, log
from operator import itemgetter
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from anyio.lowlevel import checkpoint

from sampling_async import InvalidRequestError
from sampling_async._contract.checks import count_of
from sampling_async._contract.currencies import must_count_alike, not_compared, prices_in_one
from sampling_async._contract.logs import FailureLog
from sampling_async._pacing.threads import in_thread
from sampling_async._protocol.lessons import LearnedRates
from sampling_async.notifications import StoreError
from sampling_async.notifications._entries import member_text
from sampling_async.notifications._facts import DamagedStoreError
from sampling_async.notifications._outcomes import read_rates
from sampling_async.routing._history import DAY, Histories, MemberHistory
from sampling_async.routing._links import Changes, apply, entered_in
from sampling_async.routing._route import Offer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from sampling_async._contract.currencies import CurrencyRates
    from sampling_async._contract.records import Price
    from sampling_async.matching import LiveIndex, Member
    from sampling_async.matching._program import Target
    from sampling_async.matching._segment import CompiledPart
    from sampling_async.notifications._sql import SqlStore
    from sampling_async.routing._history import Caps, NotForMember
    from sampling_async.routing._links import Row


_LOG: Final = logging.getLogger("sampling_async.routing")
_POSSIBLE: Final = 0.5  # the chance of a quota that a member may match, beside one that it certainly does
_RATES_SECONDS: Final = 600.0  # after which the shares of completes are read again
_SLICE: Final = 100  # rows between two turns of the event loop
_UNDECIDED_SECONDS: Final = 3600.0  # for which an entered invite does not count for them


class OfferBook:
    """What is open, what it is worth, and what is known of members.

    Attributes:
        store_failure: Why the store could not be read or written the last time, if it could not.
    """

    def __init__(
        self,
        live: LiveIndex,
        store: SqlStore,
        *,
        seconds: float,
        caps: Caps,
        currency_rates: CurrencyRates | None,
        clock: Callable[[], float],
    ) -> None:
        self.store_failure = FailureLog(_LOG, "the links of members cannot be read or stored")
        self._damage = FailureLog(_LOG, "some members cannot be served", logging.ERROR)
        self._live = live
        self._caps = caps
        self._clock = clock
        self._store = store
        self._seconds = seconds  # of links and ends that are known
        self._changes = Changes(store)
        self._histories: Histories | None = None  # None until they were read
        self._cleared_on = 0.0  # the UTC day on which what is too old was forgotten
        self._rates = LearnedRates()
        self._rates_at = -inf
        # The values of the quotas of each part of the index, and its currencies, as long as it lives.
        self._values: WeakKeyDictionary[CompiledPart, list[tuple[float, int]]] = WeakKeyDictionary()
        self._of_parts: WeakKeyDictionary[CompiledPart, frozenset[int]] = WeakKeyDictionary()
        self._currency_rates = currency_rates
        self._currencies: frozenset[int] = frozenset()
        self._price_of: Callable[[Price], float] = prices_in_one((), currency_rates)
        self._no_rate = FailureLog(_LOG, "some quotas are offered last", logging.ERROR)

    def failed(self, error: StoreError) -> None:
        """Note an error of the store. Damage concerns some members, and the others are served as before."""
        (self._damage if isinstance(error, DamagedStoreError) else self.store_failure).failed(error)

    async def follow(self) -> Sequence[tuple[str, int]]:
        """Read what the store has got since the last time, from other processes too.

        Once a UTC day, what is older than the router remembers is forgotten.

        Returns:
            The members, as texts of the store, and quotas of links that were entered since.
        """
        rows: Sequence[Row] = ()
        now = self._clock()
        oldest = now - self._seconds
        try:
            rows, damaged = await self._catch_up(oldest, now)
            if damaged:
                self._damage.failed(f"the store is damaged in {count_of(damaged, 'row')}; use a backup")
            if not self._rates_at <= now < self._rates_at + _RATES_SECONDS:
                # What was entered a moment ago has had no time to end.
                until = now - _UNDECIDED_SECONDS
                self._rates, self._rates_at = await in_thread(self._read_rates, oldest, until), now
                self._values.clear()
        except StoreError as exc:
            self.failed(exc)
            if isinstance(exc, DamagedStoreError):  # of the rates; they are tried again later, as usual
                self._rates_at = now
        else:
            self.store_failure.over()
        if self._live.age is not None:
            parts = [part for part, _ in self._live.index.quota_ids.parts()]
            self._compare(parts)
            # In a thread: a new inventory of 8,000 quotas, or new rates, take some milliseconds.
            for part in parts:
                if part not in self._values:
                    await in_thread(self._values_of, part)
        return entered_in(rows)

    async def _catch_up(self, oldest: float, now: float) -> tuple[Sequence[Row], int]:
        """Add to the histories what came since the last time; return it, and how many rows are damaged."""
        today = now // DAY
        if self._histories is None:
            self._histories, damaged = await in_thread(self._changes.all, oldest, now)
            self._cleared_on = today
            return (), damaged
        rows, damaged = await in_thread(self._changes.added, now), 0
        for begin in range(0, len(rows), _SLICE):
            damaged += apply(rows[begin : begin + _SLICE], self._histories, now)
            await checkpoint()
        if self._cleared_on != today:
            self._cleared_on = today
            await self._histories.forget(oldest, now)
        return rows, damaged

    def require_rates(self) -> None:
        """Check that there is a rate for each currency that is known by now."""
        if self._currency_rates is not None:
            self._currency_rates.require(self._currencies)

    def _compare(self, parts: Sequence[CompiledPart]) -> None:
        """Make the prices of all parts comparable: a new survey may bring another currency."""
        for part in parts:
            if part not in self._of_parts:
                self._of_parts[part] = frozenset(each.survey.price.currency_id for each in part.targets)
        found = frozenset[int]().union(*(self._of_parts[part] for part in parts))
        if found == self._currencies:
            return
        was_alike = must_count_alike(self._currencies, self._currency_rates)
        self._currencies = found
        try:
            self._price_of = prices_in_one(found, self._currency_rates)
        except InvalidRequestError as exc:
            # The members who click now must not pay for it.
            self._no_rate.failed(exc)
            self._price_of = self._worth_or_last
        else:
            self._no_rate.over()
        if was_alike is must_count_alike(found, self._currency_rates):
            return
        self._values.clear()
        if not was_alike:
            _LOG.warning("%s", not_compared(found))

    def _worth_or_last(self, price: Price) -> float:
        assert self._currency_rates is not None
        return price.amount * self._currency_rates.by_id.get(price.currency_id, 0.0)

    def _read_rates(self, since: float, until: float) -> LearnedRates:
        # Of invites that were entered: whoever clicks does enter.
        return read_rates(self._store, since, until, entered=True)

    def learn(self, member_code: str, history: MemberHistory) -> None:
        """Take over what the store knows of a member."""
        if self._histories is not None:
            self._histories.put(member_text(member_code), history)

    def best(self, member: Member, most: int) -> list[Offer]:
        """Return what a member fits now, the best first, one quota a survey."""
        found: dict[int, Offer] = {}
        # Only as many as are needed: a member may fit thousands of quotas.
        for value, share, target in heapq.merge(*self._fitting(member), key=itemgetter(0), reverse=True):
            if target.survey.survey_id not in found:
                found[target.survey.survey_id] = _offer(target, value, share)
                if len(found) == most:
                    break
        return list(found.values())

    def among(self, member: Member, quota_ids: Sequence[int]) -> list[Offer]:
        """Return those of some quotas that a member fits now, in their order."""
        wanted = dict.fromkeys(quota_ids)
        found = {
            target.quota.quota_id: _offer(target, value, share)
            for fitting in self._fitting(member, wanted)
            for value, share, target in fitting
        }
        return [found[quota_id] for quota_id in wanted if quota_id in found]

    def _fitting(
        self, member: Member, wanted: Collection[int] | None = None
    ) -> list[Iterator[tuple[float, float, Target]]]:
        """Return iterators over the quotas that a member fits now, or those of them that are wanted."""
        now, history = self._clock(), MemberHistory()
        if self._histories is not None:
            history = self._histories.of(member_text(member.member_code))
        if history.gets_nothing(self._caps, now):
            return []
        left_out, matched = history.left_out(now, self._live.is_open), self._live.match(member)
        if any(part not in self._of_parts for part, _ in self._live.index.quota_ids.parts()):
            self._compare([part for part, _ in self._live.index.quota_ids.parts()])
        return [
            self._from_the_best(part, bits, share, left_out, wanted)
            for quotas, share in ((matched.certain, 1.0), (matched.possible, _POSSIBLE))
            for part, bits in quotas.parts()
        ]

    def _from_the_best(
        self,
        part: CompiledPart,
        bits: int,
        share: float,
        left_out: NotForMember,
        wanted: Collection[int] | None,
    ) -> Iterator[tuple[float, float, Target]]:
        fits = bits.to_bytes(len(part.targets) // 8 + 1, "little")
        for value, bit in self._values_of(part):
            if fits[bit >> 3] >> (bit & 7) & 1:
                target = part.targets[bit]
                quota_id, survey = target.quota.quota_id, target.survey
                is_wanted = wanted is None or quota_id in wanted
                if is_wanted and not left_out.has(quota_id, survey.survey_id, survey.wave_id):
                    yield value * share, share, target

    def _values_of(self, part: CompiledPart) -> list[tuple[float, int]]:
        """Return the values of the quotas of a part, the best first; of equal ones, that of the better rank."""
        found = self._values.get(part)
        if found is None:
            chance, price_of = self._rates.chance, self._price_of
            surveys = (target.survey for target in part.targets)
            each = (price_of(survey.price) * chance(survey) for survey in surveys)
            found = sorted(
                ((value, bit) for bit, value in enumerate(each)), key=lambda both: (-both[0], both[1])
            )
            if price_of is self._price_of:  # not if another currency has come meanwhile, in another thread
                self._values[part] = found
        return found


def _offer(target: Target, value: float, share: float) -> Offer:
    survey = target.survey
    return Offer(
        quota_id=target.quota.quota_id,
        survey_id=survey.survey_id,
        wave_id=survey.wave_id,
        loi=survey.loi,
        ir=survey.ir,
        price=survey.price,
        value=value,
        is_certain=share == 1,
        survey_name=survey.survey_name,
    )


_SHARE: Final = 0.1  # of the newest measurement in the averages
_FIRST_SECONDS: Final = 0.5  # of a request, before any was measured
_FIRST_REFUSED: Final = 0.1  # the share of refusals, likewise
_MOST_REQUESTS: Final = 1e6  # of one click, also if there is no end to its time
_TOO_LATE: Final = 0.01  # the share of clicks that may end without a link because there was no time
_MOST_UNUSED: Final = 1.0  # invites a click, on average, that are not used
_DEVIATIONS: Final = 2.0
_MOST: Final = 10


class RequestSizer:
    """How long requests take, and how many of their quotas are refused, as measured."""

    def __init__(self) -> None:
        self._mean = _FIRST_SECONDS
        self._deviation = 0.0
        self._refused = _FIRST_REFUSED
        self._is_measured = False

    def ended(self, seconds: float, asked: int, refused: int) -> None:
        """Record a request that had a response."""
        if not self._is_measured:
            self._is_measured, self._mean, self._deviation = True, seconds, seconds / 2
        self._deviation += _SHARE * (abs(seconds - self._mean) - self._deviation)
        self._mean += _SHARE * (seconds - self._mean)
        self._refused += _SHARE * (refused / asked - self._refused)

    @property
    def usual(self) -> float:
        """The seconds that nearly all requests need."""
        return self._mean + _DEVIATIONS * self._deviation

    def has_time(self, seconds: float) -> bool:
        """Return whether a request has a fair chance to end within some seconds."""
        return seconds >= self._mean - self._deviation

    def most(self, seconds: float) -> int:
        """Return for how many quotas to ask at once, if some seconds are left for all requests of a click.

        Example: a fifth is refused. With time for one request, three quotas leave 0.8 % without a link, but
        that would waste 1.4 invites on average, so it is two. With time for three requests it is one at a time.
        """
        refused = min(max(self._refused, 0.001), 0.95)
        requests = max(1, int(min(seconds / self.usual, _MOST_REQUESTS)))
        needed = ceil(log(_TOO_LATE) / log(refused) / requests)
        return max(1, min(needed, int((1 + _MOST_UNUSED) / (1 - refused)), _MOST))
