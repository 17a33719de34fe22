"""One run of `match`: a panel in a file against an inventory, what is shown of the result, and its files."""

from __future__ import annotations

import json
import re
import shlex
import sys
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import define, evolve

from sampling_async import DecodeError, InvalidRequestError, Quotas, Survey, from_json
from sampling_async._cli import _rendering as show
from sampling_async._cli._connection import needs
from sampling_async._cli._files import check_place, read_labels, read_rates
from sampling_async._contract.checks import count_of, require_utf8
from sampling_async._contract.currencies import PLACES_ALONE, not_compared
from sampling_async._contract.records import wire_name
from sampling_async._private_files import written_whole
from sampling_async.matching import Allocate, Counts, PanelMatcher, QuotaIndex, Sample
from sampling_async.matching.panel import INVITES_LEFT, MEMBER_CODE, OTHERS, alike, is_query
from sampling_async.matching.panel import _files as files
from sampling_async.matching.panel._arrow import pa, pc

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence

    from rich.table import Table

    from sampling_async._cli._connection import ServiceOptions
    from sampling_async._cli._match import MatchOptions
    from sampling_async.matching import Output
    from sampling_async.matching.panel import PanelFile

SHOWN: Final = 40
_QUOTAS: Final = 5
_UNKNOWN_BAND: Final = "is in no known band"


def show_counts(batches: Iterator[Any], followed: Followed) -> None:
    rows = [row for batch in batches for row in batch.to_pylist()]
    numbers = ("Quota", "Survey", "Needed", "Certain", "Possible", "Shortfall")
    table = show.new_table(*numbers, right=numbers)
    for row in rows[:SHOWN]:
        cells = [f"{row[name.lower()]:,}" for name in numbers[2:]]
        cells[-1] = f"[red]{cells[-1]}[/red]" if row["shortfall"] else "[dim]0[/dim]"
        table.add_row(str(row["quota_id"]), str(row["survey_id"]), *cells)
    enough = sum(not row["shortfall"] for row in rows)
    _show(
        table,
        len(rows),
        followed,
        f"{count_of(followed.members, 'member')}, {count_of(len(rows), 'quota')}: {enough:,} can be filled with"
        f" certain members, [bold]{len(rows) - enough:,}[/bold] need {sum(row['shortfall'] for row in rows):,}"
        " more completes.",
    )


def show_best(batches: Iterator[Any], followed: Followed, *, as_requests: bool) -> None:
    table = show.new_table("Member", "Quotas", "Certain", "The best", right=("Quotas", "Certain"))
    count = certain = possible = 0
    for batch in batches:
        # Only the rows that are shown become Python objects; all others are just counted below.
        for row in batch.slice(0, max(SHOWN - count, 0)).to_pylist():
            ids = [str(quota_id) for quota_id in row["quota_ids"]]
            best = " ".join(ids[:_QUOTAS]) + (" ..." if len(ids) > _QUOTAS else "")
            table.add_row(show.plain(row["member_code"]), str(len(ids)), str(row["certain"]), best)
        for many, of_certain in zip(
            batch.column("quota_ids").value_lengths().to_pylist(),
            batch.column("certain").to_pylist(),
            strict=True,
        ):
            certain += of_certain > 0
            possible += many > 0 and not of_certain
        count += len(batch)
    summary = (
        f"{count_of(followed.members, 'member')}: {certain:,} match a quota for certain, {possible:,} possibly,"
        f" {followed.members - certain - possible:,} none."
    )
    if as_requests:
        summary += "\nTo request these invites: pipe into sampling-async fan-out"
    _show(table, count, followed, summary)


def show_sample(batches: Iterator[Any], followed: Followed) -> None:
    table = show.new_table("Quota", "Member", "Match", right=("Quota",))
    count, quotas = 0, set[int]()
    for batch in batches:
        for row in batch.slice(0, max(SHOWN - count, 0)).to_pylist():
            match = "certain" if row["certain"] else "[dim]possible[/dim]"
            table.add_row(str(row["quota_id"]), show.plain(row["member_code"]), match)
        quotas.update(batch.column("quota_id").to_pylist())
        count += len(batch)
    _show(
        table,
        count,
        followed,
        f"{count_of(count, 'member')} drawn from {followed.members:,}, for {count_of(len(quotas), 'quota')}.",
    )


