"""What to install when a package of an extra is missing."""

from __future__ import annotations


def install(extra: str) -> str:
    """Return how an extra is installed: from an index, and from a clone before anything is published."""
    return f'python -m pip install "sampling-async[{extra}]" (in a clone: ".[{extra}]")'
