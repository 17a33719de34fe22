"""Read panels from files, a DuckDB query or whatever has their members, in record batches of a good size."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from sampling_async import InvalidRequestError
from sampling_async._contract.checks import count_of, require_utf8
from sampling_async._contract.extras import install
from sampling_async.matching.panel._arrow import booleans, is_text, lists_of, pa, settled

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Generator, Iterable, Mapping, Sequence

ROWS: Final = 2**15
"""Members read at a time: few, to need little memory; many, because each column of a batch has a fixed cost."""


def batches_of(stream: Any) -> Iterator[Any]:
    if hasattr(stream, "__arrow_c_stream__"):
        yield from _reader_of(stream)
        return
    for batch in stream if isinstance(stream, Iterator) else (stream,):
        if not isinstance(batch, pa.RecordBatch):
            hint = ": collect() it first" if hasattr(stream, "collect") else ""
            raise InvalidRequestError(
                "a panel must be an Arrow stream (a table, a reader, a data frame) or an iterator of record "
                f"batches, not {type(batch).__name__}{hint}"
            )
        yield batch


def _reader_of(stream: Any) -> Any:
    try:
        return pa.RecordBatchReader.from_stream(stream)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as exc:
        # The text of Arrow's errors quotes a value, which may be a member code.
        column = re.search(r"failed for column (.+) with type", str(exc))
        of = "" if column is None else f" of its column {column[1]!r}"
    raise InvalidRequestError(
        f"the panel cannot be converted to Arrow: values{of} have several types. Convert them, or leave out "
        "columns that matching does not need"
    )


def must_be_readable_twice(stream: Any) -> None:
    """Refuse a panel that is gone once it has been read."""
    if not hasattr(stream, "__arrow_c_stream__") or isinstance(stream, pa.RecordBatchReader):
        raise InvalidRequestError(
            "Allocate reads the panel twice, and this one can be read only once: give a table, data "
            "frame or relation; or use matcher.derive_prices(panel).run(the same, opened again)"
        )


def sized(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield batches of at most `ROWS` members: large batches are cut, small ones are joined."""
    waiting: list[Any] = []
    count = 0
    for batch in batches:
        for start in range(0, len(batch), ROWS):
            piece = batch.slice(start, ROWS)
            if waiting and (count + len(piece) > ROWS or piece.schema != waiting[0].schema):
                yield pa.concat_batches(waiting) if len(waiting) > 1 else waiting[0]
                waiting, count = [], 0
            waiting.append(piece)
            count += len(piece)
    if waiting:
        yield pa.concat_batches(waiting) if len(waiting) > 1 else waiting[0]


_QUERY: Final = re.compile(r"\s*(?:select|from|with)\s", re.IGNORECASE)
_OTHER_WIDTH: Final = re.compile(r"Row #(\d+): Expected (\d+) columns, got (\d+)")
_NOT_UTF8: Final = re.compile(r"Row #(\d+): CSV conversion error to string")
_BEGINNINGS: Final = {
    b"PK\x03\x04": "a workbook of Excel, or another archive: save it as CSV in UTF-8",
    b"PAR1": "Parquet: let its name end in .parquet",
    b"\x1f\x8b": "compressed by gzip: unpack it",
    **dict.fromkeys((b"\xff\xfe", b"\xfe\xff"), "UTF-16"),
}
"""What a file of text is instead, by how it begins."""
_LINES_BYTES: Final = 2**24
_LEAST_BLOCK: Final = 2**20
_MOST_BLOCK: Final = 2**28
_READ_BYTES: Final = 2**16
_ROWS: Final = 2**15
_DEEP: Final = 2_000
_QUERIED: Final = "the query"
_QUOTED: Final = re.compile(r"'[^']*'")  # a value in an error of DuckDB, which may be of a member
_NAMED: Final = 12
_LONGEST_NAME: Final = 40
INPUTS: Final = (".parquet", ".csv", ".jsonl", ".ndjson")


class BadLineError(ValueError):
    """A line or a row of a panel is not what it must be. The text says which one."""


