"""Two decoders, one result: the fast decoder (msgspec) reads exactly what the careful one (cattrs) reads."""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import pickle
import random
from datetime import datetime
from typing import Any, get_args, get_origin, get_type_hints

import attrs
import cattrs
import doubles
import inventories
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sampling_async import (
    DecodeError,
    Invite,
    InviteOutcome,
    Layer,
    PartnerSettings,
    Price,
    QuestionAndAnswers,
    Quota,
    Quotas,
    RecontactMembers,
    Setting,
    SubQuota,
    Survey,
    SurveyWaveExclusion,
    from_json,
)
from sampling_async._contract.records import wire_name
from sampling_async._json import converter as _converter
from sampling_async._json import fast as _fast
from sampling_async._json import rules as _rules
from sampling_async._json.fast import KnownSurveys, Part
from sampling_async._json.inventory import Inventory
from sampling_async._json.rules import DRIFTED
from sampling_async._protocol import bulk_reply as _replies

RECORDS = (
    Quotas,
    Survey,
    Quota,
    Layer,
    SubQuota,
    QuestionAndAnswers,
    SurveyWaveExclusion,
    Price,
    Invite,
    RecontactMembers,
    Setting,
    PartnerSettings,
)


# --- Documents as a service might write them: mostly valid, with some odd values


INTS = ("0", "1", "7", "-0", "-3", "9223372036854775807", "1001538")
ODD_INTS = (
    *(
        "7.0",
        "1e3",
        "1E+2",
        "100e-2",
        "-0.0",
        "9007199254740992.0",
        "9007199254740993.0",
        "1e16",
        "7.5",
        "1e400",
    ),
    *("9223372036854775808", "-9223372036854775807", "-9223372036854775808", "18446744073709551616"),
    *("null", "true", '"7"', "[]", "{}", "01", "+1", "1.", "NaN", "Infinity", "-"),
)
FLOATS = ("0", "1", "1.7", "-0.0", "1e3", "2.5E-7", "0.1", "123456789.123456789", "1e-400", "9007199254740993")
ODD_FLOATS = ("9223372036854775807", "9.3e18", "-9223372036854775808", "1e18", "1e400", "null", "true", '"1.5"')
TEXTS = (
    '""',
    '"a"',
    '"caf\u00e9 \u6f22 \U0001f600"',
    r'"\u00e9\n\"\\\/"',
    r'"\ud83d\ude00"',
    '" a b "',
    '"{[}]"',
)
ODD_TEXTS = (r'"\ud800"', r'"\udc00\ud800"', r'"\x"', '"\n"', r'"\u0000"', '"\x7f"', "null", "7", "[]", "'a'")
VALUES = ('["18-34"]', "[]", '["a","b"]', '["90210","123"]', '["\u00e9"]')
ODD_VALUES = (
    *("null", '""', '"a,b"', '" a , b "', '[""]', '["a,b"]', '[" a","b "]', '["a",""]', '["","a"]', '[","]'),
    *(
        '["a,","b"]',
        '["a b"]',
        r'["a\u001cb"]',
        r'["\u2003a\u00a0"]',
        "[501,502]",
        "[1.0]",
        "[null]",
        "7",
        "{}",
    ),
    *('["a",501]', '[",a"]', '["a","","b"]', r'["\ud800"]', '"90210"'),
)
DATES = (
    '"2020-01-31T21:19:30"',
    '"2020-01-31T21:19:30.3616306Z"',
    '"0001-01-01T00:00:00"',
    '"2020-01-31T01:21:08Z"',
)
ODD_DATES = (
    *('"2019-03-03 18:42:34.000"', '"2018-10-22 19:58:42.99 +00:00"', '"2020-01-31T21:19:30-0530"'),
    *(
        '"/Date(1456826400000-0800)/"',
        r'"\/Date(-1)\/"',
        '"2020-01-31"',
        '"2020-02-30T00:00:00"',
        "null",
        "1456826",
    ),
    *(
        '"2020-01-31T21:19:30."',
        '"2020-01-31T21:19:30+99:00"',
        '"20\u09e820-01-31T21:19:30"',
        '"10000-01-01T00:00:00"',
    ),
)
PLAIN_IGNORED = ("null", "1", '"x"', "{}", "[[]]", '{"SurveyID":"no"}', "1e300", "[" * 60 + "]" * 60)
IGNORED = (
    *PLAIN_IGNORED,
    *(r'"\ud800"', r'"\x"', '"\n"', "01", "1.", "NaN", "nul", "[1,]", '{"a":1,}', "{1:2}", "1e400"),
)
BLANKS = ("", "", "", " ", "\n  ", "\t", "\r\n")


