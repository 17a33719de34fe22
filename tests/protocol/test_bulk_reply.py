"""What responses to a bulk invite mean."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from urllib.parse import quote, quote_plus

import doubles
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from sampling_async import (
    BadRequestError,
    DecodeError,
    ForbiddenError,
    Invite,
    ServerError,
    UnexpectedStatusError,
)
from sampling_async._contract.exchange import Reply
from sampling_async._protocol import bulk_reply
from sampling_async._protocol.bulk_reply import read_bulk, read_invite, reconcile
from sampling_async._protocol.refusals import disguised_refusal, refusal, retry_after, without
from sampling_async._protocol.results import SUCCESS, Columns

# --- Refusals


def refused(status: int, body: bytes = b"", **headers: str):
    return refusal(Reply(status, body, **headers), private=("member-1",))


@pytest.mark.parametrize(
    ("secret", "text", "cleaned"),
    [
        ("abcd&", "abcd&amp;", "<hidden>"),  # the longer form counts, where both fit
        ("abcde", "xabcdex", "x<hidden>x"),  # five characters are not in a word by chance
        ("abcd", "xabcdx abcd", "xabcdx <hidden>"),
    ],
)
def test_a_private_text_is_hidden_whole(secret, text, cleaned):
    assert without((secret,), text) == cleaned


@pytest.mark.parametrize(
    ("status", "error_class", "delivery"),
    [
        (400, BadRequestError, "unknown"),
        (403, ForbiddenError, "answered"),
        (404, UnexpectedStatusError, "unknown"),
        (408, UnexpectedStatusError, "answered"),
        (425, UnexpectedStatusError, "answered"),
        (429, UnexpectedStatusError, "answered"),
        (503, ServerError, "unknown"),
        (500, ServerError, "unknown"),
        (502, ServerError, "unknown"),
        (504, ServerError, "unknown"),
        (302, UnexpectedStatusError, "unknown"),
        (204, UnexpectedStatusError, "unknown"),
    ],
)
def test_each_status_has_its_error_and_its_proof_without_a_body(status, error_class, delivery):
    error = refused(status)
    assert (type(error), error.delivery, error.status) == (error_class, delivery, status)
    assert (error.result, error.result_code) == (None, None)


OWN = b'{"Result": "MEMBER_BLOCKED", "ResultCode": 14}'


@pytest.mark.parametrize(
    ("status", "body", "delivery"),
    [
        *((status, OWN, "answered") for status in (400, 403, 404, 409, 503)),
        *((status, OWN, "unknown") for status in (302, 500, 502, 504)),
        (400, b'{"ResultCode": 14}', "answered"),
        *((status, b'{"ResultCode": 14}', "unknown") for status in (404, 503)),
        *((status, b'{"Result": "TECHNICAL_ERROR", "ResultCode": 36}', "unknown") for status in (400, 503)),
        *((status, b'{"Result": "SUCCESS", "ResultCode": 1}', "unknown") for status in (400, 503)),
        *((400, body, "unknown") for body in (b"", b"<html>", OWN[:20], b'{"Result": "R"}', b"[]")),
        (429, b"<html>", "answered"),
    ],
)
def test_a_refusal_proves_non_processing_by_its_status_or_by_the_body_of_the_service(status, body, delivery):
    assert refused(status, body).delivery == delivery


def test_a_cut_refusal_proves_nothing():
    reply = Reply(400, OWN, is_whole=False)
    assert refusal(reply).delivery == "unknown"


def test_the_statuses_that_prove_non_processing_can_be_chosen():
    assert refusal(Reply(503), unprocessed={503}).delivery == "answered"
    assert refusal(Reply(429), unprocessed={503}).delivery == "unknown"


def test_an_error_body_is_read_by_content():
    error = refused(400, b'\xef\xbb\xbf{"Result": "PANEL_DOES_NOT_EXIST", "ResultCode": 3}')
    assert (error.result, error.result_code) == ("PANEL_DOES_NOT_EXIST", 3)
    assert str(error) == "the service answered 400 3 PANEL_DOES_NOT_EXIST"


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b"<html>", b"{", b'{"ResultCode": "3"}', b"\xff"])
def test_any_error_body_is_accepted(body):
    error = refused(400, body)
    assert (error.result, error.result_code) == (None, None)


def test_a_403_names_the_proxy_that_drops_headers():
    assert "underscores_in_headers" in str(refused(403))


KEY = "2222aaaa-2222-bbbb-2222-cccc22dddddd"


@pytest.mark.parametrize("cut", [40, 150, 165, 170, 190, 199])
def test_no_part_of_a_secret_is_left_where_a_text_is_cut(cut):
    text = "x" * cut + " " + KEY + " y"
    error = refusal(Reply(400, json.dumps({"Result": text, "ResultCode": 9}).encode()), private=("m1", KEY))
    assert KEY[:4] not in f"{error.result}{error.body_excerpt}"
    assert len(error.result) <= 200
    item = {"QuotaID": 5, "Invite": None, "ResultCode": 9, "Result": text}
    (outcome,) = read_bulk(KEY, (5,), json.dumps({"Invites": [item]}).encode()).outcomes()
    assert KEY[:4] not in repr(outcome)


@pytest.mark.parametrize("before", [2**16 - 40, 2**16 - 20, 2**16 - 1, 2**16, 2**17])
def test_no_part_of_a_secret_is_left_at_the_end_of_what_is_cleaned(before):
    escaped = "".join(f"&#{ord(letter)};" for letter in KEY)
    for secret in (KEY, escaped):
        body = b" " * before + secret.encode() + b" end"
        assert KEY[:4] not in refusal(Reply(500, body), private=(KEY,)).body_excerpt


@pytest.mark.parametrize(
    "written",
    [
        "j&#252;rgen-4711",
        "j&#xfc;rgen-4711",
        "j%u00fcrgen-4711",
        "j\\u00fcrgen-4711",
        "jürgen-4711",
        "j%C3%BCrgen-4711",
    ],
)
def test_a_secret_is_found_in_the_escapes_of_json_html_and_urls(written):
    for encoding in ("utf-8", "latin-1"):
        error = refusal(Reply(404, f"<h1>/x/{written}/Invites</h1>".encode(encoding)), private=("jürgen-4711",))
        assert error.body_excerpt == "<h1>/x/<hidden>/Invites</h1>"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_a_secret_is_found_in_a_page_of_another_encoding(encoding):
    error = refusal(Reply(404, "<h1>jürgen-4711</h1>".encode(encoding)), private=("jürgen-4711",))
    assert error.body_excerpt == "<h1><hidden></h1>"


@pytest.mark.parametrize("written", ["j&uuml;rgen-4711", "j\\\\u00fcrgen-4711", "j%FCrgen-4711"])
def test_a_secret_is_found_however_old_programs_write_it(written):
    assert refusal(Reply(404, written.encode()), private=("jürgen-4711",)).body_excerpt == "<hidden>"


def test_a_body_that_is_too_large_for_a_refusal_is_not_parsed():
    body = b'{"Result": "NO", "ResultCode": 9, "More": "%s"}' % (b"x" * 2**20)
    assert refusal(Reply(400, body)).result_code is None
    assert refusal(Reply(400, body)).delivery == "unknown"


def test_an_escape_beyond_all_characters_stays():
    assert refusal(Reply(404, b"&#9999999; &#x41;")).body_excerpt == "&#9999999; A"


@pytest.mark.parametrize(
    "body",
    [
        '{"Invites": [{"QuotaID": 5, "ResultCode": 1, "Invite": %s, "ResultCode": 9, "Invite": null}]}',
        '{"Invites": [{"QuotaID": 5, "ResultCode": 1, "Invite": %s}], "Invites": [{"ResultCode": 9}]}',
    ],
)
def test_a_body_that_repeats_a_name_is_unreadable(body):
    with pytest.raises(DecodeError, match="each name of an object once, found one repeated"):
        read_bulk("m1", (5,), (body % json.dumps(doubles.invite(5))).encode())


def test_a_code_beside_the_list_is_no_repetition():
    body = b'{"ResultCode": 0, "Invites": [{"QuotaID": 5, "ResultCode": 9, "Result": "NO", "Invite": null}]}'
    (outcome,) = read_bulk("m1", (5,), body).outcomes()
    assert (outcome.status, outcome.result_code) == ("rejected", 9)


def test_a_refusal_that_something_follows_proves_nothing():
    reply = Reply(408, b'{"Result": "NO", "ResultCode": 9}', is_followed=True)
    assert refusal(reply).delivery == "unknown"
    assert refusal(evolve(reply, is_followed=False)).delivery == "answered"


def test_an_excerpt_is_printable_and_without_the_member():
    body = b"\x00<p>/p/member-1/Invites\r\n\xff</p>" + b"x" * 5000
    excerpt = refused(500, body).body_excerpt
    assert excerpt.startswith("<p>/p/<hidden>/Invites ÿ</p>")
    assert len(excerpt) == 200
    assert "member-1" not in str(refused(500, body))


@pytest.mark.parametrize(
    "form",
    [
        "Zürich 1/a",
        json.dumps("Zürich 1/a"),
        quote("Zürich 1/a", safe=""),
        quote("Zürich 1/a", safe="").lower(),
        quote_plus("Zürich 1/a"),
        "ZÜRICH 1/A",
        r"Z\u00FCrich 1\/a",
        "xZürich 1/ay",
    ],
)
def test_an_excerpt_hides_every_form_of_a_member_code(form):
    error = refusal(Reply(400, f"no {form} here".encode()), private=("Zürich 1/a",))
    assert "rich" not in error.body_excerpt.lower()


def test_an_excerpt_hides_a_short_member_code_if_it_is_a_whole_word():
    error = refusal(Reply(400, b"member 12 in 2012, /12/"), private=("12",))
    assert error.body_excerpt == "member <hidden> in 2012, /<hidden>/"


def test_a_result_that_is_a_sentence_is_not_in_the_text():
    body = b'{"ResultCode": 12, "Result": "MEMBER member-1 NOT FOUND"}'
    error = refused(400, body)
    assert str(error) == "the service answered 400 12 NO_MEMBER_FOUND"
    assert error.result == "MEMBER <hidden> NOT FOUND"


def test_an_error_body_under_a_200_is_recognised():
    reply = Reply(200, b'{"Result": "QUOTA_NOT_LIVE", "ResultCode": 9}')
    error = disguised_refusal(reply)
    assert (type(error), error.result_code, error.delivery) == (UnexpectedStatusError, 9, "unknown")
    assert disguised_refusal(Reply(200, b"{}")) is None
    assert refused(200, b"{}") is None


DATE = "Fri, 20 Nov 2026 12:00:00 GMT"


@pytest.mark.parametrize(
    ("header", "date", "seconds"),
    [
        (None, None, None),
        ("5", None, 5.0),
        ("0", None, 0.0),
        ("1.5", None, 1.5),
        ("-1", None, None),
        ("NaN", None, None),
        ("inf", None, None),
        ("100000", None, 100_000.0),
        ("1e9", None, None),
        ("1_0", None, None),
        ("٣", None, None),
        ("soon", None, None),
        ("1, 1", None, 1.0),  # joined by a proxy
        ("2,5,3", None, 5.0),
        ("1, soon", None, None),
        ("1,", None, None),
        ("Fri, 20 Nov 2026 12:00:30 GMT, Fri, 20 Nov 2026 12:00:30 GMT", DATE, 30.0),
        ("Fri, 20 Nov 2026 12:00:30 GMT", DATE, 30.0),
        ("Fri, 20 Nov 2026 11:00:00 GMT", DATE, 0.0),
        ("Fri, 20 Nov 2026 12:00:30 GMT", None, 20.0),
        ("Fri, 20 Nov 2026 12:00:30 GMT", "rubbish", 20.0),
        ("Fri, 20 Nov 2026 12:00:30 -0000", DATE, 30.0),
        ("Fri, 20 Nov 2026 07:00:30 -0500", DATE, 30.0),
    ],
)
def test_retry_after_is_obeyed_where_it_makes_sense(header, date, seconds):
    now = datetime(2026, 11, 20, 12, 0, 10, tzinfo=UTC)
    assert retry_after(Reply(503, b"", header, date), lambda: now) == seconds


# --- Reconciliation


def one(*items: object, asked: tuple[int, ...] = (5,)):
    return next(outcome for outcome in reconcile("m", asked, items).outcomes() if outcome.quota_id == 5)


def test_a_rejection_needs_no_invite_field_and_no_name():
    assert one({"QuotaID": 5, "ResultCode": 9}).status == "rejected"
    assert one({"QuotaId": 5, "ResultCode": 9, "Result": 7}).result is None


@pytest.mark.parametrize("items", [(), (None,), ({},), ("x",), ({"QuotaID": "5", "ResultCode": 9},)])
def test_an_id_without_an_item_is_unknown(items):
    outcome = one(*items)
    assert (outcome.status, outcome.error.path) == ("unknown", "$.Invites")


def test_an_invite_for_another_quota_is_kept_and_marked():
    outcome = one(doubles.item(5, 1, Invite=doubles.invite(6)))
    assert (outcome.status, outcome.invite.quota_id, outcome.anomaly) == (
        "invited",
        6,
        "the invite names quota 6",
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"PartnerAmount": None}, "the invite has no PartnerAmount: 0 stands for it"),
        ({"WaveID": None}, "the invite has no WaveID: 0 stands for it"),
        ({"WaveID": None, "WaveId": 3}, "the invite has no WaveID: 0 stands for it"),
        ({"WaveID": None, "LOI": None}, "the invite has no WaveID, LOI: 0 stands for it"),
        ({"LOI": None, "IR": None}, "the invite has no LOI, IR: 0 stands for it"),
        ({"MemberAmount": None, "LOI": 0, "IR": 0}, None),
    ],
)
def test_an_invite_without_a_price_or_length_is_an_invite_and_marked(changes, says):
    items = [doubles.item(5, 1, Invite=doubles.invite(5, **changes)), doubles.item(7, 1), doubles.item(8, 9)]
    reply = read_bulk("m", (5, 7, 8), json.dumps({"Invites": items}).encode())
    first, *others = reply.outcomes()
    assert (first.status, first.error, first.anomaly) == ("invited", None, says)
    assert first.invite.url == "https://survey.example/5"
    assert [(each.status, each.anomaly) for each in others] == [("invited", None), ("rejected", None)]


def test_an_invite_of_a_service_without_waves_is_an_invite(caplog):
    without = doubles.invite(5)
    wave_id = without.pop("WaveID")
    (outcome,) = read_bulk(
        "m", (5,), json.dumps({"Invites": [doubles.item(5, 1, Invite=without)]}).encode()
    ).outcomes()
    says = "the invite has no WaveID: 0 stands for it"
    assert (outcome.status, outcome.invite.wave_id, outcome.anomaly) == ("invited", 0, says)
    assert read_invite(5, json.dumps(without).encode()) == outcome.invite
    assert caplog.messages == [says]
    caplog.clear()
    misspelled = without | {"WaveId": wave_id, "LOI": None}
    (outcome,) = read_bulk(
        "m", (5,), json.dumps({"Invites": [doubles.item(5, 1, Invite=misspelled)]}).encode()
    ).outcomes()
    says = "the invite has no LOI: 0 stands for it"
    assert (outcome.invite.wave_id, outcome.anomaly) == (wave_id, says)
    for body in (misspelled, doubles.invite(5, WaveID=0)):
        read_invite(5, json.dumps(body).encode())
    assert caplog.messages == [says]


@pytest.mark.parametrize("spelling", [{}, {"LOI": None}])  # read by the fast and by the careful decoder
def test_an_invite_with_an_empty_link_is_none(spelling):
    empty = doubles.invite(5, URL="", **spelling)
    items = [doubles.item(5, 1, Invite=empty), doubles.item(7, 1)]
    first, other = read_bulk("m", (5, 7), json.dumps({"Invites": items}).encode()).outcomes()
    rule = "expected a link, found empty text"
    assert (first.status, first.invite, first.anomaly) == ("unknown", None, rule)
    assert first.error.path == "$.Invites[0].Invite.URL"
    assert other.status == "invited"
    with pytest.raises(DecodeError) as caught:
        read_invite(5, json.dumps(empty).encode())
    assert (caught.value.path, caught.value.rule) == ("$.URL", rule)


@pytest.mark.parametrize("ids", [(7, 5, 6), (5, 6), (6, 7, 5, 8), (5, 5, 6, 7)])
def test_items_are_matched_by_id_and_not_by_position(ids):
    body = json.dumps({"Invites": [doubles.item(id_, 1 if id_ % 2 else 9) for id_ in ids]}).encode()
    answer = read_bulk("m", (5, 6, 7), body)
    statuses = {5: "invited", 6: "rejected", 7: "invited" if 7 in ids else "unknown"}
    assert {outcome.quota_id: outcome.status for outcome in answer.outcomes()} == statuses
    assert all(o.invite.quota_id == o.quota_id for o in answer.outcomes() if o.invite is not None)
    assert [outcome.quota_id for outcome in answer.unrequested] == [id_ for id_ in ids if id_ == 8]


def test_an_unprintable_result_is_cleaned():
    body = json.dumps({"Invites": [doubles.item(5, Result="NOT\x1b[31m LIVE  " + "x" * 500)]}).encode()
    (outcome,) = read_bulk("m", (5,), body).outcomes()
    assert outcome.result is not None
    assert outcome.result.startswith("NOT [31m LIVE x")
    assert len(outcome.result) == 200


def test_an_invite_with_another_name_than_the_contract_gives_keeps_it():
    named = [doubles.item(5, 1, Result="OK"), doubles.item(6, 1), doubles.item(7, 1, Result="m is IN")]
    answer = read_bulk("m", (5, 6, 7), json.dumps({"Invites": named}).encode())
    assert [outcome.result for outcome in answer.outcomes()] == ["OK", "SUCCESS", "<hidden> is IN"]
    assert {outcome.status for outcome in answer.outcomes()} == {"invited"}
    assert answer.answers.tally() == {("invited", 1): 3}
    # Users keep millions of results, so no outcomes are kept.
    assert isinstance(answer.answers, Columns)
    assert [type(invite) for invite in answer.answers.invites] == [Invite] * 3


@pytest.mark.parametrize("name", ["NOT_Member01_HERE", "not_MEMBER01_here", "member01"])
@pytest.mark.parametrize("code", [1, 9])
def test_a_member_code_inside_a_name_is_hidden(name, code):
    item = doubles.item(5, code, Result=name)
    (outcome,) = read_bulk("Member01", (5,), json.dumps({"Invites": [item]}).encode()).outcomes()
    assert outcome.result in {"NOT_<hidden>_HERE", "not_<hidden>_here", "<hidden>"}


def test_invites_in_the_words_of_the_contract_have_the_number_0():
    items = [doubles.item(1, 1), doubles.item(2, 9), doubles.item(3, 1)]
    answers = read_bulk("m", (1, 2, 3), json.dumps({"Invites": items}).encode()).answers
    assert (list(answers.numbers), len(answers.said)) == ([0, 1, 0], 2)


def test_equal_rejections_have_one_number_and_are_distinguished_by_code_and_name():
    items = [doubles.item(1), doubles.item(2), doubles.item(3, 9, Result="OTHER"), doubles.item(4, 16)]
    answer = read_bulk("m", (1, 2, 3, 4), json.dumps({"Invites": items}).encode())
    assert isinstance(answer.answers, Columns)
    assert list(answer.answers.numbers) == [1, 1, 2, 3]
    assert answer.answers.said[0] == SUCCESS
    told = [(outcome.result_code, outcome.result) for outcome in answer.outcomes()]
    assert told[0] == told[1] != told[2]
    assert (told[2], told[3][0]) == ((9, "OTHER"), 16)
    assert answer.answers.tally() == {("rejected", 9): 3, ("rejected", 16): 1}


@pytest.mark.parametrize(("names", "is_fast"), [(255, True), (256, False)])
def test_a_response_that_says_too_many_different_things_is_read_with_care(names, is_fast):
    ids = tuple(range(1, names + 1))
    items = [doubles.item(id_, 9, Result=f"NAME_{id_}") for id_ in ids]
    answer = read_bulk("m", ids, json.dumps({"Invites": items}).encode())
    assert isinstance(answer.answers, Columns) is is_fast
    assert [outcome.result for outcome in answer.outcomes()] == [f"NAME_{id_}" for id_ in ids]


def test_items_that_had_to_be_matched_are_counted_too():
    items = [doubles.item(6, 1), doubles.item(5), doubles.item(8, 1)]
    reply = read_bulk("m", (5, 6, 7), json.dumps({"Invites": items}).encode())
    assert {outcome.member_code for outcome in (*reply.outcomes(), *reply.unrequested)} == {"m"}
    answers = reply.answers
    assert answers.tally() == {("rejected", 9): 1, ("invited", 1): 1, ("unknown", None): 1}
    assert [type(error) for error in answers.errors] == [DecodeError]


def test_two_equal_items_count_once():
    for times in (2, 3):
        outcome = one(*[doubles.item(5, 1)] * times)
        assert (outcome.status, outcome.anomaly) == ("invited", "answered twice, with equal items")


def test_two_equal_items_keep_what_is_odd_about_them():
    outcome = one(*[doubles.item(5, 1, Invite=doubles.invite(6))] * 2)
    assert outcome.status == "invited"
    assert outcome.anomaly == "the invite names quota 6; answered twice, with equal items"


@pytest.mark.parametrize(
    "pair",
    [
        (doubles.item(5, 1), doubles.item(5, 9)),
        (doubles.item(5, 1), doubles.item(5, 1, Invite=doubles.invite(5, URL="https://other.example"))),
        (doubles.item(5, 1, Invite=None), doubles.item(5, 1, Invite=None)),
    ],
)
def test_two_different_items_for_an_id_make_it_unknown(pair):
    for items in (pair, pair[::-1]):
        outcome = one(*items)
        assert (outcome.status, outcome.invite) == ("unknown", None)
        assert outcome.anomaly == "expected one item for this quota ID, found several that differ"
        assert outcome.error.path == "$.Invites"


_items = st.builds(
    doubles.item,
    st.integers(1, 8),
    st.sampled_from([1, 9, 10, None, "1"]),
) | st.sampled_from([None, {}, [], {"QuotaID": 3, "ResultCode": 1, "Invite": {}}])


@given(st.lists(st.integers(1, 6), min_size=1, unique=True), st.lists(_items, max_size=12))
def test_every_requested_id_has_one_outcome_whatever_the_response(asked, items):
    answer = reconcile("m", asked, items)
    assert list(answer.quota_ids) == asked
    for quota_id, outcome in zip(asked, answer.outcomes(), strict=True):
        assert outcome.quota_id == quota_id
        assert (outcome.status == "invited") == (outcome.invite is not None)
        assert (outcome.status == "unknown") == (outcome.error is not None)
    assert not {outcome.quota_id for outcome in answer.unrequested} & set(asked)


@pytest.mark.parametrize(
    ("body", "path", "rule"),
    [
        (b"[]", "$", "expected an object with Invites"),
        (b"null", "$", "expected an object with Invites"),
        (b"{}", "$.Invites", "expected an array of results"),
        (b'{"Invites": null}', "$.Invites", "expected an array of results"),
        (b'{"Invites": {}}', "$.Invites", "expected an array of results"),
        (b"", "$", "expected JSON, found an empty body"),
    ],
)
def test_a_body_without_a_list_of_items_is_unreadable(body, path, rule):
    with pytest.raises(DecodeError) as caught:
        read_bulk("m", [1], body)
    assert (caught.value.path, caught.value.rule) == (path, rule)


@pytest.mark.parametrize(
    ("item", "path", "rule"),
    [
        (doubles.item(5, None), "ResultCode", "expected a whole number"),
        (doubles.item(5, ResultCode="9"), "ResultCode", "expected a whole number"),
        (doubles.item(5, 1, Invite="yes"), "Invite", "expected an object, found text"),
        (doubles.item(5, 1, Invite=doubles.invite(5, URL=None)), "Invite.URL", "expected text, found null"),
        (doubles.item(5, 9, Invite=doubles.invite(5)), "Invite", "expected null beside result code 9"),
        (doubles.item(5, 1, Invite=None), "Invite", "expected an invite beside result code 1"),
        (
            doubles.item(5, 1, Invite=doubles.invite(5, URL=7)),
            "Invite.URL",
            "expected text, found a whole number",
        ),
    ],
)
def test_an_item_that_contradicts_itself_makes_its_id_unknown_and_says_why(item, path, rule):
    (outcome,) = read_bulk("m", (5,), json.dumps({"Invites": [item]}).encode()).outcomes()
    assert (outcome.member_code, outcome.status, outcome.anomaly) == ("m", "unknown", rule)
    assert isinstance(outcome.error, DecodeError)
    assert (outcome.error.path, outcome.error.rule) == (f"$.Invites[0].{path}", rule)


@pytest.mark.parametrize("name", ["QuotaID", "QuotaId"])
def test_the_id_of_an_item_may_be_spelled_in_two_ways(name):
    item = {name: 5, "ResultCode": 9, "Result": "QUOTA_NOT_LIVE", "Invite": None}
    (outcome,) = read_bulk("m", (5,), json.dumps({"Invites": [item]}).encode()).outcomes()
    assert (outcome.member_code, outcome.quota_id, outcome.status) == ("m", 5, "rejected")


def test_the_links_of_a_reply_are_all_links_in_it():
    """Also those of unrequested IDs and of items that differ: each may belong to another member."""

    def link(quota_id: int, name: str) -> dict[str, object]:
        return doubles.item(quota_id, 1, Invite=doubles.invite(quota_id, URL=name))

    items = [link(6, "six"), link(5, "five"), link(8, "eight"), link(7, "seven"), link(7, "another seven")]
    reply = read_bulk("m", (5, 6, 7), json.dumps({"Invites": items}).encode())
    assert sorted(reply.links()) == ["another seven", "eight", "five", "seven", "six"]
    plain = read_bulk("m", (6, 5), json.dumps({"Invites": items[:2]}).encode())
    assert plain.links() == ["six", "five"]


@pytest.mark.parametrize("invite", [None, {"SurveyID": "7"}])  # the careful decoder reads the second one
@pytest.mark.parametrize(
    ("result", "shown"),
    [
        ("QUOTA_NOT_LIVE", "QUOTA_NOT_LIVE"),
        ("member m00007/ä is blocked", "member <hidden> is blocked"),
        ("BLOCKED_M00007/Ä", "BLOCKED_<hidden>"),
        ("m00007%2F%C3%A4", "<hidden>"),
    ],
)
def test_a_result_that_repeats_the_member_code_does_not_show_it(result, shown, invite):
    item = {"QuotaID": 1, "Invite": invite, "ResultCode": 9, "Result": result}
    answer = read_bulk("m00007/ä", (1,), json.dumps({"Invites": [item]}).encode())
    (outcome,) = answer.outcomes()
    assert outcome.result == shown
    assert "m00007" not in repr(outcome).lower()


# --- What is said of an item that is missing or contradicts itself


def test_an_id_without_an_item_is_unknown_for_its_member_and_says_why():
    reply = reconcile(
        "m1", (5, 6), [{"QuotaID": 5, "ResultCode": 9, "Result": "QUOTA_NOT_LIVE", "Invite": None}]
    )
    _, missing = reply.outcomes()
    assert (missing.member_code, missing.quota_id, missing.status) == ("m1", 6, "unknown")
    assert str(missing.error) == "bulk_invite: $.Invites: expected an item for this quota ID"
    assert missing.error.endpoint == "bulk_invite"
    assert reply.answers.errors == (missing.error,)


def test_the_shortcut_for_a_response_in_order_makes_no_outcomes(monkeypatch):
    """Nearly all responses are read so; the careful decoder is not asked."""
    monkeypatch.setattr(bulk_reply, "parse", None)
    item = b'{"QuotaID":%d,"ResultCode":9,"Result":"QUOTA_NOT_LIVE","Invite":null}'
    reply = read_bulk("m1", (5, 6), b'{"Invites":[%b,%b]}' % (item % 5, item % 6))
    assert isinstance(reply.answers, Columns)


def test_each_name_of_a_result_is_cleaned_once(monkeypatch):
    cleaned = []
    monkeypatch.setattr(bulk_reply, "_result_of", lambda _, name: cleaned.append(name) or name)
    item = b'{"QuotaID":%d,"ResultCode":9,"Result":"QUOTA_NOT_LIVE","Invite":null}'
    read_bulk("m1", (5, 6, 7), b'{"Invites":[%b]}' % b",".join(item % at for at in (5, 6, 7)))
    assert cleaned == ["QUOTA_NOT_LIVE"]


@pytest.mark.parametrize("secret", ['a"b\\c', "m 1/x&y"])
def test_a_private_text_is_hidden_in_its_json_form_too(secret):
    text = f"before {json.dumps(secret)} after"
    assert without((secret,), text) == 'before "<hidden>" after'


def test_every_field_of_an_invite_reaches_its_outcome():
    invite = (
        b'{"SurveyID":1,"WaveID":2,"QuotaID":5,"PartnerAmount":0.5,"URL":"https://s.example","LOI":7,"IR":8,'
        b'"MemberAmount":0.25}'
    )
    reply = read_bulk(
        "m1", (5,), b'{"Invites":[{"QuotaID":5,"ResultCode":1,"Result":"SUCCESS","Invite":%b}]}' % invite
    )
    (outcome,) = reply.outcomes()
    assert (outcome.status, outcome.error, outcome.anomaly) == ("invited", None, None)
    assert outcome.invite == Invite(1, 2, 5, 0.5, "https://s.example", 7, 8, 0.25)


# --- The words of a refusal


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (500, b"", "the service answered 500"),
        (418, b"{}", "the service answered 418"),
        (503, b'{"Result": "BUSY_NOW", "ResultCode": 9}', "the service answered 503 9 BUSY_NOW"),
        (
            400,
            b'{"Result": "the member is blocked", "ResultCode": 9}',
            "the service answered 400 9 QUOTA_NOT_LIVE",
        ),
        (400, b'{"Result": "of no known code", "ResultCode": 777}', "the service answered 400 777"),
        (400, b'{"Result": "NO_CODE"}', "the service answered 400"),
        (400, b'{"ResultCode": 10}', "the service answered 400 10 NO_QUOTA_ID"),
        (400, b'{"ResultCode": 999, "Result": 5}', "the service answered 400 999"),
        (400, b'{"ResultCode": 0}', "the service answered 400 0"),
    ],
)
def test_a_refusal_says_what_the_service_said_if_that_looks_like_a_name(status, body, message):
    error = refusal(Reply(status, body))
    assert error.args == (message,)


def test_a_refusal_in_the_body_of_a_200_keeps_the_name_of_its_result():
    error = disguised_refusal(Reply(200, b'{"Result": "MEMBER_BLOCKED", "ResultCode": 13}'), private=())
    assert (error.result, error.result_code) == ("MEMBER_BLOCKED", 13)


def test_an_invite_for_another_quota_is_refused_by_its_path():
    body = json.dumps(doubles.invite(6)).encode()
    with pytest.raises(DecodeError) as caught:
        read_invite(5, body)
    assert (caught.value.path, caught.value.rule) == (
        "$.QuotaID",
        "expected the quota of the request, found another: this is not the response to it",
    )
