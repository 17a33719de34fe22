"""An inventory fed in parts equals the whole, or raises a DecodeError."""

from __future__ import annotations

import gc
import json
import time
from contextlib import suppress
from itertools import pairwise
from typing import Any, NoReturn

import inventories
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from sampling_async import DecodeError, Quotas, Survey, from_json
from sampling_async._json import converter
from sampling_async._json import fast as _known
from sampling_async._json import inventory as _inventory
from sampling_async._json.fast import KnownSurveys, Part
from sampling_async._json.inventory import Inventory

TAIL = b',"CountryID":9,"CacheExpires":"2020-01-31T21:19:30Z"}'


def parts_of(body: bytes, size: int) -> list[bytes]:
    return [body[at : at + size] for at in range(0, len(body), size)]


def read(parts: list[bytes]) -> Quotas:
    inventory, surveys = Inventory(), []
    for part in parts:
        surveys += inventory.feed(part)
    surveys += inventory.end()
    if inventory.unread is not None:
        assert surveys == []
        return from_json(Quotas, inventory.unread)
    return evolve(inventory.frame(), surveys=tuple(surveys))


def read_again(body: bytes, known: KnownSurveys, size: int = 5000) -> list[Survey]:
    inventory = Inventory(known)
    surveys = [survey for part in parts_of(body, size) for survey in inventory.feed(part)]
    return surveys + inventory.end()


def refusal(body: bytes, size: int = 10**9) -> DecodeError:
    with pytest.raises(DecodeError) as caught:
        read(parts_of(body, size))
    return caught.value


def survey(number: int = 1, **changes: Any) -> bytes:
    return json.dumps(inventories.survey(SurveyID=number, **changes)).encode()


def body_of(*surveys: bytes) -> bytes:
    return b'{"Surveys":[%b]%b' % (b",".join(surveys), TAIL)


# --- Any parts of any body


def _spelled(document: Any, style: str) -> bytes:
    match style:
        case "compact":
            return json.dumps(document, separators=(",", ":")).encode()
        case "indented":
            return json.dumps(document, indent=2, ensure_ascii=False).encode()
        case "wide":
            return json.dumps(document, separators=("\r\n\t , ", " :\n")).encode() + b" \n"
        case "last":
            return json.dumps({**dict(reversed(document.items()))}).encode()
    return json.dumps(document).encode()


TRICKY = (
    "{",
    "}",
    "},{",
    '"},{"SurveyID":',
    "}]",
    "\\",
    '\\"',
    '{"',
    "\\\\}",
    "}, ]",
    "[{",
    "\u2028",
    "\\u007d",
)


@st.composite
def bodies(draw) -> bytes:
    rows = []
    for number in range(draw(st.integers(0, 6))):
        row = inventories.survey(
            SurveyID=number, SurveyName=draw(st.sampled_from(TRICKY) | st.text(max_size=4))
        )
        if draw(st.booleans()):
            row[draw(st.sampled_from(TRICKY))] = draw(st.sampled_from([None, [{}, {"a": {}}], "}", {"}": "{"}]))
        if draw(st.integers(0, 3)) == 0:  # one for the careful decoder
            row["SurveyId"] = row.pop("SurveyID")
        if draw(st.integers(0, 3)) == 0:
            row = dict(reversed(row.items()))
        rows.append(row)
    before = draw(
        st.sampled_from([{}, {"CountryID": 9, "Note": "a, b"}, {"X": -1.5e3, "Y": None}, {"N": {"a": 1}}])
    )
    after = draw(st.sampled_from([{}, {"Z": [{"}": "]"}]}]))
    document = {**before, **inventories.quotas(**after)}
    document["Surveys"] = rows
    return _spelled(document, draw(st.sampled_from(["compact", "indented", "wide", "last", "plain"])))


@settings(max_examples=150)
@given(body=bodies(), cuts=st.lists(st.floats(0, 1), max_size=8), limit=st.sampled_from([50, 2000, 2**18]))
def test_an_inventory_split_anywhere_equals_the_whole(body, cuts, limit):
    places = [0, *sorted(int(cut * len(body)) for cut in cuts), len(body)]
    parts = [body[start:end] for start, end in pairwise(places)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_inventory, "_GUESSED_BYTES", limit)
        assert read(parts) == from_json(Quotas, body)


