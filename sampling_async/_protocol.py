"""The service's protocol without any I/O: requests as values, chunks planned, pages followed.

Everything here is a plain function of its arguments, so it is tested without an event loop and says in one
place what is asked of the service and what its answers are taken to mean.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, SupportsIndex, TypeVar
from urllib.parse import quote

from attrs import evolve, field, frozen

from sampling_async._codec import from_json, plain_json
from sampling_async._errors import (
    Endpoint,
    InvalidRequestError,
    PagingError,
)
from sampling_async._models import Invite, Quotas, RecontactMembers, hidden
from sampling_async._replies import BulkAnswer, read_bulk, read_invite
from sampling_async._settings import PartnerSettings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

T = TypeVar("T")

MAX_QUOTA_IDS: Final = 100
"""Quota IDs a bulk invite takes at most (section "Limits")."""

_SAMPLES: Final = "/IPExternalSamplingService/ExternalSample"
_SETTINGS: Final = "/IntegratedPanelService/api/Settings"
_INT64_MAX: Final = 2**63 - 1


@frozen
class Call(Generic[T]):
    """One request, ready for the wire, and how to read the body of its 200.

    Attributes:
        endpoint: Which of the five endpoints it goes to.
        method: GET, or POST for a bulk invite.
        target: Path and query below the base address, percent-encoded. It may hold a member code.
        read: Turns the body of a 200 into what the caller asked for, or raises `DecodeError`.
        body: The JSON body, or None.
        quota_ids: How many quota IDs it asks about; time limits grow with them.
        private: Texts that must not be repeated from an answer.
    """

    endpoint: Endpoint
    method: Literal["GET", "POST"]
    target: str = field(repr=hidden)
    read: Callable[[bytes], T] = field(repr=False)
    body: bytes | None = field(default=None, repr=False)
    quota_ids: int = 0
    private: tuple[str, ...] = field(default=(), repr=False)

    @property
    def has_effect(self) -> bool:
        """Whether the service makes something when asked: an invite."""
        return self.endpoint in {"bulk_invite", "generate_invite"}


# --- What may be asked -------------------------------------------------------------------------------------


def quota_id_of(value: SupportsIndex) -> int:
    """Return a quota ID as an int.

    Raises:
        InvalidRequestError: It is not a whole number from 1 to 2**63 - 1.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except Exception:  # noqa: BLE001  of somebody's __index__
        number = None
    if number is None or not 1 <= number <= _INT64_MAX:
        shown = repr(value) if isinstance(value, int | float | bool) else f"a {type(value).__name__}"
        raise InvalidRequestError(
            f"a quota ID is a whole number from 1 to 2**63 - 1, not {shown[:40]}; take it from get_quotas()"
        )
    return number


def member_code_of(value: str) -> str:
    """Return a member code that can be a path segment.

    Raises:
        InvalidRequestError: It is empty, `.` or `..` (HTTP libraries remove such segments, even encoded), or
            holds control characters or half of a surrogate pair. The text does not repeat it.
    """
    if not isinstance(value, str):
        raise InvalidRequestError(f"a member code is a str, not {type(value).__name__}")
    if value in {"", ".", ".."}:
        raise InvalidRequestError("a member code cannot be empty, '.' or '..': the path would lose it")
    if not value.isprintable() and re.search(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]", value):
        raise InvalidRequestError("a member code cannot hold control characters or lone surrogates")
    return value


def _quota_ids_of(values: Iterable[SupportsIndex]) -> tuple[int, ...]:
    if not isinstance(values, Iterable):
        raise InvalidRequestError(
            "quota_ids is an iterable of quota IDs; only stream_bulk_invite takes an async one"
        )
    given: tuple[Any, ...] = tuple(values)
    if set(map(type, given)) == {int} and min(given) > 0 and max(given) <= _INT64_MAX:  # as is nearly always so
        return given
    return tuple(quota_id_of(value) for value in given)


@frozen
class InviteRequest:
    """One member and the quotas to ask invites for; checked when made.

    Raises:
        InvalidRequestError: The member code or a quota ID cannot be sent.
    """

    member_code: str = field(converter=member_code_of, repr=hidden)
    quota_ids: tuple[int, ...] = field(converter=_quota_ids_of)


def request_of(member_code: str, quota_ids: tuple[int, ...]) -> InviteRequest:
    """Make a request of what was checked already."""
    request: InviteRequest = object.__new__(InviteRequest)
    object.__setattr__(request, "member_code", member_code)
    object.__setattr__(request, "quota_ids", quota_ids)
    return request


# --- The five requests -------------------------------------------------------------------------------------


