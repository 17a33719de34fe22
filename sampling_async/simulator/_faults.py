"""Faults: what can go wrong with a request, and with which requests. What comes of it is in `_app`."""

from __future__ import annotations

import inspect
import json
import re
import sys
from ast import literal_eval
from random import Random
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, TypeAlias, get_args

import attrs
from attrs import define, field, frozen

from sampling_async import DecodeError, Endpoint, ResultCode
from sampling_async._contract.records import wire_name
from sampling_async.simulator._answers import HTML, JSON, error_body, html_page

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

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


_STATUSES: Final = range(200, 600)


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
    if type(value) is not int or value not in _STATUSES:
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


# --- Faults as JSON, for a simulator that runs in another process

_CONSTRUCTORS: Final = tuple(
    sorted(name for name, made in vars(Fault).items() if isinstance(made, classmethod))
)


def read_faults(body: bytes | str) -> tuple[Fault, ...]:
    """Read faults from JSON: an array of objects, each a constructor of `Fault` with its arguments.

        [{"Fault": "status", "Status": 503, "RetryAfter": 1, "On": {"Endpoint": "bulk_invite", "Every": 10}},
         {"Fault": "refusal", "ResultCode": 39, "On": {"MemberCode": "m000007"}},
         {"Fault": "cut", "When": "after", "On": {"Probability": 0.01}}]

    "On" has the arguments of `Fault.on`. Keys are spelled in the service's style (`RetryAfter`). Python's
    spelling (`retry_after`) is accepted too.

    Raises:
        DecodeError: The JSON holds something else; `path` names the place, such as `$[0].On.Every`.
    """
    faults: Any = _parsed(body)
    if not isinstance(faults, list):
        raise DecodeError("$", f"expected an array of faults, found {_kind(faults)}")
    return tuple(_fault(each, f"$[{at}]") for at, each in enumerate(faults))


def _parsed(body: bytes | str) -> Any:
    # json.loads calls this for NaN and Infinity, which it accepts although JSON does not have them.
    def refuse(_: str) -> NoReturn:
        raise DecodeError("$", "expected finite numbers")

    try:
        return json.loads(body, parse_constant=refuse)
    except json.JSONDecodeError as exc:
        rule = f"expected JSON, found a syntax error in line {exc.lineno}, column {exc.colno}"
    except UnicodeDecodeError:
        rule = "expected UTF-8, found other bytes"
    except (RecursionError, ValueError):
        rule = "expected JSON, found too many nested levels or a number with too many digits"
    raise DecodeError("$", rule)


def _fault(value: Any, path: str) -> Fault:
    if not isinstance(value, dict):
        raise DecodeError(path, f"expected an object, found {_kind(value)}")
    given: dict[str, Any] = dict(value)
    by_name = {_folded(key): key for key in given}
    if "fault" not in by_name:
        raise DecodeError(path, f'expected "Fault", one of {", ".join(_CONSTRUCTORS)}')
    kind_key = by_name["fault"]
    kind, on = given.pop(kind_key), given.pop(by_name["on"]) if "on" in by_name else None
    if kind not in _CONSTRUCTORS:
        raise DecodeError(f"{path}.{kind_key}", f"expected one of {', '.join(_CONSTRUCTORS)}, not {kind!r:.40}")
    fault = _called(getattr(Fault, kind), given, path, "On")
    if on is None:
        return fault
    on_path = f"{path}.{by_name['on']}"
    if not isinstance(on, dict):
        raise DecodeError(on_path, f"expected an object, found {_kind(on)}")
    return _called(fault.on, on, on_path)


def _called(make: Callable[..., Fault], given: Mapping[str, Any], path: str, *others: str) -> Fault:
    parameters = inspect.signature(make).parameters
    names = {_folded(name): name for name in parameters}
    arguments: dict[str, Any] = {}
    for key, value in given.items():
        name = names.get(_folded(key))
        if name is None:
            known = ", ".join([*map(wire_name, parameters), *others]) or "nothing"
            raise DecodeError(f"{path}.{key[:40]}", f"this key is not known here; the known keys are {known}")
        arguments[name] = _argument(name, str(parameters[name].annotation), value, f"{path}.{key}")
    for name, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and name not in arguments:
            raise DecodeError(path, f"expected {wire_name(name)!r}")
    try:
        return make(**arguments)
    except ValueError as exc:
        # Refused below, outside the handler, so that the error does not carry this one as its context.
        rule = str(exc)
    raise DecodeError(path, rule)


def _argument(name: str, annotation: str, value: Any, path: str) -> Any:
    """Check a value by the annotation of its parameter, a text since this module postpones them; return it."""
    if annotation.startswith("Literal["):
        choices: list[str] = literal_eval(annotation.removeprefix("Literal"))
        if value not in choices:
            raise DecodeError(path, f"expected one of {', '.join(choices)}, found {_kind(value)}")
        return value
    kinds = annotation.split(" | ")
    if value is None and "None" in kinds:
        return None
    # JSON has no other types of numbers; isinstance() would take true for a whole number.
    if "bool" in kinds:
        wanted, fits = "true or false", isinstance(value, bool)
    elif "int" in kinds:
        wanted, fits = "a whole number", type(value) is int
        if name == "status":
            wanted, fits = "a status from 200 to 599", fits and value in _STATUSES
    elif "float" in kinds:
        wanted = "a number of at least 0" + (", or text" if "str" in kinds else "")
        fits = "str" in kinds and isinstance(value, str)
        if isinstance(value, int | float) and not isinstance(value, bool):
            fits = 0 <= value <= sys.float_info.max
    else:
        wanted, fits = "text", isinstance(value, str)
    if not fits:
        raise DecodeError(path, f"expected {wanted}, found {_kind(value)}")
    # JSON has no bytes, so a body is given as text.
    return str(value).encode() if "bytes" in kinds else value


def _folded(key: str) -> str:
    return key.replace("_", "").casefold()


def _kind(value: Any) -> str:
    if isinstance(value, list | dict):
        return "an array" if isinstance(value, list) else "an object"
    return json.dumps(value) if value is None or isinstance(value, bool) else f"{value!r:.40}"
