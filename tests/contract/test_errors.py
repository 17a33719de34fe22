"""The error tree."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

import sampling_async
from sampling_async import (
    BadRequestError,
    BulkInviteResult,
    DecodeError,
    IncompleteBulkError,
    InvalidRequestError,
    InviteOutcome,
    JournalError,
    PagingError,
    SamplingError,
    ServiceError,
    TransportError,
)

ERRORS = [
    error
    for name in sampling_async.__all__
    if isinstance(error := getattr(sampling_async, name), type) and issubclass(error, Exception)
]


@pytest.mark.parametrize("error_class", ERRORS)
def test_every_error_is_one_of_this_package_and_survives_pickling(error_class):
    error = error_class("words")
    error.attempts, error.elapsed, error.retry_after, error.endpoint = 2, 1.5, 3.0, "get_quotas"
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(error, SamplingError)
    assert (type(copy), str(copy), vars(copy)) == (error_class, str(error), vars(error))


def test_an_invalid_request_is_a_value_error():
    assert issubclass(InvalidRequestError, ValueError)


def test_an_error_names_its_endpoint():
    assert str(TransportError("cut", endpoint="bulk_invite")) == "bulk_invite: cut"
    assert str(TransportError("cut")) == "cut"
    assert str(DecodeError("$.a", "wrong", endpoint="get_quotas")) == "get_quotas: $.a: wrong"


def test_the_attributes_of_an_error_survive_pickling():
    error = BadRequestError("no", status=400, result="X", result_code=3, body_excerpt="{}")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.status, copy.result, copy.result_code, copy.body_excerpt) == (400, "X", 3, "{}")
    assert pickle.loads(pickle.dumps(PagingError("stuck", cursor="m1"))).cursor == "m1"


def test_a_cursor_is_not_in_the_text():
    assert "m1" not in repr(PagingError("stuck", cursor="m1"))


def test_an_incomplete_bulk_carries_its_result_through_pickling():
    result = BulkInviteResult([InviteOutcome("m", 1, "not_sent", error=TransportError("refused"))])
    with pytest.raises(IncompleteBulkError, match="1 of 1 quota IDs were not sent, and 0 have") as caught:
        result.raise_for_incomplete()
    assert str(caught.value) == (
        "bulk_invite: 1 of 1 quota IDs were not sent, and 0 have an unknown outcome; resendable() gives those "
        "that are safe to send again"
    )
    copy = pickle.loads(pickle.dumps(caught.value))
    assert copy.bulk_result[0].quota_id == 1
    assert str(copy) == str(caught.value)


def test_an_error_that_is_made_without_facts_claims_none():
    error = SamplingError()
    assert (str(error), error.endpoint, error.attempts, error.elapsed) == ("", None, 0, 0.0)
    assert (error.delivery, error.retry_after, error.permanent) == ("not_sent", None, False)
    refused = BadRequestError()
    assert (refused.delivery, refused.status, refused.result) == ("answered", 0, None)
    assert (refused.result_code, refused.body_excerpt) == (None, "")
    unread = DecodeError()
    assert (str(unread), unread.delivery, unread.permanent) == ("$: unreadable", "unknown", False)
    assert DecodeError("$", "too long", permanent=True).permanent
    stuck = PagingError()
    assert (stuck.cursor, stuck.member_codes, stuck.delivery) == (None, (), "answered")
    assert str(stuck) == "recontact_members: "


def test_the_error_of_a_journal_names_its_file():
    error = JournalError("is damaged", path=Path("night.journal"))
    assert str(error) == "the journal night.journal is damaged"
    assert (error.endpoint, error.path, error.delivery) == ("bulk_invite", Path("night.journal"), "not_sent")


def test_an_error_without_words_has_none_of_its_own():
    assert (SamplingError().args, ServiceError().args) == (("",), ("",))
    assert str(JournalError(path=Path("night.db"))) == "the journal night.db "
    assert SamplingError("refused").timing is None
