"""The OpenAPI document: it is valid and agrees with the client and the simulator."""

from __future__ import annotations

import json
import re
from collections import Counter
from contextlib import aclosing, suppress
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args
from urllib.parse import parse_qsl, urlsplit

import anyio
import attrs
import doubles
import httpx
import pytest
from openapi_schema_validator import OAS31Validator, oas31_format_checker
from openapi_spec_validator import validate
from referencing import Registry
from referencing.jsonschema import DRAFT202012

import sampling_async.simulator
from sampling_async import (
    DecodeError,
    Endpoint,
    Invite,
    InviteOutcome,
    Layer,
    Price,
    QuestionAndAnswers,
    Quota,
    Quotas,
    RecontactMembers,
    SamplingClient,
    SamplingError,
    Setting,
    SubQuota,
    Survey,
    SurveyWaveExclusion,
    from_json,
    to_json,
)
from sampling_async.simulator import Fault, Simulator

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

PATH = Path(sampling_async.simulator.__file__).parent / "openapi.json"
DOCUMENT = json.loads(PATH.read_text(encoding="utf-8"))
SCHEMAS = DOCUMENT["components"]["schemas"]
REGISTRY = Registry().with_resource("openapi", DRAFT202012.create_resource(DOCUMENT))
OPERATIONS = {
    (method.upper(), path): operation
    for path, item in DOCUMENT["paths"].items()
    for method, operation in item.items()
}
BY_ID = {operation["operationId"]: operation for operation in OPERATIONS.values()}
OPERATION_IDS = {
    "get_quotas": "getQuotas",
    "bulk_invite": "bulkInvite",
    "generate_invite": "generateInvite",
    "get_settings": "getSettings",
    "recontact_members": "getRecontactMembers",
}
NIL = "11111111-2222-4333-8444-555555555555"


@attrs.frozen
class Sent:
    """A request of the client.

    Attributes:
        method: The HTTP method.
        target: The path and the query.
        body: The body; empty if there is none.
    """

    method: str
    target: str
    body: bytes


async def sent(panel: str, *acts: Callable[[SamplingClient], Awaitable[object]]) -> list[Sent]:
    """Return the requests that a client sends for calls, one for each."""
    service = doubles.Service(httpx.Response(403))
    async with doubles.client(service, panel_guid=panel) as client:
        for act in acts:
            with suppress(SamplingError):
                await act(client)
    return [Sent(each.method, each.url.raw_path.decode(), each.content) for each in service.requests]


def page(quota_id: int, **options: Any) -> Callable[[SamplingClient], Awaitable[object]]:
    """Return the call of a page of recontact members."""

    async def first(client: SamplingClient) -> object:
        async with aclosing(client.recontact_pages(quota_id, **options)) as pages:
            return await anext(pages)

    return first


async def calls(
    panel: str = doubles.PANEL, member: str = "a/b c", quota_ids: tuple[int, ...] = (7,), recontact: int = 7
) -> list[Sent]:
    """Return the five requests as the client makes them, with every parameter, as `OPERATION_IDS` has them."""
    return await sent(
        panel,
        lambda client: client.get_quotas(include_routables=False),
        lambda client: client.bulk_invite(member, quota_ids),
        lambda client: client.generate_invite(member, quota_ids[0]),
        lambda client: client.get_settings(),
        page(recontact, max_results=3, after="m"),
    )


CALLS = dict(zip(OPERATION_IDS, anyio.run(calls), strict=True))


def resolved(node: dict[str, Any]) -> dict[str, Any]:
    """Return what a node of the document refers to, or the node."""
    if "$ref" not in node:
        return node
    found = DOCUMENT
    for name in node["$ref"].split("/")[1:]:
        found = found[name]
    return found


def errors(schema: dict[str, Any], value: Any) -> list[str]:
    """Return why a value does not fit a schema of the document."""
    schema = json.loads(json.dumps(schema).replace('"#/', '"openapi#/'))
    validator = OAS31Validator(schema, registry=REGISTRY, format_checker=oas31_format_checker)
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(value)]


def operation_of(call: Sent) -> tuple[str, str]:
    """Return method and path template of the one operation that a request belongs to."""
    path = urlsplit(call.target).path
    (found,) = [
        (method, template)
        for method, template in OPERATIONS
        if method == call.method and re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", template), path)
    ]
    return found


