"""The commands `campaign run` and `campaign top-up`: plan, question, run and files, whatever ends the run.

No member code and no link is shown anywhere here.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import anyio
import typer
from attrs import asdict, define, evolve, field, frozen
from rich.live import Live

from sampling_async import InvalidRequestError
from sampling_async._cli import _campaign_view as view
from sampling_async._cli import _connection
from sampling_async._cli import _rendering as show
from sampling_async._cli._campaign import DEFAULTS, FILES, NONE, LimitOptions, RunOptions, Settings
from sampling_async._cli._connection import ServiceOptions, fail, silence_stdout
from sampling_async._cli._files import read_labels, read_rates
from sampling_async._cli._match_run import read_inventory
from sampling_async._cli._signals import SignalHandler
from sampling_async._cli._stores import existing_store, is_new
from sampling_async._cli._tally import CAPPED, DONE, INCOMPLETE, USAGE
from sampling_async._cli._top import CAMPAIGN_SOCKET
from sampling_async._contract.checks import count_of
from sampling_async.campaign import Campaign, Plan
from sampling_async.campaign._files import check_partitions, require_own_folder
from sampling_async.campaign._ledger import with_ledger
from sampling_async.campaign._ledger_file import LEDGER_NAME
from sampling_async.campaign._planning import NothingOpenError, plan_of
from sampling_async.matching import Allocate, LiveIndex
from sampling_async.matching.panel import INVITES_LEFT, OTHERS, REGION, is_query
from sampling_async.notifications import Inbox, OutcomeLedger, PostgresStore, StoreError
from sampling_async.notifications._postgres import is_dsn

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from sampling_async import SamplingClient
    from sampling_async._protocol.lessons import LearnedRates
    from sampling_async.campaign import CampaignRun, Summary
    from sampling_async.campaign._ledger import CampaignLedger

_OTHERS: Final = OTHERS | {INVITES_LEFT, REGION}  # the columns that are not questions
_GRACE: Final = 10.0  # seconds that requests in flight have after a signal, so that their outcomes are known
_LINES: Final = 2.0


@frozen
class _RunnableCampaign:
    plan: Plan
    settings: Settings
    has_run: bool  # whether a run has begun that plan
    most: int | None  # how many more invites its cap allows

    def in_words(self) -> str:
        pairs = f"{count_of(self.plan.pairs, 'pair')}"
        if self.most is None or self.most >= self.plan.pairs:
            return pairs
        return f"{pairs}, up to {count_of(self.most, 'invite')}"


@define
class CampaignJob:
    service: ServiceOptions
    folder: Path
    given: Settings
    limits: LimitOptions
    options: RunOptions

    @property
    def _ledger(self) -> Path:
        return self.folder / LEDGER_NAME

    # --- The plan

    def run(self, panel: str | None) -> NoReturn:
        """Run the campaign, after a plan if there is none."""
        require_own_folder(self.folder, self._ledger)
        changes, given, known = self.limits.changes(), self._given(panel), None
        if self._ledger.exists():
            known = with_ledger(
                self._ledger, lambda ledger: view.saved_in(ledger) if ledger.plan else None, reads=True
            )
        if known is not None:
            given.refuse_another_plan(known, self.folder)
            saved = _checked(given.over(known))
            ready = self._saved(saved, changes)
            self._go(ready, is_finished=not ready.plan.pairs and ready.plan.number > 1)
        if given.panel is None:
            raise InvalidRequestError(f"{self.folder} holds no campaign yet: give the PANEL that it is for")
        saved = _checked(given.over(DEFAULTS))
        new = [each for each in (self.folder, *self.folder.parents) if not each.exists()]
        try:
            # What is written there holds member codes and links.
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as exc:
            raise InvalidRequestError(f"--out {self.folder}: {exc.strerror}") from None
        try:
            self._plan(saved, Campaign.plan, changes)
        except BaseException:
            with suppress(OSError):  # only empty ones can be removed
                for each in new:
                    each.rmdir()
            raise
        self._go(self._saved(saved, {}))

    def top_up(self, panel: str | None) -> NoReturn:
        """Plan anew in the ledger, and run that."""
        require_own_folder(self.folder, self._ledger)
        changes = self.limits.changes()
        known = with_ledger(view.ledger_in(self.folder), view.saved_in, reads=True)
        settings = self._given(panel).over(known)
        if settings.panel is None:
            raise InvalidRequestError(f"{self._ledger} does not say which panel it was planned for: give PANEL")
        saved = _checked(settings)
        self._plan(saved, Campaign.top_up, changes)
        self._go(self._saved(saved, {}))

    def _given(self, panel: str | None) -> Settings:
        """Return what was given, with whole paths, because a later command may run in another folder."""
        read_labels(self.given.labels)  # of one that was given before, the report says what is wrong
        values: dict[str, Any] = asdict(self.given) | {"panel": panel}
        for name in FILES:
            values[name] = values[name] and values[name].absolute()
        for name, is_other in (("panel", is_query), ("notifications", is_dsn), ("rates_from", is_dsn)):
            if values[name] is not None and not is_other(values[name]):
                values[name] = str(Path(values[name]).absolute())
        if values["share_room"] is not None:
            values["share_room"] = _whole(values["share_room"])
        earlier = [NONE if each.casefold() == NONE else each.strip() for each in values["leave_out"] or ()]
        if "" in earlier or (NONE in earlier and len(earlier) > 1):
            raise InvalidRequestError("--leave-out takes folders and stores, or none alone")
        values["leave_out"] = [*map(_whole, earlier)]
        return Settings(**values)

    def _plan(self, settings: Settings, make: Callable[..., Any], changes: dict[str, Any]) -> None:
        def facts(ledger: CampaignLedger) -> dict[str, object]:
            return {view.SAVED: settings.to_json(), "limits": ledger.limits().changed(**changes).to_json()}

        assert settings.panel is not None
        match = settings.matching(self.options.workers)
        campaign = partial(
            Campaign,
            panel=settings.panel,
            ledger=self._ledger,
            allocate=_allocate(settings, _rates_of(settings)),
            cost=settings.cost or 0.0,
            columns=match.renamed(_OTHERS),
            kinds=match.kinds(None if is_query(settings.panel) else Path(settings.panel)),
            policy=match.policy,
            leave_out=settings.earlier,
            share_room=settings.shared_room,
            workers=match.processes,
        )
        if self.options.inventory is None or not self.options.dry_run:
            self.service.get_ready()  # asks for the key before the work, not after

        async def made(client: SamplingClient | None, **inventory: Any) -> None:
            # The bar covers this only, so that errors are printed after it has disappeared.
            with show.progress_bar(total_known=True) as bar:
                task = bar.add_task("Matching the panel", total=None)

                def show_members(members: int, total: int | None) -> None:
                    bar.update(task, completed=members, total=total)

                planned = campaign(client, **inventory)
                planned.facts_with_plan = facts  # with it, or a kill between the two would lose a cap
                try:
                    await make(planned, on_members=show_members)
                except NothingOpenError as exc:
                    fail(exc.args[0], INCOMPLETE)

        if self.options.inventory is None:
            self.service.call(made)
        else:
            # With an inventory, planning sends no requests and needs no client.
            anyio.run(partial(made, None, inventory=read_inventory(self.options.inventory)))

    def _saved(self, saved: Settings, changes: dict[str, Any]) -> _RunnableCampaign:
        """Save what later commands need, and return the campaign as its ledger has it."""

        def save(ledger: CampaignLedger) -> _RunnableCampaign:
            # Locked first: nothing is changed while another run uses the ledger.
            ledger.lock()
            ledger.note(**{view.SAVED: saved.to_json()})
            limits = ledger.change_limits(**changes)
            if limits.max_spend is not None and not saved.cost:
                show.warn("without --cost, --max-spend counts only amounts that invites name for members")
            cap = limits.max_invites
            plan = plan_of(ledger)
            assert plan is not None
            # Not by times: clocks are set back.
            has_run = ledger.fact("begun_plan") == str(plan.number)
            return _RunnableCampaign(
                plan, saved, has_run, None if cap is None else max(0, cap - ledger.invited())
            )

        return with_ledger(self._ledger, save)

    # --- The question

    def _go(self, ready: _RunnableCampaign, *, is_finished: bool = False) -> NoReturn:
        """Run the plan. If it is finished, as after a top-up that found nothing, only the files are written."""
        if self.options.dry_run or not ready.has_run:
            view.show_plan(ready.plan)
        if self.options.dry_run:
            if show.as_lines():
                show.emit_json(view.plan_json(ready.plan))
            show.note(self._nothing_requested)
            raise typer.Exit(DONE)
        if not ready.plan.pairs and not is_finished:
            fail("no member matches a quota with room, so there is nothing to request", INCOMPLETE)
        if not (ready.has_run or self.options.yes or is_finished):
            self._ask(ready)
        as_lines = show.as_lines() or not show.errors().is_terminal
        run = ShownRun(self.folder, self._ledger, ready.settings, as_lines)
        self.service.get_ready()
        raise typer.Exit(self.service.call(run.work))

    @property
    def _nothing_requested(self) -> str:
        return f"Nothing was requested. The plan is saved. To run it: {view.resume_command(self.folder)}"

    def _ask(self, ready: _RunnableCampaign) -> None:
        if not _connection.somebody_is_there():
            fail(
                f"this requests {ready.in_words()}, and there is no terminal to confirm that: give --yes", USAGE
            )
        typer.echo(f"Request {ready.in_words()}? [y/N] ", err=True, nl=False)
        if sys.stdin.readline().strip().casefold() not in {"y", "yes"}:
            typer.echo(self._nothing_requested, err=True)
            raise typer.Exit(INCOMPLETE)


def _allocate(settings: Settings, rates: LearnedRates | float) -> Allocate:
    return Allocate(
        settings.allocate or 5,
        overshoot=settings.overshoot or 1.0,
        rates=rates,
        currency_rates=read_rates(settings.currency_rates),
    )


def _rates_of(settings: Settings) -> LearnedRates | float:
    if settings.rates_from is None:
        return settings.rate or 1.0
    rates = anyio.run(OutcomeLedger(existing_store(settings.rates_from)).rates)
    counted = sum(invites for invites, _ in rates.surveys.values())
    if counted:
        show.note(f"Rates of {count_of(counted, 'invite')} are used.")
    else:
        show.warn(
            f"{settings.rates_from} has no recorded invite that is older than six hours, so the IR counts."
            " To record invites: sampling-async outcomes --store STORE --invites LEDGER"
        )
    return rates


def _whole(store: str) -> str:
    """Return a store as another folder has it; `none` stays."""
    return store if store == NONE or is_dsn(store) else str(Path(store).absolute())


def _require_saveable(option: str, address: str) -> None:
    """Refuse the address of a store that holds a password, because it is saved with the campaign."""
    store = existing_store(address)
    if isinstance(store, PostgresStore) and store.has_password:
        raise InvalidRequestError(
            f"{option} is saved with the campaign: leave the password out of the address, and give it in"
            " PGPASSWORD or ~/.pgpass"
        )


def _check_shared(store: str) -> None:
    if not is_dsn(store) and (Path(store).is_dir() or not Path(store).parent.is_dir()):
        raise InvalidRequestError(f"--share-room takes a file in a folder that is there, not {store}")
    if is_new(store):
        show.note(f"{store} is new: no other campaign shares its room yet.")
    else:
        _require_saveable("--share-room", store)


def _checked(settings: Settings) -> Settings:
    """Return settings if all can be used. They are checked before the first request, which may take long."""
    settings.matching().renamed(_OTHERS)
    check_partitions(settings.partition or (), settings.format or "parquet")
    for option, value in (("--overshoot", settings.overshoot), ("--rate", settings.rate)):
        if value is not None and value <= 0:
            raise InvalidRequestError(f"{option} must be above 0, not {value:g}")
    if settings.notifications is not None:
        _require_saveable("--notifications", settings.notifications)
        if not settings.watch:
            raise InvalidRequestError("--notifications needs --watch: both are about what is closed meanwhile")
    if settings.rates_from is not None:
        if settings.rate not in (None, DEFAULTS.rate):
            raise InvalidRequestError("--rate and --rates-from are two sources of one number: give one of them")
        _require_saveable("--rates-from", settings.rates_from)
    if settings.shared_room is not None:
        _check_shared(settings.shared_room)
    for each in filter(is_dsn, settings.leave_out or ()):
        _require_saveable("--leave-out", each)
    # The file of rates is only needed for a plan: a campaign goes on without it.
    _allocate(evolve(settings, currency_rates=None), settings.rate or 1.0)
    return settings


# --- A run


@define
class ShownRun:
    """A run of the campaign in a folder, shown live on a terminal or as lines of JSON, and its end."""

    folder: Path
    ledger: Path
    settings: Settings
    as_lines: bool
    _signals: SignalHandler = field(factory=SignalHandler)
    _metrics: view.RunMetrics | None = None  # None until the run has begun

    async def work(self, client: SamplingClient) -> int:
        """Request the pending pairs; then write the files, even if that failed. Return the exit code.

        It is 0 if nothing is pending and the fate of each pair is known, and 6 if a cap left pairs pending.
        """
        summary = None
        with self._signals:
            try:
                with self._signals.scope:
                    await self._run(client)
            finally:
                self._signals.on_first_signal = None
                if (metrics := self._metrics) is not None:
                    summary = await self._write(self._campaign(client))
                    metrics.ended_as = "stopped" if summary.pairs.pending else summary.state
                    self._write_line(metrics)
                    self._show_end(summary, metrics.run)
        if self._signals.received:
            fail(self._signals.in_words, self._signals.exit_code)
        assert metrics is not None
        assert summary is not None
        unclear = summary.pairs.unknown - summary.settled + summary.pairs.not_sent
        if not summary.pairs.pending + unclear:
            return DONE
        if not unclear and _is_capped(metrics.run):
            return CAPPED
        return metrics.tally.exit_code() or INCOMPLETE

    async def _run(self, client: SamplingClient) -> None:
        async with (
            following(client, self.settings) as live,
            self._campaign(client, live).run() as run,
            AsyncExitStack() as stack,
        ):
            self._signals.on_first_signal = partial(self._stop, run)
            self._metrics = metrics = view.RunMetrics(run, client)
            # `top --out` sees it, where the system has such sockets and the path is short enough.
            with suppress(OSError, AttributeError):
                await stack.enter_async_context(client.serve_snapshots(self.folder / CAMPAIGN_SOCKET))
            async with self._shown(metrics):
                async for outcome in run:
                    metrics.add(outcome)

    @asynccontextmanager
    async def _shown(self, metrics: view.RunMetrics) -> AsyncGenerator[None]:
        """Keep what is shown up to date while this block is open."""
        console = show.stderr_console()
        # Lines of JSON and a live display on one screen would write into each other.
        is_live = console.is_terminal and not console.quiet and (not self.as_lines or show.stdout_is_file())
        live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False)
        line_due = time.monotonic() + _LINES

        def draw() -> None:
            nonlocal line_due
            if is_live:
                metrics.measure()
                live.update(view.figures_view(metrics), refresh=True)
            if not show.wanted.quiet and time.monotonic() >= line_due:
                line_due += _LINES
                self._write_line(metrics)

        with live if is_live else nullcontext():
            async with show.redrawn(draw, view.REDRAWN):
                yield

    def _write_line(self, metrics: view.RunMetrics) -> None:
        """Write a line of JSON, if lines are wanted. A reader that went away does not end a campaign."""
        if not self.as_lines:
            return
        try:
            metrics.measure()
            show.emit_json(view.figures_json(metrics))
        except BrokenPipeError:
            self.as_lines = False
            silence_stdout()

    async def _write(self, campaign: Campaign) -> Summary:
        write = partial(campaign.write, self.folder, **view.file_options(self.folder, self.settings))
        try:
            outcomes = view.ledger_of_outcomes(self.settings)
        except InvalidRequestError as exc:  # the store was moved away
            show.note(f"The files are without completes and revenue: {exc}")
            return await write()
        try:
            await view.settle(campaign, outcomes)
            return await write(outcomes=outcomes)
        except StoreError as exc:
            show.note(f"The files are without completes and revenue: {exc}")
            return await write()

    def _campaign(self, client: SamplingClient, live: LiveIndex | None = None) -> Campaign:
        return Campaign(
            client,
            inventory=live,
            ledger=self.ledger,
            share_room=self.settings.shared_room,
            max_turns=self.settings.max_turns or 3,
        )

    def _stop(self, run: CampaignRun) -> None:
        """After a signal, send no more requests; wait some seconds for those in flight."""
        run.stop(self._signals.in_words)
        # A service that is away answers nothing.
        grace = 0.0 if run.waiting_for == "outage" else _GRACE
        self._signals.scope.deadline = asyncio.get_running_loop().time() + grace

    def _show_end(self, summary: Summary, run: CampaignRun) -> None:
        console = view.on_stderr()
        if summary.pairs.pending:
            text = f"The campaign has stopped: {run.reason or summary.reason}"
            console.print(show.plain(text, "bold yellow"))
        else:
            console.print("The campaign is finished", style="bold green")
        console.print(view.account(summary.pairs))
        console.print(
            f"{count_of(summary.requests, 'request')}, expected value {summary.worth()},"
            f" success rate {summary.success_rate:.1%}"
        )
        if ends := view.ends_text(summary):
            console.print(show.plain(ends))
        view.print_codes(summary, console)
        if summary.unknown_in_words:
            console.print(summary.unknown_in_words)
        elif summary.pairs.unknown:
            console.print("Unknown: an invite may exist; such a pair is not requested again.")
        show.note(f"Files: {self.folder} (invites, pairs, summary.json, report.html)")
        if not summary.pairs.pending:
            return
        if run.limits.paused:
            show.note(f"It is paused. To end that: sampling-async campaign resume {view.quoted(self.folder)}")
        elif _is_capped(run):
            show.note(f"To change the cap: sampling-async campaign limit {view.quoted(self.folder)} ...")
        pending = count_of(summary.pairs.pending, "pending pair")
        show.note(f"{pending} left. To go on: {view.resume_command(self.folder)}")


def _is_capped(run: CampaignRun) -> bool:
    """Return whether a run ended as it was told to, at its cap."""
    return run.reason.startswith("the cap")


@asynccontextmanager
async def following(client: SamplingClient, settings: Settings) -> AsyncGenerator[LiveIndex | None]:
    """Follow what closes while this block is open; None if that is not wanted."""
    if not settings.watch:
        yield None
        return
    store = None if settings.notifications is None else existing_store(settings.notifications)
    # Notifications from before the first poll have no effect: the poll is newer.
    last = 0 if store is None else store.last_id()
    async with client.watch_quotas(settings.watch) as watch:
        await watch.refresh()
        async with LiveIndex(watch) as live:
            if store is None:
                yield live
                return
            # This inbox is never entered, so it accepts nothing: only its facts are read. Its secret is not
            # published, and nothing is written to the store of the process that serves.
            inbox = Inbox(store, secrets=secrets.token_urlsafe(32))
            async with live.follow(inbox, after=last):
                yield live
