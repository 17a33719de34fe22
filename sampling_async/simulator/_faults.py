"""Faults: what can go wrong with a request, and which requests it strikes."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

import attrs
from attrs import define, field, frozen

from sampling_async._errors import Endpoint
from sampling_async.simulator._answers import HTML, JSON, error_body, html_page

if TYPE_CHECKING:
    from collections.abc import Iterable

FaultKind: TypeAlias = Literal[
    "body",
    "contradiction",
    "cut",
    "delay",
    "drip",
    "empty_page",
    "extra",
    "missing",
    "plaintext",
    "status",
    "stuck_cursor",
    "wrong_invite",
    "wrong_order",
]
"""See the constructors of `Fault`; `body` stands for `html`, `null`, `empty` and `body`."""

When: TypeAlias = Literal["before", "after"]
"""Whether a fault comes before the service acts on the request, or after: then invites exist."""

CutWhen: TypeAlias = Literal["before", "after", "middle"]
"""As `When`; `middle` is after, in the middle of the answer's body."""


def _fits_kind(fault: Fault, attribute: attrs.Attribute[CutWhen], value: CutWhen) -> None:
    known = get_args(CutWhen if fault.kind == "cut" else When)
    if value not in known:
        raise ValueError(f"{attribute.name} of a {fault.kind} is one of {', '.join(known)}, not {value!r}")


@frozen
class Fault:
    """One thing that goes wrong, made by a constructor, and `on` which requests.

        Fault.status(503, retry_after=2)                            every request
        Fault.cut(when="after").on("bulk_invite", every=5)          the 5th, 10th, 15th ... bulk invite
        Fault.delay(3).on("bulk_invite", after=10, times=2)         the 11th and 12th bulk invite
        Fault.html().on(probability=0.01)                           one request in a hundred, seeded

    Requests with a wrong key or panel are struck like all others. Several faults can strike one request: delays
    add up, alterations follow one another, and of the faults that take the answer's place the first counts.

    Attributes:
        kind: What goes wrong.
        when: Before or after the service acted. After, the ledger holds the invites the client does not get. A
            status that says "not processed" (400, 403, 404, 429, 503) after acting is a lie of the service: a
            client believes it, and `Ledger.check` then calls that a lie of the client.
        endpoint: The endpoint it is limited to, or None for all.
        every: It strikes each so many-th request (of its endpoint) only.
        after: It lets so many requests pass first.
        times: It strikes so many times and then never again; None for no end.
        probability: It strikes with this chance, from the simulator's seed; on top of the others.
    """

    kind: FaultKind
    when: CutWhen = field(default="before", validator=_fits_kind)
    answer_status: int = 200
    content: bytes = field(default=b"", repr=False)
    content_type: str = JSON
    retry_after: float | str | None = None
    seconds: float = 0.0
    slices: int = field(default=1, validator=attrs.validators.ge(1))
    items: int = field(default=1, validator=attrs.validators.ge(0))
    variant: str = ""
    endpoint: Endpoint | None = None
    every: int = field(default=1, validator=attrs.validators.ge(1))
    after: int = field(default=0, validator=attrs.validators.ge(0))
    times: int | None = field(default=None, validator=attrs.validators.optional(attrs.validators.ge(0)))
    probability: float | None = field(
        default=None,
        validator=attrs.validators.optional([attrs.validators.ge(0), attrs.validators.le(1)]),
    )

    def on(
        self,
        endpoint: Endpoint | None = None,
        *,
        every: int | None = None,
        after: int | None = None,
        times: int | None = None,
        probability: float | None = None,
    ) -> Fault:
        """Return the fault limited to some requests; the attributes say how. Counts are of its endpoint.

        What is not given stays as it is.

        Raises:
            ValueError: There is no such endpoint, or a number is out of its range.
        """
        if endpoint is not None and endpoint not in get_args(Endpoint):
            raise ValueError(f"no endpoint {endpoint!r}: they are {', '.join(get_args(Endpoint))}")
        given: dict[str, Any] = {
            "endpoint": endpoint,
            "every": every,
            "after": after,
            "times": times,
            "probability": probability,
        }
        return attrs.evolve(self, **{name: value for name, value in given.items() if value is not None})

    @classmethod
    def status(
        cls,
        status: int = 503,
        *,
        result_code: int | None = 36,
        html: bool = False,
        retry_after: float | str | None = None,
        when: When = "before",
    ) -> Fault:
        """Answer with an error status.

        Args:
            status: Any status.
            result_code: The code in the JSON body; None for a JSON body without one.
            html: Send a page instead of JSON.
            retry_after: The Retry-After header: seconds, or text to send as it is.
            when: Before or after the service acts.
        """
        plain = b'{"Message":"An error has occurred."}' if result_code is None else error_body(result_code)
        return cls(
            "status",
            when,
            answer_status=status,
            content=html_page(f"Error {status}") if html else plain,
            content_type=HTML if html else JSON,
            retry_after=retry_after,
        )

    @classmethod
    def cut(cls, *, when: CutWhen = "before", reset: bool = False) -> Fault:
        """Drop the connection: before acting, after it but before any byte, or in the middle of the body.

        Args:
            when: Which of the three.
            reset: Drop it with a reset instead of an orderly end.
        """
        return cls("cut", when, variant="reset" if reset else "")

    @classmethod
    def delay(cls, seconds: float, *, when: When = "after") -> Fault:
        """Let `seconds` pass before the service acts, or between that and the answer."""
        return cls("delay", when, seconds=seconds)

    @classmethod
    def drip(cls, *, slices: int = 10, pause: float = 0.01) -> Fault:
        """Send the body in so many slices, `pause` seconds apart."""
        return cls("drip", "after", slices=slices, seconds=pause)

    @classmethod
    def html(cls, *, when: When = "after") -> Fault:
        """Answer 200 with a page instead of JSON, the way of proxies and login pages."""
        return cls("body", when, content=html_page("Please sign in"), content_type=HTML)

    @classmethod
    def null(cls, *, when: When = "after") -> Fault:
        """Answer 200 with the JSON null."""
        return cls("body", when, content=b"null")

    @classmethod
    def empty(cls, *, when: When = "after") -> Fault:
        """Answer 200 with no body at all."""
        return cls("body", when)

    @classmethod
    def body(cls, content: bytes, *, content_type: str = JSON, when: When = "after") -> Fault:
        """Answer 200 with any bytes."""
        return cls("body", when, content=content, content_type=content_type)

    @classmethod
    def plaintext(cls) -> Fault:
        """Label the answer, whatever it is, application/plaintext."""
        return cls("plaintext", "after")

    @classmethod
    def wrong_order(cls, *, shuffled: bool = False) -> Fault:
        """Give the items of a bulk invite in reverse, or shuffled."""
        return cls("wrong_order", "after", variant="shuffled" if shuffled else "")

    @classmethod
    def missing(cls, items: int = 1) -> Fault:
        """Leave so many items, drawn at random, out of a bulk invite's answer; they were acted on."""
        return cls("missing", "after", items=items)

    @classmethod
    def extra(cls, items: int = 1) -> Fault:
        """Put so many items nobody asked for into a bulk invite's answer, each with an invite never made."""
        return cls("extra", "after", items=items)

    @classmethod
    def wrong_invite(cls) -> Fault:
        """Give every invite a QuotaID other than that asked for, in bulk invites beside the right outer one."""
        return cls("wrong_invite", "after")

    @classmethod
    def contradiction(
        cls, variant: Literal["success_without_invite", "failure_with_invite"] = "success_without_invite"
    ) -> Fault:
        """Make every item of a bulk invite contradict itself.

        With `success_without_invite` every item, refused or not, has code 1 and no invite. With
        `failure_with_invite` every item has an invite and a code other than 1: the invites of those that
        succeeded are real, the others were never made.
        """
        return cls("contradiction", "after", variant=variant)

    @classmethod
    def stuck_cursor(cls) -> Fault:
        """Answer every page of recontact members with the first, and say there are more."""
        return cls("stuck_cursor", "after")

    @classmethod
    def empty_page(cls) -> Fault:
        """Answer a page of recontact members with none, and say there are more."""
        return cls("empty_page", "after")


