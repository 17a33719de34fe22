"""Whose an invite link is: the last guard against an answer that was meant for another member.

HTTP/1.1 answers bear no mark of their request. A second answer to an earlier one, that comes while the next
request waits on the same connection, passes for the answer to that, if it is about the same quotas. What tells
it apart are the links in it: each was made for one member, and had been handed to that one before.
"""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, Final

from sampling_async._errors import DecodeError

if TYPE_CHECKING:
    from collections.abc import Sequence

_REMEMBERED: Final = 32_768
"""Links after which the older half is forgotten: those of some hundred requests, which take a few MB."""


class Links:
    """Remembers to which member a client has handed each link, the latest of them."""

    __slots__ = ("_before", "_latest", "_most")

    def __init__(self, most: int = _REMEMBERED) -> None:
        self._latest: dict[int, str] = {}
        self._before: dict[int, str] = {}
        self._most = most

    def hand(self, member_code: str, links: Sequence[str], path: str) -> None:
        """Take note that links are handed to a member.

        Args:
            member_code: The member.
            links: The links of one answer.
            path: Where they are in it, in the wire's own names.

        Raises:
            DecodeError: One of them was handed to another member. None of the answer can be trusted then.
        """
        latest, fine = self._latest, {None, member_code}
        # Few steps, each over all links: this is done for every answer. Hashes take the same room for any link.
        keys = [*map(hash, filter(None, links))]
        owners = {*map(latest.get, keys), *(map(self._before.get, keys) if self._before else ())}
        if not owners <= fine:
            raise DecodeError(path, "expected invites of this member, found a link given to another one")
        latest.update(zip(keys, repeat(member_code)))
        if len(latest) > self._most:
            self._before, self._latest = latest, {}
