"""Get Quotas: an inventory read survey by survey as it comes, for who wants them so or all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.lowlevel
from attrs import evolve

from sampling_async._collector import put_off_a_pause
from sampling_async._inventory import Inventory
from sampling_async._replies import OK, Reply
from sampling_async._session import Track

if TYPE_CHECKING:
    from collections.abc import Sequence
    from weakref import WeakValueDictionary

    from sampling_async._bodies import Body
    from sampling_async._calls import Caller
    from sampling_async._gate import Permit
    from sampling_async._models import Quotas, Survey
    from sampling_async._protocol import Call

_SLICE: Final = 2**17


async def read_quotas(body: Body, known: WeakValueDictionary[bytes, Survey]) -> Reply:
    """Read an inventory to its end, decoding it on the way; known surveys are not read again."""
    stream = _Reading(body, known)
    surveys: list[Survey] = []
    while not stream.is_over:
        surveys += await stream.next()
        put_off_a_pause()
    if stream.unread is not None:
        return Reply(OK, stream.unread)
    return Reply(OK, result=evolve(stream.frame, surveys=tuple(surveys)))


class _Reading:
    """The surveys of a body.

    Attributes:
        is_over: Whether the body was read to its end, and closed.
        unread: After that, the body if it does not look like an inventory, else None.
    """

    def __init__(self, body: Body, known: WeakValueDictionary[bytes, Survey] | None = None) -> None:
        self.is_over = False
        self.unread: bytes | None = None
        self._body = body
        self._inventory = Inventory(known)

    async def next(self) -> list[Survey]:
        """Return the surveys of the next part that ends some, or of the last part."""
        surveys: list[Survey] = []
        while not surveys and not self.is_over:
            part = await self._body.next()
            if not part:
                surveys = self._inventory.end()
                self.unread = self._inventory.unread
                if self.unread is None:
                    self.frame: Quotas = self._inventory.frame()
                self.is_over = True
                await self._body.aclose()
            for start in range(0, len(part), _SLICE):  # some transports give all at once
                surveys += self._inventory.feed(part[start : start + _SLICE])
                if start:
                    await anyio.lowlevel.checkpoint()
        return surveys

    async def aclose(self) -> None:
        """Close the body."""
        self.is_over = True
        await self._body.aclose()


class SurveyStream:
    """The surveys of an inventory as they arrive: in memory there is a part of the body and its surveys.

    The call is made, and repeated, until its first surveys are there; from then on its failures are raised.

    Args:
        caller: Makes the call.
        call: Get Quotas.
        permit: Leave for the attempts. It is given back when the first surveys are there: who works on them may
            make calls of their own, and the service has done its part by then.
    """

    def __init__(self, caller: Caller, call: Call[Any], permit: Permit) -> None:
        self._caller = caller
        self._call = call
        self._permit = permit
        self._track = Track()
        self._reading: _Reading | None = None
        self._seconds = 0.0

    async def next(self) -> Sequence[Survey]:
        """Return the surveys that come next, or none at the end.

        Raises:
            SamplingError: The call failed, or the rest of the body could not be read.
        """
        if self._reading is None:
            first = await self._caller.run(self._call, self._permit, self._track, self._begin)
            self._seconds = min(self._permit.remaining, self._caller.wall_limit(self._call))
            return first if isinstance(first, list) else first.surveys
        if self._reading.is_over:
            return ()
        began = self._caller.clock()
        surveys = await self._caller.go_on(self._call, self._track, self._reading.next, max(0.0, self._seconds))
        self._seconds -= self._caller.clock() - began  # the time between two calls of this is not the service's
        return surveys

    async def _begin(self, body: Body) -> Reply:
        self._reading = _Reading(body)
        surveys = await self._reading.next()
        unread = self._reading.unread
        return Reply(OK, result=surveys) if unread is None else Reply(OK, unread)

    async def aclose(self) -> None:
        """Close the connection, if it was not read to the end."""
        if self._reading is not None and not self._reading.is_over:
            with anyio.CancelScope(shield=True):
                await self._reading.aclose()
