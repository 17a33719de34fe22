"""What the HTTP statuses mean to a client of this service. A proxy may have sent one: bodies add the rest."""

from __future__ import annotations

from enum import Flag, auto
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

OK: Final = 200
NOT_MODIFIED: Final = 304
BAD_REQUEST: Final = 400
FORBIDDEN: Final = 403
NOT_FOUND: Final = 404
TOO_MANY: Final = 429
INTERNAL_ERROR: Final = 500
UNAVAILABLE: Final = 503
ANSWERS: Final = frozenset({OK, 201, 203})
"""The statuses whose body is the whole answer: frameworks send 201 for a POST, and 203 says that a proxy has
changed something. Not 202, where nothing is done yet, and not 206, which is a part."""


class Meaning(Flag):
    """What a status means. A status that is not in the table is a permanent error.

    `OWN`: the service itself sends this status. Another status may come from a proxy, for example after a time
    limit. The service's own response may then follow on the same connection, and the next request would get it.
    `PASSING`: the next attempt may succeed.
    `UNPROCESSED`: it proves that the request was not processed, from the service and from any proxy.
    `LOAD`: the request was refused because of too many requests, or too much load.
    `AWAY`: the service is not there, as in an outage.
    `ELSEWHERE`: a redirect. The service redirects nothing; a proxy may, while it has no service behind it.
    """

    OWN = auto()
    PASSING = auto()
    UNPROCESSED = auto()
    LOAD = auto()
    AWAY = auto()
    ELSEWHERE = auto()


_MEANINGS: Final[Mapping[int, Meaning]] = {
    OK: Meaning.OWN,
    201: Meaning.OWN,
    203: Meaning.OWN,
    301: Meaning.ELSEWHERE,
    302: Meaning.ELSEWHERE,
    303: Meaning.ELSEWHERE,
    NOT_MODIFIED: Meaning.OWN,
    307: Meaning.ELSEWHERE,
    308: Meaning.ELSEWHERE,
    BAD_REQUEST: Meaning.OWN,
    408: Meaning.PASSING | Meaning.UNPROCESSED,  # it came too late
    425: Meaning.PASSING | Meaning.UNPROCESSED,  # too early
    TOO_MANY: Meaning.PASSING | Meaning.UNPROCESSED | Meaning.LOAD,
    INTERNAL_ERROR: Meaning.PASSING,
    502: Meaning.PASSING | Meaning.AWAY,
    UNAVAILABLE: Meaning.PASSING | Meaning.AWAY | Meaning.LOAD,
    504: Meaning.PASSING | Meaning.AWAY,
}


def statuses(meaning: Meaning) -> frozenset[int]:
    """Return the statuses with a meaning, or with any of several (`Meaning.LOAD | Meaning.AWAY`)."""
    return frozenset(status for status, has in _MEANINGS.items() if has & meaning)
