"""The commands about campaigns: a whole panel in, invites out, with an account of every pair."""

from __future__ import annotations

import json
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from attrs import asdict, evolve, fields, frozen

from sampling_async import InvalidRequestError
from sampling_async._cli._commands import CommandGroup, Group
from sampling_async._cli._connection import ServiceOptions, loaded
from sampling_async._cli._files import LABELS_HELP, RATES_HELP
from sampling_async._cli._match import MatchOptions
from sampling_async._cli._options import SHOWN, argument, beyond, given, is_plain, names_in, option

if TYPE_CHECKING:
    from collections.abc import Callable

_PLAN: Final = "The plan"
_of_plan: Final = partial(given, panel=_PLAN)
_of_run: Final = partial(given, panel="The run")
_limit: Final = partial(given, panel="Limits, heeded by a run within a second")
# As in `sampling_async.campaign`, which loads slowly.
InviteFormat: TypeAlias = Literal["parquet", "jsonl", "csv"]
NONE: Final = "none"  # the value that takes a limit away


@frozen(kw_only=True)
class LimitOptions:
    """The options that set limits. They are text, since each may be `none`."""

    concurrency: str | None = _limit("N|none", "The most members whose invites are requested at once.")
    invites_per_minute: str | None = _limit("N|none", "The most invites a minute.")
    max_invites: str | None = _limit("N|none", "The most invites in all; unknown outcomes count.")
    max_spend: str | None = _limit("X|none", "The most that the invites may cost, see --cost.")
    hours: str | None = _limit(
        "22:00-06:00|none",
        "The times of the day between which it sends requests. Outside of them it waits, and does not end.",
    )
    zone: str | None = _limit("Europe/Berlin|none", "The time zone of --hours. Default: UTC.")

    def changes(self) -> dict[str, Any]:
        """Return the limits that were given, by their names in `Limits`; None takes one away."""
        from sampling_async.campaign import Limits  # noqa: PLC0415  numpy, pyarrow: an extra

        found: dict[str, Any] = {}
        for name, text in asdict(self).items():
            if text is None:
                continue
            option = f"--{name.replace('_', '-')}"
            found[name] = None if text.casefold() == NONE else _parsed(name, text, option)
            try:
                Limits().changed(**{name: found[name]})
            except InvalidRequestError as exc:
                raise InvalidRequestError(
                    f"{str(exc).replace(name, option, 1)}; {NONE} takes it away"
                ) from None
        return found


def _parsed(name: str, text: str, option: str) -> Any:
    if name in {"hours", "zone"}:
        return text
    parse: Callable[[str], float] = int if name in {"concurrency", "max_invites"} else float
    try:
        value = parse(text if is_plain(text) else "")
    except ValueError:
        kind = "a whole number" if parse is int else "a number"
        raise InvalidRequestError(f"{option} must be {kind} or {NONE}, not {text[:SHOWN]!r}") from None
    if wrong := beyond(value, is_count=True):
        raise InvalidRequestError(f"{option} {text[:SHOWN]} {wrong}; {NONE} takes it away")
    return value


FILES: Final = {"bands", "currency_rates", "labels"}  # the settings that are paths


