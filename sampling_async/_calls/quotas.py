"""Get Quotas: decode an inventory survey by survey while it arrives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from weakref import ref

import anyio
import anyio.lowlevel
from attrs import evolve, frozen

from sampling_async._contract.exchange import NOT_MODIFIED, OK, Reply
from sampling_async._contract.records import Quotas, leave_out
from sampling_async._json.fast import KnownSurveys
from sampling_async._json.inventory import Inventory
from sampling_async._pacing.gc_pauses import defer_full_gc
from sampling_async._pacing.timeline import BODY, DECODE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sampling_async._calls.call import Caller
    from sampling_async._contract.errors import DecodeError
    from sampling_async._contract.exchange import Call
    from sampling_async._contract.records import Survey
    from sampling_async._pacing.gate import Permit
    from sampling_async._wire.bodies import LimitedBody

_SLICE: Final = 2**17  # bytes that are decoded before the event loop gets a turn

_BELIEVED: Final = 600.0
"""Seconds for which a 304 is believed. Then all is read again: the ETag of some proxies never changes."""


@frozen
class _Earlier:
    """An inventory that was read whole, its ETag if it has one, and when that was."""

    quotas: ref[Quotas]
    etag: str | None
    read_at: float


class QuotasReader:
    """Get Quotas of one client. It does not read again what the user still holds of earlier inventories.

    A survey whose JSON is the same as before is not decoded again. A service may also give an ETag, although
    the contract does not show one. Then the next call sends it, and a 304 stands for the whole inventory.
    """

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._surveys = KnownSurveys()
        self._earlier: dict[str, _Earlier] = {}  # by the call's target

    async def get(self, call: Call[Quotas], permit: Permit, *, strict: bool) -> Quotas:
        """Return the inventory. A survey that lacks a value is refused if `strict`, or left out."""
        earlier, now = self._earlier.get(call.target), self._caller.clock()
        # Held until the response has arrived: a 304 is of no use without it.
        held = None if earlier is None else earlier.quotas()
        if held is not None and strict and held.left_out:
            held = None  # a 304 would return it
        if earlier is not None and held is not None and now - earlier.read_at < _BELIEVED:
            call = evolve(call, if_none_match=earlier.etag)
        etag: str | None = None

        async def read(body: LimitedBody) -> Reply:
            nonlocal etag
            if body.is_unchanged:
                await body.aclose()
                return Reply(NOT_MODIFIED, result=held)
            etag = body.etag
            return await read_quotas(body, self._surveys, strict=strict)

        quotas = await self._caller.call(call, permit, read=read)
        if quotas is not held:
            self._earlier[call.target] = _Earlier(ref(quotas), etag, now)
        return quotas


async def read_quotas(body: LimitedBody, known: KnownSurveys, *, strict: bool = False) -> Reply:
    """Read an inventory to its end and decode it while it arrives. Surveys in `known` are not decoded again."""
    stream = _Reading(body, known, strict=strict)
    surveys: list[Survey] = []
    while not stream.is_over:
        surveys += await stream.next()
        # A full garbage collection with so many new objects blocks the event loop for a tenth of a second.
        defer_full_gc()
    # No survey was found in the body. The caller decodes it as a whole, which also explains what is wrong.
    if stream.unread is not None:
        return Reply(OK, stream.unread)
    quotas = evolve(stream.frame, surveys=tuple(surveys))
    return Reply(OK, result=leave_out(quotas, stream.left_out, stream.left_out_ids))


class _Reading:
    """The surveys of a body."""

    def __init__(self, body: LimitedBody, known: KnownSurveys | None = None, *, strict: bool) -> None:
        self.is_over = False  # the body was read to its end and closed
        self.unread: bytes | None = None  # at the end: the whole body if no survey was found in it
        self._body = body
        self._inventory = Inventory(known, strict=strict)
        self.left_out = self._inventory.left_out.errors
        self.left_out_ids = self._inventory.left_out.ids

    async def next(self) -> list[Survey]:
        """Read on until at least one survey is complete, and return the new surveys; none at the end."""
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
            # Some transports give the whole body as one part. It is decoded in slices.
            for start in range(0, len(part), _SLICE):
                surveys += self._inventory.feed(part[start : start + _SLICE])
                if start:
                    await anyio.lowlevel.checkpoint()
        return surveys

    async def aclose(self) -> None:
        self.is_over = True
        await self._body.aclose()

    def let_go(self) -> None:
        """Forget the body. An error that is kept holds this object, by the frames of its traceback."""
        self._inventory, self.unread = Inventory(), None


class SurveyStream:
    """The surveys of an inventory as they arrive. Only one part of the body and its surveys is in memory.

    The call is repeated until its first surveys arrive. A failure after that is raised. The call is reported
    once, at its end. The permit is released when the first surveys arrive: the service's main work is done by
    then, and the code that works on the surveys may make calls of its own.
    """

    def __init__(self, caller: Caller, call: Call[Any], permit: Permit, *, strict: bool) -> None:
        self.left_out: Sequence[DecodeError] = ()
        self._is_strict = strict
        self._caller = caller
        self._call = call
        self._permit = permit
        self._track = caller.track(call.endpoint)
        self._reading: _Reading | None = None
        self._has_ended = False
        self._seconds = 0.0

    async def next(self) -> Sequence[Survey]:
        """Return the next surveys, or none at the end."""
        if self._has_ended:
            return ()
        try:
            surveys = await (self._first() if self._reading is None else self._more(self._reading))
        except BaseException as exc:
            self._end(exc)
            raise
        # As in `read_quotas`.
        defer_full_gc()
        if self._reading is None or self._reading.is_over:
            self._end()
        return surveys

    async def _first(self) -> Sequence[Survey]:
        try:
            first = await self._caller.run(self._call, self._permit, self._track, self._begin)
        finally:
            self._permit.release()
        self._track.timeline.enter(DECODE)
        self._seconds = min(self._permit.remaining, self._caller.wall_limit(self._call))
        # A body in which no survey was found was decoded as a whole, into `Quotas`.
        if isinstance(first, Quotas):
            self.left_out, first = first.left_out, first.surveys
        surveys: Sequence[Survey] = first
        return surveys

    async def _more(self, reading: _Reading) -> Sequence[Survey]:
        # Only the time in here counts. The time between two calls of `next` belongs to the user.
        timeline, began = self._track.timeline, self._caller.clock()
        timeline.resume(BODY)
        try:
            return await self._caller.go_on(self._call, self._track, reading.next, max(0.0, self._seconds))
        finally:
            self._seconds -= timeline.enter(BODY) - began

    def _end(self, error: BaseException | None = None) -> None:
        self._has_ended = True
        if error is None:
            self._track.release_connection()
        else:
            self._track.discard_connection()
        self._caller.ended(self._call, self._track, error)

    async def _begin(self, body: LimitedBody) -> Reply:
        self._reading = _Reading(body, strict=self._is_strict)
        self.left_out = self._reading.left_out
        surveys = await self._reading.next()
        unread = self._reading.unread
        goes_on = not self._reading.is_over
        return Reply(OK, result=surveys, goes_on=goes_on) if unread is None else Reply(OK, unread)

    async def aclose(self) -> None:
        """Close the connection, if the body was not read to its end."""
        try:
            if self._reading is not None and not self._reading.is_over:
                self._track.discard_connection()  # the rest is not read
                with anyio.CancelScope(shield=True):
                    await self._reading.aclose()
        finally:
            if self._reading is not None:
                self._reading.let_go()
                if not self._has_ended:
                    self._track.timeline.resume(BODY)
                    self._end()
