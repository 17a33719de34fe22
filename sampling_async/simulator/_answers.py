"""Responses of the service before they are bytes, and their encoding."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from attrs import field, frozen

from sampling_async import Invite, RecontactMembers, ResultCode, Setting
from sampling_async._json.converter import unstructure

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
