"""Raise an exception at any line or instruction of the package, as a signal handler of the application may.

    with Raising(LookupError("alarm"), at=17) as raising:
        anyio.run(call)
    raising.struck                          where it was raised; None: only `raising.passed` lines ran

Lines count if this thread runs them in files of the package during the block. The exception is raised once,
before line number `at` runs. `at=None` counts lines and raises nothing. With `instructions=True` it is raised
between two instructions of the interpreter, which is where signal handlers run: also after a call, before its
result is stored.

A debugger or coverage tool that was active continues after the block.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import sampling_async

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

_PACKAGE = str(Path(sampling_async.__file__).parent)


class Raising:
    """See the module.

    Args:
        exception: What to raise.
        at: Before which line, from 0.
        instructions: Whether instructions are counted instead of lines.
        where: Says whether a file name and function name count; by default everything in the package does.

    Attributes:
        at: As given.
        passed: How many ran.
        struck: The file, function and line where it was raised.
        trail: With `at=None`, the places of all lines.
    """

    def __init__(
        self,
        exception: BaseException,
        at: int | None,
        *,
        instructions: bool = False,
        where: Callable[[str, str], bool] = lambda _file, _function: True,
    ) -> None:
        self.passed = 0
        self.struck: str | None = None
        self.trail: list[str] = []
        self.exception = exception
        self.at = at
        self._instructions = instructions
        self._event = "opcode" if instructions else "line"
        self._where = where
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = sys.gettrace()
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _enter_frame(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        code = frame.f_code
        if code.co_name == "__del__" or not code.co_filename.startswith(_PACKAGE):
            return None  # an exception in a finalizer is only printed
        if not self._where(code.co_filename, code.co_name):
            return None
        # Set first: from Python 3.13 on, instructions are traced only in frames that have a trace function.
        frame.f_trace = self._step
        frame.f_trace_opcodes, frame.f_trace_lines = self._instructions, not self._instructions
        return self._step

    def _step(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if event == self._event and self.struck is None:
            if self.at is None or self.passed == self.at:
                code = frame.f_code
                place = f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
                if self.at is None:
                    self.trail.append(place)
                else:
                    self.struck = place
                    raise self.exception
            self.passed += 1
        return self._step

    def moments(self) -> list[int]:
        """Return the numbers of the first and last time that each place ran."""
        first = {place: number for number, place in reversed(list(enumerate(self.trail)))}
        last = {place: number for number, place in enumerate(self.trail)}
        return sorted({*first.values(), *last.values()})