@frozen(kw_only=True)
class Settings:
    """What a campaign saves in its ledger, so that a later command needs only its folder.

    None: the saved value or the default counts.
    """

    panel: str | None = None  # an absolute path, or a query; an argument of the commands
    column: list[str] | None = _of_plan(
        "QUESTION=NAME", "The column of the panel that holds a question; can be given several times."
    )
    bands: Path | None = _of_plan(
        "FILE", "A JSON file of age bands, as for `match`. Default: PANEL.bands.json beside the panel."
    )
    at_least_one: bool | None = _of_plan(
        "", "A member may fit several sub-quotas of a layer.", "--at-least-one"
    )
    allocate: int | None = _of_plan("N", "At most N quotas of each member. Default: 5.", min=1)
    overshoot: float | None = _of_plan(
        "X", "How many times the room of a quota is planned, 1.2 for a fifth more. Default: 1."
    )
    rate: float | None = _of_plan(
        "X", "The share of invites that members follow, 0.2 for a fifth. Default: 1.", max=1
    )
    rates_from: str | None = _of_plan(
        "FILE|ADDRESS",
        "The store of `notifications serve`: the share of invites that ended in a complete so far counts in "
        "place of the IR and --rate, by quota and survey.",
    )
    leave_out: list[str] | None = _of_plan(
        "DIR|FILE|ADDRESS",
        "What members hold, took or were refused for good there is not planned: the folder of an earlier "
        "campaign or of several, or a store; can be given several times. Default: the stores of "
        "--notifications and --rates-from; `none` for nothing.",
    )
    share_room: str | None = _of_plan(
        "FILE|ADDRESS",
        "The store in which campaigns of several panels on one service note the room of quotas that they hold: "
        "the plan leaves that to them. It may be that of --notifications; `none` to share no more.",
    )
    currency_rates: Path | None = _of_plan("FILE", RATES_HELP)
    cost: float | None = _of_plan("X", "What an invite costs you. Default: 0.", min=0)
    watch: float | None = _of_run(
        "SECONDS",
        "Seconds between two polls of the quotas: closed ones are not requested. 0: never. Default: 60.",
        min=0,
    )
    notifications: str | None = _of_run(
        "FILE|ADDRESS",
        "The store of `notifications serve`: quotas that it reports as closed are not requested, the invites "
        "are recorded there, and the report has completes and revenue.",
    )
    max_turns: int | None = _of_run(
        "N", "The most requests for one member, if some of its quotas are refused. Default: 3.", min=1
    )
    partition: list[str] | None = _of_run(
        "COLUMN", "Divide the invites into folders by survey_id, wave_id, quota_id or day; can be given again."
    )
    format: InviteFormat | None = _of_run("parquet|jsonl|csv", "The format of the invites. Default: parquet.")
    labels: Path | None = _of_run("FILE", f"{LABELS_HELP} For the report.")

    def over(self, saved: Settings) -> Settings:
        """Return these settings; those that were not given are taken from `saved`."""
        # An empty list is how the parser says that nothing was given.
        given = {name: value for name, value in asdict(self).items() if value not in (None, [])}
        return evolve(saved, **given)

    def refuse_another_plan(self, saved: Settings, folder: Path) -> None:
        """Refuse a panel or options that the plan in a folder was not made with, since they had no effect."""
        values, its = asdict(self), asdict(saved)
        other = [name for name in names_in(Settings, _PLAN) if values[name] not in (None, [], its[name])]
        what = [f"--{name.replace('_', '-')}" for name in other]
        if self.panel not in (None, saved.panel):
            what.insert(0, "the panel")
        if what:
            raise InvalidRequestError(
                f"{folder} has a plan, which {' and '.join(what)} would not change: leave it out to go on, or "
                f"plan anew with `campaign top-up`, or name another folder"
            )

    @property
    def earlier(self) -> list[str]:
        """Where to look for what members got before."""
        if self.leave_out is not None:
            return [each for each in self.leave_out if each != NONE]
        return [*dict.fromkeys(each for each in (self.notifications, self.rates_from) if each is not None)]

    @property
    def shared_room(self) -> str | None:
        """The store of `--share-room`."""
        return None if self.share_room == NONE else self.share_room

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str | None) -> Settings:
        """Parse saved settings; None, as from a ledger that another program made, gives the defaults."""
        found: dict[str, Any] = {} if text is None else json.loads(text)
        known = {each.name for each in fields(Settings)}
        values = {name: value for name, value in found.items() if name in known and value is not None}
        for name in FILES & values.keys():
            values[name] = Path(values[name])
        return evolve(DEFAULTS, **values)

    def matching(self, workers: int | None = None) -> MatchOptions:
        return MatchOptions(
            column=self.column, bands=self.bands, at_least_one=bool(self.at_least_one), workers=workers
        )


