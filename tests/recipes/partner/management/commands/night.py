# management/commands/night.py
import asyncio
from collections import Counter
from typing import Any

from django.core.management.base import BaseCommand

from partner.models import PanelMember
from sampling_async import SamplingClient
from sampling_async.matching import Member, QuotaIndex


async def fan_out(members: list[Member]) -> Counter[str]:
    counts: Counter[str] = Counter()
    async with SamplingClient.from_env() as client:
        index = await asyncio.to_thread(QuotaIndex, await client.get_quotas())
        async with client.fan_out(index.requests(members, n=5), journal="night.journal") as outcomes:
            async for outcome in outcomes:
                counts[outcome.status] += 1
    return counts


class Command(BaseCommand):
    help = "Request invites for the whole panel."

    def handle(self, *_: Any, **__: Any) -> None:
        members = [
            Member(code, {int(question): answer for question, answer in answers.items()})
            for code, answers in PanelMember.objects.values_list("code", "answers").iterator()
        ]
        self.stdout.write(str(dict(asyncio.run(fan_out(members)))))
