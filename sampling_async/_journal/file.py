"""The file of a journal, as one run uses it: lock, check, write, copy, repair and close.

Nothing here uses an event loop. Methods may be called in any thread. A lock gives the file to one call at a
time, even if the task that made the call was cancelled. Rows are noted without waiting and written together.
"""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import threading
from collections import deque
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final
from weakref import ref

from sampling_async._contract.errors import JournalError
from sampling_async._journal.database import beside, remove
from sampling_async._journal.lock import FORM, Damage, Header, JournalLock, of_other_form, sync_folder
from sampling_async._journal.mending import salvage
from sampling_async._journal.rows import APPLICATION, DIGEST, SENT, UNREADABLE, JournalRows, Note
from sampling_async._private_files import make_private, require_private, target_of, written_whole

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from sampling_async._journal.rows import JournaledRequest, Latest

_LOG: Final = logging.getLogger("sampling_async.journal")
_WAY_OUT: Final = (
    "Keep what can be read: Journal(path, accept_damage=True); or restore a backup. What cannot be read, or "
    "was sent after the backup, is sent again"
)
_AT_MARK: Final = 68  # where a file of SQLite has the mark of its application
_FOREIGN: Final = "is another program's database; give the journal another path"
_IN_USE: Final = "is in use by another run"
_AT_ONCE: Final = 1_000  # rows that are copied in one transaction
_REASONS: Final = {
    sqlite3.SQLITE_BUSY: _IN_USE,
    sqlite3.SQLITE_LOCKED: _IN_USE,
    sqlite3.SQLITE_NOTADB: "cannot be used: it is not a database",
    sqlite3.SQLITE_FULL: "cannot be used: the disk is full",
    sqlite3.SQLITE_READONLY: "cannot be used: it cannot be written",
    sqlite3.SQLITE_CANTOPEN: "cannot be used: it cannot be opened",
    sqlite3.SQLITE_CORRUPT: "has been damaged since it was opened",
}
# Errors that say nothing about damage of the file: it is in use, the disk is full, memory is short and so on.
_NO_DAMAGE: Final = {*_REASONS, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM} - {
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_CORRUPT,
}


