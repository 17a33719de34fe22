"""The ledger: every invite the service has made and every request that reached it.

A client's report is checked against it.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from threading import Lock
from typing import TYPE_CHECKING, TypeAlias, overload

from sampling_async.simulator._records import LedgerEntry, RequestRecord, Requests
from sampling_async.simulator._verdict import Outcome, Verdict, verdict

if TYPE_CHECKING:
    from sampling_async._contract.errors import Endpoint
    from sampling_async.simulator._live import LiveQuota

Pair: TypeAlias = tuple[str, int]
"""A member code and a quota ID."""


class Ledger:
    """Invites and requests, stored in columns: a million invites take about 70 MB."""

    def __init__(self, seed: int | str, *, keep_requests: int) -> None:
        self._seed = seed
        self._known_panels: set[str] = set()
        self._panel_guids: list[str] = []
        self._member_codes: list[str] = []
        self._endpoints: list[Endpoint] = []
        # Four numbers for every invite, one after another: quota ID, survey ID, wave ID and request number.
        self._numbers = array("q")
        self._lock = Lock()  # of the counts below
        self._pairs: Counter[Pair] = Counter()
        self._counted = 0  # how many invites are in `_pairs`
        self._requests: deque[RequestRecord] = deque(maxlen=keep_requests)
        self._request_count = 0

    def __repr__(self) -> str:
        return f"<Ledger invites={len(self._member_codes)} requests={self._request_count}>"

    @property
    def invites(self) -> Sequence[LedgerEntry]:
        """All invites in the order in which they were made: a live view that creates entries on demand."""
        return _Invites(self)

    @property
    def requests(self) -> Requests:
        """The latest requests, as many as the simulator keeps. Call the result to select some of them."""
        return Requests(self._requests)

    @property
    def request_count(self) -> int:
        """The number of requests that have reached the service, including those no longer kept."""
        return self._request_count

    def count(self, member_code: str, quota_id: int) -> int:
        """Return the number of invites that a member has to a quota."""
        with self._lock:
            return self._up_to_date()[member_code, quota_id]

    def by_pair(self) -> Counter[Pair]:
        """Return the number of invites for every member code and quota ID."""
        with self._lock:
            return self._up_to_date().copy()

    def check(self, outcomes: Iterable[Outcome], *, panel_guid: str | None = None) -> Verdict:
        """Check a client's outcomes against the ledger.

        Args:
            outcomes: Everything that a client has reported since the simulator was made: any number of
                outcomes, each with `member_code`, `quota_id`, `status` and `invite`.
            panel_guid: Check only the invites of this panel; needed if panels share member codes.

        Raises:
            KeyError: There is no such panel.

        Returns:
            The verdict; see `Verdict` for its parts. The usual test is `assert verdict.ok, verdict`.
        """
        if panel_guid is None:
            return verdict(self.invites, outcomes)
        wanted = panel_guid.lower()
        if wanted not in self._known_panels:
            raise KeyError(f"there is no panel {panel_guid!r}; sim.panels lists the panels")
        return verdict((entry for entry in self.invites if entry.panel_guid.lower() == wanted), outcomes)

    def know_panel(self, panel_guid: str) -> None:
        """Register a panel, so that `check` accepts its Guid."""
        self._known_panels.add(panel_guid.lower())

    def open_request(self) -> int:
        """Count a request that has just arrived, and return its number."""
        self._request_count += 1
        return self._request_count - 1

    def record_request(
        self,
        number: int,
        endpoint: Endpoint,
        *,
        member_code: str | None,
        quota_ids: Iterable[int],
        status: int | None,
        is_processed: bool,
        time: float = 0.0,
        query: Mapping[str, str] | None = None,
        headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        """Record a request and its result, if requests are kept."""
        if self._requests.maxlen:
            kept, masked = array("q", quota_ids), tuple(map(_masked, headers))
            self._requests.append(
                RequestRecord(
                    number, endpoint, member_code, kept, status, is_processed, time, query or {}, masked
                )
            )

    def record_invite(
        self, quota: LiveQuota, *, panel_guid: str, member_code: str, endpoint: Endpoint, request_number: int
    ) -> str:
        """Record an invite and return its URL."""
        survey = quota.survey.survey
        quota_id = quota.quota.quota_id
        self._numbers.extend((quota_id, survey.survey_id, survey.wave_id, request_number))
        self._panel_guids.append(panel_guid)
        self._endpoints.append(endpoint)
        # Member codes last: other threads take their number as the number of complete entries.
        self._member_codes.append(member_code)
        return self._url(len(self._member_codes) - 1, quota_id)

    def entry(self, sequence_number: int) -> LedgerEntry:
        """Return the invite at a place in the ledger."""
        first = 4 * sequence_number
        quota_id, survey_id, wave_id, request_number = self._numbers[first : first + 4]
        return LedgerEntry(
            sequence_number=sequence_number,
            panel_guid=self._panel_guids[sequence_number],
            member_code=self._member_codes[sequence_number],
            quota_id=quota_id,
            survey_id=survey_id,
            wave_id=wave_id,
            endpoint=self._endpoints[sequence_number],
            url=self._url(sequence_number, quota_id),
            request_number=request_number,
        )

    def size(self) -> int:
        """Return the number of invites."""
        return len(self._member_codes)

    def _url(self, sequence_number: int, quota_id: int) -> str:
        """Return the link of an invite. It is computed from the invite's number, so it need not be stored."""
        token = blake2b(f"{self._seed}/{sequence_number}".encode(), digest_size=12).hexdigest()
        return f"https://entry.example/survey?invite={token}&quota={quota_id}"

    def _up_to_date(self) -> Counter[Pair]:
        """Return the counts by pair, after counting the invites that were added since the last call.

        Call it with the lock: otherwise two threads would count the same invites twice.
        """
        start, end = self._counted, len(self._member_codes)
        if start < end:
            # Every fourth number is a quota ID: for the invites 2 and 3 these are the numbers 8 and 12.
            self._pairs.update(
                zip(self._member_codes[start:end], self._numbers[4 * start : 4 * end : 4], strict=True)
            )
            self._counted = end
        return self._pairs


def _masked(header: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    return (header[0], b"<hidden>") if header[0] == b"api_auth_key" else header


class _Invites(Sequence[LedgerEntry]):
    __slots__ = ("_ledger",)

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def __repr__(self) -> str:
        return f"<{len(self)} invites>"

    def __len__(self) -> int:
        return self._ledger.size()

    def __iter__(self) -> Iterator[LedgerEntry]:
        return (self._ledger.entry(number) for number in range(len(self)))

    @overload
    def __getitem__(self, index: int) -> LedgerEntry: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[LedgerEntry, ...]: ...
    def __getitem__(self, index: int | slice) -> LedgerEntry | tuple[LedgerEntry, ...]:
        numbers = range(len(self))[index]
        if isinstance(numbers, int):
            return self._ledger.entry(numbers)
        return tuple(self._ledger.entry(number) for number in numbers)
