"""The five requests of the contract as values, the checks of their arguments, and chunks of quota IDs.

All functions are plain functions without I/O, so they are tested without an event loop.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache, partial
from itertools import repeat
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Self, SupportsIndex, TypeVar
from urllib.parse import quote

from attrs import field, frozen

from sampling_async._contract.checks import require_flags, text_of
from sampling_async._contract.errors import Endpoint, InvalidRequestError
from sampling_async._contract.exchange import Call
from sampling_async._contract.records import (
    INT64_MAX,
    Invite,
    Quotas,
    RecontactMembers,
    first,
    hidden,
    safe_repr,
)
from sampling_async._contract.settings import PartnerSettings
from sampling_async._contract.structs import value
from sampling_async._json.converter import from_json, write
from sampling_async._json.fast import WireRequest, positive_ints
from sampling_async._json.inventory import read_inventory
from sampling_async._protocol.bulk_reply import BulkReply, read_bulk, read_invite

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sampling_async._contract.checks import Text

MAX_QUOTA_IDS: Final = 100
"""The most quota IDs in one bulk invite (section "Limits")."""

_NONE: Final[Mapping[int, int]] = MappingProxyType({})


@value
class Chunk:
    """Distinct quota IDs of one member for one bulk request."""

    member_code: str = field(repr=hidden)
    quota_ids: tuple[int, ...]
    # How many times the caller gave an ID, for IDs given more than once. It is sent once, but gets one outcome
    # for each time, which is called a *place*.
    repeated: Mapping[int, int] = _NONE
    asked_before: bool = False  # an earlier request with these IDs may have made invites

    @classmethod
    def of(cls, member_code: str, places: Mapping[int, int], *, asked_before: bool = False) -> Self:
        repeated = {quota_id: times for quota_id, times in places.items() if times > 1}
        return cls(member_code, tuple(places), repeated or _NONE, asked_before)

    @property
    def places(self) -> int:
        if not self.repeated:
            return len(self.quota_ids)
        return len(self.quota_ids) + sum(self.repeated.values()) - len(self.repeated)

    def each_place(self) -> Iterator[int]:
        if not self.repeated:
            return iter(self.quota_ids)
        return (each for id_ in self.quota_ids for each in repeat(id_, self.repeated.get(id_, 1)))

    def part(self, start: int, end: int) -> Chunk:
        quota_ids, repeated = self.quota_ids[start:end], self.repeated
        if repeated:
            repeated = {id_: repeated[id_] for id_ in quota_ids if id_ in repeated} or _NONE
        return Chunk(self.member_code, quota_ids, repeated, self.asked_before)


def cut(chunk: Chunk, size: int) -> Iterator[Chunk]:
    """Cut a chunk into chunks of at most `size` quota IDs: 250 IDs into 100, 100 and 50, with a size of 100."""
    for start in range(0, len(chunk.quota_ids), size):
        yield chunk.part(start, start + size)


T = TypeVar("T")


_SAMPLES: Final = "/IPExternalSamplingService/ExternalSample"
_SETTINGS: Final = "/IntegratedPanelService/api/Settings"


# --- Arguments ---------------------------------------------------------------------------------------------


def quota_id_of(value: SupportsIndex) -> int:
    # `operator.index` also takes whole numbers of NumPy and the like. `True` is an int, but no quota ID.
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except Exception:  # noqa: BLE001  __index__ of a foreign class may raise anything
        number = None
    if number is None or not 1 <= number <= INT64_MAX:
        try:
            shown = repr(value) if isinstance(value, int | float | bool) else f"a {type(value).__name__}"
        except ValueError:  # Python writes no number of more than 4300 digits
            shown = "a larger one"
        raise InvalidRequestError(
            f"a quota ID must be a whole number from 1 to 2**63 - 1, not {shown[:40]}; take it from "
            "get_quotas()"
        )
    return number


def member_code_of(value: Text) -> str:
    """Return a member code, after checking that it can be a segment of a path. No error repeats it.

    HTTP libraries remove the segments `.` and `..`, even encoded.
    """
    value = value if isinstance(value, str) else text_of(value)
    if not isinstance(value, str):
        raise InvalidRequestError(f"a member code must be a str, not {type(value).__name__}")
    if value in {"", ".", ".."}:
        raise InvalidRequestError("a member code cannot be empty, '.' or '..': a URL path would drop it")
    if not value.isprintable() and re.search(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]", value):
        raise InvalidRequestError("a member code cannot hold control characters or lone surrogates")
    return value


def cursor_of(value: Text) -> str:
    """Return a member code, after checking that it can be the value of a query. No error repeats it."""
    value = text_of(value)
    if not isinstance(value, str) or not value or re.search(r"[\ud800-\udfff]", value):
        raise InvalidRequestError(
            "after must be a member code: a str that is not empty, without lone surrogates"
        )
    return value


def _quota_ids_of(values: Iterable[SupportsIndex]) -> tuple[int, ...]:
    # Bytes are numbers too, and would be requested as IDs.
    if not isinstance(values, Iterable) or isinstance(values, bytes | bytearray | memoryview):
        raise InvalidRequestError(
            "quota_ids must be an iterable of quota IDs; only stream_bulk_invite takes an async iterable"
        )
    given: tuple[Any, ...] = tuple(values)
    # Nearly always all IDs are valid ints, which are checked in one loop in C.
    return positive_ints(given) or tuple(quota_id_of(value) for value in given)


@frozen
class InviteRequest:
    """One member and the quota IDs to request invites for. Both are checked on creation.

    Raises:
        InvalidRequestError: The member code or a quota ID cannot be sent.
    """

    member_code: str = field(converter=member_code_of, repr=hidden)
    quota_ids: tuple[int, ...] = field(converter=_quota_ids_of, repr=first)


# The class itself is frozen, and attrs has made this method.
InviteRequest.__repr__ = safe_repr(InviteRequest.__repr__)  # type: ignore[method-assign]


def request_of(member_code: str, quota_ids: tuple[int, ...]) -> InviteRequest:
    # Skips the constructor, which would check them again.
    request: InviteRequest = object.__new__(InviteRequest)
    object.__setattr__(request, "member_code", member_code)
    object.__setattr__(request, "quota_ids", quota_ids)
    return request


TEMPLATES: Final[dict[Endpoint, tuple[str, str]]] = {
    "get_quotas": ("GET", f"{_SAMPLES}/{{PanelGUID}}/Quotas"),
    "bulk_invite": ("POST", f"{_SAMPLES}/{{PanelGUID}}/{{MemberCode}}/Invites"),
    "generate_invite": ("GET", f"{_SAMPLES}/{{PanelGUID}}/{{MemberCode}}/Invite/{{QuotaID}}"),
    "get_settings": ("GET", _SETTINGS),
    "recontact_members": ("GET", f"{_SAMPLES}/{{PanelGUID}}/Recontact/{{QuotaID}}/MemberCodes"),
}
"""Method and path of each endpoint, with the names of the contract in place of values."""


# --- The five requests -------------------------------------------------------------------------------------


def get_quotas(panel: str, *, include_routables: bool, strict: bool = False) -> Call[Quotas]:
    """Build Get Quotas (endpoint 1). A survey that lacks a value is refused if `strict`, or left out."""
    require_flags(include_routables=include_routables, strict=strict)
    flag = "true" if include_routables else "false"
    target = f"{_SAMPLES}/{panel}/Quotas?includeRoutables={flag}"
    return Call(
        "get_quotas",
        "GET",
        target,
        partial(read_inventory, strict=strict),
        private=private_texts(panel, None),
    )


def bulk_invite(panel: str, member_code: str, quota_ids: Sequence[int]) -> Call[BulkReply]:
    """Build Bulk Invite (endpoint 2) for at most 100 distinct quota IDs."""
    assert 0 < len(quota_ids) <= MAX_QUOTA_IDS
    return Call(
        "bulk_invite",
        "POST",
        f"{_SAMPLES}/{panel}/{_segment(member_code)}/Invites",
        partial(read_bulk, member_code, quota_ids),
        body=write(WireRequest(quota_ids)),
        quota_ids=len(quota_ids),
        private=private_texts(panel, member_code),
    )


def generate_invite(panel: str, member_code: str, quota_id: int) -> Call[Invite]:
    """Build Generate Invite (endpoint 3)."""
    return Call(
        "generate_invite",
        "GET",
        f"{_SAMPLES}/{panel}/{_segment(member_code)}/Invite/{quota_id}",
        partial(read_invite, quota_id),
        quota_ids=1,
        private=private_texts(panel, member_code),
    )


def get_settings(panel: str) -> Call[PartnerSettings]:
    """Build Get Settings (endpoint 4)."""
    return Call(
        "get_settings",
        "GET",
        f"{_SETTINGS}?partnerGUID={panel}",
        partial(from_json, PartnerSettings),
        private=private_texts(panel, None),
    )


def recontact_members(
    panel: str, quota_id: int, *, max_results: int | None, after: str | None
) -> Call[RecontactMembers]:
    """Build Get Recontact Members For Quota (endpoint 5), for the page that starts after the code `after`."""
    query = [] if max_results is None else [f"maxResults={max_results}"]
    if after is not None:
        query.append(f"lastMemberCodeReceived={_segment(after)}")
    path = f"{_SAMPLES}/{panel}/Recontact/{quota_id}/MemberCodes"
    return Call(
        "recontact_members",
        "GET",
        f"{path}?{'&'.join(query)}" if query else path,
        partial(from_json, RecontactMembers),
        private=private_texts(panel, after),
    )


def private_texts(panel: str, member_code: str | None) -> tuple[str, ...]:
    """Return what no error and no header may repeat: the panel, and the member code, plain and encoded."""
    panels = (panel, panel.replace("-", ""))
    return panels if member_code is None else (*panels, member_code, _segment(member_code))


@lru_cache(maxsize=64)
def _segment(text: str) -> str:
    return quote(text, safe="")
