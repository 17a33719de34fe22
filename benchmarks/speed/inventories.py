"""Inventories of a given size, in the field order of the service: surveys first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from sampling_async import to_json
from sampling_async.simulator import generate_inventory

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZES: Final = (12, 60)
"""Megabytes: the size of a real panel's inventory, and five times that."""

_SEEDED_SURVEYS: Final = 600
_IDS: Final = frozenset({"SurveyID", "WaveID", "QuotaID", "LayerID", "SubQuotaID"})
_SHIFT: Final = 1_000_000


def inventory(megabytes: float) -> bytes:
    """Return a body of Get Quotas of this size. It is the same each time.

    The simulator generates some hundred surveys, which are repeated with other IDs: to generate all of them
    would take minutes.
    """
    made = msgspec.json.decode(to_json(generate_inventory(1, surveys=_SEEDED_SURVEYS)))
    size, surveys = 0, []
    for survey in _repeated(made["Surveys"]):
        surveys.append(survey)
        size += len(survey) + 1
        if size >= megabytes * 1e6:
            break
    country, expires = made["CountryID"], made["CacheExpires"]
    return b'{"Surveys":[%b],"CountryID":%d,"CacheExpires":"%b"}' % (
        b",".join(surveys),
        country,
        expires.encode(),
    )


def refreshed(body: bytes) -> bytes:
    """Return the inventory of a minute later: one survey in a hundred has changed."""
    made = msgspec.json.decode(body)
    for survey in made["Surveys"][::100]:
        survey["EstimatedCompletesRemaining"] += 1
    return msgspec.json.encode(made)


def _repeated(surveys: list[dict[str, Any]]) -> Iterator[bytes]:
    while True:
        for survey in surveys:
            yield msgspec.json.encode(survey)
            _shift(survey)


def _shift(value: Any) -> None:
    """Change all IDs, in place."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name in _IDS and inner:  # wave 0 means any wave
                value[name] = inner + _SHIFT
            else:
                _shift(inner)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for inner in value:
            _shift(inner)
