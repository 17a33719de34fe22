"""Failure modes of reading: responses that do not match the request, contradict themselves or are not JSON."""

from __future__ import annotations

import contextlib
import gzip
import json
from copy import deepcopy
from datetime import UTC, datetime

import doubles
import httpx
import inventories
import pytest
import wire
from fault_server import PROCESSED, FaultServer, answer_about, changed, reply, send
from hypothesis import given
from hypothesis import strategies as st
from kit import ONCE, call, client_of

from sampling_async import (
    BodyLimits,
    DecodeError,
    Invite,
    PagingError,
    PartnerSettings,
    Quotas,
    RecontactMembers,
    SamplingError,
    ServerError,
    UnexpectedStatusError,
    from_json,
)

# --- 10 and 11: one outcome for every ID, whatever the response says

_MUTATIONS = st.sampled_from(
    ["drop", "double", "extra", "null invite", "stray invite", "no code", "text", "other code", "null item"]
)


@given(st.lists(st.tuples(_MUTATIONS, st.integers(0, 11)), max_size=6), st.randoms(use_true_random=False))
async def test_mode_10_the_client_never_guesses_from_a_response_that_does_not_match(mutations, random):
    asked = [*range(1, 11), 55, 44]
    items = [doubles.item(quota_id, 9 if quota_id % 2 else 1) for quota_id in asked]
    touched = set()
    for kind, place in mutations:
        if place < len(items) and items[place] is not None:
            touched.add(items[place]["QuotaID"])
            mutate(items, place, kind)
    random.shuffle(items)
    async with doubles.client(doubles.Service({"Invites": items})) as client:
        answer = await client.bulk_invite("m1", asked)
    assert [outcome.quota_id for outcome in answer] == asked
    for quota_id, outcome in zip(asked, answer, strict=True):
        if quota_id not in touched:
            assert outcome.status == ("rejected" if quota_id % 2 else "invited")
        if outcome.status == "invited":
            assert outcome.invite.quota_id == quota_id
        if outcome.status == "unknown":
            assert isinstance(outcome.error, DecodeError)
    assert all(outcome.quota_id not in asked for outcome in answer.unrequested)


def mutate(items: list, place: int, kind: str) -> None:
    item = items[place]
    match kind:
        case "drop":
            del items[place]
        case "double":
            items.append(deepcopy(item))
        case "extra":
            items.append(doubles.item(1000 + place, 1))
        case "null item":
            items[place] = None
        case "no code":
            item.pop("ResultCode", None)
        case _:
            item |= {
                "null invite": {"Invite": None},
                "stray invite": {"Invite": doubles.invite(item["QuotaID"])},
                "text": {"ResultCode": "1"},
                "other code": {"ResultCode": 9 if item.get("ResultCode") == 1 else 1},
            }[kind]


@pytest.mark.parametrize("document", [{"Invites": None}, {}, [], {"Invites": {}}, None, "x", 1])
async def test_mode_10_a_response_without_a_list_of_items_leaves_all_ids_unknown(document):
    with FaultServer(changed(lambda *_: document)) as server:
        async with client_of(server.url) as client:
            result = await client.bulk_invite("m1", [3, 2, 1])
    assert [(outcome.quota_id, outcome.status) for outcome in result] == [
        (quota_id, "unknown") for quota_id in (3, 2, 1)
    ]
    assert len(server.ledger.processed) == 1


async def test_mode_10_a_response_about_other_quotas_leaves_ids_unknown_and_is_reported():
    with FaultServer([*PROCESSED, answer_about(1000)]) as server:
        async with client_of(server.url) as client:
            result = await client.bulk_invite("m1", [1, 2])
    assert [outcome.status for outcome in result] == ["unknown"] * 2
    assert [outcome.quota_id for outcome in result.unrequested] == [1001, 1002]


async def test_mode_10_an_invite_to_another_quota_is_not_accepted():
    with FaultServer(then=[*PROCESSED, answer_about(1000)]) as server:
        async with client_of(server.url) as client:
            with pytest.raises(DecodeError, match="not the response to it") as caught:
                await client.generate_invite("m1", 2)
    assert (caught.value.delivery, caught.value.attempts) == ("unknown", 2)