def examples(node: Any) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield every example of the document with its schema."""
    if isinstance(node, dict):
        if "example" in node:
            yield node["schema"], node["example"]
        for each in node.values():
            yield from examples(each)


def example(operation_id: str) -> Any:
    """Return the example of an operation's 200."""
    return BY_ID[operation_id]["responses"]["200"]["content"]["application/json"]["example"]


def samples() -> dict[type, dict[str, Any]]:
    """Return an object of every record, with all its fields, from the examples of the document."""
    quotas = example("getQuotas")
    (survey,) = quotas["Surveys"]
    (quota,) = survey["Quotas"]
    (layer,) = quota["Layers"]
    (part,) = layer["SubQuotas"]
    return {
        Quotas: quotas,
        Survey: survey,
        Price: survey["Price"],
        Quota: quota,
        Layer: layer,
        SubQuota: part,
        QuestionAndAnswers: part["QuestionsAndAnswers"][0],
        SurveyWaveExclusion: survey["SurveyWaveExclusions"][0],
        Invite: example("bulkInvite")["Invites"][0]["Invite"],
        RecontactMembers: example("getRecontactMembers"),
        Setting: example("getSettings")[0],
    }


def without(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != name}


def is_readable(record: type, fields: dict[str, Any]) -> bool:
    try:
        from_json(record, json.dumps(fields))
    except DecodeError:
        return False
    return True


# --- The document by itself


def test_the_document_is_valid_openapi():
    validate(DOCUMENT)


def test_its_examples_fit_their_schemas():
    found = list(examples(DOCUMENT))
    assert len(found) > 5
    for schema, value in found:
        assert errors(schema, value) == []


# --- What the client sends


def test_the_operations_are_those_the_client_requests():
    made = {endpoint: operation_of(call) for endpoint, call in CALLS.items()}
    assert set(made) == set(OPERATION_IDS) == set(get_args(Endpoint))
    assert set(made.values()) == set(OPERATIONS)
    for endpoint, operation in made.items():
        assert OPERATIONS[operation]["operationId"] == OPERATION_IDS[endpoint]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_parameters_and_bodies_are_those_the_client_sends(call):
    method, template = operation_of(call)
    operation = OPERATIONS[method, template]
    parameters = [resolved(parameter) for parameter in operation.get("parameters", [])]
    names = {place: {p["name"] for p in parameters if p["in"] == place} for place in ("path", "query")}
    assert names["path"] == set(re.findall(r"\{(\w+)\}", template))
    assert names["query"] == dict(parse_qsl(urlsplit(call.target).query)).keys()
    if not call.body:
        assert "requestBody" not in operation
    else:
        (content,) = operation["requestBody"]["content"].values()
        assert errors(content["schema"], json.loads(call.body)) == []


def test_a_bulk_invite_takes_1_to_100_whole_numbers():
    ids = SCHEMAS["BulkInviteRequest"]["properties"]["QuotaIDs"]
    assert (ids["minItems"], ids["maxItems"]) == (1, 100)
    for bad in ([], [1] * 101, [1.5], ["1"], [0]):
        assert errors(SCHEMAS["BulkInviteRequest"], {"QuotaIDs": bad})


# --- What the client reads


@pytest.mark.parametrize("record", samples(), ids=lambda record: record.__name__)
def test_properties_are_the_fields_of_the_record(record):
    sample = samples()[record]
    written = json.loads(to_json(from_json(record, json.dumps(sample))))
    assert SCHEMAS[record.__name__]["properties"].keys() == sample.keys() == written.keys()


@pytest.mark.parametrize("record", samples(), ids=lambda record: record.__name__)
def test_the_client_decodes_the_records_that_the_document_allows(record):
    sample, schema = samples()[record], SCHEMAS[record.__name__]
    assert is_readable(record, sample)
    for name in sample:
        fields = without(name, sample)
        assert is_readable(record, fields) == (not errors(schema, fields)), name
        for value in (None, True, 1, 1.5, "2026-01-15T09:30:12Z", [], {}):
            fields = sample | {name: value}
            assert is_readable(record, fields) == (not errors(schema, fields)), (name, value)


def test_an_invite_has_its_survey_id_in_one_of_two_spellings():
    drifted = example("generateInvite")
    contract = without("SurveyId", drifted) | {"SurveyID": drifted["SurveyId"]}
    neither = without("SurveyId", drifted)
    for fields, is_right in ((drifted, True), (contract, True), (neither, False)):
        assert is_readable(Invite, fields) is is_right
        assert (not errors(SCHEMAS["Invite"], fields)) is is_right


