"""Answers of the service before they are bytes, so that faults can alter them, and how they become bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from attrs import field, frozen

from sampling_async._codec import unstructure
from sampling_async._models import Invite, RecontactMembers, ResultCode, Setting

JSON: Final = "application/json; charset=utf-8"
HTML: Final = "text/html; charset=utf-8"
PLAINTEXT: Final = "application/plaintext"


class BulkItem(NamedTuple):
    """One item of a bulk invite's answer: the quota ID asked for, the code, and the invite if there is one."""

    quota_id: int
    result_code: int
    invite: Invite | None = None


Body: TypeAlias = bytes | list[BulkItem] | Invite | RecontactMembers | tuple[Setting, ...]
"""What an answer holds; bytes are sent as they are."""


@frozen
class Answer:
    """An answer of the service; `quota_ids` and such are not in it, only what is sent."""

    body: Body
    status: int = 200
    content_type: str = JSON
    headers: Mapping[str, str] = field(factory=dict[str, str])


def refusal(result_code: int, *, status: int = 400, content_type: str = JSON) -> Answer:
    """Return the error answer of the contract: Result and ResultCode."""
    return Answer(error_body(result_code), status, content_type)


def error_body(result_code: int) -> bytes:
    """Return the error body of the contract for a code."""
    fields = {"Result": result_name(result_code), "ResultCode": result_code}
    return json.dumps(fields, separators=(",", ":")).encode()


def html_page(title: str) -> bytes:
    """Return a page such as proxies send in place of an answer."""
    return (
        f"<!DOCTYPE html><html><head><title>{title}</title></head><body><h1>{title}</h1></body></html>".encode()
    )


def result_name(result_code: int) -> str:
    """Return the service's name of a code; a code without one gets a name made of its number."""
    return ResultCode.name_of(result_code) or f"RESULT_{result_code}"


def encoded(body: Body) -> bytes:
    """Return the bytes of a body."""
    match body:
        case bytes():
            return body
        case list():
            return ('{"Invites":[' + ",".join(map(_item_text, body)) + "]}").encode()
        case Invite():
            fields = unstructure(body)
            # Generate Invite spells this one name differently.
            return _dumped({"SurveyId": fields.pop("SurveyID"), **fields}).encode()
        case _:
            return _dumped(unstructure(body)).encode()


def _item_text(item: BulkItem) -> str:
    quota_id, code, invite = item
    shown = "null" if invite is None else _dumped(unstructure(invite))
    return f'{{"QuotaID":{quota_id},"Invite":{shown},"ResultCode":{code},"Result":"{result_name(code)}"}}'


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
