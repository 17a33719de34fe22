"""Inputs that matching accepts and refuses, and its exports."""

from __future__ import annotations

import inspect
import pickle

import pytest
from matching_kit import (
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
    matching,
)
from sampling_async.matching import (
    MatchPolicy,
    Member,
    QuestionKinds,
    QuotaIndex,
)


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


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        ({AGE: 2006352}, "an age must be in years, from 0 to 150, not 2006352"),
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
    with pytest.raises(InvalidRequestError, match="ends before"):
        QuestionKinds.default().with_age(AGE, {1: (30, 20)})
    with pytest.raises(InvalidRequestError, match="not from int"):
        QuotaIndex([1])
    with pytest.raises(KeyError):
        many().explain({}, 99999)


def test_records_of_matching_can_be_pickled():
    reason = many().explain({OTHER: 1}, 52)
    for each in (MatchPolicy(missing="no"), KINDS, reason, *many().diagnostics):
        assert pickle.loads(pickle.dumps(each)) == each


def test_every_export_is_documented():
    assert matching.__all__ == sorted(matching.__all__)
    for name in matching.__all__:
        thing = getattr(matching, name)
        if not isinstance(thing, type):
            continue  # an alias or a function, documented below or in it
        assert inspect.getdoc(thing), name
        for attribute, member in vars(thing).items():
            if not attribute.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
                assert inspect.getdoc(member), f"{name}.{attribute}"