@frozen
class PanelFile:
    """A panel that is ready to be read, in record batches of the wanted columns.

    `columns` names all columns of the panel. Both have the wanted names. `members` counts them for a display:
    those of a text file by its lines. None if that is not known before reading.
    """

    batches: Iterator[Any]
    columns: tuple[str, ...]
    members: Callable[[], int | None]


def is_query(panel: str) -> bool:
    """Return whether a panel is a query for DuckDB rather than a file."""
    return _QUERY.match(panel) is not None


def opened(
    panel: str, wanted: frozenset[str], renamed: Mapping[str, str], texts: frozenset[str] = frozenset()
) -> PanelFile:
    """Open a panel: a file, or a query.

    `renamed` has the wanted names of columns by those in the panel. `texts` are wanted columns that hold texts
    only: in JSON lines, where each value has its own type, other values are refused by line.
    """
    if is_query(panel):
        return _of_query(panel, wanted, renamed)
    path = require_utf8(Path(panel))
    kind = path.suffix.lower()
    if kind not in INPUTS:
        raise InvalidRequestError(
            f"{panel!r} is neither a query (SELECT ...) nor a file that ends in {', '.join(INPUTS)}"
        )
    if path.is_dir():
        raise InvalidRequestError(f"{panel} is a folder, not a file; a DuckDB query reads many files")
    if not path.is_file():
        raise InvalidRequestError(f"{panel}: the file does not exist")
    if not path.stat().st_size:
        raise InvalidRequestError(f"{panel} is empty")
    with read_errors(panel):
        if kind == ".parquet":
            return _of_parquet(path, wanted, renamed)
        _must_be_text(path)
        return _of_csv(path, wanted, renamed) if kind == ".csv" else _of_lines(path, wanted, renamed, texts)


def named(columns: Iterable[str]) -> str:
    """Return the names of columns for a message: the first twelve, and the number of all."""
    names = list(columns)
    shown = ", ".join(repr(name[:_LONGEST_NAME]) for name in names[:_NAMED]) or "none"
    return f"{shown}, ... ({len(names):,} in all)" if len(names) > _NAMED else shown


def _check_names(
    panel: object, names: Iterable[str], renamed: Mapping[str, str], wanted: Container[str] = ()
) -> None:
    """Refuse a `--column` that names no column or a taken name, and a wanted column that stands there twice."""
    names = list(names)
    for name, times in Counter(names).items():
        if times > 1 and renamed.get(name, name) in wanted:
            raise InvalidRequestError(f"{panel} has {times} columns {name!r}: rename or drop all but one")
    for there, question in renamed.items():
        if there not in names:
            raise InvalidRequestError(
                f"{panel}: --column {question}={there}: there is no column {there!r}; the columns are "
                f"{named(names)}"
            )
        if question in names and question != there and question not in renamed:
            raise InvalidRequestError(
                f"{panel}: --column {question}={there}: there is also a column {question!r}; drop one of the "
                "two"
            )


@contextmanager
def read_errors(panel: str) -> Generator[None]:
    """Raise errors of reading as `InvalidRequestError`."""
    try:
        yield
    except BadLineError as exc:
        raise InvalidRequestError(f"{panel}, {exc}") from None
    except UnicodeError:
        raise InvalidRequestError(f"{panel} is not UTF-8: {_conversion(panel)}") from None
    except (OSError, pa.ArrowException, OverflowError) as exc:
        text = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc).partition("\n")[0]
        text = _QUOTED.sub("'...'", text) if panel == _QUERIED else text
        raise InvalidRequestError(f"{panel}: {text}") from None


