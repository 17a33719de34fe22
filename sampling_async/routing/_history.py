"""What a member has taken, started or been refused, and what is left out because of it. No input or output."""

from __future__ import annotations

from enum import IntEnum
from math import inf
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from attrs import field, frozen

from sampling_async import DecodeError, Invite, from_json
from sampling_async._contract.checks import whole_from_1
from sampling_async._contract.records import hidden
from sampling_async._contract.result_codes import ResultCode
from sampling_async._pacing.steps import LoopYielder
from sampling_async._protocol.lessons import LESSONS, Lesson, rule_for

if TYPE_CHECKING:
    from collections.abc import Callable

DAY: Final = 86_400.0  # in seconds, as the next
_TECHNICAL_SECONDS: Final = 600.0
"""How long a pair is left out after a fault of the service or panel; other refusals count for a day."""

CLOCK_STEP: Final = 60.0
"""Seconds by which the clocks of two hosts may differ, or a clock may be set back, without harm."""


_NUMBERS: Final = Struct("<qqqqdd")  # of a link


@frozen
class Link:
    """A pair of member and quota that was requested."""

    quota_id: int
    survey_id: int
    wave_id: int
    state: str  # asking, invited, refused or unclear
    owner: str | None  # who is asking
    asked: float
    until: float  # until when it is leased, given or refused
    code: int | None
    invite_json: str | None = field(repr=hidden)
    entered: float | None

    def __attrs_post_init__(self) -> None:
        """Refuse what no router writes, with one of `UNUSABLE`."""
        _NUMBERS.pack(self.quota_id, self.survey_id, self.wave_id, self.code or 0, self.asked, self.until)

    def is_leased(self, now: float) -> bool:
        # A clock that was set back must not hold the member for long.
        return self.state == "asking" and self.asked - CLOCK_STEP <= now < self.until

    def may_be_leased(self, now: float) -> bool:
        """Return whether it is leased by a clock that differs."""
        return self.state == "asking" and abs(now - self.asked) <= CLOCK_STEP

    @property
    def invite(self) -> Invite:
        try:
            return from_json(Invite, self.invite_json or "")
        except DecodeError:
            raise ValueError("a link without its invite") from None


@frozen(kw_only=True)
class Caps:
    """How much a member may do on one UTC day, as the operators limit it.

    Attributes:
        starts: How many surveys a member may enter.
        completes: How many a member may complete.
    """

    starts: int = field(default=25, validator=whole_from_1)
    completes: int = field(default=5, validator=whole_from_1)


def lesson_of(code: int | None) -> Lesson:
    """Return what a refusal says. A code that must come many times in a row counts for its pair only."""
    rule = rule_for(LESSONS, code)
    return rule.lesson if rule.in_a_row == 1 else Lesson.PAIR


def refused_until(code: int | None, now: float) -> float:
    """Return until when a pair with this refusal is left out."""
    if code == ResultCode.MAX_DAILY_EXCEEDED:
        return now // DAY * DAY + DAY  # the operators count by UTC days
    is_fault = lesson_of(code) in {Lesson.LATER, Lesson.STOP}
    return now + (_TECHNICAL_SECONDS if is_fault else DAY)


class _Known(IntEnum):
    """What may be known of a member, and what its time says."""

    STARTED = 0  # when the quota was entered; this and the next ones leave their survey out for good
    INVITED = 1  # when another sender invited the member, such as a campaign
    ENDED = 2  # when
    COMPLETED = 3  # when
    UNCLEAR = 4  # when it was requested
    LEASED = 5  # until when; then it is unclear
    GIVEN = 6  # until when its link is given; then the survey is left out
    QUOTA_REFUSED = 7  # until when, as the next
    SURVEY_REFUSED = 8
    MEMBER_REFUSED = 9
    HELD = 10  # when the link was requested that waits; while its quota is closed, the survey is left out


_FOR_GOOD: Final = {_Known.STARTED, _Known.INVITED, _Known.ENDED, _Known.COMPLETED, _Known.UNCLEAR}
_FROM_THEN: Final = {_Known.LEASED, _Known.GIVEN}
_UNTIL_THEN: Final = {_Known.QUOTA_REFUSED, _Known.SURVEY_REFUSED, _Known.MEMBER_REFUSED}
_OF_LINK: Final = (_Known.UNCLEAR, _Known.LEASED, _Known.GIVEN, _Known.HELD, _Known.QUOTA_REFUSED)

_Facts: TypeAlias = "dict[tuple[int, int, int, int], float]"
"""What is known, of which quota, survey and wave (0 if it is of none, or of any), and its time."""

_PACKED: Final = Struct("<Bqqqd")


class NotForMember(NamedTuple):
    """What a member does not get: surveys with their wave, 0 for any, and other quotas."""

    surveys: set[tuple[int, int]]
    quotas: set[int]

    def has(self, quota_id: int, survey_id: int, wave_id: int) -> bool:
        """Return whether a quota is left out."""
        surveys = self.surveys
        return quota_id in self.quotas or (survey_id, wave_id) in surveys or (survey_id, 0) in surveys