class JournalFile:
    """One use of a journal's file, from `open` to `leave`.

    The journal must belong to `owner`: the service's address and the panel. None is for reading and copying.
    """

    def __init__(self, path: Path, owner: tuple[str, str] | None, *, accept_damage: bool = False) -> None:
        self.path = path
        self.noted = self.written = 0  # rows noted, and those of them on disk
        self.is_gone = False  # in the child of a fork: the file belongs to the parent
        self._real = Path(os.path.realpath(path))
        self._owner = owner
        self._accepts_damage = accept_damage
        self._lock = JournalLock(self._real)
        self._notes: deque[Note] = deque()
        self._rows: JournalRows | None = None
        self._alone = threading.Lock()
        self._is_wanted = True
        _files[id(self)] = ref(self)

    def __del__(self) -> None:
        """Close a file that was not left, because its event loop ended too early."""
        with suppress(Exception):
            _files.pop(id(self), None)
            self._let_go()

    @property
    def chunks(self) -> int:
        return self._opened().chunks

    # --- Opening

    def open(self) -> None:
        """Lock the file, check it, and prepare for writing."""
        # Before `_alone` is taken: two files that wait for each other would otherwise never go on.
        self._wait_for_abandoned()
        with self._alone, _typed(self.path):
            try:
                if self._is_wanted:
                    # Before it is made its owner's alone: others may work with that program too.
                    if _is_open_to_others(self._real):
                        self._refuse_foreign()
                    require_private(self.path)
                    self._lock.take()
                    self._open()
            except BaseException:
                self._let_go()
                raise
        # `abandon` may have run while this thread had `_alone`. It could not close the file then.
        if not self._is_wanted:
            with self._alone:
                self._let_go()

    def _wait_for_abandoned(self) -> None:
        """Wait for threads of this process that are about to close the same file."""
        for other in _open_files():
            if other._real == self._real and not other._is_wanted:  # noqa: SLF001  of the same class
                with other._alone, suppress(sqlite3.Error, OSError):  # noqa: SLF001
                    other._let_go()  # noqa: SLF001

    def abandon(self) -> None:
        """Close the file, or let the thread that is opening it do so. This does not wait."""
        self._is_wanted = False
        # If the lock is taken, `open` finds `_is_wanted` False after it has released the lock.
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
        if header is None:
            self._refuse_foreign()
        if not self._accepts_damage:
            raise JournalError(f"is damaged: {damage}. {_WAY_OUT}", path=self.path)
        self._mend(header)

    def _refuse_foreign(self) -> None:
        """Refuse a database of another program, as far as it can be read."""
        if not self._real.exists():
            return
        rows = JournalRows(self._real)
        try:
            if not rows.has_none() and rows.is_foreign():
                raise JournalError(_FOREIGN, path=self.path)
        except UNREADABLE:
            return
        finally:
            rows.close()

    def _checked(self, header: Header | None) -> JournalRows:
        self._must_be_whole(header)
        rows = JournalRows(self._real)
        try:
            if rows.has_none():
                self._begin(rows, header)
            else:
                rows.load(self._identified(rows, header), lambda: self._is_wanted)
        except UNREADABLE as exc:
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
        """Check that no part of the journal is missing. Create the file if there was no journal.

        SQLite would not complain about a missing or empty file: it would begin a new database. SQLite keeps the
        newest rows beside one name of a file, and does not find them by another name.
        """
        size = self._real.stat().st_size if self._real.exists() else None
        newest = beside(self._real, "-wal")
        if not size and header is not None and header.rows:
            state = "missing" if size is None else "empty"
            raise Damage(
                f"the file is {state}, but {header.rows} rows had been written (to begin anew, delete "
                f"{self._lock.path.name} too)"
            )
        if not size and newest.exists() and newest.stat().st_size:
            raise Damage(f"the file is missing or empty, but {newest.name}, which belongs to it, is there")
        if size is None:
            if self._owner is None:
                raise JournalError("does not exist", path=self.path)
            make_private(self._real)
        elif self._real.is_file() and self._real.stat().st_nlink > 1:
            raise JournalError("has a second name (a hard link); remove one of the names", path=self.path)

    def _begin(self, rows: JournalRows, header: Header | None) -> None:
        if header is not None and header.rows:
            raise Damage(f"it has no rows, but {header.rows} rows had been written")
        if self._owner is None:
            raise JournalError("is empty", path=self.path)
        seed = os.urandom(DIGEST)
        # The lock file first. After a crash in between, the next run finds an empty database and begins again.
        # In the other order it would find a journal without its lock file, which is damage.
        self._lock.write(Header(0, seed), durably=True)
        rows.make(self._owner, seed)

    def _identified(self, rows: JournalRows, header: Header | None) -> Header:
        """Refuse other databases, other versions and other owners. Return the header, which must exist."""
        had_rows = header is not None and bool(header.rows)
        if rows.is_foreign():
            if had_rows:
                raise Damage("the mark of a journal in the file was changed")
            raise JournalError(_FOREIGN, path=self.path)
        form = rows.form()
        if form != FORM:
            if had_rows:
                raise Damage("the number of the file format was changed")
            raise of_other_form(form, self.path)
        self._refuse_others(rows)
        if header is None:
            raise Damage(f"{self._lock.path.name}, which belongs to it, is missing")
        return header

    def _refuse_others(self, rows: JournalRows) -> None:
        if self._owner is not None and rows.owner() != self._owner:
            raise JournalError(
                "was written for another service or panel; use a separate journal for each", path=self.path
            )

    # --- Repair

    def _mend(self, header: Header | None) -> None:
        """Write the readable rows into a new file, which replaces the damaged one."""
        assert self._owner is not None
        mended, seed = beside(self._real, "-mended"), os.urandom(DIGEST)
        remove(mended)
        make_private(mended)
        rows = JournalRows(mended)
        expected = 0 if header is None else header.rows
        is_there = self._real.exists() and self._real.stat().st_size > 0
        try:
            rows.make(self._owner, seed)
            if is_there:
                salvage(self._real, rows, expected, self._refuse_others)
        finally:
            rows.close()
        if is_there and (expected or header is None) and not rows.header.rows:
            # Whoever goes on without any row asks for everything again, and must decide that.
            remove(mended)
            rows_of_it = f"its {expected} rows" if expected else "its rows"
            raise JournalError(
                f"is damaged, and nothing in it can be read; to ask again for what {rows_of_it} were about, "
                f"delete it and {self._lock.path.name}",
                path=self.path,
            )
        _LOG.warning("a damaged journal was mended: %d rows of %d", rows.header.rows, expected)
        # Keep a copy of the damaged file. SQLite's newest rows are in the file that ends in `-wal`.
        for end in ("", "-wal"):
            with suppress(FileNotFoundError), written_whole(beside(self._real, f"-damaged{end}")) as copy:
                shutil.copyfile(beside(self._real, end), copy)
        self._replace(mended, rows.header)

    def _replace(self, new: Path, header: Header) -> None:
        """Put another file in the place of this one, and open it."""
        # The `-wal` file must go before the new file comes, or SQLite would apply it to the new file.
        beside(self._real, "-wal").unlink(missing_ok=True)
        new.replace(self._real)
        self._lock.write(header, durably=True)
        self._rows = self._checked(header)

    def erase(self, member_code: bytes) -> int:
        """Write the file anew without the rows of a member; return how many there were."""
        with self._alone, _typed(self.path):
            rows, new = self._opened(), beside(self._real, "-erased")
            remove(new)
            make_private(new)
            kept = JournalRows(new)
            try:
                kept.make(rows.owner(), os.urandom(DIGEST))
                found = (note for note, _ in rows.salvaged(rows.header.rows))
                others = (note for note in found if note.member_code != member_code)
                while some := tuple(islice(others, _AT_ONCE)):
                    kept.append(some)
            except BaseException:
                kept.close()
                remove(new)
                raise
            kept.close()
            before, self._rows = rows.header.rows, None
            rows.close()
            self._replace(new, kept.header)
            return before - kept.header.rows

    # --- In use

    def note(self, kind: bytes, chunk: int, member_code: bytes, content: bytes) -> None:
        """Note a row. It is written with the next `write`."""
        if kind == SENT:
            self._opened().members.add(member_code)
        self._notes.append(Note(kind, chunk, member_code, content))
        self.noted += 1

    def knows(self, member_code: bytes) -> bool:
        """Return whether there may be rows of a member."""
        return member_code in self._opened().members

    def write(self) -> None:
        """Write all noted rows. They are on disk when this returns."""
        with self._alone, _typed(self.path):
            self._write()

    def _write(self) -> None:
        rows, notes = self._opened(), tuple(self._notes)
        if not notes:
            return
        rows.append(notes)
        # Removed one by one and after the write: the event loop's thread may have noted more rows meanwhile.
        for _ in notes:
            self._notes.popleft()
        self.written += len(notes)
        self._lock.write(rows.header)

    def recall(self, pairs: Iterable[tuple[bytes, Iterable[int]]]) -> list[dict[int, Latest]]:
        """Write the noted rows, then return the result of `JournalRows.recall` for each member."""
        with self._alone, _typed(self.path):
            self._write()
            return [self._opened().recall(member_code, quota_ids) for member_code, quota_ids in pairs]

    def requests(self, after: int, member_code: bytes | None) -> list[JournaledRequest]:
        with self._alone, _typed(self.path):
            return self._opened().requests(after, member_code)

    def rest(self, after: int, before: int) -> list[JournaledRequest]:
        """Return the next requests up to chunk `before`, with what was not recalled of them."""
        with self._alone, _typed(self.path):
            return self._opened().requests(after, None, rest_before=before)

    def back_up(self, path: Path) -> None:
        """Copy the journal, with the file beside it, to another path."""
        with self._alone:
            rows = self._opened()
            with _typed(path):
                _copy(rows, target_of(path))

    def _opened(self) -> JournalRows:
        if self._rows is None:
            raise JournalError("is not open", path=self.path)
        return self._rows

    # --- Closing

    def leave(self) -> None:
        """Write the noted rows and close the file, even if writing fails. A second call has no effect."""
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
            # Last: after this, another run may open the file.
            self._lock.release()

    def forget(self) -> None:
        """In the child of a fork: leave the file and the lock to the parent."""
        rows, self._rows = self._rows, None
        if rows is not None:
            rows.forget()
        self._lock.forget()
        # A new lock: a thread that held the old one exists in the parent only, and would never release it here.
        self._alone = threading.Lock()
        self.is_gone = True


