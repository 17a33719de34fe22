"""The records."""

from __future__ import annotations

import traceback
from decimal import Decimal
from uuid import UUID, uuid4

import numpy as np
import pytest
from attrs import evolve
from msgspec.structs import replace as evolve_invite
from pydantic import BaseModel, HttpUrl, PostgresDsn, SecretStr

from sampling_async import (
    BadRequestError,
    BulkInviteResult,
    InvalidRequestError,
    Invite,
    InviteOutcome,
    InviteRequest,
    Journal,
    Layer,
    MemberURL,
    PanelProfile,
    Price,
    QuestionAndAnswers,
    Quota,
    QuotaWatch,
    RecontactMembers,
    ResultCode,
    SamplingClient,
    Setting,
    SubQuota,
    SurveyWaveExclusion,
)
from sampling_async.matching import QuotaIndex
from sampling_async.notifications import Inbox, PostgresStore, SqliteStore, verify_redirect
from sampling_async.simulator import Simulator


def test_records_are_frozen_and_slotted():
    price = Price(1.0, 2)
    with pytest.raises(AttributeError):
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


def test_reprs_fit_a_screen():
    inventory = Simulator(1, surveys=300, members=1).inventory
    survey = max(inventory.surveys, key=lambda each: len(each.quotas))
    questions = QuestionAndAnswers(1, tuple(range(1000)), tuple(f"{n:05}" for n in range(1000)))
    sub_quota = SubQuota(1, 2, 3, (questions,) * 50)
    for record in (
        inventory,
        survey,
        Quota(1, 2, 3, (Layer(4, (sub_quota,) * 50),) * 20),
        sub_quota,
        questions,
        InviteRequest("m1", range(1, 2000)),
        SurveyWaveExclusion(1, 2, tuple(range(100))),
    ):
        assert len(repr(record)) < 700, record
    assert "surveys=<300 surveys>" in repr(inventory)
    assert "answer_ids=(0, 1, 2, 3, 4, <995 more>)" in repr(questions)


def test_notebooks_show_small_tables_without_secrets():
    inventory = evolve(
        Simulator(1, surveys=300, members=1).inventory,
        surveys=tuple(
            evolve(each, survey_name="<b>x</b>") for each in Simulator(1, surveys=30).inventory.surveys
        ),
    )
    shown = inventory._repr_html_()
    assert shown.count("<tr>") == 11
    assert "&lt;b&gt;x" in shown
    invite = Invite(1, 2, 3, 0.5, "https://s.example/?mc=member-1", 5, 6)
    outcomes = [InviteOutcome("member-1", 3, "invited", invite, 1), InviteOutcome("member-1", 4, "not_sent")]
    shown = BulkInviteResult([*outcomes, InviteOutcome("member-1", 5, "rejected", None, 28, replayed=True)])
    assert "member-1" not in shown._repr_html_()
    assert "28 QUOTA_FULL" in shown._repr_html_()
    assert shown._repr_html_().count("<tr>") == 4


def test_amounts_are_decimals_as_they_were_written():
    invite = Invite(1, 2, 3, 1.1, "https://s.example", 5, 6, 0.3)
    assert invite.partner_amount_decimal + invite.member_amount_decimal == Decimal("1.4")
    assert evolve_invite(invite, member_amount=None).member_amount_decimal is None
    assert Price(0.1, 1).amount_decimal == Decimal("0.1")
    assert Price(np.float64(0.1), 1).amount_decimal == Decimal("0.1")


# --- What stands for a text

GUID = uuid4()


class Settings(BaseModel):
    """What a service reads from its environment."""

    key: SecretStr = SecretStr(str(GUID))
    url: HttpUrl = HttpUrl("https://x.example/base")
    dsn: PostgresDsn = PostgresDsn("postgresql://u:pw@h/db")


async def test_secrets_guids_and_urls_are_taken_where_a_text_is():
    simulator = Simulator(2, members=3)
    member_code, ids = next(iter(simulator.members)), [1, 2, 3]
    async with SamplingClient(
        simulator.base_url,
        panel_guid=SecretStr(simulator.panel_guid),
        api_key=UUID(simulator.api_key),
        transport=simulator.transport(),
        name=SecretStr("us"),
    ) as client:
        assert repr(client).startswith("<SamplingClient us ")
        result = await client.bulk_invite(SecretStr(member_code), ids)
        assert [outcome.member_code for outcome in result] == [member_code] * 3
        async with client.fan_out([InviteRequest(GUID, ids)]) as outcomes:
            assert {outcome.member_code async for outcome in outcomes} == {str(GUID)}
        with pytest.raises(BadRequestError):
            await client.generate_invite(GUID, 1)
    assert str(GUID) in {request.member_code for request in simulator.ledger.requests}
    settings = Settings()
    assert "x.example" in repr(SamplingClient(settings.url, panel_guid=GUID, api_key=settings.key))
    assert repr(PostgresStore(settings.dsn)) == "<PostgresStore postgresql://u@h/db (sampling)>"
    profile = PanelProfile(name="us", base_url=settings.url, panel=GUID, api_key=lambda: settings.key)
    assert "x.example" in repr(SamplingClient.from_env(profile=profile))


async def test_secrets_of_an_inbox_may_be_hidden(tmp_path):
    secret = SecretStr("a" * 20)
    inbox = Inbox(tmp_path / "n.db", secrets=[secret], basic=[("u", secret)], shared_secrets=secret)
    assert inbox.path("completion") == f"/completion/{'a' * 20}"


def test_so_they_are_in_matching_and_at_redirects(tmp_path):
    inventory = Simulator(2).inventory
    quota = inventory.surveys[0].quotas[0]
    index = QuotaIndex(inventory)
    index.recontact(quota.quota_id, [SecretStr("m-1"), GUID])
    assert index.recontact_lists == {quota.quota_id: {"m-1", str(GUID)}}
    known, hidden = (index.match({}, member_code=code) for code in ("m-1", SecretStr("m-1")))
    assert list(known.possible) == list(hidden.possible)
    assert MemberURL("https://x.example/?m=[pid]").for_member(GUID) == f"https://x.example/?m={GUID}"
    inbox = Inbox(tmp_path / "n.db", secrets="a" * 20)
    assert inbox.urls(HttpUrl("https://x.example/")) == inbox.urls("https://x.example")
    with pytest.raises(InvalidRequestError, match="like https"):
        inbox.urls(None)
    assert not verify_redirect(HttpUrl("https://x.example/?a=1&h=2"), "s" * 20)


@pytest.mark.parametrize("wrong", [object(), 5, SecretStr, b"x", None])
def test_anything_else_is_refused(wrong):
    with pytest.raises(InvalidRequestError):
        InviteRequest(wrong, [1])
    with pytest.raises(InvalidRequestError):
        SamplingClient("https://x.example", panel_guid=GUID, api_key=wrong)
