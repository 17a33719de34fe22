"""Requests and responses as values that the rooms pass to each other."""

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
    """One request, ready to be sent, and the function that reads the body of its 200.

    Attributes:
        endpoint: One of the five endpoints.
        method: GET, or POST for a bulk invite.
        target: The path and query below the base address, percent-encoded. It may hold a member code.
        read: Turns the body of a 200 into the call's result, or raises `DecodeError`.
        body: The JSON body, or None.
        quota_ids: The number of quota IDs in the request. Time limits grow with it.
        private: Texts that errors must not repeat from a response: the member code, plain and encoded.
        if_none_match: The ETag of an earlier response that the caller still has, or None. With it, a 304 is no
            refusal: the service has nothing newer.
    """

    endpoint: Endpoint
    method: Literal["GET", "POST"]
    target: str = field(repr=hidden)
    read: Callable[[bytes], T] = field(repr=False)
    body: bytes | None = field(default=None, repr=False)
    quota_ids: int = 0
    private: tuple[str, ...] = field(default=(), repr=False)
    if_none_match: str | None = field(default=None, repr=False)

    @property
    def has_effect(self) -> bool:
        """Whether the request makes the service create something: invites."""
        return self.endpoint in {"bulk_invite", "generate_invite"}


@value
class Reply:
    """One HTTP response: the status, the decoded body and the headers that the client uses.

    `is_whole` is False if the body of an error was cut or came too late. `is_followed` says that more came
    after an error, so that it may not be the response to this request. `result` holds the result of a body
    that was decoded while it arrived; `body` is empty then. `goes_on` says that more of the body is to
    come: the attempt ends with it.
    """

    status: int
    body: bytes = field(default=b"", repr=False)
    retry_after: str | None = None
    date: str | None = None
    is_whole: bool = True
    is_followed: bool = False
    result: Any = field(default=None, repr=False)
    goes_on: bool = False

    @property
    def is_page(self) -> bool:
        """Whether the body is a page of HTML or XML: then something else answered in place of the service."""
        return self.body[:_LEADING].lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"<"
