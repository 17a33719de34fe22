"""Faults: what can go wrong with a request, with which requests, and how a response is changed."""

from __future__ import annotations

import re
from random import Random
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

import attrs
from attrs import define, field, frozen

from sampling_async import Endpoint, Invite, RecontactMembers, ResultCode
from sampling_async._contract.structs import replace
from sampling_async.simulator._answers import (
    HTML,
    JSON,
    PLAINTEXT,
    BulkItem,
    ServiceResponse,
    error_body,
    html_page,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

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
    "refusal",
    "status",
    "stuck_cursor",
    "wrong_invite",
    "wrong_order",
]
"""See the constructors of `Fault`. The kind `body` is made by `html`, `null`, `empty` and `body`."""

When: TypeAlias = Literal["before", "after"]
"""Whether a fault comes before the service acts on the request, or after it. After it, invites may exist."""

CutWhen: TypeAlias = Literal["before", "after", "middle"]
"""As `When`; `middle` is after acting, in the middle of the response's body."""


def _fits_kind(fault: Fault, attribute: attrs.Attribute[CutWhen], value: CutWhen) -> None:
    known = get_args(CutWhen if fault.kind == "cut" else When)
    if value not in known:
        raise ValueError(f"{attribute.name} of a {fault.kind} must be one of {', '.join(known)}, not {value!r}")


def _of_type(kind: type) -> Any:
    def check(_: Fault, attribute: attrs.Attribute[Any], value: object) -> None:
        if value is not None and type(value) is not kind:
            raise ValueError(f"{attribute.name} must be of type {kind.__name__}, not {value!r:.40}")

    return check


def _a_status(_: Fault, attribute: attrs.Attribute[int], value: object) -> None:
    if type(value) is not int or not 200 <= value <= 599:  # noqa: PLR2004
        raise ValueError(f"{attribute.name} must be a status from 200 to 599, not {value!r:.40}")


def _a_header(_: Fault, attribute: attrs.Attribute[Any], value: object) -> None:
    if isinstance(value, str) and not re.fullmatch(r"[\t\x20-\x7e\x80-\xff]*", value):
        raise ValueError(f"{attribute.name} must be what a header can hold, not {value!r:.40}")


