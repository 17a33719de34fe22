"""Files that appear only when they are complete."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Generator

UNFINISHED: Final = ".sampling_async"
"""The end of the names of temporary files. Others beside them may begin alike, and are not ours to remove."""


def target_of(path: Path) -> Path:
    """Return the file that a path leads to: a symbolic link is followed.

    Raises:
        OSError: It is a link in a circle.
    """
    target = Path(os.path.realpath(path))  # of a circle, `Path.resolve` raises by the version of Python
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return target


@contextmanager
def written_whole(output: Path, *, is_private: bool = False) -> Generator[Path]:
    """Yield a temporary file to write to. It replaces `output` if the `with` block ends without an error.

    Args:
        output: The file. If it is there, it keeps its permissions.
        is_private: Whether only its owner may read it if it is new.

    Raises:
        OSError: The file cannot be written. The error names `output`, not the temporary file.
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
            unfinished.chmod(_mode_for(target, is_private=is_private))
            unfinished.replace(target)
        except BaseException:
            with suppress(OSError):
                unfinished.unlink()
            raise
    except OSError as exc:
        # pyarrow raises errors that have a text only.
        raise OSError(exc.errno or errno.EIO, exc.strerror or str(exc), str(output)) from None


def _mode_for(target: Path, *, is_private: bool) -> int:
    try:
        return stat.S_IMODE(target.stat().st_mode)
    except FileNotFoundError:
        return 0o600 if is_private else 0o666 & ~_umask()


def _umask() -> int:
    # The mask can be read only by setting it, so it is set back at once.
    mask = os.umask(0)
    os.umask(mask)
    return mask
