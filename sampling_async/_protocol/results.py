"""The result of a bulk invite: an outcome for every quota ID, in the caller's order.

Users may keep a million outcomes, and read most of them once or never. So a response is kept in columns: a byte
for each ID, which encodes its result, and the invites. Outcomes are created when they are read. The garbage
collector visits each item of a tuple, but no byte.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, islice
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args, overload

import msgspec
from attrs import evolve, frozen

from sampling_async._contract.checks import count_of
from sampling_async._contract.errors import SamplingError
from sampling_async._contract.frames import ROWS, arrow, batch_of, html_table, stream_of, table_of
from sampling_async._contract.records import Invite
from sampling_async._contract.result_codes import ResultCode
from sampling_async._contract.structs import FrozenStruct, seen_by_attrs
from sampling_async._contract.timing import CallResultInSlots

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

OutcomeStatus: TypeAlias = Literal["invited", "rejected", "not_sent", "unknown"]
"""See `InviteOutcome.status`."""


@seen_by_attrs(hides="member_code")
class InviteOutcome(FrozenStruct, frozen=True):
    """The outcome of one quota ID for one member.

    Attributes:
        member_code: The member; hidden in the repr.
        quota_id: The requested quota ID.
        status: `invited`: the service made an invite. `rejected`: it returned another result code for this ID.
            `not_sent`: no byte was sent, or the whole call was refused without being processed, so it is safe
            to send the ID again. `unknown`: the ID was sent and no usable response came, so an invite may
            exist.
        invite: The invite if `invited`, else None.
        result_code: The service's result code for this ID or for the refused call; None if there was none.
        result: The service's name for the code. Names change, so compare the code.
        error: The failure that caused `not_sent` or `unknown`, or None if there was none.
        anomaly: A description of something unexpected in the response, else None.
        replayed: Whether the outcome came from a journal, which an earlier run had written. A run is one
            stream, from its entering to its end. Nothing was sent for this ID in the current run.
    """

    member_code: str
    quota_id: int
    status: OutcomeStatus
    invite: Invite | None = None
    result_code: int | None = None
    result: str | None = None
    error: SamplingError | None = None
    anomaly: str | None = None
    replayed: bool = False


_OF_INVITES: Final = {
    "survey_id": "int64",
    "wave_id": "int64",
    "url": "string",
    "partner_amount": "float64",
    "member_amount": "float64",
    "loi": "int64",
    "ir": "int64",
}
OUTCOME_COLUMNS: Final = {
    "member_code": "string",
    "quota_id": "int64",
    "status": "string",
    "result_code": "int64",
    "result": "string",
    **_OF_INVITES,
    "error": "string",
    "anomaly": "string",
    "replayed": "bool_",
}
"""The columns of outcomes in a table, each with the name of its type in Arrow."""


def outcome_columns(outcomes: Sequence[InviteOutcome]) -> dict[str, list[Any]]:
    """Return outcomes as columns."""
    columns: dict[str, list[Any]] = {}
    for name in OUTCOME_COLUMNS:
        of = [outcome.invite for outcome in outcomes] if name in _OF_INVITES else outcomes
        columns[name] = [getattr(each, name, None) for each in of]
    columns["error"] = [error and f"{type(error).__name__}: {error}" for error in columns["error"]]
    return columns


def outcome_schema() -> Any:
    pa = arrow()
    return pa.schema({name: getattr(pa, kind)() for name, kind in OUTCOME_COLUMNS.items()})


def outcome_batches(outcomes: Iterable[InviteOutcome], rows: int = ROWS) -> Iterator[Any]:
    """Yield outcomes as record batches of so many rows."""
    schema, left = outcome_schema(), iter(outcomes)
    while some := list(islice(left, rows)):
        yield batch_of(schema, outcome_columns(some))


Counted: TypeAlias = dict[tuple[str, int | None], int]  # numbers of quota IDs by status and result code

Said: TypeAlias = tuple[OutcomeStatus, int, str | None]
"""What the service said of a quota ID: the status that it means, the result code and its name."""

SUCCESS: Final[Said] = ("invited", int(ResultCode.SUCCESS), "SUCCESS")
"""What it says beside an invite, in the contract's words (section "Bulk invite result item")."""

MOST_SAID: Final = 256  # how many different `Said` one response may have: a byte stands for each


