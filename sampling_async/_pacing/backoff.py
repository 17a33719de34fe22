"""Waits that double with each failure."""

from __future__ import annotations


def doubled(first: float, doublings: int, longest: float) -> float:
    """Return the first wait, doubled a number of times, but not more than the longest.

    Example with 0.25 and 20: 0.25, 0.5, 1, 2 ... 16, 20, 20 s.
    """
    # Bounded, because 2.0 ** 1100 is an OverflowError. A product that is too large is infinite.
    return min(longest, first * 2.0 ** min(doublings, 1_000))
