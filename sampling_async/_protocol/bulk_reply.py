"""Read the responses with invites: one outcome for every quota ID of a bulk invite, or a single invite."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from attrs import field

from sampling_async._contract.errors import DecodeError
from sampling_async._contract.records import Invite, InviteOfCall, hidden
from sampling_async._contract.result_codes import ResultCode
from sampling_async._contract.structs import astuple, replace, value
from sampling_async._json.converter import from_json, structure
from sampling_async._json.fast import UnreadReply, WireReply
from sampling_async._json.rules import parse, whole_number_or_none, zeros
from sampling_async._protocol.refusals import text_of, without
from sampling_async._protocol.results import (
    MOST_SAID,
    SUCCESS,
    Answers,
    Columns,
    InviteOutcome,
    Listed,
    outcomes_from,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sampling_async._json.fast import WireItem
    from sampling_async._protocol.results import OutcomeStatus, Said


_LOG: Final = logging.getLogger("sampling_async.json")
_NAME: Final = 64  # the most characters of a name of a result


def read_invite(quota_id: int, body: bytes) -> Invite:
    """Read the body of Generate Invite; an invite for another quota is a DecodeError."""
    invite = from_json(Invite, body)
    if invite.quota_id != quota_id:
        raise DecodeError(
            "$.QuotaID", "expected the quota of the request, found another: this is not the response to it"
        )
    # These zeros are rare, so nearly no body is parsed twice.
    has_zero = not (invite.wave_id and invite.partner_amount and invite.loi and invite.ir)
    if has_zero and (anomaly := zeros(parse(body))):
        _LOG.warning("%s", anomaly)
    return InviteOfCall(*astuple(invite))


@value
class BulkReply:
    """The content of one bulk response: a result for each requested quota ID, and unrequested ones."""

    member_code: str = field(repr=hidden)
    quota_ids: Sequence[int]
    answers: Answers
    unrequested: tuple[InviteOutcome, ...] = ()  # outcomes of quota IDs that were not requested
    # the links of invites that are not in `answers`: unrequested, or not to be trusted
    other_links: tuple[str, ...] = field(default=(), repr=False)

    def outcomes(self) -> Iterator[InviteOutcome]:
        return outcomes_from((self.answers,), self.member_code, self.quota_ids)

    def links(self) -> list[str]:
        return [*[invite.url for invite in self.answers.invites], *self.other_links]


def read_bulk(member_code: str, quota_ids: Sequence[int], body: bytes) -> BulkReply:
    """Read the body of Bulk Invite. A single unreadable item only makes its own ID `unknown`."""
    reply = structure(WireReply, body)
    if type(reply) is not UnreadReply:
        columns = _columns(member_code, reply.Invites)
        if columns is not None:
            # Nearly always there is one item for each requested ID, in their order. Then nothing is matched.
            given = tuple([item.QuotaID for item in reply.Invites])
            if given == quota_ids:
                return BulkReply(member_code, quota_ids, columns)
            return _matched(member_code, quota_ids, tuple(outcomes_from((columns,), member_code, given)))
        reply = structure(WireReply, parse(body, once=True))
    return reconcile(member_code, quota_ids, reply.Invites)


def _columns(member_code: str, items: Sequence[WireItem]) -> Columns | None:
    """Return the results of the items; None if an item contradicts itself, or they are too various for columns.

    The careful decoder then reads the response again, to say what is wrong in that item.
    """
    # This runs for each quota ID of a bulk, so it does little in each step.
    said = _AllSaid(member_code)
    _, success, its_name = SUCCESS
    numbers: list[int] = []
    invites: list[Invite] = []
    code: int | None = None
    name: str | None = None
    number = 0
    for item in items:
        came = item.Invite
        if came is None:
            # Nearly always the same as before.
            if item.ResultCode != code or item.Result != name:
                code, name = item.ResultCode, item.Result
                if code == success:
                    return None
                number = said[code, name]
            numbers.append(number)
        elif item.ResultCode != success or came.quota_id != item.QuotaID:
            return None
        else:
            invites.append(came)
            numbers.append(0 if item.Result == its_name else said[success, item.Result])
    return Columns(bytes(numbers), tuple(said.each), tuple(invites)) if len(said.each) <= MOST_SAID else None


class _AllSaid(dict[tuple[int, str | None], int]):
    """What the service said in one response, each once, cleaned of the member code, with its number."""

    def __init__(self, member_code: str) -> None:
        super().__init__()
        self._member_code = member_code
        self.each: list[Said] = [SUCCESS]

    def __missing__(self, key: tuple[int, str | None]) -> int:
        code, name = key
        number = self[key] = len(self.each)
        # Code 1 without an invite never comes here: such a response is read with care.
        status: OutcomeStatus = "invited" if code == ResultCode.SUCCESS else "rejected"
        self.each.append((status, code, _result_of(self._member_code, name)))
        return number


def reconcile(member_code: str, quota_ids: Sequence[int], items: Sequence[Any]) -> BulkReply:
    """Match the items of a bulk response to the requested quota IDs, by the outer QuotaID, not by position.

    A quota ID becomes `unknown` if its item is missing, cannot be read or contradicts itself.
    """
    read = (_read_item(member_code, item, f"$.Invites[{index}]") for index, item in enumerate(items))
    return _matched(member_code, quota_ids, [outcome for outcome in read if outcome is not None])


def _matched(member_code: str, quota_ids: Sequence[int], outcomes: Sequence[InviteOutcome]) -> BulkReply:
    found: dict[int, InviteOutcome] = {}
    for outcome in outcomes:
        earlier = found.get(outcome.quota_id)
        found[outcome.quota_id] = outcome if earlier is None else _merged(earlier, outcome)
    asked = [found.pop(id_) if id_ in found else _missing(member_code, id_) for id_ in quota_ids]
    answers = Listed(tuple(asked))
    links = {outcome.invite.url for outcome in outcomes if outcome.invite is not None}
    others = tuple(links.difference(invite.url for invite in answers.invites))
    return BulkReply(member_code, quota_ids, answers, tuple(found.values()), others)


def _result_of(member_code: str, text: str | None) -> str | None:
    """Return the name of a result without the member code, because reprs show this name."""
    # Nearly all names are plain identifiers, which need no cleaning.
    if text is None or (len(text) <= _NAME and text.isidentifier() and member_code.lower() not in text.lower()):
        return text
    return without((member_code,), text)


def _read_item(member_code: str, item: Any, path: str) -> InviteOutcome | None:
    quota_id = whole_number_or_none(item.get("QuotaID", item.get("QuotaId"))) if type(item) is dict else None
    if quota_id is None:
        return None
    code, raw_invite = whole_number_or_none(item.get("ResultCode")), item.get("Invite")
    outcome = InviteOutcome(
        member_code,
        quota_id,
        "rejected",
        result_code=code,
        result=_result_of(member_code, text_of(item.get("Result"))),
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
    other = None if invite.quota_id == quota_id else f"the invite names quota {invite.quota_id}"
    anomaly = "; ".join(filter(None, (other, zeros(raw_invite)))) or None
    return replace(outcome, status="invited", invite=invite, anomaly=anomaly)


def _merged(first: InviteOutcome, second: InviteOutcome) -> InviteOutcome:
    # Equal items are harmless. If they differ, neither can be trusted, and an invite may exist.
    if second.error is None and replace(first, anomaly=second.anomaly) == second:
        return replace(
            second, anomaly="; ".join(filter(None, (second.anomaly, ("answered twice, with equal items"))))
        )
    return _unknown(
        replace(first, invite=None),
        "$.Invites",
        "expected one item for this quota ID, found several that differ",
    )


def _missing(member_code: str, quota_id: int) -> InviteOutcome:
    return _unknown(
        InviteOutcome(member_code, quota_id, "unknown"), "$.Invites", "expected an item for this quota ID"
    )


def _unknown(outcome: InviteOutcome, path: str, rule: str) -> InviteOutcome:
    error = DecodeError(path, rule, endpoint="bulk_invite")
    return replace(outcome, status="unknown", error=error, anomaly=rule)
