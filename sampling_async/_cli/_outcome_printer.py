"""Show outcomes as they finish."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from sampling_async._cli import _rendering as show

if TYPE_CHECKING:
    from types import TracebackType

    from sampling_async import InviteOutcome
    from sampling_async._cli._tally import Tally


class OutcomePrinter:
    """Shows outcomes as they finish, the progress of the run, and a summary at the end of the `with` block.

    Args:
        tally: The counts of outcomes.
        as_lines: Whether to print lines of JSON, or lines for people.
        with_members: Whether lines for people name the member.

    Attributes:
        tally: The counts of outcomes.
        bar: The display of progress.
    """

    def __init__(self, tally: Tally, *, as_lines: bool, with_members: bool = False) -> None:
        self.tally = tally
        self.bar = show.StreamBar(lines=as_lines)
        self._page = None if as_lines else show.OutcomePage(self.bar.display, with_members=with_members)
        self._reader_is_gone = False

    def __enter__(self) -> Self:
        self.bar.__enter__()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._page is not None:
                self._page.flush()
        finally:
            self.bar.__exit__()
            if exc is None or self.count:
                show.print_summary(self.tally)

    @property
    def count(self) -> int:
        """How many outcomes were added."""
        return self.tally.total

    def add(self, outcome: InviteOutcome) -> None:
        """Show an outcome."""
        self.tally.add(outcome)
        if self._page is not None:
            self._page.add(outcome)
        elif not self._reader_is_gone:
            self._write(outcome)

    def _write(self, outcome: InviteOutcome) -> None:
        try:
            show.emit_json(show.outcome_json(outcome))
        except OSError:
            # The reader went away, or the disk is full. Later outcomes are still counted, but not written.
            self._reader_is_gone = True
            raise
