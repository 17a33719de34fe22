"""Erasing a member: the code is nowhere, and the sums stay."""

from __future__ import annotations

import json
from contextlib import closing
from decimal import Decimal

import anyio
import anyio.to_thread
import doubles
import pytest
from cli_kit import run
from notifications_kit import COMPLETION, MEMBER, SECRET, TERMINATE, facts_of, post

from sampling_async import Invite, InviteOutcome, InviteRequest, Journal
from sampling_async.notifications import Inbox, OutcomeLedger, State, erase_member
from sampling_async.notifications._stores import store_of

CODE = "member-to-erase"
OTHER = "another-member"


def of(fields, code, **more):
    return {**fields, "UniqueCode": code, "AdditionalData": f"member={code}", **more}


def everything_in(address):
    """Return all rows of a store as one text."""
    with closing(store_of(address)) as store:
        store.open()
        with store.transaction():
            tables = ("facts", "receipts", "invites", "links")
            return str([store.execute(f"SELECT * FROM {table}") for table in tables])


@pytest.fixture
def address(new_address):
    """Return a store with two members, in all places."""
    made = new_address()

    async def fill():
        inbox = Inbox(made, secrets=SECRET)
        async with inbox:
            for code in (CODE, OTHER):
                await post(inbox, "completion", of(COMPLETION, code))
                await post(inbox, "completion", of(COMPLETION, code))
                await post(inbox, "completion", of(COMPLETION, code, Revenue=75))
                await post(inbox, "terminate", of(TERMINATE, code, WaveId=78))
                await post(inbox, "invite", of(MEMBER, code))
        ledger = OutcomeLedger(made)
        money = {"partner_amount": 1.5, "member_amount": 0.0}
        invite = Invite(survey_id=2401, wave_id=77, quota_id=1100, url="https://x", loi=5, ir=50, **money)
        for code in (CODE, OTHER):
            given = InviteOutcome(member_code=code, quota_id=1100, status="invited", invite=invite)
            assert await ledger.invited([given]) == 1

    anyio.run(fill)
    with closing(store_of(made)) as store:
        store.open()
        with store.transaction():
            for code in (CODE, OTHER):
                values = (json.dumps(code), 1100, 2401, 77, "given", 1.0, 2.0, 1.0)
                columns = "member, quota, survey, wave, state, asked, until, changed"
                store.execute(f"INSERT INTO links ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
    return made


def test_the_code_is_nowhere_and_the_sums_stay(address):
    ledger = OutcomeLedger(address)
    before, keys = ledger.read_funnel(), [fact.key for fact in store_of(address).facts()]
    erased = erase_member(address, CODE)
    assert (erased.facts, erased.unhandled, erased.invites, erased.links, erased.receipts) == (4, 4, 1, 1, 5)
    assert erased.unclear == ()
    assert CODE not in everything_in(address)
    assert OTHER in everything_in(address)
    assert ledger.read_funnel() == before
    assert sum(quota.revenue for quota in before) == Decimal("1.5")
    facts = list(store_of(address).facts())
    assert [fact.key for fact in facts] == keys
    members = {fact.notification.member_code for fact in facts}
    assert len(members) == 2
    assert [fact.state for fact in facts].count(State.SKIPPED) == 4
    assert erase_member(address, CODE).facts == 0


async def test_what_comes_later_has_the_same_key(address):
    keys = {fact.key for fact in store_of(address).facts()}
    erase_member(address, CODE)
    inbox = Inbox(address, secrets=SECRET)
    async with inbox:
        assert (await post(inbox, "completion", of(COMPLETION, CODE))).status == 200
    *_, again = await facts_of(inbox)
    assert (again.notification.member_code, again.key in keys) == (CODE, True)


async def test_what_was_not_understood_is_named_and_left(address):
    inbox = Inbox(address, secrets=SECRET)
    async with inbox:
        await post(inbox, "completion", f"?{CODE}?".encode())
        await post(inbox, "completion", f"?{CODE}s?".encode())
    *_, unclear, _ = await facts_of(inbox)
    assert erase_member(address, CODE).unclear == (unclear.id,)
    *_, first, second = await facts_of(inbox)
    assert (first.notification.body, second.notification.body) == (f"?{CODE}?".encode(), f"?{CODE}s?".encode())


def test_the_command_says_what_was_erased(address):
    done = run("erase", CODE, "--store", address)
    assert done.exit_code == 0, done.stderr
    assert "4 facts (4 were not handled), 1 invites, 1 links, 5 receipts" in " ".join(done.stderr.split())
    assert CODE not in everything_in(address)


@pytest.mark.parametrize(
    ("arguments", "message"), [((CODE,), "name what to erase"), (("", "--store", "no.db"), "is empty")]
)
def test_the_command_needs_a_member_and_a_place(arguments, message):
    done = run("erase", *arguments)
    assert (done.exit_code, message in done.stderr) == (2, True)


async def test_the_command_erases_from_a_journal(tmp_path):
    path = tmp_path / "journal"
    async with doubles.client(doubles.Service(doubles.bulk)) as client:
        requests = [InviteRequest(code, [2]) for code in (CODE, OTHER)]
        async with client.fan_out(requests, journal=path) as outcomes:
            assert len([outcome async for outcome in outcomes]) == 2
    done = await anyio.to_thread.run_sync(lambda: run("erase", CODE, "--journal", path))
    assert done.exit_code == 0
    assert "journal: 2 requests and responses" in done.stderr
    assert CODE.encode() not in path.read_bytes()
    assert (await Journal(path).counts())["invited"] == 1
