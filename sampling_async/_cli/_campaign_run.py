"""The work of the commands about campaigns: plan, question and run; limits, status, comparison and report."""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import anyio
import typer
from attrs import asdict, define, evolve, frozen

from sampling_async import InvalidRequestError
from sampling_async._cli import _campaign_view as view
from sampling_async._cli import _connection
from sampling_async._cli import _rendering as show
from sampling_async._cli._campaign import DEFAULTS, NONE, LimitOptions, RunOptions, Settings
from sampling_async._cli._campaign_live import ShownRun, file_options, ledger_of_outcomes, settle
from sampling_async._cli._connection import ServiceOptions, fail, needs
from sampling_async._cli._files import read_rates
from sampling_async._cli._match_run import read_inventory
from sampling_async._cli._stores import existing_store, is_new
from sampling_async._cli._tally import DONE, INCOMPLETE, USAGE
from sampling_async._contract.checks import count_of
from sampling_async.campaign import Campaign, Limits, Plan, compare
from sampling_async.campaign._files import check_partitions, require_own_folder
from sampling_async.campaign._ledger import with_ledger
from sampling_async.campaign._ledger_file import LEDGER_NAME
from sampling_async.campaign._planning import plan_of
from sampling_async.matching import Allocate
from sampling_async.matching.panel import INVITES_LEFT, OTHERS, REGION, is_query
from sampling_async.notifications import OutcomeLedger, PostgresStore
from sampling_async.notifications._postgres import is_dsn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sampling_async import SamplingClient
    from sampling_async._protocol.lessons import LearnedRates
    from sampling_async.campaign import Labels, Summary
    from sampling_async.campaign._ledger import CampaignLedger

_OTHERS: Final = OTHERS | {INVITES_LEFT, REGION}  # the columns that are not questions
_SAVED: Final = "command"  # the fact of the ledger that holds what later commands need


def ledger_in(folder: Path) -> Path:
    path = folder / LEDGER_NAME
    if not path.is_file():
        raise InvalidRequestError(
            f"{folder} holds no campaign; `sampling-async campaign PANEL --out {view.quoted(folder)}` makes one"
        )
    return path


