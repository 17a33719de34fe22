"""The outputs of a panel match."""

from __future__ import annotations

from typing import TypeAlias

from sampling_async.matching.panel._allocate import Allocate, Candidates
from sampling_async.matching.panel._counts import Counts
from sampling_async.matching.panel._prices import Learning
from sampling_async.matching.panel._sample import Sample
from sampling_async.matching.panel._top_k import TopK

Output: TypeAlias = Counts | TopK | Sample | Allocate
"""Counts of members for each quota, the best quotas of each member, some members of each quota, or quotas for
each member that do not get more members than they can use."""


def name_of(output: object) -> str:
    """Return the name of the output that a user has asked for."""
    return Allocate.__name__ if isinstance(output, Candidates | Learning) else type(output).__name__


def needs_codes(output: object) -> bool:
    """Return whether an output contains member codes, so that the panel must have them."""
    return not isinstance(output, Counts)
