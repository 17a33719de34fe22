"""What became of a campaign, in figures: the source of `summary.json` and of the report."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from attrs import Factory, asdict, field, frozen

from sampling_async._contract.frames import html_table
from sampling_async._contract.records import counted

if TYPE_CHECKING:
    from attrs import Attribute

CampaignState: TypeAlias = Literal["planned", "running", "paused", "stopped", "finished"]
"""Where a campaign stands. `stopped`: no run is active, and pairs are pending. `finished`: none is pending."""

WaitKind: TypeAlias = Literal["outage", "paused", "hours", "rate"]
"""Why a campaign requested nothing: an outage of the service, a pause, its hours, or its invites a minute."""


@frozen(kw_only=True)
class Pairs:
    """Numbers of pairs of a member and a quota, by what became of them.

    `planned == invited + rejected + not_sent + unknown + skipped + pending`, always.

    Attributes:
        planned: All pairs that were ever planned.
        invited: The service made an invite.
        rejected: The service returned another result code.
        not_sent: It could not be sent, several times.
        unknown: It was sent, and no usable response came: an invite may exist.
        skipped: It was not requested, because of earlier refusals; see `Summary.skipped`.
        pending: It has not been requested yet, or waits for its response.
    """

    planned: int = 0
    invited: int = 0
    rejected: int = 0
    not_sent: int = 0
    unknown: int = 0
    skipped: int = 0
    pending: int = 0


@frozen(kw_only=True)
class CodeCount:
    """How often the service returned a result code.

    Attributes:
        result_code: The code; None for pairs without a response.
        result: Its name, as the service wrote it last.
        pairs: How many pairs got it.
        lesson: What the campaign does about it, a `Lesson`.
        advice: What a person can do about it, in one sentence.
    """

    result_code: int | None
    result: str
    pairs: int
    lesson: str
    advice: str


@frozen(kw_only=True)
class QuotaFill:
    """How far a quota was filled.

    Attributes:
        quota_id: The quota.
        survey_id: Its survey, with `wave_id`.
        wave_id: The wave.
        survey_name: The survey's name.
        room: How many invites it could use when it was planned.
        planned: Pairs planned.
        invited: Invites made.
        rejected: Pairs refused.
        unknown: Pairs of which an invite may exist.
        value: What an invite is expected to be worth, in the currency of its price.
        closed: Why it was taken out of what is queued; None if it was not.
    """

    quota_id: int
    survey_id: int
    wave_id: int
    survey_name: str
    room: int
    planned: int
    invited: int
    rejected: int
    unknown: int
    value: float
    closed: str | None = None


@frozen(kw_only=True)
class Moment:
    """What happened in an interval of a campaign; the intervals are of equal length.

    Attributes:
        at: When the interval began.
        seconds: Its length.
        requests: Requests that ended in it, with a response or without.
        invited: Invites made.
        rejected: Pairs refused.
        failed: Pairs that ended `not_sent` or `unknown`.
        latency: The median seconds of its requests; None if there were none.
        latency_95: What 95 % of them did not exceed.
        limit: The client's adaptive limit for bulk invites at its end; None if not known.
    """

    at: datetime
    seconds: float
    requests: int = 0
    invited: int = 0
    rejected: int = 0
    failed: int = 0
    latency: float | None = None
    latency_95: float | None = None
    limit: float | None = None


@frozen(kw_only=True)
class Wait:
    """A time in which the campaign requested nothing, although pairs were pending."""

    kind: WaitKind
    began: datetime
    ended: datetime

    @property
    def seconds(self) -> float:
        """How long it was."""
        return (self.ended - self.began).total_seconds()


_ENDS: Final = ("invited", "rejected", "not_sent", "unknown", "skipped", "pending")


def _asked_by_now(summary: Summary) -> int:
    """Return how many pairs were requested, if none of those that are pending was."""
    return summary.pairs.planned - summary.pairs.pending - summary.pairs.skipped


@frozen(kw_only=True)
class Summary:
    """What became of a campaign.

    Attributes:
        state: Where it stands.
        reason: Why it is paused or stopped, in one sentence; empty if it is not.
        planned_at: When it was planned.
        started_at: When its first run began; None if there was none.
        ended_at: When its last run ended; None if it is running.
        active_seconds: How long its runs took together.
        runs: How many runs there were.
        members: Members of the panel.
        matched: Members with at least one pair.
        invited_members: Members with at least one invite.
        pairs: The pairs, by what became of them.
        asked: Pairs that were requested: all but those skipped or pending, and of the pending ones those that
            wait for another try.
        requests: Requests sent.
        planned_value: What all planned pairs are worth, if each gets an invite.
        expected_value: What the invites are expected to bring: for each invite the value of its quota.
        possible_value: What all invites bring if each ends in a complete: the sum of their amounts.
        spent: The most that the invites can have cost you, pairs that are `unknown` included; see
            `Limits.max_spend`.
        currency_id: The currency of the prices; None if there are several.
        codes: The result codes, the most frequent first.
        skipped: How many pairs were skipped for which reason.
        quotas: The quotas that were planned, those with most room first.
        timeline: The campaign in at most 240 intervals.
        waits: The times in which it requested nothing.
        limits: The limits that held last, in words.
    """

    state: CampaignState
    reason: str = ""
    planned_at: datetime
    started_at: datetime | None = None
    ended_at: datetime | None = None
    active_seconds: float = 0.0
    runs: int = 0
    members: int = 0
    matched: int = 0
    invited_members: int = 0
    pairs: Pairs = field(factory=Pairs)
    asked: int = field(default=Factory(_asked_by_now, takes_self=True))
    requests: int = 0
    planned_value: float = 0.0
    expected_value: float = 0.0
    possible_value: float = 0.0
    spent: float = 0.0
    currency_id: int | None = None
    codes: tuple[CodeCount, ...] = field(default=(), repr=counted("codes"))
    skipped: Mapping[str, int] = field(factory=dict[str, int])
    quotas: tuple[QuotaFill, ...] = field(default=(), repr=counted("quotas"))
    timeline: tuple[Moment, ...] = field(default=(), repr=counted("intervals"))
    waits: tuple[Wait, ...] = field(default=(), repr=counted("waits"))
    limits: Mapping[str, str] = field(factory=dict[str, str])

    @property
    def invites_per_request(self) -> float:
        """How many invites a request brought on average; 0 without a request."""
        return self.pairs.invited / self.requests if self.requests else 0.0

    @property
    def success_rate(self) -> float:
        """The share of the requested pairs that ended in an invite, from 0 to 1."""
        return self.pairs.invited / self.asked if self.asked else 0.0

    def _repr_html_(self) -> str:
        """Return a small table for notebooks: the pairs by what became of them."""
        rows = [(name, getattr(self.pairs, name)) for name in ("planned", *_ENDS)]
        rows += [("requests", self.requests), ("members with an invite", self.invited_members)]
        return html_table(f"{self.state}{': ' * bool(self.reason)}{self.reason}", ("pairs", ""), rows)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON has it; times are ISO 8601 in UTC."""
        return asdict(self, value_serializer=_plain) | {
            "invites_per_request": round(self.invites_per_request, 4),
            "success_rate": round(self.success_rate, 4),
        }


def _plain(_: type, __: Attribute[Any] | None, value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else value
