"""Requests and responses as values that the packages pass to each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Generic, Literal, TypeVar

from attrs import field

from sampling_async._contract.errors import Endpoint
from sampling_async._contract.records import hidden
from sampling_async._contract.structs import value

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
