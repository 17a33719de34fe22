"""A click page as partners write it: locks and links in memory, one quota after the other."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from sampling_async import SamplingClient
    from sampling_async.matching import LiveIndex, Member


class ClickPage:
    """What a page did before there was a router."""

    def __init__(self, client: SamplingClient, live: LiveIndex) -> None:
        self._client, self._live = client, live
        self._links: dict[str, tuple[int, str]] = {}
        self._unclear: set[tuple[str, int]] = set()
        self._clicks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def route(self, member: Member, *, within: float) -> str | None:
        """Return a link, or None."""
        code, until = member.member_code, anyio.current_time() + within
        async with self._clicks[code]:  # the second of two clicks waits for the first, and gets its link
            quota_id, url = self._links.get(code, (0, ""))
            if url and self._live.is_open(quota_id):
                return url
            return await self._new_link(member, until)

    async def entered(self, member_code: str) -> None:
        """Forget the link of a member."""
        self._links.pop(member_code, None)

    async def _new_link(self, member: Member, until: float) -> str | None:
        code = member.member_code
        fitting = [each for each in self._live.match(member).certain if (code, each) not in self._unclear]
        for quota_id in fitting[:5]:
            if (left := until - anyio.current_time()) <= 0:
                return None
            self._unclear.add((code, quota_id))  # before it is sent, so that this is true whatever happens then
            (outcome,) = await self._client.bulk_invite(code, [quota_id], deadline=left)
            if outcome.status != "unknown":
                self._unclear.discard((code, quota_id))
            if outcome.invite:
                self._links[code] = quota_id, outcome.invite.url
                return outcome.invite.url
            if outcome.status != "rejected":  # the service is away, or too slow
                return None
        return None