@settings(max_examples=300)
@given(
    body=bodies(),
    where=st.floats(0, 1),
    removed=st.integers(0, 3),
    put=st.sampled_from([b"", b"{", b"}", b'"', b"\\", b",", b"]", b"[", b" ", b"\xff", b"null", b"\x00"]),
    size=st.sampled_from([13, 500, 10**9]),
)
def test_a_damaged_inventory_is_refused_in_parts_if_it_is_refused_as_a_whole(body, where, removed, put, size):
    at = int(where * len(body))
    spoiled = body[:at] + put + body[at + removed :]
    try:
        meant = from_json(Quotas, spoiled)
    except DecodeError:
        refusal(spoiled, size)
    else:
        assert read(parts_of(spoiled, size)) == meant


@pytest.mark.parametrize("style", ["compact", "wide"])
@pytest.mark.parametrize("size", [7, 10**9])
def test_an_inventory_cut_at_any_byte_is_refused(style, size):
    rows = [inventories.survey(SurveyID=1, SurveyName="a } ] , {"), inventories.survey(SurveyID=2, Quotas=[])]
    body = _spelled(inventories.quotas(*rows, More={"a": []}), style).rstrip()
    for end in range(0, len(body), 1 if size > 7 else 5):
        refusal(body[:end], size)
    assert read(parts_of(body, size)) == from_json(Quotas, body)


@pytest.mark.parametrize("size", [1, 2, 100])
def test_a_byte_order_mark_is_skipped(size):
    body = json.dumps(inventories.quotas()).encode()
    marked = b"\xef\xbb\xbf" + body
    inventory = Inventory()
    assert sum(len(inventory.feed(part)) for part in parts_of(marked, size)) + len(inventory.end()) == 1
    assert read(parts_of(marked, size)) == from_json(Quotas, body)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_other_encodings_are_decoded_as_a_whole(encoding):
    body = json.dumps(inventories.quotas()).encode(encoding)
    inventory = Inventory()
    assert inventory.feed(body) + inventory.end() == []
    assert inventory.unread == body
    assert read(parts_of(body, 100)) == from_json(Quotas, body)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b" ", b"null", b"[]", b"<html>", b'{"Result":"NO","ResultCode":3}', b'{"Surveys":null}'),
        *(b'{"a":{},"Surveys":[' + survey() + b"]" + TAIL, b'{"Surve\\u0079s":[' + survey() + b"]" + TAIL),
        b'{"a":"%b","Surveys":[%b]%b' % (b"x" * 9000, survey(), TAIL),
    ],
)
def test_a_body_that_does_not_begin_as_an_inventory_is_decoded_as_a_whole(body):
    inventory = Inventory()
    assert [row for part in parts_of(body, 500) for row in inventory.feed(part)] + inventory.end() == []
    assert inventory.unread == body


# --- When a survey is returned


def test_a_survey_is_returned_when_the_start_of_the_next_one_arrives():
    inventory = Inventory()
    assert [row.survey_id for row in inventory.feed(b'{"Surveys":[%b,' % survey(1))] == [1]
    assert inventory.feed(survey(2)) == []
    assert [row.survey_id for row in inventory.feed(b"," + survey(3)[:20])] == [2]
    assert inventory.feed(survey(3)[20:]) == []
    assert inventory.feed(b",") == []  # from now on the beginning of the next one is needed
    assert [row.survey_id for row in inventory.feed(survey(4)[:20])] == [3]
    assert inventory.feed(survey(4)[20:] + b"]" + TAIL) == []
    assert [row.survey_id for row in inventory.end()] == [4]
    assert inventory.frame().country_id == 9


@pytest.mark.parametrize("style", ["plain", "compact", "indented"])
def test_the_end_of_a_large_survey_is_found(style, monkeypatch):
    monkeypatch.setattr(_inventory, "_GUESSED_BYTES", 300)
    rows = [inventories.survey(SurveyID=number, SurveyName="}{" * number) for number in range(5)]
    body = _spelled(inventories.quotas(*rows), style)
    for size in (10, 100, 1000):
        assert read(parts_of(body, size)) == from_json(Quotas, body)


def test_a_large_survey_with_an_unusual_end_is_returned_before_the_end(monkeypatch):
    monkeypatch.setattr(_inventory, "_GUESSED_BYTES", 300)
    inventory = Inventory()
    assert len(inventory.feed(b'{"Surveys":[%b,%b' % (survey(1), survey(2)))) == 2
    other = json.dumps(dict(reversed(inventories.survey(SurveyID=3).items()))).encode()
    assert [row.survey_id for row in inventory.feed(b"," + other + b',{"')] == [3]


# --- Errors and their paths


