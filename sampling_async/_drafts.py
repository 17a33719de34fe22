"""Frozen records made fast: filled in while they can be written to, and frozen by becoming the record."""

from __future__ import annotations

from typing import Any


def draft_of(record: type[Any], **namespace: Any) -> type[Any]:
    """Return a class whose instances can be written to, and become a record by `draft.__class__ = record`.

    The constructor of a frozen record sets every field through `object.__setattr__`, which takes longer than
    reading them from the wire.

    Args:
        record: A frozen attrs class with slots. A draft has the same ones, and none of its own.
        namespace: What else the class is to hold.
    """
    # Both of the pair: Python finds the C slot behind them only where neither is overridden.
    writable = {"__setattr__": object.__setattr__, "__delattr__": object.__delattr__}
    return type(record.__name__, (record,), {"__slots__": (), **writable, **namespace})