DEFAULTS: Final = Settings(
    at_least_one=False, allocate=5, overshoot=1.0, rate=1.0, cost=0.0, watch=60.0, max_turns=3, format="parquet"
)


@frozen(kw_only=True)
class RunOptions:
    """The options of `run` and `top-up` that count for one call only."""

    inventory: Path | None = _of_plan(
        "FILE",
        "Plan with the inventory of a file, as `quotas` writes it; - for stdin. Default: ask the service.",
    )
    workers: int | None = _of_plan(
        "N", "The number of processes that match. Default: all cores.", min=1, max=1024
    )
    dry_run: bool = given("", "Plan, show the plan, and request nothing.", "--dry-run", default=False)
    yes: bool = given("", "Do not ask before the first run.", "--yes", "-y", default=False)
    as_json: bool = given("", "Print JSON lines, on a terminal too.", "--json", default=False)


# --- The commands

_job: Final = partial(loaded, "campaign", "_campaign_run", "jinja2", "sampling_async.campaign")
_view: Final = partial(loaded, "campaign", "_campaign_view", "sampling_async.campaign")
_DEFAULT: Final = "run"
_SIMILAR: Final = 0.75


class RunByDefault(Group):
    """The group `campaign`: `campaign PANEL` is `campaign run PANEL`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put `run` in front of what does not begin with a command."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            similar = get_close_matches(args[0], self.commands, n=1, cutoff=_SIMILAR)
            if similar and not Path(args[0]).exists():
                ctx.fail(f"{args[0]!r} is no file and no command; did you mean {similar[0]!r}?")
            args = [_DEFAULT, *args]
        return super().parse_args(ctx, args)


app: Final = CommandGroup(
    "Request invites for a whole panel, and account for every pair of a member and a quota. `campaign "
    "PANEL --out DIR` is short for `campaign run PANEL --out DIR`; a panel with the name of a command is "
    "written ./pause. DIR holds the ledger and, at the end, invites, pairs, a summary and report.html. The "
    "ledger, the invites and the pairs hold member codes and links: only the owner can read them.",
    RunByDefault,
)

FOLDER: Final = argument("DIR", "The folder of the campaign.")
PANEL: Final = argument(
    "PANEL",
    "A file (.parquet, .csv, .jsonl or .ndjson) or a DuckDB query (SELECT ...) with one row per "
    "member, as for `match`. Without it, the campaign in DIR goes on.",
    default=None,
)
JSON: Final = "Print JSON, on a terminal too."
PANEL_AGAIN: Final = argument("PANEL", "The panel. Default: the one that was planned before.", default=None)


@app.takes(settings=Settings, limits=LimitOptions, options=RunOptions, service=ServiceOptions, quiet=True)
def run(
    panel_: str | None = PANEL,
    *,
    service: ServiceOptions,
    settings: Settings,
    limits: LimitOptions,
    options: RunOptions,
    out: Path = option("DIR", "The folder of the campaign; it is made.", default=...),
) -> None:
    """Plan invites for a whole panel, request them, and write the outcome of each pair.

    The plan is shown first, and on a terminal you are asked whether to go on;
    elsewhere --yes is needed. After a Ctrl-C, an outage or a kill, the same
    command without PANEL goes on where it was. A second Ctrl-C ends it at
    once. The exit code is 0 if nothing is pending, 6 if a cap left pairs
    pending, and 1 if something else did, or if the fate of a pair is unknown.
    At the end of --hours it does not end, but waits. Progress is shown on a terminal, and
    elsewhere it is lines of JSON on stdout.
    """
    _job().CampaignJob(service, out, settings, limits, options).run(panel_)


@app.takes(
    "top-up", settings=Settings, limits=LimitOptions, options=RunOptions, service=ServiceOptions, quiet=True
)
def top_up(
    folder: Path = FOLDER,
    panel_: str | None = PANEL_AGAIN,
    *,
    service: ServiceOptions,
    settings: Settings,
    limits: LimitOptions,
    options: RunOptions,
) -> None:
    """Plan anew for what is short by now, in the same ledger, and run that.

    Quotas and panel are read again. No member is asked again for a survey
    that it was invited to, or refused for good. What was pending ends as
    skipped, even with --dry-run. Options that are not given are those of
    the plan before.
    """
    _job().CampaignJob(service, folder, settings, limits, options).top_up(panel_)


@app.takes(json=JSON)
def pause(
    folder: Path = FOLDER,
    *,
    reason: str = option("TEXT", "Why, for the status and the report.", show_default=False, default=""),
) -> None:
    """Pause a campaign: no more requests until `resume`. Those in flight are still answered.

    An active run pauses within a second, and a later run waits too.
    """
    _view().change_limits(folder, {"paused": True, "reason": reason})


@app.takes(json=JSON)
def resume(folder: Path = FOLDER) -> None:
    """End the pause of a campaign.

    It starts no run. If none is active, `campaign run --out
    DIR` continues the campaign.
    """
    _view().change_limits(folder, {"paused": False, "reason": ""})


@app.takes(json=JSON, limits=LimitOptions)
def limit(limits: LimitOptions, folder: Path = FOLDER) -> None:
    """Change the limits of a campaign, whether it runs or not, and show those that hold.

    The value none takes a limit away. Without options, nothing is changed.
    """
    _view().change_limits(folder, limits.changes())


@app.takes(json=JSON)
def status(folder: Path = FOLDER) -> None:
    """Show what became of a campaign so far, whether it runs, has ended or was killed."""
    _view().show_status(folder)


@app.takes(quiet=True)
def report(
    folder: Path = FOLDER,
    *,
    out: Path | None = option("DIR", "The folder for the files. Default: that of the campaign."),
    partition: list[str] | None = option("COLUMN", "As for `run`. Default: what the run was given."),
    format_: InviteFormat | None = option(
        "parquet|jsonl|csv", "As for `run`. Default: what the run was given.", "--format"
    ),
    notifications: str | None = option(
        "FILE|ADDRESS",
        "The store of `notifications serve`: completes, terminates, revenue and reconciliations are in the "
        "report then. Default: what the run was given.",
    ),
    labels: Path | None = option("FILE", f"{LABELS_HELP} Default: what the run was given."),
) -> None:
    """Write the files of a campaign again, from its ledger, even while it runs.

    They are the invites, the pairs, summary.json, and report.html, a page
    that needs nothing else and holds no member codes.
    """
    settings = Settings(partition=partition, format=format_, notifications=notifications, labels=labels)
    _view("jinja2").write_report(folder, out or folder, settings)


@app.takes(json=JSON, quiet=True)
def settle(
    folder: Path = FOLDER,
    *,
    notifications: str | None = option(
        "FILE|ADDRESS", "The store of `notifications serve`. Default: what the run was given."
    ),
) -> None:
    """Settle unknown pairs: which of them have an invite, by the notifications that came.

    `run` and `report` do it too, if they know a store. A pair that is
    settled is not requested again, and its link stays unknown.
    """
    _view().settle_unknown(folder, Settings(notifications=notifications))


@app.takes(json=JSON, csv=True, quiet=True)
def compare(
    folders: list[Path] = argument("DIR", "The folders of campaigns, such as those of several nights."),
    *,
    html: Path | None = option("FILE", "Write a page that needs nothing else."),
    notifications: str | None = option(
        "FILE|ADDRESS", "The store of `notifications serve`. Default: what each run was given."
    ),
) -> None:
    """Show several campaigns side by side: invites, completes, revenue, refusals by code, and what has changed.

    The newest stands first. A campaign that was only planned, with --dry-run, is left out. The page and the
    JSON have the fill of each quota too.
    """
    _view().show_comparison(folders, html, Settings(notifications=notifications))