def get_quotas(panel: str, *, include_routables: bool) -> Call[Quotas]:
    """Build Get Quotas (endpoint 1)."""
    flag = "true" if include_routables else "false"
    target = f"{_SAMPLES}/{panel}/Quotas?includeRoutables={flag}"
    return Call("get_quotas", "GET", target, partial(from_json, Quotas))


def bulk_invite(panel: str, member_code: str, quota_ids: Sequence[int]) -> Call[BulkAnswer]:
    """Build Bulk Invite (endpoint 2) for at most 100 distinct quota IDs."""
    assert 0 < len(quota_ids) <= MAX_QUOTA_IDS
    return Call(
        "bulk_invite",
        "POST",
        f"{_SAMPLES}/{panel}/{_segment(member_code)}/Invites",
        partial(read_bulk, member_code, quota_ids),
        body=plain_json({"QuotaIDs": quota_ids}),
        quota_ids=len(quota_ids),
        private=(member_code, _segment(member_code)),
    )


def generate_invite(panel: str, member_code: str, quota_id: int) -> Call[Invite]:
    """Build Generate Invite (endpoint 3)."""
    return Call(
        "generate_invite",
        "GET",
        f"{_SAMPLES}/{panel}/{_segment(member_code)}/Invite/{quota_id}",
        partial(read_invite, quota_id),
        quota_ids=1,
        private=(member_code, _segment(member_code)),
    )


def get_settings(panel: str) -> Call[PartnerSettings]:
    """Build Get Settings (endpoint 4)."""
    return Call("get_settings", "GET", f"{_SETTINGS}?partnerGUID={panel}", partial(from_json, PartnerSettings))


def recontact_members(
    panel: str, quota_id: int, *, max_results: int | None, after: str | None
) -> Call[RecontactMembers]:
    """Build Get Recontact Members For Quota (endpoint 5): the page that starts after the code `after`."""
    query = [] if max_results is None else [f"maxResults={max_results}"]
    if after is not None:
        query.append(f"lastMemberCodeReceived={_segment(after)}")
    path = f"{_SAMPLES}/{panel}/Recontact/{quota_id}/MemberCodes"
    return Call(
        "recontact_members",
        "GET",
        f"{path}?{'&'.join(query)}" if query else path,
        partial(from_json, RecontactMembers),
        private=() if after is None else (after, _segment(after)),
    )


@lru_cache(maxsize=64)
def _segment(text: str) -> str:
    return quote(text, safe="")


# --- Chunks -----------------------------------------------------------------------------------------------


@frozen
class Chunk:
    """Distinct quota IDs of one member for one bulk request.

    Attributes:
        member_code: The member.
        places: The quota IDs, each with the number of places it was asked in.
        asked_before: Whether an earlier request about them may have worked.
    """

    member_code: str = field(repr=hidden)
    places: Mapping[int, int]
    asked_before: bool = False

    @property
    def quota_ids(self) -> tuple[int, ...]:
        """The quota IDs, in the order asked."""
        return tuple(self.places)


def plan_chunks(request: InviteRequest, size: int = MAX_QUOTA_IDS) -> Iterator[Chunk]:
    """Cut a request into chunks of `size` distinct quota IDs; a repeated ID is in one chunk only."""
    return cut(Chunk(request.member_code, Counter(request.quota_ids)), size)


def cut(chunk: Chunk, size: int) -> Iterator[Chunk]:
    """Cut a chunk into those of at most `size` quota IDs."""
    places = iter(chunk.places.items())
    while batch := dict(islice(places, size)):
        yield Chunk(chunk.member_code, batch, chunk.asked_before)


# --- Recontact paging --------------------------------------------------------------------------------------


class Cursor:
    """Where a reader stands in a recontact list, and the guard that it gets on.

    Codes are compared for equality only: the service sorts by its own collation.
    """

    __slots__ = ("_seen", "after", "done")

    def __init__(self, after: str | None = None) -> None:
        self.after = after
        self.done = False
        self._seen = {after}

    def advance(self, page: RecontactMembers) -> RecontactMembers:
        """Move past a page, and return it without a first code that was the last one before.

        Raises:
            PagingError: More is announced, but the page is empty or ends where a page has ended before.
        """
        if self.after is not None and page.member_codes[:1] == (self.after,):
            page = evolve(page, member_codes=page.member_codes[1:])
        if page.has_additional_members:
            self._step(page.member_codes)
        else:
            self.done = True
            self.after = page.member_codes[-1] if page.member_codes else self.after
        return page

    def _step(self, codes: tuple[str, ...]) -> None:
        if not codes or codes[-1] in self._seen:
            fault = "ends with a code that ended a page before" if codes else "is empty"
            raise PagingError(
                f"the page {fault}, yet more members are announced; resume later with after=error.cursor",
                cursor=self.after,
                member_codes=codes,
            )
        self.after = codes[-1]
        self._seen.add(self.after)