class Scribe:
    """Writes documents; `oddness` is the share of odd values."""

    def __init__(self, seed: int, oddness: float) -> None:
        self.random = random.Random(seed)
        self.oddness = oddness
        self.indents = self.random.random() < 0.2

    def odd(self) -> bool:
        return self.random.random() < self.oddness

    def either(self, plain: tuple[str, ...], odd: tuple[str, ...]) -> str:
        return self.random.choice(odd if self.odd() else plain)

    def blank(self) -> str:
        return self.random.choice(BLANKS) if self.indents else ""

    def joined(self, parts: list[str]) -> str:
        return f"{self.blank()},{self.blank()}".join(parts)

    def record(self, cls: type) -> str:
        if cls is PartnerSettings:
            return self.value(tuple[Setting, ...])
        if self.odd() and self.odd():
            return self.random.choice(("null", "[]", "7", '"x"', "{}"))
        fields = []
        for attribute in attrs.fields(attrs.resolve_types(cls)):
            name = wire_name(attribute.name)
            text = self.special(cls, attribute)
            if self.odd():
                name = DRIFTED.get(name, name.lower())
            if self.odd():
                continue
            if self.odd():  # the last of two equal keys counts
                fields.append((name, self.random.choice(IGNORED)))
            fields.append((name, text))
        fields += [(f"X{i}", self.either(PLAIN_IGNORED, IGNORED)) for i in range(self.random.randrange(3))]
        if self.odd():
            self.random.shuffle(fields)
        written = [f"{json.dumps(name)}{self.blank()}:{self.blank()}{text}" for name, text in fields]
        return "{" + self.blank() + self.joined(written) + self.blank() + "}"

    def special(self, cls: type, attribute: Any) -> str:
        if attribute.name == "answer_values":
            return self.either(VALUES, ODD_VALUES)
        if (cls, attribute.name) == (Invite, "url"):  # an empty link is none
            return self.either(TEXTS[1:], (*ODD_TEXTS, TEXTS[0]))
        if attribute.default is not attrs.NOTHING and self.odd():
            return "null"
        return self.value(attribute.type)

    def value(self, hint: Any) -> str:
        if attrs.has(hint):
            return self.record(hint)
        if get_origin(hint) is tuple:
            if self.odd() and self.odd():
                return self.random.choice(("null", "{}", "7"))
            items = [self.value(get_args(hint)[0]) for _ in range(self.random.randrange(4))]
            return "[" + self.blank() + self.joined(items) + self.blank() + "]"
        if hint is datetime:
            return self.either(DATES, ODD_DATES)
        while get_args(hint):  # `float | None`, `Annotated[int, ...]`
            hint = next(each for each in get_args(hint) if each is not type(None))
        plain, odd = {
            int: (INTS, ODD_INTS),
            float: (FLOATS, ODD_FLOATS),
            str: (TEXTS, ODD_TEXTS),
            bool: (("true", "false"), ("null", "0", '"true"', "True")),
        }[hint]
        return self.either(plain, odd)


documents = st.builds(Scribe, st.integers(0, 2**64), st.sampled_from([0.0, 0.01, 0.05, 0.3]))


# --- What "equal" means


def read_fast(cls: type, body: bytes) -> Any:
    if cls is not PartnerSettings:
        return _fast.read(cls, body)
    settings = _fast.read_many(Setting, body)
    return None if settings is None else PartnerSettings(settings)


