"""Inputs that matching accepts and refuses, and its exports."""

from __future__ import annotations

import pickle
from functools import partial

import numpy as np
import pytest
from panel_kit import (
    AGE,
    CERTAIN,
    KINDS,
    OTHER,
    POSTAL,
    A,
    many,
    quota,
    row,
    sub_quota,
    survey,
)

from sampling_async import (
    InvalidRequestError,
)
from sampling_async.matching import (
    AGE_ANSWERS,
    MatchPolicy,
    Member,
    Participation,
    QuestionKinds,
    QuotaIndex,
)
from sampling_async.simulator import AGE_BANDS


def test_an_answer_from_an_iterator_is_read_once():
    old = [survey(quota([sub_quota(A)], quota_id=at), survey_id=at) for at in range(1, 40)]
    index = QuotaIndex(old).updated([*old, survey(quota([sub_quota(A)], quota_id=99), survey_id=99)])
    assert len(index._parts) == 2
    assert len(index.match({OTHER: (one for one in (1, 5))}).certain) == 40
    assert index.explain({OTHER: iter([1])}, 99).truth == CERTAIN

    class Once:
        def __init__(self) -> None:
            self._answers = iter([1])

        def __iter__(self):
            return self._answers

    assert len(index.match({OTHER: Once()}).certain) == 40
    assert index.explain({OTHER: Once()}, 99).truth == CERTAIN


@pytest.mark.parametrize("listed", [["\uff11\uff10\uff11"], ["\uff11\uff10\uff11", "20 2"]])
def test_postal_codes_in_digits_of_another_width_are_read(listed):
    index = QuotaIndex([survey(quota([sub_quota(row(POSTAL, *listed))], quota_id=1))], kinds=KINDS)
    assert list(index.match({POSTAL: "10115"}).certain) == [1]


def test_a_band_without_a_lower_end_takes_no_longer_than_others():
    kinds = QuestionKinds.default().with_age(AGE, {7: (-(2**31), 24)})
    index = QuotaIndex([survey(quota([sub_quota(row(AGE, 7))], quota_id=1))], kinds=kinds)
    assert len(index.match({AGE: 20}).certain) == 1


@pytest.mark.parametrize("code", [5, ["a"], b"m"])
def test_a_member_code_that_is_no_text_is_refused(code):
    index = QuotaIndex([survey(quota(quota_id=1))])
    with pytest.raises(InvalidRequestError, match="a member code must be a str"):
        index.match({}, member_code=code)


@pytest.mark.parametrize("wrong", [("55", 1, 9), (55, "1", 9), (55, 1, None), ([55], 1, 9)])
def test_a_participation_has_ids(wrong):
    with pytest.raises(InvalidRequestError, match="must be a whole number"):
        Participation(*wrong)


async def test_an_index_is_made_of_an_inventory():
    async def get_quotas() -> None: ...

    waiting = get_quotas()
    with pytest.raises(InvalidRequestError, match="an index is made from"):
        QuotaIndex(waiting)
    await waiting


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        ({AGE: 2006352}, "an age must be a whole number of years from 0 to 150, not 2006352"),
        ({AGE: -1}, "an age"),
        ({AGE: True}, "an age"),
        ({AGE: "old"}, "an age"),
        ({AGE: 30.5}, "an age"),
        ({POSTAL: 1001}, "a postal code must be a text"),
        ({POSTAL: ["1001"]}, "a postal code must be a text"),
        ({OTHER: "many"}, "answer IDs"),
        ({OTHER: 1.5}, "answer IDs"),
        ({OTHER: True}, "answer IDs"),
        ({OTHER: [1, None]}, "answer IDs"),
        ({OTHER: {1: 2}}, "answer IDs"),
        ({OTHER: b"1"}, "answer IDs"),
        ({OTHER: "9" * 5000}, "answer IDs"),
        ({AGE: "9" * 5000}, "an age"),
    ],
)
def test_an_invalid_answer_is_refused_with_its_question(profile, words):
    asked = quota([sub_quota(row(AGE, "18-24"), row(POSTAL, "1"), A)])
    index = QuotaIndex([survey(asked)])
    index.match({OTHER: 1, AGE: 1, POSTAL: "1"})  # from the cache
    ((question_id, _),) = profile.items()
    with pytest.raises(InvalidRequestError, match=rf"profile\[{question_id}\]: .*{words}"):
        index.match(profile)
    with pytest.raises(InvalidRequestError, match=words):
        index.explain(profile, 7)


