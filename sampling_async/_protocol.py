"""The service's protocol without any I/O: requests as values, replies deciphered, pages and chunks planned.

Everything here is a plain function of its arguments, so it is tested without an event loop and says in one
place what is asked of the service and what its answers are taken to mean.
"""

from __future__ import annotations

import json
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from functools import partial
from itertools import islice
from math import isfinite
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, SupportsIndex, TypeVar
from urllib.parse import quote

from attrs import evolve, field, frozen

from sampling_async._codec import from_json, parse, structure
from sampling_async._errors import (
    BadRequestError,
    DecodeError,
    Delivery,
    Endpoint,
    ForbiddenError,
    InvalidRequestError,
    PagingError,
    ServerError,
    ServiceError,
    UnexpectedStatusError,
)
from sampling_async._models import Invite, Quotas, RecontactMembers, ResultCode, hidden
from sampling_async._outcomes import InviteOutcome
from sampling_async._settings import PartnerSettings

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

T = TypeVar("T")

MAX_QUOTA_IDS: Final = 100
"""Quota IDs a bulk invite takes at most (section "Limits")."""

_SAMPLES: Final = "/IPExternalSamplingService/ExternalSample"
_SETTINGS: Final = "/IntegratedPanelService/api/Settings"
_INT64_MAX: Final = 2**63 - 1
_OK: Final = 200
_EXCERPT: Final = 200


@frozen
class Call(Generic[T]):
    """One request, ready for the wire, and how to read the body of its 200.

    Attributes:
        endpoint: Which of the five endpoints it goes to.
        method: GET, or POST for a bulk invite.
        target: Path and query below the base address, percent-encoded. It may hold a member code.
        read: Turns the body of a 200 into what the caller asked for, or raises `DecodeError`.
        body: The JSON body, or None.
        quota_ids: How many quota IDs it asks about; time limits grow with them.
        private: Texts that must not be repeated from an answer.
    """

    endpoint: Endpoint
    method: Literal["GET", "POST"]
    target: str = field(repr=hidden)
    read: Callable[[bytes], T] = field(repr=False)
    body: bytes | None = field(default=None, repr=False)
    quota_ids: int = 0
    private: tuple[str, ...] = field(default=(), repr=False)


@frozen
class Reply:
    """What came back: the status, the decoded body and the headers that mean something to us."""

    status: int
    body: bytes = field(repr=False)
    retry_after: str | None = None
    date: str | None = None


# --- What may be asked -------------------------------------------------------------------------------------


