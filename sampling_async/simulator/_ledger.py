"""The ledger: every invite the service has made and every request that reached it.

A client's report is checked against it, and the verdict says what is wrong.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, get_args, overload

from attrs import define, field, frozen

from sampling_async import Endpoint

if TYPE_CHECKING:
    from sampling_async.simulator._live import LiveQuota


@frozen
class LedgerEntry:
    """One invite of the ledger.

    `sequence_number` is its place in the ledger, and `request_number` that of its request (see
    `RequestRecord.number`), both from 0. `url` is different for every invite. `endpoint` is `bulk_invite` or
    `generate_invite`.
    """

    sequence_number: int
    panel_guid: str
    member_code: str
    quota_id: int
    survey_id: int
    wave_id: int
    endpoint: Endpoint
    url: str
    request_number: int


@frozen
class RequestRecord:
    """One request that reached the service.

    Attributes:
        number: The place of the request in the order of arrival, from 0. Requests no longer kept count too.
        member_code: The member that the request named, or None.
        status: The HTTP status of the response; None if the connection was cut before it.
        is_processed: False if a fault kept the request from having any effect.
        time: When the request arrived: seconds of the simulator's clock since the simulator was made.
    """

    number: int
    endpoint: Endpoint
    member_code: str | None
    # Quota IDs and headers are kept in compact form; the properties below convert them when they are read.
    _quota_ids: array[int] = field(alias="quota_ids")
    status: int | None
    is_processed: bool
    time: float = 0.0
    query: Mapping[str, str] = field(factory=dict[str, str], repr=False)
    _headers: Sequence[tuple[bytes, bytes]] = field(default=(), alias="headers", repr=False)

    @property
    def headers(self) -> dict[str, str]:
        """The headers by lower-case name. The value of `api_auth_key` is masked."""
        return {name.decode("latin-1"): value.decode("latin-1") for name, value in self._headers}

    @property
    def quota_ids(self) -> tuple[int, ...]:
        """The quota IDs that the request named, in its order."""
        return tuple(self._quota_ids)


class Requests(tuple[RequestRecord, ...]):
    """The latest requests, oldest first. Call it to select some of them.

    sim.ledger.requests[-1]
    sim.ledger.requests(endpoint="bulk_invite", status=503)
    """

    __slots__ = ()

    def __call__(
        self,
        *,
        endpoint: Endpoint | None = None,
        member_code: str | None = None,
        quota_id: int | None = None,
        status: int | None = None,
    ) -> Requests:
        """Return the requests that fit all given arguments; `quota_id` is one that they named among others.

        Raises:
            ValueError: There is no such endpoint.
        """
        if endpoint is not None and endpoint not in get_args(Endpoint):
            raise ValueError(
                f"there is no endpoint {endpoint!r}; the endpoints are {', '.join(get_args(Endpoint))}"
            )
        # In the sets, None stands for an argument that was not given.
        return Requests(
            record
            for record in self
            if endpoint in {None, record.endpoint}
            and member_code in {None, record.member_code}
            and status in {None, record.status}
            and (quota_id is None or quota_id in record.quota_ids)
        )


class Outcome(Protocol):
    """The part of a client's outcome that the check reads; `sampling_async.InviteOutcome` has all of it."""

    @property
    def member_code(self) -> str: ...

    @property
    def quota_id(self) -> int: ...

    @property
    def status(self) -> str: ...

    @property
    def invite(self) -> Any: ...  # None, or an invite with its `url`


@frozen
class Lie:
    """An outcome that the ledger contradicts, with the reason."""

    outcome: Outcome
    reason: str


