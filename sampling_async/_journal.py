"""A journal of a fan-out on disk: what was sent before it is sent, what was answered when it is.

A process that is killed in the middle is started again with the same input and the same journal. What was
answered is handed over from the journal, what was in flight is `unknown`, and only what was surely not sent
goes out. Here is what users have of it; what a run does with it is `_journal_run`'s.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar, get_args

from sampling_async._errors import InvalidRequestError
from sampling_async._journal_lines import outcomes_of, status_of
from sampling_async._journal_run import JournalRun, journal_file
from sampling_async._outcomes import OutcomeStatus
from sampling_async._threads import in_thread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator

    from sampling_async._journal_file import JournalFile
    from sampling_async._journal_rows import Request
    from sampling_async._outcomes import InviteOutcome

T = TypeVar("T")


class Journal:
    """Where a fan-out writes down what it does: `client.fan_out(requests, journal=Journal(path))`.

    A member and quota is asked once for all runs with one journal, and for all requests of a run. The file
    holds member codes and invite links (never the key) and is made readable for its owner only. A small file
    beside it, whose name ends in `-lock`, belongs to it: it says how much the journal holds, so that no part of
    it can be missing unnoticed. `backup` copies both.

    `outcomes` and `counts` read it without a run. For that time they have it as a run has it, so no run can use
    it meanwhile, and while a run uses it, they are refused: `backup` it, and read the copy.

    Args:
        path: The file; it is made if it is not there. One run uses it at a time.
        resend_unknown: Whether to ask again what may have been processed without its answer being known. A
            second invite may be made.
        accept_damage: Whether to go on with what can be read of a damaged journal. What was sent and whose
            answer cannot be read is `unknown`; what is missing without a trace is asked again. The damaged file
            is kept, under a name that ends in `-damaged`.

    Raises:
        InvalidRequestError: The path cannot be one.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, resend_unknown: bool = False, accept_damage: bool = False
    ) -> None:
        self._run = JournalRun(_path_of(path), resend_unknown=resend_unknown, accept_damage=accept_damage)

    def __repr__(self) -> str:
        return f"Journal({str(self.path)!r}, resend_unknown={self._run.resend_unknown})"

    @property
    def path(self) -> Path:
        """The file."""
        return self._run.path

    def outcomes(self, member_code: str | None = None) -> AsyncIterator[InviteOutcome]:
        """Yield what is known of each member and quota, once: its latest outcome, in the order of the requests.

            async for outcome in journal.outcomes(): ...

        What was in flight when a run ended is `unknown`. They are all `replayed`. The file is read in a thread,
        some thousand outcomes at a time, whatever its size, and let go of at the end or when you drop the
        iterator.

        Args:
            member_code: This member's only.

        Raises:
            JournalError: While iterating: it is not there, is damaged, or is in use.
        """
        return _Outcomes(_Reader(self.path, member_code))

    async def counts(self) -> dict[OutcomeStatus, int]:
        """Return how many members and quotas ended how; each is counted once, by its latest outcome.

        Raises:
            JournalError: It is not there, is damaged, or is in use.
        """
        reader = _Reader(self.path)
        counts: dict[OutcomeStatus, int] = dict.fromkeys(get_args(OutcomeStatus), 0)
        while (some := await reader.read(_counted)) is not None:
            for status, count in some.items():
                counts[status] += count
        return counts

    async def backup(self, path: str | os.PathLike[str]) -> None:
        """Copy the journal, also while a run uses it; the copy is a journal as good as this one.

        Args:
            path: Where to: nothing is there, or an earlier copy, whose place this one takes when it is whole.

        Raises:
            InvalidRequestError: The path cannot be one.
            JournalError: The journal is not there, is damaged, or is in use by another process; or the copy
                cannot be written.
        """
        target = _path_of(path)
        if self._run.file is not None:
            await in_thread(self._run.file.back_up, target)
            return
        file = journal_file(self.path, None)

        def back_up() -> None:
            file.open()
            try:
                file.back_up(target)
            finally:
                file.leave()

        try:
            await in_thread(back_up)
        except BaseException:
            file.abandon()
            raise


def run_of(journal: Journal) -> JournalRun:
    """Return what a fan-out does its work with."""
    return journal._run  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  not for users


class _Reader:
    """Reads a journal without a run, part by part.

    Args:
        path: The file.
        member_code: Where given, this member's only.
    """

    def __init__(self, path: Path, member_code: str | None = None) -> None:
        self._file: JournalFile | None = journal_file(path, None)
        self._is_open = False
        self._member_code = member_code
        self._row = 0

    async def read(self, make: Callable[[list[Request], Path], T]) -> T | None:
        """Return what a function makes, in a thread, of the next requests; None after the last.

        Cancelled, it can be called again: nothing is lost. Dropped, the file is let go of.
        """
        file = self._file
        if file is None:
            return None
        try:
            if not self._is_open:
                await in_thread(file.open)
                self._is_open = True
            found: tuple[int, T] | None = await in_thread(self._made, file, make)
        except BaseException as exc:
            if not self._is_open or isinstance(exc, Exception):
                self._file = None
                file.abandon()
            raise
        if found is None:
            self._file = None
            await in_thread(file.leave)
            return None
        self._row = found[0]
        return found[1]

    def _made(self, file: JournalFile, make: Callable[[list[Request], Path], T]) -> tuple[int, T] | None:
        requests = file.requests(self._row, None if self._member_code is None else self._member_code.encode())
        return (requests[-1].row, make(requests, file.path)) if requests else None


class _Outcomes:
    """See `Journal.outcomes`. No generator, which would hold the file until its event loop closes it."""

    def __init__(self, reader: _Reader) -> None:
        self._reader = reader
        self._some: Iterator[InviteOutcome] = iter(())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> InviteOutcome:
        while True:
            for outcome in self._some:
                return outcome
            some = await self._reader.read(_read)
            if some is None:
                raise StopAsyncIteration
            self._some = iter(some)


def _read(requests: Iterable[Request], path: Path) -> list[InviteOutcome]:
    return [
        outcome
        for request in requests
        for outcome in outcomes_of(request.member_code.decode(), request.lines, path, replayed=True)
    ]


def _counted(requests: Iterable[Request], _path: Path) -> Counter[OutcomeStatus]:
    return Counter(status_of(line) for request in requests for line in request.lines.values())


def _path_of(path: str | os.PathLike[str]) -> Path:
    """Return a path that a file can have.

    Raises:
        InvalidRequestError: It is none.
    """
    if isinstance(path, str | os.PathLike):
        given = os.fspath(path)
        if isinstance(given, str) and given and "\0" not in given and _can_be_encoded(given):
            return Path(given)
    raise InvalidRequestError(
        "a journal's path is a str or PathLike of one, not empty and without NUL, not "
        f"{type(path).__name__ if not isinstance(path, str) else 'this text'}"
    )


def _can_be_encoded(path: str) -> bool:
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return True
