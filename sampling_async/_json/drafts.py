"""Make frozen records fast: fill a writable subclass, then set `__class__`."""

from __future__ import annotations

from typing import Any


def draft_of(record: type[Any], **namespace: Any) -> type[Any]:
    """Return a writable subclass of a frozen record.

    Call it without arguments, fill the instance, then set `draft.__class__ = record`: the instance is now a
    frozen record. This is faster than the constructor of a frozen record, which sets each field through
    `object.__setattr__`. That takes longer than reading the fields from the wire.

    Args:
        record: A frozen attrs class with slots. The subclass has the same slots and no others, which Python
            requires for the change of `__class__`.
        namespace: Further attributes of the subclass.
    """
    # Setting and deleting are both needed: one C function does the work of the two, and Python calls it
    # directly only if neither name is a Python function.
    plain = {name: getattr(object, name) for name in ("__init__", "__setattr__", "__delattr__")}
    return type(record.__name__, (record,), {"__slots__": (), **plain, **namespace})