@frozen
class Verdict:
    """The result of checking a client's outcomes against the ledger.

    A pair is a member code with a quota ID. An invite of the ledger is *accounted for* if an `invited` outcome
    of its pair has its URL.

    Attributes:
        lies: Outcomes that are false. Either the outcome is `invited`, and the ledger does not hold its invite
            (by URL) for the pair. Or it is `rejected` or `not_sent`, and the ledger holds an invite of the pair
            that no outcome accounts for, while no outcome of the pair is `unknown`.
        unread: Invites that are not accounted for, whose pair has an `unknown` outcome: the invites exist, and
            nobody has read them. This is no fault of the client.
        unexplained: Invites that are not accounted for, whose pair has no `unknown`, `rejected` or `not_sent`
            outcome: the client does not say what became of them.
        lost: `unknown` outcomes of pairs without an invite in the ledger: the request had no effect, or the
            service rejected it. This is no fault of the client.
    """

    lies: tuple[Lie, ...] = ()
    unread: tuple[LedgerEntry, ...] = ()
    unexplained: tuple[LedgerEntry, ...] = ()
    lost: tuple[Outcome, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there are no lies and nothing is unexplained."""
        return not (self.lies or self.unexplained)

    def __str__(self) -> str:
        head = (
            f"{'ok' if self.ok else 'NOT ok'}: {len(self.lies)} lies, {len(self.unexplained)} unexplained, "
            f"{len(self.unread)} unread, {len(self.lost)} lost"
        )
        lies = (f"  quota {lie.outcome.quota_id}, {lie.outcome.status}: {lie.reason}" for lie in self.lies[:10])
        entries = (
            f"  invite {e.sequence_number} to quota {e.quota_id} unexplained" for e in self.unexplained[:10]
        )
        return "\n".join((head, *lies, *entries))


@define
class _PairAccount:
    """The facts about a pair: its invites by URL, and the client's outcomes."""

    entries: dict[str, LedgerEntry] = field(factory=dict[str, LedgerEntry])
    # Whether an `unknown` outcome of the pair admits that an invite may exist.
    is_admitted: bool = False
    denials: list[Outcome] = field(factory=list[Outcome])
    open_urls: set[str] = field(factory=set[str])


_Accounts: TypeAlias = dict[tuple[str, int], _PairAccount]


def verdict(entries: Iterable[LedgerEntry], outcomes: Iterable[Outcome]) -> Verdict:
    """Check outcomes against the ledger's entries. Outcomes that the ledger confirms take no memory."""
    accounts: _Accounts = {}
    for entry in entries:
        account = accounts.setdefault((entry.member_code, entry.quota_id), _PairAccount())
        account.entries[entry.url] = entry
        account.open_urls.add(entry.url)
    lies: list[Lie] = []
    lost: list[Outcome] = []
    for outcome in outcomes:
        _enter(outcome, accounts, lies, lost)
    unread: list[LedgerEntry] = []
    unexplained: list[LedgerEntry] = []
    for account in accounts.values():
        left = [entry for url, entry in account.entries.items() if url in account.open_urls]
        # One `unknown` outcome admits all open invites of its pair, so the denials beside it are no lies.
        if account.is_admitted:
            unread += left
        elif left and account.denials:
            reason = "the ledger holds an invite that no outcome accounts for"
            lies += [Lie(denial, reason) for denial in account.denials]
        else:
            unexplained += left
    return Verdict(tuple(lies), tuple(unread), tuple(unexplained), tuple(lost))


def _enter(outcome: Outcome, accounts: _Accounts, lies: list[Lie], lost: list[Outcome]) -> None:
    account = accounts.get((outcome.member_code, outcome.quota_id))
    match outcome.status:
        case "invited":
            url = outcome.invite.url if outcome.invite else None
            if account is None or url not in account.entries:
                lies.append(Lie(outcome, "the ledger holds no such invite of this member to this quota"))
            else:
                account.open_urls.discard(url)
        case "unknown":
            if account is None:
                lost.append(outcome)
            else:
                account.is_admitted = True
        case "rejected" | "not_sent":
            # Judged at the end only: another outcome of the pair may account for the invite.
            if account is not None:
                account.denials.append(outcome)
        case other:
            raise ValueError(f"outcome status {other!r}: must be invited, rejected, not_sent or unknown")


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
        """Check a client's outcomes against the ledger; the usual test is `assert verdict.ok, verdict`.

        The outcomes are everything that a client has reported since the simulator was made. Each has
        `member_code`, `quota_id`, `status` and `invite`. With `panel_guid`, only the invites of this panel are
        checked, which is needed if panels share member codes.

        Raises:
            KeyError: There is no such panel.
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

    def record_request(self, record: RequestRecord) -> None:
        self._requests.append(record)

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
