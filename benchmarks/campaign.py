"""A campaign with all that can happen in a night, and the same panel with the best quotas of each member.

python benchmarks/campaign.py [--members 100000] [--surveys 800] [--outage 60] [--kills 3]

The simulator runs in a process of its own. The campaign runs in another one, which is killed and started again.
While it runs, a tenth of the quotas close, and the service is away for a minute. Afterwards its ledger is held
against the simulator's, pair by pair. Then a new simulator of the same seed is asked by a plain fan-out of
`TopK(5)`, without any of these troubles. Needs the dependency group `tests`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import sqlite3
import tempfile
import time
from collections import Counter
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
from scoreboard.service import Remote, service
from scoreboard.testkit import tool
from speed.remote import fresh

from sampling_async import InviteRequest, SamplingClient
from sampling_async.campaign import Campaign
from sampling_async.matching import Allocate, LiveIndex, PanelMatcher, QuestionKinds, QuotaIndex, TopK
from sampling_async.simulator import AGE_BANDS, Fault, Latency, Simulator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection

    from peers.common import Address

    from sampling_async import Quotas

SEED = 19
AGE = 1001538
KINDS = QuestionKinds.default().with_age(AGE, AGE_BANDS)
PER_MEMBER = 5
CLOSED = 0.1  # the share of the quotas that close
CLOSED_BY = 0.5  # requests for each member by which they all have closed; not every member is asked for
KILLED_AT = (0.2, 0.4, 0.7)
AWAY_AT = 0.55


# --- The service, in a process of its own


def simulated(surveys: int, members: int, panel: Path) -> Simulator:
    """Make the service, and write its panel."""
    latency = Latency(a=0.004, b=0.0001, workers=8)
    sim = Simulator(SEED, surveys=surveys, members=members, latency=latency)
    pq.write_table(tool("panel_kit").panel_table(sim), panel)
    return sim


def close(sim: Simulator, quota_ids: Sequence[int]) -> None:
    """Close quotas."""
    for quota_id in quota_ids:
        sim.close_quota(quota_id)


def move(sim: Simulator, *, is_away: bool) -> None:
    """Let the service go away, or come back."""
    if is_away:
        sim.faults.add(Fault.cut(when="before"))
    else:
        sim.faults.clear()


def requests_of(sim: Simulator) -> int:
    """Return how many requests there were."""
    return sim.ledger.request_count


def invites_of(sim: Simulator) -> list[tuple[str, int, str]]:
    """Return who was invited to which quota, with the link."""
    return [(entry.member_code, entry.quota_id, entry.url) for entry in sim.ledger.invites]


def client_of(address: Address) -> SamplingClient:
    """Return a client of the service."""
    return SamplingClient(address.url, panel_guid=address.panel_guid, api_key=address.api_key)


async def inventory_of(address: Address) -> Quotas:
    """Return the inventory before anything has happened."""
    async with client_of(address) as client:
        return await client.get_quotas()


# --- The clients, each in a process of its own


async def campaign(address: Address, folder: Path, panel: Path, tell: Callable[[dict[str, Any]], None]) -> None:
    """Plan, if there is no plan yet, and run to the end."""
    async with client_of(address) as client, client.watch_quotas(10) as watch:
        live = LiveIndex(watch, kinds=KINDS)
        async with live:
            await live.ready()
            ledger = folder / "campaign.ledger"
            # The simulator counts each invite as a complete, so a quota has room for what it needs and no more.
            needed = rooms_of(await client.get_quotas())
            allocate = Allocate(PER_MEMBER, room=needed[0], survey_room=needed[1])
            night = Campaign(client, panel, live, ledger=ledger, allocate=allocate)
            await read_recontacts(client, live.index)
            began = time.perf_counter()
            plan = await night.plan()
            tell({"plan": time.perf_counter() - began, "pairs": plan.pairs})
            async with night.run() as run:
                async for _ in run:
                    pass
            tell({"reason": run.reason})
            await night.write(folder / "out")


def run_campaign(address: Address, folder: Path, panel: Path, pipe: Connection) -> None:
    """Run the campaign in this process."""
    asyncio.run(campaign(address, folder, panel, pipe.send))


async def top_k(address: Address, panel: Path) -> dict[str, int]:
    """Ask for the best quotas of each member; return the counts of requests and of outcomes."""
    async with client_of(address) as client:
        index = QuotaIndex(await client.get_quotas(), kinds=KINDS)
        await read_recontacts(client, index)
        matcher = PanelMatcher(index, TopK(PER_MEMBER))
        counts: Counter[str] = Counter()
        requests = 0

        def counted() -> Iterator[InviteRequest]:
            nonlocal requests
            for request in matcher.requests(pq.read_table(panel)):
                requests += 1
                yield request

        async with client.fan_out(counted()) as outcomes:
            async for outcome in outcomes:
                counts[outcome.status] += 1
        return {"requests": requests, **counts}


def run_top_k(address: Address, panel: Path) -> dict[str, int]:
    """Ask in this process."""
    return asyncio.run(top_k(address, panel))


async def read_recontacts(client: SamplingClient, index: QuotaIndex) -> None:
    """Read the members of recontact quotas."""
    for target in list(index.quota_ids.targets()):
        if target.survey.is_survey_recontact:
            quota_id = target.quota.quota_id
            index.recontact(quota_id, [code async for code in client.recontact_members(quota_id)])


def rooms_of(quotas: Quotas) -> tuple[dict[int, int], dict[int, int]]:
    """Return what each quota and each survey needs."""
    by_quota = {q.quota_id: q.estimated_completes_remaining for s in quotas.surveys for q in s.quotas}
    by_survey: Counter[int] = Counter()
    for survey in quotas.surveys:
        by_survey[survey.survey_id] += survey.estimated_completes_remaining
    return by_quota, dict(by_survey)


# --- The night


class Night:
    """The campaign's process: started, killed and started again."""

    def __init__(self, address: Address, panel: Path, folder: Path) -> None:
        self._address, self._panel, self._folder = address, panel, folder
        self.told: dict[str, Any] = {}
        self.start()

    def start(self) -> None:
        """Start it, or start it again."""
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (self._address, self._folder, self._panel, theirs)
        self.process = context.Process(target=run_campaign, args=arguments)
        self.process.start()
        theirs.close()

    def kill(self) -> None:
        """Kill it as an operating system does, and start it again."""
        self.process.kill()
        self._read()
        self.start()

    def end(self) -> None:
        """Wait for its end."""
        self._read()
        assert self.process.exitcode == 0, self.process.exitcode

    def _read(self) -> None:
        self.process.join()
        with suppress(EOFError):
            while True:
                # The first plan is the one that was made; later ones are read from the ledger.
                self.told = self._pipe.recv() | self.told


