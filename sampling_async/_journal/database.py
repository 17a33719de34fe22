"""A file of SQLite that only its owner can read, and in which a transaction is on disk when it ends."""

from __future__ import annotations

import os
import sqlite3
import struct
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from sampling_async._contract.errors import JournalError, SamplingError
from sampling_async._private_files import require_private, target_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

_BRIEF: Final = 0.01
_BUSY: Final = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


def connected(path: Path, seconds: float) -> sqlite3.Connection:
    """Return a connection to a file that several processes may use; any thread may have it, one at a time.

    Args:
        path: The file. It must be there: to read a database must not make an empty one.
        seconds: How long a statement waits for another process.

    Raises:
        OSError: The file is somebody else's, see `require_private`.
    """
    require_private(path)
    return _opened(path, "rw", seconds)


def connected_to_read(path: Path, seconds: float) -> sqlite3.Connection:
    """Return a connection that changes nothing: not the file, nor its mode, and leaves no files beside it."""
    path = target_of(path)
    if beside(path, "-wal").exists():
        mode = "ro"  # a writer has it open, or was killed: then the next writer brings the file up to date
    elif os.access(path, os.W_OK) and os.access(path.parent, os.W_OK):
        mode = "rw"  # a writer may come, so SQLite makes its files beside it, and removes them only then
    else:
        mode = "ro&immutable=1"  # a copy: nothing can be made beside it
    database = _opened(path, mode, seconds)
    database.execute("PRAGMA query_only = ON")
    return database


def _opened(path: Path, mode: str, seconds: float) -> sqlite3.Connection:
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        timeout=seconds,
        isolation_level=None,
        check_same_thread=False,
    )


def make_durable(database: sqlite3.Connection, seconds: float) -> None:
    """Let others read while one writes (WAL), and let what was committed survive a loss of power (FULL).

    Args:
        database: The database.
        seconds: How long to wait for others who are opening a new file at this moment.
    """
    if database.execute("PRAGMA journal_mode").fetchone() != ("wal",):
        patiently(lambda: database.execute("PRAGMA journal_mode = WAL"), seconds)
    database.execute("PRAGMA synchronous = FULL")


def patiently(step: Callable[[], object], seconds: float) -> None:
    """Do a step of opening again while another process has a lock for which SQLite itself does not wait."""
    until = time.monotonic() + seconds
    while True:
        try:
            step()
        except sqlite3.OperationalError as exc:
            if exc.sqlite_errorcode & 0xFF not in _BUSY or time.monotonic() > until:
                raise
            time.sleep(_BRIEF)
        else:
            return


@contextmanager
def failing(what: str, error: Callable[[str], Exception]) -> Generator[None]:
    """Raise an error of the caller's in place of one of SQLite or the system.

    Args:
        what: What then has failed, as in "cannot be read".
        error: Makes the error from that and the reason.
    """
    try:
        yield
    except (sqlite3.Error, OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else exc
        if isinstance(exc, UnicodeDecodeError):  # SQLite quotes the damage, and Python cannot decode that
            reason = "it is damaged"
        made = error(f"{what}: {reason}")
        if isinstance(made, JournalError):
            made.in_use = getattr(exc, "sqlite_errorcode", 0) & 0xFF in _BUSY
        raise made from exc


UNUSABLE: Final = (
    LookupError,
    TypeError,
    ValueError,
    ArithmeticError,
    AttributeError,
    RecursionError,
    struct.error,
)
"""What a value raises where it is used, if nobody can have written it."""


@contextmanager
def as_written(error: Callable[[str], Exception], writer: str) -> Generator[None]:
    """Raise an error of the caller's if values of a database cannot be used: for blocks that use nothing else.

    A database finds damage to its own structures only, and none to a value.
    """
    try:
        yield
    except SamplingError:
        raise
    except UNUSABLE as exc:
        raise error(f"is damaged: it holds a value that no {writer} writes; use a backup") from exc


@contextmanager
def transaction(database: sqlite3.Connection) -> Generator[None]:
    """Write together what is written in this block."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):  # after some errors SQLite has rolled back already
            database.execute("ROLLBACK")
        raise


def beside(path: Path, end: str) -> Path:
    """Return the path of a file that belongs to another one: its name with an ending."""
    return path.with_name(path.name + end)


def remove(path: Path) -> None:
    """Remove a database and the files of SQLite beside it."""
    for end in ("", "-wal", "-shm", "-journal"):
        beside(path, end).unlink(missing_ok=True)
