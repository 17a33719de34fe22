"""Gates whose clock a test moves, and permits of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sampling_async._pacing.gate import Gate, Permit
from sampling_async._pacing.turns import Lane

if TYPE_CHECKING:
    import doubles


def fixed(maximum: int, time: doubles.FakeTime) -> Gate:
    return Gate(maximum, clock=time.clock, sleep=time.sleep, random=lambda: 0.0)


async def held(shut: Gate, kind: str) -> Permit:
    permit = Permit(shut, Lane(kind))
    await permit.acquire()
    return permit
