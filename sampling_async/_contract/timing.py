"""Where the time of a call goes. It is in one stage at any moment, so the stages add up to the whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import field, fields, frozen

from sampling_async._contract.headers import HeaderReader, no_headers, request_id_of

if TYPE_CHECKING:
    from collections.abc import Mapping


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


class CallResult:
    """What a call returned, with its time and response headers. Those are not compared and not pickled."""

    __slots__ = ()

    _timing: Timing
    _read_headers: HeaderReader

    @property
    def timing(self) -> Timing | None:
        """Where the time of the call went; None if no call of this process returned the object."""
        return getattr(self, "_timing", None)

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers of the response for support cases, such as `x-request-id` and `date`; empty if it had none.

        Names are in lower case. Values are printable ASCII of at most 200 characters, and `<hidden>` stands for
        the key, the panel and the member code in them.
        """
        return getattr(self, "_read_headers", no_headers)()

    @property
    def request_id(self) -> str | None:
        """The ID that the service, or else a proxy, gave the request in a header; None if there was none."""
        return request_id_of(self.headers)


class CallResultInSlots(CallResult):
    """One with slots for these. A Struct can have none: it has a `__dict__`, or no room for them."""

    __slots__ = ("_read_headers", "_timing")


def explain_like(result: object, original: CallResult) -> None:
    """Note on a result of a call what is known of another object of the same call."""
    explain(result, original.timing, getattr(original, "_read_headers", no_headers))


def explain(result: object, timing: Timing | None, headers: HeaderReader) -> None:
    """Note on a result of a call where its time went and what its response said, if there is room."""
    if isinstance(result, CallResultInSlots):
        object.__setattr__(result, "_timing", timing)  # records are frozen
        object.__setattr__(result, "_read_headers", headers)
    elif isinstance(result, CallResult) and hasattr(result, "__dict__"):
        result.__dict__.update(_timing=timing, _read_headers=headers)