def _show(table: Table, rows: int, followed: Followed, summary: str) -> None:
    # Two displays on one screen would write into each other, so the bar ends before the table begins.
    followed.progress.stop()
    screen = show.screen()
    screen.print(table)
    if rows > SHOWN:
        screen.print(f"[dim]and {rows - SHOWN:,} more; a pipe or --output FILE gets all[/dim]")
    screen.print(f"\n{summary}")


_FEW: Final = 5
_OTHERS: Final = OTHERS | {INVITES_LEFT}  # the columns that are not questions
_GUESSES: Final = (
    ("1001538", frozenset({"age", "alter", "years"})),
    ("1001007", frozenset({"gender", "sex"})),
    ("1001042", frozenset({"zip", "zipcode", "postal", "postalcode", "postcode", "plz"})),
    (MEMBER_CODE, frozenset({"id", "code", "member", "memberid", "membercode", "panelist", "panelistid"})),
)
"""Common names of columns, for advice in error messages. They are never used for matching."""


@define
class MatchRun:
    _service: ServiceOptions
    _panel: str  # a file, or a query
    _options: MatchOptions

    def run(self) -> None:
        options = self._options
        # All options are checked before the first request and before any reading, which may take long.
        wanted, renamed = options.wanted(), options.renamed(_OTHERS)
        kinds = options.kinds(None if is_query(self._panel) else Path(self._panel))
        if options.output is not None:
            check_output(options.output, self._panel, options.inventory)
        if options.html is not None:
            check_place("--html", options.html)
            read_rates(options.currency_rates)
            read_labels(options.labels)
        if options.inventory is None:
            inventory: Quotas | tuple[Survey, ...] = self._service.call(lambda client: client.get_quotas())
        else:
            inventory = read_inventory(options.inventory)
        index = QuotaIndex(inventory, kinds=kinds, policy=options.policy)
        matcher = PanelMatcher(index, _comparing(wanted, index))
        names = _OTHERS | {str(question_id) for question_id in matcher.questions}
        opened = partial(files.opened, self._panel, names, renamed, matcher.text_columns)
        source = opened()
        if index.diagnostics:
            first = index.diagnostics[0]
            hint = "; give the age bands with --bands FILE" if first.message.endswith(_UNKNOWN_BAND) else ""
            show.warn(
                f"the inventory has {count_of(len(index.diagnostics), 'oddity', 'oddities')}, which count as"
                f" possible; the first: quota {first.quota_id}, {first.message}{hint}"
            )
        self._check_columns(matcher, source)
        if options.as_requests:
            # Before the first line: what is in a pipe is being sent already.
            codes = files.opened(self._panel, frozenset({MEMBER_CODE}), renamed, matcher.text_columns)
            with self._file_named():
                must_be_distinct(codes.batches)
        if isinstance(wanted, Allocate):
            with self._file_named():
                matcher = matcher.derive_prices(source.batches, workers=options.processes)
            source = opened()
        followed = Followed(source)
        results = iter(matcher.run(iter(followed), workers=options.processes))
        if options.as_requests:
            # Without the members that match no quota.
            results = (
                each.filter(pc.greater(pc.list_value_length(each.column("quota_ids")), 0)) for each in results
            )
        with followed.progress, self._file_named():
            if options.html is not None:
                surveys = inventory if isinstance(inventory, tuple) else inventory.surveys
                results = self._with_page(options.html, results, surveys, followed)
            self._output(results, matcher, followed)
        if options.output is not None:
            show.note(f"{count_of(followed.members, 'member')} matched: {options.output}")

    def _with_page(
        self, html: Path, results: Iterator[Any], surveys: Sequence[Survey], followed: Followed
    ) -> Iterator[Any]:
        """Write the page about all quotas, and return the results that are printed beside it."""
        batches = list(results)
        rows = [row for batch in batches for row in batch.to_pylist()]
        fits = {row["quota_id"]: (row["certain"], row["possible"]) for row in rows}
        rates, labels = read_rates(self._options.currency_rates), read_labels(self._options.labels)
        with needs("the page"):
            from sampling_async.campaign._inventory_page import inventory_page  # noqa: PLC0415  Jinja2

            page = inventory_page(surveys, fits, members=followed.members, currency_rates=rates, labels=labels)
            show.write_page(html, page)
        return iter(batches)

    def _output(self, results: Iterator[Any], matcher: PanelMatcher, followed: Followed) -> None:
        options = self._options
        if options.output is not None:
            write(results, matcher.schema, options.output)
        elif options.html is not None and not (show.wanted.json or show.wanted.csv):
            return  # the page is all
        elif show.as_lines():
            show.emit_rows(_rows(results), matcher.schema.names)
        elif isinstance(matcher.output, Counts):
            show_counts(results, followed)
        elif isinstance(matcher.output, Sample):
            show_sample(results, followed)
        else:
            show_best(results, followed, as_requests=options.as_requests)

    def _check_columns(self, matcher: PanelMatcher, source: PanelFile) -> None:
        """Refuse a panel without any question or without a needed member code; report other missing columns."""
        questions, columns = matcher.questions, source.columns
        missing = [str(question_id) for question_id in questions if str(question_id) not in columns]
        if missing and len(missing) == len(questions):
            raise InvalidRequestError(
                f"{self._name}: the panel has no column for any question of the inventory, such as "
                f"{missing[0]}; it has {files.named(columns)}. Name the columns: "
                f"{_advice(columns, questions) or f'--column {missing[0]}=NAME'}"
            )
        if not isinstance(matcher.output, Counts) and MEMBER_CODE not in columns:
            raise InvalidRequestError(
                f"{self._name}: the panel has no column {MEMBER_CODE!r}, which is needed to name members; it "
                f"has {files.named(columns)}. Give {_advice(columns, ()) or f'--column {MEMBER_CODE}=NAME'}"
            )
        if missing:
            shown = ", ".join(missing[:_FEW]) + (", ..." if len(missing) > _FEW else "")
            show.warn(
                f"the panel has no column for {len(missing):,} of {count_of(len(questions), 'question')}, so"
                f" they count as not answered: {shown}"
            )

    @contextmanager
    def _file_named(self) -> Generator[None]:
        """Put the name of the file before an error about one of its rows or columns."""
        try:
            yield
        except InvalidRequestError as exc:
            if str(exc).startswith(("row ", "column ", "the panel ")):
                raise InvalidRequestError(f"{self._name}: {exc}") from None
            raise

    @property
    def _name(self) -> str:
        return "the query" if is_query(self._panel) else self._panel