def edited(index: int, *path: Any, value: Any) -> bytes:
    rows = [inventories.survey(SurveyID=number) for number in range(5)]
    place: Any = rows[index]
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return json.dumps(inventories.quotas(*rows)).encode()


CONDITION = ("Quotas", 0, "Layers", 0, "SubQuotas", 0, "QuestionsAndAnswers", 0)
PATH_OF_CONDITION = "$.Surveys[{}].Quotas[0].Layers[0].SubQuotas[0].QuestionsAndAnswers[0]"


@pytest.mark.parametrize("size", [1, 64, 10**9])
@pytest.mark.parametrize(
    ("body", "path"),
    [
        (edited(3, "Quotas", 0, "QuotaID", value="x"), "$.Surveys[3].Quotas[0].QuotaID"),
        (edited(0, "Quotas", 0, "QuotaID", value=None), "$.Surveys[0].Quotas[0].QuotaID"),
        (edited(4, "Quotas", 0, "Layers", value={}), "$.Surveys[4].Quotas[0].Layers"),
        (edited(2, "DeviceTypeIDs", value=[1, 1.5]), "$.Surveys[2].DeviceTypeIDs[1]"),
        (edited(1, *CONDITION, "AnswerValues", value=7), PATH_OF_CONDITION.format(1) + ".AnswerValues"),
        (body_of(survey(), b"3"), "$.Surveys[1]"),
        (body_of(b"null"), "$.Surveys[0]"),
        (body_of(survey(), b"[]"), "$.Surveys[1]"),
        (body_of(survey() + survey()), "$.Surveys[1]"),
        (body_of(survey(), b""), "$.Surveys[1]"),
        (body_of(b"", survey()), "$.Surveys[0]"),
        (body_of(survey(), b"", survey()), "$.Surveys[1]"),
        (body_of(survey() + b";" + survey()), "$.Surveys[1]"),
        (body_of(survey(), b'{"SurveyID":1}'), "$.Surveys[1].WaveID"),
        (body_of(survey(), b"{'SurveyID':1}"), "$.Surveys[1]"),
        (body_of(survey(), survey()[:-1] + b',"X":"\xff"}', survey()), "$.Surveys[1]"),
        (b'{"Surveys":[%b]}' % survey(), "$.CountryID"),
        (b'{"Surveys":[%b],"CountryID":"9","CacheExpires":"2020-01-31T21:19:30Z"}' % survey(), "$.CountryID"),
        (body_of(survey()) + b"x", "$"),
        (body_of(survey())[:-1], "$"),
        (b'{"Surveys":[%b],"Surveys":[%b]%b' % (survey(1), survey(2), TAIL), "$.Surveys"),
        (b'{"Surveys":[%b],"Surveys":null%b' % (survey(1), TAIL), "$.Surveys"),
    ],
)
def test_a_decode_error_names_the_path(body, path, size):
    assert refusal(body, size).path == path


@pytest.mark.parametrize("blank", [b"\x0b", b"\x0c"])
@pytest.mark.parametrize("body", [b",%b%%b", b"%b,%%b"])
def test_blanks_that_are_not_json_are_refused_between_surveys(blank, body):
    spoiled = b'{"Surveys":[' + survey(1) + (body % blank) % survey(2) + b"]" + TAIL
    with pytest.raises(DecodeError):
        from_json(Quotas, spoiled)
    refusal(spoiled)
    refusal(spoiled, 100)


# --- The amount of work


