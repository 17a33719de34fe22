"""One call of `campaign run` or `campaign top-up`: a plan, a question, a run, and its files."""

from __future__ import annotations

import asyncio
import secrets
import shlex
import sys
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import anyio
import typer
from attrs import define, evolve, field, frozen

from sampling_async import InvalidRequestError
from sampling_async._cli import _campaign_view as view
from sampling_async._cli import _connection
from sampling_async._cli import _rendering as show
from sampling_async._cli._campaign_options import DEFAULTS, LimitOptions, RunOptions, SavedOptions, Settings
from sampling_async._cli._campaign_view import Display, RunMetrics
from sampling_async._cli._connection import ServiceOptions, fail
from sampling_async._cli._currencies import read_rates
from sampling_async._cli._panel_files import read_inventory
from sampling_async._cli._signals import SignalHandler
from sampling_async._cli._stores import existing_store
from sampling_async._cli._tally import CAPPED, DONE, INCOMPLETE, USAGE
from sampling_async._contract.checks import count_of
from sampling_async.campaign import Campaign, Limits, Plan
from sampling_async.campaign._files import check_partitions, require_own_folder
from sampling_async.campaign._ledger import with_ledger
from sampling_async.campaign._planning import plan_of
from sampling_async.matching import Allocate, LiveIndex
from sampling_async.matching.panel import INVITES_LEFT, OTHERS, is_query
from sampling_async.notifications import Inbox, OutcomeLedger, PostgresStore, StoreError
from sampling_async.notifications._postgres import is_dsn

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from sampling_async import SamplingClient
    from sampling_async._protocol.rates import LearnedRates
    from sampling_async.campaign import CampaignRun, Summary
    from sampling_async.campaign._ledger import CampaignLedger

T = TypeVar("T")

LEDGER: Final = "campaign.ledger"  # the file of the ledger in the folder of a campaign
_SAVED: Final = "command"  # the fact of the ledger that holds what later commands need
_GRACE: Final = 10.0  # seconds that requests in flight have after a signal, so that their outcomes are known


def ledger_in(folder: Path) -> Path:
    path = folder / LEDGER
    if not path.is_file():
        raise InvalidRequestError(
            f"{folder} holds no campaign; `sampling-async campaign PANEL --out {quoted(folder)}` makes one"
        )
    return path


def saved_in(ledger: CampaignLedger) -> SavedOptions:
    return SavedOptions.from_json(ledger.fact(_SAVED))


def title_of(folder: Path) -> str:
    return f"Campaign {folder.resolve().name}"


def quoted(folder: Path) -> str:
    return shlex.quote(str(folder))