# `gc=False`: the garbage collector does not visit it. There is one for each request.
class Columns(msgspec.Struct, frozen=True, gc=False):
    """The results in a response that has one item for each ID, in order, and contradicts itself nowhere."""

    numbers: bytes  # for each ID, the index into `said`
    said: tuple[Said, ...]  # what the service said, each once; the first is `SUCCESS`
    invites: tuple[Invite, ...]  # in the order of their IDs

    @property
    def errors(self) -> tuple[SamplingError, ...]:
        return ()

    def __len__(self) -> int:
        return len(self.numbers)

    def counts(self) -> tuple[tuple[OutcomeStatus, int], ...]:
        invited = len(self.invites)
        return ("invited", invited), ("rejected", len(self.numbers) - invited)

    def tally(self) -> Counted:
        counted: Counted = {}
        for number, (status, code, _) in enumerate(self.said):
            if times := self.numbers.count(number):
                counted[status, code] = counted.get((status, code), 0) + times
        return counted

    def outcomes(self, member_code: str, quota_ids: Iterable[int]) -> Iterable[InviteOutcome]:
        """Return the outcomes, and take as many quota IDs as there are results."""
        said, invites = self.said, iter(self.invites)
        # The numbers come first: where they end, `zip` has taken no quota ID of the next part.
        return [
            InviteOutcome(
                member_code, quota_id, status, next(invites) if status == "invited" else None, code, result
            )
            for number, quota_id in zip(self.numbers, quota_ids, strict=False)
            for status, code, result in (said[number],)
        ]

    def part(self, start: int, end: int) -> Columns:
        is_invite = bytes(status == "invited" for status, _, _ in self.said).ljust(MOST_SAID, b"\0")
        numbers = self.numbers[start:end]
        # Each invite is a byte of 1 in these sums.
        before = sum(self.numbers[:start].translate(is_invite))
        until = before + sum(numbers.translate(is_invite))
        return Columns(numbers, self.said, self.invites[before:until])


@frozen
class Listed:
    """Results that are outcomes: from a journal, from a response read with care, or a mixture."""

    listed: tuple[InviteOutcome, ...]

    @property
    def invites(self) -> tuple[Invite, ...]:
        return tuple(
            outcome.invite
            for outcome in self.listed
            if outcome.status == "invited" and outcome.invite is not None
        )

    @property
    def errors(self) -> tuple[SamplingError, ...]:
        """The errors of IDs that are `not_sent` or `unknown`, without those from a journal."""
        of_now = (outcome.error for outcome in self.listed if not outcome.replayed)
        return tuple(error for error in of_now if error is not None)

    def __len__(self) -> int:
        return len(self.listed)

    def counts(self) -> Iterable[tuple[OutcomeStatus, int]]:
        counted: Counter[OutcomeStatus] = Counter(outcome.status for outcome in self.listed)
        return counted.items()

    def tally(self) -> Counted:
        """Count the IDs by status and result code, without those whose outcome is from a journal."""
        return Counter((each.status, each.result_code) for each in self.listed if not each.replayed)

    def part(self, start: int, end: int) -> Listed:
        return Listed(self.listed[start:end])

    def outcomes(self, member_code: str, quota_ids: Iterable[int]) -> Iterable[InviteOutcome]:  # noqa: ARG002
        """Return the outcomes, and take as many quota IDs as there are results."""
        return (outcome for outcome, _ in zip(self.listed, quota_ids, strict=False))


@frozen
class Failed:
    """The results of a request that failed: the same failure for each of some IDs."""

    length: int
    status: OutcomeStatus
    result_code: int | None
    result: str | None
    error: SamplingError

    @property
    def invites(self) -> tuple[Invite, ...]:
        return ()

    @property
    def errors(self) -> tuple[SamplingError, ...]:
        return (self.error,)

    def __len__(self) -> int:
        return self.length

    def counts(self) -> tuple[tuple[OutcomeStatus, int], ...]:
        return ((self.status, self.length),)

    def tally(self) -> Counted:
        return {(self.status, self.result_code): self.length}

    def part(self, start: int, end: int) -> Failed:
        return evolve(self, length=len(range(self.length)[start:end]))

    def outcomes(self, member_code: str, quota_ids: Iterable[int]) -> Iterator[InviteOutcome]:
        status, code, result, error = self.status, self.result_code, self.result, self.error
        for _, quota_id in zip(range(self.length), quota_ids, strict=False):
            yield InviteOutcome(member_code, quota_id, status, None, code, result, error)


