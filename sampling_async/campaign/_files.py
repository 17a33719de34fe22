"""What a campaign writes: its invites, what became of each pair, the summary and the report."""

from __future__ import annotations

import csv
import errno
import json
import os
import shutil
import stat
import tempfile
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib import import_module
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

from sampling_async._contract.checks import require_utf8
from sampling_async._contract.errors import InvalidRequestError
from sampling_async._contract.extras import install
from sampling_async._contract.frames import stream_of
from sampling_async._private_files import make_private
from sampling_async.campaign._ledger import CampaignLedger
from sampling_async.campaign._summing import summary_of
from sampling_async.matching.panel._arrow import pa

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence

    from sampling_async._pacing.threads import CancelFlag
    from sampling_async._protocol.lessons import Rule
    from sampling_async.campaign._summary import Labels, Summary
    from sampling_async.notifications import OutcomeLedger

InviteFormat: TypeAlias = Literal["parquet", "jsonl", "csv"]
"""The format of the invites: Parquet, lines of JSON, or CSV."""

_INVITES: Final = """
SELECT m.code, i.quota, i.survey, i.wave, i.url, i.partner_amount, i.member_amount, i.loi, i.ir, i.at
FROM invites AS i JOIN members AS m ON m.id = i.member ORDER BY %si.rowid
"""
_PAIRS: Final = """
SELECT m.code, p.quota, p.plan, p.certain, p.state, p.code, p.reason, s.kind, s.at
FROM pairs AS p JOIN members AS m ON m.id = p.member
LEFT JOIN settled AS s ON s.member = p.member AND s.quota = p.quota AND p.state IN ('unknown', 'pending')
ORDER BY p.member, p.plan, p.rank
"""
# The columns by which invites can be divided into folders.
_BY: Final = {
    "survey_id": "i.survey",
    "wave_id": "i.wave",
    "quota_id": "i.quota",
    "day": "date(i.at, 'unixepoch')",
}
_OTHER_NAMES: Final = ("pairs.parquet", "summary.json", "report.html")
_INVITE_NAMES: Final = frozenset({"invites", "invites.parquet", "invites.jsonl", "invites.csv"})
_NAMES: Final = _INVITE_NAMES.union(_OTHER_NAMES)
# Of a disk, and not the fault of an argument.
_OF_DISKS: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
_UNFINISHED: Final = ".campaign-"  # how the name of a folder begins whose files are not complete yet


def _schemas() -> tuple[Any, Any]:
    text, whole, real = pa.string(), pa.int64(), pa.float64()
    invites = {"member_code": text, "quota_id": whole, "survey_id": whole, "wave_id": whole, "url": text}
    invites |= {"partner_amount": real, "member_amount": real, "loi": whole, "ir": whole}
    invites |= {"invited_at": pa.timestamp("us", tz="UTC")}
    pairs = {"member_code": text, "quota_id": whole, "plan": whole, "certain": pa.bool_()}
    pairs |= {"status": text, "result_code": whole, "reason": text}
    # An unknown pair that has an invite after all: which notification proves it, and when it came.
    pairs |= {"settled_by": text, "settled_at": pa.timestamp("us", tz="UTC")}
    return pa.schema(invites), pa.schema(pairs)


def stream_of_pairs(path: Path, requested: object) -> object:
    """Return what `pairs.parquet` would hold now as a stream of the Arrow C interface."""
    ledger, (_, schema) = CampaignLedger(path), _schemas()
    ledger.open(reads=True)  # here, so that its error is raised as it is

    def batches() -> Iterator[Any]:
        try:
            yield from _table_rows(ledger, _PAIRS, schema)
        finally:
            ledger.close()

    return stream_of(schema, batches(), requested)


