"""The command `match`: its options, and their meaning."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from sampling_async import InvalidRequestError
from sampling_async._cli import _rendering as show
from sampling_async._cli._connection import ServiceOptions, loaded
from sampling_async._cli._files import LABELS_HELP, RATES_HELP, bands_file, read_bands, read_rates
from sampling_async._cli._options import argument, given, takes
from sampling_async.matching import MatchPolicy, QuestionKinds

if TYPE_CHECKING:
    from sampling_async.matching import Output


@frozen(kw_only=True)
class MatchOptions:
    inventory: Path | None = given(
        "FILE", "A file with an inventory, as `quotas` writes it; - for stdin. Default: ask the service."
    )
    top: int | None = given("N", "Show the best N quotas of each member.", min=1)
    requests: int | None = given(
        "N", "Like --top, but as requests for `fan-out`, without members that match no quota.", min=1
    )
    allocate: int | None = given(
        "N",
        "Like --requests, at most N quotas of each member, but no quota gets more members than it can "
        "use. The panel is read twice.",
        min=1,
    )
    sample: int | None = given("N", "Draw N members of each quota at random.", min=1)
    output: Path | None = given("FILE", "Write to this file: .parquet, .csv or .jsonl. Default: stdout.")
    html: Path | None = given(
        "FILE", "Write a page: price by LOI by IR, what the panel fits, and where room is and nobody fits."
    )
    labels: Path | None = given("FILE", f"{LABELS_HELP} For --html.")
    column: list[str] | None = given(
        "QUESTION=NAME", "The column of the panel that holds a question; can be given several times."
    )
    bands: Path | None = given(
        "FILE",
        "A JSON file of age bands: answer ID to first and last year. Default: the file "
        "PANEL.bands.json beside the panel, if it exists.",
    )
    currency_rates: Path | None = given("FILE", f"{RATES_HELP} For --allocate and --html.")
    at_least_one: bool = given(
        "", "A member may fit several sub-quotas of a layer.", "--at-least-one", default=False
    )
    workers: int | None = given("N", "The number of processes. Default: all cores.", min=1, max=1024)
    as_json: bool = given("", "Print JSON lines, on a terminal too.", "--json", default=False)

    @property
    def policy(self) -> MatchPolicy:
        return MatchPolicy(subquota_rule="at_least_one" if self.at_least_one else "exactly_one")

    @property
    def processes(self) -> int:
        if self.workers is not None:
            return self.workers
        # Only the cores that this process may use; a container often has fewer than the machine.
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1

    @property
    def counts(self) -> bool:
        """Whether the output has a row for each quota."""
        return all(each is None for each in (self.top, self.requests, self.allocate, self.sample))

    @property
    def as_requests(self) -> bool:
        return self.requests is not None or self.allocate is not None

    def wanted(self) -> Output:
        from sampling_async.matching import Allocate, Counts, Sample, TopK  # noqa: PLC0415  an extra

        if sum(each is not None for each in (self.top, self.requests, self.allocate, self.sample)) > 1:
            raise InvalidRequestError("give only one of --top, --requests, --allocate and --sample")
        if self.html is not None and (self.output is not None or not self.counts):
            raise InvalidRequestError("--html is about all quotas: leave out --output, --top and the like")
        if self.labels is not None and self.html is None:
            raise InvalidRequestError("--labels is for --html: the others show no questions")
        if self.currency_rates is not None and self.allocate is None and self.html is None:
            raise InvalidRequestError(
                "--currency-rates is for --allocate and --html: the others compare no prices"
            )
        if self.output is not None and show.wanted.csv:
            raise InvalidRequestError(
                "--output FILE.csv writes CSV to a file, --csv to stdout: give one of them"
            )
        if self.allocate is not None:
            return Allocate(self.allocate, currency_rates=read_rates(self.currency_rates))
        n = self.top or self.requests
        if n is not None:
            return TopK(n)
        return Counts() if self.sample is None else Sample(self.sample)

    def renamed(self, others: frozenset[str]) -> dict[str, str]:
        """Return the question or other column that each named column of the panel stands for."""
        renamed: dict[str, str] = {}
        for each in self.column or []:
            question, equals, name = (part.strip() for part in each.partition("="))
            if not equals or not name or not (question.isdecimal() or question in others):
                raise InvalidRequestError(
                    f"--column must be QUESTION=NAME, such as 1001538=age or member_code=id, not {each!r}"
                )
            if name in renamed or question in renamed.values():
                raise InvalidRequestError(
                    f"--column {each}: the column or the question was given before; give each only once"
                )
            renamed[name] = question
        return renamed

    def kinds(self, panel: Path | None) -> QuestionKinds:
        """Return how questions are matched, with the age bands that were given or lie beside the panel."""
        kinds, file = QuestionKinds.default(), self.bands
        if file is None and panel is not None:
            beside = bands_file(panel)
            with suppress(OSError):  # of a panel whose name no file can have, as a query
                file = beside if beside.is_file() else None
        if file is None:
            return kinds
        (question_id,) = kinds.age
        bands = read_bands(file)
        try:
            return kinds.with_age(question_id, bands)
        except InvalidRequestError as exc:
            raise InvalidRequestError(f"{file}: {exc}") from None


@takes(options=MatchOptions, service=ServiceOptions, csv=True, quiet=True)
def match(
    service: ServiceOptions,
    options: MatchOptions,
    members: str = argument(
        "PANEL",
        "A file (.parquet, .csv, .jsonl or .ndjson) or a DuckDB query (SELECT ...) with one row per "
        "member. The names of its columns are question IDs.",
    ),
) -> None:
    """Match a whole panel with the open quotas: count the members of each quota, or list their best quotas.

    Without --top, --requests, --allocate or --sample, the output has one row
    per quota: the members that match certainly and possibly, the completes
    still needed, and the shortfall (needed completes minus certain members).
    The panel may also have the columns member_code, device_type,
    exclude_surveys, participations and, for --allocate, invites_left. An
    unanswered question is empty or null.
    """
    loaded("match", "_match_run", "sampling_async.matching.panel").MatchRun(service, members, options).run()