def both(cls: type, body: bytes) -> tuple[Any, Any]:
    """Return the result of each decoder; None if it refuses."""
    try:
        slow = _converter.structure(cls, _rules.parse(body))
    except DecodeError:
        slow = None
    return read_fast(cls, body), slow


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if attrs.has(type(one)):
        assert not hasattr(one, "__dict__")
        for attribute in attrs.fields(type(one)):
            assert_same(getattr(one, attribute.name), getattr(other, attribute.name))
    elif isinstance(one, tuple | PartnerSettings):
        assert len(one) == len(other)
        for mine, its in zip(one, other, strict=True):
            assert_same(mine, its)
    else:
        assert type(one) in {int, float, str, bool, datetime, type(None)}
        assert repr(one) == repr(other)


def assert_decoders_agree(cls: type, body: bytes) -> bool:
    """Check that the fast decoder gives the result of the careful one, or None; return whether it gave one."""
    fast, slow = both(cls, body)
    if fast is None:
        return False
    assert slow is not None, "the fast decoder accepts what the careful one refuses"
    assert_same(fast, slow)
    assert fast == slow
    assert (hash(fast), repr(fast)) == (hash(slow), repr(slow))
    assert_same(pickle.loads(pickle.dumps(fast)), slow)
    return True


def plain(cls: type, seed: int = 0) -> bytes:
    return Scribe(seed, 0).record(cls).encode()


# --- Both decoders


@pytest.mark.parametrize("cls", RECORDS)
def test_correct_documents_take_the_fast_decoder(cls):
    assert all(assert_decoders_agree(cls, plain(cls, seed)) for seed in range(20))


@pytest.mark.parametrize("cls", RECORDS)
@settings(max_examples=60)
@given(scribe=documents)
def test_both_decoders_agree_on_every_record(cls, scribe):
    assert_decoders_agree(cls, scribe.record(cls).encode("utf-8"))


@settings(max_examples=100)
@given(inventories.documents, st.sampled_from([None, 2]), st.booleans())
def test_both_decoders_agree_on_inventories(document, indent, ascii_only):
    assert_decoders_agree(Quotas, json.dumps(document, indent=indent, ensure_ascii=ascii_only).encode())


