"""Erasing a member: the code is nowhere, and the sums stay."""

from __future__ import annotations

import json
from decimal import Decimal

import anyio
import anyio.to_thread
import doubles
import pytest
from cli_kit import run
from store_kit import (
    COMPLETION,
    MEMBER,
    SECRET,
    TERMINATE,
    comes_before,
    facts_of,
    handle,
    opened,
    post,
)

from sampling_async import InvalidRequestError, Invite, InviteOutcome, InviteRequest, Journal
from sampling_async.notifications import Inbox, Kind, OutcomeLedger, State, erase_member

CODE = "member-to-erase"
OTHER = "another-member"


def of(fields, code, **more):
    return {**fields, "UniqueCode": code, "AdditionalData": f"member={code}", **more}


def everything_in(address):
    """Return all rows of a store as one text."""
    with opened(address) as store:
        tables = ("facts", "receipts", "invites", "links")
        return str([store.execute(f"SELECT * FROM {table}") for table in tables])


def all_facts(address):
    return anyio.run(facts_of, Inbox(address, secrets=SECRET))


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
    with opened(made) as store:
        for code in (CODE, OTHER):
            values = (json.dumps(code), 1100, 2401, 77, "given", 1.0, 2.0, 1.0)
            columns = "member, quota, survey, wave, state, asked, until, changed"
            store.execute(f"INSERT INTO links ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
    return made


def test_the_code_is_nowhere_and_the_sums_stay(address):
    ledger = OutcomeLedger(address)
    before, keys = ledger.read_funnel(), [fact.key for fact in all_facts(address)]
    erased = erase_member(address, CODE)
    assert (erased.facts, erased.unhandled, erased.invites, erased.links, erased.receipts) == (4, 4, 1, 1, 5)
    assert erased.unclear == ()
    assert CODE not in everything_in(address)
    assert OTHER in everything_in(address)
    assert ledger.read_funnel() == before
    assert sum(quota.revenue for quota in before) == Decimal("1.5")
    facts = all_facts(address)
    assert [fact.key for fact in facts] == keys
    members = {fact.notification.member_code for fact in facts}
    assert len(members) == 2
    assert [fact.state for fact in facts].count(State.SKIPPED) == 4
    assert erase_member(address, CODE).facts == 0


END = {**COMPLETION, "QuotaID": 1100}
NO_WAVE = {name: value for name, value in END.items() if name != "WaveId"}
TAKEN_BACK = {**MEMBER, "ReconciliationID": "r1", "ReconciliationDateTime": "2026-11-28T03:00:00Z"}


@pytest.mark.parametrize(
    "steps",
    [
        (END, END),
        (END, {**END, "Revenue": 400}),
        (END, {**END, "Revenue": 400}, {**END, "Revenue": 400}, END),
        (END, NO_WAVE, {**NO_WAVE, "Revenue": 400}),
        (NO_WAVE, NO_WAVE, END, {**END, "Revenue": 400}),
        (END, {**END, "WaveId": 78}, {**END, "WaveId": 78}, {**END, "WaveId": 78, "Revenue": 400}),
        (END, {**NO_WAVE, "QuotaID": 2200}, {**END, "QuotaID": 2200, "WaveId": 78}),
        (END, TERMINATE, TAKEN_BACK, TAKEN_BACK),
        (TERMINATE, TERMINATE, END, {**END, "Revenue": 400}),
    ],
)
async def test_what_comes_later_is_joined_as_without_erasing(new_address, steps):
    """Erased after each of the steps, and twice: the facts are the same, so nothing is paid twice."""

    async def facts_after(erasings):
        inbox = Inbox(address := new_address(), secrets=SECRET)
        async with inbox:
            for number, step in enumerate(steps):
                kind = "terminate" if "Reason" in step else "completion"
                assert (await post(inbox, kind, of(step, CODE))).status == 200
                if number in erasings:
                    await anyio.to_thread.run_sync(erase_member, address, CODE)
            found = await facts_of(inbox)
        revenue = sum(quota.revenue for quota in OutcomeLedger(address).read_funnel())
        told = [(f.kind, f.key, f.corrects, f.receipts, f.validity) for f in found if f.receipts]
        return told, revenue, address

    expected, revenue, _ = await facts_after(())
    for number in range(len(steps)):
        for erasings in ((number,), (number, len(steps) - 1)):
            found, same, address = await facts_after(erasings)
            assert (found, same) == (expected, revenue)
            if len(erasings) > 1:
                assert CODE not in everything_in(address)


async def test_what_joins_erased_facts_is_stored_without_the_code(address):
    erase_member(address, CODE)
    async with Inbox(address, secrets=SECRET) as inbox:
        for more in ({}, {"Revenue": 400}):
            assert (await post(inbox, "completion", of(COMPLETION, CODE, **more))).status == 200
        *_, corrected = await facts_of(inbox)
    assert (corrected.corrects, corrected.notification.revenue) == (1, Decimal(4))
    assert CODE not in everything_in(address)


async def test_a_member_who_comes_back_is_stored_with_the_code(address):
    """The end of another survey is new, and so is one that came between two erasings."""
    erase_member(address, CODE)
    ledger = OutcomeLedger(address)
    money = {"partner_amount": 1.5, "member_amount": 0.0}
    invite = Invite(survey_id=2401, wave_id=77, quota_id=1100, url="https://x", loi=5, ir=50, **money)
    again = InviteOutcome(member_code=CODE, quota_id=1100, status="invited", invite=invite)
    assert await ledger.invited([again]) == 1
    async with Inbox(address, secrets=SECRET) as inbox:
        assert (await post(inbox, "completion", of(COMPLETION, CODE, SurveyId=7))).status == 200
        *_, back = await facts_of(inbox)
    assert (back.notification.member_code, back.corrects) == (CODE, None)
    erased = await anyio.to_thread.run_sync(erase_member, address, CODE)
    assert (erased.facts, erased.invites) == (1, 1)
    assert CODE not in everything_in(address)
    assert sum(quota.invited for quota in ledger.read_funnel()) == 2


async def test_the_correction_of_a_terminate_names_nobody(new_address):
    async with Inbox(address := new_address(), secrets=SECRET) as inbox:
        await post(inbox, "terminate", of(TERMINATE, CODE))
        handle(address, Kind.TERMINATE)
        await post(inbox, "completion", of(COMPLETION, CODE))
        assert [fact.corrects for fact in await facts_of(inbox)] == [None, None, 1]
        await anyio.to_thread.run_sync(erase_member, address, CODE)
    assert CODE not in everything_in(address)


async def test_what_was_not_understood_is_named_and_left(address):
    inbox = Inbox(address, secrets=SECRET)
    async with inbox:
        await post(inbox, "completion", f"?{CODE}?".encode())
        await post(inbox, "completion", f"?{CODE}s?".encode())
    *_, unclear, _ = await facts_of(inbox)
    assert erase_member(address, CODE).unclear == (unclear.id,)
    *_, first, second = await facts_of(inbox)
    assert (first.notification.body, second.notification.body) == (f"?{CODE}?".encode(), f"?{CODE}s?".encode())


def test_damaged_fields_of_others_do_not_keep_a_member(address):
    with opened(address) as store:
        # The invite of the other member, and a completion of the one to erase.
        of_other = "SELECT max(id) FROM facts WHERE kind = 'invite'"
        ((damaged,),) = store.execute(of_other)
        store.execute("UPDATE facts SET fields = '{' WHERE id = ?", (damaged,))
        store.execute("UPDATE facts SET fields = ? WHERE id = 1", (f'{{"UniqueCode": "{CODE}',))
    erased = erase_member(address, CODE)
    assert (erased.facts, erased.unclear) == (4, (damaged,))
    assert CODE not in everything_in(address)


@pytest.mark.parametrize("code", [5, None, b"m-1", ""])
def test_a_member_code_that_is_no_text_is_refused(address, code):
    with pytest.raises(InvalidRequestError, match=r"^a member code must be a str"):
        erase_member(address, code)


async def test_a_code_of_digits_is_no_id_and_no_amount(new_address):
    """Of members that are called 12, and of surveys and amounts of 12."""
    async with Inbox(address := new_address(), secrets=SECRET) as inbox:
        await post(inbox, "invite", of(MEMBER, "bob", SurveyId=12, QuotaID=12))
        await post(inbox, "completion", of(COMPLETION, "carol", WaveId=12))
        await post(inbox, "completion", of(COMPLETION, "12", SurveyId=12, Revenue=12))
        erased = await anyio.to_thread.run_sync(erase_member, address, "12")
        assert (erased.facts, erased.receipts) == (1, 1)
        bob, carol, nobody = await facts_of(inbox)
    assert (bob.notification.survey_id, bob.notification.member_code, bob.state) == (12, "bob", State.PENDING)
    assert carol.notification.wave_id == 12
    assert nobody.notification.survey_id == 12
    assert nobody.notification.revenue == Decimal("0.12")
    assert nobody.notification.member_code not in {"12", "bob"}


async def test_the_number_of_an_erased_receipt_is_not_given_to_another(new_address):
    async with Inbox(address := new_address(), secrets=SECRET) as inbox:
        await post(inbox, "completion", of(COMPLETION, CODE))
        await anyio.to_thread.run_sync(erase_member, address, CODE)
        await post(inbox, "completion", of(COMPLETION, OTHER))
    with opened(address) as store:
        (erased,), (other,) = store.execute("SELECT receipt FROM facts ORDER BY id")
        assert store.execute("SELECT id FROM receipts") == [(other,)]
    assert erased != other


def test_what_comes_while_a_member_is_erased_is_erased_too(address, monkeypatch):
    comes_before(monkeypatch, "_erasing.run_once", address, Kind.COMPLETION, of(COMPLETION, CODE, SurveyId=9))
    erase_member(address, CODE)
    assert CODE not in everything_in(address)


def test_a_path_with_nul_is_refused_as_a_path(tmp_path):
    for use in (erase_member, lambda path, _: OutcomeLedger(path).read_funnel()):
        with pytest.raises(InvalidRequestError, match=r"^the path of a store must be a str or a path object"):
            use(str(tmp_path / "a\0b"), CODE)


def test_the_command_says_what_was_erased(address):
    done = run("erase", CODE, "--store", address)
    assert done.exit_code == 0, done.stderr
    assert "4 facts (4 were not handled), 1 invite, 1 link, 5 receipts" in " ".join(done.stderr.split())
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
    assert "journal: 2 notes of requests and responses" in done.stderr
    assert CODE.encode() not in path.read_bytes()
    assert (await Journal(path).counts())["invited"] == 1
