"""Responses of the service before they are bytes, what faults change in them, and their encoding."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import attrs
from attrs import field, frozen

from sampling_async import Invite, RecontactMembers, ResultCode, Setting
from sampling_async._contract.structs import replace
from sampling_async._json.codec import unstructure

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from sampling_async.simulator._faults import Fault


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
    """Return an invite that the ledger does not hold."""
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


def _reordered(items: list[BulkItem], fault: Fault, random: Random) -> list[BulkItem]:
    if fault.variant != "shuffled":
        return items[::-1]
    return random.sample(items, len(items))


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


def _mislabelled_items(items: list[BulkItem], _fault: Fault, _random: Random) -> list[BulkItem]:
    # The QuotaID of the item itself stays right: only the invite inside contradicts it.
    return [item._replace(invite=item.invite and _mislabelled(item.invite)) for item in items]


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
    "wrong_order": _reordered,
    "missing": _thinned,
    "extra": _padded,
    "wrong_invite": _mislabelled_items,
    "contradiction": _contradicted,
}


JSON: Final = "application/json; charset=utf-8"
HTML: Final = "text/html; charset=utf-8"
PLAINTEXT: Final = "application/plaintext"


class BulkItem(NamedTuple):
    """One item of a bulk invite's response: the requested quota ID, the result code, the invite if any."""

    quota_id: int
    result_code: int
    invite: Invite | None = None


Body: TypeAlias = bytes | list[BulkItem] | Invite | RecontactMembers | tuple[Setting, ...]
"""The content of a response. Bytes are sent as they are."""


@frozen
class ServiceResponse:
    """A response of the service. It holds only what is sent, nothing about the request."""

    body: Body
    status: int = 200
    content_type: str = JSON
    headers: Mapping[str, str] = field(factory=dict[str, str])


def refusal(result_code: int, *, status: int = 400, content_type: str = JSON) -> ServiceResponse:
    """Return the error response of the contract, with Result and ResultCode."""
    return ServiceResponse(error_body(result_code), status, content_type)


def error_body(result_code: int) -> bytes:
    """Return the error body of the contract for a result code."""
    fields = {"Result": result_name(result_code), "ResultCode": result_code}
    return json.dumps(fields, separators=(",", ":")).encode()


def html_page(title: str) -> bytes:
    """Return an HTML page such as proxies send instead of the service's response."""
    return (
        f"<!DOCTYPE html><html><head><title>{title}</title></head><body><h1>{title}</h1></body></html>".encode()
    )


def result_name(result_code: int) -> str:
    """Return the service's name of a result code, or a name made from the number if it has none."""
    return ResultCode.name_of(result_code) or f"RESULT_{result_code}"


def encoded(body: Body) -> bytes:
    """Encode a body as bytes."""
    match body:
        case bytes():
            return body
        case list():
            return ('{"Invites":[' + ",".join(map(_item_text, body)) + "]}").encode()
        case Invite():
            fields = unstructure(body)
            # Generate Invite spells this key SurveyId; bulk invites spell it SurveyID.
            return _dumped({"SurveyId": fields.pop("SurveyID"), **fields}).encode()
        case _:
            return _dumped(unstructure(body)).encode()


def _item_text(item: BulkItem) -> str:
    quota_id, code, invite = item
    shown = "null" if invite is None else _dumped(unstructure(invite))
    return f'{{"QuotaID":{quota_id},"Invite":{shown},"ResultCode":{code},"Result":"{result_name(code)}"}}'


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
