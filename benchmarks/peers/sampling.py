"""`sampling_async` behind the interface of the speed harness."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, Self

from sampling_async import Quotas, SamplingClient, from_json
from sampling_async._calls.quotas import read_quotas
from sampling_async._json.fast import KnownSurveys

if TYPE_CHECKING:
    from collections.abc import Sequence

_PART: Final = 2**16


class SamplingAsync:
    """A `SamplingClient` with its defaults, except for its width and, if given, its engine."""

    name = "sampling_async"

    def __init__(self, url: str, panel_guid: str, api_key: str, width: int, **engine: Any) -> None:
        self.client = SamplingClient(
            url, panel_guid=panel_guid, api_key=api_key, max_concurrency=width, **engine
        )

    async def __aenter__(self) -> Self:
        await self.client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()

    async def bulk(self, member_code: str, quota_ids: Sequence[int]) -> int:
        """Request invites for all quota IDs and return the number of invites."""
        result = await self.client.bulk_invite(member_code, quota_ids)
        return sum(outcome.invite is not None for outcome in result)

    async def invite(self, member_code: str, quota_id: int) -> str:
        """Make one Generate Invite and return its link."""
        return (await self.client.generate_invite(member_code, quota_id)).url

    async def quotas(self) -> Any:
        """Make one Get Quotas."""
        return await self.client.get_quotas()

    def decode_quotas(self, body: bytes) -> Any:
        """Read an inventory as `get_quotas` does: survey by survey, in parts as sockets give them."""
        return quotas_of(body, KnownSurveys())


class SamplingAsyncWhole(SamplingAsync):
    """The same, for a user who has a whole inventory in memory."""

    name = "sampling_async, from_json"

    def decode_quotas(self, body: bytes) -> Any:
        """Read an inventory in one call."""
        return from_json(Quotas, body)


class SamplingAsyncCounted(SamplingAsync):
    """The same, for a user who takes the invites and counts the rest."""

    name = "sampling_async, invites and counts"

    async def bulk(self, member_code: str, quota_ids: Sequence[int]) -> int:
        """Request invites for all quota IDs and return the number of invites."""
        result = await self.client.bulk_invite(member_code, quota_ids)
        if sum(result.counts.values()) != len(quota_ids):
            raise ValueError("a quota ID was not counted")
        # Each invite is created when it is read.
        return sum(invite.url != "" for invite in result.invites)


def quotas_of(body: bytes, known: KnownSurveys) -> Quotas:
    """Read an inventory as a client does that knows some surveys of it."""
    arriving: Any = _Arriving(body)
    quotas: Quotas | None = asyncio.run(read_quotas(arriving, known)).result
    assert quotas is not None
    return quotas


class _Arriving:
    """What `read_quotas` needs of a `Body`."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._at = 0

    async def next(self) -> bytes:
        """Return the next part."""
        part = self._body[self._at : self._at + _PART]
        self._at += _PART
        return part

    async def aclose(self) -> None:
        """Do nothing."""
