"""`Campaign`: a panel in, invites out, and an account of every pair."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sampling_async import SamplingClient
from sampling_async._contract.checks import (
    file_path,
    number_above_0,
    require_functions,
    require_instance,
    whole_number,
)
from sampling_async._contract.errors import (
    BadRequestError,
    DecodeError,
    InvalidRequestError,
    PagingError,
    ServerError,
    UnexpectedStatusError,
)
from sampling_async._pacing.threads import CancelFlag, in_thread, run_cancellable
from sampling_async._protocol.lessons import rules_of
from sampling_async.campaign._files import check_partitions, stream_of_pairs, write_files
from sampling_async.campaign._ledger import CampaignLedger, with_ledger
from sampling_async.campaign._limits import Limits
from sampling_async.campaign._planning import Plan, Planner, plan_of
from sampling_async.campaign._possible import made_invites, possible_invites, settled_invites
from sampling_async.campaign._rooms import SharedRoom
from sampling_async.campaign._run import CampaignRun
from sampling_async.campaign._summing import summary_of
from sampling_async.matching import Allocate, LiveIndex, QuotaIndex
from sampling_async.matching._index import require_kinds_and_policy
from sampling_async.notifications._settling import record, settle
from sampling_async.notifications._stores import store_of

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence

    from sampling_async import InviteOutcome, Quotas, Survey
    from sampling_async._protocol.lessons import Lesson, Rule
    from sampling_async.campaign._files import InviteFormat
    from sampling_async.campaign._panel import Panel
    from sampling_async.campaign._planning import Cost, OnMembers
    from sampling_async.campaign._summary import Labels, Summary
    from sampling_async.matching import MatchPolicy, QuestionKinds
    from sampling_async.notifications import OutcomeLedger, Settlements
    from sampling_async.notifications._stores import AnyStore

T = TypeVar("T")

_DAY = 86_400.0


async def _listed(client: SamplingClient, quota_id: int, notes: list[str]) -> list[str]:
    """Return the recontact list of a quota, or no members if the service has no list of it that can be read.

    Quotas close while a plan is made: one of them must not cost the whole plan.
    """
    try:
        return [code async for code in client.recontact_members(quota_id)]
    except (BadRequestError, UnexpectedStatusError, ServerError, DecodeError, PagingError) as exc:
        notes.append(f"quota {quota_id} is left out, because its recontact list cannot be read: {exc}")
        return []


def _ignore(_members: int, _total: int | None) -> None:
    """Show nothing."""


class Campaign:
    """Requests invites for a whole panel, and accounts for every pair of a member and a quota.

        campaign = Campaign(client, "panel.parquet", ledger="night.ledger", allocate=Allocate(5))
        print(await campaign.plan())
        async with campaign.run() as run:
            async for outcome in run: ...
        await campaign.write("night")

    `plan` checks and matches the panel, and writes the pairs to the ledger; nothing is sent. `run` requests the
    pairs. It reacts to refusals: the pairs of a full quota are skipped, and its members get their next best
    quotas. At all times, `planned = invited + rejected + not_sent + unknown + skipped + pending`.

    Each pair is written to the ledger before it is sent. So a run that was killed can be resumed, in this
    process or another one, and without the panel. What was in flight at the kill is `unknown`, and is not
    requested again.

    A ledger belongs to one service and panel. It holds member codes and links, so only its owner can read it.
    One run at a time can use it. Meanwhile, other processes may read it and change its limits.

    Args:
        client: The client that sends the requests. It may be None if nothing is to be sent: to look at a
            ledger, to change its limits, or to plan with a given inventory, without its recontact lists.
        panel: The members: a file (.parquet, .csv, .jsonl, .ndjson), a DuckDB query, an Arrow table or data
            frame, or a function that opens an Arrow stream. It is read twice. See `PanelMatcher` for the
            columns. None if the plan is in the ledger already.
        inventory: What `get_quotas` returned, or surveys; or a `QuotaIndex`, with its recontact lists; or a
            `LiveIndex` whose block is open: what it shows as closed is no longer requested. None: the client
            reads the inventory and its recontact lists.
        ledger: The file of the ledger.
        allocate: How quotas are divided among members. Its `reserves` are `per_member` if they are not given.
        lessons: What is done about result codes: a `Rule` or `Lesson` by code. For all other codes, `LESSONS`
            counts.
        limits: The limits to begin with; see `limit` for changing them.
        cost: What an invite costs you, for `Limits.max_spend`: one number, by quota ID, or a function of the
            `Survey` and the `Quota`. If an invite's own `member_amount` is higher, that counts.
        columns: The names of columns in your panel, each with the question ID or the usual name it stands for.
        kinds: How questions are matched, if `inventory` is no index.
        policy: The rules of matching, if `inventory` is no index.
        leave_out: Earlier nights: the folders of campaigns (or one that holds such folders), their ledgers, and
            stores of notifications, outcomes and links. What a member holds, took, or was refused for good
            there is not planned again. Another wave of a survey is, unless both waves are open.
        share_room: A store that campaigns of several panels on one service share. A plan leaves to others the
            room of quotas that they hold there, and takes what it needs itself. What a run did not use is free
            when it ends; a campaign whose run was killed, or that is not run, holds its room for a day.
        workers: How many processes match the panel.
        max_turns: The most requests for one member. Those after the first replace refused quotas.
        retry_seconds: After a technical error, the seconds until the pair is requested again.
        wall_clock: Returns seconds since 1970.
        clock: Returns seconds, for latencies and the invites a minute.

    Raises:
        InvalidRequestError: An argument is not possible.
    """

    def __init__(
        self,
        client: SamplingClient | None,
        panel: Panel | None = None,
        inventory: Quotas | Iterable[Survey] | QuotaIndex | LiveIndex | None = None,
        *,
        ledger: str | os.PathLike[str],
        allocate: Allocate | None = None,
        lessons: Mapping[int, Rule | Lesson] | None = None,
        limits: Limits | None = None,
        cost: Cost = 0.0,
        columns: Mapping[str, str] | None = None,
        kinds: QuestionKinds | None = None,
        policy: MatchPolicy | None = None,
        leave_out: Sequence[AnyStore] | None = None,
        share_room: AnyStore | None = None,
        workers: int = 1,
        max_turns: int = 3,
        retry_seconds: float = 60.0,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        require_instance(client, SamplingClient | None, "client", "a SamplingClient, or None to only plan")
        require_instance(allocate, Allocate | None, "allocate", "an Allocate, such as Allocate(per_member=5)")
        require_instance(lessons, Mapping | None, "lessons", "rules by result code, such as {9: Lesson.QUOTA}")
        require_instance(limits, Limits | None, "limits", "a Limits, such as Limits(max_invites=1000)")
        require_instance(columns, Mapping | None, "columns", "names by column, such as {'age': '2006352'}")
        require_kinds_and_policy(kinds, policy)
        require_functions(wall_clock=wall_clock, clock=clock)
        self.ledger = file_path(ledger, "ledger")
        self._client, self._panel = client, panel
        # Each plan reads it.
        self._inventory = tuple(inventory) if isinstance(inventory, Iterator) else inventory
        self._allocate = allocate or Allocate(5)
        self._rules = rules_of(lessons)
        self._limits, self._cost = limits, cost
        # Returns what is written into the ledger together with a plan; for other parts of this package.
        self.facts_with_plan: Callable[[CampaignLedger], Mapping[str, object]] = lambda _: {}
        self._columns = dict(columns or {})
        self._kinds, self._policy = kinds, policy
        require_instance(leave_out, list | tuple | None, "leave_out", "a list of paths and stores")
        self._leave_out = tuple(leave_out or ())
        if share_room is not None:
            store_of(share_room)  # a bad address is refused here
        self._share_room = share_room
        self._workers = whole_number(workers, "workers")
        self._max_turns = whole_number(max_turns, "max_turns")
        self._retry_seconds = number_above_0(retry_seconds, "retry_seconds", "seconds")
        self._wall_clock, self._clock = wall_clock, clock

    def __repr__(self) -> str:
        return f"<Campaign {self.ledger}>"

    # --- The plan

    async def plan(self, *, on_members: OnMembers = _ignore) -> Plan:
        """Return the plan in the ledger; make it if there is none. Nothing is sent, except to read quotas.

        The whole panel is checked: columns, answers, and that each member code occurs once.

        Args:
            on_members: A function for a progress display. It is called in a thread, with the number of members
                read, and the number to read or None if that is not known. The panel is read twice, unless
                `Allocate` has prices.

        Raises:
            InvalidRequestError: The panel cannot be used; the text names the row or column. Or the ledger has
                no plan, and there is no panel.
            LedgerError: The ledger cannot be used.
            SamplingError: The quotas could not be read.
        """
        if self.ledger.exists():
            found = await self._reading(plan_of)
            if found is not None:
                return found
        return await self._planning(await self._planner(on_members), None)

    async def top_up(self, *, open_seconds: float = _DAY, on_members: OnMembers = _ignore) -> Plan:
        """Plan again for the completes that are still missing, in the same ledger, and return the plan.

        The inventory and the panel are read again. If a survey was requested for a member before, the member
        does not get it again. There is one exception: all those requests were refused for a reason that may
        have passed, such as a full quota, a member at its daily limit, or a technical error. A profile that
        does not match, or a survey that was taken, is no such reason.

        An invite that may still end in a complete takes up room of its quota, and counts against what its
        member may get. Pairs that were pending end as skipped.

        Args:
            open_seconds: How long an invite counts as one that may still end in a complete.
            on_members: As for `plan`.

        Raises:
            InvalidRequestError: As for `plan`.
            LedgerError: The ledger cannot be used, or a run is using it.
            SamplingError: The quotas could not be read.
        """
        number_above_0(open_seconds, "open_seconds", "seconds")
        if await self._reading(plan_of) is None:
            raise InvalidRequestError(f"the ledger {self.ledger} has no plan yet: call plan() first")
        return await self._planning(await self._planner(on_members), open_seconds)

    async def _planner(self, on_members: OnMembers = _ignore) -> Planner:
        if self._panel is None:
            raise InvalidRequestError(f"the ledger {self.ledger} has no plan yet, and a plan needs a panel")
        inventory = self._inventory
        if inventory is None:
            inventory = await self._require_client().get_quotas()
        notes: list[str] = []
        if isinstance(inventory, QuotaIndex | LiveIndex):
            # One state for all steps of the plan, which take a while: quotas close meanwhile.
            index = inventory.snapshot()
        else:
            index = await in_thread(partial(QuotaIndex, inventory, kinds=self._kinds, policy=self._policy))
            if self._client is not None:
                # So that recontact quotas are requested for nobody else.
                for target in list(index.quota_ids.targets()):
                    if target.survey.is_survey_recontact:
                        quota_id = target.quota.quota_id
                        index.recontact(quota_id, await _listed(self._client, quota_id, notes))
        return Planner(
            panel=self._panel,
            index=index,
            allocate=self._allocate,
            rules=self._rules,
            cost=self._cost,
            columns=self._columns,
            workers=self._workers,
            on_members=on_members,
            notes=notes,
            leave_out=self._leave_out,
            owner=self._owner,
        )

    @property
    def _owner(self) -> tuple[str, str] | None:
        if (client := self._client) is None:
            return None
        return str(client._base_url), client._panel_guid.lower()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]

    def _rooms(self, ledger: CampaignLedger) -> SharedRoom | None:
        if self._share_room is None:
            return None
        if self._owner is None:
            raise InvalidRequestError("share_room needs a client: it says on which service the quotas are")
        return SharedRoom.of(ledger, self._share_room, self._owner[0])

    def _require_client(self) -> SamplingClient:
        if self._client is None:
            raise InvalidRequestError("this campaign has no client, so it cannot ask the service")
        return self._client

    async def _planning(self, planner: Planner, open_seconds: float | None) -> Plan:
        # A thread that is left behind would hold the ledger, and make the plan although it was cancelled.
        return await run_cancellable(lambda wanted: self._planned(planner, open_seconds, wanted))

    def _planned(self, planner: Planner, open_seconds: float | None, wanted: CancelFlag) -> Plan:
        ledger = CampaignLedger(self.ledger)
        is_locked = False
        try:
            ledger.open(make=True)
            # A run must not find its plan changed under it, and nobody else plans meanwhile.
            ledger.lock()
            is_locked = True
            # What a killed run had in flight may be invites: it must not end as skipped, and be asked again.
            ledger.end_lost()
            # Another process may have planned since we looked, and may even have requested some pairs.
            if not ledger.plan or open_seconds is not None:
                facts = dict(self.facts_with_plan(ledger))
                if open_seconds is None and self._limits is not None:
                    # Together with the plan: a run must never find the one without the other.
                    facts["limits"] = self._limits.to_json()
                rooms, now = self._rooms(ledger), self._wall_clock()
                planner.plan_beside_others(
                    rooms, ledger, wanted, now=now, open_seconds=open_seconds, facts=facts
                )
            found = plan_of(ledger)
        finally:
            # A file without a plan is of no use.
            ledger.close(removed=is_locked and not ledger.plan)
        assert found is not None
        return found

    # --- The run

    def run(self) -> CampaignRun:
        """Return a run of what is pending: a block, and in it an async iterator of outcomes.

        Raises:
            LedgerError: On entering: the ledger cannot be used, has no plan, belongs to another service or
                panel, or another run is using it.
        """
        is_open = self._inventory.is_open if isinstance(self._inventory, LiveIndex) else _always
        return CampaignRun(
            self._require_client(),
            CampaignLedger(self.ledger),
            self._rules,
            is_open=is_open,
            rooms=self._rooms,
            max_turns=self._max_turns,
            retry_seconds=self._retry_seconds,
            wall_clock=self._wall_clock,
            clock=self._clock,
        )

    async def limit(self, **changes: Any) -> Limits:
        """Change some limits, see `Limits`, and return all. A run applies them within a second, in any process.

            await campaign.limit(invites_per_minute=600, max_invites=20_000)

        Raises:
            InvalidRequestError: A limit is unknown, or its value is not possible.
            LedgerError: The ledger cannot be used.
        """

        def change(ledger: CampaignLedger) -> Limits:
            return ledger.change_limits(**changes)

        return await in_thread(with_ledger, self.ledger, change)

    async def pause(self, reason: str = "") -> None:
        """Let a run request nothing more until `resume`. Responses to what is in flight are still processed."""
        await self.limit(paused=True, reason=reason)

    async def resume(self) -> None:
        """Let a paused run continue."""
        await self.limit(paused=False, reason="")

    # --- What became of it

    async def summary(self, outcomes: OutcomeLedger | None = None) -> Summary:
        """Return what became of the campaign so far, whether a run is active or not.

        Args:
            outcomes: A ledger of outcomes: what the invites have brought is in `Summary.ends` then.

        Raises:
            LedgerError: The ledger cannot be read, or has no plan.
            StoreError: The outcomes cannot be read.
        """
        return await self._reading(lambda ledger: summary_of(ledger, self._rules, outcomes))

    async def settle(self, outcomes: OutcomeLedger) -> Settlements:
        """Settle unknown pairs by the notifications of a store, write that down, and return what was new.

        First the invites and the unknown pairs are recorded in the store, so that other campaigns and routers
        know of them.

        A pair is settled as invited if an invite notification, a completion or a terminate of its member can be
        about no other pair: neither of this campaign, nor an invite or a link that the store knows. The pair
        stays `unknown` in its counts, `Summary.settled` counts it, and its link stays unknown. Nothing that
        comes proves that there is no invite. A run may be active meanwhile.

        Raises:
            LedgerError: The ledger cannot be read or written, or has no plan.
            StoreError: The store cannot be read or written.
        """
        store = outcomes.store

        def recorded(ledger: CampaignLedger) -> None:
            unknown = (each for each in possible_invites(ledger) if each.unknown_since is not None)
            record(store, made_invites(ledger), unknown, self._wall_clock())

        def found(ledger: CampaignLedger) -> Settlements:
            return settle(store, possible_invites(ledger))

        def written(ledger: CampaignLedger) -> None:
            ledger.settle(settlements.settled)
            record(store, settled_invites(ledger), (), self._wall_clock())

        await self._reading(recorded)
        settlements = await self._reading(found)
        if settlements.settled:
            await in_thread(with_ledger, self.ledger, written)
        return settlements

    async def invites(self) -> AsyncIterator[InviteOutcome]:
        """Yield the invites of all runs so far, in the order in which they were made, as outcomes.

            await outcomes.invited([outcome async for outcome in campaign.invites()])

        Invites that no loop has seen, because the process was killed, are among them. Those of erased members
        are not. A run may be active meanwhile. Some thousand invites are read at a time.

        Raises:
            LedgerError: While iterating: the ledger cannot be read.
        """
        last = 0
        while some := await self._reading(partial(CampaignLedger.invites, after=last)):
            for last, outcome in some:  # noqa: B007  the last one is used
                yield outcome

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Export what became of each pair so far to a data frame, by the Arrow C stream interface.

            polars.DataFrame(campaign)

        The columns are those of `pairs.parquet`. Some thousand rows are read at a time, where the stream is
        used: in a service, call that in a thread.

        Raises:
            LedgerError: The ledger cannot be read.
        """
        return stream_of_pairs(self.ledger, requested_schema)

    async def write(
        self,
        folder: str | os.PathLike[str],
        *,
        partitions: Sequence[str] = (),
        kind: InviteFormat = "parquet",
        title: str = "Campaign",
        outcomes: OutcomeLedger | None = None,
        labels: Labels | None = None,
    ) -> Summary:
        """Write the files of the campaign to a folder, each when it is complete, and return the summary.

        They are `invites.parquet` (or `.jsonl`, or a folder `invites` with partitions), `pairs.parquet` with
        what became of each pair, `summary.json`, and `report.html`, a page that loads nothing. The files of an
        earlier call are replaced, also invites in another format.

        Args:
            folder: It is made if there is none.
            partitions: Any of survey_id, wave_id, quota_id, day: invites are divided into folders by them.
            kind: The format of the invites.
            title: The title of the report.
            outcomes: A ledger of outcomes. With it, the report and the summary have completes, terminates,
                revenue and reconciliations, by survey, quota and hour. Call `write` again when more surveys
                have ended.
            labels: What questions and answers are called in the report.

        Raises:
            InvalidRequestError: There is no such partition or format, a file cannot be written, or the folder
                holds files in their place that are not of this campaign.
            OSError: The disk is full, or fails.
            LedgerError: The ledger cannot be read, or has no plan.
            StoreError: The outcomes cannot be read.
            ImportError: Jinja2 is missing, of the extra `panel`.
        """
        check_partitions(partitions, kind)
        where = Path(folder)

        def write(wanted: CancelFlag) -> Summary:
            return with_ledger(
                self.ledger,
                lambda ledger: write_files(
                    ledger,
                    self._rules,
                    where,
                    wanted,
                    partitions=partitions,
                    kind=kind,
                    title=title,
                    outcomes=outcomes,
                    labels=labels,
                ),
                reads=True,
            )

        # A thread that is left behind would replace what the next call writes.
        return await run_cancellable(write)

    async def _reading(self, work: Callable[[CampaignLedger], T]) -> T:
        return await in_thread(partial(with_ledger, self.ledger, work, reads=True))


def _always(_: int) -> bool:
    return True