TOKENS = (
    *(
        b"null",
        b"true",
        b"1",
        b"7.0",
        b"1e3",
        b"-",
        b'"',
        b"\\",
        b",",
        b":",
        b"{",
        b"}",
        b"[",
        b"]",
        b" ",
        b"\n",
    ),
    *(b"\x00", b"\x0c", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xef\xbb\xbf", rb"\ud800", b'"a,b"'),
    *(b"9" * 20, b"NaN"),
)


@settings(max_examples=1000)
@given(
    cls=st.sampled_from(RECORDS),
    seed=st.integers(0, 30),
    where=st.floats(0, 1),
    removed=st.sampled_from([0, 0, 1, 1, 2, 5, 30]),
    put=st.sampled_from(TOKENS) | st.binary(max_size=2),
)
def test_both_decoders_agree_after_one_mutation(cls, seed, where, removed, put):
    body = plain(cls, seed)
    at = int(where * len(body))
    assert_decoders_agree(cls, body[:at] + put + body[at + removed :])


@settings(max_examples=300)
@given(st.data())
def test_both_decoders_agree_after_one_changed_value(data):
    values = INTS + ODD_INTS + ODD_FLOATS + TEXTS + ODD_TEXTS + VALUES + ODD_VALUES + ODD_DATES + IGNORED
    cls = data.draw(st.sampled_from(RECORDS))
    body = plain(cls, data.draw(st.integers(0, 30))).decode()
    colons = [at for at, character in enumerate(body) if body[at - 1 : at + 1] == '":']
    if not colons:
        return
    at = data.draw(st.sampled_from(colons)) + 1
    end = next(i for i in range(at, len(body)) if body[i] in ",}]")
    exchanged = body[:at] + data.draw(st.sampled_from(values)) + body[end:]
    assert_decoders_agree(cls, exchanged.encode())


@pytest.mark.parametrize("at", [b'"X":"\xff"', b'"X":"\xc3"', b'"X":"\xed\xa0\x80"', b'"\xff":1'])
def test_the_fast_decoder_refuses_bytes_that_are_not_utf_8_even_in_skipped_fields(at):
    body = b'{"Amount":1.5,%b,"CurrencyID":2}' % at
    assert _fast.read(Price, body) is None


def test_a_byte_order_mark_is_skipped():
    assert _fast.read(Price, '{"Amount":1.5,"CurrencyID":2}'.encode("utf-8-sig")) == Price(1.5, 2)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-16-le"])
def test_other_encodings_are_left_to_the_careful_decoder(encoding):
    body = '{"Amount":1.5,"CurrencyID":2}'.encode(encoding)
    assert _fast.read(Price, body) is None
    assert from_json(Price, body) == Price(1.5, 2)


def test_only_the_careful_decoder_refuses_too_many_digits_in_skipped_fields():
    body = b'{"Amount":1.5,"CurrencyID":2,"X":%b}' % (b"9" * 5000)
    assert both(Price, body) == (Price(1.5, 2), None)


@pytest.mark.parametrize("depth", [100, 900, 1_000, 5_000, 100_000, 5_000_000])
def test_deeply_nested_json_is_decoded_or_a_decode_error(depth):
    nested = b"[" * depth + b"]" * depth
    condition = b'{"QuestionID":1,"X":%b}' % nested
    sub_quota = b'{"SubQuotaID":1,"CurrentCompletes":1,"MaxTargetCompletes":1,"QuestionsAndAnswers":[%b]}'
    for cls, body in ((QuestionAndAnswers, condition), (SubQuota, sub_quota % condition)):
        # How deep each decoder goes depends on the version of Python. The deepest body is too deep for all.
        fast, slow = both(cls, body)
        if slow is not None:
            assert fast in (None, slow)
        if depth == 5_000_000:
            assert fast is None
        if fast is None and slow is None:
            with pytest.raises(DecodeError, match="nested levels"):
                from_json(cls, body)
        else:
            assert from_json(cls, body) == (fast or slow)


def test_both_decoders_refuse_a_list_with_one_wrong_record():
    good, drifted = b'{"Name":"a"}', b'{"Name":7}'
    assert _fast.read_many(Setting, b"[%b]" % good, _fast.Shared()) == (Setting("a"),)
    assert _fast.read_many(Setting, b"[%b,%b]" % (good, drifted), _fast.Shared()) is None
    dates = json.dumps([inventories.survey(), inventories.survey(ScheduledCompletionDate="soon")]).encode()
    assert _fast.read_many(Survey, dates, _fast.Shared()) is None
    assert read_fast(PartnerSettings, b"[%b,%b]" % (good, drifted)) is None


# --- Bulk replies


def bulk_items() -> st.SearchStrategy[list[Any]]:
    ids = st.integers(1, 5)
    changes = [
        *({}, {}, {}, {"Result": None}, {"Result": 7}, {"Result": "a\x00\n b" * 80}, {"Result": "\ud800"}),
        *({"ResultCode": "1"}, {"QuotaId": 3}, {"ResultCode": 9.0}, {"QuotaID": None}, {"Invite": []}),
    ]
    invite = st.builds(
        lambda quota_id, changes: doubles.invite(quota_id, **changes),
        ids,
        st.sampled_from(
            [{}, {}, {}, {"IR": None}, {"LOI": 7.0}, {"MemberAmount": None}, {"URL": 7}, {"X": [1]}]
        ),
    )
    item = st.builds(
        lambda quota_id, code, invite, same, changes: {
            "QuotaID": quota_id,
            "ResultCode": code,
            "Invite": invite if invite is None or not same else {**invite, "QuotaID": quota_id},
            "Result": "SUCCESS" if code == 1 else "QUOTA_NOT_LIVE",
            **changes,
        },
        ids,
        st.sampled_from([1, 1, 9, 10, 36]),
        st.none() | invite,
        st.sampled_from([True, True, False]),
        st.sampled_from(changes),
    )
    right = st.builds(
        lambda quota_id: {"QuotaID": quota_id, "ResultCode": 9, "Result": "NO", "Invite": None}, ids
    )
    return st.lists(right | item, max_size=6) | st.lists(
        right, max_size=5, unique_by=lambda each: each["QuotaID"]
    )


def content_of(answer: _replies.BulkReply) -> Any:
    """Return the content of a response in comparable form."""

    def plain(outcome: Any) -> Any:
        error = outcome.error
        said = error and (type(error), error.path, error.rule, error.endpoint, error.delivery)
        assert type(outcome) is InviteOutcome
        return attrs.evolve(outcome, error=None), type(outcome), type(outcome.invite), said

    outcomes = [(outcome.quota_id, plain(outcome)) for outcome in answer.outcomes()]
    return outcomes, [plain(outcome) for outcome in answer.unrequested]


@settings(max_examples=300)
@given(items=bulk_items(), asked=st.lists(st.integers(1, 5), min_size=1, max_size=5, unique=True))
def test_both_decoders_agree_on_bulk_responses(items, asked):
    body = json.dumps({"Invites": items, "X": 1}).encode()
    fast = _replies.read_bulk("m1", tuple(asked), body)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fast, "read_bulk", lambda _: None)
        slow = _replies.read_bulk("m1", tuple(asked), body)
    assert content_of(fast) == content_of(slow)


