"""Matching of a whole panel with all quotas, in chunks of members: numpy on Arrow columns.

This package needs the extra `panel`: `pip install 'sampling-async[panel]'`.
"""

from sampling_async.matching.panel._allocate import Allocate
from sampling_async.matching.panel._arrow import BatchReader
from sampling_async.matching.panel._market import Terms
from sampling_async.matching.panel._matcher import Output, PanelMatcher
from sampling_async.matching.panel._prices import Prices
from sampling_async.matching.panel._sample import Sample
from sampling_async.matching.panel._top_k import Counts, TopK
from sampling_async.matching.panel._workers import Workers

__all__ = [
    "Allocate",
    "BatchReader",
    "Counts",
    "Output",
    "PanelMatcher",
    "Prices",
    "Sample",
    "Terms",
    "TopK",
    "Workers",
]