@pytest.mark.parametrize("quota_ids", [[5, 5, 7], [2, *range(1, 100), 2, 2], [*range(1, 202), 1, 201]])
async def test_mode_11_a_repeated_id_is_sent_once_and_has_an_outcome_at_each_place(quota_ids):
    with FaultServer() as server:
        async with client_of(server.url) as client:
            result = await client.bulk_invite("m1", quota_ids)
    assert [outcome.quota_id for outcome in result] == quota_ids
    sent = [quota_id for request in server.ledger.received for quota_id in request.quota_ids]
    assert sorted(sent) == sorted(set(quota_ids))
    assert set(server.ledger.invites.values()) <= {1}
    assert server.ledger.lies(result) == []


# --- 12: recontact lists that do not advance


async def codes_of(*pages, after: str | None = None) -> list[str]:
    async with doubles.client(doubles.Service(*pages)) as client:
        return [code async for code in client.recontact_members(5, after=after)]


@pytest.mark.parametrize(
    ("pages", "cursor", "kept"),
    [
        ([doubles.page("a", "b", more=True)], "b", ("a", "b")),
        ([doubles.page("a", more=True), doubles.page(more=True)], "a", ()),
        (
            [doubles.page("a", more=True), doubles.page("b", more=True), doubles.page("a", more=True)],
            "b",
            ("a",),
        ),
        ([doubles.page("a", more=True), doubles.page("a", more=True)], "a", ()),
        ([doubles.page(more=True)], None, ()),
    ],
    ids=["the same page", "an empty page", "a circle", "the cursor again", "empty at once"],
)
async def test_mode_12_a_list_that_does_not_advance_ends_with_an_error_that_has_the_cursor(pages, cursor, kept):
    with pytest.raises(PagingError) as caught:
        await codes_of(*pages)
    assert (caught.value.cursor, caught.value.member_codes) == (cursor, kept)


async def test_mode_12_a_repeated_cursor_is_dropped_and_the_order_of_the_service_is_kept():
    pages = [doubles.page("b", "ä", more=True), doubles.page("ä", "A", "10", more=True), doubles.page("9")]
    assert await codes_of(*pages) == ["b", "ä", "A", "10", "9"]


# --- 16 and 17: content counts, not labels

HTML = "<!DOCTYPE html><html><head><title>Log in</title></head></html>"


@pytest.mark.parametrize("endpoint", ["get_settings", "get_quotas", "generate_invite", "recontact_members"])
@pytest.mark.parametrize(("body", "label"), [(HTML, "text/html"), ("", "application/json"), ("null", "x/y")])
async def test_mode_16_a_read_is_repeated_once_after_an_unreadable_200(endpoint, body, label):
    with FaultServer(then=[*PROCESSED, reply(200, body, label)]) as server:
        async with client_of(server.url) as client:
            with pytest.raises(DecodeError) as caught:
                await call(client, endpoint)
    assert (caught.value.path, caught.value.attempts) == ("$", 2)
    assert len(server.ledger.received) == 2


@pytest.mark.parametrize(("body", "label"), [(HTML, "text/html"), ("", "application/json"), ("null", "x/y")])
async def test_mode_16_a_bulk_invite_is_unknown_after_an_unreadable_200(body, label):
    with FaultServer([*PROCESSED, reply(200, body, label)]) as server:
        async with client_of(server.url) as client:
            result = await client.bulk_invite("m1", [1, 2])
    assert [outcome.status for outcome in result] == ["unknown"] * 2
    assert len(server.ledger.received) == 1


@pytest.mark.parametrize("status", [502, 503])
async def test_mode_16_html_from_a_proxy_gives_the_error_of_its_status_with_an_excerpt(status):
    body = f"<html><h1>{status}\x00 Bad</h1>{'x' * 500}</html>"
    with FaultServer(then=[*PROCESSED, reply(status, body, "text/html")]) as server:
        async with client_of(server.url) as client:
            with pytest.raises(ServerError) as caught:
                await client.get_settings()
    error = caught.value
    assert (error.status, error.result_code, error.attempts) == (status, None, 3)
    assert error.body_excerpt.startswith(f"<html><h1>{status} Bad")
    assert len(error.body_excerpt) <= 200


