"""Invites and outcomes: Structs that behave as the other records do."""

from __future__ import annotations

import copy
import gc
import io
import json
import operator
import pickle
from typing import Any

import attrs
import cattrs
import msgspec
import pytest
import rich.console
import rich.pretty

from sampling_async import Invite, InviteOutcome, SamplingError, Timing, from_json, to_json
from sampling_async._contract.timing import explain

LINK = "https://s.example/start?m=secret-link"
MEMBER = "secret-member"


def invite(**fields: Any) -> Invite:
    return msgspec.structs.replace(Invite(1, 2, 3, 1.5, LINK, 9, 30), **fields)


def outcome(**fields: Any) -> InviteOutcome:
    return msgspec.structs.replace(InviteOutcome(MEMBER, 3, "invited", invite()), **fields)


BOTH = [invite(), outcome()]


def test_the_reprs_hide_links_and_member_codes():
    of_invite = (
        "Invite(survey_id=1, wave_id=2, quota_id=3, partner_amount=1.5, url=<hidden>, loi=9, ir=30, "
        "member_amount=None)"
    )
    assert repr(invite()) == of_invite
    assert repr(outcome(result="SUCCESS", result_code=1)) == (
        f"InviteOutcome(member_code=<hidden>, quota_id=3, status='invited', invite={of_invite}, "
        "result_code=1, result='SUCCESS', error=None, anomaly=None, replayed=False)"
    )


@pytest.mark.parametrize("record", BOTH)
def test_rich_hides_them_as_well(record):
    paper = rich.console.Console(file=io.StringIO(), width=500)
    rich.pretty.pprint([record], console=paper, expand_all=True)
    assert "quota_id=3" in paper.file.getvalue()
    assert "secret" not in paper.file.getvalue() + f"{record!s} {record!r}"


@pytest.mark.parametrize("record", BOTH)
def test_they_are_frozen_and_equal_by_their_values(record):
    twin = copy.deepcopy(record)
    assert record == twin == copy.copy(record) == pickle.loads(pickle.dumps(record))
    assert operator.ne(record, twin) is False
    assert hash(record) == hash(twin)
    assert len({record, twin}) == 1
    for change in ({"quota_id": 4}, {"url": "x"} if isinstance(record, Invite) else {"member_code": "x"}):
        other = msgspec.structs.replace(record, **change)
        assert record != other
        assert len({record, other}) == 2
    assert record != attrs.astuple(record, recurse=False)
    assert record != object()
    with pytest.raises(AttributeError, match="immutable"):
        record.quota_id = 4
    with pytest.raises(AttributeError):
        record.more = 4


@pytest.mark.parametrize("cls", [Invite, InviteOutcome])
def test_attrs_sees_the_fields_in_the_order_of_the_constructor(cls):
    fields = attrs.fields(cls)
    assert attrs.has(cls)
    names = [field.name for field in fields]
    assert names == [field.name for field in msgspec.structs.fields(cls) if field.name != "timing"]
    assert [field.name for field in fields if not field.repr] == ["url" if cls is Invite else "member_code"]
    required = [field.name for field in fields if field.default is attrs.NOTHING]
    assert required == names[: len(required)] == [*cls.__match_args__[: len(required)]]
    assert {field.default for field in fields[len(required) :]} <= {None, False}


def test_attrs_and_cattrs_work_with_them():
    own = {**json.loads(json.dumps(attrs.asdict(invite()))), "member_amount": None}
    assert attrs.asdict(outcome())["invite"] == own == cattrs.unstructure(invite())
    assert cattrs.structure(own, Invite) == invite()
    assert attrs.evolve(invite(), loi=10) == invite(loi=10) == msgspec.structs.replace(invite(), loi=10)
    assert attrs.evolve(outcome(), status="unknown").status == "unknown"


def test_msgspec_writes_an_invite_as_the_contract_does():
    for each in (invite(), invite(member_amount=0.5)):
        assert json.loads(msgspec.json.encode(each)) == json.loads(to_json(each))


def test_the_timing_of_an_invite_is_beside_it():
    timed = from_json(Invite, to_json(invite()))
    assert timed.timing is None
    explain(timed, Timing(send=0.5))
    assert timed.timing == Timing(send=0.5)
    explain(timed, Timing(send=0.25))
    assert timed.timing == Timing(send=0.25)
    assert timed == invite()
    assert hash(timed) == hash(invite())
    assert repr(timed) == repr(invite())
    assert to_json(timed) == to_json(invite())
    assert pickle.loads(pickle.dumps(timed)).timing is None
    assert attrs.evolve(timed).timing is None
    assert "timing" not in attrs.asdict(timed)


@pytest.mark.parametrize("name", ["Timing", "timing", "(timing)", "_timing"])
@pytest.mark.parametrize("value", [None, 7, "x", {}, {"send": 0.5}])
def test_no_body_gives_an_invite_its_timing(name, value):
    body = json.dumps({**json.loads(to_json(invite())), name: value})
    assert from_json(Invite, body) == invite()
    assert from_json(Invite, body).timing is None


def test_the_garbage_collector_visits_outcomes_and_no_invites():
    """The traceback of an outcome's error has frames, which may hold the outcome: a cycle."""
    assert gc.is_tracked(outcome(error=SamplingError("lost")))
    assert not gc.is_tracked(invite())
