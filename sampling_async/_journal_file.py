"""A journal's file, as one run has it: locked, checked, written, copied, mended and let go of.

Nothing here knows of event loops. Functions may be called in any thread, and one at a time has the file, also
where who called has gone. What is to be written is noted without waiting, and written with what else was noted.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import threading
from collections import deque
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final
from weakref import ref

from sampling_async._errors import JournalError
from sampling_async._journal_lock import Damage, Header, JournalLock, sync_folder
from sampling_async._journal_rows import (
    ANSWERED,
    DIGEST,
    FORM,
    SENT,
    Note,
    Rows,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterable, Iterator

    from sampling_async._journal_rows import Latest, Request

_WAY_OUT: Final = (
    "Restore a backup, or go on with what can be read of it: Journal(path, accept_damage=True). What was sent "
    "and cannot be read would be sent again"
)
_REASONS: Final = {
    sqlite3.SQLITE_BUSY: "is in use by another run",
    sqlite3.SQLITE_LOCKED: "is in use by another run",
    sqlite3.SQLITE_NOTADB: "cannot be used: it is not a database",
    sqlite3.SQLITE_FULL: "cannot be used: the disk is full",
    sqlite3.SQLITE_READONLY: "cannot be used: it cannot be written",
    sqlite3.SQLITE_CANTOPEN: "cannot be used: it cannot be opened",
    sqlite3.SQLITE_CORRUPT: "has been damaged since it was opened",
}
_NO_DAMAGE: Final = {*_REASONS, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM} - {
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_CORRUPT,
}
_OF_LINES: Final = re.compile(rb"\n\[(\d{1,19}),")
_OF_LIST: Final = re.compile(rb"\d{1,19}")
_AT_ONCE: Final = 1_000
_LARGEST: Final = 2**63 - 1
_SMALLEST_ROW: Final = 64


class JournalFile:
    """One use of a journal's file, from opening to leaving.

    Args:
        path: The file.
        owner: The address of the service and the panel it must be for; None where only a copy is wanted.
        accept_damage: Whether to go on with what can be read.

    Attributes:
        path: The file, as it was given.
        noted: How many rows were noted.
        written: How many of them are on disk.
        is_gone: Whether this is another process than the one that opened it.
    """

    def __init__(self, path: Path, owner: tuple[str, str] | None, *, accept_damage: bool = False) -> None:
        self.path = path
        self.noted = self.written = 0
        self.is_gone = False
        self._real = Path(os.path.realpath(path))
        self._owner = owner
        self._accepts_damage = accept_damage
        self._lock = JournalLock(self._real)
        self._notes: deque[Note] = deque()
        self._rows: Rows | None = None
        self._alone = threading.Lock()
        self._is_wanted = True
        _files[id(self)] = ref(self)

    def __del__(self) -> None:
        """Let go of what was never left, since the event loop it was used in ended in the middle."""
        with suppress(Exception):
            _files.pop(id(self), None)
            self._let_go()

    @property
    def chunks(self) -> int:
        """The highest number of a chunk in it."""
        return self._opened().chunks

    # --- Opening

    def open(self) -> None:
        """Lock the file, check it, and be ready to write.

        Raises:
            JournalError: See `Journal.open`.
        """
        self._wait_for_abandoned()  # having nothing, so that no two can wait for one another
        with self._alone, _typed(self.path):
            try:
                if self._is_wanted:
                    self._lock.take()
                    self._open()
            except BaseException:
                self._let_go()
                raise
        if not self._is_wanted:  # asked again out here: who gave it up meanwhile found it taken
            with self._alone:
                self._let_go()

    def _wait_for_abandoned(self) -> None:
        """Wait for threads of this process that are about to let go of the same file."""
        for other in _living():
            if other._real == self._real and not other._is_wanted:  # noqa: SLF001  of the same class
                with other._alone, suppress(sqlite3.Error, OSError):  # noqa: SLF001
                    other._let_go()  # noqa: SLF001

    def abandon(self) -> None:
        """Have the thread that opens it let go of it; nobody waits for that."""
        self._is_wanted = False
        if self._alone.acquire(blocking=False):
            self._let_go()
            self._alone.release()

    def _open(self) -> None:
        header = None
        try:
            header = self._lock.header()
            self._rows = self._checked(header)
            self._lock.write(self._rows.header)
        except Damage as exc:
            damage = str(exc)
        else:
            return
        if not self._accepts_damage:
            raise JournalError(f"is damaged: {damage}. {_WAY_OUT}", path=self.path)
        self._mend(header)

    def _checked(self, header: Header | None) -> Rows:
        """Return the rows, all of them checked.

        Raises:
            Damage: Something is not as it was written, or is missing.
        """
        self._must_be_whole(header)
        rows = Rows(self._real)
        try:
            if rows.has_none():
                self._begin(rows, header)
            else:
                rows.load(self._identified(rows, header), lambda: self._is_wanted)
        except sqlite3.DatabaseError as exc:
            rows.close()
            if not header or getattr(exc, "sqlite_errorcode", 0) & 0xFF in _NO_DAMAGE:
                raise
            name = getattr(exc, "sqlite_errorname", "an error")
        except BaseException:
            rows.close()
            raise
        else:
            return rows
        raise Damage(f"SQLite cannot read it ({name})")

    def _must_be_whole(self, header: Header | None) -> None:
        """Notice what SQLite would make a new file of; make the file, where there was none.

        Raises:
            Damage: The file or a part of it is missing.
            JournalError: It has other names, and SQLite would keep the newest rows of each apart.
        """
        size = self._real.stat().st_size if self._real.exists() else None
        beside = _beside(self._real, "-wal")
        if not size and header is not None and header.rows:
            state = "missing" if size is None else "empty"
            raise Damage(f"the file is {state}, and {header.rows} rows had been written")
        if not size and beside.exists() and beside.stat().st_size:
            raise Damage(f"the file is missing or empty, and {beside.name}, which belongs to it, is there")
        if size is None:
            if self._owner is None:
                raise JournalError("is not there", path=self.path)
            _make(self._real)
        elif self._real.is_file() and self._real.stat().st_nlink > 1:
            raise JournalError("has another name (a hard link); remove one of them", path=self.path)

    def _begin(self, rows: Rows, header: Header | None) -> None:
        """Make an empty database a journal."""
        if header is not None and header.rows:
            raise Damage(f"nothing is in it, and {header.rows} rows had been written")
        if self._owner is None:
            raise JournalError("is empty", path=self.path)
        seed = os.urandom(DIGEST)
        self._lock.write(Header(0, seed), durably=True)
        rows.make(self._owner, seed)

    def _identified(self, rows: Rows, header: Header | None) -> Header:
        """Refuse what is no journal of this form, or another's; return the header, which must be there."""
        had_rows = header is not None and bool(header.rows)
        if rows.is_foreign():
            if had_rows:
                raise Damage("its mark is not as it was written")
            raise JournalError("is a database of something else; give a path of its own", path=self.path)
        form = rows.form()
        if form != FORM:
            if had_rows:
                raise Damage("the number of its form is not as it was written")
            raise JournalError(f"was written in form {form}, and this version reads {FORM}", path=self.path)
        self._refuse_others(rows)
        if header is None:
            raise Damage(f"{self._lock.path.name}, the file beside it, is missing")
        return header

    def _refuse_others(self, rows: Rows) -> None:
        if self._owner is not None and rows.owner() != self._owner:
            raise JournalError(
                "was written for another service or panel; give each a journal of its own", path=self.path
            )

    # --- Going on with what can be read

    def _mend(self, header: Header | None) -> None:
        """Write what can be read into a file of its own, which takes the place of the damaged one."""
        assert self._owner is not None
        mended, seed = _beside(self._real, "-mended"), os.urandom(DIGEST)
        _remove(mended)
        _make(mended)
        rows = Rows(mended)
        try:
            rows.make(self._owner, seed)
            self._salvage(rows, 0 if header is None else header.rows)
        finally:
            rows.close()
        for end in ("", "-wal"):
            with suppress(FileNotFoundError):
                shutil.copyfile(_beside(self._real, end), _beside(self._real, f"-damaged{end}"))
                _beside(self._real, f"-damaged{end}").chmod(0o600)
        _beside(self._real, "-wal").unlink(missing_ok=True)  # or SQLite would take it for the new file's
        mended.replace(self._real)
        self._lock.write(rows.header, durably=True)
        self._rows = self._checked(rows.header)

    def _salvage(self, mended: Rows, expected: int) -> None:
        """Read what can be read of the damaged file into another one."""
        if not self._real.exists() or not self._real.stat().st_size:
            return
        expected = max(expected, self._real.stat().st_size // _SMALLEST_ROW)
        doubtful: list[Note] = []
        with suppress(sqlite3.DatabaseError):
            damaged = Rows(self._real)
            try:
                with suppress(sqlite3.DatabaseError, Damage):
                    self._refuse_others(damaged)
                notes = _sound(damaged.salvaged(expected), doubtful)
                while some := tuple(islice(notes, _AT_ONCE)):
                    mended.append(some)
            finally:
                damaged.close()
        mended.append(_unknown(doubtful, mended))

    # --- In use

    def note(self, kind: bytes, chunk: int, member_code: bytes, content: bytes) -> None:
        """Note a row, to be written with the next ones."""
        self._notes.append(Note(kind, chunk, member_code, content))
        self.noted += 1

    def write(self) -> None:
        """Write all that was noted; it is on disk when this returns."""
        with self._alone, _typed(self.path):
            self._write()

    def _write(self) -> None:
        rows, notes = self._opened(), tuple(self._notes)
        if not notes:
            return
        rows.append(notes)
        for _ in notes:
            self._notes.popleft()
        self.written += len(notes)
        self._lock.write(rows.header)

    def recall(self, member_code: bytes, quota_ids: Collection[int]) -> dict[int, Latest]:
        """Return what `Rows.recall` does, of what was noted too."""
        with self._alone, _typed(self.path):
            self._write()
            return self._opened().recall(member_code, quota_ids)

    def requests(self, after: int, member_code: bytes | None) -> list[Request]:
        """Return what `Rows.requests` does."""
        with self._alone, _typed(self.path):
            return self._opened().requests(after, member_code)

    def back_up(self, path: Path) -> None:
        """Copy the journal, with the file beside it, to another path."""
        with self._alone:
            with _typed(self.path):
                rows = self._opened()
            with _typed(path):
                _copy(rows, Path(os.path.realpath(path)))

    def _opened(self) -> Rows:
        if self._rows is None:
            raise JournalError("is not open", path=self.path)
        return self._rows

    # --- Letting go

    def leave(self) -> None:
        """Write what is noted, and let go of the file, whether that succeeds or not; once is enough."""
        with self._alone, _typed(self.path):
            try:
                if self._rows is not None:
                    self._write()
            finally:
                self._let_go()

    def _let_go(self) -> None:
        rows, self._rows = self._rows, None
        try:
            if rows is not None:
                rows.close()
                self._lock.write(rows.header, durably=True)
        finally:
            self._lock.release()

    def forget(self) -> None:
        """In a child: leave file and lock to the parent."""
        rows, self._rows = self._rows, None
        if rows is not None:
            rows.forget()
        self._lock.forget()
        self._alone = threading.Lock()  # the thread that may have had it is the parent's
        self.is_gone = True


_files: Final[dict[int, ref[JournalFile]]] = {}


def _living() -> list[JournalFile]:
    return [file for file in (each() for each in list(_files.values())) if file is not None]


def _forget_all() -> None:
    for file in _living():
        file.forget()


if hasattr(os, "register_at_fork"):  # pragma: no branch  there is no fork on Windows
    os.register_at_fork(after_in_child=_forget_all)


@contextmanager
def _typed(path: Path) -> Generator[None]:
    """Raise errors of SQLite and the system as JournalError, in words that hold nothing of the file."""
    try:
        yield
    except sqlite3.Error as exc:
        code = getattr(exc, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        name = getattr(exc, "sqlite_errorname", type(exc).__name__)
        reason = _REASONS.get(code, f"cannot be used: SQLite says {name}")
    except OSError as exc:
        reason = f"cannot be used: {exc.strerror}"
    except Damage as exc:  # of what was just mended
        reason = f"is damaged: {exc}"
    else:
        return
    raise JournalError(reason, path=path) from None


def _beside(path: Path, end: str) -> Path:
    return path.with_name(path.name + end)


def _make(path: Path) -> None:
    """Make an empty file for its owner only."""
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


def _remove(path: Path) -> None:
    """Remove a database, and what SQLite may have left beside it."""
    for end in ("", "-wal", "-shm", "-journal"):
        _beside(path, end).unlink(missing_ok=True)


def _copy(rows: Rows, path: Path) -> None:
    """Copy rows to a path where there is nothing, or an earlier copy."""
    lock, part = JournalLock(path), _beside(path, "-part")
    lock.take()
    try:
        with suppress(Damage):
            if lock.header() is None and path.exists():
                raise JournalError("is there already, and is no journal of this form", path=path)
        _remove(part)
        _make(part)
        rows.copy(part)
        _beside(path, "-wal").unlink(missing_ok=True)  # of an earlier copy that was used
        part.replace(path)
        sync_folder(path.parent)
        lock.write(rows.header, durably=True)
    finally:
        lock.release()


def _sound(found: Iterable[tuple[Note, bool]], doubtful: list[Note]) -> Iterator[Note]:
    """Yield what is surely as it was written, and put aside what is not."""
    chunks: set[int] = set()
    for note, is_sound in found:
        if not is_sound:
            doubtful.append(note)
            continue
        if (
            note.kind == ANSWERED and note.chunk not in chunks
        ):  # what was sent is not sound, and is known by this
            yield note._replace(kind=SENT, content=_listed(_ids_of(note)))
        yield note
        chunks.add(note.chunk)


def _unknown(doubtful: Iterable[Note], mended: Rows) -> Iterator[Note]:
    """Yield rows that say of doubtful ones that something was sent, where no sound answer says more."""
    chunk = mended.chunks
    for note in doubtful:
        quota_ids = _ids_of(note)
        known = mended.recall(note.member_code, quota_ids)
        left = {each for each in quota_ids if each not in known or not _is_answer(known[each].line)}
        if left:
            chunk += 1
            yield Note(SENT, chunk, note.member_code, _listed(left))


def _ids_of(note: Note) -> set[int]:
    """Return the quota IDs that a row names, as far as it can be read."""
    numbers = (_OF_LINES if note.content[:1] == b"\n" else _OF_LIST).findall(note.content)
    return {number for number in map(int, numbers) if 0 < number <= _LARGEST}


def _listed(quota_ids: Iterable[int]) -> bytes:
    return json.dumps(sorted(quota_ids)).encode("ascii")


def _is_answer(line: bytes | None) -> bool:
    """Return whether a line says that the service answered about this quota."""
    return line is not None and json.loads(line)[1] in {"invited", "rejected"}
