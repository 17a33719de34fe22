"""Remember which pairs of member and quota a fan-out has requested, and what the service returned.

A pair that comes again is not sent again, unless its request ended `not_sent`: it gets the outcome of the first
request. Memory is bounded in two steps. Of the latest `MOST_INVITES` invites all is known; of older ones only
the pair, and the outcome of its repetition is `unknown`. Requests beyond `MOST_BYTES` are forgotten, and a
repetition of them is sent.
"""

from __future__ import annotations

import logging
import struct
from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING, Final, cast

from attrs import define

from sampling_async._contract.errors import SamplingError
from sampling_async._contract.structs import replace
from sampling_async._pacing.loops import Notifier
from sampling_async._pacing.steps import LoopYielder
from sampling_async._protocol.results import Columns, Listed, outcomes_from

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sampling_async._bulk.job import Job
    from sampling_async._protocol.results import Answers, InviteOutcome, Said

MOST_BYTES: Final = 64 * 2**20  # how many bytes of requests one fan-out keeps, without invites
MOST_INVITES: Final = 100_000  # how many invites one fan-out keeps: about 32 MB

# Bytes, measured with tracemalloc on Python 3.11.
_A_REQUEST: Final = 490
_AN_OUTCOME: Final = 300
_AN_INDEXED_ID: Final = 120

_SMALL: Final = 4  # the bytes of a quota ID below 2**32
_FEW: Final = 8  # how many requests of one member are indexed without a turn for the event loop

_GONE: Final = (
    "an earlier request of this fan-out got an invite for this, which is no longer in memory; not sent again"
)

_LOG: Final = logging.getLogger("sampling_async.bulk")


@define(eq=False)
class EarlierRequest:
    """A request that a fan-out has sent or will send."""

    member_code: str
    job: Job | None  # until it is done
    packed: bytes = b""  # its quota IDs, once it is done
    answers: Answers | None = None  # their results, once it is done
    size: int = 0  # bytes, estimated
    is_forgotten: bool = False  # it is too old, and later places of its pairs are sent

    def quota_ids(self) -> Sequence[int]:
        if self.answers is None:
            return () if self.job is None else self.job.chunk.quota_ids
        return _unpacked(self.packed, len(self.answers))

    def outcomes(self) -> Iterator[InviteOutcome]:
        if self.answers is None:
            return iter(()) if self.job is None else self.job.account().answer.outcomes()
        return outcomes_from((self.answers,), self.member_code, self.quota_ids())

    def drop_invites(self) -> int:
        """Forget the invites, but not that they were made. Return their number."""
        answers = self.answers
        if answers is None or not (invites := answers.invites):
            return 0
        if isinstance(answers, Columns):
            said = tuple(("unknown" if each[0] == "invited" else each[0], *each[1:]) for each in answers.said)
            self.answers = Columns(answers.numbers, cast("tuple[Said, ...]", said), ())
        elif isinstance(answers, Listed):
            self.answers = Listed(tuple(map(_without_invite, answers.listed)))
        return len(invites)


