"""Invites and outcomes: Structs that behave as the other records do."""

from __future__ import annotations

import copy
import gc
import io
import json
import operator
import pickle
from typing import Any

import anyio
import attrs
import cattrs
import doubles
import httpx
import msgspec
import pytest
import rich.console
import rich.pretty

from sampling_async import Invite, InviteOutcome, SamplingError, Timing, from_json, to_json

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
    assert names == [field.name for field in msgspec.structs.fields(cls)]
    assert [field.name for field in fields if not field.repr] == ["url" if cls is Invite else "member_code"]
    required = [field.name for field in fields if field.default is attrs.NOTHING]
    assert required == names[: 7 if cls is Invite else 3]
    assert names == list(cls.__match_args__)
    assert {field.default for field in fields[len(required) :]} <= {None, False}


def test_attrs_and_cattrs_work_with_them():
    fields = attrs.fields_dict(attrs.resolve_types(Invite))
    assert [fields[name].type for name in ("loi", "partner_amount", "url", "member_amount")] == [
        int,
        float,
        str,
        float | None,
    ]
    assert cattrs.BaseConverter().structure(attrs.asdict(invite()), Invite) == invite()
    own = {**json.loads(json.dumps(attrs.asdict(invite()))), "member_amount": None}
    assert attrs.asdict(outcome())["invite"] == own == cattrs.unstructure(invite())
    assert cattrs.structure(own, Invite) == invite()
    assert attrs.evolve(invite(), loi=10) == invite(loi=10) == msgspec.structs.replace(invite(), loi=10)
    assert attrs.evolve(outcome(), status="unknown").status == "unknown"


def test_a_class_that_derives_from_one_has_its_repr():
    class Noted(Invite, frozen=True):
        note: str = ""

    shown = repr(Noted(*msgspec.structs.astuple(invite()), "n"))
    assert "loi=" in shown
    assert "url=<hidden>" in shown


def test_msgspec_writes_an_invite_as_the_contract_does():
    for each in (invite(), invite(member_amount=0.5)):
        assert json.loads(msgspec.json.encode(each)) == json.loads(to_json(each))


def returned(body: bytes) -> Invite:
    """Return the invite of a call that takes half a second."""
    time = doubles.FakeTime()

    def answer(_: httpx.Request) -> httpx.Response:
        time.now += 0.5
        return httpx.Response(200, content=body)

    async def main() -> Invite:
        async with doubles.client(answer, time) as client:
            return await client.generate_invite(MEMBER, 3)

    return anyio.run(main)


def timed() -> Invite:
    return returned(to_json(invite()))


def test_the_invite_of_a_call_has_its_timing_and_is_like_any_other():
    assert timed().timing == Timing(first_byte=0.5, attempts=1)
    assert isinstance(timed(), Invite)
    for one, other in ((timed(), invite()), (invite(), timed()), (timed(), timed())):
        assert one == other
        assert operator.ne(one, other) is False
        assert hash(one) == hash(other)
        assert repr(one) == repr(other)
        assert to_json(one) == to_json(other)
        assert msgspec.json.encode(one) == msgspec.json.encode(other)
        assert pickle.dumps(one) == pickle.dumps(other)
        assert attrs.asdict(one) == attrs.asdict(other) == cattrs.unstructure(one)
        assert one != msgspec.structs.replace(other, loi=10)
        assert hash(one) != hash(msgspec.structs.replace(other, loi=10))
        assert len({one, other, msgspec.structs.replace(one, loi=10)}) == 2
    assert operator.eq(timed(), "x") is operator.eq("x", timed()) is False
    for same in (pickle.loads(pickle.dumps(timed())), copy.deepcopy(timed()), attrs.evolve(timed())):
        assert same.timing is None


def test_what_has_no_room_for_a_timing_has_none():
    async def main() -> InviteOutcome:
        async with doubles.client(doubles.Service(doubles.bulk)) as client:
            (made,) = await client.bulk_invite(MEMBER, [2])
            return made

    of_bulk = anyio.run(main)
    assert of_bulk.invite.timing is None
    assert not hasattr(of_bulk, "timing")


@pytest.mark.parametrize("name", ["Timing", "timing", "_timing"])
@pytest.mark.parametrize("value", [None, 7, {}, {"send": 0.5}])
def test_no_body_gives_an_invite_its_timing(name, value):
    body = json.dumps({**json.loads(to_json(invite())), name: value}).encode()
    assert from_json(Invite, body) == returned(body) == invite()
    assert from_json(Invite, body).timing is None
    assert returned(body).timing == Timing(first_byte=0.5, attempts=1)


def test_a_repr_of_itself_ends():
    class CircleError(SamplingError):
        def __repr__(self) -> str:
            return f"Circle({self.outcome!r})"

    error = CircleError("lost")
    error.outcome = outcome(error=error)
    assert "error=Circle(...)" in repr(error.outcome)


def test_users_may_derive_from_an_invite():
    class Priced(Invite, frozen=True):
        bonus: float = 0.0

    ours = Priced(1, 2, 3, 1.5, LINK, 9, 30, bonus=2.0)
    assert ours == Priced(1, 2, 3, 1.5, LINK, 9, 30, bonus=2.0) != Priced(1, 2, 3, 1.5, LINK, 9, 30)
    assert copy.copy(ours).bonus == 2.0


def test_the_garbage_collector_visits_outcomes_and_no_invites():
    """The traceback of an outcome's error has frames, which may hold the outcome: a cycle."""
    assert gc.is_tracked(outcome(error=SamplingError("lost")))
    assert not gc.is_tracked(invite())
