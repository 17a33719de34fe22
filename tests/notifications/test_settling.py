"""Unknown pairs are settled by what comes: what proves an invite, what proves nothing, what fits several."""

from __future__ import annotations

from datetime import UTC, datetime

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_kit import COMPLETION, MEMBER, SECRET, TERMINATE, post

from sampling_async import InvalidRequestError, Invite, InviteOutcome, InviteRequest, Journal
from sampling_async.notifications import Inbox, Kind, OutcomeLedger, PossibleInvite, possible_invites
from sampling_async.notifications._settling import RecordedInvite, record
from sampling_async.notifications._stores import run_once, store_of
from sampling_async.simulator import Fault, Notifying, Simulator, generate_inventory

NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)
INVITE = {**MEMBER}
SINCE = NOW.timestamp()
PAIR = PossibleInvite("m-1", 1100, 2401, 77, SINCE)


def without(fields, *names):
    return {name: value for name, value in fields.items() if name not in names}


def pair(quota_id=1100, *, survey_id=2401, wave_id=77, is_unknown=True, member_code="m-1"):
    return PossibleInvite(member_code, quota_id, survey_id, wave_id, SINCE if is_unknown else None)


@pytest.fixture
def path(new_address):
    return new_address()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (PossibleInvite(b"m-1", 1100, 2401, 77, SINCE), "a member code must be a str"),
        (PossibleInvite("m-1", 1100, 2401, 77, "noon"), "unknown_since must be seconds since 1970"),
        (("m-1", 1100), "each pair must be a PossibleInvite"),
    ],
)
async def test_a_wrong_argument_is_no_damage(path, wrong, message):
    with pytest.raises(InvalidRequestError, match=message):
        await settled(path, [wrong])


async def settled(path, pairs, *posts, now=NOW):
    """Return what is found of pairs after some notifications, each with the kind of its URL."""
    async with Inbox(path, secrets=SECRET, clock=now.timestamp) as inbox:
        for kind, fields in posts:
            assert (await post(inbox, kind, fields)).status == 200
    return await OutcomeLedger(path).settle(pairs)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("invite", INVITE),
        ("invite", without(INVITE, "QuotaID")),
        ("completion", COMPLETION),
        ("completion", without(COMPLETION, "QuotaID")),
        ("completion", without(COMPLETION, "WaveId")),
        ("terminate", TERMINATE),
        (
            "completion",
            {**COMPLETION, "SurveyId": 5, "WaveId": 9, "OriginalSurveyID": 2401, "IsAutoRouted": True},
        ),
    ],
)
async def test_what_can_be_about_no_other_pair_settles_one(path, kind, fields):
    found = await settled(path, [PAIR], (kind, fields))
    (one,) = found.settled
    assert (one.member_code, one.quota_id, one.kind, one.received_at) == ("m-1", 1100, kind, NOW)
    assert one.fact_id == 1
    assert (found.still_unknown, found.unclear, found.by_kind()) == (0, 0, {Kind(kind): 1})
    assert "m-1" not in repr(found)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("invite", {**INVITE, "UniqueCode": "m-2"}),
        ("invite", {**INVITE, "SurveyId": 2402}),
        ("invite", {**INVITE, "WaveId": 78}),
        ("invite", {**INVITE, "QuotaID": 1101}),
        ("invite", without(INVITE, "WaveId")),  # it may request an invite
        ("invite", without(INVITE, "SurveyId")),
        ("completion", {**COMPLETION, "WaveId": 0}),
        ("completion", {**COMPLETION, "QuotaID": 1101}),
        ("completion", {**COMPLETION, "IsAutoRouted": True}),  # nobody says from which survey
        ("completion", {**COMPLETION, "OriginalSurveyID": 7, "IsAutoRouted": True}),
        ("quota_status", {"QuotaID": 1100, "IsLive": False, "UpdateDateTimeUTC": "2026-11-22T10:00:00Z"}),
    ],
)
async def test_what_proves_nothing_leaves_a_pair_unknown(path, kind, fields):
    found = await settled(path, [PAIR], (kind, fields))
    assert (found.settled, found.still_unknown, found.unclear) == ((), 1, 0)


async def test_nothing_came_and_what_came_before_prove_nothing(path):
    assert (await settled(path, [PAIR])).still_unknown == 1
    before = datetime(2026, 11, 22, 11, 59, 59, tzinfo=UTC)
    assert (await settled(path, [PAIR], ("completion", COMPLETION), now=before)).settled == ()


