"""The protocol without I/O."""

from __future__ import annotations

from collections import Counter
from urllib.parse import unquote

import doubles
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sampling_async import (
    InvalidRequestError,
    InviteRequest,
    PagingError,
    RecontactMembers,
)
from sampling_async._calls.recontact import Cursor
from sampling_async._protocol import requests as protocol
from sampling_async._protocol.requests import Chunk, cut

PANEL = doubles.PANEL
SAMPLES = f"/IPExternalSamplingService/ExternalSample/{PANEL}"

member_codes = st.text(min_size=1).filter(
    lambda text: text not in {".", ".."} and all(c.isprintable() for c in text)
)


# --- Requests


@pytest.mark.parametrize(("flag", "wire"), [(True, "true"), (False, "false")])
def test_get_quotas(flag, wire):
    call = protocol.get_quotas(PANEL, include_routables=flag)
    assert (call.method, call.target, call.body) == ("GET", f"{SAMPLES}/Quotas?includeRoutables={wire}", None)


def test_bulk_invite():
    call = protocol.bulk_invite(PANEL, "m/1", [3, 5])
    assert (call.method, call.target) == ("POST", f"{SAMPLES}/m%2F1/Invites")
    assert (call.body, call.quota_ids) == (b'{"QuotaIDs":[3,5]}', 2)


def test_generate_invite():
    call = protocol.generate_invite(PANEL, "m 1", 5)
    assert (call.method, call.target) == ("GET", f"{SAMPLES}/m%201/Invite/5")


def test_get_settings():
    call = protocol.get_settings(PANEL)
    assert (call.method, call.target) == (
        "GET",
        f"/IntegratedPanelService/api/Settings?partnerGUID={PANEL}",
    )


@pytest.mark.parametrize(
    ("max_results", "after", "query"),
    [
        (None, None, ""),
        (50, None, "?maxResults=50"),
        (None, "m&1", "?lastMemberCodeReceived=m%261"),
        (50, "m", "?maxResults=50&lastMemberCodeReceived=m"),
    ],
)
def test_recontact_members(max_results, after, query):
    call = protocol.recontact_members(PANEL, 5, max_results=max_results, after=after)
    page = call.read(b'{"MaxResults":2,"HasAdditionalMembers":false,"MemberCodes":["m1"]}')
    assert page.member_codes == ("m1",)
    assert (call.method, call.target) == ("GET", f"{SAMPLES}/Recontact/5/MemberCodes{query}")


def test_no_repr_of_a_call_shows_the_member():
    assert "member-1" not in repr(protocol.bulk_invite(PANEL, "member-1", [1]))
    assert "member-1" not in repr(InviteRequest("member-1", [1]))


@given(member_codes)
def test_any_member_code_is_one_path_segment(code):
    target = protocol.generate_invite(PANEL, code, 5).target
    segments = target.split("/")
    assert unquote(segments[4]) == protocol.member_code_of(code)
    assert (len(segments), target.isascii(), "?" in target, "#" in target) == (7, True, False, False)


_DROPPED = "a member code cannot be empty, '.' or '..': a URL path would drop it"
_CONTROL = "a member code cannot hold control characters or lone surrogates"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        *((code, _DROPPED) for code in ("", ".", "..")),
        *((code, _CONTROL) for code in ("a\nb", "\x00", "\x7f", "\x85", "\ud800", "\udfff")),
        (None, "a member code must be a str, not NoneType"),
        (7, "a member code must be a str, not int"),
        (b"m", "a member code must be a str, not bytes"),
    ],
)
def test_a_member_code_that_cannot_be_a_path_segment_is_refused(code, message):
    with pytest.raises(InvalidRequestError) as caught:
        protocol.member_code_of(code)
    assert caught.value.delivery == "not_sent"
    assert caught.value.args == (message,)


def test_a_character_that_is_not_printed_may_be_in_a_member_code():
    assert protocol.member_code_of("a\u200bb") == "a\u200bb"


@pytest.mark.parametrize("place", range(10))
def test_an_invalid_quota_id_is_refused(place):
    value, shown = [
        (0, "0"),
        (-1, "-1"),
        (True, "True"),
        (1.0, "1.0"),
        ("7", "a str"),
        (None, "a NoneType"),
        (2**63, "9223372036854775808"),
        (10**60, "1" + "0" * 39),
        (10**5000, "a larger one"),
        ([1], "a list"),
    ][place]
    message = f"a quota ID must be a whole number from 1 to 2**63 - 1, not {shown}; take it from get_quotas()"
    with pytest.raises(InvalidRequestError) as caught:
        protocol.quota_id_of(value)
    assert caught.value.args == (message,)
    with pytest.raises(InvalidRequestError) as caught:
        InviteRequest("m", [5, value])
    assert caught.value.args == (message,)


def test_the_largest_quota_id_is_valid():
    assert protocol.quota_id_of(2**63 - 1) == 2**63 - 1
    assert InviteRequest("m", (2**63 - 1, 1)).quota_ids == (2**63 - 1, 1)


