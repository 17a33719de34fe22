"""Where the time of a call goes. It is in one stage at any moment, so the stages add up to the whole."""

from __future__ import annotations

from typing import Final

from attrs import field, fields, frozen


def _second() -> float:
    """Return a field for seconds, which shows microseconds: what is finer, the clock does not know."""
    seconds: float = field(default=0.0, repr=lambda value: f"{value:.6f}")
    return seconds


@frozen(kw_only=True)
class Timing:
    """The seconds that a call spent in each stage, over all its attempts. They add up to `total`.

    With a `transport` of your own, `send` is 0, and `first_byte` has its time and that of `connect`: such a
    transport does not say when it did what.

    Attributes:
        permit: Waited for a permit, that is for `max_concurrency`, the adaptive limit or the measured rate. In
            the result of a bulk, this includes the time until the request that ended last was formed.
        hold: Waited for the end of an outage, or of a pause that the service requested. In the result of a
            bulk, this includes the waits of the requests before that one.
        journal: Waited until the journal had written what is about to be sent.
        backoff: Paused between attempts.
        connect: Opened a connection (name lookup, TCP, tunnel, TLS); next to nothing if an idle one was used.
        send: Sent the request.
        first_byte: From there to the first byte of the response: the time of the service and of the way.
        body: From there to the last byte.
        decode: Checked the input of a bulk, decoded and checked the response, and put the result together.
        attempts: The number of attempts that were begun.
    """

    permit: float = _second()
    hold: float = _second()
    journal: float = _second()
    backoff: float = _second()
    connect: float = _second()
    send: float = _second()
    first_byte: float = _second()
    body: float = _second()
    decode: float = _second()
    attempts: int = 0

    @property
    def total(self) -> float:
        """The seconds from the beginning of the call to its end, without your own time between two surveys."""
        return sum([getattr(self, stage) for stage in STAGES], 0.0)


STAGES: Final = tuple(each.name for each in fields(Timing) if each.name != "attempts")
"""The names of the stages, in the order of `Timing`."""


class Timed:
    """A result of a call that can explain its time. This is no field: not compared, shown or pickled."""

    __slots__ = ()

    _timing: Timing

    @property
    def timing(self) -> Timing | None:
        """Where the time of the call went; None if no call of this process returned the object."""
        return getattr(self, "_timing", None)


class TimedInSlot(Timed):
    """One with a slot for the timing. A Struct can have none: it has a `__dict__`, or no room for a timing."""

    __slots__ = ("_timing",)


def explain(result: object, timing: Timing) -> None:
    """Note on a result of a call where its time went, if there is room."""
    if isinstance(result, TimedInSlot):
        object.__setattr__(result, "_timing", timing)  # records are frozen
    elif isinstance(result, Timed) and hasattr(result, "__dict__"):
        result.__dict__["_timing"] = timing