class MemberHistory:
    """What is known of one member. A survey that was entered, has ended or is unclear is left out for good.

    Another wave is another survey.
    """

    __slots__ = ("facts",)

    def __init__(self, facts: _Facts | None = None) -> None:
        self.facts: _Facts = {} if facts is None else facts

    def add_link(self, link: Link, now: float) -> None:
        of_quota = link.quota_id, link.survey_id, link.wave_id
        for known in _OF_LINK:  # it may have had another state before
            self.facts.pop((known, *of_quota), None)
        if link.entered is not None:
            self.facts[_Known.STARTED, *of_quota] = link.entered
        elif link.state == "refused":
            self._refuse(link)
        elif link.state == "unclear" or (link.state == "asking" and not link.is_leased(now)):
            self.facts[_Known.UNCLEAR, *of_quota] = link.asked
        elif link.state == "asking":
            self.facts[_Known.LEASED, *of_quota] = link.until
        else:
            self.facts[_Known.HELD, *of_quota] = link.asked
            if link.until < inf:
                self.facts[_Known.GIVEN, *of_quota] = link.until

    def _refuse(self, link: Link) -> None:
        match lesson_of(link.code):
            case Lesson.MEMBER:
                key = (_Known.MEMBER_REFUSED, 0, 0, 0)
            case Lesson.MEMBER_SURVEY | Lesson.SURVEY:
                key = (_Known.SURVEY_REFUSED, 0, link.survey_id, link.wave_id)
            case _:
                key = (_Known.QUOTA_REFUSED, link.quota_id, link.survey_id, link.wave_id)
        self.facts[key] = max(link.until, self.facts.get(key, -inf))

    def add_start(self, survey_id: int, wave_id: int, quota_id: int, at: float) -> None:
        self.facts[_Known.STARTED, quota_id, survey_id, wave_id] = at

    def add_invite(self, survey_id: int, wave_id: int, at: float) -> None:
        """Add an invite of another sender, such as a campaign: the member holds its link."""
        self.facts[_Known.INVITED, 0, survey_id, wave_id] = at

    def add_end(
        self, kind: str, survey_id: int, wave_id: int, original_survey_id: int | None, at: float
    ) -> None:
        self.facts[_Known.ENDED, 0, survey_id, wave_id] = at
        if original_survey_id is not None and original_survey_id != survey_id:
            self.facts[_Known.ENDED, 0, original_survey_id, 0] = at  # nobody says of which wave
        if kind == "completion":
            self.facts[_Known.COMPLETED, 0, survey_id, wave_id] = at

    def packed(self) -> bytes:
        """Return the facts in 33 bytes each; what no router writes raises one of `UNUSABLE`."""
        return b"".join(_PACKED.pack(*key, at) for key, at in self.facts.items())

    def entered_at(self, quota_id: int) -> float | None:
        entered = (
            at for (known, quota, *_), at in self.facts.items() if known == _Known.STARTED and quota == quota_id
        )
        return next(entered, None)

    def has_ended(self, survey_id: int, wave_id: int) -> bool:
        return not self.facts.keys().isdisjoint((_Known.ENDED, 0, survey_id, wave) for wave in {0, wave_id})

    def left_out(self, now: float, is_open: Callable[[int], bool]) -> NotForMember:
        """Return what the member does not get now."""
        surveys, quotas = set[tuple[int, int]](), set[int]()
        for (known, quota_id, *survey), at in self.facts.items():
            if known == _Known.QUOTA_REFUSED:
                if at > now:
                    quotas.add(quota_id)
            elif (
                known in _FOR_GOOD
                or (known in _UNTIL_THEN and at > now)
                or (known in _FROM_THEN and at <= now)
                or (known == _Known.HELD and not is_open(quota_id))
            ):
                surveys.add((survey[0], survey[1]))
        return NotForMember(surveys, quotas)

    def gets_nothing(self, caps: Caps, now: float) -> bool:
        """Return whether the member was refused as such, or has reached a cap of the day."""
        if self.facts.get((_Known.MEMBER_REFUSED, 0, 0, 0), -inf) > now:
            return True
        midnight = now // DAY * DAY
        today = [key for key, at in self.facts.items() if midnight <= at < midnight + DAY]
        # The invite may be of another wave or survey than its link, and both say that the quota was entered.
        starts = {quota_id for known, quota_id, *_ in today if known == _Known.STARTED}
        completes = sum(known == _Known.COMPLETED for known, *_ in today)
        return len(starts) >= caps.starts or completes >= caps.completes


class Histories:
    """The histories of all members, by their text in the store. Packed, each takes some 300 bytes."""

    def __init__(self) -> None:
        self._packed: dict[str, bytes] = {}

    def __len__(self) -> int:
        return len(self._packed)

    def of(self, member: str) -> MemberHistory:
        packed = self._packed.get(member, b"")
        return MemberHistory({(a, b, c, d): at for a, b, c, d, at in _PACKED.iter_unpack(packed)})

    def put(self, member: str, history: MemberHistory) -> None:
        if history.facts:
            self._packed[member] = history.packed()
        else:
            self._packed.pop(member, None)

    async def forget(self, since: float, now: float) -> None:
        """Forget what was before a moment, and refusals that have ended."""
        turns = LoopYielder()
        for member in tuple(self._packed):
            await turns.step()
            facts = self.of(member).facts
            kept = {key: at for key, at in facts.items() if at >= (now if key[0] in _UNTIL_THEN else since)}
            if len(kept) < len(facts):
                self.put(member, MemberHistory(kept))
