"""Records in pydantic and FastAPI."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import httpx
import pytest
from fastapi import Body, FastAPI
from fastapi.encoders import ENCODERS_BY_TYPE
from fastapi.testclient import TestClient
from inventories import quotas as quotas_body
from pydantic import BaseModel, SecretStr, TypeAdapter, ValidationError

from sampling_async import (
    Invite,
    InviteOutcome,
    Price,
    Quotas,
    RecontactMembers,
    Setting,
    Survey,
    from_json,
    to_json,
)

BODY = json.dumps(quotas_body())
INVITE = Invite(7, 2, 41, 1.1, "https://s.example/1", 12, 35, 0.3)
RECORDS: dict[type[Any], object] = {
    Invite: INVITE,
    Price: Price(1.5, 1),
    RecontactMembers: RecontactMembers(2, has_additional_members=True, member_codes=("a", "b")),
    Setting: Setting("Panel GUID", "d", "v"),
}


def on_the_wire(record):
    return json.loads(to_json(record))


@pytest.mark.parametrize(("kind", "record"), RECORDS.items(), ids=[kind.__name__ for kind in RECORDS])
def test_records_are_read_and_written_in_the_contracts_names(kind, record):
    adapter = TypeAdapter(kind)
    assert json.loads(adapter.dump_json(record)) == adapter.dump_python(record) == on_the_wire(record)
    assert adapter.validate_python(record) is record
    assert adapter.validate_python(on_the_wire(record)) == adapter.validate_json(to_json(record)) == record


def test_an_inventory_is_read_as_the_codec_reads_it():
    quotas = from_json(Quotas, BODY)
    assert TypeAdapter(Quotas).validate_json(BODY) == quotas
    assert json.loads(TypeAdapter(list[Survey]).dump_json(list(quotas.surveys))) == [
        on_the_wire(survey) for survey in quotas.surveys
    ]


def test_a_field_of_a_model_may_be_a_record():
    class Click(BaseModel):
        member_code: SecretStr
        invite: Invite | None = None
        others: list[Invite] = []

    click = Click(member_code=SecretStr("m1"), invite=INVITE, others=[INVITE])
    read = Click.model_validate_json(click.model_dump_json())
    assert (read.invite, read.others) == (INVITE, [INVITE])
    assert "s.example" not in repr(click)


@pytest.mark.parametrize(
    ("change", "path"),
    [({"SurveyID": "7"}, r"\$\.SurveyID"), ({"URL": ""}, r"\$\.URL"), ({"LOI": {"{}": "{x}"}}, r"\$\.LOI")],
)
def test_an_error_names_the_path_and_the_rule(change, path):
    with pytest.raises(ValidationError, match=f"{path}: expected"):
        TypeAdapter(Invite).validate_python(on_the_wire(INVITE) | change)


def test_records_of_endpoints_without_an_annotation_are_written_as_the_how_to_says():
    page = (Path(__file__).parents[2] / "docs/howto/data-frames.md").read_text()
    (example,) = [
        each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "ENCODERS_BY_TYPE" in each
    ]
    names: dict[str, Any] = {}
    before = dict(ENCODERS_BY_TYPE)
    try:
        exec(example, names)
        app, quotas = names["app"], from_json(Quotas, BODY)
        survey = quotas.surveys[0]
        outcome = InviteOutcome("m", 7, "invited", INVITE)
        returned = {
            "inventory": quotas,
            "survey": [survey],
            "quota": {"q": (survey.quotas[0],)},
            "one": [outcome],
        }
        for path, value in returned.items():
            app.get(f"/{path}")(lambda value=value: value)
        client = TestClient(app)
        for path, value in returned.items():
            assert client.get(f"/{path}").json() == json.loads(to_json(value)), path
        assert client.get("/offer").json() == {"invites": [on_the_wire(INVITE)]}
    finally:
        ENCODERS_BY_TYPE.clear()
        ENCODERS_BY_TYPE.update(before)


def test_the_schema_describes_them():
    schema = TypeAdapter(Quotas).json_schema()
    assert set(schema["$defs"]) >= {"Survey", "Quota", "Layer", "SubQuota", "QuestionAndAnswers", "Price"}
    assert schema["$defs"]["Survey"]["properties"]["LOI"]["type"] == "integer"
    assert "SurveyName" not in schema["$defs"]["Survey"]["required"]
    assert TypeAdapter(Quotas).json_schema(mode="serialization") == schema


async def test_fastapi_takes_and_returns_them():
    app, quotas = FastAPI(), from_json(Quotas, BODY)

    @app.get("/quotas")
    async def inventory() -> Quotas:
        return quotas

    @app.post("/invites")
    async def back(invite: Annotated[Invite, Body()]) -> list[Invite]:
        return [invite]

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        assert (await client.get("/quotas")).json() == on_the_wire(quotas)
        made = await client.post("/invites", json=on_the_wire(INVITE))
        assert (made.status_code, made.json()) == (200, [on_the_wire(INVITE)])
        wrong = await client.post("/invites", json={"SurveyID": 7})
        assert wrong.status_code == 422
        assert "QuotaID" in wrong.json()["detail"][0]["msg"]
        schemas = (await client.get("/openapi.json")).json()["components"]["schemas"]
    assert {"Invite", "Quotas", "Survey"} <= set(schemas)