class Work:
    """Counts the decoded bytes and the tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.decoded = 0
        self.tokens = 0
        token = _inventory._TOKEN

        def structure(cls: type, part: Part, *rest: Any) -> Any:
            self.decoded += len(part.body)
            return converter.structure(cls, part, *rest)

        class Token:
            def match(_, *args: Any) -> Any:  # noqa: N805
                self.tokens += 1
                return token.match(*args)

        monkeypatch.setattr(_inventory, "structure", structure)
        monkeypatch.setattr(_inventory, "_TOKEN", Token())


@pytest.mark.parametrize("name", ["plain", "}", "{", "},{", '"}, {"SurveyID"', "{{{{", '\\"}'])
@pytest.mark.parametrize("size", [13, 700, 2**17])
def test_braces_in_texts_keep_the_work_linear(name, size, monkeypatch):
    rows = [inventories.survey(SurveyID=number, SurveyName=name) for number in range(60)]
    body = json.dumps(inventories.quotas(*rows)).encode()
    work = Work(monkeypatch)
    assert len(read(parts_of(body, size)).surveys) == 60
    assert work.decoded < 6 * len(body)
    assert work.tokens < 2 * len(body) + 10 * len(body) / size


def test_surveys_that_arrive_together_are_read_together(monkeypatch):
    calls, read_many = [], _known.read_many
    monkeypatch.setattr(_known, "read_many", lambda *given: calls.append(1) or read_many(*given))
    rows = [inventories.survey(SurveyID=number) for number in range(120)]
    assert len(read([json.dumps(inventories.quotas(*rows)).encode()]).surveys) == 120
    assert len(calls) == 1


def test_surveys_for_the_careful_decoder_are_not_tried_together_repeatedly(monkeypatch):
    rows = [inventories.survey(SurveyID=number) for number in range(120)]
    rows[-5]["SurveyId"] = rows[-5].pop("SurveyID")
    body = json.dumps(inventories.quotas(*rows)).encode()
    work = Work(monkeypatch)
    assert len(read([body]).surveys) == 120
    assert work.decoded < 6 * len(body)


@pytest.mark.parametrize("blanks", [b" " * 6000, b"\n  " * 2000])
def test_many_blanks_take_linear_time(blanks):
    """Timed with a margin of several hundred, because the work of a regular expression cannot be counted."""
    inventory = Inventory()
    began = time.process_time()
    assert inventory.feed(b'{"Surveys":[' + blanks) == []
    assert time.process_time() - began < 0.05


def test_blanks_split_between_parts_change_nothing():
    inventory, seen = Inventory(), []
    for part in (b'{"Surveys":[', *[b" \r\n\t"] * 20, survey(1), *[b"  "] * 80, b",", *[b" "] * 9, survey(2)):
        seen += inventory.feed(part)
    seen += inventory.feed(b" ]" + TAIL) + inventory.end()
    assert [row.survey_id for row in seen] == [1, 2]


@pytest.mark.parametrize("size", [100, 10**9])
def test_too_many_digits_after_the_surveys_are_a_decode_error(size):
    body = b'{"Surveys":[%b],"X":%b%b' % (survey(), b"9" * 5000, TAIL)
    with suppress(DecodeError):
        assert len(read(parts_of(body, size)).surveys) == 1


def test_a_list_that_does_not_end_and_a_second_list_are_named():
    error = refusal(body_of(survey(1), survey(2))[: -len(TAIL) - 1])
    rule = "expected a survey or the end of the list, found the end of the body"
    assert (error.path, error.rule) == ("$.Surveys[2]", rule)
    error = refusal(b'{"Surveys":[%b],"Surveys":[]%b' % (survey(1), TAIL[1:].join([b",", b""])))
    assert (error.path, error.rule) == ("$.Surveys", "expected one list of surveys, found several")
    error = refusal(b'{"Surveys":[%b %b]%b' % (survey(1), survey(2), TAIL))
    assert (error.path, error.rule) == ("$.Surveys[1]", "expected surveys, each an object, separated by commas")


# --- Surveys that are already known


def test_unchanged_surveys_are_the_same_objects_while_somebody_holds_them():
    known = KnownSurveys()
    texts = [survey(number) for number in range(50)]
    before = read_again(body_of(*texts), known)
    texts[20] = survey(20, LOI=99)
    del texts[30]
    after = read_again(body_of(*texts), known)
    assert after == list(from_json(Quotas, body_of(*texts)).surveys)
    old = set(map(id, before))
    others = [each.survey_id for each in after if id(each) not in old]
    assert others == [20]
    del before, after
    gc.collect()
    assert not known


def test_decode_errors_are_reported_even_if_other_surveys_are_cached():
    known = KnownSurveys()
    texts = [survey(number) for number in range(50)]
    before = read_again(body_of(*texts), known)
    texts[20] = survey(20, LOI="odd")
    with pytest.raises(DecodeError) as caught:
        read_again(body_of(*texts), known)
    assert caught.value.path == "$.Surveys[20].LOI"
    texts[20] = survey(20, LOI=7.0)  # the careful decoder reads it
    assert [each.loi for each in read_again(body_of(*texts), known)][20] == 7
    assert len(before) == 50


def refuse(*_: Any) -> NoReturn:
    raise AssertionError("something was read")


@pytest.mark.parametrize("size", [13, 700, 5000, 10**9])
@pytest.mark.parametrize("between", [b",", b", ", b"\n\t, \r\n"])
def test_nothing_is_read_where_nothing_has_changed(size, between, monkeypatch):
    texts = [survey(number, SurveyName="},{" * (number % 3)) for number in range(1, 60)]
    body = b'{"Surveys":[%b]%b' % (between.join(texts), TAIL)
    known = KnownSurveys()
    before = read_again(body, known, size)
    monkeypatch.setattr(_inventory, "structure", refuse)
    after = read_again(body, known, size)
    assert len(after) == 59
    assert all(one is other for one, other in zip(before, after, strict=True))


def read_alone(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return a list of the surveys that will be read by a call of their own."""
    texts: list[bytes] = []

    def read_one(cls: Any, part: Part, *rest: Any) -> Any:
        if cls is Survey:
            texts.append(part.body)
        return converter.structure(cls, part, *rest)

    monkeypatch.setattr(_inventory, "structure", read_one)
    return texts