def night(service: Remote, panel: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run the campaign with all troubles; return what was measured."""
    quotas = asyncio.run(inventory_of(service.address))
    quota_ids = [quota.quota_id for survey in quotas.surveys for quota in survey.quotas]
    random.Random(SEED).shuffle(quota_ids)
    total = len(quota_ids)
    to_close = int(total * CLOSED)
    began, closed, away = time.perf_counter(), 0, 0.0
    process = Night(service.address, panel, folder)
    kills = list(KILLED_AT[: options.kills])
    while process.process.is_alive():
        time.sleep(0.25)
        done = service.ask(requests_of) / options.members
        due = min(to_close, int(to_close * done / CLOSED_BY))
        if due > closed and not away:
            service.ask(close, quota_ids[closed:due])
            closed = due
        if kills and done >= kills[0]:
            kills.pop(0)
            process.kill()
        if options.outage and not away and done >= AWAY_AT:
            away = time.perf_counter()
            service.ask(move, is_away=True)
            time.sleep(options.outage)
            service.ask(move, is_away=False)
    process.end()
    invites = service.ask(invites_of)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "quotas": total,
        "closed": closed,
        "kills": options.kills - len(kills),
        "outage": options.outage if away else 0,
        "seconds": time.perf_counter() - began,
        "cpu": usage.ru_utime + usage.ru_stime,
        "memory": usage.ru_maxrss / 1024,
        **process.told,
        **compared(folder / "campaign.ledger", invites),
        **worth(quotas, invites),
    }


def compared(ledger: Path, invites: Sequence[tuple[str, int, str]]) -> dict[str, Any]:
    """Hold a campaign's ledger against the simulator's, pair by pair."""
    database = sqlite3.connect(ledger)
    states = {
        (code, quota): state
        for code, quota, state in database.execute(
            "SELECT m.code, p.quota, p.state FROM pairs AS p JOIN members AS m ON m.id = p.member"
        )
    }
    links = dict(
        database.execute(
            "SELECT i.url, m.code || ' ' || i.quota FROM invites AS i JOIN members AS m ON m.id = i.member"
        ).fetchall()
    )
    made = Counter((code, quota) for code, quota, _ in invites)
    requests = int(database.execute("SELECT value FROM facts WHERE name = 'requests'").fetchone()[0])
    told = {url: f"{code} {quota}" for code, quota, url in invites}
    return {
        "states": Counter(states.values()),
        "requests": requests,
        "invites": len(invites),
        "doubled": sum(count > 1 for count in made.values()),
        "lost": sum(states.get(pair) not in {"invited", "unknown"} for pair in made),
        "lies": sum(told.get(url) != pair for url, pair in links.items())
        + sum(state == "invited" and pair not in made for pair, state in states.items()),
        "unread": sum(states.get(pair) == "unknown" for pair in made),
    }


def worth(quotas: Quotas, invites: Sequence[tuple[str, int, str]]) -> dict[str, Any]:
    """Return what invites are worth, and how full they made the quotas."""
    value = {
        quota.quota_id: survey.price.amount * min(survey.ir, 100) / 100 if survey.ir else survey.price.amount
        for survey in quotas.surveys
        for quota in survey.quotas
    }
    by_quota, by_survey = rooms_of(quotas)
    made = Counter(quota for _, quota, _ in invites)
    most = min(sum(by_quota.values()), sum(by_survey.values()))
    return {
        "value": sum(value[quota] * count for quota, count in made.items()),
        "fill": sum(made.values()) / most,
    }


def plain(service: Remote, panel: Path) -> dict[str, Any]:
    """Ask a service by a plain fan-out; return what was measured."""
    quotas = asyncio.run(inventory_of(service.address))
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    told = fresh(run_top_k, service.address, panel)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    invites = service.ask(invites_of)
    return {
        "seconds": time.perf_counter() - began,
        "cpu": cpu,
        "invites": len(invites),
        **told,
        **worth(quotas, invites),
    }


def show(name: str, found: dict[str, Any]) -> None:
    """Print one row of figures."""
    asked = sum(
        found.get("states", {}).get(state, 0) for state in ("invited", "rejected", "not_sent", "unknown")
    )
    asked = asked or sum(found.get(state, 0) for state in ("invited", "rejected", "not_sent", "unknown"))
    print(
        f"{name}: {found['invites']:,} invites of {asked:,} asked ({found['invites'] / asked:.1%}), "
        f"{found['requests']:,} requests, {found['invites'] / found['requests']:.2f} invites a request, "
        f"value {found['value']:,.0f}, fill {found['fill']:.1%}, {found['seconds']:.0f} s, CPU "
        f"{found['cpu']:.0f} s"
    )


def main() -> None:
    """Run both, and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, default=100_000)
    parser.add_argument("--surveys", type=int, default=800)
    parser.add_argument("--outage", type=float, default=60.0)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--only", choices=("campaign", "top-k"), help="run one of the two")
    parser.add_argument("--keep", metavar="FOLDER", help="keep the files of the campaign here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        panel = Path(temporary) / "panel.parquet"
        if options.only != "top-k":
            folder = Path(options.keep or temporary)
            folder.mkdir(parents=True, exist_ok=True)
            with service(simulated, options.surveys, options.members, panel) as one:
                show_campaign(options, night(one, panel, folder, options))
        if options.only != "campaign":
            with service(simulated, options.surveys, options.members, panel) as other:
                show("TopK and a plain fan-out, no trouble", plain(other, panel))


def show_campaign(options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Print what was measured of the campaign."""
    print(
        f"{options.members:,} members, {found['quotas']:,} quotas, {found['closed']} of them closed meanwhile, "
        f"{found['kills']} kills, {found['outage']:.0f} s away; planned in {found['plan']:.1f} s, peak memory "
        f"{found['memory']:.0f} MiB"
    )
    show("campaign", found)
    print("  " + ", ".join(f"{name} {count:,}" for name, count in found["states"].items()))
    print(
        f"  beside the simulator's ledger: doubled {found['doubled']}, lost {found['lost']}, lies "
        f"{found['lies']}; {found['unread']} unknown pairs have an invite"
    )


if __name__ == "__main__":
    main()