def saved_in(ledger: CampaignLedger) -> Settings:
    return Settings.from_json(ledger.fact(_SAVED))


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
                self._ledger, lambda ledger: saved_in(ledger) if ledger.plan else None, reads=True
            )
        if known is not None:
            given.refuse_another_plan(known, self.folder)
            saved = _checked(given.over(known))
            self._go(self._saved(saved, changes))
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
        settings = self._given(panel).over(known)
        if settings.panel is None:
            raise InvalidRequestError(f"{self._ledger} does not say which panel it was planned for: give PANEL")
        saved = _checked(settings)
        self._plan(saved, Campaign.top_up)
        self._go(self._saved(saved, changes))

    def _given(self, panel: str | None) -> Settings:
        """Return what was given, with whole paths, because a later command may run in another folder."""
        values: dict[str, Any] = asdict(self.given) | {"panel": panel}
        for name in ("bands", "currency_rates"):
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

    def _plan(self, settings: Settings, make: Callable[..., Any], *, limits: Limits | None = None) -> None:
        assert settings.panel is not None
        match = settings.matching(self.options.workers)
        campaign = partial(
            Campaign,
            panel=settings.panel,
            ledger=self._ledger,
            allocate=_allocate(settings, _rates_of(settings)),
            limits=limits,
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

                await make(campaign(client, **inventory), on_members=show_members)

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


# --- Campaigns in their folders


def change_limits(folder: Path, changes: dict[str, Any]) -> None:
    """Change limits, if there is any change, and show those that hold."""

    def change(ledger: CampaignLedger) -> tuple[Limits, bool]:
        _require_plan(ledger, folder)
        limits = ledger.change_limits(**changes) if changes else ledger.limits()
        return limits, ledger.is_running()

    limits, is_running = with_ledger(ledger_in(folder), change, reads=not changes)
    if show.as_lines():
        show.emit_json({**show.fields_of(limits), "Running": is_running})
    else:
        view.show_limits(limits, is_running=is_running)


def show_status(folder: Path) -> None:
    summary = _summary_of(folder)
    if show.as_lines():
        show.emit_json(view.summary_json(summary))
    else:
        view.show_summary(summary, show.screen())


def show_comparison(folders: Sequence[Path], html: Path | None, given: Settings) -> None:
    """Show several campaigns side by side, and write the page of that."""
    summaries: dict[str, Summary] = {}
    seen: set[Path] = set()
    for folder in folders:
        whole = folder.resolve()
        if whole in seen:
            raise InvalidRequestError(f"{folder} is given twice")
        seen.add(whole)
        found = _summary_of(folder, given)
        if found.started_at is None:
            show.note(f"Left out: {folder} was only planned, and nothing was requested")
        else:
            summaries[str(folder) if whole.name in summaries else whole.name] = found
    if not summaries:
        raise InvalidRequestError("none of these campaigns has requested anything yet")
    comparison = compare(summaries)
    if html is not None:
        with needs("the page"):
            from sampling_async.campaign._report import comparison_page  # noqa: PLC0415  Jinja2

            show.write_page(html, comparison_page(comparison))
    rows = view.comparison_json(comparison.to_dict())
    if show.wanted.csv:
        for night in rows["Nights"]:
            show.emit_json({name: value for name, value in night.items() if name != "Codes"})
    elif show.as_lines():
        show.emit_json(rows)
    else:
        view.show_comparison(comparison)


def write_report(folder: Path, out: Path, given: Settings, labels: Labels) -> None:
    """Write the files of a campaign into a folder; what is not given is as the run had it."""
    settings = given.over(_saved_of(folder))
    campaign = Campaign(None, ledger=folder / LEDGER_NAME)
    outcomes = ledger_of_outcomes(settings)
    anyio.run(settle, campaign, outcomes)
    write = partial(campaign.write, out, **file_options(folder, settings), outcomes=outcomes, labels=labels)
    summary = anyio.run(write)
    for text in filter(None, (view.ends_text(summary), summary.unknown_in_words)):
        show.note(text)
    show.note(f"Files: {out} (invites, pairs, summary.json, report.html)")


def settle_unknown(folder: Path, given: Settings) -> None:
    """Settle the unknown pairs of a campaign by the notifications of a store, and show what was found."""
    outcomes = ledger_of_outcomes(given.over(_saved_of(folder)))
    if outcomes is None:
        raise InvalidRequestError("name the store of notifications: --notifications FILE|ADDRESS")
    campaign = Campaign(None, ledger=folder / LEDGER_NAME)
    found = anyio.run(campaign.settle, outcomes)
    summary = anyio.run(campaign.summary)
    if show.as_lines():
        by_kind = {str(kind): count for kind, count in found.by_kind().items()}
        counts = {"Unknown": summary.pairs.unknown, "Settled": summary.settled, "New": len(found.settled)}
        show.emit_json(counts | {"ByKind": by_kind, "Unclear": found.unclear})
        return
    new = ", ".join(f"{count:,} by {kind} notifications" for kind, count in found.by_kind().items())
    show.note(summary.unknown_in_words or f"{summary.pairs.unknown:,} unknown, none settled")
    show.note(f"New: {new or 'none'}")
    if found.unclear:
        show.note(f"{count_of(found.unclear, 'notification')} fit several pairs, and settle none")


def _summary_of(folder: Path, given: Settings | None = None) -> Summary:
    """Return the summary of a campaign, which must have a plan; with `given`, what its invites have brought."""
    saved = _saved_of(folder)
    outcomes = None if given is None else ledger_of_outcomes(given.over(saved))
    return anyio.run(Campaign(None, ledger=folder / LEDGER_NAME).summary, outcomes)


def _saved_of(folder: Path) -> Settings:
    def saved(ledger: CampaignLedger) -> Settings:
        _require_plan(ledger, folder)
        return saved_in(ledger)

    return with_ledger(ledger_in(folder), saved, reads=True)


def _require_plan(ledger: CampaignLedger, folder: Path) -> None:
    if not ledger.plan:
        raise InvalidRequestError(f"the ledger in {folder} has no plan: making it was cut off")