def check_partitions(partitions: Sequence[str], kind: InviteFormat) -> None:
    wrong = [name for name in partitions if name not in _BY]
    if wrong or len(set(partitions)) < len(partitions):
        raise InvalidRequestError(
            f"invites can be divided by {', '.join(_BY)}, each once, not by {', '.join(map(repr, partitions))}"
        )
    if kind not in get_args(InviteFormat):
        raise InvalidRequestError(f"the format of invites must be parquet, jsonl or csv, not {kind!r:.40}")


def write_files(
    ledger: CampaignLedger,
    rules: Mapping[int, Rule],
    folder: Path,
    wanted: CancelFlag,
    *,
    partitions: Sequence[str] = (),
    kind: InviteFormat = "parquet",
    title: str = "Campaign",
    outcomes: OutcomeLedger | None = None,
    labels: Labels | None = None,
) -> Summary:
    """Write all files of a campaign. Each appears when it is complete, and replaces an older one."""
    check_partitions(partitions, kind)
    try:
        from sampling_async.campaign._report import report  # noqa: PLC0415
    except ModuleNotFoundError as exc:
        raise ImportError(f"the report needs {exc.name}: {install('panel')}", name=exc.name) from exc
    summary = summary_of(ledger, rules, outcomes)
    invites, pairs = _schemas()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        require_own_folder(folder, ledger.path)
        # In the same folder, so that each file can be renamed into its place.
        with _in_use(folder), tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=folder) as name:
            new = Path(name)
            by = "".join(f"{_BY[name]}, " for name in partitions)
            _write_invites(
                wanted.each(_table_rows(ledger, _INVITES % by, invites)), invites, new, partitions, kind
            )
            _write_one(wanted.each(_table_rows(ledger, _PAIRS, pairs)), pairs, new / "pairs.parquet")
            figures = {"ledger": ledger.path.name, **summary.to_dict()}
            _write_text(json.dumps(figures, indent=1) + "\n", new / "summary.json")
            _write_text(report(summary, title=title, labels=labels), new / "report.html")
            wanted.check()
            written = sorted(new.iterdir())
            for path in written:
                _replace(path, folder / path.name)
            # Beside the new invites, those of another format would be taken for the invites too.
            for stale in _INVITE_NAMES.difference(path.name for path in written):
                with suppress(FileNotFoundError):
                    (folder / stale).rename(new / f"{stale}-before")
    except OSError as exc:
        if exc.errno in _OF_DISKS:
            exc.filename = exc.filename or os.fspath(folder)
            raise
        raise InvalidRequestError(f"{exc.filename or folder}: {exc.strerror or exc}") from None
    return summary


@contextmanager
def _in_use(folder: Path) -> Generator[None]:
    """Mark a folder as being written to, and remove first what calls have left that were killed."""
    try:
        import fcntl  # noqa: PLC0415  not on Windows
    except ImportError:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Some file systems have no locks: then nobody knows who writes, and nothing is removed.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Nobody else is writing to this folder.
            for path in folder.glob(f"{_UNFINISHED}*"):
                if _is_left_over(path):
                    shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def _is_left_over(path: Path) -> bool:
    """Return whether a call has left this folder unfinished: by its name, its owner, and all that is in it."""
    try:
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return False
        return all(each.name.removesuffix("-before") in _NAMES for each in path.iterdir())
    except OSError:
        return False