def test_of_an_inventory_that_is_known_only_what_has_changed_is_read(monkeypatch):
    known, texts = KnownSurveys(), [survey(number) for number in range(1, 60)]
    before = read_again(body_of(*texts), known)
    texts[20], texts[40] = survey(21, LOI=99), survey(41, LOI=99)
    monkeypatch.setattr(_known, "read_part", refuse)
    alone = read_alone(monkeypatch)
    after = read_again(body_of(*texts), known)
    assert alone == [texts[20], texts[40]]
    assert [one is other for one, other in zip(before, after, strict=True)].count(False) == 2


def test_where_much_has_changed_surveys_are_read_together(monkeypatch):
    known, texts = KnownSurveys(), [survey(number) for number in range(1, 60)]
    before = read_again(body_of(*texts), known)
    texts[2::3] = [survey(number, LOI=99) for number in range(3, 60, 3)]
    alone = read_alone(monkeypatch)
    after = read_again(body_of(*texts), known, 10**9)
    assert alone == []
    assert [one is other for one, other in zip(before, after, strict=True)].count(False) == 19


@pytest.mark.parametrize("fingerprint", [hash, _known._sha1])
@given(data=st.data())
def test_what_has_changed_is_read_and_what_has_not_is_the_same(fingerprint, data):
    number = st.integers(1, 12)
    name = st.sampled_from(["", "x" * 90, "}", "},{", '"}, {"SurveyID"', None])
    waves = st.lists(st.builds(dict, SurveyID=number, WaveID=number), max_size=3)
    one = st.builds(survey, number, SurveyName=name, SurveyWaveExclusions=waves, LOI=st.integers(1, 99))
    texts = data.draw(st.lists(one, min_size=1, max_size=12))
    known, size = KnownSurveys(), data.draw(st.sampled_from([7, 300, 1500, 10**9]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_known, "_fingerprint", fingerprint)
        held = dict(zip(texts, read_again(body_of(*texts), known, size), strict=True))
        later = data.draw(st.lists(st.sampled_from(texts) | one, max_size=12))
        after = read_again(body_of(*later), known, size)
    if later:  # a body without surveys is read as a whole
        assert after == list(from_json(Quotas, body_of(*later)).surveys)
    for text, read in zip(later, after, strict=True):
        assert read is held.get(text, read)


@pytest.mark.parametrize("size", [13, 10**9])
def test_a_last_survey_that_became_shorter_is_not_waited_for(size):
    known = KnownSurveys()
    texts = [survey(1), survey(2), survey(3, SurveyName="x" * 5000)]
    before = read_again(body_of(*texts), known, size)
    texts[2] = survey(3, SurveyName="")
    after = read_again(body_of(*texts), known, size)
    assert after[2].survey_name == ""
    assert after[0] is before[0]
    with pytest.raises(DecodeError):
        read_again(body_of(*texts)[: -len(TAIL) - 20], known, size)


@pytest.mark.parametrize(("length", "is_exact"), [(9, False), (10, True)])
def test_the_end_of_a_survey_is_guessed_until_it_is_long_whatever_stands_before_it(
    length, is_exact, monkeypatch
):
    monkeypatch.setattr(_inventory, "_GUESSED_BYTES", 10)
    extent = _inventory._Extent(bytearray(b" " * 50 + b'{"a":' + b"1" * (length - 5)), 50, b"", is_exact=False)
    assert extent.find_end() is None
    assert extent.is_exact is is_exact


def test_what_is_wrong_around_the_surveys_has_no_place_that_leads_into_them():
    body = body_of(survey(1), survey(2))
    for bad, rule in (
        (body[:-1] + b"x}", "expected JSON, found a syntax error before or after the surveys"),
        (body[:-1] + b',"N":"\xff"}', "expected UTF-8, found other bytes before or after the surveys"),
        (
            body[:-1] + b',"N":NaN}',
            "expected finite numbers, found NaN, Infinity or a number with too many digits",
        ),
    ):
        error = refusal(bad)
        assert (error.path, error.rule, error.args) == ("$", rule, ("$", rule))


# --- The surveys of earlier inventories


ONE, TWO, THREE = (b'{"SurveyID":%d,"Rest":"%b"}' % (number, b"x" * 10 * number) for number in (1, 2, 3))


class AnySurvey:
    """In place of a survey: anything that can be referred to."""


@pytest.fixture
def surveys():
    return {text: AnySurvey() for text in (ONE, TWO, THREE)}


@pytest.fixture
def found(surveys):
    kept = KnownSurveys()
    for text, survey in surveys.items():
        kept.add(text, survey)
    return kept


def test_a_survey_is_found_by_its_text_as_long_as_somebody_uses_it(found, surveys):
    assert found.find(ONE) is surveys[ONE]
    assert found.find(ONE + b" ") is None
    assert len(found) == 3
    del surveys[ONE]
    assert found.find(ONE) is None
    assert len(found) == 2


@pytest.mark.parametrize("between", [b",", b" ,", b", \n", b"\t,\r\n  "])
def test_known_surveys_are_led_through_whatever_stands_between_them(found, surveys, between):
    text = b"[" + between.join([ONE, TWO, THREE]) + b"]"
    assert found.leading(bytearray(text), 1) == (list(surveys.values()), len(text) - 1)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (ONE + b"," + TWO.replace(b"x", b"y") + b"," + THREE, 1),  # the second has changed
        (ONE + b"," + TWO[:-1], 1),  # and here it is not whole
        (ONE + b";" + TWO, 1),
        (ONE + b",," + TWO, 1),
        (ONE + b",[" + TWO, 1),
        (ONE + b",", 1),
        (ONE, 1),
        (b"[" + ONE, 0),
        (b"", 0),
    ],
)
def test_the_first_that_is_not_known_ends_it(found, surveys, text, count):
    assert found.leading(bytearray(text), 0) == ([surveys[ONE]][:count], len(ONE) * count)


