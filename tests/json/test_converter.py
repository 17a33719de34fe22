"""Bytes to models and back."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta, timezone
from enum import StrEnum
from typing import Any, NewType

import anyio
import attrs
import doubles
import inventories
import pytest
from cattrs import ClassValidationError, Converter
from hypothesis import given
from hypothesis import strategies as st

from sampling_async import (
    DecodeError,
    InvalidRequestError,
    Invite,
    InviteRequest,
    Journal,
    PartnerSettings,
    Price,
    QuestionAndAnswers,
    Quotas,
    RecontactMembers,
    Setting,
    Survey,
    from_json,
    make_converter,
    to_json,
)
from sampling_async._contract.records import wire_name
from sampling_async._journal.lines import OutcomeLine
from sampling_async._json import converter as _converter
from sampling_async._json import fast
from sampling_async._json.fast import WireReply, WireRequest
from sampling_async._json.rules import parse
from sampling_async.simulator import Simulator

INVITE = {
    "SurveyID": 1,
    "WaveID": 2,
    "QuotaID": 3,
    "MemberAmount": 0,
    "PartnerAmount": 0.5,
    "URL": "https://s.example/?a=1",
    "LOI": 7,
    "IR": 0,
}


def decode(cls: type, value: Any) -> Any:
    return from_json(cls, json.dumps(value))


def refusal(cls: type, value: Any) -> DecodeError:
    with pytest.raises(DecodeError) as caught:
        decode(cls, value)
    return caught.value


def condition(**changes: Any) -> QuestionAndAnswers:
    return decode(QuestionAndAnswers, {"QuestionID": 1} | changes)


@pytest.mark.parametrize(
    ("attribute", "name"),
    [
        ("sub_quota_id", "SubQuotaID"),
        ("answer_ids", "AnswerIDs"),
        ("participation_status_ids", "ParticipationStatusIDs"),
        ("questions_and_answers", "QuestionsAndAnswers"),
        ("loi", "LOI"),
        ("ir", "IR"),
        ("url", "URL"),
        ("is_survey_recontact", "IsSurveyRecontact"),
    ],
)
def test_names_are_pascal_case_with_acronyms(attribute, name):
    assert wire_name(attribute) == name


def test_an_inventory_is_decoded_completely():
    inventory = decode(Quotas, inventories.quotas())
    survey = inventory.surveys[0]
    assert (inventory.country_id, survey.survey_name, survey.loi, survey.ir) == (9, "Coffee", 15, 0)
    assert survey.price == Price(amount=1.7, currency_id=1)
    assert survey.survey_wave_exclusions[0].participation_status_ids == (1, 9)
    row = survey.quotas[0].layers[0].sub_quotas[0].questions_and_answers[0]
    assert row == QuestionAndAnswers(1001538, (), ("18-34",), is_routable=False)


def test_dates_are_aware_with_a_time_zone_and_naive_without():
    inventory = decode(Quotas, inventories.quotas())
    assert inventory.cache_expires == datetime(2020, 1, 31, 21, 19, 30, 361630, UTC)
    assert inventory.surveys[0].scheduled_completion_date == datetime(2020, 1, 31, 1, 21, 8)  # noqa: DTZ001


@pytest.mark.parametrize("field", ["SurveyName", "SurveyWaveExclusions"])
@pytest.mark.parametrize("how", ["missing", "null"])
def test_fields_that_older_surveys_lack_may_be_missing(field, how):
    body = inventories.survey(**{field: None})
    if how == "missing":
        del body[field]
    survey = decode(Survey, body)
    assert (survey.survey_name is None) == (field == "SurveyName")
    assert (survey.survey_wave_exclusions == ()) == (field == "SurveyWaveExclusions")


@pytest.mark.parametrize("body", [{}, {"IsRoutable": None, "AnswerIDs": None, "AnswerValues": None}])
def test_fields_that_older_conditions_lack_may_be_missing(body):
    assert condition(**body) == QuestionAndAnswers(1, (), (), is_routable=False)


@pytest.mark.parametrize(
    ("wire", "values"),
    [
        (["45-54", "18-44"], ("45-54", "18-44")),
        ("45-54,18-44", ("45-54", "18-44")),
        (["018, 90", "91"], ("018", "90", "91")),
        ("90210", ("90210",)),
        ([501, 502], ("501", "502")),
        ("", ()),
        (" , ", ()),
        ([], ()),
        (None, ()),
    ],
)
def test_answer_values_are_read_in_every_form_they_take(wire, values):
    assert condition(AnswerValues=wire).answer_values == values


@pytest.mark.parametrize(
    ("wire", "rule"),
    [
        (7, "expected text or an array of texts, found a whole number"),
        ({}, "expected text or an array of texts, found an object"),
        ([None], "expected text, found null"),
        ([True], "expected text, found a boolean"),
        ([["a"]], "expected text, found an array"),
    ],
)
def test_answer_values_of_other_kinds_are_refused(wire, rule):
    error = refusal(QuestionAndAnswers, {"QuestionID": 1, "AnswerValues": wire})
    assert (error.path, error.rule) == ("$.AnswerValues", rule)


def test_drifted_spellings_are_read():
    body = INVITE | {"SurveyId": 1, "WaveId": 2, "QuotaId": 3}
    for name in ("SurveyID", "WaveID", "QuotaID"):
        del body[name]
    invite = decode(Invite, body)
    assert (invite.survey_id, invite.wave_id, invite.quota_id) == (1, 2, 3)


@pytest.mark.parametrize(
    "names",
    [("PartnerAmount",), ("LOI",), ("IR",), ("MemberAmount",), ("PartnerAmount", "LOI", "IR", "MemberAmount")],
)
def test_an_invite_is_valid_without_its_price_and_length(names):
    nulls, missing = INVITE | dict.fromkeys(names), {name: INVITE[name] for name in INVITE if name not in names}
    for body in (nulls, missing):
        invite = decode(Invite, body)
        assert fast.read(Invite, json.dumps(body).encode()) in (None, invite)  # both decoders agree
        assert (invite.quota_id, invite.url) == (3, INVITE["URL"])
        assert invite.member_amount == (None if "MemberAmount" in names else 0)
        got = invite.partner_amount, invite.loi, invite.ir
        assert got == tuple(0 if name in names else INVITE[name] for name in ("PartnerAmount", "LOI", "IR"))
        assert [type(each) for each in got] == [float, int, int]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("URL", each) for each in (None, 5, "")),
        ("SurveyID", None),
        ("WaveID", "x"),
        ("QuotaID", None),
        ("LOI", "x"),
        ("IR", 1.5),
        ("PartnerAmount", "0"),
    ],
)
def test_other_fields_of_an_invite_stay_strict(name, value):
    assert refusal(Invite, INVITE | {name: value}).path == f"$.{name}"


def test_the_spelling_of_the_contract_takes_precedence_over_a_drifted_one():
    assert decode(Invite, INVITE | {"QuotaId": 9}).quota_id == 3


@pytest.mark.parametrize("value", [1, 1.0, 1e2])
def test_whole_doubles_and_ints_are_interchangeable(value):
    assert decode(Price, {"Amount": value, "CurrencyID": value}) == Price(float(value), int(value))


@pytest.mark.parametrize("value", ["7", 7.9, True, None, [], {}, 2**63, 1e300, 2.0**53 + 2])
def test_a_whole_number_is_never_guessed(value):
    error = refusal(Price, {"Amount": 1, "CurrencyID": value})
    assert (error.path, "whole number" in error.rule) == ("$.CurrencyID", True)


@pytest.mark.parametrize("value", ["1.5", False, None, [], 2**70])
def test_a_double_is_never_guessed(value):
    assert refusal(Price, {"Amount": value, "CurrencyID": 1}).path == "$.Amount"


def test_a_number_too_large_for_a_double_is_refused():
    with pytest.raises(DecodeError, match=r"\$\.Amount: expected a number, found a number too large"):
        from_json(Price, b'{"Amount": 1e400, "CurrencyID": 1}')


@pytest.mark.parametrize("value", ["false", 0, 1, None])
def test_a_boolean_is_never_guessed(value):
    body = {"MaxResults": 1, "HasAdditionalMembers": value, "MemberCodes": []}
    assert refusal(RecontactMembers, body).path == "$.HasAdditionalMembers"


@pytest.mark.parametrize("value", [None, 123, True, ["a"], "\ud800"])
def test_a_text_is_never_guessed(value):
    body = {"MaxResults": 1, "HasAdditionalMembers": False, "MemberCodes": ["a", value]}
    assert refusal(RecontactMembers, body).path == "$.MemberCodes[1]"


def test_text_beyond_ascii_is_kept():
    body = {"MaxResults": 1, "HasAdditionalMembers": False, "MemberCodes": ["é", "漢"]}
    assert decode(RecontactMembers, body).member_codes == ("é", "漢")


@pytest.mark.parametrize(
    ("wire", "value"),
    [
        ("2020-01-31T21:19:30", datetime(2020, 1, 31, 21, 19, 30)),  # noqa: DTZ001
        ("2020-01-31T21:19:30.", datetime(2020, 1, 31, 21, 19, 30)),  # noqa: DTZ001
        ("2020-01-31T21:19:30.5", datetime(2020, 1, 31, 21, 19, 30, 500000)),  # noqa: DTZ001
        ("2019-03-03 18:42:34.000", datetime(2019, 3, 3, 18, 42, 34)),  # noqa: DTZ001
        ("2018-10-22 19:58:42.99 +00:00", datetime(2018, 10, 22, 19, 58, 42, 990000, UTC)),
        ("2020-01-31T21:19:30.3616309Z", datetime(2020, 1, 31, 21, 19, 30, 361630, UTC)),
        (
            "2020-01-31T21:19:30-0530",
            datetime(2020, 1, 31, 21, 19, 30, tzinfo=timezone(-timedelta(hours=5.5))),
        ),
        ("/Date(1456826400000)/", datetime(2016, 3, 1, 10, tzinfo=UTC)),
        ("/Date(1456826400000-0800)/", datetime(2016, 3, 1, 2, tzinfo=timezone(-timedelta(hours=8)))),
        ("/Date(-1)/", datetime(1969, 12, 31, 23, 59, 59, 999000, UTC)),
        ("/Date(-62135596800000-0500)/", datetime(1, 1, 1, tzinfo=UTC)),  # what .NET writes for "no date"
        ("0001-01-01T00:00:00", datetime.min),  # noqa: DTZ901
        ("9999-12-31T23:59:59.9999999", datetime.max),  # noqa: DTZ901
        ("2020-01-31 21:19:30.1234567 Z", datetime(2020, 1, 31, 21, 19, 30, 123_456, UTC)),
        ("2020-01-31T21:19:30.Z", datetime(2020, 1, 31, 21, 19, 30, tzinfo=UTC)),
        ("/Date(253402300799000+0100)/", datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)),
    ],
)
def test_every_form_of_date_seen_is_read(wire, value):
    read = decode(Quotas, inventories.quotas(CacheExpires=wire)).cache_expires
    assert (read, read.utcoffset()) == (value, value.utcoffset())


@pytest.mark.parametrize(
    "wire",
    [
        "",
        "2020-01-31",
        "2020-02-30T00:00:00",
        "2020-01-31T21:19:30.12345678",
        "2020-01-31T21:19:30+99:00",
        "20২0-01-31T21:19:30",
        "/Date(999999999999999999)/",
        "x2020-01-31T21:19:30Z",
        "2020-01-31T21:19:30Zx",
        "/Date(1)",
    ],
)
def test_an_invalid_date_is_refused_with_an_example(wire):
    error = refusal(Quotas, inventories.quotas(CacheExpires=wire))
    example = "2020-01-31T21:19:30.1234567Z, with or without the zone"
    found = "text" if wire else "empty text"
    assert (error.path, error.rule) == ("$.CacheExpires", f"expected a dateTime ({example}), found {found}")


def edited(*path: Any, value: Any = "gone") -> dict[str, Any]:
    body: Any = inventories.quotas(inventories.survey(), inventories.survey())
    place = body
    for step in path[:-1]:
        place = place[step]
    if value == "gone":
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return body


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (edited("Surveys", 1, "Quotas", 0, "QuotaID", value="x"), "$.Surveys[1].Quotas[0].QuotaID"),
        (edited("Surveys", 1, "Quotas", 0, "QuotaID"), "$.Surveys[1].Quotas[0].QuotaID"),
        (edited("Surveys", 1, "Quotas", 0, "Layers", value=None), "$.Surveys[1].Quotas[0].Layers"),
        (edited("Surveys", 0, value=3), "$.Surveys[0]"),
        (edited("Surveys", value={}), "$.Surveys"),
        (edited("Surveys"), "$.Surveys"),
        (edited("Surveys", 0, "DeviceTypeIDs", 1, value=1.5), "$.Surveys[0].DeviceTypeIDs[1]"),
        ([], "$"),
        (None, "$"),
        ("text", "$"),
    ],
)
def test_a_decode_error_names_the_wire_path(body, path):
    error = refusal(Quotas, body)
    assert error.path == path
    assert str(error) == f"{path}: {error.rule}"


@pytest.mark.parametrize(
    ("body", "rule"),
    [
        (b"", "expected JSON, found an empty body"),
        (b" \r\n", "an empty body"),
        (b"\xef\xbb\xbf", "an empty body"),
        (b"<!DOCTYPE html>", "expected JSON, found HTML or XML (a page of a proxy or of a login?)"),
        (b"\n <html>", "HTML"),
        (b'{"a": ', "a syntax error at character 6"),
        (b"Service Unavailable", "a syntax error at character 0"),
        (b'"caf\xe9"', "other bytes at byte 4"),
        (b"[" * 100_000, "expected JSON, found too many nested levels"),
        (b"NaN", "expected finite numbers, found NaN, Infinity or a number with too many digits"),
        (b'{"Amount": -Infinity}', "finite numbers"),
        (b'{"Amount": ' + b"9" * 5000 + b"}", "finite numbers"),
    ],
)
def test_invalid_json_is_reported_and_not_shown(body, rule):
    with pytest.raises(DecodeError) as caught:
        from_json(Price, body)
    assert caught.value.path == "$"
    assert rule in caught.value.rule
    assert caught.value.__context__ is None  # the error of the parser would hold the body


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_a_byte_order_mark_is_no_obstacle(encoding):
    body = json.dumps({"Amount": 1, "CurrencyID": 2}).encode(encoding)
    assert from_json(Price, body) == Price(1.0, 2)


def test_settings_are_a_top_level_array():
    body = [{"Name": "Max Surveys To Fetch", "Description": "d ", "Value": None}]
    settings = decode(PartnerSettings, body)
    assert list(settings) == [Setting("Max Surveys To Fetch", "d ", None)]
    assert json.loads(to_json(settings)) == body
    assert decode(PartnerSettings, [{"Name": "a", "Description": None}])[0] == Setting("a", "", None)
    assert refusal(PartnerSettings, [{"Description": "d"}]).path == "$[0].Name"


def test_a_recontact_list_may_be_null():
    body = {"MaxResults": 0, "HasAdditionalMembers": False, "MemberCodes": None}
    assert decode(RecontactMembers, body).member_codes == ()


def test_records_are_encoded_with_the_names_of_the_contract():
    body = inventories.quotas()
    written = json.loads(to_json(decode(Quotas, body)))
    for survey in body["Surveys"]:
        del survey["SurveyTopic"], survey["IsTqsSurvey"]
    body["CacheExpires"] = "2020-01-31T21:19:30.361630Z"
    assert written == body


def test_json_is_written_without_blanks_and_in_utf_8():
    assert to_json([Setting("Größe", "", "1, 2")]) == (
        '[{"Name":"Größe","Description":"","Value":"1, 2"}]'.encode()
    )


def test_missing_fields_are_not_encoded():
    body = {name: value for name, value in INVITE.items() if name != "MemberAmount"}
    assert json.loads(to_json(decode(Invite, body))) == body
    assert json.loads(to_json([decode(Invite, body)])) == [body]


@given(inventories.documents)
def test_encoded_records_decode_to_equal_records(body):
    inventory = decode(Quotas, body)
    assert from_json(Quotas, to_json(inventory)) == inventory


_anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for step, inner in steps for place in places(inner, (*path, step)))]


@given(st.data())
def test_one_mutation_gives_a_record_or_a_decode_error(data):
    """Whatever is changed in a valid body, there is no other result."""
    body = {"root": copy.deepcopy(data.draw(inventories.documents))}
    *path, last = data.draw(st.sampled_from(places(body)[1:]))
    place: Any = body
    for step in path:
        place = place[step]
    if data.draw(st.booleans()):
        place[last] = data.draw(_anything)
    else:
        del place[last]
    try:
        read = decode(Quotas, body.get("root"))
    except DecodeError as error:
        read, path = None, error.path
    assert isinstance(read, Quotas) or path.startswith("$")


@given(st.binary() | st.text())
def test_any_bytes_give_a_value_or_a_decode_error(body):
    for cls in (Quotas, RecontactMembers, PartnerSettings):
        with suppress(DecodeError):
            assert isinstance(from_json(cls, body), cls)


def test_json_behind_many_blanks_is_found_and_a_lone_surrogate_is_kept():
    assert parse(b" " * 64 + b"[1]") == [1]
    assert parse("[1]") == [1]
    with pytest.raises(DecodeError) as caught:
        parse("")
    assert caught.value.path == "$"
    assert parse('"\ud800"') == "\ud800"  # as in texts that Python has decoded so


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"[]", "$: expected an object, found an array"),
        (b'{"Surveys":[]}', "$.CountryID: expected a value, but the field is missing"),
        (b'{"Surveys":5,%b}', "$.Surveys: expected an array, found a whole number"),
        (b'{"Surveys":[5],%b}', "$.Surveys[0]: expected an object, found a whole number"),
    ],
)
def test_what_stands_in_place_of_an_object_or_an_array_is_reported_with_its_path(body, said):
    rest = b'"CountryID":9,"CacheExpires":"2020-01-31T21:19:30Z"'
    with pytest.raises(DecodeError) as caught:
        from_json(Quotas, body.replace(b"%b", rest))
    assert str(caught.value) == said


# --- One converter for all of it


class Spy:
    """The converter of the package, which notes what goes through it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.own = make_converter()
        self.read: set[Any] = set()
        self.written: set[Any] = set()
        monkeypatch.setattr(_converter, "converter", lambda: self)

    def structure(self, value: Any, cls: Any) -> Any:
        self.read.add(cls)
        return self.own.structure(value, cls)

    def unstructure(self, record: Any, unstructure_as: Any = None) -> Any:
        self.written.add(unstructure_as or type(record))
        return self.own.unstructure(record, unstructure_as)

    def get_structure_hook(self, cls: Any) -> Any:
        return self.own.get_structure_hook(cls)


