"""Recontact lists: page after page from a cursor, and one page ahead of who reads."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Self, SupportsIndex

from sampling_async._errors import InvalidRequestError, PagingError
from sampling_async._protocol import Cursor, member_code_of, quota_id_of, recontact_members
from sampling_async._scheduler import ReadAhead
from sampling_async._session import Track

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator
    from types import TracebackType

    from sampling_async._calls import Caller
    from sampling_async._gate import Permit
    from sampling_async._models import RecontactMembers


class PageReader:
    """Reads a recontact list page by page.

    Args:
        caller: Makes the calls.
        panel_guid: The panel.
        quota_id: The quota.
        max_results: Member codes a page, or None for the service's own default.
        after: The last member code already received, if any.
        permit: Makes the permit of a call.

    Raises:
        InvalidRequestError: An argument cannot be sent.
    """

    def __init__(
        self,
        caller: Caller,
        panel_guid: str,
        quota_id: SupportsIndex,
        *,
        max_results: int | None,
        after: str | None,
        permit: Callable[[], Permit],
    ) -> None:
        if max_results is not None and not (type(max_results) is int and max_results > 0):
            raise InvalidRequestError(f"max_results is a whole number above 0, not {max_results!r}")
        self._caller = caller
        self._panel_guid = panel_guid
        self._quota_id = quota_id_of(quota_id)
        self._max_results = max_results
        self._cursor = Cursor(None if after is None else member_code_of(after))
        self._permit = permit

    @property
    def done(self) -> bool:
        """Whether the last page was read."""
        return self._cursor.done

    async def read(self) -> RecontactMembers:
        """Return the next page, and move past it."""
        call = recontact_members(
            self._panel_guid, self._quota_id, max_results=self._max_results, after=self._cursor.after
        )
        track = Track()
        page = await self._caller.run(call, self._permit(), track)
        try:
            return self._cursor.advance(page)
        except PagingError as exc:
            exc.attempts = track.attempts
            raise


class RecontactStream:
    """Member codes of a recontact quota, read one page ahead: see `stream_recontact_members`.

    Attributes:
        last_taken: The last member code handed over, to resume with `after=`; before the first, the one that
            was given as `after`.
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
        while True:
            while self._codes:
                for code in self._codes[0]:
                    self.last_taken = code
                    return code
                self._codes.popleft()
            page = await self._pages.next()
            if page is None:
                raise StopAsyncIteration
            self._codes.append(iter(page.member_codes))
