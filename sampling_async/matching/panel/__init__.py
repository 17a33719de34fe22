"""Matching of a whole panel with all quotas, in chunks of members: numpy on Arrow columns.

This package needs the extra `panel`: `pip install 'sampling-async[panel]'`.
"""

from sampling_async._contract import panel_extra as _panel_extra  # noqa: F401  first  # pyright: ignore[reportUnusedImport]
from sampling_async.matching.panel._allocate import Allocate
from sampling_async.matching.panel._arrow import MEMBER_CODE, BatchReader
from sampling_async.matching.panel._columns import EXCLUDED, INVITES_LEFT, OTHERS, REGION
from sampling_async.matching.panel._files import PanelFile, alike, is_query
from sampling_async.matching.panel._matcher import Output, PanelMatcher
from sampling_async.matching.panel._prices import Prices, Terms
from sampling_async.matching.panel._sample import Sample
from sampling_async.matching.panel._top_k import Counts, TopK
from sampling_async.matching.panel._workers import Workers

__all__ = [
    "EXCLUDED",
    "INVITES_LEFT",
    "MEMBER_CODE",
    "OTHERS",
    "REGION",
    "Allocate",
    "BatchReader",
    "Counts",
    "Output",
    "PanelFile",
    "PanelMatcher",
    "Prices",
    "Sample",
    "Terms",
    "TopK",
    "Workers",
    "alike",
    "is_query",
]