def _must_be_text(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(4)
    for begins, found in _BEGINNINGS.items():
        if start.startswith(begins):
            way = f": {_conversion(path.name, 'utf-16')}" if found == "UTF-16" else ""
            raise InvalidRequestError(f"{path} is {found}{way}")


def _conversion(name: str, encoding: str = "latin-1") -> str:
    query = f"FROM read_csv('FILE', encoding='{encoding}', header=true, all_varchar=true)"
    return "convert it to UTF-8" + f", or read it by a DuckDB query: {query}" * name.lower().endswith(".csv")


def _odd_row_in(text: str) -> str | None:
    """Return what an error of Arrow says about a row; not the row itself, which has the answers of a member."""
    # Arrow counts from 1, and the names of the columns too.
    if found := _OTHER_WIDTH.search(text):
        row, wanted, got = map(int, found.groups())
        return (
            f"row {row - 2} of the panel has {count_of(got, 'column')} in place of {wanted}: texts with "
            "commas or line breaks need quotation marks"
        )
    if found := _NOT_UTF8.search(text):
        return f"row {int(found[1]) - 2} of the panel is not UTF-8: {_conversion('.csv')}"
    return None


def _of_parquet(path: Path, wanted: frozenset[str], renamed: Mapping[str, str]) -> PanelFile:
    # Here, because it loads all file systems of pyarrow, and matching needs none. By default, it keeps what it
    # has read until the end of the file, or at least of a row group, which may be the whole file.
    parquet: Any = import_module("pyarrow.parquet")
    file = parquet.ParquetFile(path, pre_buffer=False, buffer_size=_READ_BYTES)
    names = file.schema_arrow.names
    _check_names(path, names, renamed, wanted)
    kept = [name for name in names if renamed.get(name, name) in wanted]
    batches = (_renamed(each, renamed) for each in file.iter_batches(batch_size=_ROWS, columns=kept))
    there, read = _renamed_names(names, renamed), _with_read_errors(batches, path)
    return PanelFile(read, there, lambda: file.metadata.num_rows)


def _of_csv(path: Path, wanted: frozenset[str], renamed: Mapping[str, str]) -> PanelFile:
    names = next(_csv_batches(path)).schema.names
    other = next((mark for mark in ";\t|" if mark in names[0]), "") if len(names) == 1 else ""
    skip = "skip=1, " * names[0].startswith("sep=")
    if other or skip:
        raise InvalidRequestError(
            f"{path}: commas must divide its columns, from the first line on; a DuckDB query reads others: "
            f"FROM read_csv('FILE', delim={(other or ',')!r}, {skip}header=true, all_varchar=true)"
        )
    _check_names(path, names, renamed, wanted)
    kept = [name for name in names if renamed.get(name, name) in wanted]
    # All columns are read as texts: read as numbers, postal codes would lose their leading zeros.
    batches = (_renamed(each, renamed) for each in _csv_batches(path, kept or names[:1]))
    members = partial(_lines_in, path, 1)  # without the names of the columns
    return PanelFile(_with_read_errors(batches, path), _renamed_names(names, renamed), members)


def _csv_batches(path: Path, kept: Sequence[str] = ()) -> Iterator[Any]:
    """Yield the batches of a file, at least one. `kept` are the columns to read; none for all."""
    csv: Any = import_module("pyarrow.csv")
    # Without this option, a text of two lines could be read as two members.
    lines = csv.ParseOptions(newlines_in_values=True)
    options = csv.ConvertOptions(
        column_types=dict.fromkeys(kept, pa.string()),
        include_columns=kept,
        null_values=[""],
        strings_can_be_null=True,
    )
    size, given = _LEAST_BLOCK, 0
    while True:
        done = 0  # rows, some of which a reader with smaller blocks may have given
        try:
            # With threads, which save no time here, an error does not say the row.
            read = csv.ReadOptions(block_size=size, use_threads=False)
            with csv.open_csv(path, read, lines, options) as reader:
                if not kept:
                    yield pa.RecordBatch.from_pylist([], reader.schema)
                for batch in reader:
                    new = batch.slice(max(0, given - done))
                    done += len(batch)
                    if len(new):
                        yield new
                    given = max(given, done)
        except pa.ArrowInvalid as exc:
            if odd := _odd_row_in(str(exc)):
                raise BadLineError(odd) from None
            # A row must fit into a block. Blocks that hold any row would take much memory for every file.
            if "block" not in str(exc) or size >= path.stat().st_size:
                raise
            if size == _MOST_BLOCK:
                raise BadLineError(
                    f"row {given} or one after it is longer than {size >> 20} MB: is a quotation mark missing?"
                ) from None
            size = min(8 * size, _MOST_BLOCK)
        else:
            return


def _lines_in(path: Path, others: int = 0) -> int:
    with path.open("rb") as file:
        count = sum(block.count(b"\n") for block in iter(partial(file.read, _LINES_BYTES), b""))
    return max(0, count - others)


def _of_lines(
    path: Path, wanted: frozenset[str], renamed: Mapping[str, str], texts: frozenset[str]
) -> PanelFile:
    """Read JSON lines block by block. A key may be in some lines only, and may first occur late in the file."""
    names = {name: name for name in sorted(wanted) if name not in renamed}
    names.update({name: there for there, name in renamed.items() if name in wanted})
    keys: dict[str, None] = {}
    tables = _line_tables(path, names, keys, texts)
    first = next(tables, {})
    is_all = path.stat().st_size <= _LINES_BYTES
    if is_all:
        _check_names(path, keys, renamed)
    # In a long file, keys of `--column` may occur only after the first block, so they are taken as present.
    there = _renamed_names(keys if is_all else {**keys, **renamed}, renamed)
    batches = (batch for table in chain([first], tables) for batch in pa.table(table).to_batches())
    read = _with_read_errors(_checked(batches, path, keys, renamed), path)
    return PanelFile(read, there, partial(_lines_in, path))


def _checked(
    batches: Iterable[Any], path: Path, keys: Mapping[str, None], renamed: Mapping[str, str]
) -> Iterator[Any]:
    yield from batches
    # Only now are all keys of the file known.
    _check_names(path, keys, renamed)


def _line_tables(
    path: Path, names: Mapping[str, str], keys: dict[str, None], texts: frozenset[str]
) -> Iterator[dict[str, Any]]:
    """Yield the columns of each block, and add the keys found to `keys`."""
    # A column that was a list in one block is a list in all later blocks.
    lists: set[str] = set()
    line = 1
    with path.open("rb") as file:
        while block := file.read(_LINES_BYTES):
            # Complete the last line, so that no line is split between blocks.
            block += file.readline()
            columns = _table_of(block, names, keys, texts, line)
            line += block.count(b"\n")
            for name, column in columns.items():
                if pa.types.is_list(column.type):
                    lists.add(name)
                elif name in lists:
                    columns[name] = _as_lists(column)
            yield columns


def _table_of(
    block: bytes, names: Mapping[str, str], keys: dict[str, None], texts: frozenset[str], first_line: int
) -> dict[str, Any]:
    """Return the columns of a block by the wanted names; nulls if the block lacks the key.

    `names` has the key in the file for each wanted name.
    """
    table = _by_arrow(block)
    if table is not None:
        columns = {
            name: table.column(there).combine_chunks() if there in table.column_names else pa.nulls(len(table))
            for name, there in names.items()
        }
        # Arrow converts texts that look like dates.
        types = [column.type for name, column in columns.items() if name in texts]
        if all(is_text(kind) or pa.types.is_null(kind) for kind in types):
            keys.update(dict.fromkeys(table.column_names))
            return columns
    rows = {
        at: _object_of(line, at, names.values())
        for at, line in enumerate(block.split(b"\n"), start=first_line)
        if line.strip()
    }
    for at, row in rows.items():
        keys.update(dict.fromkeys(row))
        for there in [names[name] for name in texts & names.keys()]:
            if not isinstance(row.get(there), str | None):
                raise BadLineError(
                    f"line {at}: {there!r} must be a text in quotation marks: it may begin with a zero"
                )
    return {
        name: pa.array(alike([row.get(there) for row in rows.values()])) if rows else pa.nulls(0)
        for name, there in names.items()
    }


def _by_arrow(block: bytes) -> Any:
    """Return JSON lines as a table, or None if Arrow refuses them.

    It refuses blocks without a line, and keys of mixed types, such as a number here and a list there.
    """
    # Arrow ends the process where arrays are in arrays without end.
    if any(len(line) > _DEEP and line.count(b"[") + line.count(b"{") > _DEEP for line in block.split(b"\n")):
        return None
    arrow_json: Any = import_module("pyarrow.json")
    options = arrow_json.ReadOptions(block_size=len(block) + 1, use_threads=False)
    try:
        table = arrow_json.read_json(io.BytesIO(block), read_options=options)
        # Of a list that begins with null it loses that null, and moves all values after it to other rows.
        table.validate()
    except pa.ArrowInvalid:
        return None
    return table


def _object_of(line: bytes, number: int, wanted: Collection[str]) -> dict[str, Any]:
    keys: list[str] = []

    def made(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # The last call is for the object that holds all others.
        keys[:] = (key for key, _ in pairs)
        return dict(pairs)

    try:
        row = json.loads(line, object_pairs_hook=made)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise BadLineError(f"line {number}: each line of a panel must be a JSON object, but this line is not")
    if len(keys) > len(row):
        for key in {key for key in wanted if keys.count(key) > 1}:
            raise BadLineError(f"line {number}: {key!r} stands there several times: leave out all but one")
    return row


def alike(values: list[Any]) -> list[Any]:
    """Return answers in one type, as Arrow needs: all are lists if one is, and all are texts if one is."""
    several = [value if isinstance(value, list) or value is None else [value] for value in values]
    are_texts = any(isinstance(one, str) for each in several for one in each or ())
    if any(isinstance(value, list) for value in values):
        return [_texts(each) if are_texts else each for each in several]
    return [value if value is None else str(value) for value in values] if are_texts else values


def _texts(values: list[Any] | None) -> list[str] | None:
    return None if values is None else [str(value) for value in values if value is not None]


def _as_lists(column: Any) -> Any:
    # Each answer becomes a list of one, a null an empty list.
    return lists_of(column.drop_null(), booleans(column.is_valid()))


def _of_query(query: str, wanted: frozenset[str], renamed: Mapping[str, str]) -> PanelFile:
    try:
        duckdb: Any = import_module("duckdb")
    except ModuleNotFoundError:
        raise InvalidRequestError(f"a query needs duckdb: {install('duckdb')}") from None
    if query.encode(errors="replace").decode() != query:
        raise InvalidRequestError("the query is not UTF-8")
    try:
        database = duckdb.connect()
        # The names of tables are not taken for variables of this module, and no foreign code is loaded.
        database.execute("SET python_enable_replacements = false; SET allow_community_extensions = false")
        database.execute("SET lock_configuration = true")
        _must_only_read(query, database.extract_statements(query), duckdb.StatementType.SELECT)
        reader = pa.RecordBatchReader.from_stream(database.sql(query))
    except duckdb.Error as exc:
        text = _QUOTED.sub("'...'", str(exc).splitlines()[0])
        raise InvalidRequestError(f"the query failed: {text}") from None
    names = reader.schema.names
    _check_names(_QUERIED, names, renamed, wanted)
    kept = [at for at, name in enumerate(names) if renamed.get(name, name) in wanted]
    batches = (_renamed(each.select(kept), renamed) for each in reader)
    return PanelFile(_with_read_errors(batches, _QUERIED), _renamed_names(names, renamed), lambda: None)


def _must_only_read(query: str, statements: Sequence[Any], select: Any) -> None:
    """Refuse anything but one SELECT: `COPY ... TO` writes files, and ATTACH and INSTALL do more.

    DuckDB itself says what the statements are. The files that a SELECT names are read.
    """
    kinds = [each.type for each in statements]
    if kinds != [select]:
        # DuckDB makes several statements of a PIVOT whose columns it must look up.
        if "pivot" in query.lower():
            raise InvalidRequestError(
                "a panel that is a query must be one SELECT statement, which only reads; a PIVOT that looks up"
                " its columns creates a type first: list them, as in PIVOT ... ON column IN (1, 2)"
            )
        found = ", ".join(kind.name for kind in kinds) or "none"
        raise InvalidRequestError(
            f"a panel that is a query must be one SELECT statement, which only reads, not {found}"
        )


def _with_read_errors(batches: Iterable[Any], panel: object) -> Iterator[Any]:
    with read_errors(str(panel)):
        yield from map(settled, batches)


def _renamed(batch: Any, renamed: Mapping[str, str]) -> Any:
    return batch.rename_columns([renamed.get(name, name) for name in batch.schema.names]) if renamed else batch


def _renamed_names(names: Iterable[str], renamed: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(renamed.get(name, name) for name in names)
