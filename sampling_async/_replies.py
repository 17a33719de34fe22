"""What the service's answers are taken to mean: refusals, records, and one outcome for every quota ID."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, quote_plus

from attrs import evolve, field, frozen

from sampling_async._codec import bulk_items, from_json, parse, structure
from sampling_async._errors import (
    BadRequestError,
    DecodeError,
    Delivery,
    ForbiddenError,
    SamplingError,
    ServerError,
    ServiceError,
    UnexpectedStatusError,
)
from sampling_async._models import Invite, ResultCode, hidden
from sampling_async._outcomes import Answer, InviteOutcome, made
from sampling_async._policy import REFUSED_UNPROCESSED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sampling_async._fastlane import WireItem


OK: Final = 200
_BAD_REQUEST: Final = 400
_FORBIDDEN: Final = 403
_INTERNAL_ERROR: Final = 500
_UNAVAILABLE: Final = 503
_PROVING_NOTHING: Final = frozenset({None, ResultCode.SUCCESS, ResultCode.TECHNICAL_ERROR})
"""Result codes of a refusal that leave open whether it was processed: none, a contradiction, a fault."""

_EXCERPT: Final = 200
_EXCERPTED: Final = 2**16
_UNMISTAKABLE: Final = 5


@frozen
class Reply:
    """What came back: the status, the decoded body and the headers that mean something to us.

    `result` is what came of a body that was worked on while it was read.
    """

    status: int
    body: bytes = field(default=b"", repr=False)
    retry_after: str | None = None
    date: str | None = None
    is_whole: bool = True
    result: Any = field(default=None, repr=False)


def refusal(
    reply: Reply, *, private: tuple[str, ...] = (), unprocessed: AbstractSet[int] = REFUSED_UNPROCESSED
) -> ServiceError | None:
    """Return the error a reply stands for, or None for a 200 (whose body may still be an error).

    Args:
        reply: What came back.
        private: Texts of the request that the error's excerpt of the body must not repeat.
        unprocessed: Statuses that prove by themselves that the request was not processed.
    """
    if reply.status == OK:
        return None
    return _service_error(reply, private, unprocessed, *_error_body(reply.body))


def disguised_refusal(reply: Reply, *, private: tuple[str, ...] = ()) -> ServiceError | None:
    """Return the error whose body came under a 200, or None. For bodies that could not be read as asked."""
    result, code = _error_body(reply.body)
    return None if code is None else _service_error(reply, private, frozenset(), result, code)


def _service_error(
    reply: Reply, private: tuple[str, ...], unprocessed: AbstractSet[int], result: str | None, code: int | None
) -> ServiceError:
    error_class, says = _STATUS_ERRORS.get(reply.status, (None, ""))
    if error_class is None:
        error_class = ServerError if reply.status >= _INTERNAL_ERROR else UnexpectedStatusError
    result = None if result is None else _without(private, result)[:_EXCERPT]
    # Only what looks like a name goes into the text: a sentence may be about the member.
    name = result if result and re.fullmatch(r"\w{1,64}", result) else ResultCode.name_of(code or 0)
    known = "" if code is None else f" {code} {name or ''}".rstrip()
    error = error_class(
        f"the service answered {reply.status}{known}{says}",
        delivery=_delivery(reply, result, code, unprocessed),
        status=reply.status,
        result=result,
        result_code=code,
        body_excerpt=_without(private, reply.body[:_EXCERPTED].decode("utf-8", "replace"))[:_EXCERPT],
    )
    error.retry_after = retry_after(reply)
    return error


_FORBIDDEN_HINT: Final = (
    ": the key was refused, or a proxy on the way dropped the header API_AUTH_KEY (nginx drops names with "
    "underscores unless underscores_in_headers is on, gunicorn unless header_map is dangerous)"
)
_STATUS_ERRORS: Final[Mapping[int, tuple[type[ServiceError], str]]] = {
    OK: (UnexpectedStatusError, " in the body of a 200"),
    _BAD_REQUEST: (BadRequestError, ""),
    _FORBIDDEN: (ForbiddenError, _FORBIDDEN_HINT),
}


def _delivery(reply: Reply, result: str | None, code: int | None, unprocessed: AbstractSet[int]) -> Delivery:
    """Say what a refusal proves: whether the request was surely not processed.

    Only the service knows that, and what stands between answers in its name: a proxy says 503 of a backend that
    processed a request and then failed, and passes a body on as whole that was cut on the way. So a refusal
    counts if its status means nothing else, or if its body is the service's own and tells of no fault of its.
    """
    if reply.status in unprocessed or reply.status == _FORBIDDEN:
        return "answered"
    if not reply.is_whole or code in _PROVING_NOTHING:
        return "unknown"
    if reply.status == _BAD_REQUEST:  # which is the service's own word for no
        return "answered"
    refuses = _BAD_REQUEST <= reply.status < _INTERNAL_ERROR or reply.status == _UNAVAILABLE
    return "answered" if refuses and result is not None else "unknown"


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


def _without(private: tuple[str, ...], text: str) -> str:
    """Return a text fit to be shown: printable, and without what is private in any form it may take there."""
    import html  # noqa: PLC0415  for errors only, with a table of all entities

    # What .NET's and other JSON writers escape is undone, so that it can be recognised.
    text = re.sub(r"\\u([0-9a-fA-F]{4})", lambda match: chr(int(match[1], 16)), text).replace("\\/", "/")
    for secret in private:
        quoted = json.dumps(secret)[1:-1], quote(secret, safe=""), quote_plus(secret), html.escape(secret)
        forms = "|".join(re.escape(form) for form in sorted({secret, *quoted}, key=len, reverse=True))
        # A short code is part of many a word; a long one is not there by chance.
        whole = f"(?<!\\w)(?:{forms})(?!\\w)" if len(secret) < _UNMISTAKABLE else forms
        text = re.sub(whole, "<hidden>", text, flags=re.IGNORECASE)
    return _printable(text)


def _printable(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def retry_after(reply: Reply, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> float | None:
    """Return the seconds a reply asks to wait, or None if it does not ask in a way that makes sense.

    A date is measured against the reply's own Date, so that a wrong local clock does no harm; where there is no
    Date, against `now`.
    """
    asked = (reply.retry_after or "").strip()
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{0,9})?", asked):
        return float(asked)
    until = _http_date(asked)
    return None if until is None else max(0.0, (until - (_http_date(reply.date) or now())).total_seconds())


def _http_date(text: str | None) -> datetime | None:
    try:
        date = parsedate_to_datetime(text or "")
    except (ValueError, OverflowError):
        return None
    return date if date.tzinfo else date.replace(tzinfo=UTC)


def read_invite(quota_id: int, body: bytes) -> Invite:
    """Read the answer of Generate Invite.

    Raises:
        DecodeError: It is unreadable, or about another quota than the one asked for.
    """
    invite = from_json(Invite, body)
    if invite.quota_id != quota_id:
        raise DecodeError("$.QuotaID", "expected the quota asked for, found another: not our answer")
    return invite


@frozen
class BulkAnswer:
    """What one bulk reply says: an answer for each quota ID asked, and those nobody asked for.

    Attributes:
        member_code: The member.
        answers: What became of each quota ID, in the order asked.
        unrequested: Outcomes for others.
        errors: Those of the outcomes.
        links: Those of all invites in the reply.
    """

    member_code: str = field(repr=hidden)
    answers: Mapping[int, Answer]
    unrequested: tuple[InviteOutcome, ...] = ()
    errors: tuple[SamplingError, ...] = ()
    links: Sequence[str] = field(default=(), repr=False)

    def outcomes(self) -> Iterator[InviteOutcome]:
        """Return an outcome for each quota ID."""
        return made(self.member_code, self.answers, self.answers.values())


def read_bulk(member_code: str, quota_ids: Sequence[int], body: bytes) -> BulkAnswer:
    """Read the answer of Bulk Invite.

    Raises:
        DecodeError: There is no list of items; a single unreadable item only makes its own ID `unknown`.
    """
    items = bulk_items(body)
    links = None if items is None else _made_ready(member_code, items)
    if items is not None and links is not None:
        answers = {item.QuotaID: item for item in items}
        if len(answers) == len(items) and tuple(answers) == quota_ids:  # as is nearly always so
            return BulkAnswer(member_code, answers, links=links)
        return _matched(
            member_code, quota_ids, tuple(made(member_code, (item.QuotaID for item in items), items))
        )
    document = parse(body)
    if type(document) is not dict:
        raise DecodeError("$", "expected an object with Invites")
    if type(document.get("Invites")) is not list:
        raise DecodeError("$.Invites", "expected an array of results")
    return reconcile(member_code, quota_ids, document["Invites"])


def _made_ready(member_code: str, items: Sequence[WireItem]) -> list[str] | None:
    """Put texts right and return the links; None if an item contradicts itself, which is to be explained."""
    success = int(ResultCode.SUCCESS)
    fit: set[str | None] = {None}
    links: list[str] = []
    for item in items:
        came = item.Invite
        if came is None:
            if item.ResultCode == success:
                return None
        elif item.ResultCode != success or came.QuotaID != item.QuotaID:
            return None
        else:
            links.append(came.URL)
        if item.Result not in fit:
            item.Result = _result_of(member_code, item.Result)
            fit.add(item.Result)
    return links


def reconcile(member_code: str, quota_ids: Sequence[int], items: Sequence[Any]) -> BulkAnswer:
    """Match the items of a bulk reply to the quota IDs asked, by the outer QuotaID and never by position.

    An item that cannot be read or contradicts itself makes its quota ID `unknown`, as does no item at all.
    """
    read = (_read_item(member_code, item, f"$.Invites[{index}]") for index, item in enumerate(items))
    return _matched(member_code, quota_ids, [outcome for outcome in read if outcome is not None])


def _matched(member_code: str, quota_ids: Sequence[int], outcomes: Sequence[InviteOutcome]) -> BulkAnswer:
    answers: dict[int, InviteOutcome] = {}
    for outcome in outcomes:
        earlier = answers.get(outcome.quota_id)
        answers[outcome.quota_id] = outcome if earlier is None else _merged(earlier, outcome)
    missing = [quota_id for quota_id in quota_ids if quota_id not in answers]
    answers.update((quota_id, _missing(member_code, quota_id)) for quota_id in missing)
    asked = {quota_id: answers.pop(quota_id) for quota_id in quota_ids}
    errors = tuple(outcome.error for outcome in asked.values() if outcome.error is not None)
    links = [outcome.invite.url for outcome in outcomes if outcome.invite is not None]
    return BulkAnswer(member_code, asked, tuple(answers.values()), errors, links)


def _result_of(member_code: str, value: Any) -> str | None:
    """Return the name of a result, which shows in reprs, without the member code, if it repeats that."""
    text = _text(value)
    if text is None or (text.isidentifier() and member_code.lower() not in text.lower()):
        return text
    return _without((member_code,), text)


def _read_item(member_code: str, item: Any, path: str) -> InviteOutcome | None:
    """Read one item; None if it does not say which quota it is about."""
    quota_id = _code(item.get("QuotaID", item.get("QuotaId"))) if type(item) is dict else None
    if quota_id is None:
        return None
    code, raw_invite = _code(item.get("ResultCode")), item.get("Invite")
    outcome = InviteOutcome(
        member_code, quota_id, "rejected", result_code=code, result=_result_of(member_code, item.get("Result"))
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
    if second.error is None and evolve(first, anomaly=second.anomaly) == second:
        return evolve(second, anomaly="; ".join(filter(None, (second.anomaly, "answered twice, alike"))))
    return _unknown(evolve(first, invite=None), "$.Invites", "expected one answer, found several that differ")


def _missing(member_code: str, quota_id: int) -> InviteOutcome:
    return _unknown(
        InviteOutcome(member_code, quota_id, "unknown"), "$.Invites", "expected an item for this quota ID"
    )


def _unknown(outcome: InviteOutcome, path: str, rule: str) -> InviteOutcome:
    error = DecodeError(path, rule, endpoint="bulk_invite")
    return evolve(outcome, status="unknown", error=error, anomaly=rule)