def quota_id_of(value: SupportsIndex) -> int:
    """Return a quota ID as an int.

    Raises:
        InvalidRequestError: It is not a whole number from 1 to 2**63 - 1.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not 1 <= number <= _INT64_MAX:
        shown = repr(value) if isinstance(value, int | float | bool) else f"a {type(value).__name__}"
        raise InvalidRequestError(
            f"a quota ID is a whole number from 1 to 2**63 - 1, not {shown[:40]}; take it from get_quotas()"
        )
    return number


def member_code_of(value: str) -> str:
    """Return a member code that can be a path segment.

    Raises:
        InvalidRequestError: It is empty, `.` or `..` (HTTP libraries remove such segments, even encoded), or
            holds control characters or half of a surrogate pair. The text does not repeat it.
    """
    if not isinstance(value, str):
        raise InvalidRequestError(f"a member code is a str, not {type(value).__name__}")
    if value in {"", ".", ".."}:
        raise InvalidRequestError("a member code cannot be empty, '.' or '..': the path would lose it")
    if not value.isprintable() and re.search(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]", value):
        raise InvalidRequestError("a member code cannot hold control characters or lone surrogates")
    return value


def _quota_ids_of(values: Iterable[SupportsIndex]) -> tuple[int, ...]:
    return tuple(quota_id_of(value) for value in values)


@frozen
class InviteRequest:
    """One member and the quotas to ask invites for; checked when made.

    Raises:
        InvalidRequestError: The member code or a quota ID cannot be sent.
    """

    member_code: str = field(converter=member_code_of, repr=hidden)
    quota_ids: tuple[int, ...] = field(converter=_quota_ids_of)


# --- The five requests -------------------------------------------------------------------------------------


def get_quotas(panel: str, *, include_routables: bool) -> Call[Quotas]:
    """Build Get Quotas (endpoint 1)."""
    flag = "true" if include_routables else "false"
    target = f"{_SAMPLES}/{panel}/Quotas?includeRoutables={flag}"
    return Call("get_quotas", "GET", target, partial(_read, Quotas))


def bulk_invite(panel: str, member_code: str, quota_ids: Sequence[int]) -> Call[BulkAnswer]:
    """Build Bulk Invite (endpoint 2) for at most 100 distinct quota IDs."""
    assert 0 < len(quota_ids) <= MAX_QUOTA_IDS
    return Call(
        "bulk_invite",
        "POST",
        f"{_SAMPLES}/{panel}/{_segment(member_code)}/Invites",
        partial(_read_bulk, member_code, quota_ids),
        body=json.dumps({"QuotaIDs": list(quota_ids)}, separators=(",", ":")).encode(),
        quota_ids=len(quota_ids),
        private=(member_code, _segment(member_code)),
    )


def generate_invite(panel: str, member_code: str, quota_id: int) -> Call[Invite]:
    """Build Generate Invite (endpoint 3)."""
    return Call(
        "generate_invite",
        "GET",
        f"{_SAMPLES}/{panel}/{_segment(member_code)}/Invite/{quota_id}",
        partial(_read_invite, quota_id),
        quota_ids=1,
        private=(member_code, _segment(member_code)),
    )


def get_settings(panel: str) -> Call[PartnerSettings]:
    """Build Get Settings (endpoint 4)."""
    return Call("get_settings", "GET", f"{_SETTINGS}?partnerGUID={panel}", partial(_read, PartnerSettings))


def recontact_members(
    panel: str, quota_id: int, *, max_results: int | None, after: str | None
) -> Call[RecontactMembers]:
    """Build Get Recontact Members For Quota (endpoint 5): the page that starts after the code `after`."""
    query = [] if max_results is None else [f"maxResults={max_results}"]
    if after is not None:
        query.append(f"lastMemberCodeReceived={_segment(after)}")
    path = f"{_SAMPLES}/{panel}/Recontact/{quota_id}/MemberCodes"
    return Call(
        "recontact_members",
        "GET",
        f"{path}?{'&'.join(query)}" if query else path,
        partial(_read, RecontactMembers),
        private=() if after is None else (after, _segment(after)),
    )


def _segment(text: str) -> str:
    return quote(text, safe="")


# --- What the answers mean ---------------------------------------------------------------------------------


def refusal(call: Call[Any], reply: Reply) -> ServiceError | None:
    """Return the error a reply stands for, or None for a 200 (whose body may still be an error)."""
    if reply.status == _OK:
        return None
    return _service_error(call, reply, *_error_body(reply.body))


def disguised_refusal(call: Call[Any], reply: Reply) -> ServiceError | None:
    """Return the error whose body came under a 200, or None. For bodies that `call.read` refused."""
    result, code = _error_body(reply.body)
    return None if code is None else _service_error(call, reply, result, code)


def _service_error(call: Call[Any], reply: Reply, result: str | None, code: int | None) -> ServiceError:
    error_class, says = _STATUS_ERRORS.get(reply.status, (None, ""))
    if error_class is None:
        error_class = ServerError if reply.status >= 500 else UnexpectedStatusError  # noqa: PLR2004
    known = f" {code} {result or ResultCode.name_of(code) or ''}".rstrip() if code is not None else ""
    error = error_class(
        f"the service answered {reply.status}{known}{says}",
        endpoint=call.endpoint,
        delivery=_delivery(reply.status, code),
        status=reply.status,
        result=result,
        result_code=code,
        body_excerpt=_excerpt(reply.body, call.private),
    )
    error.retry_after = retry_after(reply)
    return error


_FORBIDDEN_HINT: Final = (
    ": the key was refused, or a proxy on the way dropped the header API_AUTH_KEY (nginx drops names with "
    "underscores unless underscores_in_headers is on)"
)
_STATUS_ERRORS: Final[Mapping[int, tuple[type[ServiceError], str]]] = {
    _OK: (UnexpectedStatusError, " in the body of a 200"),
    400: (BadRequestError, ""),
    403: (ForbiddenError, _FORBIDDEN_HINT),
}


def _delivery(status: int, code: int | None) -> Delivery:
    """Say what a refusal proves. A server fault, even one inside a 400, proves nothing."""
    fault_in_400 = status == 400 and code == ResultCode.TECHNICAL_ERROR  # noqa: PLR2004
    refused = status == 503 or 400 <= status < 500  # noqa: PLR2004
    return "answered" if refused and not fault_in_400 else "unknown"


def _error_body(body: bytes) -> tuple[str | None, int | None]:
    """Return Result and ResultCode of an error body, by content; (None, None) if it is something else."""
    try:
        document = parse(body)
    except DecodeError:
        return None, None
    if type(document) is not dict:
        return None, None
    return _text(document.get("Result")), _code(document.get("ResultCode"))


def _text(value: Any) -> str | None:
    return _printable(value)[:_EXCERPT] if type(value) is str else None


def _code(value: Any) -> int | None:
    try:
        return structure(int, value)
    except DecodeError:
        return None


def _excerpt(body: bytes, private: tuple[str, ...]) -> str:
    """Return the beginning of a body, fit to be shown: printable, and without what is private."""
    text = body[: 4 * _EXCERPT].decode("utf-8", "replace")
    for secret in private:
        text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", "<hidden>", text)
    return _printable(text)[:_EXCERPT]


def _printable(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def retry_after(reply: Reply) -> float | None:
    """Return the seconds a reply asks to wait, or None if it does not ask in a way that makes sense.

    A date is measured against the reply's own Date, so that a wrong local clock does no harm.
    """
    if reply.retry_after is None:
        return None
    try:
        seconds = float(reply.retry_after)
    except ValueError:
        try:
            until, now = parsedate_to_datetime(reply.retry_after), parsedate_to_datetime(reply.date or "")
            seconds = max(0.0, (until - now).total_seconds())
        except (ValueError, TypeError, OverflowError):  # not dates, or only one of them with a zone
            return None
    return seconds if isfinite(seconds) and seconds >= 0 else None


def _read(cls: type[T], body: bytes) -> T:
    return from_json(cls, body)


def _read_invite(quota_id: int, body: bytes) -> Invite:
    invite = from_json(Invite, body)
    if invite.quota_id != quota_id:
        raise DecodeError("$.QuotaID", "expected the quota asked for, found another: not our answer")
    return invite


# --- Bulk invite: one outcome for every ID -----------------------------------------------------------------


@frozen
class BulkAnswer:
    """What one bulk reply says: an outcome for each quota ID asked, and answers nobody asked for."""

    outcomes: Mapping[int, InviteOutcome]
    unrequested: tuple[InviteOutcome, ...] = ()


def _read_bulk(member_code: str, quota_ids: Sequence[int], body: bytes) -> BulkAnswer:
    document = parse(body)
    if type(document) is not dict:
        raise DecodeError("$", "expected an object with Invites")
    if type(document.get("Invites")) is not list:
        raise DecodeError("$.Invites", "expected an array of results")
    return reconcile(member_code, quota_ids, document["Invites"])


def reconcile(member_code: str, quota_ids: Sequence[int], items: Sequence[Any]) -> BulkAnswer:
    """Match the items of a bulk reply to the quota IDs asked, by the outer QuotaID and never by position.

    An item that cannot be read or contradicts itself makes its quota ID `unknown`, as does no item at all.
    """
    answers: dict[int, InviteOutcome] = {}
    for index, item in enumerate(items):
        outcome = _read_item(member_code, item, f"$.Invites[{index}]")
        if outcome is not None:
            earlier = answers.get(outcome.quota_id)
            answers[outcome.quota_id] = outcome if earlier is None else _merged(earlier, outcome)
    missing = [quota_id for quota_id in quota_ids if quota_id not in answers]
    answers.update((quota_id, _missing(member_code, quota_id)) for quota_id in missing)
    asked = {quota_id: answers.pop(quota_id) for quota_id in quota_ids}
    return BulkAnswer(asked, tuple(answers.values()))


def _read_item(member_code: str, item: Any, path: str) -> InviteOutcome | None:
    """Read one item; None if it does not say which quota it is about."""
    quota_id = _code(item.get("QuotaID", item.get("QuotaId"))) if type(item) is dict else None
    if quota_id is None:
        return None
    code, raw_invite = _code(item.get("ResultCode")), item.get("Invite")
    outcome = InviteOutcome(
        member_code, quota_id, "rejected", result_code=code, result=_text(item.get("Result"))
    )
    if code is None:
        return _unknown(outcome, f"{path}.ResultCode", "expected a whole number")
    if code != ResultCode.SUCCESS:
        if raw_invite is not None:
            return _unknown(outcome, f"{path}.Invite", f"expected null beside result code {code}")
        return outcome
    if raw_invite is None:
        return _unknown(outcome, f"{path}.Invite", "expected an invite beside result code 1")
    try:
        invite = structure(Invite, raw_invite, f"{path}.Invite")
    except DecodeError as exc:
        return _unknown(outcome, exc.path, exc.rule)
    anomaly = None
    if invite.quota_id != quota_id:
        anomaly = f"the invite names quota {invite.quota_id}"
    return evolve(outcome, status="invited", invite=invite, anomaly=anomaly)


def _merged(first: InviteOutcome, second: InviteOutcome) -> InviteOutcome:
    """Return what two items about one quota ID say together."""
    if evolve(first, error=None) == evolve(second, error=None) and first.error is None:
        return evolve(first, anomaly="; ".join(filter(None, (first.anomaly, "answered twice, alike"))))
    return _unknown(evolve(first, invite=None), "$.Invites", "expected one answer, found two that differ")


def _missing(member_code: str, quota_id: int) -> InviteOutcome:
    return _unknown(
        InviteOutcome(member_code, quota_id, "unknown"), "$.Invites", "expected an item for this quota ID"
    )


def _unknown(outcome: InviteOutcome, path: str, rule: str) -> InviteOutcome:
    error = DecodeError(path, rule, endpoint="bulk_invite")
    return evolve(outcome, status="unknown", error=error, anomaly=rule)


@frozen
class Chunk:
    """Distinct quota IDs of one member for one bulk request, each with the number of places it was asked in."""

    member_code: str = field(repr=hidden)
    places: Mapping[int, int]

    @property
    def quota_ids(self) -> tuple[int, ...]:
        """The quota IDs, in the order asked."""
        return tuple(self.places)


def plan_chunks(request: InviteRequest, size: int = MAX_QUOTA_IDS) -> Iterator[Chunk]:
    """Cut a request into chunks of `size` distinct quota IDs; a repeated ID is in one chunk only."""
    places = iter(Counter(request.quota_ids).items())
    while batch := dict(islice(places, size)):
        yield Chunk(request.member_code, batch)


# --- Recontact paging --------------------------------------------------------------------------------------


class Cursor:
    """Where a reader stands in a recontact list, and the guard that it gets on.

    Codes are compared for equality only: the service sorts by its own collation.
    """

    __slots__ = ("_seen", "after", "done")

    def __init__(self, after: str | None = None) -> None:
        self.after = after
        self.done = False
        self._seen = {after}

    def advance(self, page: RecontactMembers) -> RecontactMembers:
        """Move past a page, and return it without a first code that was the last one before.

        Raises:
            PagingError: More is announced, but the page is empty or ends where a page has ended before.
        """
        if self.after is not None and page.member_codes[:1] == (self.after,):
            page = evolve(page, member_codes=page.member_codes[1:])
        if page.has_additional_members:
            self._step(page.member_codes)
        else:
            self.done = True
            self.after = page.member_codes[-1] if page.member_codes else self.after
        return page

    def _step(self, codes: tuple[str, ...]) -> None:
        if not codes:
            raise PagingError(
                "the page is empty, yet more members are announced; resume later with after=error.cursor",
                cursor=self.after,
            )
        if codes[-1] in self._seen:
            raise PagingError(
                "the page ends with a code that ended a page before; resume later with after=error.cursor",
                cursor=self.after,
            )
        self.after = codes[-1]
        self._seen.add(self.after)
