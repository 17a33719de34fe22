"""Accounts that must add up: resumed runs, Ctrl-C in the blocking client, and money of the ledger of outcomes.

What happens is drawn: what is left of the input of a resumed run, the line that Ctrl-C strikes at, what is
paid, corrected and taken back in which order, and the currency of each survey.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections import Counter
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve

from sampling_async import InviteRequest, Price
from sampling_async.notifications import Inbox, OutcomeLedger
from sampling_async.simulator import Simulator
from scoreboard.board import Row, Run, at_least, exactly, published
from scoreboard.testkit import tool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sampling_async.campaign import Summary

notes: Final = tool("store_kit")
NOW: Final = datetime(2026, 11, 22, 12, 0, tzinfo=UTC)
CURRENCIES: Final = (1, 9, 44)


def rows(run: Run) -> list[Row]:
    """Draw the stories, and count what does not add up."""
    logging.disable(logging.WARNING)  # the journal says what it returns beside the input
    random = Random(run.seed)
    resumed, strikes, members, nights = run.of(8, 200), run.of(12, 400), run.of(150, 3_000), run.of(2, 30)
    missing = doubled = 0
    for _ in range(resumed):
        of_missing, of_doubled = asyncio.run(_resumed(random))
        missing, doubled = missing + of_missing, doubled + of_doubled
    struck, found = _interrupted(random, strikes)
    wrong = asyncio.run(_paid(random, members))
    summed = [asyncio.run(_in_currencies(random)) for _ in range(nights)]
    return [
        published("runs with a journal, left early and resumed with a part of the input", resumed),
        exactly("invites that the resumed run does not return", 0, missing),
        exactly("pairs that it returns twice, or asks for twice", 0, doubled),
        published("Ctrl-C in the blocking client, at lines that were drawn", struck),
        exactly(
            "of these, with pairs in no account or in two, or with a thread left",
            0,
            len(found),
            note="; ".join(found[:1]),
        ),
        published("members with completes, corrections and money taken back, in any order", members),
        exactly("quotas whose revenue or learned rate is not what the notifications say", 0, wrong),
        at_least("currencies in a night", 2, min(count for count, _ in summed)),
        exactly(
            "sums over several currencies, or sums of one that are wrong", 0, sum(each for _, each in summed)
        ),
    ]


async def _resumed(random: Random) -> tuple[int, int]:
    """Leave a fan-out early, and resume it with what is left of its input."""
    simulator = Simulator(random.randrange(1_000), surveys=5, members=12)
    quota_ids = [quota.quota_id for survey in simulator.inventory.surveys for quota in survey.quotas]
    codes = list(simulator.members)
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "run.journal"
        async with simulator.client() as client:
            left = random.randrange(1, len(codes) * len(quota_ids))
            async with client.fan_out(
                [InviteRequest(code, quota_ids) for code in codes], journal=journal
            ) as outcomes:
                async for _ in outcomes:
                    left -= 1
                    if not left:
                        break
            # Quotas close and members leave, but their links are paid for if somebody clicks them.
            quotas = random.sample(quota_ids, random.randrange(1, len(quota_ids)))
            requests = [
                InviteRequest(code, quotas) for code in random.sample(codes, random.randrange(1, len(codes)))
            ]
            async with client.fan_out(requests, journal=journal) as outcomes:
                returned = [each async for each in outcomes]
    verdict = simulator.ledger.check(returned)
    pairs = Counter((each.member_code, each.quota_id) for each in returned)
    asked = Counter(simulator.ledger.by_pair())
    twice = sum(count > 1 for counts in (pairs, asked) for count in counts.values())
    return len(verdict.unexplained) + len(verdict.lies), twice


def _interrupted(random: Random, strikes: int) -> tuple[int, list[str]]:
    """Let Ctrl-C strike at drawn lines of the blocking client; return how many, and what was wrong."""
    interrupted_at, found = tool("test_sync").interrupted_at, list[str]()
    struck = 0
    for _ in range(strikes):
        line, kind = random.randrange(1, 400), random.choice((list, iter))
        try:
            struck += interrupted_at(line, kind)
        except AssertionError as exc:
            found.append(f"line {line}, {kind.__name__}: {exc}"[:200])
    return struck + len(found), found


async def _paid(random: Random, members: int) -> int:
    """Draw what members are paid, in all orders; return how many quotas say something else."""
    outcome_of = tool("test_notifications_outcomes").invited
    expected: dict[int, Decimal] = {1: Decimal(0), 2: Decimal(0)}
    completes: Counter[int] = Counter()
    hits: list[list[tuple[str, dict[str, Any]]]] = []
    invites = []
    for number in range(members):
        quota_id, code = 1 + number % 2, f"m-{number}"
        invites.append(outcome_of(code, quota_id))
        of_member, paid, is_kept = _drawn(random, code, quota_id)
        hits.append(of_member)
        expected[quota_id] += paid
        completes[quota_id] += is_kept
    with tempfile.TemporaryDirectory() as folder:
        ledger = OutcomeLedger(Path(folder) / "n.db", clock=NOW.timestamp)
        await ledger.invited(invites, at=NOW - timedelta(days=1))
        async with Inbox(Path(folder) / "n.db", secrets=notes.SECRET, clock=NOW.timestamp) as inbox:
            while hits:
                of_member = random.choice(hits)
                await notes.post(inbox, *of_member.pop(0))
                hits = [each for each in hits if each]
        funnel, rates = await ledger.funnel(), await ledger.rates()
    wrong = sum(quota.revenue != expected[quota.quota_id or 0] for quota in funnel)
    return wrong + sum(rates.quotas[each] != (members // 2, completes[each]) for each in (1, 2))


def _drawn(random: Random, code: str, quota_id: int) -> tuple[list[tuple[str, dict[str, Any]]], Decimal, bool]:
    """Return what is posted about a member, what is paid in the end, and whether there is a complete."""
    fields = {**notes.COMPLETION, "UniqueCode": code, "QuotaID": quota_id}
    amounts = [random.randrange(1, 10_000) for _ in range(random.choice((1, 1, 2, 3)))]
    posted = [
        ("completion", {**fields, "Revenue": amount, "DateTime": f"2026-11-22 10:00:{second:02}"})
        for second, amount in enumerate(amounts)
    ]
    match random.randrange(4):
        case 0:
            return [("terminate", {**fields, "Revenue": None, "Reason": "SCREENED_OUT"})], Decimal(0), False
        case 1:
            taken = {**fields, "Revenue": None, "ReconciliationID": 1}
            posted.insert(random.randrange(len(posted) + 1), ("completion", taken))
            return posted, Decimal(0), False
        case _:
            return posted, Decimal(amounts[-1]) / 100, True


async def _in_currencies(random: Random) -> tuple[int, int]:
    """Run a night whose surveys have drawn currencies; return how many, and how many sums are wrong."""
    currency_of: dict[int, int] = {}

    def drawn(surveys: Sequence[Any]) -> list[Any]:
        for number, each in enumerate(surveys):
            currency_of[each.survey_id] = CURRENCIES[number] if number < 2 else random.choice(CURRENCIES)
        return [evolve(each, price=Price(each.price.amount, currency_of[each.survey_id])) for each in surveys]

    night: Callable[..., Any] = tool("test_currencies").night_of
    with tempfile.TemporaryDirectory() as folder:
        _, _, found, _ = await night(Path(folder), currencies=drawn)
        revenue: dict[int, Decimal] = {}
        for row in OutcomeLedger(Path(folder) / "store.db").read_rows():
            currency = currency_of[row.survey_id]
            revenue[currency] = revenue.get(currency, Decimal(0)) + row.revenue
    summary: Summary = found
    totals = (summary.expected_value, summary.planned_value, summary.possible_value, summary.ends.total.revenue)
    sums = {each: of.revenue for each, of in summary.by_currency.items()}
    return len(sums), sum(each is not None for each in totals) + sum(
        sums[each] != revenue[each] for each in sums
    )
