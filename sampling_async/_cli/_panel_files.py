"""Panels as they lie in files or come from a DuckDB query, read batch by batch; and results, to be written."""

from __future__ import annotations

import io
import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from attrs import frozen

from sampling_async import InvalidRequestError
from sampling_async.matching.panel._arrow import pa, pc

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping

csv: Final[Any] = import_module("pyarrow.csv")
arrow_json: Final[Any] = import_module("pyarrow.json")
pq: Final[Any] = import_module("pyarrow.parquet")

_QUERY: Final = re.compile(r"\s*(?:select|from|with)\s", re.IGNORECASE)
_TELLS_A_ROW: Final = re.compile(r"(got \d+|conversion error to \w+):.*", re.DOTALL)
_LINES_BYTES: Final = 2**24
_ROWS: Final = 2**15
INPUTS: Final = (".parquet", ".csv", ".jsonl", ".ndjson")
OUTPUTS: Final = (".parquet", ".csv", ".jsonl")


@frozen
class PanelFile:
    """A panel to be read.

    Attributes:
        batches: Record batches of what is wanted, by the names that are wanted.
        columns: All columns there are, by these names.
        members: How many members, where that is known before they are read.
    """

    batches: Iterator[Any]
    columns: tuple[str, ...]
    members: int | None


def is_query(panel: str) -> bool:
    """Return whether a panel is a query for DuckDB, and not a file."""
    return _QUERY.match(panel) is not None


def opened(panel: str, wanted: frozenset[str], renamed: Mapping[str, str]) -> PanelFile:
    """Open a panel.

    Args:
        panel: A file, or a query.
        wanted: The columns to read.
        renamed: Columns that are called otherwise there: by their names there, what they stand for.

    Raises:
        InvalidRequestError: It cannot be read.
    """
    if is_query(panel):
        return _of_query(panel, wanted, renamed)
    path = Path(panel)
    readers: dict[str, Callable[[Path, frozenset[str], Mapping[str, str]], PanelFile]] = dict(
        zip(INPUTS, (_of_parquet, _of_csv, _of_lines, _of_lines), strict=True)
    )
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise InvalidRequestError(
            f"{panel!r} is neither a query (SELECT ...) nor a file that ends in {', '.join(INPUTS)}"
        )
    if not path.is_file():
        raise InvalidRequestError(f"{panel}: no such file")
    with read_errors(panel):
        return reader(path, wanted, renamed)


@contextmanager
def read_errors(panel: str) -> Generator[None]:
    """Tell of what cannot be read as of bad input."""
    try:
        yield
    except (OSError, pa.ArrowException, UnicodeError, OverflowError) as exc:
        text = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc).partition("\n")[0]
        # What comes after is a line of the file, with somebody's answers.
        raise InvalidRequestError(f"{panel}: {_TELLS_A_ROW.sub(lambda match: match[1], text)}") from None


def _of_parquet(path: Path, wanted: frozenset[str], renamed: Mapping[str, str]) -> PanelFile:

    file = pq.ParquetFile(path)
    names = file.schema_arrow.names
    kept = [name for name in names if renamed.get(name, name) in wanted]
    batches = (_renamed(each, renamed) for each in file.iter_batches(batch_size=_ROWS, columns=kept))
    return PanelFile(_told(batches, path), _standing_for(names, renamed), file.metadata.num_rows)


def _of_csv(path: Path, wanted: frozenset[str], renamed: Mapping[str, str]) -> PanelFile:

    lines = csv.ParseOptions(newlines_in_values=True)  # or a text of two lines could be taken for two members
    with csv.open_csv(path, parse_options=lines) as reader:
        names = reader.schema.names
    kept = [name for name in names if renamed.get(name, name) in wanted]
    # As texts, all of them: read as numbers, postal codes would lose the zeros they begin with.
    options = csv.ConvertOptions(
        column_types=dict.fromkeys(kept, pa.string()),
        include_columns=kept or names[:1],
        null_values=[""],
        strings_can_be_null=True,
    )
    reader = csv.open_csv(path, parse_options=lines, convert_options=options)
    return PanelFile(
        _told((_renamed(each, renamed) for each in reader), path), _standing_for(names, renamed), None
    )


def _of_lines(path: Path, wanted: frozenset[str], renamed: Mapping[str, str]) -> PanelFile:
    """Read JSON lines block by block: a key may come in some lines only, and late."""
    names = {name: name for name in sorted(wanted)}
    names.update({name: there for there, name in renamed.items() if name in wanted})
    tables = _line_tables(path, names)
    first = next(tables, {})
    columns = tuple(name for name, column in first.items() if not pa.types.is_null(column.type))
    batches = (batch for table in chain([first], tables) for batch in pa.table(table).to_batches())
    return PanelFile(_told(batches, path), columns, None)


