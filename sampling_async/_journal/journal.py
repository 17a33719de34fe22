"""The journal of a fan-out on disk: it records each chunk before it is sent, and its outcomes afterwards.

If the process is killed, start it again with the same input and the same journal. Recorded outcomes are
returned from the journal, quota IDs in flight at that time are `unknown`, and only IDs that were certainly not
sent are sent. This module is the user's view of a journal. `JournalRun` is the view of a run.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, get_args

from sampling_async._contract.checks import file_path, require_flags
from sampling_async._contract.errors import InvalidRequestError
from sampling_async._contract.frames import stream_of, table_of
from sampling_async._contract.records import safe_repr
from sampling_async._journal.lines import outcomes_of, status_of
from sampling_async._journal.run import JournalRun, journal_file
from sampling_async._pacing.threads import in_thread
from sampling_async._protocol.requests import member_code_of
from sampling_async._protocol.results import OutcomeStatus, outcome_batches, outcome_schema

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator
    from pathlib import Path

    from sampling_async._contract.checks import Text
    from sampling_async._journal.file import JournalFile
    from sampling_async._journal.rows import JournaledRequest
    from sampling_async._protocol.results import InviteOutcome

T = TypeVar("T")


class _OfSettled(Protocol):  # such as a SettledPair
    @property
    def member_code(self) -> str: ...
    @property
    def quota_id(self) -> int: ...


class Journal:
    """The record of a fan-out on disk: `client.fan_out(requests, journal=Journal(path))`.

    Each pair of member and quota is sent once, over all runs with one journal and all requests of a run. The
    file holds member codes and invite links (never the key), and only its owner can read it. A small file
    beside it, with a name that ends in `-lock`, belongs to it: it records how much the journal holds, so that a
    missing part is noticed. `backup` copies both files.

    `outcomes` and `counts` read the journal without a run. They lock it like a run: meanwhile no run can use
    it, and while a run uses it, they fail. In that case, make a copy with `backup` and read the copy.

    Args:
        path: The file. It is created if it does not exist. Only one run can use it at a time.
        resend_unknown: Whether to send quota IDs again that are `unknown`, because they may have been processed
            and the response was lost. A second invite may be made.
        settled: The `SettledPair`s of `OutcomeLedger.settle`, which have an invite although their outcome is
            `unknown`: they are not sent again for all that.
        accept_damage: Whether to continue with the readable part of a damaged journal. IDs that were sent and
            whose outcome cannot be read are `unknown`. IDs that are missing without a trace are sent again. The
            damaged file is kept, with a name that ends in `-damaged`.
        only_input: Whether a run returns the outcomes of its input only. Default: when the input is over, it
            also returns the recorded outcomes of earlier runs that the input had not, such as links of quotas
            that have closed since, and logs a warning with their number.

    Raises:
        InvalidRequestError: The path is not a valid path.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        resend_unknown: bool = False,
        settled: Iterable[_OfSettled] = (),
        accept_damage: bool = False,
        only_input: bool = False,
    ) -> None:
        require_flags(resend_unknown=resend_unknown, accept_damage=accept_damage, only_input=only_input)
        try:
            pairs = frozenset((each.member_code, each.quota_id) for each in settled)
        except (AttributeError, TypeError) as exc:
            raise InvalidRequestError("settled must be SettledPairs, such as those of OutcomeLedger") from exc
        self._run = JournalRun(
            file_path(path, "a journal's path"),
            resend_unknown=resend_unknown,
            settled=pairs,
            accept_damage=accept_damage,
            only_input=only_input,
        )

    @safe_repr
    def __repr__(self) -> str:
        return f"Journal({str(self.path)!r}, resend_unknown={self._run.resend_unknown})"

    @property
    def path(self) -> Path:
        """The file."""
        return self._run.path

    def outcomes(self, member_code: Text | None = None) -> AsyncIterator[InviteOutcome]:
        """Yield the latest outcome of each pair of member and quota, once, in the order of the requests.

            async for outcome in journal.outcomes(): ...

        IDs that were in flight when a run ended are `unknown`. All outcomes are `replayed`. The file is read in
        a thread, about a thousand outcomes at a time, so memory does not grow with its size. It is closed at
        the end, or when you drop the iterator.

        Args:
            member_code: Yield the outcomes of this member only.

        Raises:
            JournalError: While iterating: the journal does not exist, is damaged, or is in use.
        """
        code = None if member_code is None else member_code_of(member_code)
        return _Outcomes(_JournalReader(self.path, code))

    async def counts(self) -> dict[OutcomeStatus, int]:
        """Return the number of pairs of member and quota for each status, by their latest outcomes.

        Raises:
            JournalError: The journal does not exist, is damaged, or is in use.
        """
        reader = _JournalReader(self.path)
        counts: dict[OutcomeStatus, int] = dict.fromkeys(get_args(OutcomeStatus), 0)
        while (some := await reader.read(_counted)) is not None:
            for status, count in some.items():
                counts[status] += count
        return counts

    async def to_arrow(self) -> Any:
        """Return what `outcomes` yields as a `pyarrow.Table`, as `BulkInviteResult.to_arrow` does.

        Raises:
            JournalError: As for `outcomes`.
            ImportError: pyarrow is missing, of the extra `panel`.
        """
        return await in_thread(lambda: table_of(outcome_schema(), outcome_batches(self._read())))

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Export the same to another library, by the Arrow C stream interface, a part at a time.

        The journal is open, and in use, until all was read or the stream is dropped. It is read where the
        stream is used: in a service, call that in a thread.
        """
        return stream_of(outcome_schema(), outcome_batches(self._read()), requested_schema)

    def _read(self) -> Iterator[InviteOutcome]:
        file = journal_file(self.path, None)
        file.open()  # here, so that its error is raised as it is
        return _outcomes_in(file)

    async def backup(self, path: str | os.PathLike[str]) -> None:
        """Copy the journal, even while a run uses it. The copy is a complete journal itself.

        Args:
            path: The path of the copy. It must be free, or hold an earlier copy, which is replaced when the new
                copy is complete.

        Raises:
            InvalidRequestError: The path is not a valid path.
            JournalError: The journal does not exist, is damaged, or is in use by another process; or the copy
                cannot be written.
        """
        target = file_path(path, "a journal's path")
        if self._run.file is not None:
            await in_thread(self._run.file.back_up, target)
        else:
            await self._used(lambda file: file.back_up(target))

    async def erase(self, member_code: Text) -> int:
        """Erase all that the journal holds of a member, and return how many requests and responses that were.

        The file is written anew. A run that is resumed with this member in its input would ask for it again.

        Raises:
            JournalError: The journal does not exist, is damaged, or is in use, also by a run of this object.
        """
        return await self._used(lambda file: file.erase(member_code_of(member_code).encode()))

    async def _used(self, use: Callable[[JournalFile], T]) -> T:
        """Open the file for one use, in a thread."""
        file = journal_file(self.path, None)

        def opened() -> T:
            file.open()
            try:
                return use(file)
            finally:
                file.leave()

        try:
            return await in_thread(opened)
        except BaseException:
            # After a cancellation the thread goes on. It closes the file when it finds it abandoned.
            file.abandon()
            raise


def run_of(journal: Journal) -> JournalRun:
    """Return the object that a run works with."""
    return journal._run  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  not for users


class _JournalReader:
    """A reader of a journal without a run, part by part.

    Args:
        path: The file.
        member_code: Read the outcomes of this member only, if given.
    """

    def __init__(self, path: Path, member_code: str | None = None) -> None:
        self._path = path
        self._file: JournalFile | None = journal_file(path, None)
        self._is_open = False
        self._member_code = member_code
        self._row = 0

    async def read(self, make: Callable[[list[JournaledRequest], Path], T]) -> T | None:
        """Call `make` with the next requests, in a thread, and return its result; None after the last request.

        After a cancellation this can be called again, and nothing is lost. The file is closed at the end, or
        when the reader is dropped.
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
            # After a cancellation an open file is kept, and the next call reads the same requests again. If it
            # was still being opened, the thread closes it when it finds it abandoned, and the next call opens
            # it anew. Without that, the next call would say that the journal is at its end.
            if not self._is_open or isinstance(exc, Exception):
                self._file = None if isinstance(exc, Exception) else journal_file(self._path, None)
                file.abandon()
            raise
        if found is None:
            self._file = None
            await in_thread(file.leave)
            return None
        # Only now: a cancelled call must not skip its requests.
        self._row = found[0]
        return found[1]

    def _made(
        self, file: JournalFile, make: Callable[[list[JournaledRequest], Path], T]
    ) -> tuple[int, T] | None:
        requests = file.requests(self._row, None if self._member_code is None else self._member_code.encode())
        return (requests[-1].row, make(requests, file.path)) if requests else None


class _Outcomes:
    """See `Journal.outcomes`. A generator would keep the file open until the event loop closed it."""

    def __init__(self, reader: _JournalReader) -> None:
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


def _outcomes_in(file: JournalFile) -> Iterator[InviteOutcome]:
    """Yield the outcomes of an open file, and close it."""
    row = 0
    try:
        while requests := file.requests(row, None):
            row = requests[-1].row
            yield from _read(requests, file.path)
    finally:
        file.leave()


def _read(requests: Iterable[JournaledRequest], path: Path) -> list[InviteOutcome]:
    return [
        outcome
        for request in requests
        for outcome in outcomes_of(request.member_code.decode(), request.lines, path, replayed=True)
    ]


def _counted(requests: Iterable[JournaledRequest], _path: Path) -> Counter[OutcomeStatus]:
    return Counter(status_of(line) for request in requests for line in request.lines.values())