@pytest.mark.parametrize(
    "other",
    [
        pair(1101),
        pair(1101, is_unknown=False),
    ],
)
async def test_what_fits_several_pairs_settles_none_and_is_counted(path, other):
    evidence = ("completion", without(COMPLETION, "QuotaID"))
    found = await settled(path, [PAIR, other], evidence)
    assert (found.settled, found.unclear) == ((), 1)
    # Another wave is another survey, unless the service does not name it.
    apart = [PAIR, pair(1101, wave_id=78)]
    assert len((await OutcomeLedger(path).settle(apart)).settled) == 1


async def test_a_quota_that_is_named_decides_between_pairs(path):
    found = await settled(path, [PAIR, pair(1101), pair(1102, is_unknown=False)], ("invite", INVITE))
    assert [each.quota_id for each in found.settled] == [1100]
    assert (found.still_unknown, found.unclear) == (1, 0)


async def test_an_invite_that_the_store_knows_explains_what_came(path):
    invite = Invite(2401, 77, 1101, 1.5, "https://x", 5, 50)
    known = InviteOutcome("m-1", 1101, "invited", invite)
    assert await OutcomeLedger(path).invited([known]) == 1
    found = await settled(path, [PAIR], ("completion", without(COMPLETION, "QuotaID")))
    assert (found.settled, found.unclear) == ((), 1)
    assert await OutcomeLedger(path).invited([InviteOutcome("m-2", 1100, "invited", invite)]) == 1
    other = pair(member_code="m-2")
    of_another = ("invite", {**INVITE, "UniqueCode": "m-2"})
    assert (await settled(path, [other], of_another)).settled == ()  # the same pair, got by somebody else


async def test_a_pair_is_settled_once_by_what_came_first(path):
    posts = [("completion", COMPLETION), ("invite", INVITE), ("completion", COMPLETION), ("invite", INVITE)]
    found = await settled(path, [PAIR, PAIR], *posts)
    assert [each.kind for each in found.settled] == ["completion"]


async def test_a_forged_notification_settles_nothing(path):
    inbox = Inbox(path, secrets=SECRET, shared_secrets="shared", require_signature=True, clock=NOW.timestamp)
    async with inbox:
        assert (await post(inbox, "completion", COMPLETION)).status == 403
        assert (await post(inbox, "completion", {**COMPLETION, "EncryptedValue": "0" * 64})).status == 403
        assert (await post(inbox, "invite", INVITE, secret="guessed")).status != 200
    assert (await OutcomeLedger(path).settle([PAIR])).settled == ()


def test_possible_invites_are_the_invited_and_the_unknown_pairs():
    surveys = generate_inventory(1, surveys=2).surveys
    first, second = (each.quotas[0].quota_id for each in surveys)
    invite = Invite(9, 3, second, 1.0, "https://x", 5, 50)
    outcomes = [
        InviteOutcome("a", first, "unknown"),
        InviteOutcome("b", second, "invited", invite),
        InviteOutcome("c", first, "rejected"),
        InviteOutcome("d", first, "not_sent"),
        InviteOutcome("e", 1, "unknown"),
    ]
    assert list(possible_invites(outcomes, surveys, NOW)) == [
        PossibleInvite("a", first, surveys[0].survey_id, surveys[0].wave_id, SINCE),
        PossibleInvite("b", second, 9, 3),
        PossibleInvite("e", 1, None, None, SINCE),
    ]
    with pytest.raises(ValueError, match="time zone"):
        list(possible_invites(outcomes, surveys, datetime(2026, 11, 22)))  # noqa: DTZ001


async def test_a_pair_of_an_unknown_survey_is_not_settled_and_makes_others_unclear(path):
    nowhere = PossibleInvite("m-1", 1101, None, None, SINCE)
    found = await settled(path, [PAIR, nowhere], ("completion", without(COMPLETION, "QuotaID")))
    assert (found.settled, found.still_unknown, found.unclear) == ((), 2, 1)
    assert (await OutcomeLedger(path).settle([nowhere])).settled == ()


ROUTED = {"SurveyId": 2401, "OriginalSurveyID": 5, "IsAutoRouted": True}


@pytest.mark.parametrize(
    "posts",
    [
        [("completion", {**COMPLETION, "OriginalSurveyID": "S-5", "IsAutoRouted": "perhaps"})],
        [("completion", {**COMPLETION, "OriginalSurveyID": "5;6"})],
        [("completion", {**COMPLETION, "IsAutoRouted": "perhaps"})],
        [("completion", {**COMPLETION, "IsAutoRouted": True, "OriginalSurveyID": 2401})],
        [("completion", {**COMPLETION, "QuotaID": "Q-1101"})],
        [("invite", {**INVITE, "QuotaID": "x"})],
        # Only one of the notifications about an end says from where the member came.
        [("terminate", {**TERMINATE, **ROUTED}), ("completion", COMPLETION)],
        [("completion", COMPLETION), ("completion", {**COMPLETION, **ROUTED, "Revenue": 75})],
    ],
)
async def test_an_end_that_may_be_of_a_routed_member_settles_no_other_survey(path, posts):
    held = pair(7, survey_id=5, wave_id=1, is_unknown=False)
    assert (await settled(path, [PAIR, held], *posts)).settled == ()


