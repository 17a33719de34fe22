"""What a member has taken, started or been refused, and what is left out because of it. No input or output."""

from __future__ import annotations

from math import inf
from typing import Final

from attrs import field, frozen

from sampling_async import Invite, from_json
from sampling_async._contract.checks import whole_from_1
from sampling_async._contract.records import hidden
from sampling_async._protocol.lessons import LESSONS, Lesson, rule_for

DAY: Final = 86_400.0  # in seconds, as the next
_TECHNICAL_SECONDS: Final = 600.0
"""How long a pair is left out after a fault of the service or panel; other refusals count for a day."""

CLOCK_STEP: Final = 60.0
"""Seconds by which the clocks of two hosts may differ, or a clock may be set back, without harm."""


@frozen
class Link:
    """A pair of member and quota that was requested."""

    quota_id: int
    survey_id: int
    wave_id: int
    state: str  # asking, invited, refused or unclear
    owner: str | None  # who is asking
    asked: float
    until: float  # until when it is leased, valid or refused
    code: int | None
    invite_json: str | None = field(repr=hidden)
    entered: float | None

    def is_leased(self, now: float) -> bool:
        # A clock that was set back must not hold the member for long.
        return self.state == "asking" and self.asked - CLOCK_STEP <= now < self.until

    def may_be_leased(self, now: float) -> bool:
        """Return whether it is leased by a clock that differs."""
        return self.state == "asking" and abs(now - self.asked) <= CLOCK_STEP

    @property
    def invite(self) -> Invite:
        return from_json(Invite, self.invite_json or "")


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
    is_fault = lesson_of(code) in {Lesson.LATER, Lesson.STOP}
    return now + (_TECHNICAL_SECONDS if is_fault else DAY)


class MemberHistory:
    """What is known of one member. A survey that was entered, has ended or is unclear is left out for good."""

    __slots__ = ("_completed", "_ended", "_quotas", "_started", "_surveys", "_unclear", "_without")

    def __init__(self) -> None:
        self._surveys: dict[int, float] = {}  # until when each is left out
        self._quotas: dict[int, float] = {}
        self._unclear: dict[int, int] = {}  # the surveys of quotas
        self._without = -inf  # until when the member gets nothing
        self._started: dict[int, float] = {}  # when quotas were entered
        self._ended: frozenset[int] = frozenset()  # surveys
        self._completed: dict[tuple[int, int], float] = {}  # when surveys and waves were completed

    def add_link(self, link: Link, now: float) -> None:
        for known in (self._quotas, self._unclear):  # it may have had another state before
            known.pop(link.quota_id, None)
        if link.entered is not None:
            self.add_start(link.survey_id, link.quota_id, link.entered)
        elif link.state == "refused":
            self._refuse(link)
        elif link.state == "unclear" or (link.state == "asking" and not link.is_leased(now)):
            self._unclear[link.quota_id] = link.survey_id

    def _refuse(self, link: Link) -> None:
        match lesson_of(link.code):
            case Lesson.MEMBER:
                self._without = max(self._without, link.until)
            case Lesson.MEMBER_SURVEY | Lesson.SURVEY:
                self._surveys[link.survey_id] = max(link.until, self._surveys.get(link.survey_id, -inf))
            case _:
                self._quotas[link.quota_id] = link.until

    def add_start(self, survey_id: int, quota_id: int, at: float) -> None:
        self._started[quota_id] = at
        self._surveys[survey_id] = inf

    def add_invite(self, survey_id: int) -> None:
        """Add an invite of another sender, such as a campaign: the member holds its link."""
        self._surveys[survey_id] = inf

    def add_end(
        self, kind: str, survey_id: int, wave_id: int, original_survey_id: int | None, at: float
    ) -> None:
        surveys = {survey_id} if original_survey_id is None else {survey_id, original_survey_id}
        self._surveys |= dict.fromkeys(surveys, inf)
        self._ended |= surveys
        if kind == "completion":
            self._completed[survey_id, wave_id] = at

    def entered_at(self, quota_id: int) -> float | None:
        return self._started.get(quota_id)

    def has_ended(self, survey_id: int) -> bool:
        return survey_id in self._ended

    def allows(self, quota_id: int, survey_id: int, now: float) -> bool:
        return not (
            (self._surveys and self._surveys.get(survey_id, -inf) > now)
            or (self._quotas and self._quotas.get(quota_id, -inf) > now)
            or (self._unclear and survey_id in self._unclear.values())
        )

    def gets_nothing(self, caps: Caps, now: float) -> bool:
        """Return whether the member was refused as such, or has reached a cap of the day."""
        midnight = now // DAY * DAY
        return (
            self._without > now
            or sum(at >= midnight for at in self._started.values()) >= caps.starts
            or sum(at >= midnight for at in self._completed.values()) >= caps.completes
        )
