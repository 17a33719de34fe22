"""The surveys of earlier inventories: which are found again, and what is remembered of them."""

from __future__ import annotations

import pytest

from sampling_async._json import fast
from sampling_async._json.fast import KnownSurveys

ONE, TWO, THREE = (b'{"SurveyID":%d,"Rest":"%b"}' % (number, b"x" * 10 * number) for number in (1, 2, 3))


class Survey:
    """In place of a survey: anything that can be referred to."""


@pytest.fixture
def surveys():
    return {text: Survey() for text in (ONE, TWO, THREE)}


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


def test_a_survey_that_is_found_again_tells_its_length_for_those_that_begin_alike(found):
    longer = ONE[:-2] + b'x"}'
    assert longer[:32] == ONE[:32]
    kept = Survey()
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
    monkeypatch.setattr(fast, "_FEWEST_REFERENCES", 4)
    kept, lasting = KnownSurveys(), [Survey() for _ in range(3)]
    for number, survey in enumerate(lasting):
        kept.add(b"%d" % number, survey)
    kept.add(b"gone", Survey())
    assert len(kept._surveys) == 4
    kept.add(b"new", lasting[0])  # the fifth: those that are gone are looked for
    assert len(kept._surveys) == 4
    assert kept._most == 6  # twice as many as were left
    for number in range(3):
        kept.add(b"gone %d" % number, Survey())
    assert len(kept._surveys) == 5
    assert kept.find(b"2") is lasting[2]


def test_so_many_lengths_are_remembered_and_no_more(monkeypatch):
    monkeypatch.setattr(fast, "_MOST_LENGTHS", 2)
    kept, survey = KnownSurveys(), Survey()
    for text in (ONE, TWO):
        kept.add(text, survey)
    assert len(kept._lengths) == 2
    kept.add(THREE, survey)
    assert len(kept._lengths) == 1
    assert kept.find(ONE) is survey  # only its length was forgotten


def test_without_a_hash_of_64_bits_texts_are_told_apart_by_sha_1():
    assert fast._sha1(b"a") == 0x86F7E437FAA5A7FCE15D1DDCB9EAEAEA377667B8
