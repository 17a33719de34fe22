"""Bodies of Get Quotas as they are on the wire."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st


def condition(**changes: Any) -> dict[str, Any]:
    return {"QuestionID": 1001538, "AnswerIDs": [], "AnswerValues": ["18-34"], "IsRoutable": False} | changes


def sub_quota(*conditions: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "SubQuotaID": 31,
        "CurrentCompletes": 1,
        "MaxTargetCompletes": 5,
        "QuestionsAndAnswers": list(conditions or (condition(),)),
    } | changes


def survey(**changes: Any) -> dict[str, Any]:
    return {
        "SurveyID": 11,
        "SurveyName": "Coffee",
        "SurveyTopic": "a field nobody documented",
        "WaveID": 12,
        "LOI": 15,
        "IR": 0,
        "StudyTypeID": 3,
        "ScheduledCompletionDate": "2020-01-31T01:21:08",
        "Price": {"Amount": 1.7, "CurrencyID": 1},
        "DeviceTypeIDs": [1, 2],
        "IsSurveyRecontact": False,
        "CompletesRequired": 100,
        "EstimatedCompletesRemaining": 50,
        "Quotas": [
            {
                "QuotaID": 21,
                "CompletesRequired": 100,
                "EstimatedCompletesRemaining": 50,
                "Layers": [{"LayerID": 25, "SubQuotas": [sub_quota()]}],
            }
        ],
        "IsTqsSurvey": True,
        "SurveyWaveExclusions": [{"SurveyID": 5, "WaveID": 0, "ParticipationStatusIDs": [1, 9]}],
    } | changes


def quotas(*surveys: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "Surveys": list(surveys or (survey(),)),
        "CountryID": 9,
        "CacheExpires": "2020-01-31T21:19:30.3616306Z",
    } | changes


_ids = st.integers(1, 2**63 - 1)
_conditions = st.builds(
    condition,
    QuestionID=_ids,
    AnswerIDs=st.lists(_ids, max_size=3) | st.none(),
    AnswerValues=st.lists(st.text(), max_size=3) | st.text() | st.none(),
    IsRoutable=st.booleans(),
)
_sub_quotas = st.lists(_conditions, max_size=3).map(lambda rows: sub_quota(QuestionsAndAnswers=rows))
_quotas = st.builds(
    lambda quota_id, layers: {
        "QuotaID": quota_id,
        "CompletesRequired": 5,
        "EstimatedCompletesRemaining": 5,
        "Layers": [{"LayerID": 1, "SubQuotas": layer} for layer in layers],
    },
    _ids,
    st.lists(st.lists(_sub_quotas, max_size=2), max_size=2),
)
_surveys = st.builds(
    survey,
    SurveyID=_ids,
    SurveyName=st.text(),
    Price=st.builds(dict, Amount=st.floats(0, 1e6) | st.integers(0, 100), CurrencyID=_ids),
    Quotas=st.lists(_quotas, max_size=2),
)
documents = st.lists(_surveys, max_size=2).map(lambda surveys: quotas(Surveys=surveys))
"""Valid bodies of Get Quotas, of many shapes."""