async def test_mode_16_json_labelled_as_text_is_read():
    error = '{"Result": "NO_QUOTA_ID", "ResultCode": 10}'
    with FaultServer(
        [*PROCESSED, reply(200, "[]", "text/plain")], then=[reply(400, error, "text/plain")]
    ) as server:
        async with client_of(server.url, retry=ONCE) as client:
            assert len(await client.get_settings()) == 0
            server.then = [*PROCESSED, reply(400, error, "text/plain")]
            with pytest.raises(SamplingError) as caught:
                await client.generate_invite("m1", 2)
    assert caught.value.result_code == 10


async def test_mode_16_an_error_body_in_a_200_raises_that_error():
    with FaultServer(
        then=[*PROCESSED, reply(200, '{"Result": "PANEL_DOES_NOT_EXIST", "ResultCode": 3}')]
    ) as server:
        async with client_of(server.url) as client:
            with pytest.raises(UnexpectedStatusError) as caught:
                await client.get_settings()
            result = await client.bulk_invite("m1", [2])
    assert caught.value.result_code == 3
    assert result[0].status == "unknown"


def body_of(content: bytes, *headers: str):
    return [*PROCESSED, send(wire.answer(content, "200 OK", *headers))]


SETTING = [{"Name": "Qualified URL", "Description": "Ünïcode", "Value": None}]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
async def test_mode_17_unicode_is_decoded_with_or_without_a_byte_order_mark(encoding):
    content = json.dumps(SETTING, ensure_ascii=False).encode(encoding)
    with FaultServer(body_of(content)) as server:
        async with client_of(server.url) as client:
            assert (await client.get_settings())[0].description == "Ünïcode"


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252"])
async def test_mode_17_bytes_that_are_not_unicode_are_an_error(encoding):
    content = json.dumps(SETTING, ensure_ascii=False).encode(encoding)
    with FaultServer(then=body_of(content)) as server:
        async with client_of(server.url) as client:
            with pytest.raises(DecodeError, match="expected UTF-8"):
                await client.get_settings()


# --- 18 and 19: bombs


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "[" * 100_000 + "]" * 100_000,
        '{"a":' * 50_000,
        "9" * 5000,
        '{"SurveyID": NaN}',
        '{"SurveyID": Infinity}',
        '{"SurveyID": -Infinity}',
        json.dumps(doubles.invite(2)).replace("1.5", "1e400"),
        json.dumps(doubles.invite(2, URL="\ud800")),
        json.dumps(doubles.invite(2, SurveyID=2**63)),
        json.dumps(doubles.invite(2, SurveyID=-(2**64))),
        json.dumps(doubles.invite(2)).replace('"SurveyID": 7', '"SurveyID": 7e400'),
        "\ud800".encode("utf-8", "surrogatepass"),
    ],
    ids=lambda text: str(text)[:12],
)
async def test_mode_18_json_beyond_the_limits_is_a_decode_error(text):
    content = text if isinstance(text, bytes) else text.encode()
    async with doubles.client(doubles.Service(httpx.Response(200, content=content))) as client:
        with pytest.raises(DecodeError):
            await client.generate_invite("m1", 2)
        result = await client.bulk_invite("m1", [2])
    assert result[0].status == "unknown"


@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_mode_18_any_bytes_give_a_record_or_a_decode_error(body):
    for record in (Invite, Quotas, RecontactMembers, PartnerSettings):
        with contextlib.suppress(DecodeError):
            from_json(record, body)


async def test_mode_19_a_decompression_bomb_is_refused_at_the_limit_and_takes_no_more_memory():
    limit = 8 * 2**20
    bomb = gzip.compress(b" " * 60_000_000, 1)
    tracked = doubles.MemoryPeak()
    with FaultServer(then=body_of(bomb, "Content-Encoding: gzip")) as server:
        async with client_of(server.url, limits=BodyLimits(decoded=limit)) as client:
            with tracked, pytest.raises(DecodeError, match="bytes decoded") as caught:
                await client.get_settings()
    assert tracked.peak <= 2 * limit + 2**20  # the server's copies of the bomb count too
    assert (caught.value.permanent, caught.value.attempts) == (True, 1)


