"""The market of an allocation: for each quota the value of an invite, how many it can use, and its price.

Prices are derived from a sample of the panel, and pairs are chosen by them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from attrs import field, frozen

from sampling_async import InvalidRequestError
from sampling_async._contract.currencies import prices_in_one
from sampling_async._contract.records import counted
from sampling_async._protocol.lessons import LearnedRates, qualifying
from sampling_async.matching.panel._columns import INVITES_LEFT
from sampling_async.matching.panel._plan import Market
from sampling_async.matching.panel._top_k import by_member, places_within

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from sampling_async import Quota, Survey
    from sampling_async._contract.currencies import CurrencyRates
    from sampling_async.matching._program import Target
    from sampling_async.matching.panel._plan import CompactInventory

Value: TypeAlias = "Mapping[int, float] | Callable[[Survey, Quota], float] | None"
"""What an invite is worth: by quota ID, by a function, or None for the price times IR."""

Rates: TypeAlias = "LearnedRates | Mapping[int, float] | float"
"""The share of invites that members follow: by quota ID, or one number; or what was learned of each quota."""

_LEAST: Final = 1e-6  # of a share, by which completes are divided
_MOST: Final = 2**40  # more invites than any panel has members


@frozen
class Terms:
    """What an allocation counts with, by ID. Surveys without a cap are missing.

    Attributes:
        rooms: How many invites a quota can use.
        values: What an invite is worth.
        chances: The share of invites that ends in a complete.
        survey_rooms: How many invites a survey can use.
    """

    rooms: Mapping[int, int] = field(repr=counted("quotas"))
    values: Mapping[int, float] = field(repr=counted("quotas"))
    chances: Mapping[int, float] = field(repr=counted("quotas"))
    survey_rooms: Mapping[int, int] = field(repr=counted("surveys"))


def terms_of(market: Market, quota_ids: Sequence[int], survey_ids: Sequence[int]) -> Terms:
    capped = {
        survey_id: room
        for survey_id, number in zip(survey_ids, market.surveys.tolist(), strict=True)
        if (room := int(market.survey_rooms[number])) < _MOST
    }
    rooms, values, chances = market.rooms.tolist(), market.values.tolist(), market.chances.tolist()
    return Terms(
        rooms=dict(zip(quota_ids, rooms, strict=True)),
        values=dict(zip(quota_ids, values, strict=True)),
        chances=dict(zip(quota_ids, chances, strict=True)),
        survey_rooms=capped,
    )


def market_of(
    targets: Sequence[Target],
    *,
    value: Value,
    room: Mapping[int, int] | None,
    survey_room: Mapping[int, int] | None,
    rates: Rates,
    overshoot: float,
    currency_rates: CurrencyRates | None,
) -> Market:
    """Return the market of some quotas; see `Allocate` for the arguments."""
    count = len(targets)
    # With values of your own, prices do not matter, and need no rates.
    currencies = currencies_of(targets) if value is None else frozenset[int]()
    price_of = prices_in_one(currencies, currency_rates)
    if isinstance(rates, LearnedRates):
        rates = rates.fitted(target.survey for target in targets)
    values, chances, rooms = np.zeros(count), np.zeros(count), np.zeros(count, dtype=np.int64)
    numbers: dict[int, int] = {}
    surveys = np.zeros(count, dtype=np.int64)
    # The completes that the waves of a survey still need, as invites.
    needed: defaultdict[int, dict[int, float]] = defaultdict(dict)
    for at, target in enumerate(targets):
        survey, quota = target.survey, target.quota
        surveys[at] = numbers.setdefault(survey.survey_id, len(numbers))
        share = chances[at] = _share(rates, survey, quota)
        if value is None:
            chance = share if isinstance(rates, LearnedRates) else qualifying(survey)
            values[at] = price_of(survey.price) * chance
        else:
            values[at] = _value(value, survey, quota)
        if room is None:
            rooms[at] = _invites(quota.estimated_completes_remaining * overshoot / share)
        else:
            rooms[at] = _invites(_number(room.get(quota.quota_id, 0), f"room of quota {quota.quota_id}"))
        wave = needed[survey.survey_id]
        # The quotas of a survey may have different rates. The best one gives the smallest number of invites.
        invites = max(0.0, survey.estimated_completes_remaining * overshoot / share)
        wave[survey.wave_id] = min(wave.get(survey.wave_id, invites), invites)
    survey_rooms = np.full(len(numbers), _MOST, dtype=np.int64)
    for survey_id, number in numbers.items():
        if survey_room is not None:
            cap = survey_room.get(survey_id)
            if cap is not None:
                survey_rooms[number] = _invites(_number(cap, f"survey_room of survey {survey_id}"))
        elif room is None:
            survey_rooms[number] = _invites(sum(needed[survey_id].values()))
    return Market(values, rooms, surveys, survey_rooms, np.zeros(count), np.ones(count), chances)


def currencies_of(targets: Iterable[Target]) -> frozenset[int]:
    return frozenset(target.survey.price.currency_id for target in targets)


def _value(
    value: Mapping[int, float] | Callable[[Survey, Quota], float], survey: Survey, quota: Quota
) -> float:
    found = value.get(quota.quota_id, 0.0) if isinstance(value, Mapping) else value(survey, quota)
    return _number(found, f"value of quota {quota.quota_id}")


def _share(rates: Rates, survey: Survey, quota: Quota) -> float:
    if isinstance(rates, LearnedRates):
        return max(rates.chance(survey, quota.quota_id), _LEAST)
    rate = rates.get(quota.quota_id, 1.0) if isinstance(rates, Mapping) else rates
    if not 0 < _number(rate, f"rate of quota {quota.quota_id}") <= 1:
        raise InvalidRequestError(f"the rate of quota {quota.quota_id} must be above 0 and at most 1: {rate!r}")
    return rate * qualifying(survey)


def _number(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not isfinite(value):
        raise InvalidRequestError(f"the {what} must be a number, not {value!r:.40}")
    if value < 0:
        raise InvalidRequestError(f"the {what} must be 0 or more, not {value!r}")
    return float(value)


def _invites(number: float) -> int:
    # Rounded first, so that 3 / 0.3 is 10 invites and not 11. What is overfilled has no room.
    return min(_MOST, max(0, int(np.ceil(round(min(number, _MOST), 9)))))


# --- Prices

_FACTORS: Final = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_HALF: Final = np.uint64(32)
_UNIT: Final = 2.0**-64

SPREAD: Final = 0.02
"""The part of its value that a pair gains by chance: members who tie should not all take the same quota."""


def chances(members: NDArray[np.uint64], quotas: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return a number from 0 to 1 for each pair, which depends on nothing but the two hashes."""
    mixed = members * _FACTORS[0] ^ quotas * _FACTORS[1]
    mixed ^= mixed >> _HALF
    mixed *= _FACTORS[2]
    mixed ^= mixed >> _HALF
    chance: NDArray[np.float64] = mixed.astype(np.float64) * _UNIT
    return chance