async def test_a_quota_in_two_waves_is_two_pairs(path):
    earlier = Invite(2401, 76, 1100, 1.5, "https://x", 5, 50)
    await OutcomeLedger(path).invited([InviteOutcome("m-1", 1100, "invited", earlier)])
    evidence = without(COMPLETION, "WaveId")
    assert (await settled(path, [PAIR], ("completion", evidence))).unclear == 1
    assert len((await settled(path, [PAIR], ("invite", INVITE))).settled) == 1


async def test_what_is_recorded_as_unknown_is_left_out_by_routers_and_explains_for_others(path):
    store = store_of(path)
    refused = "INSERT INTO links (member, quota, survey, wave, state, asked, until, changed, code)"
    await settled(path, [])
    run_once(
        store.copy(), lambda it: it.run(f"{refused} VALUES ('\"m-1\"', 1100, 2401, 77, 'refused', 1, 2, 3, 28)")
    )
    record(store, [], [PAIR, PAIR], SINCE)
    assert len((await settled(path, [PAIR], ("invite", INVITE))).settled) == 1  # the pair itself
    other = PossibleInvite("m-1", 1100, 2401, 77, SINCE + 1)
    assert (await OutcomeLedger(path).settle([other])).settled == ()
    made = RecordedInvite("m-2", 1100, 2401, 77, SINCE)
    record(store, [made, made], [], SINCE)
    (row,) = await OutcomeLedger(path).overdue(hours=0)
    assert (row.member_code, row.invited_at) == ("m-2", NOW)


WORLD = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 2), st.booleans(), st.booleans()),
    min_size=1,
    max_size=6,
    unique_by=lambda each: each[0] + 10 * each[1] + 100 * each[2],
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(world=WORLD, left_out=st.sets(st.sampled_from(["QuotaID", "WaveId"])))
def test_no_pair_without_an_invite_is_ever_settled(tmp_path_factory, world, left_out):
    """Each pair of a world has an invite or not, and its response came or not; ends lack quotas and waves."""
    path = tmp_path_factory.mktemp("store") / "store.db"
    pairs, posts, truth = [], [], set()
    for quota, survey, wave, has_invite, is_lost in world:
        quota_id = 100 * survey + 10 * wave + quota
        if has_invite:
            truth.add(quota_id)
            place = {"SurveyId": survey, "WaveId": wave, "QuotaID": quota_id}
            posts.append(("completion", without({**COMPLETION, **place}, *left_out)))
        if has_invite or is_lost:
            pairs.append(pair(quota_id, survey_id=survey, wave_id=wave, is_unknown=is_lost))
    found = anyio.run(lambda: settled(path, pairs, *posts))
    assert {each.quota_id for each in found.settled} <= truth


async def outcomes_of(client, requests, journal):
    async with client.fan_out(requests, journal=journal) as outcomes:
        return [outcome async for outcome in outcomes]


async def test_a_journal_sends_unknown_pairs_again_but_not_those_that_are_settled(tmp_path):
    sim, began = Simulator(7, surveys=30, members=40, notifying=Notifying()), datetime.now(UTC)
    surveys = sim.inventory.surveys
    quota_ids = [quota.quota_id for survey in surveys for quota in survey.quotas]
    requests = [InviteRequest(code, quota_ids) for code in sim.members]
    journal, store = tmp_path / "journal", tmp_path / "store.db"
    async with Inbox(store, secrets=SECRET) as inbox, sim.client() as client:
        sim.faults.add(Fault.cut(when="after").on("bulk_invite", probability=0.5))
        known = await outcomes_of(client, requests, journal)
        await sim.notifications.deliver(inbox)
        found = await OutcomeLedger(store).settle(possible_invites(known, surveys, began))
        sim.faults.clear()
        sent_before = len(sim.ledger.requests)
        again = Journal(journal, resend_unknown=True, settled=found.settled)
        last = await outcomes_of(client, requests, again)
    settled = {(each.member_code, each.quota_id) for each in found.settled}
    unknown = {(each.member_code, each.quota_id) for each in known if each.status == "unknown"}
    resent = {(each.member_code, id_) for each in sim.ledger.requests[sent_before:] for id_ in each.quota_ids}
    assert settled
    assert unknown - settled
    assert resent == unknown - settled
    assert {each.status for each in last if (each.member_code, each.quota_id) in settled} == {"unknown"}