@frozen
class _RunnableCampaign:
    plan: Plan
    saved: SavedOptions
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
    _known_key: str = field(default="", init=False, repr=False)

    @property
    def _ledger(self) -> Path:
        return self.folder / LEDGER

    # --- The plan

    def run(self, panel: str | None) -> NoReturn:
        """Run the campaign, after a plan if there is none."""
        require_own_folder(self.folder, self._ledger)
        changes, given = self.limits.changes(), _absolute(self.given)
        panel, known = _absolute_panel(panel), None
        if self._ledger.exists():
            known = with_ledger(
                self._ledger, lambda ledger: saved_in(ledger) if ledger.plan else None, reads=True
            )
        if known is not None:
            known.refuse_another_plan(panel, given, self.folder)
            saved = _checked(evolve(known, settings=given.over(known.settings)))
            self._go(self._saved(saved, changes))
        if panel is None:
            raise InvalidRequestError(f"{self.folder} holds no campaign yet: give the PANEL that it is for")
        saved = _checked(SavedOptions(panel=panel, settings=given.over(SavedOptions().settings)))
        new = [each for each in (self.folder, *self.folder.parents) if not each.exists()]
        try:
            # What is written there holds member codes and links.
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as exc:
            raise InvalidRequestError(f"--out {self.folder}: {exc.strerror}") from None
        try:
            self._plan(saved, Campaign.plan, limits=Limits().changed(**changes))
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
        known = with_ledger(ledger_in(self.folder), saved_in, reads=True)
        panel = _absolute_panel(panel) or known.panel
        if panel is None:
            raise InvalidRequestError(f"{self._ledger} does not say which panel it was planned for: give PANEL")
        settings = _absolute(self.given).over(known.settings)
        saved = _checked(SavedOptions(panel=panel, settings=settings))
        self._plan(saved, Campaign.top_up)
        self._go(self._saved(saved, changes))

    def _plan(self, saved: SavedOptions, make: Callable[..., Any], *, limits: Limits | None = None) -> None:
        settings, options = saved.settings, self.options
        assert saved.panel is not None
        match = settings.matching(options.workers)
        campaign = partial(
            Campaign,
            panel=saved.panel,
            ledger=self._ledger,
            allocate=_allocate(settings, _rates_of(settings)),
            limits=limits,
            cost=settings.cost or 0.0,
            columns=match.renamed(OTHERS | {INVITES_LEFT}),
            kinds=match.kinds(None if is_query(saved.panel) else Path(saved.panel)),
            policy=match.policy,
            workers=match.processes,
        )
        if self.options.inventory is None or not self.options.dry_run:
            self._key()  # prompt for it before the work, not after

        async def made(client: SamplingClient | None, **inventory: Any) -> None:
            # The bar covers this only, so that errors are printed after it has disappeared.
            with show.progress_bar(total_known=True) as bar:
                task = bar.add_task("Matching the panel", total=None)

                def show_members(members: int, total: int | None) -> None:
                    bar.update(task, completed=members, total=total)

                await make(campaign(client, **inventory), on_members=show_members)

        if self.options.inventory is None:
            self.service.call(made, key=self._key())
        else:
            # With an inventory, planning sends no requests and needs no client.
            anyio.run(partial(made, None, inventory=read_inventory(self.options.inventory)))

    def _key(self) -> str:
        """Return the key; prompt for it only once."""
        self._known_key = self._known_key or self.service.ready()
        return self._known_key

    def _saved(self, saved: SavedOptions, changes: dict[str, Any]) -> _RunnableCampaign:
        """Save what later commands need, and return the campaign as its ledger has it."""

        def save(ledger: CampaignLedger) -> _RunnableCampaign:
            # Locked first: nothing is changed while another run uses the ledger.
            ledger.lock()
            ledger.note(**{_SAVED: saved.to_json()})
            cap = ledger.change_limits(**changes).max_invites
            plan, began = plan_of(ledger), ledger.read("SELECT max(began) FROM runs")[0][0]
            assert plan is not None
            has_run = began is not None and began >= float(ledger.fact("planned_at") or 0)
            return _RunnableCampaign(
                plan, saved, has_run, None if cap is None else max(0, cap - ledger.invited())
            )

        return with_ledger(self._ledger, save)

    # --- The question

    def _go(self, ready: _RunnableCampaign) -> NoReturn:
        if self.options.dry_run or not ready.has_run:
            view.show_plan(ready.plan)
        if self.options.dry_run:
            if show.as_lines():
                show.emit_json(view.plan_json(ready.plan))
            show.note(self._nothing_requested)
            raise typer.Exit(DONE)
        if not ready.plan.pairs:
            fail("no member matches a quota with room, so there is nothing to request", INCOMPLETE)
        if not ready.has_run and not self.options.yes:
            self._ask(ready)
        as_lines = show.as_lines() or not show.errors().is_terminal
        raise typer.Exit(self.service.call(_ShownRun(self.folder, ready, as_lines).work, key=self._key()))

    @property
    def _nothing_requested(self) -> str:
        return f"Nothing was requested. The plan is saved. To run it: {resume_command(self.folder)}"

    def _ask(self, ready: _RunnableCampaign) -> None:
        if not _connection.somebody_is_there():
            fail(
                f"this requests {ready.in_words()}, and there is no terminal to confirm that: give --yes", USAGE
            )
        typer.echo(f"Request {ready.in_words()}? [y/N] ", err=True, nl=False)
        if sys.stdin.readline().strip().casefold() not in {"y", "yes"}:
            typer.echo(self._nothing_requested, err=True)
            raise typer.Exit(INCOMPLETE)


def ledger_of_outcomes(settings: Settings) -> OutcomeLedger | None:
    return None if settings.notifications is None else OutcomeLedger(existing_store(settings.notifications))


def resume_command(folder: Path) -> str:
    return f"sampling-async campaign run --out {quoted(folder)}"


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


def _require_saveable(option: str, address: str) -> None:
    """Refuse the address of a store that holds a password, because it is saved with the campaign."""
    store = existing_store(address)
    if isinstance(store, PostgresStore) and store.has_password:
        raise InvalidRequestError(
            f"{option} is saved with the campaign: leave the password out of the address, and give it in"
            " PGPASSWORD or ~/.pgpass"
        )


def _checked(saved: SavedOptions) -> SavedOptions:
    """Return the options if all can be used. They are checked before the first request, which may take long."""
    settings = saved.settings
    settings.matching().renamed(OTHERS | {INVITES_LEFT})
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
    # The file of rates is only needed for a plan: a campaign goes on without it.
    _allocate(evolve(settings, currency_rates=None), settings.rate or 1.0)
    return saved


