"""Matching members with quotas: which quotas is this member for, and why.

    from sampling_async.matching import QuotaIndex

    index = QuotaIndex(await client.get_quotas())
    matched = index.match({1001538: 34, 1001007: 2000247, 1001042: "10011"}, device_type=1)
    result = await client.bulk_invite(member_code, matched.select(20))

The contract leaves matching to the partner. A quota matches where all its layers hold, a layer where exactly
one of its sub-quotas fits, a sub-quota where each of its questions is met by one answer. Truth has three values
here, `certain`, `possible` and `no`: where an answer is missing that the service will ask for, or where the
service shows a part of a list only, a miss is no refusal.
"""

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

__all__ = [
    "Bands",
    "Diagnostic",
    "MatchPolicy",
    "MatchResult",
    "Member",
    "Participation",
    "Profile",
    "QuestionKinds",
    "QuotaIds",
    "QuotaIndex",
    "Rank",
    "Reason",
    "Truth",
    "most_wanted",
]
