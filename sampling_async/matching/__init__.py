"""Matching members with quotas: which quotas is this member for, and why.

    from sampling_async.matching import QuotaIndex

    index = QuotaIndex(await client.get_quotas())
    matched = index.match({1001538: 34, 1001007: 2000247, 1001042: "10011"}, device_type=1)
    result = await client.bulk_invite(member_code, matched.select(20))

The contract leaves matching to the partner. A quota matches where all its layers hold, a layer where exactly
one of its sub-quotas fits, a sub-quota where each of its questions is met by one answer. Truth has three values
here, `certain`, `possible` and `no`: where an answer is missing that the service will ask for, or where the
service shows a part of a list only, a miss is no refusal.

`PanelMatcher` does the same for a whole panel in columns; it needs the extra `panel`, and is loaded when it is
used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from sampling_async._models import Participation
from sampling_async.matching._evaluate import Reason
from sampling_async.matching._index import (
    MatchResult,
    Member,
    QuotaIds,
    QuotaIndex,
    Rank,
    most_wanted,
)
from sampling_async.matching._policy import MatchPolicy, Truth
from sampling_async.matching._program import Diagnostic
from sampling_async.matching._questions import Bands, Profile, QuestionKinds

if TYPE_CHECKING:
    from sampling_async.matching.panel import Counts, PanelMatcher, Sample, TopK, Workers

__all__ = [
    "Bands",
    "Counts",
    "Diagnostic",
    "MatchPolicy",
    "MatchResult",
    "Member",
    "PanelMatcher",
    "Participation",
    "Profile",
    "QuestionKinds",
    "QuotaIds",
    "QuotaIndex",
    "Rank",
    "Reason",
    "Sample",
    "TopK",
    "Truth",
    "Workers",
    "most_wanted",
]

_OF_PANEL: Final = frozenset({"Counts", "PanelMatcher", "Sample", "TopK", "Workers"})


def __getattr__(name: str) -> Any:
    """Load what matches panels when it is used: it takes numpy and pyarrow, which the rest does without."""
    if name not in _OF_PANEL:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        panel = import_module("sampling_async.matching.panel")
    except ModuleNotFoundError as exc:
        if exc.name is not None and exc.name.partition(".")[0] in {"numpy", "pyarrow"}:
            raise ImportError(
                f"{name} needs {exc.name}: python -m pip install 'sampling-async[panel]'"
            ) from exc
        raise
    return getattr(panel, name)
