"""The commands that ask the service one thing: quotas, settings, an invite, the members of a recontact."""

from __future__ import annotations

import json
import sys
from pathlib import Path  # noqa: TC003  typer reads annotations when it runs
from typing import TYPE_CHECKING, Final

import typer
from attrs import evolve
from rich.text import Text

from sampling_async import DecodeError, to_json
from sampling_async._cli import _rendering as show
from sampling_async._cli._connection import ServiceOptions, fail, needs
from sampling_async._cli._files import LABELS_HELP, RATES_HELP, read_labels, read_rates
from sampling_async._cli._options import JSON_LINES, MEMBER, argument, flag, option, takes
from sampling_async._cli._sources import one_id
from sampling_async._cli._tally import INCOMPLETE
from sampling_async._contract.checks import count_of
from sampling_async._contract.records import QUOTA_COLUMNS, quota_rows, wire_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rich.table import Table

    from sampling_async import Quota, Quotas, RecontactStream, SamplingClient, Survey

QUOTA_ID: Final = argument("ID", "A quota ID, as `quotas` shows it.")
_SURVEY_COLUMNS: Final = (
    ("Survey", 0),
    ("Wave", 8),
    ("LOI", 3),
    ("IR", 4),
    ("Price", 2),
    ("Cur", 7),
    ("Quotas", 1),
    ("Remaining", 0),
    ("Devices", 6),
    ("Recontact", 5),
)


@takes(service=ServiceOptions, json="Print one JSON document, in the form of the service.", csv=True)
def quotas(
    service: ServiceOptions,
    *,
    routables: bool = flag(
        "Include conditions on routable questions, or leave them out.",
        "--routables/--no-routables",
        show_default=False,
        default=True,
    ),
    survey: int | None = option("ID", "Show only this survey, with its quotas.", min=1),
    currency_rates: Path | None = option("FILE", f"{RATES_HELP} For the table and --html."),
    labels: Path | None = option("FILE", f"{LABELS_HELP} For the table of --survey."),
    html: Path | None = option(
        "FILE", "Write a page: price by LOI by IR, what a minute is worth. With a panel: see `match`."
    ),
) -> None:
    """Show the open inventory: surveys and their quotas. In a pipe, each survey is a line of JSON.

    With --csv, each quota is a row.
    """
    rates, names = read_rates(currency_rates), read_labels(labels)
    inventory = service.call(lambda client: client.get_quotas(include_routables=routables))
    surveys = tuple(each for each in inventory.surveys if survey in {None, each.survey_id})
    if survey is not None and not surveys:
        fail(f"survey {survey} has no open quotas", INCOMPLETE)
    if html is not None:
        with needs("the page"):
            from sampling_async.campaign._inventory_page import inventory_page  # noqa: PLC0415  Jinja2

            show.write_page(html, inventory_page(surveys, currency_rates=rates))
    if show.wanted.csv:
        named = (
            {wire_name(name): show.jsonable(value) for name, value in row.items()}
            for row in quota_rows(inventory, surveys)
        )
        show.emit_rows(named, QUOTA_COLUMNS)
    elif show.wanted.json:
        show.emit_all([evolve(inventory, surveys=surveys)])
    elif html is not None:
        return
    elif show.as_lines():
        show.emit_all(surveys)
    else:
        screen = show.screen()
        screen.print(quotas_table(surveys, screen.width, rates.names if rates else None))
        if survey is None:
            screen.print(_caption(inventory))
        for each in surveys if survey is not None else ():
            screen.print(f"\n[bold]Quotas of survey {each.survey_id}, wave {each.wave_id}[/bold]")
            screen.print(_quota_table(each.quotas, names))


@takes(service=ServiceOptions, json=JSON_LINES, csv=True)
def settings(service: ServiceOptions) -> None:
    """Show the panel's settings; the reference data key is masked."""
    found = [
        each if each.value is None or not each.is_secret else evolve(each, value="<hidden>")
        for each in service.call(lambda client: client.get_settings())
    ]
    if show.as_lines():
        show.emit_all(found)
    else:
        show.print_pairs(
            (
                show.plain(each.name).plain,
                show.plain("not set", "dim") if each.value is None else show.plain(each.value),
            )
            for each in found
        )


