"""Unknown pairs, settled by notifications: how many, and whether one is settled that has no invite.

The service of the campaigns is the simulator, whose own ledger knows the truth. Its notifications come late,
twice, in other spellings, and forged. The pairs of the second part are drawn: members with one to six pairs in
few surveys, responses that were lost after the service had acted or before, and ends without quota, without
wave, or of members who were routed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any, Final

from sampling_async import Timeouts
from sampling_async.notifications import Inbox, OutcomeLedger, PossibleInvite
from sampling_async.simulator import Fault, Notifying, Simulator
from scoreboard.board import Row, Run, at_least, exactly, published
from scoreboard.testkit import tool

campaigns: Final = tool("panel_kit")
NOW: Final = datetime(2026, 11, 22, 12, 0, tzinfo=UTC)
SECRET: Final = "a-secret-of-the-scoreboard"
TOGETHER: Final = 200  # notifications in one body
BADLY: Final = Notifying(
    survey_seconds=1,
    late=0.5,
    repeated=0.3,
    forged=0.5,
    drifted=0.5,
    terminated_late=0.1,
    shared_secret="shared",
)
FAULTS: Final = {
    "answers cut off after the service has acted": Fault.cut(when="after"),
    "answers cut off in the middle": Fault.cut(when="middle"),
    "connections cut before it acts": Fault.cut(),
    "answers that are a page of a proxy": Fault.html(),
    "answers without some of the items": Fault.missing(3),
    "answers that come too late": Fault.delay(2.0),
}


def rows(run: Run) -> list[Row]:
    """Settle the pairs of campaigns under faults, and drawn ones."""
    logging.disable(logging.WARNING)
    found, wrong = list[Row](), 0
    for name, fault in FAULTS.items():
        made, settled, of_wrong = asyncio.run(_campaign(fault, run.seed, run.of(150, 2_000)))
        wrong += of_wrong
        note = "" if made else "no lost pair has an invite"
        found.append(published(f"{name}: invites among the unknown pairs", made, note=note))
        if made:
            found.append(at_least("of these, settled", 95, 100 * settled / made, unit="%"))
    pairs, of_wrong, unclear, made, settled = asyncio.run(_drawn(Random(run.seed), run.of(30_000, 1_000_000)))
    return [
        *found,
        exactly("pairs of campaigns that were settled, and have no invite", 0, wrong),
        published("drawn pairs", pairs),
        exactly("of these, settled without an invite", 0, of_wrong),
        published("of these, unknown with an invite whose end or notification came", made),
        published("of these, settled", 100 * settled / made, unit="%", note="the others fit several pairs"),
        at_least("notifications that fit several pairs, and settle none", 1, unclear),
    ]


async def _campaign(fault: Fault, seed: int, members: int) -> tuple[int, int, int]:
    """Return how many unknown pairs of a campaign have an invite, are settled, and are settled wrongly."""
    simulator = Simulator(seed, surveys=30, members=members, notifying=BADLY)
    simulator.faults.add(fault.on("bulk_invite", probability=0.2))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = folder / "store.db"
        inbox = Inbox(store, secrets=SECRET, shared_secrets="shared")
        async with inbox, simulator.client(timeouts=Timeouts(read=0.5)) as client:
            campaign = campaigns.campaign_of(simulator, client, folder)
            await campaign.plan()
            outcomes = await campaigns.all_of(campaign.run())
            await simulator.notifications.deliver(inbox)
            found = await campaign.settle(OutcomeLedger(store))
    invites = simulator.ledger.by_pair()
    unknown = {(each.member_code, each.quota_id) for each in outcomes if each.status == "unknown"}
    settled = {(each.member_code, each.quota_id) for each in found.settled}
    return len(unknown & invites.keys()), len(settled & unknown & invites.keys()), len(settled - invites.keys())


async def _drawn(random: Random, count: int) -> tuple[int, int, int, int, int]:
    """Return drawn pairs, those settled wrongly, unclear ones, lost invites that are reported, and settled."""
    pairs, posts, reported, invites = list[PossibleInvite](), dict[str, list[Any]](), set[Any](), set[Any]()
    member, since = 0, NOW.timestamp()
    while len(pairs) < count:
        member += 1
        code = f"m-{member}"
        for quota_id in random.sample(range(1, 13), random.randrange(1, 7)):
            survey_id, wave_id = 1 + quota_id % 3, 1 + quota_id % 2
            is_lost, is_made = random.random() < 0.4, random.random() < 0.5
            if is_made:
                invites.add((code, quota_id))
                if random.random() < 0.8:
                    kind, fields = _report(random, code, survey_id, wave_id, quota_id)
                    posts.setdefault(kind, []).append(fields)
                    if is_lost:
                        reported.add((code, quota_id))
            if is_made or is_lost:
                pairs.append(PossibleInvite(code, quota_id, survey_id, wave_id, since if is_lost else None))
    with tempfile.TemporaryDirectory() as name:
        store = Path(name) / "store.db"
        async with Inbox(store, secrets=SECRET, clock=NOW.timestamp) as inbox:
            for kind, some in posts.items():
                random.shuffle(some)
                for begin in range(0, len(some), TOGETHER):
                    body = json.dumps(some[begin : begin + TOGETHER]).encode()
                    response = await inbox.receive(kind, body, {}, "198.51.100.7", secret=SECRET)
                    assert response.status == 200, response
        found = await OutcomeLedger(store).settle(pairs)
    settled = {(each.member_code, each.quota_id) for each in found.settled}
    return len(pairs), len(settled - invites), found.unclear, len(reported), len(settled & reported)


def _report(random: Random, code: str, survey_id: int, wave_id: int, quota: int) -> tuple[str, dict[str, Any]]:
    """Return how an invite or its end is reported: with quota and wave or without, or of a routed member."""
    fields: dict[str, Any] = {"UniqueCode": code, "SurveyId": survey_id, "WaveId": wave_id, "QuotaID": quota}
    for name in ("WaveId", "QuotaID"):
        if random.random() < 0.25:
            del fields[name]
    if random.random() < 0.1:
        fields |= {"OriginalSurveyID": survey_id, "SurveyId": 9, "WaveId": 9, "IsAutoRouted": True}
        fields.pop("QuotaID", None)
    elif random.random() < 0.3:
        return "invite", fields
    if random.random() < 0.5:
        return "terminate", {**fields, "Reason": "SCREENED_OUT"}
    return "completion", {**fields, "Revenue": 150}
