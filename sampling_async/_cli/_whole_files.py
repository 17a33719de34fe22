"""Files that appear only when they are complete."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator


@contextmanager
def written_whole(output: Path, *, is_private: bool = False) -> Generator[Path]:
    """Yield a temporary file to write to. It replaces `output` if the `with` block ends without an error.

    Args:
        output: The file. If it is there, it keeps its permissions.
        is_private: Whether only its owner may read it if it is new.

    Raises:
        OSError: The file cannot be written. The error names `output`, not the temporary file.
    """
    # Resolved, so that a link stays and its target is replaced.
    target = output.resolve()
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        os.close(handle)
        unfinished = Path(name)
        try:
            yield unfinished
            unfinished.chmod(_mode_for(target, is_private=is_private))
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)
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
