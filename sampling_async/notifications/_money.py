"""Amounts of money, exact in any decimal context.

The operators of `Decimal` round as the context of the thread or task says, which a host may have changed.
"""

from __future__ import annotations

from decimal import Context, Decimal
from typing import Final

_EXACT: Final = Context(prec=60, traps=[])


def of_hundredths(number: int) -> Decimal:
    """Return an amount, given in hundredths of the currency's unit."""
    return Decimal(f"{number}E-2")


def hundredths(amount: Decimal) -> int:
    """Return an amount in whole hundredths."""
    return int(_EXACT.scaleb(amount, 2))


def size_of(amount: Decimal) -> Decimal:
    """Return an amount without its sign."""
    return amount.copy_abs()


def added(one: Decimal, other: Decimal) -> Decimal:
    """Return the sum of two amounts."""
    return _EXACT.add(one, other)


def difference(one: Decimal, other: Decimal) -> Decimal:
    """Return one amount less the other."""
    return _EXACT.subtract(one, other)