async def test_the_client_decodes_the_bulk_items_that_the_document_allows():
    item = {"QuotaID": 3, "Invite": None, "ResultCode": 9, "Result": "QUOTA_NOT_LIVE"}
    assert SCHEMAS["BulkInviteItem"]["properties"].keys() == item.keys()
    for name in item:
        for fields in (item, without(name, item), item | {name: None}):
            outcome = await answered({"Invites": [fields]})
            assert (outcome.status == "rejected") == (not errors(SCHEMAS["BulkInviteItem"], fields)), fields
    for answer in ({}, {"Invites": None}, {"Invites": {}}):
        assert errors(SCHEMAS["BulkInviteResponse"], answer)
        assert isinstance((await answered(answer)).error, DecodeError)


async def answered(answer: dict[str, Any]) -> InviteOutcome:
    """Return the outcome of a bulk invite for quota 3 that gets an answer."""
    async with doubles.client(doubles.Service(answer)) as client:
        (outcome,) = await client.bulk_invite("m", [3])
    return outcome


# --- What the simulator sends


async def test_the_document_is_served_unchanged_and_without_a_key():
    sim = Simulator(surveys=1, members=1, faults=[Fault.status(503)])
    async with httpx.AsyncClient(transport=sim.transport(), base_url=sim.base_url) as client:
        response = await client.get("/openapi.json")
    assert (response.status_code, response.content) == (200, PATH.read_bytes())
    assert response.headers["content-type"].startswith("application/json")
    assert sim.ledger.request_count == 0


@pytest.mark.asyncio
async def test_every_response_of_the_simulator_fits_its_operation():
    sim = Simulator(surveys=10, members=20)
    recontact = sim.recontact_quota_ids[0]
    sim.set_recontact_members(recontact, [f"m{number:02}" for number in range(9)])
    quota_ids = tuple(quota.quota_id for survey in sim.inventory.surveys for quota in survey.quotas)
    fits = [(m, q) for m in sim.members for q in quota_ids if sim.eligible(m, q) == 1]
    member, quota_id = fits[0]
    ours = await calls(sim.panel_guid, member, (quota_id,), recontact)
    quotas, bulk, invite, settings, members = ours
    normal = [
        *await sent(sim.panel_guid, *(methodcaller("generate_invite", m, q) for m, q in fits[:4])),
        *ours,  # these request an invite again and are refused
        *await sent(
            sim.panel_guid,
            methodcaller("get_quotas"),
            *(methodcaller("bulk_invite", code, quota_ids) for code in ("nobody", *sim.members)),
            page(recontact),
            page(recontact, after="z"),
        ),
    ]
    refused = [
        *await calls(NIL, member, (quota_id,), recontact),
        attrs.evolve(quotas, target=quotas.target.replace("false", "perhaps")),
        *(attrs.evolve(bulk, body=body) for body in (b"", b"{}", b'{"QuotaIDs":[]}', b'{"QuotaIDs":["1"]}')),
        attrs.evolve(bulk, body=json.dumps({"QuotaIDs": [1] * 101}).encode()),
        attrs.evolve(invite, target=invite.target + "x"),
        attrs.evolve(settings, target=urlsplit(settings.target).path),
        attrs.evolve(members, target=members.target.replace("=3", "=0")),
        *await sent(sim.panel_guid, page(quota_ids[0]), page(1)),
    ]
    other_panel = sim.add_panel(members=0).panel_guid
    forbidden = [
        *((call, "wrong") for call in ours),
        *((call, sim.api_key) for call in await calls(other_panel)),
    ]
    seen: Counter[tuple[str, int]] = Counter()
    codes: set[int] = set()
    async with httpx.AsyncClient(transport=sim.transport(), base_url=sim.base_url) as client:
        for call, key in (*((call, sim.api_key) for call in (*normal, *refused)), *forbidden):
            headers = {"API_AUTH_KEY": key}
            response = await client.request(call.method, call.target, content=call.body, headers=headers)
            operation = OPERATIONS[operation_of(call)]
            answer = resolved(operation["responses"][str(response.status_code)])
            media_type = response.headers["content-type"].partition(";")[0]
            assert errors(answer["content"][media_type]["schema"], response.json()) == []
            if response.status_code == 400:
                assert response.json().keys() == {"Result", "ResultCode"}
            seen[operation["operationId"], response.status_code] += 1
            codes |= {int(code) for code in re.findall(r'"ResultCode":(\d+)', response.text)}
    assert set(seen) == {(name, status) for name in BY_ID for status in (200, 400, 403)}
    assert codes >= {1, 3, 10, 12, 16, 38}