def best_of_each(
    members: NDArray[np.intp], numbers: NDArray[np.intp], gains: NDArray[np.float64], most: NDArray[np.int64]
) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Return the pairs that each member would take: those that gain most, one of each survey, at most `most`.

    The pairs are in the order of `best_first`, and have the `numbered` of their surveys. It may be fewer, if a
    member's best pairs are many of the same survey. Also return the gain of each member's next best pair, 0 if
    there is none.
    """
    pairs = np.flatnonzero(gains > 0)
    # A few more than are wanted are enough, mostly: some may be of the same survey.
    pairs = pairs[places_within(members[pairs]) < _SPARE * most[members[pairs]]]
    pairs = first_of_each(pairs, numbers)
    place = places_within(members[pairs])
    next_best = pairs[place == most[members[pairs]]]
    others = np.zeros(len(most))
    others[members[next_best]] = gains[next_best]
    return pairs[place < most[members[pairs]]], others


_SLACK: Final = 2.0  # candidates of a quota for each place that it has, at least

_HALVINGS: Final = 40


@frozen(eq=False)
class Prices:
    """The result of `PanelMatcher.derive_prices`: prices of the quotas, derived from a panel.

    Attributes:
        by_quota: The price of an invite, by quota ID: what a place in the quota and in its survey is worth.
        reach: The share of a quota's members that become its candidates, by quota ID, from 0 to 1.
        typical_weight: The mean weight of the members.
    """

    by_quota: Mapping[int, float] = field(repr=False)
    reach: Mapping[int, float] = field(repr=False)
    typical_weight: float = 1.0


_ROUNDS: Final = 60
_FIRST_STEP: Final = 0.03
_SLOWING: Final = 6
_STEEPEST: Final = 2.0
_ENTRIES: Final = 256
_SPARE: Final = 3


def prices_of(source: CompactInventory, sample: Any, possible: float, depth: float) -> Prices:
    """Return the prices at which supply and demand meet, by a merged sample of the panel.

    Prices begin at 0. In each round, each member of the sample takes the quotas whose value exceeds their price
    most. If a quota is taken by more members than it has room for, its price rises; if by fewer, it falls. The
    steps become smaller. See `Allocate` for the method. `depth` is how many candidates of a member there should
    be on average, at most.
    """
    market = source.market
    assert market is not None
    quotas = len(market.values)
    if not (len(sample) and quotas):
        return Prices({}, {})
    planes = [
        np.unpackbits(
            np.frombuffer(b"".join(sample.column(name).to_pylist()), dtype=np.uint8).reshape(len(sample), -1),
            axis=1,
            count=quotas,
        ).T
        for name in ("certain", "possible")
    ]
    fits = np.concatenate(planes).view(bool)
    share = len(sample) / max(len(sample), int(sample.column("members").to_numpy().sum()))
    weights = sample.column("weight").to_numpy()
    typical = float(weights.mean()) or 1.0
    demand = _Demand(fits, market, sample.column(INVITES_LEFT).to_numpy(), weights / typical, possible)
    rooms, survey_rooms = market.rooms * share + 0.5, market.survey_rooms * share + 0.5
    worth = np.zeros(len(survey_rooms))
    np.maximum.at(worth, market.surveys, market.values)
    prices, of_surveys = np.zeros(quotas), np.zeros(len(survey_rooms))
    total, late = np.zeros(quotas), _ROUNDS // 2
    for turn in range(_ROUNDS):
        step = _FIRST_STEP / (1 + turn / _SLOWING)
        taken, of_survey = demand.at(prices + of_surveys[market.surveys])
        of_surveys += step * worth * np.clip(np.log((of_survey + 0.5) / survey_rooms), -_STEEPEST, _STEEPEST)
        of_surveys = np.clip(of_surveys, 0, worth)
        prices += step * market.values * np.clip(np.log((taken + 0.5) / rooms), -_STEEPEST, _STEEPEST)
        # Both together are at most the value: above it, a place would stay free although somebody fits.
        prices = np.clip(prices, 0, np.maximum(0, market.values - of_surveys[market.surveys]))
        # The prices swing around the right ones, so the mean of the later rounds is better than the last ones.
        if turn >= late:
            total += np.minimum(market.values, prices + of_surveys[market.surveys])
    # About how many members of the panel fit each quota. The sample may miss some, so count one more.
    fitting = (fits.reshape(2, quotas, -1).sum(axis=(0, 2)) + 1) / share
    reach = _reach(market, fitting, len(sample) / share, depth)
    ids = source.quota_ids.tolist()
    found = total / (_ROUNDS - late)
    return Prices(
        dict(zip(ids, found.tolist(), strict=True)), dict(zip(ids, reach.tolist(), strict=True)), typical
    )


def _reach(market: Market, fitting: NDArray[np.float64], members: float, depth: float) -> NDArray[np.float64]:
    """Return the share of each quota's members that become its candidates, in proportion to its room.

    It is 1 as long as a member has no more candidates than fit its list. Otherwise the lists of all members
    would hold the same quotas, and the others would get nobody.
    """
    least, most = 0.0, float(fitting.max(initial=1.0))
    for _ in range(_HALVINGS):
        slack = (least + most) / 2
        reach = np.minimum(1.0, slack * market.rooms / fitting)
        if (reach * fitting).sum() > depth * members:
            most = slack
        else:
            least = slack
    reach = np.minimum(1.0, most * market.rooms / fitting)
    return np.maximum(reach, np.minimum(1.0, _SLACK * market.rooms / fitting))


class _Demand:
    """What the members of a sample would take at some prices."""

    def __init__(
        self,
        fits: NDArray[np.bool_],
        market: Market,
        most: NDArray[np.int64],
        weights: NDArray[np.float64],
        possible: float,
    ) -> None:
        self._fits, self._market = fits, market
        self._most, self._weights = most, weights
        self._heaviest = weights.max(initial=0) * (1 + SPREAD)
        count = len(market.values)
        self._quotas = np.tile(np.arange(count), 2)
        self._values = np.concatenate([market.values, market.values * possible])
        self._open = np.tile(market.rooms > 0, 2)
        self._hashes = np.arange(fits.shape[1], dtype=np.uint64)

    def at(self, prices: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return how many members would take each quota, and how many each survey."""
        costs = prices[self._quotas]
        entries = np.flatnonzero(self._open & (self._heaviest * self._values > costs))
        entries = entries[np.argsort((costs - self._values)[entries], kind="stable")]
        members, quotas, gained = [], [], []
        # A member needs more than it takes: some are of the same survey, and chance changes the order.
        wanted = _SPARE * self._most
        left = np.flatnonzero(self._most)
        had = np.zeros(len(left), dtype=np.int64)
        for start in range(0, len(entries), _ENTRIES):
            some = entries[start : start + _ENTRIES]
            entry, at = np.nonzero(self._fits[np.ix_(some, left)])
            entry = some[entry]
            members.append(left[at])
            quotas.append(self._quotas[entry])
            chance = 1 + SPREAD * chances(self._hashes[left[at]], self._quotas[entry].astype(np.uint64))
            gained.append(self._values[entry] * self._weights[left[at]] * chance - costs[entry])
            had += np.bincount(at, minlength=len(left))
            still = had < wanted[left]
            left, had = left[still], had[still]
            if not len(left):
                break
        surveys = self._market.surveys
        if not members:
            return np.zeros(len(surveys), dtype=np.int64), np.zeros_like(self._market.survey_rooms)
        member, gains = np.concatenate(members), np.concatenate(gained)
        order = best_first(member, gains)
        member, gains, quota = member[order], gains[order], np.concatenate(quotas)[order]
        best, _ = best_of_each(member, numbered(member, surveys[quota]), gains, self._most)
        taken = quota[best]
        return (
            np.bincount(taken, minlength=len(surveys)),
            np.bincount(surveys[taken], minlength=len(self._market.survey_rooms)),
        )