_files: Final[dict[int, ref[JournalFile]]] = {}


def _open_files() -> list[JournalFile]:
    return [file for file in (each() for each in list(_files.values())) if file is not None]


def _forget_all() -> None:
    for file in _open_files():
        file.forget()


if hasattr(os, "register_at_fork"):  # pragma: no branch  Windows has no forks
    os.register_at_fork(after_in_child=_forget_all)


@contextmanager
def _typed(path: Path) -> Generator[None]:
    """Turn errors of SQLite and the system into JournalError. The messages quote nothing from the file."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as exc:
        code = getattr(exc, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        name = getattr(exc, "sqlite_errorname", type(exc).__name__)
        reason = _REASONS.get(code, f"cannot be used: SQLite says {name}")
    except OSError as exc:
        reason = f"cannot be used: {exc.strerror}"
    except Damage as exc:  # of a file that was just repaired
        reason = f"is damaged: {exc}"
    else:
        return
    raise JournalError(reason, path=path, in_use=reason == _IN_USE) from None


def _is_open_to_others(path: Path) -> bool:
    return path.is_file() and bool(path.stat().st_mode & 0o077)


def _has_mark(path: Path) -> bool:
    """Return whether a file is a complete database with the mark of a journal."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(_AT_MARK + 4)[_AT_MARK:] == APPLICATION.to_bytes(4, "big")
    return False


def _copy(rows: JournalRows, path: Path) -> None:
    """Copy the rows to a path that is free or holds an earlier copy."""
    lock, part = JournalLock(path), beside(path, "-part")
    lock.take()
    try:
        try:
            is_copy = lock.header() is not None
        except Damage:
            is_copy = _has_mark(path)
        if path.exists() and not is_copy:
            raise JournalError("exists already, and is not a journal of this format", path=path)
        # The copy is made under another name, so an earlier copy stays until the new one is complete.
        remove(part)
        make_private(part)
        try:
            rows.copy(part)
        except BaseException:
            remove(part)  # on a full disk, for example; it holds member codes
            raise
        # An earlier copy that was used may have left a `-wal` file, which SQLite would apply to the new copy.
        beside(path, "-wal").unlink(missing_ok=True)
        part.replace(path)
        sync_folder(path.parent)
        lock.write(rows.header, durably=True)
    finally:
        lock.release()
