"""Write the results of matching, and panels."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sampling_async import InvalidRequestError
from sampling_async._private_files import written_whole
from sampling_async.matching.panel._arrow import pa, pc
from sampling_async.matching.panel._files import alike, is_query

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

csv: Final[Any] = import_module("pyarrow.csv")
pq: Final[Any] = import_module("pyarrow.parquet")

_KEYS: Final = {
    "certain": "Certain",
    "member_code": "MemberCode",
    "needed": "Needed",
    "possible": "Possible",
    "priority": "Priority",
    "quota_id": "QuotaID",
    "quota_ids": "QuotaIDs",
    "shortfall": "Shortfall",
    "survey_id": "SurveyID",
}
"""The JSON keys for the columns of results, in the service's style of spelling."""

OUTPUTS: Final = (".parquet", ".csv", ".jsonl")


def check_output(output: Path, panel: str, inventory: Path | None) -> None:
    """Refuse a file that could not be written at the end, or that is one of those which are read.

    Raises:
        InvalidRequestError: The name has no known ending, or it is a folder, in no folder, the panel or the
            inventory.
    """
    if output.suffix.lower() not in OUTPUTS:
        raise InvalidRequestError(
            f"--output must end in {', '.join(OUTPUTS)}, which sets the format, not {output}"
        )
    if output.is_dir():
        raise InvalidRequestError(f"--output {output} is a folder")
    if not output.absolute().parent.is_dir():
        raise InvalidRequestError(f"--output {output}: the folder does not exist")
    read = {"panel": None if is_query(panel) else Path(panel), "inventory": inventory}
    for name, path in read.items():
        if path is not None and path.exists() and output.exists() and output.samefile(path):
            raise InvalidRequestError(f"--output {output} is the {name} itself")


def write(batches: Iterable[Any], schema: Any, output: Path) -> None:
    """Write results to a file, which appears only when it is complete.

    Raises:
        OSError: The file cannot be written.
    """
    with written_whole(output) as unfinished:
        _written(batches, schema, unfinished, output.suffix.lower())


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
    """Return a column for CSV: lists become texts with blanks between the items."""
    if not pa.types.is_list(column.type):
        return column
    return pa.array([" ".join(map(str, each)) for each in column.to_pylist()], pa.string())


def lines(batches: Iterable[Any], *, only_ascii: bool = False) -> Iterator[bytes]:
    """Yield results as lines of JSON; in ASCII for a terminal, so that no text can control the terminal."""
    for batch in batches:
        for row in batch.rename_columns([_KEYS[name] for name in batch.schema.names]).to_pylist():
            yield json.dumps(row, ensure_ascii=only_ascii, separators=(",", ":")).encode()


def matching_any(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield batches without the members that match no quota."""
    for batch in batches:
        yield batch.filter(pc.greater(pc.list_value_length(batch.column("quota_ids")), 0))


# --- A panel to be written


def write_rows(rows: Sequence[Mapping[str, Any]], output: Path) -> None:
    """Write a panel to Parquet, one row for each member, with the columns of the first row.

    Raises:
        InvalidRequestError: The file cannot be written.
    """
    table = pa.table({name: pa.array(alike([row[name] for row in rows])) for name in rows[0]})
    write(table.to_batches(), table.schema, output)
