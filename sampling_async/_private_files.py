"""Files that only their owner can read and write: what this package writes holds member codes or secrets.

A file that somebody else has made first stays theirs: they can read and change what is written to it. So such a
file is refused. A file of this user that others can read, for example after a restore, is closed to them.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Generator

UNFINISHED: Final = ".sampling_async"
"""The end of the names of temporary files. Others beside them may begin alike, and must stay."""

_LOG: Final = logging.getLogger("sampling_async.files")
_OWNER_ONLY: Final = 0o600
_OTHERS: Final = 0o077
_WRITERS: Final = 0o022
_ROOT: Final = 0
_WAY_OUT: Final = "name another file, or remove it"
_OF_SQLITE: Final = ("", "-wal", "-shm", "-journal")


def make_private(path: Path) -> None:
    """Make an empty file that only its owner can read and write.

    SQLite would make it as the umask says, and gives `-wal` and `-shm` the mode of the file.
    """
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, _OWNER_ONLY))


def open_private(path: Path) -> int:
    """Open a file to read and write, or make it, and return its descriptor. A symbolic link is not followed."""
    flags = os.O_CREAT | os.O_RDWR | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)
    try:
        file = os.open(path, flags, _OWNER_ONLY)
    except OSError:
        _refuse_link(path)
        raise
    try:
        _close_to_others(file, path)
    except BaseException:
        os.close(file)
        raise
    return file


def require_private(path: Path) -> None:
    """Check that a file, and SQLite's files beside it, belong to this user; remove the permissions of others.

    Files that are not there are no error. A symbolic link of this user to the file is followed.
    """
    target = target_of(path)
    for end in _OF_SQLITE:
        file = Path(f"{target}{end}")
        _refuse_link(file)
        with suppress(FileNotFoundError):
            _close_to_others(file, file)


def require_unchanged_by_others(path: Path) -> None:
    """Refuse a file that somebody else may write: one that says where keys are sent. Others may read it."""
    found = target_of(path).stat()
    if not hasattr(os, "geteuid"):
        return
    if found.st_uid not in {_ROOT, os.geteuid()}:
        raise _refusal(path, f"belongs to another user (uid {found.st_uid}), who can change it")
    if found.st_mode & _WRITERS:
        raise _refusal(path, f"can be changed by others (mode {found.st_mode & 0o777:04o}): chmod go-w")


def target_of(path: Path) -> Path:
    """Return the file that a path leads to: a symbolic link is followed, unless it is somebody else's."""
    with suppress(FileNotFoundError):
        _refuse_foreign_link(path)
    target = Path(os.path.realpath(path))  # of a circle, `Path.resolve` raises by the version of Python
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return target


@contextmanager
def written_whole(output: Path) -> Generator[Path]:
    """Yield a temporary file to write to. It replaces `output` if the block ends without an error.

    Only its owner can read it, from its first byte, whatever was in its place. Errors name `output`.
    """
    # A link stays, and its target is replaced.
    target = target_of(output)
    try:
        # In the same folder, because only there it can be renamed in one step. Only its owner can read it.
        handle, name = tempfile.mkstemp(UNFINISHED, f".{target.name}.", target.parent)
        os.close(handle)
        unfinished = Path(name)
        try:
            yield unfinished
            unfinished.replace(target)
        except BaseException:
            with suppress(OSError):
                unfinished.unlink()
            raise
    except OSError as exc:
        # pyarrow raises errors that have a text only.
        raise OSError(exc.errno or errno.EIO, exc.strerror or str(exc), str(output)) from None


def _close_to_others(file: int | Path, path: Path) -> None:
    """Refuse somebody else's file, and take the access of others from this user's own."""
    found = os.stat(file)  # noqa: PTH116  of a path or a descriptor
    if not hasattr(os, "geteuid") or not stat.S_ISREG(found.st_mode):
        return
    if found.st_uid != os.geteuid():
        raise _refusal(
            path, f"belongs to another user (uid {found.st_uid}), who can read and change it; run as that user"
        )
    if not found.st_mode & _OTHERS:
        return
    os.chmod(file, stat.S_IMODE(found.st_mode) & ~_OTHERS)  # noqa: PTH101  as above
    # Some file systems take any mode, and keep their own.
    if os.stat(file).st_mode & _OTHERS:  # noqa: PTH116  as above
        raise _refusal(path, "can be read by others, and its file system does not change that")
    _LOG.warning("%s was open to others (mode %04o), and is its owner's alone now", path, found.st_mode & 0o777)


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise _refusal(path, "is a symbolic link, which leads to another file")


def _refuse_foreign_link(path: Path) -> None:
    """Refuse a symbolic link that is neither this user's nor root's: it leads where somebody else wants."""
    found = path.lstat()
    if hasattr(os, "geteuid") and stat.S_ISLNK(found.st_mode) and found.st_uid not in {_ROOT, os.geteuid()}:
        raise _refusal(path, f"is a symbolic link of another user (uid {found.st_uid})")


def _refusal(path: Path, reason: str) -> OSError:
    return PermissionError(errno.EPERM, f"{path.name} {reason}; {_WAY_OUT}", str(path))
