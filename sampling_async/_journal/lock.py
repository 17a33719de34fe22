"""The lock file beside a journal: it gives the journal to one run, and records how many rows the journal has.

By POSIX a lock on the database itself ends when any descriptor of the file is closed, for example by a backup.
This lock belongs to one open descriptor, so it also works between two runs of one process. The recorded number
shows what a database cannot show itself: that rows are missing at its end.
"""

from __future__ import annotations

import os
import re
import sys
import time
from contextlib import suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple
from weakref import WeakSet

from sampling_async._contract.errors import JournalError
from sampling_async._private_files import open_private

if TYPE_CHECKING:
    from pathlib import Path

FORM: Final = 2
"""The form of the journal's files."""

_LINE: Final = f"sampling_async journal form {FORM} rows %020d digest %s check "
_OF_ANY_FORM: Final = re.compile(rb"sampling_async journal form ([0-9]{1,9}) ")
_CHECK_BYTES: Final = 8
_BRIEF: Final = 0.05
"""Seconds. The lock is tried again for so long, because `is_taken` has it for a moment."""

# The text, the check in hexadecimal (two digits for each byte), and the line feed.
_LENGTH: Final = len(_LINE % (0, "0" * 32)) + 2 * _CHECK_BYTES + 1
# Windows lets no other process read locked bytes. So a byte far behind the text is locked.
_LOCKED_BYTE: Final = 2**30


class Damage(Exception):  # noqa: N818  callers turn it into a JournalError
    """A journal was changed or is incomplete. The text says what is wrong and quotes nothing from it."""


class Header(NamedTuple):
    """The number of rows written, and the digest of the last row."""

    rows: int
    digest: bytes


def of_other_form(form: int, journal: Path) -> JournalError:
    return JournalError(f"has file format {form}, but this version reads only format {FORM}", path=journal)


_locks: Final[WeakSet[JournalLock]] = WeakSet()


class JournalLock:
    """The lock of one journal, in a file beside it, and the header in that file."""

    def __init__(self, journal: Path) -> None:
        self.path = journal.with_name(f"{journal.name}-lock")
        self._journal = journal
        self._file = -1
        _locks.add(self)

    def take(self) -> None:
        """Take the lock. A JournalError says that another run has it."""
        until = time.monotonic() + _BRIEF
        while True:
            self._file = open_private(self.path)
            try:
                _lock(self._file)
                if self._is_in_place():
                    return
            except BlockingIOError:
                self._close()
                # Somebody may only be looking whether it is taken.
                if time.monotonic() < until:
                    time.sleep(_BRIEF / 10)
                    continue
            except BaseException:
                self._close()
                raise
            else:
                # The run that held the lock removed the file after we opened it. Open or create the new one.
                self._close()
                continue
            raise JournalError("is in use by another run", path=self._journal, in_use=True)

    @property
    def is_held(self) -> bool:
        """Whether this process has taken the lock, and was not forked since."""
        return self._file >= 0

    def is_taken(self) -> bool:
        """Return whether somebody has the lock. A run that begins at this moment is not disturbed for long.

        There is no way to look at a lock without taking it. So a run waits a little, see `take`.
        """
        try:
            file = os.open(self.path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0))
        except OSError:
            return False
        try:
            _lock(file, shared=True)
        except BlockingIOError:
            return True
        finally:
            os.close(file)
        return False

    def _is_in_place(self) -> bool:
        with suppress(OSError):
            return os.path.samestat(os.fstat(self._file), self.path.stat())
        return False

    def header(self) -> Header | None:
        """Return the recorded header; None if the file is empty."""
        line = self._line()
        if not line:
            return None
        words = line.split()
        with suppress(ValueError, IndexError):
            header = Header(int(words[5]), bytes.fromhex(words[7].decode("ascii")))
            if line == _line(header):
                return header
        other = _OF_ANY_FORM.match(line)
        if other is not None and int(other[1]) != FORM and line == _checked(line[: -2 * _CHECK_BYTES - 1]):
            raise of_other_form(int(other[1]), self._journal)
        raise Damage(f"{self.path.name}, which belongs to it, was changed")

    def _line(self) -> bytes:
        os.lseek(self._file, 0, os.SEEK_SET)
        return os.read(self._file, _LENGTH + 1)

    def write(self, header: Header, *, durably: bool = False) -> None:
        """Write how many rows the journal has now, and wait until it is on disk if `durably`.

        This is not needed for each row: after a loss of power an old header does no harm, because a journal may
        have more rows than its header says.
        """
        line = _line(header)
        os.lseek(self._file, 0, os.SEEK_SET)
        os.write(self._file, line)
        if durably:
            os.ftruncate(self._file, len(line))
            os.fsync(self._file)
            sync_folder(self.path.parent)

    def release(self) -> None:
        """Release the lock, and remove the file if it is empty."""
        if self._file < 0:
            return
        with suppress(OSError):
            if not os.fstat(self._file).st_size:
                self.path.unlink()
        self._close()

    def forget(self) -> None:
        """In the child of a fork: close the descriptor. The parent keeps the lock."""
        self._close()

    def _close(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def _forget_all() -> None:
    # A child that lives on after its parent was killed would keep the lock of a journal that nobody uses.
    for lock in tuple(_locks):
        lock.forget()


if hasattr(os, "register_at_fork"):  # pragma: no branch  Windows has no forks
    os.register_at_fork(after_in_child=_forget_all)


def _line(header: Header) -> bytes:
    return _checked((_LINE % (header.rows, header.digest.hex())).encode("ascii"))


def _checked(line: bytes) -> bytes:
    return line + blake2b(line, digest_size=_CHECK_BYTES).hexdigest().encode("ascii") + b"\n"


def _lock(file: int, *, shared: bool = False) -> None:
    """Lock a file by its descriptor, without waiting.

    With `shared`, others may lock it likewise; not on Windows.
    """
    if sys.platform == "win32":  # pragma: no cover
        import msvcrt  # noqa: PLC0415

        os.lseek(file, _LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        except OSError as exc:
            raise BlockingIOError from exc
    else:
        import fcntl  # noqa: PLC0415

        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)


def sync_folder(folder: Path) -> None:
    """Write the file names of a folder to disk, if the system can, so that they survive a loss of power."""
    with suppress(OSError):  # Windows cannot open a folder
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