@frozen
class Fault:
    """One thing that goes wrong: a constructor says what, `on` says with which requests.

        Fault.status(503, retry_after=2)                            every request
        Fault.cut(when="after").on("bulk_invite", every=5)          the 5th, 10th, 15th ... bulk invite
        Fault.delay(3).on("bulk_invite", after=10, times=2)         the 11th and 12th bulk invite
        Fault.html().on(probability=0.01)                           one request in a hundred, seeded
        Fault.refusal(39).on(member_code="m000007")                 every invite of that member
        Fault.status(400, result_code=3).on(panel_guid=guid)        one panel is refused, the others go on
        Fault.refusal(9).on(quota_id=1100042)                       that quota, also as one item of a bulk

    Faults apply also to requests with a wrong key or panel. Several faults can apply to one request: delays add
    up, alterations are made one after another, and of the faults that replace the response the first counts. A
    refusal of one quota ID takes precedence over a refusal of all.

    Attributes:
        kind: What goes wrong.
        when: Before or after the service acts. After it, the ledger holds invites that the client does not get.
            A status that says "not processed" (400, 403, 404, 429, 503) after acting is false: the client
            believes it, and `Ledger.check` then reports a lie of the client.
        endpoint: The only endpoint it applies to, or None for all.
        member_code: The only member whose requests it applies to, or None for all.
        quota_id: The quota ID that a request must name, alone or among others; None for any. A refusal then
            applies to this ID only.
        panel_guid: The only panel whose requests it applies to, or None for all.
        result_code: The code of a refusal.
        every: It applies only to every so-many-th of the requests that fit endpoint, member, quota ID and
            panel.
        after: It does not apply to the first so many of these requests.
        times: How many times it applies at most; None for no limit.
        probability: The chance that it applies to a request that passes all other limits. It is drawn from the
            simulator's seed.
    """

    kind: FaultKind
    when: CutWhen = field(default="before", validator=_fits_kind)
    answer_status: int = field(default=200, validator=_a_status)
    content: bytes = field(default=b"", repr=False)
    content_type: str = JSON
    retry_after: float | str | None = field(default=None, validator=_a_header)
    seconds: float = 0.0
    slices: int = field(default=1, validator=attrs.validators.ge(1))
    items: int = field(default=1, validator=attrs.validators.ge(0))
    variant: str = ""
    result_code: int = field(default=0, validator=_of_type(int))
    endpoint: Endpoint | None = None
    member_code: str | None = field(default=None, validator=_of_type(str))
    quota_id: int | None = field(default=None, validator=_of_type(int))
    panel_guid: str | None = field(default=None, validator=_of_type(str))
    every: int = field(default=1, validator=attrs.validators.ge(1))
    after: int = field(default=0, validator=attrs.validators.ge(0))
    times: int | None = field(default=None, validator=attrs.validators.optional(attrs.validators.ge(0)))
    probability: float | None = field(
        default=None, validator=attrs.validators.optional([attrs.validators.ge(0), attrs.validators.le(1)])
    )

    def on(
        self,
        endpoint: Endpoint | None = None,
        *,
        member_code: str | None = None,
        quota_id: int | None = None,
        panel_guid: str | None = None,
        every: int | None = None,
        after: int | None = None,
        times: int | None = None,
        probability: float | None = None,
    ) -> Fault:
        """Return the fault limited to some requests; see the attributes.

        `every`, `after` and `times` count the requests that fit endpoint, member, quota ID and panel. An
        argument that is not given leaves the fault's limit as it is.

        Raises:
            ValueError: There is no such endpoint, a value is of another type, or a number is out of range.
        """
        if endpoint is not None and endpoint not in get_args(Endpoint):
            raise ValueError(
                f"there is no endpoint {endpoint!r}; the endpoints are {', '.join(get_args(Endpoint))}"
            )
        given: dict[str, Any] = {
            "endpoint": endpoint,
            "panel_guid": panel_guid,
            "member_code": member_code,
            "quota_id": quota_id,
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
        """Respond with an error status.

        Args:
            status: The status, from 200 to 599.
            result_code: The code in the JSON body; None for a JSON body without one.
            html: Send an HTML page instead of JSON.
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
    def refusal(cls, result_code: int) -> Fault:
        """Refuse with a result code; the service then does not act on the request.

        In a bulk invite every item gets the code, or with `on(quota_id=...)` only the item of that quota ID;
        the other items are handled as usual. Other endpoints respond 400 with the code.

        Raises:
            ValueError: The code is 1, which is success, or not a whole number.
        """
        if result_code == ResultCode.SUCCESS:
            raise ValueError("the code of a refusal cannot be 1, because 1 means success")
        return cls("refusal", result_code=result_code)

    @classmethod
    def cut(cls, *, when: CutWhen = "before", reset: bool = False) -> Fault:
        """Drop the connection: before acting, after it but before any byte, or in the middle of the body.

        `when` says which of these. With `reset`, it is dropped with a TCP reset instead of an orderly end.
        """
        return cls("cut", when, variant="reset" if reset else "")

    @classmethod
    def delay(cls, seconds: float, *, when: When = "after") -> Fault:
        """Wait `seconds` before the service acts, or between acting and the response."""
        return cls("delay", when, seconds=seconds)

    @classmethod
    def drip(cls, *, slices: int = 10, pause: float = 0.01) -> Fault:
        """Send the body in `slices` parts, with `pause` seconds between them."""
        return cls("drip", "after", slices=slices, seconds=pause)

    @classmethod
    def html(cls, *, when: When = "after") -> Fault:
        """Respond 200 with an HTML page instead of JSON, as proxies and login pages do."""
        return cls("body", when, content=html_page("Please sign in"), content_type=HTML)

    @classmethod
    def null(cls, *, when: When = "after") -> Fault:
        """Respond 200 with the JSON value null."""
        return cls("body", when, content=b"null")

    @classmethod
    def empty(cls, *, when: When = "after") -> Fault:
        """Respond 200 with an empty body."""
        return cls("body", when)

    @classmethod
    def body(cls, content: bytes, *, content_type: str = JSON, when: When = "after") -> Fault:
        """Respond 200 with the bytes given."""
        return cls("body", when, content=content, content_type=content_type)

    @classmethod
    def plaintext(cls) -> Fault:
        """Label the response application/plaintext, whatever its content is."""
        return cls("plaintext", "after")

    @classmethod
    def wrong_order(cls, *, shuffled: bool = False) -> Fault:
        """Return the items of a bulk invite in reverse order, or shuffled."""
        return cls("wrong_order", "after", variant="shuffled" if shuffled else "")

    @classmethod
    def missing(cls, items: int = 1) -> Fault:
        """Leave items, drawn at random, out of a bulk invite's response; the service has acted on them."""
        return cls("missing", "after", items=items)

    @classmethod
    def extra(cls, items: int = 1) -> Fault:
        """Add items to a bulk invite's response that were not requested, with invites that were never made."""
        return cls("extra", "after", items=items)

    @classmethod
    def wrong_invite(cls) -> Fault:
        """Give every invite a wrong QuotaID. The QuotaID of the bulk invite's item around it stays right."""
        return cls("wrong_invite", "after")

    @classmethod
    def contradiction(
        cls, variant: Literal["success_without_invite", "failure_with_invite"] = "success_without_invite"
    ) -> Fault:
        """Make every item of a bulk invite contradict itself.

        With `success_without_invite` every item, refused or not, has code 1 and no invite. With
        `failure_with_invite` every item has an invite and a code other than 1: the invites of items that
        succeeded are real, the others were never made.
        """
        return cls("contradiction", "after", variant=variant)

    @classmethod
    def stuck_cursor(cls) -> Fault:
        """Return the first page of recontact members for every cursor, and say that there are more."""
        return cls("stuck_cursor", "after")

    @classmethod
    def empty_page(cls) -> Fault:
        """Return an empty page of recontact members, and say that there are more."""
        return cls("empty_page", "after")


@define
class _Planned:
    fault: Fault
    random: Random
    seen: int = 0
    struck: int = 0

    def strikes(
        self, endpoint: Endpoint, panel_guid: str | None, member_code: str | None, quota_ids: Sequence[int]
    ) -> bool:
        """Count a request and return whether the fault applies to it."""
        fault = self.fault
        if fault.panel_guid is not None and _plain(fault.panel_guid) != _plain(panel_guid):
            return False
        if fault.endpoint not in {None, endpoint} or fault.member_code not in {None, member_code}:
            return False
        if fault.quota_id is not None and fault.quota_id not in quota_ids:
            return False
        self.seen += 1
        # Example: with after=10 and every=5, the 15th, 20th, 25th ... fitting request pass this test.
        past = self.seen - fault.after
        if past <= 0 or past % fault.every or (fault.times is not None and self.struck >= fault.times):
            return False
        # Drawn last, so that requests excluded by other limits do not move the random sequence on.
        if fault.probability is not None and self.random.random() >= fault.probability:
            return False
        self.struck += 1
        return True


class FaultPlan:
    """The faults of a simulator. They can be changed at any time, also while the simulator is served."""

    def __init__(self, faults: Iterable[Fault] = (), *, seed: int | str = 0) -> None:
        self._seed: Final = seed
        self._added = 0
        # A tuple that is replaced, never changed: the server's thread may be going through it in `draw`.
        self._planned: tuple[_Planned, ...] = ()
        self.add(*faults)

    def __repr__(self) -> str:
        return f"FaultPlan({[planned.fault for planned in self._planned]!r})"

    def __len__(self) -> int:
        return len(self._planned)

    def add(self, *faults: Fault) -> None:
        """Add faults. Their counts of requests start now."""
        added: list[_Planned] = []
        for fault in faults:
            # Each fault has its own random sequence: adding one does not change the draws of the others.
            self._added += 1
            random = Random(f"{self._seed}/fault/{self._added}")  # noqa: S311  no secret
            added.append(_Planned(fault, random))
        self._planned = (*self._planned, *added)

    def clear(self) -> None:
        """Remove all faults."""
        self._planned = ()

    def struck(self) -> tuple[tuple[Fault, int], ...]:
        """Return every fault of the plan with the number of requests it has been applied to."""
        return tuple((planned.fault, planned.struck) for planned in self._planned)

    def draw(
        self,
        endpoint: Endpoint,
        *,
        panel_guid: str | None = None,
        member_code: str | None = None,
        quota_ids: Sequence[int] = (),
    ) -> tuple[Fault, ...]:
        """Count a request and return the faults that apply to it, in the order in which they were added."""
        planned = self._planned
        request = endpoint, panel_guid, member_code, quota_ids
        return tuple([each.fault for each in planned if each.strikes(*request)])


def _plain(guid: str | None) -> str | None:
    """Return a Guid as the service compares it: without braces, in any case."""
    return None if guid is None else guid.strip("{}").lower()


def altered(answer: ServiceResponse, fault: Fault, random: Random) -> ServiceResponse:
    """Return a response changed by a fault, or unchanged if the fault does not apply to it."""
    if fault.kind == "plaintext":
        return attrs.evolve(answer, content_type=PLAINTEXT)
    body = answer.body
    if isinstance(body, list) and fault.kind in _OF_ITEMS:
        return attrs.evolve(answer, body=_OF_ITEMS[fault.kind](body, fault, random))
    if isinstance(body, Invite) and fault.kind == "wrong_invite":
        return attrs.evolve(answer, body=_mislabelled(body))
    if isinstance(body, RecontactMembers) and fault.kind == "empty_page":
        return attrs.evolve(answer, body=RecontactMembers(0, has_additional_members=True, member_codes=()))
    if isinstance(body, RecontactMembers) and fault.kind == "stuck_cursor":
        return attrs.evolve(answer, body=attrs.evolve(body, has_additional_members=True))
    return answer


def made_up_invite(quota_id: int, random: Random) -> Invite:
    url = f"https://entry.example/survey?invite={random.getrandbits(96):024x}&quota={quota_id}"
    return Invite(
        survey_id=random.randint(2500000, 2599999),
        wave_id=random.randint(790000, 799999),
        quota_id=quota_id,
        partner_amount=1.0,
        url=url,
        loi=10,
        ir=50,
    )


def _thinned(items: list[BulkItem], fault: Fault, random: Random) -> list[BulkItem]:
    left_out = set(random.sample(range(len(items)), min(fault.items, len(items))))
    return [item for position, item in enumerate(items) if position not in left_out]


def _padded(items: list[BulkItem], fault: Fault, random: Random) -> list[BulkItem]:
    asked = {item.quota_id for item in items}
    padded = list(items)
    while len(padded) < len(items) + fault.items:
        quota_id = random.randint(9000000, 9999999)
        # A drawn ID that was requested would be no extra item, so draw again.
        if quota_id not in asked:
            item = BulkItem(quota_id, 1, made_up_invite(quota_id, random))
            padded.insert(random.randint(0, len(padded)), item)
    return padded


def _mislabelled(invite: Invite) -> Invite:
    return replace(invite, quota_id=invite.quota_id + 1)


def _contradicted(items: list[BulkItem], fault: Fault, random: Random) -> list[BulkItem]:
    if fault.variant == "success_without_invite":
        return [BulkItem(item.quota_id, 1) for item in items]
    # Items that succeeded keep their real invite; the others get one that the ledger does not hold.
    return [
        BulkItem(
            item.quota_id,
            ResultCode.QUOTA_NOT_LIVE if item.result_code == ResultCode.SUCCESS else item.result_code,
            item.invite or made_up_invite(item.quota_id, random),
        )
        for item in items
    ]


_OF_ITEMS: Final[dict[str, Callable[[list[BulkItem], Fault, Random], list[BulkItem]]]] = {
    "wrong_order": lambda items, fault, random: (
        random.sample(items, len(items)) if fault.variant == "shuffled" else items[::-1]
    ),
    "missing": _thinned,
    "extra": _padded,
    # The QuotaID of the item itself stays right: only the invite inside contradicts it.
    "wrong_invite": lambda items, _fault, _random: [
        item._replace(invite=item.invite and _mislabelled(item.invite)) for item in items
    ],
    "contradiction": _contradicted,
}
