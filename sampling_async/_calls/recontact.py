"""Recontact lists: read page by page with a cursor, or with the next page read in advance."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Self, SupportsIndex

from attrs import evolve

from sampling_async._contract.checks import whole_number
from sampling_async._contract.errors import PagingError
from sampling_async._contract.timing import explain_like
from sampling_async._pacing.background import ReadAhead
from sampling_async._protocol.requests import cursor_of, quota_id_of, recontact_members

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator
    from types import TracebackType

    from sampling_async._calls.call import Caller
    from sampling_async._contract.checks import Text
    from sampling_async._contract.records import RecontactMembers
    from sampling_async._pacing.gate import Permit


class PageReader:
    """A reader of a recontact list, page by page. `permit` returns a new permit for each call."""

    def __init__(
        self,
        caller: Caller,
        panel_guid: str,
        quota_id: SupportsIndex,
        *,
        max_results: int | None,
        after: Text | None,
        permit: Callable[[], Permit],
    ) -> None:
        if max_results is not None:
            whole_number(max_results, "max_results", most=2**31 - 1)
        self._caller = caller
        self._panel_guid = panel_guid
        self._quota_id = quota_id_of(quota_id)
        self._max_results = max_results
        self._cursor = Cursor(None if after is None else cursor_of(after))
        self._permit = permit

    @property
    def done(self) -> bool:
        return self._cursor.done

    async def read(self) -> RecontactMembers:
        call = recontact_members(
            self._panel_guid, self._quota_id, max_results=self._max_results, after=self._cursor.after
        )
        track, rest = self._caller.track(call.endpoint), list["RecontactMembers"]()
        try:
            page = await self._caller.call(
                call, self._permit(), track, check=lambda page: rest.append(self._cursor.advance(page))
            )
        except PagingError as exc:
            exc.attempts = track.attempts
            raise
        # `rest` may be another object, without codes that the user has.
        explain_like(rest[0], page)
        return rest[0]


class RecontactStream:
    """Member codes of a recontact quota, read one page ahead: see `stream_recontact_members`.

    Attributes:
        last_taken: The last member code that you received, to resume with `after=`. Before the first one, it is
            the `after` that was given.
    """

    def __init__(self, pages: AsyncGenerator[RecontactMembers, None], after: str | None = None) -> None:
        self.last_taken = after
        self._pages = ReadAhead(pages)
        self._codes: deque[Iterator[str]] = deque()

    async def __aenter__(self) -> Self:
        await self._pages.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._pages.__aexit__(exc_type, exc, traceback)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        while (code := self.next_now()) is None:
            if not await self.fill():
                raise StopAsyncIteration
        return code

    def next_now(self) -> str | None:
        """Return the next code, or None if `fill` is needed; for other parts of this package."""
        while self._codes:
            # Take one code, or fall through at the end of the page. It is noted before it is returned.
            for code in self._codes[0]:
                self.last_taken = code
                return code
            self._codes.popleft()
        return None

    async def fill(self) -> bool:
        """Wait for the next page, for `next_now`. Return False at the end."""
        page = await self._pages.next()
        if page is None:
            return False
        self._codes.append(iter(page.member_codes))
        return True


class Cursor:
    """The position of a reader in a recontact list, with a check that the list advances.

    Codes are only compared for equality, because the service sorts them by its own collation.
    """

    def __init__(self, after: str | None = None) -> None:
        self.after = after
        self.done = False
        self._seen = {after}

    def advance(self, page: RecontactMembers) -> RecontactMembers:
        """Move behind a page, and return it without a first code that repeats the end of the page before.

        Raise a PagingError if more pages follow, and this page is empty or ends as an earlier one did.
        """
        # Example: after "b", the pages [b c d] and [c d] are both valid and both give [c d].
        if self.after is not None and page.member_codes[:1] == (self.after,):
            page = evolve(page, member_codes=page.member_codes[1:])
        codes = page.member_codes
        if not page.has_additional_members:
            self.done = True
        elif not codes or codes[-1] in self._seen:
            # A page that ends like any earlier page would make the reader go round in a circle.
            fault = "ends with the same code as an earlier page" if codes else "is empty"
            raise PagingError(
                f"the page {fault}, but the service announces more members; resume later with "
                "after=error.cursor",
                cursor=self.after,
                member_codes=codes,
            )
        self.after = codes[-1] if codes else self.after
        self._seen.add(self.after)
        return page