def _absolute(settings: Settings) -> Settings:
    return evolve(
        settings,
        bands=None if settings.bands is None else settings.bands.absolute(),
        currency_rates=None if settings.currency_rates is None else settings.currency_rates.absolute(),
        notifications=_absolute_store(settings.notifications),
        rates_from=_absolute_store(settings.rates_from),
    )


def _absolute_store(store: str | None) -> str | None:
    return store if store is None or is_dsn(store) else str(Path(store).absolute())


def _absolute_panel(panel: str | None) -> str | None:
    return panel if panel is None or is_query(panel) else str(Path(panel).absolute())


# --- The run


@define
class _ShownRun:
    folder: Path
    ready: _RunnableCampaign
    as_lines: bool
    _signals: SignalHandler = field(factory=SignalHandler)
    _display: Display | None = None  # None until the run has begun

    @property
    def _settings(self) -> Settings:
        return self.ready.saved.settings

    async def work(self, client: SamplingClient) -> int:
        """Request the pending pairs; then write the files, even if that failed. Return the exit code.

        It is 0 if nothing is pending and the fate of each pair is known, and 6 if a cap left pairs pending.
        """
        failure, summary = None, None
        with self._signals:
            try:
                with self._signals.scope:
                    await self._run(client)
            except Exception as exc:  # noqa: BLE001  raised below, when what is known is written
                failure = exc
            self._signals.on_first_signal = None
            if self._display is not None:
                summary = await self._write(self._campaign(client))
                self._display.metrics.ended_as = "stopped" if summary.pairs.pending else summary.state
                self._display.write_line()
                self._show_end(summary, self._display.metrics.run)
        if failure is not None:
            raise failure
        if self._signals.received:
            fail(self._signals.in_words, self._signals.exit_code)
        assert self._display is not None
        assert summary is not None
        unclear = summary.pairs.unknown + summary.pairs.not_sent
        if not summary.pairs.pending + unclear:
            return DONE
        if not unclear and _is_capped(self._display.metrics.run):
            return CAPPED
        return self._display.metrics.tally.exit_code() or INCOMPLETE

    async def _write(self, campaign: Campaign) -> Summary:
        settings = self._settings
        write = partial(
            campaign.write,
            self.folder,
            partitions=settings.partition or (),
            kind=settings.format or "parquet",
            title=title_of(self.folder),
        )
        try:
            return await write(outcomes=ledger_of_outcomes(settings))
        except StoreError as exc:
            show.note(f"The files are without completes and revenue: {exc}")
            return await write()

    async def _run(self, client: SamplingClient) -> None:
        async with following(client, self._settings) as live:
            async with self._campaign(client, live).run() as run:
                self._signals.on_first_signal = partial(self._stop, run)
                metrics = RunMetrics(run, client)
                self._display = Display(metrics, as_lines=self.as_lines)
                # Kept, because a task group would raise it inside an ExceptionGroup.
                failure: Exception | None = None
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._display.keep)
                    try:
                        async for outcome in run:
                            metrics.add(outcome)
                    except Exception as exc:  # noqa: BLE001  raised below
                        failure = exc
                    tasks.cancel_scope.cancel()
                if failure is not None:
                    raise failure
            self._signals.on_first_signal = None

    def _campaign(self, client: SamplingClient, live: LiveIndex | None = None) -> Campaign:
        max_turns = self._settings.max_turns or 3
        return Campaign(client, inventory=live, ledger=self.folder / LEDGER, max_turns=max_turns)

    def _stop(self, run: CampaignRun) -> None:
        """After a signal, send no more requests; wait some seconds for those in flight."""
        run.stop(self._signals.in_words)
        # A service that is away answers nothing.
        grace = 0.0 if run.waiting_for == "outage" else _GRACE
        self._signals.scope.deadline = asyncio.get_running_loop().time() + grace

    def _show_end(self, summary: Summary, run: CampaignRun) -> None:
        view.show_end(summary, run.reason)
        show.note(f"Files: {self.folder} (invites, pairs, summary.json, report.html)")
        if not summary.pairs.pending:
            return
        if run.limits.paused:
            show.note(f"It is paused. To end that: sampling-async campaign resume {quoted(self.folder)}")
        elif _is_capped(run):
            show.note(f"To change the cap: sampling-async campaign limit {quoted(self.folder)} ...")
        pending = count_of(summary.pairs.pending, "pending pair")
        show.note(f"{pending} left. To go on: {resume_command(self.folder)}")


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
