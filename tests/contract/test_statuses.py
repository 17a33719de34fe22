"""The table of statuses, by what each decision reads from it."""

from __future__ import annotations

import pytest

from sampling_async._contract.exchange import Meaning, Reply, statuses


@pytest.mark.parametrize(
    ("meaning", "expected"),
    [
        (Meaning.OWN, {200, 201, 203, 304, 400}),
        (Meaning.PASSING, {408, 425, 429, 500, 502, 503, 504}),
        (Meaning.UNPROCESSED, {408, 425, 429}),
        (Meaning.LOAD, {429, 503}),
        (Meaning.AWAY, {502, 503, 504}),
        (Meaning.LOAD | Meaning.AWAY, {429, 502, 503, 504}),
        (Meaning.ELSEWHERE, {301, 302, 303, 307, 308}),
    ],
    ids=lambda value: str(value) if isinstance(value, Meaning) else "",  # a set has no order
)
def test_each_meaning_has_its_statuses(meaning, expected):
    assert statuses(meaning) == expected


@pytest.mark.parametrize("body", [b"", b"[]", b'{"Result":"<a>"}', b"null", b"<a>", b" " * 1024 + b"<"])
def test_a_page_begins_with_a_tag(body):
    assert Reply(200, body).is_page == (body == b"<a>")
