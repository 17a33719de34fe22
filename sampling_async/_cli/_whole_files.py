"""Files that appear only when they are complete."""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sampling_async import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Generator


@contextmanager
def written_whole(output: Path) -> Generator[Path]:
    """Yield a temporary file to write to. It replaces `output` if the `with` block ends without an error.

    Raises:
        InvalidRequestError: The file cannot be written.
    """
    # Resolved, so that a link stays and its target is replaced.
    target = output.resolve()
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        os.close(handle)
        unfinished = Path(name)
        try:
            yield unfinished
            # mkstemp() makes a file that only its owner can read; this restores the usual permissions.
            unfinished.chmod(0o666 & ~_umask())
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as exc:
        raise InvalidRequestError(f"{output}: {exc.strerror or exc}") from None


def _umask() -> int:
    # The mask can be read only by setting it, so it is set back at once.
    mask = os.umask(0)
    os.umask(mask)
    return mask