def require_own_folder(folder: Path, ledger: Path) -> None:
    """Refuse a folder with files of these names that are not of an earlier call for the same ledger."""
    require_utf8(folder)
    if (other := folder / ledger.name).exists() and ledger.exists():
        if other.samefile(ledger):
            return  # also after a kill between two of its files
        raise InvalidRequestError(f"{folder} holds the ledger of another campaign; name another folder")
    there = sorted(name for name in (*_INVITE_NAMES, *_OTHER_NAMES) if (folder / name).exists())
    if not there:
        return
    try:
        summary = json.loads((folder / "summary.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        summary = None
    written_for = summary.get("ledger") if isinstance(summary, dict) else None
    if written_for != ledger.name:
        whose = f"of the campaign of {written_for}" if isinstance(written_for, str) else "not of a campaign"
        raise InvalidRequestError(f"{folder} holds {there[0]}, which is {whose}; name another folder")


def _replace(new: Path, old: Path) -> None:
    if not new.is_dir():
        new.replace(old)
        return
    # A folder with files cannot be replaced in one step. The old one is moved away first, so that a reader
    # finds one of the two, or for a moment none, and never a mixture.
    before = new.with_name(f"{new.name}-before")
    with suppress(FileNotFoundError):
        old.rename(before)
    new.rename(old)
    shutil.rmtree(before, ignore_errors=True)


def _table_rows(ledger: CampaignLedger, query: str, schema: Any) -> Iterator[Any]:
    for rows in ledger.read_on(query):
        columns = zip(zip(*rows, strict=True), schema, strict=True)
        with ledger.as_written():
            arrays = [_column(values, field.type) for values, field in columns]
        yield pa.record_batch(arrays, schema=schema)


def _column(values: Sequence[Any], kind: Any) -> Any:
    # Only what SQLite has no type for is converted: a call for each cell took a fifth of the time of all files.
    if pa.types.is_timestamp(kind):
        values = [None if value is None else datetime.fromtimestamp(value, UTC) for value in values]
    elif pa.types.is_boolean(kind):
        values = [None if value is None else bool(value) for value in values]
    return pa.array(values, kind)


def _write_invites(
    batches: Iterable[Any], schema: Any, folder: Path, partitions: Sequence[str], kind: str
) -> None:
    """Write invites, which are sorted by partition, so that one file is open at a time."""
    if not partitions:
        _write_one(batches, schema, folder / f"invites.{kind}")
        return
    folder = folder / "invites"
    folder.mkdir()
    # A column that is in the name of the folder is not in the file too: readers would find it twice.
    rest = pa.schema([each for each in schema if each.name not in partitions])
    for path, parts in groupby(_by_partition(batches, partitions, folder), key=itemgetter(0)):
        path.mkdir(parents=True)
        _write_one((rows.select(rest.names) for _, rows in parts), rest, path / f"invites.{kind}")


def _by_partition(
    batches: Iterable[Any], partitions: Sequence[str], folder: Path
) -> Iterator[tuple[Path, Any]]:
    """Yield the folder of each partition with its rows, in parts."""
    for batch in batches:
        days = [moment.date() for moment in batch.column("invited_at").to_pylist()]
        columns = [days if name == "day" else batch.column(name).to_pylist() for name in partitions]
        keys = list(zip(*columns, strict=True))
        start = 0
        for key, same in groupby(keys):
            count = len(list(same))
            pieces = (f"{name}={value}" for name, value in zip(partitions, key, strict=True))
            yield folder.joinpath(*pieces), batch.slice(start, count)
            start += count


def _write_one(batches: Iterable[Any], schema: Any, path: Path) -> None:
    make_private(path)
    if path.suffix == ".parquet":
        with import_module("pyarrow.parquet").ParquetWriter(path, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        return
    if path.suffix == ".csv":
        # In Python and not in Arrow, which ends lines with \n, where RFC 4180 has \r\n.
        with path.open("w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(schema.names)
            for batch in batches:
                columns = [
                    [each and each.isoformat() for each in column.to_pylist()]
                    if pa.types.is_timestamp(column.type)
                    else column.to_pylist()
                    for column in batch.columns
                ]
                rows.writerows(zip(*columns, strict=True))
        return
    encode = json.JSONEncoder(separators=(",", ":"), default=datetime.isoformat).encode
    with path.open("w", encoding="utf-8") as file:
        for batch in batches:
            file.writelines(f"{encode(row)}\n" for row in batch.to_pylist())


def _write_text(text: str, path: Path) -> None:
    make_private(path)
    path.write_text(text, encoding="utf-8")
