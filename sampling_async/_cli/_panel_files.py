"""Read inventories from files, and write the results of matching."""

from __future__ import annotations

import json
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sampling_async import DecodeError, InvalidRequestError, Quotas, Survey, from_json
from sampling_async._cli._files import check_place
from sampling_async._contract.records import wire_name
from sampling_async._private_files import written_whole
from sampling_async.matching.panel import alike, is_query
from sampling_async.matching.panel._arrow import pa

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

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
    read = {"panel": None if is_query(panel) else Path(panel), "inventory": inventory}
    for name, path in read.items():
        if path is not None and path.exists() and output.exists() and output.samefile(path):
            raise InvalidRequestError(f"--output {output} is the {name} itself")


def write(batches: Iterable[Any], schema: Any, output: Path) -> None:
    """Write results to a file, which appears only when it is complete."""
    suffix = output.suffix.lower()
    with written_whole(output) as path:
        if suffix == ".jsonl":
            with path.open("wb") as file:
                file.writelines(line + b"\n" for line in lines(batches))
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
                    columns = [_cells(column) for column in batch.columns]
                    writer.write_batch(pa.record_batch(columns, schema=plain))


def _cells(column: Any) -> Any:
    """Return a column for CSV: lists become texts with blanks between the items."""
    if not pa.types.is_list(column.type):
        return column
    return pa.array([" ".join(map(str, each)) for each in column.to_pylist()], pa.string())


def lines(batches: Iterable[Any], *, only_ascii: bool = False) -> Iterator[bytes]:
    """Yield results as lines of JSON; in ASCII for a terminal, so that no text can control the terminal."""
    for batch in batches:
        for row in batch.rename_columns(list(map(wire_name, batch.schema.names))).to_pylist():
            yield json.dumps(row, ensure_ascii=only_ascii, separators=(",", ":")).encode()


def write_rows(rows: Sequence[Mapping[str, Any]], output: Path) -> None:
    """Write a panel to Parquet, one row for each member, with the columns of the first row."""
    table = pa.table({name: pa.array(alike([row[name] for row in rows])) for name in rows[0]})
    write(table.to_batches(), table.schema, output)
