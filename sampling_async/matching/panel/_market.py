"""The market of an allocation: for each quota the value of an invite, how many it can use, and its price."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from math import isfinite
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
from attrs import evolve, field, frozen
from numpy.typing import NDArray

from sampling_async import InvalidRequestError
from sampling_async._contract.currencies import prices_in_one
from sampling_async._contract.records import counted
from sampling_async._protocol.lessons import LearnedRates, qualifying

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sampling_async import Quota, Survey
    from sampling_async._contract.currencies import CurrencyRates
    from sampling_async.matching._program import Target

Value: TypeAlias = "Mapping[int, float] | Callable[[Survey, Quota], float] | None"
"""What an invite is worth: by quota ID, by a function, or None for the price times IR."""

Rates: TypeAlias = "LearnedRates | Mapping[int, float] | float"
"""The share of invites that members follow: by quota ID, or one number; or what was learned of each quota."""

_LEAST: Final = 1e-6  # of a share, by which completes are divided
_MOST: Final = 2**40  # more invites than any panel has members


@frozen(eq=False)
class Market:
    """The quotas of an allocation, in the order of a `CompactInventory`."""

    values: NDArray[np.float64]  # what an invite is worth, 0 or more
    rooms: NDArray[np.int64]  # how many invites each quota can use
    surveys: NDArray[np.int64]  # the number of each quota's survey, from 0 on
    survey_rooms: NDArray[np.int64]  # how many invites each survey can use, by its number
    prices: NDArray[np.float64]  # what a place in the quota and in the survey costs
    reach: NDArray[np.float64]  # the share of the members who fit that become candidates
    chances: NDArray[np.float64]  # that an invite ends in a complete

    def order(self) -> NDArray[np.intp]:
        """Return the quotas by what an invite brings beyond its price, the most first."""
        return np.argsort(self.prices - self.values, kind="stable")

    def arranged(self, order: NDArray[np.intp]) -> Market:
        return evolve(
            self,
            values=self.values[order],
            rooms=self.rooms[order],
            surveys=self.surveys[order],
            prices=self.prices[order],
            reach=self.reach[order],
            chances=self.chances[order],
        )


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