@define
class _Planned:
    """A fault of the plan, with what it has seen and done."""

    fault: Fault
    random: Random
    seen: int = 0
    struck: int = 0

    def strikes(self, endpoint: Endpoint) -> bool:
        """Count a request of an endpoint and decide whether it is struck."""
        fault = self.fault
        if fault.endpoint not in {None, endpoint}:
            return False
        self.seen += 1
        past = self.seen - fault.after
        if past <= 0 or past % fault.every or (fault.times is not None and self.struck >= fault.times):
            return False
        if fault.probability is not None and self.random.random() >= fault.probability:
            return False
        self.struck += 1
        return True


class FaultPlan:
    """The faults of a simulator; can be changed at any time, also while it is served."""

    def __init__(self, faults: Iterable[Fault] = (), *, seed: int | str = 0) -> None:
        self._seed: Final = seed
        self._added = 0
        self._planned: tuple[_Planned, ...] = ()
        self.add(*faults)

    def __repr__(self) -> str:
        return f"FaultPlan({[planned.fault for planned in self._planned]!r})"

    def __len__(self) -> int:
        return len(self._planned)

    def add(self, *faults: Fault) -> None:
        """Add faults; their counts of requests start now."""
        added: list[_Planned] = []
        for fault in faults:
            self._added += 1
            random = Random(f"{self._seed}/fault/{self._added}")  # noqa: S311  no secret
            added.append(_Planned(fault, random))
        self._planned = (*self._planned, *added)

    def clear(self) -> None:
        """Remove all faults."""
        self._planned = ()

    def struck(self) -> tuple[tuple[Fault, int], ...]:
        """Return every fault of the plan with how many requests it has struck."""
        return tuple((planned.fault, planned.struck) for planned in self._planned)

    def draw(self, endpoint: Endpoint) -> tuple[Fault, ...]:
        """Count a request and return the faults that strike it, in the order they were added."""
        return tuple([planned.fault for planned in self._planned if planned.strikes(endpoint)])
