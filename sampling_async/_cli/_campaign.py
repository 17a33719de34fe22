"""The commands about campaigns: a whole panel in, invites out, with an account of every pair."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from sampling_async._cli._campaign_options import InviteFormat, LimitOptions, RunOptions, Settings
from sampling_async._cli._connection import ServiceOptions, fail
from sampling_async._cli._help import Command, Group
from sampling_async._cli._options import argument, option, takes
from sampling_async._cli._tally import USAGE
from sampling_async._contract.extras import install

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


app: Final = typer.Typer(
    cls=RunByDefault,
    help=(
        "Request invites for a whole panel, and account for every pair of a member and a quota. `campaign "
        "PANEL --out DIR` is short for `campaign run PANEL --out DIR`; a panel with the name of a command is "
        "written ./pause. DIR holds the ledger and, at the end, invites, pairs, a summary and report.html. The "
        "ledger, the invites and the pairs hold member codes and links: only the owner can read them."
    ),
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Folder = Annotated[Path, argument("DIR", "The folder of the campaign.")]
Panel = Annotated[
    str | None,
    argument(
        "PANEL",
        "A file (.parquet, .csv, .jsonl or .ndjson) or a DuckDB query (SELECT ...) with one row per "
        "member, as for `match`. Without it, the campaign in DIR goes on.",
    ),
]
JSON: Final = "Print JSON, on a terminal too."
PanelAgain = Annotated[str | None, argument("PANEL", "The panel. Default: the one that was planned before.")]


@app.command(cls=Command)
@takes(settings=Settings, limits=LimitOptions, options=RunOptions, service=ServiceOptions, quiet=True)
def run(
    panel_: Panel = None,
    *,
    service: ServiceOptions,
    settings: Settings,
    limits: LimitOptions,
    options: RunOptions,
    out: Annotated[Path, option("DIR", "The folder of the campaign; it is made.")],
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
    job = _loaded("jinja2", module="_campaign_run").CampaignJob
    job(service, out, settings, limits, options).run(panel_)


@app.command("top-up", cls=Command)
@takes(settings=Settings, limits=LimitOptions, options=RunOptions, service=ServiceOptions, quiet=True)
def top_up(
    folder: Folder,
    panel_: PanelAgain = None,
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
    job = _loaded("jinja2", module="_campaign_run").CampaignJob
    job(service, folder, settings, limits, options).top_up(panel_)


@app.command(cls=Command)
@takes(json=JSON)
def pause(
    folder: Folder,
    *,
    reason: Annotated[str, option("TEXT", "Why, for the status and the report.", show_default=False)] = "",
) -> None:
    """Pause a campaign: no more requests until `resume`. Those in flight are still answered.

    An active run pauses within a second, and a later run waits too.
    """
    _loaded().change_limits(folder, {"paused": True, "reason": reason})


@app.command(cls=Command)
@takes(json=JSON)
def resume(folder: Folder) -> None:
    """End the pause of a campaign.

    It starts no run. If none is active, `campaign run --out
    DIR` continues the campaign.
    """
    _loaded().change_limits(folder, {"paused": False, "reason": ""})


@app.command(cls=Command)
@takes(json=JSON, limits=LimitOptions)
def limit(limits: LimitOptions, folder: Folder) -> None:
    """Change the limits of a campaign, whether it runs or not, and show those that hold.

    The value none takes a limit away. Without options, nothing is changed.
    """
    _loaded().change_limits(folder, limits.changes())


@app.command(cls=Command)
@takes(json=JSON)
def status(folder: Folder) -> None:
    """Show what became of a campaign so far, whether it runs, has ended or was killed."""
    _loaded().show_status(folder)


@app.command(cls=Command)
@takes(quiet=True)
def report(
    folder: Folder,
    *,
    out: Annotated[
        Path | None, option("DIR", "The folder for the files. Default: that of the campaign.")
    ] = None,
    partition: Annotated[
        list[str] | None, option("COLUMN", "As for `run`. Default: what the run was given.")
    ] = None,
    format_: Annotated[
        InviteFormat | None,
        option("parquet|jsonl", "As for `run`. Default: what the run was given.", "--format"),
    ] = None,
    notifications: Annotated[
        str | None,
        option(
            "FILE|ADDRESS",
            "The store of `notifications serve`: completes, terminates, revenue and reconciliations are in the "
            "report then. Default: what the run was given.",
        ),
    ] = None,
) -> None:
    """Write the files of a campaign again, from its ledger, even while it runs.

    They are the invites, the pairs, summary.json, and report.html, a page
    that needs nothing else and holds no member codes.
    """
    settings = Settings(partition=partition, format=format_, notifications=notifications)
    _loaded("jinja2").write_report(folder, out or folder, settings)


@app.command(cls=Command)
@takes(json=JSON, csv=True, quiet=True)
def compare(
    folders: Annotated[
        list[Path], argument("DIR", "The folders of campaigns, such as those of several nights.")
    ],
    *,
    html: Annotated[Path | None, option("FILE", "Write a page that needs nothing else.")] = None,
    notifications: Annotated[
        str | None,
        option("FILE|ADDRESS", "The store of `notifications serve`. Default: what each run was given."),
    ] = None,
) -> None:
    """Show several campaigns side by side: invites, completes, revenue, refusals by code, and what has changed.

    The newest stands first. A campaign that was only planned, with --dry-run, is left out. The page and the
    JSON have the fill of each quota too.
    """
    _loaded().show_comparison(folders, html, Settings(notifications=notifications))


def _loaded(*others: str, module: str = "_campaign_folders") -> Any:
    """Return the module that does the work. It needs numpy and pyarrow, and for the report `others` too."""
    try:
        for name in (*others, "sampling_async.campaign"):
            import_module(name)
        return import_module(f"sampling_async._cli.{module}")
    except ModuleNotFoundError as exc:
        fail(f"campaign needs {exc.name}: {install('panel')}", USAGE)
