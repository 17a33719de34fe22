"""A whole panel against all quotas, in chunks of members: with numpy, on columns of Arrow.

It needs the extra `panel`: `pip install 'sampling-async[panel]'`.
"""

from sampling_async.matching.panel._matcher import PanelMatcher
from sampling_async.matching.panel._outputs import Counts, Sample, TopK
from sampling_async.matching.panel._workers import Workers

__all__ = ["Counts", "PanelMatcher", "Sample", "TopK", "Workers"]
