"""The file beside a journal: who holds it has the journal, and in it stands how much the journal holds.

Locks of the database itself would not do. POSIX has them end when any descriptor of the file is closed, by a
backup that reads it, say. This lock belongs to one open descriptor, so that it also holds within a process. The
few bytes say what a database cannot say of itself: that rows are missing at its end.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

from sampling_async._errors import JournalError

if TYPE_CHECKING:
    from pathlib import Path

_LINE: Final = "sampling_async journal form 2 rows %020d digest %s check "
_CHECK_BYTES: Final = 8
_LENGTH: Final = len(_LINE % (0, "0" * 32)) + 2 * _CHECK_BYTES + 1
_LOCKED_BYTE: Final = 2**30  # Windows lets nobody read what is locked, so that is beyond what is written


class Damage(Exception):  # noqa: N818  it is a finding, which becomes a JournalError
    """A journal is not as it was written; the text says what is wrong, and shows nothing of it."""


class Header(NamedTuple):
    """How much was written, and the digest that the last row has."""

    rows: int
    digest: bytes


class JournalLock:
    """The lock of one journal, and its header.

    Args:
        journal: The journal's file, which is left alone here.

    Attributes:
        path: The file beside it.
    """

    def __init__(self, journal: Path) -> None:
        self.path = journal.with_name(f"{journal.name}-lock")
        self._journal = journal
        self._file = -1

    def take(self) -> None:
        """Take the lock.

        Raises:
            JournalError: Somebody has it.
            OSError: The file cannot be used.
        """
        while True:
            self._file = os.open(self.path, os.O_CREAT | os.O_RDWR | getattr(os, "O_BINARY", 0), 0o600)
            try:
                _lock(self._file)
                if self._is_in_place():
                    return
            except BlockingIOError:
                self._close()
            except BaseException:
                self._close()
                raise
            else:
                self._close()  # it was removed by who had it; there is another one by now, or none
                continue
            raise JournalError("is in use by another run", path=self._journal)

    def _is_in_place(self) -> bool:
        with suppress(OSError):
            return os.path.samestat(os.fstat(self._file), self.path.stat())
        return False

    def header(self) -> Header | None:
        """Return what is written in the file; None if nothing is.

        Raises:
            Damage: It is not what was written.
        """
        line = self._line()
        if not line:
            return None
        words = line.split()
        with suppress(ValueError, IndexError):
            header = Header(int(words[5]), bytes.fromhex(words[7].decode("ascii")))
            if line == _line(header):
                return header
        raise Damage(f"{self.path.name}, the file beside it, is not as it was written")

    def _line(self) -> bytes:
        os.lseek(self._file, 0, os.SEEK_SET)
        return os.read(self._file, _LENGTH + 1)

    def write(self, header: Header, *, durably: bool = False) -> None:
        """Write how much the journal holds by now.

        It is not waited for until it is on disk: that it stays behind after a loss of power does no harm.
        """
        line = _line(header)
        os.lseek(self._file, 0, os.SEEK_SET)
        os.write(self._file, line)
        if durably:
            os.ftruncate(self._file, len(line))
            os.fsync(self._file)
            sync_folder(self.path.parent)

    def release(self) -> None:
        """Let go; an empty file is not left behind."""
        if self._file < 0:
            return
        with suppress(OSError):
            if not os.fstat(self._file).st_size:
                self.path.unlink()
        self._close()

    def forget(self) -> None:
        """Close the descriptor that a child has of its parent's, whose lock it stays."""
        self._close()

    def _close(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def _line(header: Header) -> bytes:
    line = (_LINE % (header.rows, header.digest.hex())).encode("ascii")
    return line + blake2b(line, digest_size=_CHECK_BYTES).hexdigest().encode("ascii") + b"\n"


def _lock(file: int) -> None:
    """Lock a file by its descriptor, or raise BlockingIOError."""
    if sys.platform == "win32":  # pragma: no cover
        import msvcrt  # noqa: PLC0415

        os.lseek(file, _LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        except OSError as exc:
            raise BlockingIOError from exc
    else:
        import fcntl  # noqa: PLC0415

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def sync_folder(folder: Path) -> None:
    """Have the names of files in a folder outlast a loss of power, where the system can."""
    with suppress(OSError):  # Windows opens no folder
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
