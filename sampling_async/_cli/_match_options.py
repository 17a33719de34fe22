"""The options of `match`, and their meaning."""

from __future__ import annotations

import json
import os
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from sampling_async import InvalidRequestError
from sampling_async._cli import _currencies
from sampling_async._cli import _rendering as show
from sampling_async._cli._options import given
from sampling_async.matching import MatchPolicy, QuestionKinds

if TYPE_CHECKING:
    from sampling_async.matching import Output

# The ending of a file of age bands beside a panel: `panel.bands.json` beside `panel.parquet`.
BANDS_SUFFIX: Final = ".bands.json"


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
    column: list[str] | None = given(
        "QUESTION=NAME", "The column of the panel that holds a question; can be given several times."
    )
    bands: Path | None = given(
        "FILE",
        "A JSON file of age bands: answer ID to first and last year. Default: the file "
        "PANEL.bands.json beside the panel, if it exists.",
    )
    currency_rates: Path | None = given("FILE", f"{_currencies.HELP} For --allocate and --html.")
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
        if self.currency_rates is not None and self.allocate is None and self.html is None:
            raise InvalidRequestError(
                "--currency-rates is for --allocate and --html: the others compare no prices"
            )
        if self.output is not None and show.wanted.csv:
            raise InvalidRequestError(
                "--output FILE.csv writes CSV to a file, --csv to stdout: give one of them"
            )
        if self.allocate is not None:
            return Allocate(self.allocate, currency_rates=_currencies.read_rates(self.currency_rates))
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
        if file is None and panel is not None and bands_file(panel).is_file():
            file = bands_file(panel)
        if file is None:
            return kinds
        (question_id,) = kinds.age
        bands = _bands(file)
        try:
            return kinds.with_age(question_id, bands)
        except InvalidRequestError as exc:
            raise InvalidRequestError(f"{file}: {exc}") from None


def bands_file(panel: Path) -> Path:
    return panel.with_name(panel.stem + BANDS_SUFFIX) if panel.name else Path(BANDS_SUFFIX)


def check_place(option: str, output: Path) -> None:
    if output.is_dir():
        raise InvalidRequestError(f"{option} {output} is a folder")
    if not output.absolute().parent.is_dir():
        raise InvalidRequestError(f"{option} {output}: the folder does not exist")


def _bands(file: Path) -> dict[int, tuple[int, int]]:
    try:
        read: Any = json.loads(file.read_bytes())
    except OSError as exc:
        raise InvalidRequestError(f"{file}: {exc.strerror}") from None
    except (ValueError, RecursionError):
        read = None
    try:
        return {int(id_): (index(first), index(last)) for id_, (first, last) in read.items()}
    except (ValueError, OverflowError, TypeError, AttributeError):
        raise InvalidRequestError(
            f"{file}: age bands must be a JSON object of answer IDs, each with first and last year, "
            '{"2006352": [18, 24]}'
        ) from None
