"""The ledger: every invite the service has made and every request that reached it.

It is the truth that a client's report is held against.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, TypeAlias, overload

from sampling_async.simulator._records import LedgerEntry, RequestRecord
from sampling_async.simulator._verdict import Outcome, Verdict, verdict

if TYPE_CHECKING:
    from sampling_async._errors import Endpoint
    from sampling_async.simulator._live import LiveQuota

Pair: TypeAlias = tuple[str, int]
"""A member code and a quota ID."""


class Ledger:
    """Invites and requests, in columns: a million invites take some 70 MB."""

    def __init__(self, seed: int | str, *, keep_requests: int) -> None:
        self._seed = seed
        self._known_panels: set[str] = set()
        self._panel_guids: list[str] = []
        self._member_codes: list[str] = []
        self._endpoints: list[Endpoint] = []
        # Quota ID, survey ID, wave ID and request number of every invite, one after the other.
        self._numbers = array("q")
        self._pairs: Counter[Pair] = Counter()
        self._requests: deque[RequestRecord] = deque(maxlen=keep_requests)
        self._request_count = 0

    def __repr__(self) -> str:
        return f"<Ledger invites={len(self._member_codes)} requests={self._request_count}>"

    @property
    def invites(self) -> Sequence[LedgerEntry]:
        """All invites in the order they were made: a live view, whose entries are made on demand."""
        return _Invites(self)

    @property
    def requests(self) -> tuple[RequestRecord, ...]:
        """The latest requests, as many as the simulator was told to keep."""
        return tuple(self._requests)

    @property
    def request_count(self) -> int:
        """How many requests have reached the service, those no longer kept included."""
        return self._request_count

    def count(self, member_code: str, quota_id: int) -> int:
        """Return how many invites a member has to a quota."""
        return self._counted()[member_code, quota_id]

    def by_pair(self) -> Counter[Pair]:
        """Return how many invites there are of every member code and quota ID."""
        return self._counted().copy()

    def check(self, outcomes: Iterable[Outcome], *, panel_guid: str | None = None) -> Verdict:
        """Hold a client's outcomes against the ledger.

        Args:
            outcomes: Everything a client reported since the simulator was made: any number of results, each
                with `member_code`, `quota_id`, `status` and `invite`.
            panel_guid: Look at the invites of this panel only; needed where panels share member codes.

        Raises:
            KeyError: There is no such panel.

        Returns:
            The verdict; `Verdict` says what counts as what. `assert verdict.ok, verdict` is the usual way.
        """
        if panel_guid is None:
            return verdict(self.invites, outcomes)
        wanted = panel_guid.lower()
        if wanted not in self._known_panels:
            raise KeyError(f"no panel {panel_guid!r}: see sim.panels")
        return verdict((entry for entry in self.invites if entry.panel_guid.lower() == wanted), outcomes)

    def know_panel(self, panel_guid: str) -> None:
        """Take note of a panel, whose invites can then be asked for."""
        self._known_panels.add(panel_guid.lower())

    def open_request(self) -> int:
        """Return the number of a request that has just arrived."""
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
    ) -> None:
        """Keep what became of a request."""
        if self._requests.maxlen:
            kept = array("q", quota_ids)
            self._requests.append(RequestRecord(number, endpoint, member_code, kept, status, is_processed))

    def record_invite(
        self, quota: LiveQuota, *, panel_guid: str, member_code: str, endpoint: Endpoint, request_number: int
    ) -> str:
        """Enter an invite and return its URL."""
        survey = quota.survey.survey
        quota_id = quota.quota.quota_id
        self._numbers.extend((quota_id, survey.survey_id, survey.wave_id, request_number))
        self._panel_guids.append(panel_guid)
        self._endpoints.append(endpoint)
        self._member_codes.append(member_code)  # last: its length is what readers in other threads go by
        return self._url(len(self._member_codes) - 1, quota_id)

    def entry(self, sequence_number: int) -> LedgerEntry:
        """Return an invite by its place in the ledger."""
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
        """Return the link of an invite: made from its number, so that it need not be stored."""
        token = blake2b(f"{self._seed}/{sequence_number}".encode(), digest_size=12).hexdigest()
        return f"https://entry.example/survey?invite={token}&quota={quota_id}"

    def _counted(self) -> Counter[Pair]:
        """Return the counts by pair, after counting what came since the last time."""
        start, end = self._pairs.total(), len(self._member_codes)
        if start < end:
            self._pairs.update(
                zip(self._member_codes[start:end], self._numbers[4 * start : 4 * end : 4], strict=True)
            )
        return self._pairs


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