Answers: TypeAlias = Columns | Listed | Failed
"""The results of some quota IDs, in their order. The IDs themselves are kept elsewhere."""


def outcomes_from(
    parts: Iterable[Answers], member_code: str, quota_ids: Iterable[int]
) -> Iterator[InviteOutcome]:
    each_id = iter(quota_ids)
    return chain.from_iterable(part.outcomes(member_code, each_id) for part in parts)


_STATUSES: Final[tuple[OutcomeStatus, ...]] = get_args(OutcomeStatus)

if TYPE_CHECKING:
    _OutcomeSequence = Sequence[InviteOutcome]
else:

    class _OutcomeSequence:
        """All of a Sequence but its base class: Polars would read an instance of that as a list of objects."""

        __slots__ = ()
        __contains__, index, count = Sequence.__contains__, Sequence.index, Sequence.count


class BulkInviteResult(CallResultInSlots, _OutcomeSequence):
    """The outcomes of a bulk invite: one for each quota ID given, in the caller's order.

    `len(result.invited) + len(result.rejected) + len(result.not_sent) + len(result.unknown) == len(result)`,
    whatever happened. It is a sequence, but no instance of `collections.abc.Sequence`. Outcome objects are
    created when they are read: reading one again gives an equal object, which may not be the same one.

    Data frames read it as a table with a row for each outcome: `polars.DataFrame(result)`,
    `pyarrow.table(result)`.

    Its `timing` is that of the request that ended last, from the beginning of the bulk to the result: the other
    requests ran in parallel and ended earlier. Its `headers` are those of that request's response; `on_attempt`
    has those of each.

    Attributes:
        unrequested: Outcomes that the service returned for unrequested quota IDs; the latest 10,000.
    """

    __slots__ = ("_answers", "_ends", "_member_code", "_quota_ids", "unrequested")

    def __init__(
        self,
        outcomes: Iterable[InviteOutcome] = (),
        unrequested: Iterable[InviteOutcome] = (),
        *,
        member_code: str = "",
        quota_ids: tuple[int, ...] = (),
        answers: Sequence[Answers] | None = None,
    ) -> None:
        """Make a result of outcomes.

        The client gives the member, the quota IDs in the caller's order, and their results in the same order
        instead.
        """
        if answers is None:
            listed = tuple(outcomes)
            quota_ids, answers = tuple([outcome.quota_id for outcome in listed]), (Listed(listed),)
        self._member_code = member_code
        self._quota_ids = quota_ids
        self._answers = answers
        self._ends: list[int] = []
        self.unrequested = tuple(unrequested)

    def __repr__(self) -> str:
        counts = " ".join(f"{status}={number}" for status, number in self.counts.items())
        return f"<BulkInviteResult {counts} unrequested={len(self.unrequested)}>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BulkInviteResult):
            return NotImplemented
        return tuple(self) == tuple(other) and self.unrequested == other.unrequested

    __hash__ = None  # type: ignore[assignment]  # outcomes carry exceptions, which compare by identity

    def __reduce__(self) -> tuple[type[BulkInviteResult], tuple[object, ...]]:
        return BulkInviteResult, (tuple(self), self.unrequested)

    def __len__(self) -> int:
        return len(self._quota_ids)

    def __iter__(self) -> Iterator[InviteOutcome]:
        return outcomes_from(self._answers, self._member_code, self._quota_ids)

    def __reversed__(self) -> Iterator[InviteOutcome]:
        return reversed(tuple(self))  # a look for each place would take four times as long

    @overload
    def __getitem__(self, index: int) -> InviteOutcome: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[InviteOutcome, ...]: ...
    def __getitem__(self, index: int | slice) -> InviteOutcome | tuple[InviteOutcome, ...]:
        places = range(len(self))[index]
        if isinstance(places, int):
            return next(self._between(places, places + 1))
        if not places:
            return ()
        first, last = sorted((places[0], places[-1]))
        return tuple(self._between(first, last + 1))[:: places.step]

    def _between(self, start: int, end: int) -> Iterator[InviteOutcome]:
        if not self._ends:  # not before it is needed: there may be half a million answers
            self._ends = list(accumulate(map(len, self._answers)))
        first, last = bisect_right(self._ends, start), bisect_left(self._ends, end) + 1
        parts = []
        for answers, after in zip(self._answers[first:last], self._ends[first:last], strict=True):
            before = after - len(answers)
            parts.append(answers.part(max(start - before, 0), end - before))
        return outcomes_from(parts, self._member_code, self._quota_ids[start:end])

    def _having(self, status: OutcomeStatus) -> tuple[InviteOutcome, ...]:
        return tuple([outcome for outcome in self if outcome.status == status]) if self.counts[status] else ()

    @property
    def invited(self) -> tuple[InviteOutcome, ...]:
        """Outcomes with an invite."""
        return self._having("invited")

    @property
    def invites(self) -> tuple[Invite, ...]:
        """The invites of the outcomes in `invited`, in their order. This creates no outcomes."""
        return tuple(chain.from_iterable([answers.invites for answers in self._answers]))

    @property
    def counts(self) -> Mapping[OutcomeStatus, int]:
        """The number of outcomes with each of the four statuses. This creates no outcomes."""
        counted = dict.fromkeys(_STATUSES, 0)
        for answers in self._answers:
            for status, number in answers.counts():
                counted[status] += number
        return counted

    @property
    def rejected(self) -> tuple[InviteOutcome, ...]:
        """Outcomes with a result code other than 1."""
        return self._having("rejected")

    @property
    def not_sent(self) -> tuple[InviteOutcome, ...]:
        """Outcomes whose IDs had no effect at the service: they are safe to send again."""
        return self._having("not_sent")

    @property
    def unknown(self) -> tuple[InviteOutcome, ...]:
        """Outcomes whose invites may exist but were not received: sending again may make second invites."""
        return self._having("unknown")

    def to_arrow(self) -> Any:
        """Return a `pyarrow.Table` with a row for each outcome. It needs the extra `panel`.

        The columns are those of `InviteOutcome`, and in place of `invite` those of an invite, which are null
        without one. `error` is a text. Member codes and links are in it.

        Raises:
            ImportError: pyarrow is missing.
        """
        return table_of(outcome_schema(), outcome_batches(self))

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Export `to_arrow` to another library, by the Arrow C stream interface."""
        return stream_of(outcome_schema(), outcome_batches(self), requested_schema)

    def _repr_html_(self) -> str:
        """Return a small table for notebooks: how many quota IDs have which status and result code."""
        counted: Counter[tuple[str, int | None]] = Counter()
        for answers in self._answers:
            counted.update(answers.tally())
        counted.update((each.status, each.result_code) for each in self if each.replayed)
        rows = (
            (status, "" if code is None else f"{code} {ResultCode.name_of(code) or ''}", number)
            for (status, code), number in counted.most_common()
        )
        return html_table(count_of(len(self), "quota ID"), ("status", "result code", "quota IDs"), rows)

    def resendable(self) -> tuple[int, ...]:
        """Return the quota IDs that are safe to send again: those of `not_sent`, each once, in their order."""
        return tuple(dict.fromkeys(outcome.quota_id for outcome in self.not_sent))

    def raise_for_incomplete(self) -> None:
        """Raise an error if any quota ID is neither invited nor rejected.

        Raises:
            IncompleteBulkError: An outcome is `not_sent` or `unknown`. The error holds this result.
        """
        counts = self.counts
        not_sent, unknown = counts["not_sent"], counts["unknown"]
        if not_sent or unknown:
            raise IncompleteBulkError(
                f"{not_sent} of {len(self)} quota IDs were not sent, and {unknown} have an unknown outcome; "
                "resendable() gives those that are safe to send again",
                bulk_result=self,
            )


class IncompleteBulkError(SamplingError):
    """Some quota IDs of a bulk invite are neither invited nor rejected (but `not_sent` or `unknown`).

    Attributes:
        bulk_result: The whole result, with the invited and rejected IDs.
    """

    bulk_result: BulkInviteResult

    def __init__(self, message: str = "", *, bulk_result: BulkInviteResult | None = None) -> None:
        super().__init__(message, endpoint="bulk_invite", delivery="unknown")
        if bulk_result is not None:
            self.bulk_result = bulk_result
