"""Requests and responses as values that the packages pass to each other.

And what the HTTP statuses mean to a client of this service. A proxy may have sent one: bodies add the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Flag, auto
from typing import Any, Final, Generic, Literal, TypeVar

from attrs import field

from sampling_async._contract.errors import Endpoint
from sampling_async._contract.records import hidden
from sampling_async._contract.structs import value

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


T = TypeVar("T")

MAX_RETRY_AFTER: Final = 60.0
"""The longest Retry-After, in seconds, that the client waits for. With a longer one, the call fails."""

_LEADING: Final = 1024
"""Bytes in which the beginning of a page is looked for, after a byte order mark and white space."""


@value
class Call(Generic[T]):
    """One request, ready to be sent, and the function that reads the body of its 200."""

    endpoint: Endpoint
    method: Literal["GET", "POST"]
    # the path and query below the base address, percent-encoded; it may hold a member code
    target: str = field(repr=hidden)
    read: Callable[[bytes], T] = field(repr=False)
    body: bytes | None = field(default=None, repr=False)
    quota_ids: int = 0
    # texts that errors must not repeat: the panel, and the member code, plain and encoded
    private: tuple[str, ...] = field(default=(), repr=False)
    # The ETag of an earlier response that the caller still has. With it, a 304 is no refusal: the service has
    # nothing newer.
    if_none_match: str | None = field(default=None, repr=False)

    @property
    def has_effect(self) -> bool:
        return self.endpoint in {"bulk_invite", "generate_invite"}


@value
class Reply:
    """One HTTP response: the status, the decoded body and the headers that the client uses."""

    status: int
    body: bytes = field(default=b"", repr=False)  # empty if it was decoded while it arrived
    retry_after: str | None = None
    date: str | None = None
    is_whole: bool = True  # False if the body of an error was cut or came too late
    is_followed: bool = False  # more came after an error, so that it may not be the response to this request
    result: Any = field(default=None, repr=False)  # of a body that was decoded while it arrived
    goes_on: bool = False  # more of the body is to come: the attempt ends with it

    @property
    def is_page(self) -> bool:
        """Whether the body is a page of HTML or XML: then something else answered in place of the service."""
        return self.body[:_LEADING].lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"<"
