"""The owners of invite links: the last protection against a response that belongs to another member.

An HTTP/1.1 response does not name its request. If a server sends a second response to an earlier request while
the next request waits on the same connection, it looks like the response to that next request, provided that
it is about the same quotas. Only the links in it show the error: each link was made for one member, and that
member had received it before.
"""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, Final

from sampling_async._contract.errors import DecodeError

if TYPE_CHECKING:
    from collections.abc import Sequence

_REMEMBERED: Final = 32_768
"""After this many links the older half is forgotten. They are the links of some hundred requests, a few MB."""


class Links:
    """The latest links of a client, each with the member who received it."""

    __slots__ = ("_before", "_latest", "_most")

    def __init__(self, most: int = _REMEMBERED) -> None:
        self._latest: dict[int, str] = {}
        self._before: dict[int, str] = {}
        self._most = most

    def hand(self, member_code: str, links: Sequence[str], path: str) -> None:
        """Record that links are given to a member.

        Args:
            member_code: The member.
            links: The links of one response.
            path: Where they are in the response, in the names of the contract.

        Raises:
            DecodeError: A link belongs to another member. Nothing in this response can be trusted.
        """
        latest, known = self._latest, len(self._latest)
        # This runs for every response, so it is a few steps in C over all links, without a Python loop. The
        # keys are hashes, which need the same memory for a link of any length.
        keys = [*map(hash, filter(None, links))]
        owners = [*map(latest.setdefault, keys, repeat(member_code))]
        if self._before:
            owners += filter(None, map(self._before.get, keys))
        if owners.count(member_code) != len(owners):
            while len(latest) > known:  # forget the links that were added just now
                latest.popitem()
            raise DecodeError(
                path, "expected an invite of this member, found a link that another member was given"
            )
        # Two generations: a full one becomes the older one, and the older one before it is dropped as a whole.
        if len(latest) > self._most:
            self._before, self._latest = latest, {}
