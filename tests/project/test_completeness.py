"""Lists that must grow together: a test fails for what is new in one of them only, and says where to go."""

from __future__ import annotations

import json
from functools import reduce
from typing import Any, get_args

import attrs

from sampling_async import ResultCode, Survey, from_json, notifications
from sampling_async._bulk.invites import _NOT_OF_A_QUOTA
from sampling_async._watch.changes import applied, differences
from sampling_async.campaign import LESSONS
from sampling_async.notifications import Kind
from sampling_async.notifications._records import Notification
from sampling_async.notifications._understanding import _READERS
from sampling_async.simulator import Fault, read_faults
from sampling_async.simulator._outbox import NotificationKind

SURVEY = {
    "SurveyID": 1,
    "WaveID": 2,
    "LOI": 10,
    "IR": 50,
    "StudyTypeID": 1,
    "ScheduledCompletionDate": "2026-11-26T00:00:00Z",
    "DeviceTypeIDs": [1],
    "IsSurveyRecontact": False,
    "CompletesRequired": 9,
    "EstimatedCompletesRemaining": 8,
    "Price": {"CurrencyID": 1, "Amount": 1.5},
    "SurveyName": "a",
    "SurveyWaveExclusions": [{"SurveyID": 3, "WaveID": 4, "ParticipationStatusIDs": [9]}],
    "Quotas": [
        {
            "QuotaID": 5,
            "CompletesRequired": 7,
            "EstimatedCompletesRemaining": 6,
            "Layers": [
                {
                    "LayerID": 6,
                    "SubQuotas": [
                        {
                            "SubQuotaID": 7,
                            "CurrentCompletes": 3,
                            "MaxTargetCompletes": 4,
                            "QuestionsAndAnswers": [{"QuestionID": 8, "AnswerIDs": [9], "AnswerValues": ["x"]}],
                        }
                    ],
                }
            ],
        }
    ],
}
"""A survey with a value in every field."""


def others(record: Any) -> list[tuple[str, Any]]:
    """Return copies of a record, each with another value in one field, and the names of these fields."""
    found: list[tuple[str, Any]] = []
    for field in attrs.fields(type(record)):
        value = getattr(record, field.name)
        path = f"{type(record).__name__}.{field.name}"
        if isinstance(value, tuple) and value and attrs.has(type(value[0])):
            changed = [(deeper, (each,)) for deeper, each in others(value[0])]
        elif attrs.has(type(value)):
            changed = others(value)
        else:
            changed = [(path, another(value))]
        found += [(deeper, attrs.evolve(record, **{field.name: each})) for deeper, each in changed]
    return found


def another(value: Any) -> Any:
    """Return another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return (*value, *value)
    if isinstance(value, str):
        return value + "!"
    return value + 1 if isinstance(value, int | float) else value.replace(year=value.year + 1)


def test_a_change_of_any_field_of_a_survey_is_in_the_change_feed():
    before = from_json(Survey, json.dumps(SURVEY))
    assert not [field for field, value in attrs.asdict(before).items() if value in (None, (), "")]
    for path, after in others(before):
        if path in {"Survey.survey_id", "Survey.wave_id"}:  # the key: with another one it is another survey
            continue
        feed = list(differences((1, 2), before, after))
        assert reduce(applied, feed, before) == after, f"{path} needs a kind of change in _watch/changes.py"


OF_A_QUOTA = {
    *(1, 5, 6, 8, 9, 10, 15, 16, 17, 21, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 38),
    *(41, 42, 43, 45, 46, 47),
}
"""Result codes about one quota or one pair: when a chunk is refused with one, its other IDs may succeed."""


def test_each_result_code_is_decided_about():
    codes = {code for name, code in vars(ResultCode).items() if name.isupper()}
    undecided = codes - OF_A_QUOTA - _NOT_OF_A_QUOTA
    assert not undecided, "_NOT_OF_A_QUOTA of _bulk/invites.py, or OF_A_QUOTA here"
    assert not OF_A_QUOTA & _NOT_OF_A_QUOTA
    assert codes - {ResultCode.SUCCESS} == set(LESSONS), "LESSONS of _protocol/lessons.py"


def test_each_kind_of_notification_is_read_and_posted():
    assert set(_READERS) == set(Kind), "a reader in notifications/_understanding.py"
    assert set(get_args(NotificationKind)) == set(map(str, Kind)), "NotificationKind of simulator/_outbox.py"


def test_each_notification_is_exported_and_those_about_members_are_erased():
    records = get_args(Notification)
    assert {each.__name__ for each in records} <= set(notifications.__all__), "notifications/__init__.py"
    with_code = {each.__name__ for each in records if "member_code" in {of.name for of in attrs.fields(each)}}
    erased = {"Completion", "Terminate", "Reconciliation", "InviteNotification"}
    assert with_code == erased, "_erased of notifications/_erasing.py finds their facts; then name it here"


def test_each_fault_can_be_read_from_a_file():
    arguments = {
        "body": {"Content": "x"},
        "delay": {"Seconds": 1},
        "refusal": {"ResultCode": 39},
        "status": {"Status": 503},
    }
    constructors = [name for name, made in vars(Fault).items() if isinstance(made, classmethod)]
    documents = [{"Fault": name, **arguments.get(name, {})} for name in constructors]
    assert len(read_faults(json.dumps(documents))) == len(constructors)