def test_a_survey_that_is_found_again_reports_its_length_for_those_that_begin_alike(found):
    longer = ONE[:-2] + b'x"}'
    assert longer[:32] == ONE[:32]
    kept = AnySurvey()
    found.add(longer, kept)
    assert found.leading(bytearray(ONE), 0) == ([], 0)
    assert found.find(ONE) is not None
    assert len(found.leading(bytearray(ONE), 0)[0]) == 1


def test_a_survey_is_awaited_until_all_of_its_length_is_there(found):
    text = b"[" + TWO
    assert found.awaits(bytearray(text[:-1]), 1)
    assert not found.awaits(bytearray(text), 1)
    assert not found.awaits(bytearray(b"[" + THREE[:8]), 1)  # it does not begin like one that is known


def test_references_without_a_survey_are_dropped_when_there_are_many(monkeypatch):
    monkeypatch.setattr(_known, "_FEWEST_REFERENCES", 4)
    kept, lasting = KnownSurveys(), [AnySurvey() for _ in range(3)]
    for number, survey in enumerate(lasting):
        kept.add(b"%d" % number, survey)
    kept.add(b"gone", AnySurvey())
    assert len(kept._surveys) == 4
    kept.add(b"new", lasting[0])  # the fifth: those that are gone are looked for
    assert len(kept._surveys) == 4
    assert kept._most == 6  # twice as many as were left
    for number in range(3):
        kept.add(b"gone %d" % number, AnySurvey())
    assert len(kept._surveys) == 5
    assert kept.find(b"2") is lasting[2]


def test_so_many_lengths_are_remembered_and_no_more(monkeypatch):
    monkeypatch.setattr(_known, "_MOST_LENGTHS", 2)
    kept, survey = KnownSurveys(), AnySurvey()
    for text in (ONE, TWO):
        kept.add(text, survey)
    assert len(kept._lengths) == 2
    kept.add(THREE, survey)
    assert len(kept._lengths) == 1
    assert kept.find(ONE) is survey  # only its length was forgotten


def test_without_a_hash_of_64_bits_texts_are_distinguished_by_sha_1():
    assert _known._sha1(b"a") == 0x86F7E437FAA5A7FCE15D1DDCB9EAEAEA377667B8
