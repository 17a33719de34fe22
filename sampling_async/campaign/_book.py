"""What a campaign requests next, after all outcomes so far: plain decisions, without file and event loop."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from attrs import define

from sampling_async._contract.currencies import add_to
from sampling_async._contract.errors import ClientClosedError, ForbiddenError, OutageError, WithheldError
from sampling_async._contract.result_codes import ResultCode
from sampling_async._protocol.lessons import Lesson, rule_for
from sampling_async.campaign._ledger_file import MadeInvite, NewPair, PairEnd
from sampling_async.campaign._summary import Pairs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from sampling_async import InviteOutcome
    from sampling_async._protocol.lessons import Rule
    from sampling_async.campaign._ledger_file import DueMember, Notes, PlannedQuota

MOST_TRIES: Final = 3  # how often the same pair is requested, if each time the reason passes by itself
CLOSED: Final = "closed in the inventory"
# Failures that say nothing about a pair: all others would fail too, and the pair stays as it was.
_OF_ALL: Final = (ForbiddenError, OutageError, ClientClosedError, WithheldError)
_COMMITTED: Final = frozenset({"pending", "invited", "unknown"})


@define
class _Place:
    """A quota while a campaign runs."""

    quota: PlannedQuota
    left: int  # how many more pairs there is room for
    closed: str | None
    # The code of the last refusals and how many there were in a row.
    refused: tuple[int, int] = (0, 0)


class Book:
    """What is known while a campaign runs: rooms, closed quotas, and counts."""

    def __init__(
        self,
        quotas: Iterable[PlannedQuota],
        counts: Iterable[tuple[int, str, int, float]],
        rules: Mapping[int, Rule],
        *,
        is_open: Callable[[int], bool] = lambda _: True,
        max_turns: int = 3,
        retry_seconds: float = 60.0,
        spent: float = 0.0,
        earlier: Mapping[int, int] | None = None,
        left_of_surveys: Mapping[int, int] | None = None,
    ) -> None:
        self._places = {quota.id: _Place(quota, quota.room, quota.closed) for quota in quotas}
        self._of_wave: dict[tuple[int, int], list[int]] = {}
        for place in self._places.values():
            self._of_wave.setdefault((place.quota.survey, place.quota.wave), []).append(place.quota.id)
        self._left_of_surveys = Counter(left_of_surveys)  # of those with a room of their own
        self._rules = rules
        self._is_open = is_open
        self._max_turns = max_turns
        self._retry_seconds = retry_seconds
        self.counts: Counter[str] = Counter()  # pairs by state
        self.spent = spent
        self.expected: dict[int, float] = {}  # what the invites are expected to bring, by currency of the pairs
        self.asked = 0  # pairs that were requested and have no outcome yet
        self.asked_cost = 0.0
        self.stop: str | None = None  # why the campaign cannot go on
        for quota_id, state, count, value in counts:
            self.counts[state] += count
            place = self._places[quota_id]
            if state in _COMMITTED:
                place.left -= count
            self._expect(place, value if state == "invited" else 0.0)
        # The rooms of this plan already exclude what was invited, or is unknown, of earlier ones.
        for quota_id, count in (earlier or {}).items():
            self._places[quota_id].left += count

    def _take(self, place: _Place, count: int = 1) -> None:
        """Take room of a quota and of its survey; a negative count frees it."""
        place.left -= count
        if place.quota.survey in self._left_of_surveys:
            self._left_of_surveys[place.quota.survey] -= count

    def _has_room(self, place: _Place) -> bool:
        return place.left > 0 and self._left_of_surveys.get(place.quota.survey, 1) > 0

    def _expect(self, place: _Place, value: float) -> None:
        add_to(self.expected, place.quota.currency or 0, value)

    @property
    def pairs(self) -> Pairs:
        return Pairs(planned=self.counts.total(), **self.counts)

    @property
    def committed(self) -> int:
        """Invites that were made, may have been made, or may be made by what was requested."""
        return self.counts["invited"] + self.counts["unknown"] + self.asked

    @property
    def most_spent(self) -> float:
        """What the invites may cost, together with what was requested."""
        return self.spent + self.asked_cost

    def cost_of(self, member: DueMember) -> float:
        """Return what the dearest of a member's pairs costs, or of the reserves that may take their place."""
        quota_ids = list(member.due)
        if any(not self.is_open(quota_id) for quota_id in quota_ids):
            quota_ids += [quota_id for quota_id in member.reserves if quota_id in self._places]
        return max((self._places[quota_id].quota.cost for quota_id in quota_ids), default=0.0)

    # --- Before a request

    def ready(self, member: DueMember, most: int, notes: Notes) -> tuple[int, ...]:
        """Return what is requested for a member now, at most `most` pairs: these go from `due` to `waiting`.

        Its quotas that are closed end, as skipped or as they were answered, and give way to its reserves.
        """
        asked: list[int] = []
        for quota_id in list(member.due):
            reason = member.closed or self._closed_because(quota_id)
            if reason is None:
                asked.append(quota_id)
                continue
            tries, code = member.due.pop(quota_id), member.refused.get(quota_id)
            state = "skipped" if code is None else "rejected"
            notes.ends.append(PairEnd(state, code, reason, member.turn, tries, 0.0, member.id, quota_id))
            self._end(quota_id, state)
            if member.closed is None and (pair := self._next_best(member, member.turn)) is not None:
                notes.pairs.append(pair)
                asked.append(pair.quota)
                member.due[pair.quota] = 0
        now = tuple(asked[:most])
        for quota_id in now:
            member.tries[quota_id] = member.due.pop(quota_id)
            self.asked_cost += self._places[quota_id].quota.cost
        member.waiting.update(now)
        self.asked += len(now)
        return now

    def is_open(self, quota_id: int) -> bool:
        return self._closed_because(quota_id) is None

    def _closed_because(self, quota_id: int) -> str | None:
        place = self._places[quota_id]
        if place.closed is not None:
            return place.closed
        return None if self._is_open(quota_id) else CLOSED

    def _next_best(self, member: DueMember, turn: int) -> NewPair | None:
        """Plan the best reserve that is open and has room."""
        for at, quota_id in enumerate(member.reserves):
            place = self._places.get(quota_id)
            if place is not None and self._has_room(place) and self.is_open(quota_id):
                del member.reserves[: at + 1]
                self._take(place)
                self.counts["pending"] += 1
                member.added += 1
                return NewPair(member.id, quota_id, member.added, certain=False, turn=turn)
        member.reserves.clear()
        return None

    def _end(self, quota_id: int, state: str) -> None:
        self.counts["pending"] -= 1
        self.counts[state] += 1
        if state not in _COMMITTED:
            self._take(self._places[quota_id], -1)

    def put_back(self, member: DueMember, quota_id: int) -> bool:
        """Count a pair as pending again, and not as requested; return False if it was not requested."""
        if quota_id not in member.waiting:
            return False
        member.waiting.discard(quota_id)
        self.asked -= 1
        self.asked_cost -= self._places[quota_id].quota.cost
        return True

    # --- After a request

    def record(
        self,
        member: DueMember,
        outcomes: Iterable[InviteOutcome],
        now: float,
        notes: Notes,
        *,
        requested: float = 0.0,
    ) -> None:
        """Record outcomes of a member, and note what they change. New pairs are for the member's next turn."""
        for outcome in outcomes:
            if not self.put_back(member, outcome.quota_id):  # given twice
                continue
            if outcome.status == "not_sent" and isinstance(outcome.error, _OF_ALL):
                continue
            if outcome.result_code is not None and outcome.result:
                notes.codes[outcome.result_code] = outcome.result
            if outcome.status == "invited":
                self._invited(member, outcome, notes, now)
            elif outcome.status == "unknown":
                # It may be an invite.
                self.spent += self._places[outcome.quota_id].quota.cost
                self._close(member, outcome, notes, due=requested)
            else:
                self._refused(member, outcome, notes, now)

    def _invited(self, member: DueMember, outcome: InviteOutcome, notes: Notes, now: float) -> None:
        invite, place = outcome.invite, self._places[outcome.quota_id]
        assert invite is not None
        place.refused = (0, 0)
        self.spent += max(place.quota.cost, invite.member_amount or 0.0)
        self._expect(place, place.quota.value)
        self._close(member, outcome, notes)
        survey, amounts = (invite.survey_id, invite.wave_id), (invite.partner_amount, invite.member_amount)
        notes.invites.append(
            MadeInvite(member.id, outcome.quota_id, *survey, invite.url, *amounts, invite.loi, invite.ir, now)
        )

    def _close(self, member: DueMember, outcome: InviteOutcome, notes: Notes, *, due: float = 0.0) -> None:
        self._end(outcome.quota_id, outcome.status)
        tries = member.tries.get(outcome.quota_id, 0) + 1
        state, code, reason = outcome.status, outcome.result_code, _reason_of(outcome)
        notes.ends.append(PairEnd(state, code, reason, member.turn, tries, due, member.id, outcome.quota_id))

    def _refused(self, member: DueMember, outcome: InviteOutcome, notes: Notes, now: float) -> None:
        rule = rule_for(self._rules, outcome.result_code)
        # Without a code nothing was refused: it could not be sent, which passes by itself.
        passes = outcome.result_code is None or rule.lesson is Lesson.LATER
        tries = member.tries.get(outcome.quota_id, 0) + 1
        if rule.lesson is Lesson.STOP:
            # It says nothing about the pair, which the next run requests again.
            code, again = outcome.result_code, (member.turn, tries - 1, 0.0)
            notes.ends.append(
                PairEnd("pending", code, _reason_of(outcome), *again, member.id, outcome.quota_id)
            )
            self.stop = self.stop or f"the service answered {_name_of(outcome)} ({code}): no pair can succeed"
            return
        if passes and tries < MOST_TRIES:
            state, code, due = "pending", outcome.result_code, now + self._retry_seconds
            turn = member.turn + 1
            notes.ends.append(
                PairEnd(state, code, _reason_of(outcome), turn, tries, due, member.id, outcome.quota_id)
            )
            return
        self._close(member, outcome, notes)
        if outcome.result_code is None:
            # The next run requests it again. So it keeps its room, and nothing takes its place.
            self._take(self._places[outcome.quota_id])
            return
        self._apply(rule, member, outcome, notes)
        if member.closed is None and member.turn < self._max_turns:
            pair = self._next_best(member, member.turn + 1)
            if pair is not None:
                notes.pairs.append(pair)

    def _apply(self, rule: Rule, member: DueMember, outcome: InviteOutcome, notes: Notes) -> None:
        """Apply to other pairs what a refusal says about them."""
        code = outcome.result_code or 0
        name = _name_of(outcome)
        if rule.lesson is Lesson.MEMBER:
            member.closed = name
            notes.closed_members.append((name, member.id))
        elif rule.lesson in {Lesson.QUOTA, Lesson.SURVEY}:
            place = self._places[outcome.quota_id]
            last, count = place.refused
            place.refused = (code, count + 1 if code == last else 1)
            if place.refused[1] >= rule.in_a_row:
                self._take_out(place.quota, name, rule.lesson, notes)

    def _take_out(self, quota: PlannedQuota, reason: str, lesson: Lesson, notes: Notes) -> None:
        same = [quota.id] if lesson is Lesson.QUOTA else self._of_wave[quota.survey, quota.wave]
        for quota_id in same:
            if self._places[quota_id].closed is None:
                self._places[quota_id].closed = reason
                notes.closed_quotas.append((reason, quota_id))


def _name_of(outcome: InviteOutcome) -> str:
    code = outcome.result_code or 0
    return outcome.result or ResultCode.name_of(code) or f"result code {code}"


def _reason_of(outcome: InviteOutcome) -> str | None:
    return outcome.anomaly or (None if outcome.error is None else str(outcome.error))
