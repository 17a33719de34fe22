"""What became of a campaign, in figures: the source of `summary.json` and of the report."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from math import sqrt
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from attrs import Factory, asdict, evolve, field, frozen

from sampling_async._contract.currencies import CurrencyRates, money_in_words
from sampling_async._contract.frames import html_table
from sampling_async._contract.records import counted

if TYPE_CHECKING:
    from attrs import Attribute

CampaignState: TypeAlias = Literal["planned", "running", "paused", "stopped", "finished"]
"""Where a campaign stands. `stopped`: no run is active, and pairs are pending. `finished`: none is pending."""

WaitKind: TypeAlias = Literal["outage", "paused", "hours", "rate"]
"""Why a campaign requested nothing: an outage of the service, a pause, its hours, or its invites a minute."""

Labels: TypeAlias = "Mapping[tuple[str, str], str]"
"""What answers are called, by question ID and answer ID, and questions, by their ID and an empty text."""


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
        room: How many invites it could use when it was planned, with those of earlier plans.
        planned: Pairs planned.
        invited: Invites made.
        rejected: Pairs refused.
        unknown: Pairs of which an invite may exist.
        value: What an invite is expected to be worth, in the currency of its price.
        closed: Why it was taken out of what is queued; None if it was not.
        currency_id: That currency.
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
    currency_id: int | None = None


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


@frozen(kw_only=True)
class Conversion:
    """Invites and what became of them: of a quota, of a survey, of an hour, or in all.

    Attributes:
        survey_id: The survey, with `wave_id`; None where there are several, as for the next two.
        wave_id: The wave.
        quota_id: The quota.
        hour: The beginning of the hour in which they ended, in UTC. Only hours have it; these have no invites.
        survey_name: The survey's name.
        invited: Invites.
        entered: Invites whose member was sent to the survey, as far as that was recorded.
        completed: Completes. Those that were reconciled later are among them.
        terminated: Terminates, without those that a complete has replaced.
        reconciled: Reconciliations.
        expected: What the invites were expected to bring, in units of the currency. If there are several, in
            the unit of the rates, and None without rates.
        revenue: What they have brought, corrections and reconciliations included; likewise.
        currency_id: The currency; None if there are several, or if these are in the unit of the rates.
        completes_by_ir: The completes that the incidence rates promised for these invites; None if not known,
            as of hours, groups, and plans of an earlier version.
        completes_planned: The completes that the plan counted with; with learned rates, or rates of your own,
            these are not those by IR.
    """

    survey_id: int | None = None
    wave_id: int | None = None
    quota_id: int | None = None
    hour: datetime | None = None
    survey_name: str = ""
    invited: int = 0
    entered: int = 0
    completed: int = 0
    terminated: int = 0
    reconciled: int = 0
    expected: float | None = 0.0
    revenue: Decimal | None = Decimal(0)
    currency_id: int | None = None
    completes_by_ir: float | None = None
    completes_planned: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it, without what is None, and with what is derived."""
        found = asdict(self, value_serializer=_plain) | {"open": self.open, "rate": _rounded(self.rate)}
        found["off_by"] = self.off_by
        if self.interval is not None:
            found["interval"] = [_rounded(share) for share in self.interval]
        return {name: value for name, value in found.items() if value is not None}

    @property
    def open(self) -> int:
        """Invites without an end."""
        return max(0, self.invited - self.completed - self.terminated)

    @property
    def rate(self) -> float | None:
        """The share of invites that ended in a complete, from 0 to 1; None without invites."""
        return min(1.0, self.completed / self.invited) if self.invited else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Between which shares the true one lies, with a probability of 95 % (Wilson); None without invites."""
        if self.rate is None:
            return None
        n, z = self.invited, _95
        middle = (self.rate + z * z / (2 * n)) / (1 + z * z / n)
        half = z * sqrt(self.rate * (1 - self.rate) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        # Of no completes and of all, the bound is the share itself, but for rounding.
        return max(0.0, min(self.rate, middle - half)), min(1.0, max(self.rate, middle + half))

    @property
    def span(self) -> tuple[float, float] | None:
        """`interval` as completes: so many these invites may bring by chance; None without invites."""
        if self.interval is None:
            return None
        low, high = self.interval
        return self.invited * low, self.invited * high

    @property
    def off_by(self) -> float | None:
        """How many completes too many (below 0: too few) were planned, beyond what chance explains; 0 within.

        None if that is not known. Open invites count as without a complete.
        """
        if self.span is None or self.completes_planned is None:
            return None
        low, high = self.span
        return round(self.completes_planned - min(max(self.completes_planned, low), high), 2)


@frozen(kw_only=True)
class Ends:
    """What a campaign's invites have brought, see `Conversion`.

    Attributes:
        total: All of them.
        reasons: The number of terminates by reason.
        surveys: By survey and wave, those with most revenue first.
        quotas: By quota, likewise.
        hours: By the hour in which they ended.
    """

    total: Conversion
    reasons: Mapping[str, int] = field(factory=dict[str, int])
    surveys: tuple[Conversion, ...] = field(default=(), repr=counted("surveys"))
    quotas: tuple[Conversion, ...] = field(default=(), repr=counted("quotas"))
    hours: tuple[Conversion, ...] = field(default=(), repr=counted("hours"))

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        parts = {"surveys": self.surveys, "quotas": self.quotas, "hours": self.hours}
        return {
            "total": self.total.to_dict(),
            "reasons": dict(self.reasons),
            **{name: [each.to_dict() for each in several] for name, several in parts.items()},
        }


@frozen(kw_only=True)
class MemberGroup:
    """What came of the members of one group, such as those of an age band.

    Attributes:
        kind: `age`, `gender`, `region` or `device`.
        question: The column of the panel: a question ID, `device_type` or `region`.
        value: Which group: an answer ID, or years such as `18-24`; `not known` without an answer or with
            several, and `others` beyond 254 groups.
        planned: Planned pairs.
        invited: Invites.
        ends: What they have brought; None if no ledger of outcomes was given.
    """

    kind: str
    question: str
    value: str
    planned: int
    invited: int
    ends: Conversion | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        ends = {} if self.ends is None else self.ends.to_dict()
        return asdict(evolve(self, ends=None), filter=lambda _, value: value is not None) | ends


@frozen(kw_only=True)
class CurrencySums:
    """What is in one of the currencies of a campaign, in its units; see `Summary`.

    Attributes:
        planned_value: What all planned pairs are worth.
        expected_value: What the invites are expected to bring.
        possible_value: What all invites bring if each ends in a complete.
        revenue: What they have brought; None if no ledger of outcomes was given.
    """

    planned_value: float = 0.0
    expected_value: float = 0.0
    possible_value: float = 0.0
    revenue: Decimal | None = None


_95: Final = 1.96  # standard deviations on both sides of 95 %
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
        asked: Pairs that were requested at least once. Pending pairs that wait for another try are among them.
        settled: Unknown pairs that have an invite after all, as notifications prove; see `Campaign.settle`.
        requests: Requests sent.
        planned_value: What all planned pairs are worth, if each gets an invite.
        expected_value: What the invites are expected to bring: for each invite the value of its quota.
        possible_value: What all invites bring if each ends in a complete: the sum of their amounts.
        spent: The most that the invites can have cost you, with the pairs that are `unknown`; see
            `Limits.max_spend`.
        currency_id: The currency of the prices; None if there are several. Then the values above, but for
            `spent`, are None without rates: they do not add. With rates, they are in the unit of the rates.
        by_currency: The same values in each currency, by its ID.
        currency_rates: The rates that the latest plan was made with.
        codes: The result codes, the most frequent first.
        skipped: How many pairs were skipped for which reason.
        quotas: The quotas that were planned, those with most room first.
        timeline: The campaign in at most 240 intervals.
        waits: The times in which it requested nothing.
        limits: The limits that held last, in words.
        ends: What the invites have brought; None if no ledger of outcomes was given.
        groups: The same by age, gender, region and device of the members, as far as the panel had that.
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
    settled: int = 0
    requests: int = 0
    planned_value: float | None = 0.0
    expected_value: float | None = 0.0
    possible_value: float | None = 0.0
    spent: float = 0.0
    currency_id: int | None = None
    by_currency: Mapping[int, CurrencySums] = field(factory=dict[int, CurrencySums])
    currency_rates: CurrencyRates | None = None
    codes: tuple[CodeCount, ...] = field(default=(), repr=counted("codes"))
    skipped: Mapping[str, int] = field(factory=dict[str, int])
    quotas: tuple[QuotaFill, ...] = field(default=(), repr=counted("quotas"))
    timeline: tuple[Moment, ...] = field(default=(), repr=counted("intervals"))
    waits: tuple[Wait, ...] = field(default=(), repr=counted("waits"))
    limits: Mapping[str, str] = field(factory=dict[str, str])
    ends: Ends | None = None
    groups: tuple[MemberGroup, ...] = field(default=(), repr=counted("groups"))

    @property
    def unknown_in_words(self) -> str:
        """What is known of the unknown pairs by now; empty if there are none, or nothing is known."""
        unknown, settled = self.pairs.unknown, self.settled
        if not settled:
            return ""
        return f"{unknown:,} unknown: {settled:,} settled as invited, {unknown - settled:,} open"

    @property
    def invites_per_request(self) -> float:
        """How many invites a request brought on average; 0 without a request."""
        return self.pairs.invited / self.requests if self.requests else 0.0

    @property
    def success_rate(self) -> float:
        """The share of the requested pairs that ended in an invite, from 0 to 1."""
        return self.pairs.invited / self.asked if self.asked else 0.0

    def worth(self, name: str = "expected_value") -> str:
        """Return a value in words, with its currency; with several currencies, what is in each.

        Args:
            name: One of those that `CurrencySums` has.
        """
        sums = {each: getattr(of, name) or 0 for each, of in self.by_currency.items()}
        if name == "revenue":
            total = None if self.ends is None else self.ends.total.revenue
        else:
            total = getattr(self, name)
        return money_in_words(total, self.currency_id, sums, self.currency_rates)

    def _repr_html_(self) -> str:
        """Return a small table for notebooks: the pairs by what became of them."""
        rows = [(name, getattr(self.pairs, name)) for name in ("planned", *_ENDS)]
        rows += [("requests", self.requests), ("members with an invite", self.invited_members)]
        return html_table(f"{self.state}{': ' * bool(self.reason)}{self.reason}", ("pairs", ""), rows)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON has it; times are ISO 8601 in UTC."""
        return asdict(evolve(self, ends=None, groups=()), value_serializer=_plain) | {
            "ends": None if self.ends is None else self.ends.to_dict(),
            "groups": [each.to_dict() for each in self.groups],
            "invites_per_request": round(self.invites_per_request, 4),
            "success_rate": round(self.success_rate, 4),
        }


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 4)


def _plain(_: type, __: Attribute[Any] | None, value: Any) -> Any:
    if isinstance(value, Decimal):
        return str(value)
    return value.isoformat() if isinstance(value, datetime) else value