async def test_the_five_calls_and_the_journal_go_through_the_converter(monkeypatch, tmp_path):
    spy = Spy(monkeypatch)
    sim = Simulator(surveys=5, members=3)
    member, quota = next(iter(sim.members)), sim.recontact_quota_ids[0]
    journal = Journal(tmp_path / "run.journal")
    async with sim.client() as client:
        await client.get_quotas()
        assert spy.read == {list[Survey], Survey, Quotas}
        assert spy.written <= {Survey}  # by the simulator
        await client.get_settings()
        [_ async for _ in client.recontact_members(quota)]
        async with client.fan_out([InviteRequest(member, [quota])], journal=journal) as outcomes:
            assert len([_ async for _ in outcomes]) == 1
    async with doubles.client(doubles.Service(lambda _: INVITE)) as client:
        await client.generate_invite(member, 3)
    assert spy.read >= {PartnerSettings, RecontactMembers, Invite, WireReply}
    assert spy.written >= {WireRequest, list[OutcomeLine]}
    assert len([_ async for _ in journal.outcomes()]) == 1
    assert list[OutcomeLine] in spy.read


async def test_a_hook_on_the_converter_is_seen_by_the_calls(monkeypatch):
    """It takes the place of the fast decoder, for all that holds the record."""
    ours, theirs = make_converter(), make_converter()
    theirs.register_structure_hook(Invite, lambda value, cls: attrs.evolve(ours.structure(value, cls), loi=77))
    monkeypatch.setattr(_converter, "converter", lambda: theirs)
    async with doubles.client(doubles.Service(doubles.bulk)) as client:
        result = await client.bulk_invite("m", [2])
    assert [invite.loi for invite in result.invites] == [77]
    assert from_json(Invite, json.dumps(INVITE)).loi == 77


