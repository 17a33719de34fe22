"""Requests for members who wait for a link, as `SurveyRouter` makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from attrs import frozen

from sampling_async._bulk.invites import Inviter
from sampling_async._bulk.options import BULK
from sampling_async._calls.attempt import Feedback
from sampling_async._pacing.blocks import Block
from sampling_async._pacing.gate import Gate, Permit
from sampling_async._protocol.requests import MAX_QUOTA_IDS, Chunk, InviteRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sampling_async._contract.checks import Text
    from sampling_async._protocol.results import InviteOutcome


@frozen
class ClickInvites:
    """Requests that go before all bulks, as `generate_invite` does."""

    new_inviter: Callable[[], Inviter]
    gate: Gate
    until_closed: Callable[[], Block]
    feedback: Feedback

    def count_unused(self, invites: int) -> None:
        """Count invites that wait for a click, or fewer again."""
        self.feedback.unused += invites

    async def request(
        self, member_code: Text, quota_ids: Iterable[int], *, within: float, late: float
    ) -> tuple[InviteOutcome, ...]:
        """Send one request within so many seconds, or nothing; its response may be `late` by some more."""
        request, until = InviteRequest(member_code, quota_ids), self.gate.clock() + within
        permit = Permit(self.gate, self.gate.kind(BULK).interactive, until, late)
        chunk = Chunk(request.member_code, request.quota_ids[:MAX_QUOTA_IDS])
        return await self.new_inviter().ask_alone(chunk, permit, self.until_closed())
