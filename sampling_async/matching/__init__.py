"""Match members with quotas: find the quotas that fit a member, and explain why.

    from sampling_async.matching import QuotaIndex

    index = QuotaIndex(await client.get_quotas())
    matched = index.match({1001538: 34, 1001007: 2000247, 1001042: "10011"}, device_type=1)
    result = await client.bulk_invite(member_code, matched.select(20))

The contract leaves matching to the partner. A member matches a quota if the member fits all its layers. A
member fits a layer if exactly one of its sub-quotas fits. A sub-quota fits if the member's answers meet all its
questions. The result has three values: `certain`, `possible` and `no`. It is `possible`, and not `no`, if an
answer is missing and the service will ask for it, or if the service shows only a part of a list.

`PanelMatcher` matches a whole panel, given in columns. It needs the extra `panel`, and is imported on first
use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from sampling_async._contract.extras import install
from sampling_async._contract.records import Participation
from sampling_async._protocol.lessons import LearnedRates
from sampling_async.matching._conditions import AGE_ANSWERS, Bands, MatchPolicy, Profile, QuestionKinds, Truth
from sampling_async.matching._evaluate import Reason
from sampling_async.matching._index import Member, QuotaIndex, UnknownQuotaError
from sampling_async.matching._program import Diagnostic
from sampling_async.matching._result import MatchResult, QuotaIds
from sampling_async.matching._segment import Rank, most_wanted

if TYPE_CHECKING:
    from sampling_async._following import Following
    from sampling_async._live import LiveIndex
    from sampling_async.matching.panel import (
        Allocate,
        BatchReader,
        Counts,
        Output,
        PanelMatcher,
        Prices,
        Sample,
        Terms,
        TopK,
        Workers,
    )

__all__ = [
    "AGE_ANSWERS",
    "Allocate",
    "Bands",
    "BatchReader",
    "Counts",
    "Diagnostic",
    "Following",
    "LearnedRates",
    "LiveIndex",
    "MatchPolicy",
    "MatchResult",
    "Member",
    "Output",
    "PanelMatcher",
    "Participation",
    "Prices",
    "Profile",
    "QuestionKinds",
    "QuotaIds",
    "QuotaIndex",
    "Rank",
    "Reason",
    "Sample",
    "Terms",
    "TopK",
    "Truth",
    "UnknownQuotaError",
    "Workers",
    "most_wanted",
]

_LIVE: Final = {"Following": "_following", "LiveIndex": "_live"}


def __getattr__(name: str) -> Any:
    """Import the panel's names on first use: they need numpy and pyarrow. Those that are live need anyio."""
    if name in _LIVE:
        return getattr(import_module(f"sampling_async.{_LIVE[name]}"), name)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        panel = import_module("sampling_async.matching.panel")
    except ModuleNotFoundError as exc:
        # Hint at the extra only if one of its packages is missing, not if an import inside one of them fails.
        if exc.name is not None and exc.name.partition(".")[0] in {"numpy", "pyarrow"}:
            raise ImportError(f"{name} needs {exc.name}: {install('panel')}") from exc
        raise
    return getattr(panel, name)