def best_first(member: NDArray[np.intp], gains: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return the order of pairs by member, as `by_member`, and those of each member by gain, the most first."""
    # A sort that is not stable is seven times as fast, and hardly any gains are equal.
    order = np.argsort(-gains)
    if (gains[order[1:]] == gains[order[:-1]]).any():
        order = np.argsort(-gains, kind="stable")
    return order[by_member(member[order])]


def numbered(member: NDArray[np.intp], survey: NDArray[np.int64]) -> NDArray[np.intp]:
    """Return a number for each pair, from 0 on: the same for pairs of the same member and survey."""
    order = np.lexsort((survey.astype(np.min_scalar_type(survey.max(initial=0))), member.astype(np.uint16)))
    member, survey = member[order], survey[order]
    is_new = (member[1:] != member[:-1]) | (survey[1:] != survey[:-1])
    numbers = np.empty(len(order), dtype=np.intp)
    numbers[order[:1]] = 0
    numbers[order[1:]] = np.cumsum(is_new)
    return numbers


def first_of_each(pairs: NDArray[np.intp], numbers: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the pairs that come before all others of the same number."""
    first = np.empty(numbers.max(initial=-1) + 1, dtype=np.intp)
    # Of several values for a place, the last one stays: begin at the end.
    first[numbers[pairs[::-1]]] = pairs[::-1]
    is_first: NDArray[np.bool_] = first[numbers[pairs]] == pairs
    return pairs[is_first]
