"""The records."""

from __future__ import annotations

import traceback

import attrs
import pytest

from sampling_async import (
    InvalidRequestError,
    Invite,
    InviteOutcome,
    InviteRequest,
    Journal,
    Price,
    QuotaWatch,
    RecontactMembers,
    ResultCode,
    SamplingClient,
    Setting,
)
from sampling_async.notifications import Inbox, SqliteStore
from sampling_async.simulator import Simulator


def test_records_are_frozen_and_slotted():
    price = Price(1.0, 2)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        price.amount = 2.0
    assert not hasattr(price, "__dict__")


def test_no_repr_identifies_a_member():
    invite = Invite(1, 2, 3, 0.5, "https://s.example/?mc=member-1", 5, 6)
    page = RecontactMembers(2, has_additional_members=False, member_codes=("member-1", "member-2"))
    assert "member-1" not in repr(invite) + repr(page)
    assert "<2 hidden>" in repr(page)


@pytest.mark.parametrize("name", ["Reference Data API Auth Key", "reference data api  auth key"])
def test_the_reference_data_key_is_hidden(name):
    assert "s3cret" not in repr(Setting(name, "d", "s3cret"))
    assert "value=None" in repr(Setting(name, "d", None))
    assert "'v'" in repr(Setting("Panel GUID", "d", "v"))


def test_result_codes_are_open():
    assert ResultCode.QUOTA_NOT_LIVE == 9
    assert ResultCode.name_of(9) == "QUOTA_NOT_LIVE"
    assert ResultCode.name_of(999) is None


def test_what_is_hidden_is_said_to_be_hidden():
    assert "member_code=<hidden>" in repr(InviteOutcome("m-1", 7, "not_sent"))


def test_an_object_that_could_not_be_made_has_a_repr():
    # Reports of the error that was raised in `__init__` print it, and on Python 3.11 were lost with it.
    for kind in (SamplingClient, InviteRequest, Journal, QuotaWatch, Simulator, SqliteStore, Inbox):
        assert repr(object.__new__(kind)) == f"<{kind.__name__}: not made>"
    assert "m1" not in repr(InviteRequest("m1", [7]))
    with pytest.raises(InvalidRequestError) as caught:
        InviteRequest("", [7])
    assert traceback.TracebackException.from_exception(caught.value, capture_locals=True)
