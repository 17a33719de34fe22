"""The outputs of a panel match."""

from __future__ import annotations

from typing import TypeAlias

from sampling_async.matching.panel._counts import Counts
from sampling_async.matching.panel._sample import Sample
from sampling_async.matching.panel._top_k import TopK

Output: TypeAlias = Counts | TopK | Sample
"""Counts of members for each quota, the best quotas of each member, or some members of each quota."""


def needs_codes(output: Output) -> bool:
    """Return whether an output contains member codes, so that the panel must have them."""
    return not isinstance(output, Counts)