def _line_tables(path: Path, names: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    lists: set[str] = set()  # what was a list once is one from then on
    with path.open("rb") as file:
        while block := file.read(_LINES_BYTES):
            columns = _table_of(block + file.readline(), names)
            for name, column in columns.items():
                if pa.types.is_list(column.type):
                    lists.add(name)
                elif name in lists:
                    columns[name] = _as_lists(column)
            yield columns


def _table_of(block: bytes, names: Mapping[str, str]) -> dict[str, Any]:
    """Return what lines say by these names, which stand for those that are there; else nulls."""
    options = arrow_json.ReadOptions(block_size=len(block) + 1, use_threads=False)
    try:
        table = arrow_json.read_json(io.BytesIO(block), read_options=options)
    except pa.ArrowInvalid:  # a key that is a number here and a list there, for one; or there is no line
        rows = [_object_of(line, at) for at, line in enumerate(block.splitlines(), start=1) if line.strip()]
        return {
            name: pa.array(_alike([row.get(there) for row in rows])) if rows else pa.nulls(0)
            for name, there in names.items()
        }
    return {
        name: table.column(there).combine_chunks() if there in table.column_names else pa.nulls(len(table))
        for name, there in names.items()
    }


def _object_of(line: bytes, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise InvalidRequestError(
            f"each line of a panel is an object of JSON; line {number} of a part of it is none"
        )
    return row


def _alike(values: list[Any]) -> list[Any]:
    """Return answers as Arrow takes them: lists all of them if one is, and texts all if one is."""
    several = [value if isinstance(value, list) or value is None else [value] for value in values]
    are_texts = any(isinstance(one, str) for each in several for one in each or ())
    if any(isinstance(value, list) for value in values):
        return [_texts(each) if are_texts else each for each in several]
    return [value if value is None else str(value) for value in values] if are_texts else values


def _texts(values: list[Any] | None) -> list[str] | None:
    return None if values is None else [str(value) for value in values if value is not None]


def _as_lists(column: Any) -> Any:
    there = column.is_valid().to_numpy(zero_copy_only=False)
    ends = np.concatenate([[0], np.cumsum(there)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), column.drop_null())


def _of_query(query: str, wanted: frozenset[str], renamed: Mapping[str, str]) -> PanelFile:
    try:
        duckdb: Any = import_module("duckdb")
    except ModuleNotFoundError:
        raise InvalidRequestError(
            "a query needs duckdb: python -m pip install 'sampling-async[duckdb]'"
        ) from None
    try:
        reader = pa.RecordBatchReader.from_stream(duckdb.connect().sql(query))
    except duckdb.Error as exc:
        raise InvalidRequestError(f"the query failed: {str(exc).splitlines()[0]}") from None
    names = reader.schema.names
    kept = [at for at, name in enumerate(names) if renamed.get(name, name) in wanted]
    batches = (_renamed(each.select(kept), renamed) for each in reader)
    return PanelFile(_told(batches, "the query"), _standing_for(names, renamed), None)


def _told(batches: Iterable[Any], panel: object) -> Iterator[Any]:
    with read_errors(str(panel)):
        yield from batches


def _renamed(batch: Any, renamed: Mapping[str, str]) -> Any:
    return batch.rename_columns([renamed.get(name, name) for name in batch.schema.names]) if renamed else batch


def _standing_for(names: Iterable[str], renamed: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(renamed.get(name, name) for name in names)


# --- Results


def check_output(output: Path, panel: str) -> None:
    """Refuse a file that could not be written in the end, or that is the panel.

    Raises:
        InvalidRequestError: Its name does not say what it is to be, it is a folder, or in none, or the panel.
    """
    if output.suffix.lower() not in OUTPUTS:
        raise InvalidRequestError(
            f"--output ends in {', '.join(OUTPUTS)}, which says what it is to be; not {output}"
        )
    if output.is_dir():
        raise InvalidRequestError(f"--output {output} is a folder")
    if not output.absolute().parent.is_dir():
        raise InvalidRequestError(f"--output {output}: there is no such folder")
    if output.exists() and not is_query(panel) and Path(panel).exists() and output.samefile(panel):
        raise InvalidRequestError(f"--output {output} is the panel itself")


def write(batches: Iterable[Any], schema: Any, output: Path) -> None:
    """Write results to a file, which is there when all is done and not before.

    Raises:
        InvalidRequestError: It cannot be written.
    """
    target = output.resolve()
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        os.close(handle)
        unfinished = Path(name)
        try:
            _written(batches, schema, unfinished, output.suffix.lower())
            unfinished.chmod(0o666 & ~_umask())
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as exc:
        raise InvalidRequestError(f"{output}: {exc.strerror or exc}") from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _written(batches: Iterable[Any], schema: Any, path: Path, suffix: str) -> None:
    if suffix == ".jsonl":
        with path.open("wb") as file:
            file.writelines(line + b"\n" for line in lines(batches))
    elif suffix == ".parquet":
        with pq.ParquetWriter(path, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
    else:
        plain = pa.schema([(field.name, _in_a_cell(field.type)) for field in schema])
        with csv.CSVWriter(path, plain) as writer:
            for batch in batches:
                columns = [_cells(column) for column in batch.columns]
                writer.write_batch(pa.record_batch(columns, schema=plain))


def _in_a_cell(kind: Any) -> Any:
    return pa.string() if pa.types.is_list(kind) else kind


def _cells(column: Any) -> Any:
    """Return a column as CSV can hold it: of lists, the things with a blank between them."""
    if not pa.types.is_list(column.type):
        return column
    return pa.array([" ".join(map(str, each)) for each in column.to_pylist()], pa.string())


def lines(batches: Iterable[Any], *, only_ascii: bool = False) -> Iterator[bytes]:
    """Yield results as lines of JSON; in ASCII for a terminal, which nothing in them can steer then."""
    for batch in batches:
        for row in batch.to_pylist():
            yield json.dumps(row, ensure_ascii=only_ascii, separators=(",", ":")).encode()


def matching_any(batches: Iterable[Any]) -> Iterator[Any]:
    """Leave out the members that match no quota."""
    for batch in batches:
        yield batch.filter(pc.greater(pc.list_value_length(batch.column("quota_ids")), 0))