def test_options_of_matching_are_checked():
    with pytest.raises(
        InvalidRequestError, match="missing must be one of 'routable', 'possible', 'no', not 'maybe'"
    ):
        MatchPolicy(missing="maybe")
    for nothing in (None, [], "x"):
        with pytest.raises(InvalidRequestError, match="a profile must be a mapping"):
            many().match(nothing)
    with pytest.raises(InvalidRequestError, match="question IDs must be whole numbers, not texts"):
        many().match({"1009999": 1})
    with pytest.raises(InvalidRequestError, match="device_type must be a whole number"):
        many().match({}, device_type="1")
    for wrong, rule in (
        (["2"], "each of exclude_surveys must be a whole number, not '2'"),
        ("2", "exclude_surveys must be a list, a set or a tuple, not '2'"),
        (2, "exclude_surveys must be a list, a set or a tuple, not 2"),
    ):
        with pytest.raises(InvalidRequestError, match=rule):
            many().match(Member("m", {}, exclude_surveys=wrong))
    with pytest.raises(InvalidRequestError, match="each of participations is a Participation, not a tuple"):
        many().match({}, participations=[(1, 1, 9)])
    for codes in ([1, 2], ["1", None]):
        with pytest.raises(InvalidRequestError, match="member codes of quota 7 must be texts"):
            many().recontact(7, codes)
    with pytest.raises(InvalidRequestError, match="its first and its last year"):
        QuestionKinds.default().with_age(AGE, {1: (30, 20)})
    with pytest.raises(InvalidRequestError, match="member_codes must be a list or a set, not NoneType"):
        many().recontact(7, None)
    with pytest.raises(InvalidRequestError, match="quota_id must be a whole number, not '7'"):
        many().close("7")
    with pytest.raises(InvalidRequestError, match="not from int"):
        QuotaIndex([1])
    with pytest.raises(KeyError):
        many().explain({}, 99999)


def test_records_of_matching_can_be_pickled():
    reason = many().explain({OTHER: 1}, 52)
    for each in (MatchPolicy(missing="no"), KINDS, reason, *many().diagnostics):
        assert pickle.loads(pickle.dumps(each)) == each


SAME_CODE = [
    "01001",
    " 01001 ",
    '="01001"',
    '"01001"',
    "'01001",
    "\u201801001\u2019",
    "01\u2010001",
    "01\u2011001",
    "01\u2212001",
    "01\u2013001",
    "01\ufe63001",
    "01\uff0d001",
    "01\u00ad001",
    "\uff10\uff11\uff10\uff10\uff11",  # full-width digits
    "\u0660\u0661\u0660\u0660\u0661",  # Arabic digits
    "01\u00a0001",
    "01\u2009001",
    "\u3000\uff10\uff11001",
    "\ufeff01\u200b0\u200d0\u20601",
    "01\t001\n",
]


@pytest.mark.parametrize("code", SAME_CODE, ids=ascii)
def test_a_postal_code_is_found_however_it_was_typed(code):
    kinds = QuestionKinds.default()
    assert kinds.known(1001042, code) == "01001"


def test_letters_of_postal_codes_count_without_case_and_what_is_ambiguous_stays():
    known = partial(QuestionKinds.default().known, 1001042)
    assert known("SW1A\u00a01AA") == known('="sw1a-1aa"') == "sw1a1aa"
    assert [known(each) for each in ("1001.0", "#N/A", "1001")] == ["1001.0", "#n/a", "1001"]
    assert known("'") is known("\u200b") is None


def test_the_published_answers_of_age_are_the_default_and_can_be_replaced():
    kinds = QuestionKinds.default()
    assert kinds.age == {1001538: AGE_ANSWERS}
    assert list(AGE_ANSWERS.items())[:3] == [(2006351, (13, 17)), (2006352, (18, 24)), (2006353, (25, 29))]
    assert (len(AGE_ANSWERS), AGE_ANSWERS[2006361]) == (11, (65, 99))
    assert kinds.with_age(1001538, {7: (18, 20)}).age == {1001538: {7: (18, 20)}}
    assert kinds.with_age(1001538, {7: list(np.array([18, 20]))}).age == {1001538: {7: (18, 20)}}
    assert AGE_BANDS == AGE_ANSWERS  # the simulator's
    assert AGE_ANSWERS is not kinds.age[1001538]


def test_numbers_and_arrays_of_numpy_are_answers_also_without_a_dimension():
    known = partial(QuestionKinds.default().known, OTHER)
    assert known(np.int64(5)) == known(np.array(5)) == known(np.array([5])) == known([np.int64(5)]) == {5}