def test_cattrs_is_loaded_with_the_client_and_not_before():
    code = """
import sys
import sampling_async
from sampling_async.matching import QuotaIndex
print("cattrs" in sys.modules)
guid = "00000000-0000-0000-0000-000000000001"
sampling_async.SamplingClient("https://s.example", panel_guid=guid, api_key=guid)
print("cattrs" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


# --- Records in classes of a user


class Source(StrEnum):
    APP = "app"


Points = NewType("Points", int)


@attrs.frozen
class Click:
    member_code: str
    invites: list[Invite]
    quotas: Quotas | None = None
    surveys: Sequence[Survey] = ()
    source: Source = Source.APP
    points: Points | None = None
    is_first: bool = True
    at: datetime | None = None


QUOTAS = inventories.quotas(inventories.survey(), inventories.survey(SurveyID=8))
CLICK = Click(
    "m1",
    [decode(Invite, INVITE)],
    decode(Quotas, QUOTAS),
    decode(Quotas, QUOTAS).surveys,
    points=Points(7),
    at=datetime(2026, 1, 2, tzinfo=UTC),
)


@pytest.fixture
def converter() -> Converter:
    return make_converter()


def test_records_in_an_attrs_class_have_the_contracts_names(converter):
    written = converter.unstructure(CLICK)
    assert written["invites"] == [INVITE]
    assert json.loads(json.dumps(written["quotas"])) == json.loads(to_json(CLICK.quotas))
    assert (written["member_code"], written["at"]) == ("m1", "2026-01-02T00:00:00Z")
    assert converter.structure(written, Click) == CLICK
    assert converter.structure(json.loads(json.dumps(written)), Click) == CLICK


def test_a_field_may_be_the_bytes_that_came_for_it_and_so_may_the_whole(converter):
    written = converter.unstructure(CLICK)
    names = ("invites", "quotas", "surveys")
    parts = {**written, **{name: json.dumps(written[name]).encode() for name in names}}
    assert converter.structure(parts, Click) == CLICK
    assert converter.structure(json.dumps(written).encode(), Click) == CLICK


@pytest.mark.parametrize("kind", [list[Invite], tuple[Invite, ...], Sequence[Invite]])
def test_arrays_of_records_are_read_by_both_decoders(converter, kind):
    drifted = {**INVITE, "SurveyId": 1}
    del drifted["SurveyID"]
    for items in ([INVITE], [drifted]):
        read = converter.structure(json.dumps(items).encode(), kind)
        assert read == converter.structure(items, kind) == type(read)(CLICK.invites)
        assert type(read) is (list if kind == list[Invite] else tuple)
    with pytest.raises(DecodeError, match=r"^\$\[1\]\.LOI: expected a whole number, found text"):
        converter.structure([INVITE, {**INVITE, "LOI": "7"}], kind)
    with pytest.raises(DecodeError, match=r"^\$: expected an array, found an object"):
        converter.structure(b"{}", kind)


def test_from_json_reads_them_too():
    written = to_json(CLICK)
    assert from_json(Click, written) == CLICK
    with pytest.raises(DecodeError, match=r"\$\.Invites\[0\]\.URL: expected a link, found empty text"):
        from_json(Click, written.replace(b"https://s.example/?a=1", b""))


@pytest.mark.parametrize("kind", [Quotas, Survey, Invite, RecontactMembers, Setting, PartnerSettings])
def test_what_is_unstructured_can_be_structured_without_json(converter, kind):
    bodies = {
        Quotas: QUOTAS,
        Survey: inventories.survey(),
        Invite: INVITE,
        RecontactMembers: {"MaxResults": 1, "HasAdditionalMembers": True, "MemberCodes": ["a"]},
        Setting: {"Name": "a"},
        PartnerSettings: [{"Name": "a"}],
    }
    record = decode(kind, bodies[kind])
    assert converter.structure(converter.unstructure(record), kind) == record


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"is_first": "false"}, "expected a boolean, found text"),
        ({"points": 7.9}, "expected a whole number, found a number with a fraction"),
        ({"member_code": None}, "expected text, found null"),
        ({"at": "soon"}, "expected a dateTime"),
        ({"invites": [{**INVITE, "LOI": "7"}]}, r"\$\[0\]\.LOI: expected a whole number, found text"),
        ({"quotas": b"[]"}, "expected an object, found an array"),
        ({"quotas": b"<html>"}, "expected JSON, found HTML"),
    ],
)
def test_classes_of_a_user_are_read_as_strictly(converter, changes, rule):
    with pytest.raises(ClassValidationError) as caught:
        converter.structure({**converter.unstructure(CLICK), **changes}, Click)
    [error] = caught.value.exceptions
    assert isinstance(error, DecodeError)
    with pytest.raises(DecodeError, match=rule):
        raise error


def test_a_hook_of_a_user_counts_inside_of_a_record_and_nowhere_else(converter):
    converter.structure(json.dumps(QUOTAS).encode(), Quotas)  # hooks that exist are made anew
    converter.register_structure_hook(Price, lambda *_: Price(9.0, 9))
    converter.register_unstructure_hook(Price, lambda price: f"{price.amount} of {price.currency_id}")
    for value in (QUOTAS, json.dumps(QUOTAS).encode()):
        read = converter.structure(value, Quotas)
        assert {survey.price for survey in read.surveys} == {Price(9.0, 9)}
    assert converter.unstructure(read)["Surveys"][0]["Price"] == "9.0 of 9"
    assert make_converter().structure(QUOTAS, Quotas) == decode(Quotas, QUOTAS) == CLICK.quotas
    assert make_converter() is not make_converter()


def test_a_copy_of_a_converter_has_hooks_of_its_own(converter):
    other = converter.copy()
    other.register_structure_hook(Price, lambda *_: Price(9.0, 9))
    other.register_unstructure_hook(Setting, lambda setting: setting.name)
    body = json.dumps(QUOTAS).encode()
    assert other.structure(body, Quotas).surveys[0].price == Price(9.0, 9)
    assert converter.structure(body, Quotas) == CLICK.quotas
    settings = decode(PartnerSettings, [{"Name": "a"}])
    assert other.unstructure(settings) == ["a"]
    assert converter.unstructure(settings)[0]["Name"] == "a"


def test_an_error_of_a_users_hook_gets_the_path(converter):
    def refuse(*_: object) -> Price:
        raise ValueError("no price today")

    converter.register_structure_hook(Price, refuse)
    with pytest.raises(DecodeError, match=r"^\$\.Surveys\[0\]\.Price: no price today$"):
        converter.structure(QUOTAS, Quotas)


def test_an_invite_of_a_call_is_written_as_any_other(converter):
    async def main() -> Invite:
        async with doubles.client(doubles.Service(lambda _: INVITE)) as client:
            return await client.generate_invite("m", 3)

    assert converter.unstructure(anyio.run(main)) == INVITE


@attrs.frozen
class Night:
    clicks: list[Click]


def test_the_path_of_an_error_leads_through_lists_of_a_users_classes():
    written = make_converter().unstructure(Night([CLICK, CLICK]))
    written["clicks"][1]["member_code"] = 7
    with pytest.raises(DecodeError) as caught:
        from_json(Night, json.dumps(written))
    assert (caught.value.path, caught.value.rule) == (
        "$.Clicks[1].MemberCode",
        "expected text, found a whole number",
    )


@pytest.mark.parametrize("line", [["secret"], [1, "secret", None, None, None, None, None]])
def test_a_line_of_another_form_is_refused_and_not_shown(converter, line):
    for value in ([line], json.dumps([line]).encode()):
        with pytest.raises(DecodeError, match=r"^\$\[0\]: expected OutcomeLine$"):
            converter.structure(value, list[OutcomeLine])


@pytest.mark.parametrize("body", [b"{}", '{"Surveys": []}'])
def test_a_body_in_place_of_the_class_is_named_and_not_shown(body):
    with pytest.raises(InvalidRequestError, match="takes the class first") as caught:
        from_json(body, Quotas)
    assert str(body) not in str(caught.value)