def test_a_correct_bulk_response_takes_the_fast_decoder(monkeypatch):
    monkeypatch.setattr(_replies, "parse", None)
    items = [
        {"QuotaID": 1, "ResultCode": 9, "Invite": None},
        {"QuotaID": 2, "ResultCode": 1, "Invite": doubles.invite(2), "Result": "SUCCESS"},
    ]
    answer = _replies.read_bulk("m1", (1, 2), json.dumps({"Invites": items}).encode())
    assert [outcome.status for outcome in answer.outcomes()] == ["rejected", "invited"]
    made = list(answer.outcomes())[1]
    assert type(made.invite) is Invite
    assert pickle.loads(pickle.dumps(made)) == made
    with pytest.raises(AttributeError, match="immutable"):
        made.status = "rejected"


# --- Sharing


def conditions_of(inventory: Quotas) -> list[QuestionAndAnswers]:
    return [
        condition
        for survey in inventory.surveys
        for quota in survey.quotas
        for layer in quota.layers
        for sub_quota in layer.sub_quotas
        for condition in sub_quota.questions_and_answers
    ]


def test_equal_conditions_of_an_inventory_are_one_object():
    first, second = conditions_of(
        from_json(Quotas, json.dumps(inventories.quotas(inventories.survey(), inventories.survey(SurveyID=2))))
    )
    assert first is second


def test_equal_conditions_in_different_parts_of_an_inventory_are_one_object():
    inventory, body = Inventory(), json.dumps(inventories.quotas(*[inventories.survey()] * 3)).encode()
    surveys = [survey for at in range(0, len(body), 50) for survey in inventory.feed(body[at : at + 50])]
    surveys += inventory.end()
    conditions = conditions_of(attrs.evolve(inventory.frame(), surveys=tuple(surveys)))
    assert len(conditions) == 3
    assert len(set(map(id, conditions))) == 1


def test_a_part_that_cannot_be_decoded_leaves_no_unfinished_record():
    shared = _fast.Shared()
    rows = [inventories.condition(QuestionID=1), inventories.condition(QuestionID="x")]
    assert _fast.read(SubQuota, json.dumps(inventories.sub_quota(*rows)).encode(), shared) is None
    assert shared.conditions == {}
    read = _fast.read(SubQuota, json.dumps(inventories.sub_quota(rows[0])).encode(), shared)
    [row] = read.questions_and_answers
    assert type(row) is QuestionAndAnswers


# --- Other libraries that inspect our records


@pytest.mark.parametrize("cls", RECORDS[:-1])
def test_records_are_attrs_classes_that_nobody_can_change(cls):
    assert assert_decoders_agree(cls, plain(cls))
    assert not dataclasses.is_dataclass(cls)
    names = [attribute.name for attribute in attrs.fields(cls)]
    assert all(name == name.lower() for name in names)
    assert not {wire_name(name) for name in names} & set(dir(cls))
    record = _fast.read(cls, plain(cls, 3))
    with pytest.raises(AttributeError):
        setattr(record, names[0], 1)
    with pytest.raises(AttributeError):
        delattr(record, names[0])
    assert copy.deepcopy(record) == copy.copy(record) == attrs.evolve(record) == record


