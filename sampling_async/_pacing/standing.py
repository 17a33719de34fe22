"""Work that goes on for as long as a block is open, with state that others look at and wait for."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from sampling_async._pacing.background import Background

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType


_LOG: Final = logging.getLogger("sampling_async.pacing")


class Standing(Background):
    """A background whose results are its state. A failure of the work is raised when the block is left.

    A service leaves the block only when it ends, so the failure is logged too, at once. A cancellation is no
    failure: mostly it is that of the block.
    """

    _works_in_groups = True

    def __init__(self) -> None:
        super().__init__()
        self._is_leaving = False
        self._is_logged = False

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Work that is still running, or was when the block was left before, is ended by that: no failure.
        had_ended, self._is_leaving = self._finished and not self._is_leaving, True
        await super().__aexit__(exc_type, exc, traceback)
        if had_ended and exc_type is None:
            self._end()

    def is_over(self) -> None:
        """Learn that the work has ended. It may be called several times."""
        super().is_over()
        if self._broken_by is not None and not self._is_logged:
            self._is_logged = True
            if self._was_cancelled:
                _LOG.info("the %s was cancelled", self._called)
                return
            # Its text may hold what a log must not.
            name = type(self._broken_by).__name__
            _LOG.error("the %s was ended by %s, which is raised when its block is left", self._called, name)

    @property
    def _has_more(self) -> bool:
        return False

    @property
    def _broken_by(self) -> Exception | None:
        """The failure that has ended the work while its block was open."""
        return None if self._is_leaving else self._failure

    async def _until(self, is_so: Callable[[], bool]) -> None:
        """Wait for a state of the work.

        Raises:
            RuntimeError: The work has ended, so the state will never come.
        """
        if self._runner is None:
            self._must_be_inside()
        while not is_so():
            if self._finished:
                raise self._ended()
            await self._progress.wait()

    def _ended(self) -> RuntimeError:
        """Return the error for those who wait for work that has ended; the failure is its cause."""
        failure = self._broken_by
        if failure is None:
            return RuntimeError(f"the {self._called} has ended")
        error = RuntimeError(f"the {self._called} was ended by {type(failure).__name__}: {failure}")
        error.__cause__ = failure
        return error
