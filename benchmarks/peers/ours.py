"""`sampling_async` behind the interface of the scoreboard."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any, Self

from peers.common import Address, Options, Outcome
from sampling_async import InviteRequest, OutagePolicy, RetryPolicy, SamplingClient, Timeouts

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Sequence
    from types import TracebackType

    from sampling_async import InviteOutcome


class OurClient:
    """A `SamplingClient` with its defaults, except for the options."""

    def __init__(self, address: Address, options: Options) -> None:
        arguments: dict[str, Any] = {}
        if options.read is not None:
            arguments["timeouts"] = Timeouts(read=options.read, wall=options.patience)
        if options.backoff is not None:
            arguments["retry"] = RetryPolicy(base=options.backoff, throttled_base=options.backoff)
            # Sections with short waits make single faults without end, and are not about outages.
            arguments["outage"] = OutagePolicy(patience=0.0, failures=1_000_000)
        if options.transport is not None:
            arguments["transport"] = options.transport
        if options.authority is not None:
            arguments["ssl_context"] = ssl.create_default_context(cadata=options.authority)
        arguments["proxy"] = options.proxy
        self._journal = options.journal
        self.client = SamplingClient(
            address.url,
            panel_guid=address.panel_guid,
            api_key=address.api_key,
            max_concurrency=options.concurrency,
            **arguments,
        )

    async def __aenter__(self) -> Self:
        await self.client.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.client.__aexit__(exc_type, exc, traceback)

    async def invite_all(self, requests: Iterable[tuple[str, Sequence[int]]]) -> list[Outcome]:
        """Stream the fan-out to its end."""
        asked = (InviteRequest(member_code, quota_ids) for member_code, quota_ids in requests)
        more: dict[str, Any] = {} if self._journal is None else {"journal": self._journal}
        async with self.client.fan_out(asked, **more) as outcomes:
            return [_outcome(outcome) async for outcome in outcomes]

    async def invite(self, member_code: str, quota_id: int) -> Any:
        """Make one Generate Invite."""
        return await self.client.generate_invite(member_code, quota_id)

    async def quotas(self) -> Any:
        """Make one Get Quotas."""
        return await self.client.get_quotas()

    async def settings(self) -> Any:
        """Make one Get Settings."""
        return await self.client.get_settings()

    def recontact(
        self, quota_id: int, *, page_size: int | None = None, after: str | None = None
    ) -> AsyncGenerator[str, None]:
        """Yield the member codes of a recontact quota."""
        return self.client.recontact_members(quota_id, max_results=page_size, after=after)


def _outcome(outcome: InviteOutcome) -> Outcome:
    url = outcome.invite.url if outcome.invite else None
    return Outcome(outcome.member_code, outcome.quota_id, outcome.status, url)