def test_the_garbage_collector_does_not_look_at_what_surveys_hold():
    """With millions of sub-quotas, a full collection would hold the event loop for seconds."""
    survey = read_fast(Survey, plain(Survey, 3))
    gc.collect()
    inner = [survey.price, survey.quotas, survey.device_type_ids, survey.survey_wave_exclusions]
    for quota in survey.quotas:
        inner += [quota, quota.layers]
        for layer in quota.layers:
            inner += [layer, layer.sub_quotas]
            for sub_quota in layer.sub_quotas:
                inner += [sub_quota, sub_quota.questions_and_answers, *sub_quota.questions_and_answers]
    assert len(inner) > 10
    assert not any(map(gc.is_tracked, inner))


def test_msgspec_itself_reads_what_it_has_written():
    survey = read_fast(Survey, plain(Survey, 3))
    assert msgspec.json.decode(msgspec.json.encode(survey), type=Survey) == survey
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(survey), type=Survey) == survey
    assert get_type_hints(Survey)["scheduled_completion_date"] is datetime
    assert get_type_hints(SubQuota)["questions_and_answers"] == tuple[QuestionAndAnswers, ...]


def test_attrs_cattrs_and_msgspec_see_ordinary_records():
    read = from_json(Price, b'{"Amount":1.5,"CurrencyID":2}')
    own = {"amount": 1.5, "currency_id": 2}
    assert attrs.asdict(read) == own
    assert cattrs.unstructure(read) == own
    assert cattrs.structure(own, Price) == read
    assert json.loads(msgspec.json.encode(read)) == {"Amount": 1.5, "CurrencyID": 2}


@pytest.mark.parametrize("body", [b"{}", b"[", b"[{}]", b"7"])
def test_surveys_that_are_no_list_are_left_to_the_careful_decoder(body):
    known = KnownSurveys()
    assert _fast.read_part(Survey, Part(body, _fast.Shared(), known)) is None
    assert not known


# --- Shortcuts: what they skip, and that they skip it


def test_lists_of_single_values_are_not_read_one_by_one(monkeypatch):
    """Nearly all are such lists; each of the others costs a call."""
    read = []
    monkeypatch.setattr(_fast, "answer_values", lambda values: read.append(values) or ("read",))
    single, other = (
        b'{"QuestionID":1,"AnswerIDs":[],"AnswerValues":["90210","10001"],"IsRoutable":false}',
        b'{"QuestionID":1,"AnswerIDs":[],"AnswerValues":["90210,10001"],"IsRoutable":false}',
    )
    assert _fast.read(QuestionAndAnswers, single).answer_values == ("90210", "10001")
    assert read == []
    both = _fast.read_many(QuestionAndAnswers, b"[%b,%b]" % (single, other), _fast.Shared())
    assert [each.answer_values for each in both] == [("90210", "10001"), ("read",)]
    assert read == [("90210,10001",)]


def test_texts_of_conditions_are_remembered_until_they_are_too_many(monkeypatch):
    monkeypatch.setattr(_fast, "_SHARED_BYTES", 4)
    shared = _fast.Shared()
    assert sorted(shared.unknown([b"aa", b"bb", b"aa"])) == [b"aa", b"bb"]
    shared.conditions.update({b"aa": None, b"bb": None})
    assert shared.unknown([b"aa"]) == ()  # four bytes are not too many
    assert shared.unknown([b"bb", b"c"]) == (b"c",)
    shared.conditions[b"c"] = None
    assert sorted(shared.unknown([b"bb", b"c"])) == [b"bb", b"c"]
    assert shared.conditions == {}
    shared.conditions.update({b"bb": None, b"c": None})
    assert shared.unknown([b"bb", b"c"]) == ()  # the count began again
