"""Prices in several currencies: what one unit of each is worth, and what each is called."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from attrs import field, frozen

from sampling_async._contract.checks import is_whole, number_above_0, shown
from sampling_async._contract.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sampling_async._contract.records import Price

_NAMED: Final = 5
_LARGEST: Final = 1e300


def _by_currency(values: object, what: str) -> dict[int, Any]:
    if not isinstance(values, Mapping):
        raise InvalidRequestError(f"{what} must be by currency ID, such as {{1: 1.0, 9: 0.0064}}")
    for each in values:
        if not is_whole(each):
            raise InvalidRequestError(f"{what} must be by currency ID, a whole number, not {shown(each)}")
    return dict(values)


def _rates(values: object) -> dict[int, float]:
    found = _by_currency(values, "currency rates")
    for each, rate in found.items():
        if number_above_0(rate, f"the rate of currency {each}", "the worth of one unit") > _LARGEST:
            raise InvalidRequestError(f"the rate of currency {each} must be a finite number")
    return {each: float(rate) for each, rate in found.items()}


def _names(values: object) -> dict[int, str]:
    found = _by_currency(values, "names of currencies")
    for each, name in found.items():
        if not isinstance(name, str) or not name.isprintable() or not name.strip():
            raise InvalidRequestError(f"the name of currency {each} must be printable text, not {shown(name)}")
    return {each: name.strip() for each, name in found.items()}


@frozen
class CurrencyRates:
    """What one unit of each currency is worth, in a unit that you choose, so that prices can be compared.

        CurrencyRates({1: 1.0, 9: 0.0064}, names={1: "USD", 9: "JPY"})

    Where it is wanted, a plain mapping of rates will do.

    Attributes:
        by_id: The worth of one unit, by currency ID.
        names: What pages and tables call a currency, by its ID. One that is missing is shown by its ID.

    Raises:
        InvalidRequestError: A rate is not above 0, or an ID or a name is none.
    """

    by_id: Mapping[int, float] = field(converter=_rates)
    names: Mapping[int, str] = field(factory=dict[int, str], converter=_names, kw_only=True)

    def worth(self, price: Price) -> float:
        """Return what a price is worth in your unit, such as for the `rank` of an index.

        Raises:
            InvalidRequestError: There is no rate for its currency.
        """
        self.require({price.currency_id})
        return price.amount * self.by_id[price.currency_id]

    def require(self, currency_ids: Iterable[int]) -> None:
        """Check that there is a rate for each of some currencies.

        Raises:
            InvalidRequestError: There is none for some of them.
        """
        if missing := sorted({*currency_ids} - self.by_id.keys()):
            named = ", ".join(map(str, missing[:_NAMED])) + ", ..." * (len(missing) > _NAMED)
            raise InvalidRequestError(
                f"there are prices in currency {named}, for which there is no rate: add what one unit is worth,"
                f" as in currency_rates={{{missing[0]}: ...}} or in the file of --currency-rates"
            )


Currencies: TypeAlias = "CurrencyRates | Mapping[int, float] | None"
"""The rates of currencies: a `CurrencyRates`, or the worth of one unit by currency ID; None: no rates."""

PLACES_ALONE: Final = CurrencyRates({})
"""In place of rates: each price counts as 1, and somebody has said so."""


def rates_or_none(value: Currencies) -> CurrencyRates | None:
    return value if value is None or isinstance(value, CurrencyRates) else CurrencyRates(value)


def must_count_alike(currency_ids: Iterable[int], rates: CurrencyRates | None) -> bool:
    """Return whether prices of these currencies cannot be compared, so that each must count as 1."""
    return rates is PLACES_ALONE or (rates is None and len({*currency_ids}) > 1)


def prices_in_one(currency_ids: Iterable[int], rates: CurrencyRates | None) -> Callable[[Price], float]:
    """Return a function that makes prices of some currencies comparable."""
    found = {*currency_ids}
    if must_count_alike(found, rates):
        return lambda _: 1.0
    if rates is None:
        return lambda price: float(price.amount)
    rates.require(found)
    return rates.worth


def not_compared(currency_ids: Iterable[int]) -> str:
    """Return what to say, once, where prices must count alike."""
    named = ", ".join(map(str, sorted({*currency_ids})[:_NAMED]))
    return (
        f"the prices are in several currencies ({named}) and there are no rates, so each price counts as 1,"
        " and only IR and places are compared: give currency_rates, or --currency-rates FILE"
    )


# --- Sums

_OF_RATES: Final = "the unit of the rates"

Amount = TypeVar("Amount", float, Decimal)


def add_to(sums: dict[int, Amount], currency_id: int, amount: Amount) -> None:
    """Add an amount to the sum of its currency."""
    sums[currency_id] = amount + sums.get(currency_id, 0)


def total_of(sums: Mapping[int, float], rates: CurrencyRates | None) -> float | None:
    """Return sums by currency as one: in the unit of the rates; None where they do not add."""
    if rates is None:
        return None if len(sums) > 1 else sum(sums.values(), 0.0)
    if sums.keys() - rates.by_id.keys():  # of an earlier plan, with other rates
        return None
    return sum((rates.by_id[each] * amount for each, amount in sums.items()), 0.0)


def label_of(currency_id: int, rates: CurrencyRates | None) -> str:
    """Return what a currency is called."""
    return (rates.names.get(currency_id) if rates else None) or f"currency {currency_id}"


def unit_of(currency_id: int | None, rates: CurrencyRates | None) -> str:
    """Return what a total is in, given the only currency in it; empty if that is not known."""
    if currency_id is not None and (rates is None or rates.by_id.get(currency_id) == 1):
        return label_of(currency_id, rates)
    return "" if rates is None else _OF_RATES


def each_in_words(sums: Mapping[int, Any], rates: CurrencyRates | None) -> str:
    """Return sums by currency, beside each other: `1,215.00 USD, 150.00 in currency 9`."""
    names = rates.names if rates else {}
    return ", ".join(
        f"{amount:,.2f} {names.get(each) or f'in currency {each}'}" for each, amount in sorted(sums.items())
    )


def money_in_words(
    total: float | Decimal | None, currency_id: int | None, sums: Mapping[int, Any], rates: CurrencyRates | None
) -> str:
    """Return an amount with its currency; with several, what is in each of them."""
    if total is None:
        return each_in_words(sums, rates) or "not known"
    unit = unit_of(currency_id, rates)
    if unit == _OF_RATES and sums:
        return f"{total:,.2f} by the rates of currencies: {each_in_words(sums, rates)}"
    if currency_id is None or not unit:
        return f"{total:,.2f}"
    return f"{total:,.2f} {unit}" if rates and currency_id in rates.names else f"{total:,.2f} ({unit})"