class RequestedPairs:
    """The pairs of member and quota that one fan-out has requested. `most_bytes` are without invites."""

    def __init__(self, *, most_bytes: int = MOST_BYTES, most_invites: int = MOST_INVITES) -> None:
        self._most_bytes = most_bytes
        self._most_invites = most_invites
        self._bytes = self._invites = 0
        self._of_member: dict[str, list[EarlierRequest]] = {}
        self._indexes: dict[str, dict[int, EarlierRequest]] = {}  # of members that came again
        self._in_flight: dict[Job, EarlierRequest] = {}
        self._done: deque[EarlierRequest] = deque()
        self._with_invites: deque[EarlierRequest] = deque()
        self._settled = Notifier()
        self._has_forgotten = False

    def needs_index(self, member_code: str) -> bool:
        """Return whether `make_index` must be called before `earlier`, because it takes long."""
        return len(self._of_member.get(member_code, ())) > _FEW and member_code not in self._indexes

    async def make_index(self, member_code: str) -> None:
        """Index the requests of a member by quota ID, with turns for the event loop."""
        index: dict[int, EarlierRequest] = {}
        turns = LoopYielder()
        for request in tuple(self._of_member.get(member_code, ())):
            quota_ids = request.quota_ids()
            index.update(dict.fromkeys(quota_ids, request))
            await turns.step(len(quota_ids))
        self._keep_index(member_code, index)

    def earlier(self, member_code: str, quota_ids: Sequence[int]) -> dict[int, EarlierRequest]:
        """Return the latest request about each of these quotas of a member, without those never requested."""
        if member_code not in self._of_member:  # as nearly always
            return {}
        index = self._indexes.get(member_code)
        if index is None:
            index = {}
            for each in self._of_member[member_code]:
                index.update(dict.fromkeys(each.quota_ids(), each))
            self._keep_index(member_code, index)
        if index.keys().isdisjoint(quota_ids):
            return {}
        return {
            quota_id: request
            for quota_id in quota_ids
            if (request := index.get(quota_id)) is not None and not request.is_forgotten
        }

    def outcome_of(self, member_code: str, quota_id: int) -> InviteOutcome | None:
        """Return the outcome of a pair as known now; None if it was not requested, or was forgotten."""
        earlier = self.earlier(member_code, (quota_id,))
        return Repetition(self, member_code, earlier).outcomes()[0] if earlier else None

    def take_up(self, job: Job, quota_ids: Sequence[int]) -> None:
        """Note that a job will send these quota IDs."""
        code = job.chunk.member_code
        self._in_flight[job] = request = EarlierRequest(code, job)
        self._of_member.setdefault(code, []).append(request)
        if self._indexes and (index := self._indexes.get(code)) is not None:
            before = len(index)
            index.update(dict.fromkeys(quota_ids, request))
            self._bytes += (len(index) - before) * _AN_INDEXED_ID

    def settle(self, job: Job) -> None:
        """Keep the outcomes of a job that is done. If it was not taken up, this has no effect."""
        request = self._in_flight.pop(job, None)
        if request is None:
            return
        answer = job.account().answer
        answers = answer.answers
        # The answers come before `job` goes: a signal handler may raise between these lines.
        request.packed = packed = _packed(answer.quota_ids)
        request.answers = answers
        request.job = None
        request.size = size = (
            _A_REQUEST + len(packed) + len(answers) * (1 + _AN_OUTCOME * isinstance(answers, Listed))
        )
        self._bytes += size
        self._done.append(request)
        if invites := answers.invites:
            self._invites += len(invites)
            self._with_invites.append(request)
        if self._invites > self._most_invites or self._bytes > self._most_bytes:
            self._keep_bounds()
        self._settled.notify()

    async def done(self, request: EarlierRequest) -> None:
        while request.job is not None:
            await self._settled.wait()

    # --- What is kept, and for how long

    def _keep_index(self, member_code: str, index: dict[int, EarlierRequest]) -> None:
        self._indexes[member_code] = index
        self._bytes += len(index) * _AN_INDEXED_ID

    def _keep_bounds(self) -> None:
        while self._invites > self._most_invites:
            self._drop_invites(self._with_invites.popleft())
        while self._bytes > self._most_bytes and self._done:
            self._forget(self._done.popleft())

    def _drop_invites(self, request: EarlierRequest) -> None:
        self._invites -= request.drop_invites()

    def _forget(self, request: EarlierRequest) -> None:
        if self._with_invites and self._with_invites[0] is request:  # both are in the same order
            self._drop_invites(self._with_invites.popleft())
        code = request.member_code
        if (index := self._indexes.get(code)) is not None:
            of_this = [quota_id for quota_id in request.quota_ids() if index.get(quota_id) is request]
            for quota_id in of_this:
                del index[quota_id]
            self._bytes -= len(of_this) * _AN_INDEXED_ID
        self._of_member[code].remove(request)
        if not self._of_member[code]:
            del self._of_member[code]
            self._bytes -= len(self._indexes.pop(code, ())) * _AN_INDEXED_ID
        self._bytes -= request.size
        request.is_forgotten = True
        if not self._has_forgotten:
            self._has_forgotten = True
            _LOG.warning(
                "this fan-out has requested so many quota IDs that the earliest are forgotten: a repetition of "
                "them is sent again. With journal=, each pair is sent once"
            )


class Repetition:
    """Quota IDs of one member that the fan-out has requested before, each with the latest such request."""

    def __init__(self, asked: RequestedPairs, member_code: str, earlier: Mapping[int, EarlierRequest]) -> None:
        self._asked = asked
        self._member_code = member_code
        self._earlier = dict(earlier)

    def part(self, quota_ids: Sequence[int]) -> Repetition:
        return Repetition(self._asked, self._member_code, {id_: self._earlier[id_] for id_ in quota_ids})

    def outcomes(self) -> tuple[InviteOutcome, ...]:
        """Return the outcomes of its quota IDs, as known now."""
        # Another place of the same pair may have been sent since, if the first one ended `not_sent`.
        earlier = self._earlier
        earlier.update(self._asked.earlier(self._member_code, tuple(earlier)))
        known = {
            outcome.quota_id: outcome
            for request in dict.fromkeys(earlier.values())
            for outcome in request.outcomes()
            if earlier.get(outcome.quota_id) is request
        }
        return tuple(_explained(known[quota_id]) for quota_id in earlier)

    async def settled(self) -> tuple[InviteOutcome, ...]:
        """Return the outcomes of its quota IDs, when no request about them is in flight."""
        while True:
            outcomes = self.outcomes()
            in_flight = [request for request in self._earlier.values() if request.job is not None]
            if not in_flight:
                return outcomes
            await self._asked.done(in_flight[0])


def _without_invite(outcome: InviteOutcome) -> InviteOutcome:
    return replace(outcome, status="unknown", invite=None) if outcome.status == "invited" else outcome


def _explained(outcome: InviteOutcome) -> InviteOutcome:
    """Say why an outcome is `unknown` whose invite is no longer in memory."""
    if outcome.status != "unknown" or outcome.error is not None:
        return outcome
    error = SamplingError(_GONE, endpoint="bulk_invite", delivery="unknown")
    return replace(outcome, error=error, anomaly=_GONE)


def _packed(quota_ids: Sequence[int]) -> bytes:
    try:
        return _format(len(quota_ids), "I").pack(*quota_ids)
    except struct.error:  # one of them is 2**32 or more
        return _format(len(quota_ids), "Q").pack(*quota_ids)


def _unpacked(packed: bytes, length: int) -> Sequence[int]:
    return _format(length, "I" if len(packed) == length * _SMALL else "Q").unpack(packed)


@lru_cache(maxsize=256)
def _format(length: int, kind: str) -> struct.Struct:
    return struct.Struct(f"={length}{kind}")