def _advice(columns: tuple[str, ...], questions: tuple[int, ...]) -> str:
    """Return `--column` options for columns with common names, for these questions and the member code."""
    asked = {MEMBER_CODE, *map(str, questions)}
    # Compared without case and punctuation: "Member_ID" becomes "memberid".
    plain = {"".join(filter(str.isalnum, column.casefold())): column for column in columns}
    guessed = [
        shlex.join(["--column", f"{question}={plain[word]}"])
        for question, words in _GUESSES
        if question in asked and question not in columns
        for word in sorted(words & plain.keys())[:1]
    ]
    return " ".join(guessed)


def _comparing(wanted: Output, index: QuotaIndex) -> Output:
    """Return what is wanted; say once if prices cannot be compared."""
    currencies = {target.survey.price.currency_id for target in index.quota_ids.targets()}
    if not isinstance(wanted, Allocate) or not wanted.counts_prices_alike(currencies):
        return wanted
    show.warn(not_compared(currencies))
    return evolve(wanted, currency_rates=PLACES_ALONE)


def must_be_distinct(batches: Iterable[Any]) -> None:
    """Refuse a panel in which two rows have the same member code: both would get requests."""
    given = [batch.column(MEMBER_CODE) for batch in batches]
    try:
        codes = pa.chunked_array([column.cast(pa.string()) for column in given], pa.string())
        codes.validate(full=True)
    except pa.ArrowException:  # of a type, or an encoding, that the matcher refuses by name
        return
    codes_given = codes.drop_null()
    if len(codes_given.unique()) == len(codes_given):
        return
    seen: set[str] = set()
    for row, code in enumerate(codes.to_pylist()):
        if code in seen:
            raise InvalidRequestError(
                f"row {row} has the member code of an earlier row; each member must have one row"
            )
        if code is not None:
            seen.add(code)


class Followed:
    """A panel while it is read: counts members, and moves the bar."""

    def __init__(self, source: PanelFile) -> None:
        self._batches = source.batches
        self.members = 0
        total = source.members()
        self.progress = show.progress_bar(total_known=total is not None, lines=True)
        self._task = self.progress.add_task("Matching", total=total)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            self.members += len(batch)
            self.progress.advance(self._task, len(batch))
            yield batch
        if not self.members:
            raise InvalidRequestError("the panel has no members")


# --- Inventories in files