@pytest.mark.parametrize("wrong", [7, b"12", bytearray(b"12"), memoryview(b"12")])
def test_quota_ids_that_are_no_iterable_are_refused(wrong):
    with pytest.raises(InvalidRequestError) as caught:
        InviteRequest("m", wrong)
    assert caught.value.args == (
        "quota_ids must be an iterable of quota IDs; only stream_bulk_invite takes an async iterable",
    )


def test_a_bulk_invite_has_1_to_100_ids():
    for number in (0, 101):
        with pytest.raises(AssertionError):
            protocol.bulk_invite(PANEL, "m", range(1, number + 1))
    assert b"100" in protocol.bulk_invite(PANEL, "m", tuple(range(1, 101))).body


def test_a_call_knows_the_texts_that_no_message_may_repeat():
    plain = PANEL.replace("-", "")
    assert protocol.bulk_invite(PANEL, "m/1", (5,)).private == (PANEL, plain, "m/1", "m%2F1")
    assert protocol.recontact_members(PANEL, 5, max_results=None, after="m/1").private == (
        PANEL,
        plain,
        "m/1",
        "m%2F1",
    )
    assert protocol.recontact_members(PANEL, 5, max_results=None, after=None).private == (PANEL, plain)


def test_any_object_with_an_index_is_a_quota_id():
    class Number:
        def __index__(self) -> int:
            return 7

    assert protocol.quota_id_of(Number()) == 7
    assert type(protocol.quota_id_of(Number())) is int


# --- Chunks


@given(st.lists(st.integers(1, 30), max_size=80), st.integers(1, 10))
def test_every_place_is_in_one_chunk_and_every_id_in_one_chunk(quota_ids, size):
    chunks = list(cut(Chunk.of("m", Counter(quota_ids)), size))
    sent = [quota_id for chunk in chunks for quota_id in chunk.quota_ids]
    places = [quota_id for chunk in chunks for quota_id in chunk.each_place()]
    assert sorted(places) == sorted(quota_ids)
    assert len(sent) == len(set(sent))
    assert all(len(chunk.quota_ids) == size for chunk in chunks[:-1])
    assert all(1 <= len(chunk.quota_ids) <= size for chunk in chunks)


def test_a_chunk_knows_what_was_given_more_than_once():
    chunk = Chunk.of("m", {1: 1, 2: 3}, asked_before=True)
    assert (chunk.quota_ids, dict(chunk.repeated), chunk.places) == ((1, 2), {2: 3}, 4)
    assert chunk.asked_before is chunk.part(0, 1).asked_before is True
    assert (dict(chunk.part(0, 1).repeated), dict(chunk.part(1, 2).repeated)) == ({}, {2: 3})
    plain = Chunk.of("m", {1: 1})
    assert plain.repeated == {}
    assert plain.asked_before is plain.part(0, 1).asked_before is False


# --- Paging


def page(*codes: str, more: bool) -> RecontactMembers:
    return RecontactMembers(len(codes), more, codes)


def test_the_cursor_is_the_last_code_received():
    cursor = Cursor()
    cursor.advance(page("a", "b", more=True))
    assert (cursor.after, cursor.done) == ("b", False)
    cursor.advance(page("c", more=False))
    assert (cursor.after, cursor.done) == ("c", True)


def test_an_empty_last_page_ends_the_list():
    cursor = Cursor("b")
    assert cursor.advance(page(more=False)).member_codes == ()
    assert (cursor.after, cursor.done) == ("b", True)


def test_a_first_code_that_repeats_the_cursor_is_dropped():
    cursor = Cursor("b")
    assert cursor.advance(page("b", "c", more=True)).member_codes == ("c",)


def test_codes_are_not_compared_by_order():
    cursor = Cursor("b")
    cursor.advance(page("B", more=True))
    cursor.advance(page("a", more=True))
    assert cursor.after == "a"


@pytest.mark.parametrize(
    ("after", "pages"),
    [
        (None, [page(more=True)]),
        ("a", [page("a", more=True)]),
        ("a", [page("x", "a", more=True)]),
        (None, [page("a", more=True), page("b", more=True), page("x", "a", more=True)]),
    ],
)
def test_a_list_that_does_not_advance_is_an_error_and_not_a_loop(after, pages):
    cursor = Cursor(after)
    for good in pages[:-1]:
        cursor.advance(good)
    before = cursor.after
    with pytest.raises(PagingError) as caught:
        cursor.advance(pages[-1])
    assert (caught.value.cursor, caught.value.delivery) == (before, "answered")


@given(st.lists(st.lists(st.sampled_from("abcdef"), max_size=3), min_size=1, max_size=30))
def test_a_reader_never_requests_the_same_cursor_twice(answers):
    cursor, asked = Cursor(), [None]
    try:
        for codes in answers:
            cursor.advance(page(*codes, more=True))
            asked.append(cursor.after)
    except PagingError:
        pass
    assert len(asked) == len(set(asked)) <= 7
