"""How long to wait: waits that double, and the policy for outages. No I/O: numbers in, decision out."""

from __future__ import annotations

from typing import Final

from attrs import field, frozen

from sampling_async._contract.checks import not_negative, positive

_FAILURES: Final = 5  # in a row


def doubled(first: float, doublings: int, longest: float) -> float:
    """Return the first wait, doubled a number of times: 0.25 becomes 0.5, 1, 2 ... up to the longest."""
    # Bounded, because 2.0 ** 1100 is an OverflowError. A product that is too large is infinite.
    return min(longest, first * 2.0 ** min(doublings, 1_000))


@frozen(kw_only=True)
class OutagePolicy:
    """The policy for outages: when one begins, how often to probe for its end, and how long to wait.

    An outage begins after several failures in a row (no connection, a cut connection, a time limit, 502, 503,
    504, a redirect, a page of HTML with status 200, a 404 that is neither JSON nor empty) without a response in
    between. During the outage, only a probe is sent: Get Settings, which has no effect. When the service
    responds to a probe, the outage ends and work goes on, one request at a time at first.

    Attributes:
        patience: Seconds that a fan-out waits for the end of an outage, or for a service that refuses all
            requests. After that, the remaining IDs end as `not_sent`, and nothing more is taken from an input
            that can be read only once. Single calls do not wait: they fail with `OutageError`.
        failures: The number of failures in a row. Default (None): five, or `max_concurrency` if that is lower,
            but at least two. If three requests of ten fail, as in the worst hour of a service that still works,
            five in a row come once in four hundred requests, and cost one probe. In an outage, five requests
            are fewer than those in flight anyway.
        first_pause: Seconds before the first probe. The pause doubles each time, and each is drawn at random
            from half of it up to all of it.
        longest_pause: The longest pause in seconds. With one probe in this time from each client, the end of an
            outage is noticed soon, and the probes do not overload the service.

    Raises:
        InvalidRequestError: A number is out of its range.
    """

    patience: float = field(default=600.0, validator=not_negative)
    failures: int | None = field(default=None, validator=positive)
    first_pause: float = field(default=0.25, validator=positive)
    longest_pause: float = field(default=1.5, validator=positive)

    def enough(self, under_way: int) -> int:
        """Return the number of failures in a row that begin an outage, if `under_way` attempts may run."""
        return self.failures or min(_FAILURES, max(2, under_way))