async def test_mode_19_nested_encodings_are_refused():
    content = b"[]"
    for _ in range(20):
        content = gzip.compress(content)
    fault = body_of(content, f"Content-Encoding: {', '.join(['gzip'] * 20)}")
    with FaultServer(then=fault) as server:
        async with client_of(server.url) as client:
            with pytest.raises(DecodeError, match="gzip, deflate or no content encoding"):
                await client.get_settings()


# --- 32 and 33: dates and types


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("2020-01-31T21:19:30.3616306Z", datetime(2020, 1, 31, 21, 19, 30, 361630, tzinfo=UTC)),
        ("2020-01-31T21:19:30", datetime(2020, 1, 31, 21, 19, 30)),  # noqa: DTZ001  naive stays naive
        ("0001-01-01T00:00:00", datetime(1, 1, 1)),  # noqa: DTZ001
        ("9999-12-31T23:59:59.9999999", datetime(9999, 12, 31, 23, 59, 59, 999999)),  # noqa: DTZ001
        ("/Date(1456826400000-0800)/", datetime(2016, 3, 1, 10, 0, tzinfo=UTC)),
        ("/Date(1456826400000)/", datetime(2016, 3, 1, 10, 0, tzinfo=UTC)),
        ("0001-01-01T00:00:00+14:00", None),
        ("/Date(99999999999999999)/", None),
        ("", None),
        (None, None),
        ("soon", None),
        (0, None),
    ],
)
async def test_mode_32_dates_keep_their_meaning_or_are_refused_by_name(text, meant):
    document = inventories.quotas(CacheExpires=text)
    async with doubles.client(doubles.Service(document), retry=ONCE) as client:
        try:
            read = (await client.get_quotas()).cache_expires
        except DecodeError as error:
            assert "CacheExpires" in error.path  # noqa: PT017  a refusal is right where no meaning is given
            assert meant is None
            return
    assert read.tzinfo is not None or meant is None or meant.tzinfo is None
    assert meant is None or read == meant


def places(document, path=()):
    """Yield the path of every value in a document."""
    yield path
    children = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in children if isinstance(document, dict | list) else ():
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))
        else:
            yield (*path, key)


DOCUMENTS = {
    Invite: doubles.invite(2, MemberAmount=0.5),
    Quotas: inventories.quotas(),
    RecontactMembers: doubles.page("a", "b"),
    PartnerSettings: SETTING,
}
DRIFTS = ["7", 7.9, True, None, {}, [], "secret-value", 123_456_789, {"secret-value": 1}]


@pytest.mark.parametrize("record", DOCUMENTS, ids=lambda record: record.__name__)
def test_mode_33_a_value_of_another_type_is_read_by_rule_or_refused_by_path(record):
    refusals = []
    for path in places(DOCUMENTS[record]):
        for drift in DRIFTS:
            document = deepcopy(DOCUMENTS[record])
            if path:
                parent = document
                for key in path[:-1]:
                    parent = parent[key]
                parent[path[-1]] = drift
            else:
                document = drift
            try:
                from_json(record, json.dumps(document))
            except DecodeError as error:
                refusals.append(str(error))
    assert refusals
    for text in refusals:
        assert text.startswith("$")
        assert "secret-value" not in text
        assert "123456789" not in text


@pytest.mark.parametrize(
    ("field", "drift"),
    [
        ("SurveyID", "7"),
        ("SurveyID", 7.9),
        ("SurveyID", True),
        ("URL", 7),
        ("URL", {}),
        ("PartnerAmount", "1.5"),
    ],
)
def test_mode_33_no_value_is_coerced_silently(field, drift):
    with pytest.raises(DecodeError) as caught:
        from_json(Invite, json.dumps(doubles.invite(2, **{field: drift})))
    assert caught.value.path == f"$.{field}"


def test_mode_33_new_fields_and_a_known_misspelling_do_no_harm():
    document = doubles.invite(2, NewField={"a": [1]})
    document["SurveyId"] = document.pop("SurveyID")
    assert from_json(Invite, json.dumps(document)).survey_id == 7


def test_mode_33_a_member_code_that_came_as_a_number_is_refused():
    """Converted from a number, 00123 would be the code of another member."""
    with pytest.raises(DecodeError):
        from_json(RecontactMembers, json.dumps(doubles.page() | {"MemberCodes": [123]}))
