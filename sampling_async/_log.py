"""The package's log on stderr, for programs that configure no logging: by SAMPLING_LOG, or for a while."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from sampling_async._contract.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Generator

VARIABLE: Final = "SAMPLING_LOG"
_LEVELS: Final = ("debug", "info", "warning", "error")
_PACKAGE: Final = logging.getLogger("sampling_async")
_whole: Final[list[object]] = []  # the blocks that show the whole log now


def follow_environment() -> None:
    """Show the log on stderr from the level in SAMPLING_LOG, if it is set. More than once is the same as once.

    Raises:
        InvalidRequestError: The variable holds something else than a level.
    """
    level = os.environ.get(VARIABLE, "").strip().lower()
    if not level:
        return
    if level not in _LEVELS:
        raise InvalidRequestError(
            f"{VARIABLE} must be one of {', '.join(_LEVELS)}, not {level!r:.20}; unset it for no log"
        )
    if not _whole:
        _show(level.upper())


@contextmanager
def log_on_stderr() -> Generator[None]:
    """Show the whole log on stderr during a block."""
    before = _PACKAGE.level
    added = _show("DEBUG")
    _whole.append(added)
    try:
        yield
    finally:
        _whole.pop()
        if added is not None:
            _PACKAGE.removeHandler(added)
        _PACKAGE.setLevel(before)


def _show(level: str) -> logging.Handler | None:
    """Set the level, and add a handler unless there is one already; return the new one."""
    _PACKAGE.setLevel(level)
    if any(handler.get_name() == VARIABLE for handler in _PACKAGE.handlers):
        return None
    handler = logging.StreamHandler(sys.stderr)
    handler.set_name(VARIABLE)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    _PACKAGE.addHandler(handler)
    return handler
