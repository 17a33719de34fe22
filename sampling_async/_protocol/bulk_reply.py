"""Read the responses with invites: one outcome for every quota ID of a bulk invite, or a single invite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from attrs import evolve, field, frozen

from sampling_async._contract.errors import (
    DecodeError,
    SamplingError,
)
from sampling_async._contract.records import Invite, ResultCode, hidden
from sampling_async._json.codec import bulk_items, from_json, parse, structure
from sampling_async._protocol.outcomes import SUCCESS, InviteOutcome, RawOutcome, Rejection, made, tally
from sampling_async._protocol.refusals import code_of, text_of, without

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sampling_async._json.fast import WireItem


def read_invite(quota_id: int, body: bytes) -> Invite:
    """Read the body of Generate Invite.

    Raises:
        DecodeError: The body is unreadable, or has an invite for another quota.
    """
    invite = from_json(Invite, body)
    if invite.quota_id != quota_id:
        raise DecodeError(
            "$.QuotaID", "expected the quota of the request, found another: this is not the response to it"
        )
    return invite


@frozen
class BulkReply:
    """The content of one bulk response: a result for each requested quota ID, and unrequested ones.

    Attributes:
        member_code: The member.
        quota_ids: The requested quota IDs, in the order of the request.
        answers: The result of each of them, in the same order; see `RawOutcome`.
        unrequested: Outcomes of quota IDs that were not requested.
        errors: The errors in the outcomes of requested IDs.
        links: The links of all invites in the response.
        rejections: The different rejections, if every answer is one of them or an invite; otherwise None.
    """

    member_code: str = field(repr=hidden)
    quota_ids: Sequence[int]
    answers: Sequence[RawOutcome]
    unrequested: tuple[InviteOutcome, ...] = ()
    errors: tuple[SamplingError, ...] = ()
    links: Sequence[str] = field(default=(), repr=False)
    rejections: Collection[Rejection] | None = None

    def outcomes(self) -> Iterator[InviteOutcome]:
        """Return an outcome for each requested quota ID."""
        return made(self.member_code, self.quota_ids, self.answers)

    def tally(self) -> tuple[dict[tuple[str, int | None], int], SamplingError | None]:
        """Count the outcomes by status and result code, without those from a journal; also return an error."""
        if self.rejections is None:
            return tally(self.answers)
        # Without a loop in Python: this runs for each request of a client that is watched.
        counted: dict[tuple[str, int | None], int] = {}
        if self.links:
            counted["invited", int(ResultCode.SUCCESS)] = len(self.links)
        if len(self.rejections) == 1:
            (only,) = self.rejections
            counted["rejected", only.result_code] = len(self.answers) - len(self.links)
        elif self.rejections:
            times = Counter(map(id, self.answers))
            for each in self.rejections:
                key = "rejected", each.result_code
                counted[key] = counted.get(key, 0) + times[id(each)]
        return counted, None


def read_bulk(member_code: str, quota_ids: Sequence[int], body: bytes) -> BulkReply:
    """Read the body of Bulk Invite.

    Raises:
        DecodeError: The body has no list of items. A single unreadable item only makes its own ID `unknown`.
    """
    items = bulk_items(body)
    answers = None if items is None else _columns(member_code, items)
    if items is not None and answers is not None:
        # Nearly always there is one item for each requested ID, in their order. Then nothing is matched.
        given = tuple([item.QuotaID for item in items])
        if given == quota_ids:
            return BulkReply(member_code, quota_ids, answers[0], links=answers[1], rejections=answers[2])
        return _matched(member_code, quota_ids, tuple(made(member_code, given, answers[0])))
    document = parse(body)
    if type(document) is not dict:
        raise DecodeError("$", "expected an object with Invites")
    if type(document.get("Invites")) is not list:
        raise DecodeError("$.Invites", "expected an array of results")
    return reconcile(member_code, quota_ids, document["Invites"])


def _columns(
    member_code: str, items: Sequence[WireItem]
) -> tuple[tuple[RawOutcome, ...], list[str], Collection[Rejection]] | None:
    """Return the results of the items, the links and rejections in them; None if an item contradicts itself.

    The careful decoder then reads the response again, to say what is wrong in that item. Users may keep the
    results of a million IDs, so each is as small as possible, and all rejections with one code are one object.
    """
    # This runs for each quota ID of a bulk, so it does little in each step.
    success, rejections = int(ResultCode.SUCCESS), _Rejections(member_code)
    answers: list[RawOutcome] = []
    links: list[str] = []
    code: int | None = None
    name: str | None = None
    rejection = Rejection(0, None)
    for item in items:
        came = item.Invite
        if came is None:
            # Nearly always the same as before.
            if item.ResultCode != code or item.Result != name:
                code, name = item.ResultCode, item.Result
                if code == success:
                    return None
                rejection = rejections[code, name]
            answers.append(rejection)
        elif item.ResultCode != success or came.QuotaID != item.QuotaID:
            return None
        else:
            links.append(came.URL)
            answers.append(came if item.Result == SUCCESS else _with_its_name(member_code, item))
    # A tuple: the garbage collector visits it once, and a list again and again.
    return tuple(answers), links, rejections.values()


def _with_its_name(member_code: str, item: WireItem) -> WireItem:
    item.Result = _result_of(member_code, item.Result)
    return item


class _Rejections(dict[tuple[int, str | None], Rejection]):
    """The rejections of one response, each code and name once. The names are cleaned of the member code."""

    def __init__(self, member_code: str) -> None:
        super().__init__()
        self._member_code = member_code

    def __missing__(self, key: tuple[int, str | None]) -> Rejection:
        code, name = key
        rejection = self[key] = Rejection(code, _result_of(self._member_code, name))
        return rejection


def reconcile(member_code: str, quota_ids: Sequence[int], items: Sequence[Any]) -> BulkReply:
    """Match the items of a bulk response to the requested quota IDs, by the outer QuotaID, not by position.

    A quota ID becomes `unknown` if its item is missing, cannot be read or contradicts itself.
    """
    read = (_read_item(member_code, item, f"$.Invites[{index}]") for index, item in enumerate(items))
    return _matched(member_code, quota_ids, [outcome for outcome in read if outcome is not None])


def _matched(member_code: str, quota_ids: Sequence[int], outcomes: Sequence[InviteOutcome]) -> BulkReply:
    answers: dict[int, InviteOutcome] = {}
    for outcome in outcomes:
        earlier = answers.get(outcome.quota_id)
        answers[outcome.quota_id] = outcome if earlier is None else _merged(earlier, outcome)
    missing = [quota_id for quota_id in quota_ids if quota_id not in answers]
    answers.update((quota_id, _missing(member_code, quota_id)) for quota_id in missing)
    asked = {quota_id: answers.pop(quota_id) for quota_id in quota_ids}
    errors = tuple(outcome.error for outcome in asked.values() if outcome.error is not None)
    links = [outcome.invite.url for outcome in outcomes if outcome.invite is not None]
    return BulkReply(member_code, tuple(asked), tuple(asked.values()), tuple(answers.values()), errors, links)


def _result_of(member_code: str, value: Any) -> str | None:
    """Return the name of a result without the member code, because reprs show this name."""
    text = text_of(value)
    # Nearly all names are plain identifiers, which need no cleaning.
    if text is None or (text.isidentifier() and member_code.lower() not in text.lower()):
        return text
    return without((member_code,), text)


def _read_item(member_code: str, item: Any, path: str) -> InviteOutcome | None:
    """Read one item; return None if it has no readable QuotaID."""
    quota_id = code_of(item.get("QuotaID", item.get("QuotaId"))) if type(item) is dict else None
    if quota_id is None:
        return None
    code, raw_invite = code_of(item.get("ResultCode")), item.get("Invite")
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
    """Return one outcome for two items with the same quota ID."""
    # Equal items are harmless. If they differ, neither can be trusted, and an invite may exist.
    if second.error is None and evolve(first, anomaly=second.anomaly) == second:
        return evolve(
            second, anomaly="; ".join(filter(None, (second.anomaly, ("answered twice, with equal items"))))
        )
    return _unknown(
        evolve(first, invite=None),
        "$.Invites",
        "expected one item for this quota ID, found several that differ",
    )


def _missing(member_code: str, quota_id: int) -> InviteOutcome:
    return _unknown(
        InviteOutcome(member_code, quota_id, "unknown"), "$.Invites", "expected an item for this quota ID"
    )


def _unknown(outcome: InviteOutcome, path: str, rule: str) -> InviteOutcome:
    error = DecodeError(path, rule, endpoint="bulk_invite")
    return evolve(outcome, status="unknown", error=error, anomaly=rule)