@takes(service=ServiceOptions, json=JSON_LINES)
def invite(service: ServiceOptions, member_code: str = MEMBER, quota_id: str = QUOTA_ID) -> None:
    """Request an invite of one member to one quota."""
    number = one_id(quota_id)
    made = service.call(lambda client: client.generate_invite(member_code, number))
    if show.as_lines():
        show.emit_all([made])
    else:
        show.print_pairs((name, show.plain(str(value))) for name, value in json.loads(to_json(made)).items())


@takes(service=ServiceOptions, json="Print JSON lines instead of plain text.", csv=True)
def recontact(
    service: ServiceOptions,
    quota_id: str = QUOTA_ID,
    *,
    max_results: int | None = option("N", "Member codes per page. Default: set by the service.", min=1),
    after: str | None = option("MEMBER", "Resume after this member code."),
    limit: int | None = option("N", "Stop after this many member codes.", min=1),
) -> None:
    """List the members that a recontact survey wants back for a quota, one per line."""
    number = one_id(quota_id)

    async def work(client: SamplingClient) -> None:
        async with client.stream_recontact_members(number, max_results=max_results, after=after) as codes:
            await _follow_codes(codes, limit)

    service.call(work)


async def _follow_codes(codes: RecontactStream, limit: int | None) -> None:
    count = 0
    try:
        async for code in codes:
            if show.wanted.json or show.wanted.csv:
                show.emit_json({"MemberCode": code})
            else:
                _emit_code(code)
            count += 1
            if count == limit:
                return
        show.emit_head(["member_code"])
    except BaseException as exc:
        # Cancellation by Ctrl-C counts too: codes that were printed need not be read again.
        if count and not isinstance(exc, BrokenPipeError):
            typer.echo(
                f"{count_of(count, 'member code')} printed; resume with --after <the last code printed>",
                err=True,
            )
        raise


# --- What is shown


def quotas_table(surveys: Iterable[Survey], width: int, currencies: Mapping[int, str] | None = None) -> Table:
    """Return a table of the inventory, one survey a row, as wide as the terminal at most.

    `currencies` are names by ID.
    """
    names = currencies or {}
    rows = [
        (
            str(survey.survey_id),
            str(survey.wave_id),
            str(survey.loi),
            str(survey.ir),
            f"{survey.price.amount:.2f}",
            names.get(survey.price.currency_id) or str(survey.price.currency_id),
            str(len(survey.quotas)),
            f"{survey.estimated_completes_remaining:,}",
            " ".join(str(device) for device in survey.device_type_ids),
            "yes" if survey.is_survey_recontact else "",
        )
        for survey in surveys
    ]
    return show.fitting_table(rows, _SURVEY_COLUMNS, width)


def _quota_table(quotas: Iterable[Quota], labels: Mapping[tuple[str, str], str]) -> Table:
    numbers = ("Quota", "Required", "Remaining", "Layers", "Sub-quotas")
    table = show.new_table(*numbers, "Questions", right=numbers)
    for quota in quotas:
        parts = [part for layer in quota.layers for part in layer.sub_quotas]
        questions = {each.question_id: None for part in parts for each in part.questions_and_answers}
        table.add_row(
            str(quota.quota_id),
            f"{quota.completes_required:,}",
            f"{quota.estimated_completes_remaining:,}",
            str(len(quota.layers)),
            str(len(parts)),
            show.plain(", ".join(labels.get((str(each), ""), str(each)) for each in questions)),
        )
    return table


def _caption(quotas: Quotas) -> Text:
    count = sum(len(survey.quotas) for survey in quotas.surveys)
    recontact = sum(survey.is_survey_recontact for survey in quotas.surveys)
    return Text(
        f"\n{count_of(len(quotas.surveys), 'survey')} ({recontact} recontact), {count_of(count, 'quota')}, "
        f"country {quotas.country_id}. LOI in minutes, IR in percent, currency and devices by ID.\n"
        "One survey with its quotas: sampling-async quotas --survey ID",
        style="dim",
    )


def _emit_code(member_code: str) -> None:
    if len(member_code.splitlines()) > 1:
        raise DecodeError(
            "$.MemberCodes", "expected member codes of one line each, found one with a line break; use --json"
        )
    show.emit((show.plain(member_code).plain if sys.stdout.isatty() else member_code).encode())