_DOCUMENT: Final = re.compile(rb'"Surveys"\s*:')
_HEAD_BYTES: Final = 4096
_WAY_OUT: Final = "write one with `sampling-async quotas --json > FILE`"


def read_inventory(file: Path) -> tuple[Survey, ...]:
    """Return the surveys of a file that `quotas` wrote, with or without `--json`; - for stdin."""
    is_stdin = str(file) == "-"
    name = "stdin" if is_stdin else str(file)
    try:
        body = sys.stdin.buffer.read() if is_stdin else file.read_bytes()
        # PowerShell writes UTF-16, which begins with one of these two byte order marks.
        body = body.decode(json.detect_encoding(body)).encode() if body[:1] in {b"\xff", b"\xfe"} else body
    except OSError as exc:
        raise InvalidRequestError(f"{name}: {exc.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidRequestError(f"{name} is neither UTF-8 nor UTF-16; {_WAY_OUT}") from None
    body = body.removeprefix(b"\xef\xbb\xbf")
    if not body.strip():
        raise InvalidRequestError(f"{name} is empty; {_WAY_OUT}")
    # A document has "Surveys" near its beginning. Otherwise the first line shows whether these are lines.
    if _DOCUMENT.search(body, 0, _HEAD_BYTES) is None and _begins_with_a_survey(body):
        return tuple(_surveys(name, body))
    try:
        return from_json(Quotas, body).surveys
    except DecodeError as exc:
        raise InvalidRequestError(f"{name} is not an inventory: {exc}; {_WAY_OUT}") from None


def _begins_with_a_survey(body: bytes) -> bool:
    try:
        first: Any = json.loads(body.lstrip().partition(b"\n")[0])
    except (ValueError, RecursionError):
        return False
    return isinstance(first, dict) and "Surveys" not in first


def _surveys(name: str, body: bytes) -> Iterator[Survey]:
    for number, line in enumerate(body.split(b"\n"), start=1):
        if line.strip():
            try:
                yield from_json(Survey, line)
            except DecodeError as exc:
                raise InvalidRequestError(f"{name}, line {number} is not a survey: {exc}; {_WAY_OUT}") from None


# --- Results in files

csv: Final[Any] = import_module("pyarrow.csv")
pq: Final[Any] = import_module("pyarrow.parquet")

OUTPUTS: Final = (".parquet", ".csv", ".jsonl")


def check_output(output: Path, panel: str, inventory: Path | None) -> None:
    """Refuse a file that could not be written at the end, or that is one of those which are read."""
    if output.suffix.lower() not in OUTPUTS:
        raise InvalidRequestError(
            f"--output must end in {', '.join(OUTPUTS)}, which sets the format, not {output}"
        )
    check_place("--output", output)
    require_utf8(output.absolute())
    read = {"panel": None if is_query(panel) else Path(panel), "inventory": inventory}
    for name, path in read.items():
        if path is not None and path.exists() and output.exists() and output.samefile(path):
            raise InvalidRequestError(f"--output {output} is the {name} itself")


def write(batches: Iterable[Any], schema: Any, output: Path) -> None:
    """Write results to a file, which appears only when it is complete."""
    suffix = output.suffix.lower()
    with written_whole(output) as path:
        if suffix == ".jsonl":
            with path.open("w", encoding="utf-8", newline="\n") as file:
                for row in _rows(batches):
                    file.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n")
        elif suffix == ".parquet":
            with pq.ParquetWriter(path, schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
        else:
            plain = pa.schema(
                {each.name: pa.string() if pa.types.is_list(each.type) else each.type for each in schema}
            )
            with csv.CSVWriter(path, plain) as writer:
                for batch in batches:
                    # Lists become texts with blanks between the items.
                    columns = [
                        pa.array([" ".join(map(str, each)) for each in column.to_pylist()], pa.string())
                        if pa.types.is_list(column.type)
                        else column
                        for column in batch.columns
                    ]
                    writer.write_batch(pa.record_batch(columns, schema=plain))


def _rows(batches: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Yield results row by row, with the contract's own names."""
    for batch in batches:
        yield from batch.rename_columns(list(map(wire_name, batch.schema.names))).to_pylist()


def write_rows(rows: Sequence[Mapping[str, Any]], output: Path) -> None:
    """Write a panel to Parquet, one row for each member, with the columns of the first row."""
    table = pa.table({name: pa.array(alike([row[name] for row in rows])) for name in rows[0]})
    write(table.to_batches(), table.schema, output)
