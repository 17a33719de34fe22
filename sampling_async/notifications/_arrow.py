"""Facts as an Arrow table."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from sampling_async._contract.frames import arrow, utc_times

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sampling_async.notifications._store import Fact

_OF_FACTS: Final = (
    "id",
    "key",
    "received_at",
    "receipts",
    "differing",
    "verified",
    "anomaly",
    "corrects",
    "validity",
    "state",
)
_OF_RECORDS: Final = (
    "member_code",
    "survey_id",
    "wave_id",
    "quota_id",
    "revenue",
    "amount",
    "reason",
    "is_live",
    "at",
)


def facts_table(facts: Sequence[Fact[Any]]) -> Any:
    pa = arrow()
    text, number = pa.string(), pa.int64()
    types = {
        **dict.fromkeys(("received_at", "at"), utc_times()),
        **dict.fromkeys(("verified", "is_live"), pa.bool_()),
        **dict.fromkeys(("key", "validity", "state", "member_code", "reason", "kind", "posted_as"), text),
        **dict.fromkeys(("revenue", "amount"), pa.decimal128(38, 2)),
        **dict.fromkeys(("anomaly", "fields"), text),
    }
    columns: dict[str, list[Any]] = {
        "kind": [None if fact.kind is None else str(fact.kind) for fact in facts],
        "posted_as": [str(fact.posted_as) for fact in facts],
        **{name: [getattr(fact, name) for fact in facts] for name in _OF_FACTS},
        **{name: [getattr(fact.notification, name, None) for fact in facts] for name in _OF_RECORDS},
        "fields": [json.dumps(fact.fields) for fact in facts],
    }
    return pa.table({name: pa.array(values, types.get(name, number)) for name, values in columns.items()})
