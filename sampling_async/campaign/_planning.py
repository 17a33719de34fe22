"""Make the plan of a campaign: check and match a panel, allocate it, and write the pairs to the ledger."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, compress
from math import inf
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from attrs import evolve, field, frozen

from sampling_async._contract.checks import count_of, number_from_0
from sampling_async._contract.currencies import (
    PLACES_ALONE,
    CurrencyRates,
    add_to,
    money_in_words,
    not_compared,
)
from sampling_async._contract.errors import InvalidRequestError
from sampling_async._protocol.lessons import Rule, qualifying
from sampling_async.campaign._earlier import held_in, is_final, stored_code
from sampling_async.campaign._ledger_file import PlannedQuota
from sampling_async.campaign._panel import Panel, missing_questions, naming_panel, offered_less, source_of
from sampling_async.campaign._rooms import RoomTakenError, Taken
from sampling_async.matching import Allocate, PanelMatcher, QuotaIndex
from sampling_async.matching.panel._arrow import arrow
from sampling_async.matching.panel._columns import (
    GROUP_QUESTIONS,
    REGION,
    GroupReader,
)
from sampling_async.matching.panel._top_k import FlatPairs
from sampling_async.notifications._stores import AnyStore

if TYPE_CHECKING:
    from sampling_async._contract.records import Quota, Survey
    from sampling_async._pacing.threads import CancelFlag
    from sampling_async.campaign._ledger import CampaignLedger, Planning
    from sampling_async.campaign._panel import ReopenablePanel
    from sampling_async.campaign._rooms import SharedRoom

Cost: TypeAlias = "Mapping[int, float] | Callable[[Survey, Quota], float] | float"
"""What an invite costs you: one number, by quota ID, or a function of the `Survey` and the `Quota`."""

OnMembers: TypeAlias = "Callable[[int, int | None], object]"
"""Called, in a thread, with how many members were read, and how many there are to read; None if not known."""

_NAMED: Final = 5
_REQUEST: Final = 100


@frozen(kw_only=True)
class Plan:
    """What a campaign is going to do.

    Attributes:
        members: Members of the panel.
        matched: Members with at least one pair.
        pairs: Pairs of a member and a quota.
        certain: Pairs that match certainly. The others may match.
        requests: Requests for these pairs. Quotas that replace refused ones need further requests.
        quotas: Quotas with at least one pair.
        room: How many invites all quotas can use.
        expected_invites: How many of the pairs are expected to get an invite, up to the cap: all certain ones,
            and the share `Allocate.possible` of the others.
        expected_value: What these invites bring: for each the value of its quota. With several currencies,
            in the unit of `Allocate.currency_rates`; None without rates: what is in several does not add.
        currency_id: The currency of the prices; None if there are several.
        by_currency: What these invites bring in each currency, by its ID; empty with values of your own.
        currency_rates: The rates that the plan was made with.
        number: 1 for the first plan of a ledger, then one more for each top-up.
        warnings: What you should check before the run.
        limits: The limits, in words.
    """

    members: int
    matched: int
    pairs: int
    certain: int
    requests: int
    quotas: int
    room: int
    expected_invites: int
    expected_value: float | None
    currency_id: int | None
    by_currency: Mapping[int, float] = field(factory=dict[int, float])
    currency_rates: CurrencyRates | None = None
    number: int = 1
    warnings: tuple[str, ...] = ()
    limits: Mapping[str, str] = field(factory=dict[str, str])

    @property
    def worth(self) -> str:
        """`expected_value` in words, with its currency; with several currencies, what is in each."""
        return money_in_words(self.expected_value, self.currency_id, self.by_currency, self.currency_rates)

    def __str__(self) -> str:
        lines = [
            f"{count_of(self.members, 'member')}, {self.matched:,} of them with quotas",
            (
                f"{count_of(self.pairs, 'pair')} in {count_of(self.requests, 'request')},"
                f" {self.certain:,} of them match certainly"
            ),
            f"{count_of(self.expected_invites, 'invite')} expected, worth {self.worth}",
            f"{count_of(self.quotas, 'quota')} with room for {count_of(self.room, 'invite')}",
            *(f"limit: {name}: {value}" for name, value in self.limits.items()),
            *(f"note: {warning}" for warning in self.warnings),
        ]
        return "\n".join(lines)


class NothingOpenError(InvalidRequestError):
    """There is no quota to plan for. An empty inventory may be a fault of the service for a moment."""


@frozen(kw_only=True)
class Planner:
    panel: Panel
    index: QuotaIndex
    allocate: Allocate
    rules: Mapping[int, Rule]  # what is done about result codes; for a top-up, which says what was final
    cost: Cost
    columns: Mapping[str, str]  # what each named column of the panel stands for
    workers: int
    on_members: OnMembers
    notes: Sequence[str]  # of what was left out before
    leave_out: Sequence[AnyStore] = ()  # what members got in earlier nights is not planned
    owner: tuple[str, str] | None = None  # the service and panel of the client; None without one
    taken: Taken = field(factory=dict[tuple[int, int], int])  # room that other campaigns hold

    def plan_beside_others(
        self, rooms: SharedRoom | None, ledger: CampaignLedger, wanted: CancelFlag, *, now: float, **more: Any
    ) -> None:
        """Write a plan for the room that other campaigns leave, and take that room."""
        if rooms is None:
            self.plan(ledger, wanted, now=now, **more)
            return
        while True:
            taken = rooms.of_others(now)
            take = partial(rooms.take_patiently, now=now, seen=taken, check=wanted.check)
            try:
                evolve(self, taken=taken).plan(ledger, wanted, now=now, take=take, **more)
            except RoomTakenError:
                wanted.check()
            else:
                return

    def plan(
        self,
        ledger: CampaignLedger,
        wanted: CancelFlag,
        *,
        now: float,
        open_seconds: float | None = None,
        facts: Mapping[str, object],
        take: Callable[[Planning], object] | None = None,
    ) -> None:
        """Write a plan; for a top-up, `open_seconds` is how long an invite may still end in a complete.

        `facts` are written with it. `take` is called before it is there: if it raises, there is none.
        """
        if not self._currencies:
            raise NothingOpenError("the inventory has no quota that is open, so nothing is planned")
        allocate, left = self.allocate, dict[str, int]()
        if allocate.counts_prices_alike(self._currencies):
            allocate = evolve(allocate, currency_rates=PLACES_ALONE)  # said in the plan, so not logged too
        if not allocate.reserves:
            # Without reserves a refusal leaves a member with less, and the lesson from it helps nobody.
            allocate = evolve(allocate, reserves=allocate.per_member)
        if open_seconds is not None:
            since, most = now - open_seconds, allocate.per_member
            left = {code: max(0, most - count) for code, count in ledger.open_of_members(since)}
            allocate = self._room_left(allocate, ledger.open_invites(since))
        if self.taken:
            allocate = self._room_left(allocate, ((*place, count) for place, count in self.taken.items()))
        held = self._held(ledger, is_top_up=open_seconds is not None)
        matcher = PanelMatcher(self.index, allocate)
        weight = frozenset[str]() if allocate.weight is None else frozenset({allocate.weight})
        # A region that nobody has named may be anything.
        groups_in = GROUP_QUESTIONS | ({REGION} & {*self.columns.values()})
        source = source_of(self.panel, matcher, self.columns, weight, groups_in)
        groups = GroupReader(source.columns, self.index.kinds, ledger.fact("groups"))

        passes, members = (2 if allocate.prices is None else 1), 0
        total = None if source.members is None else passes * source.members

        def batches() -> Iterator[Any]:
            nonlocal members
            first = 0
            for batch in wanted.each(source.opened()):
                yield offered_less(batch, first, held, left) if held or left else batch
                first += len(batch)
                members += len(batch)
                self.on_members(members, total)

        with naming_panel(source):
            priced = matcher
            if allocate.prices is None:
                priced = matcher.derive_prices(batches(), workers=self.workers)
            with ledger.planning() as planning:
                allocated = wanted.each(priced.run(groups.following(batches()), workers=self.workers))
                self._write(planning, priced, allocated, source, now, groups=groups)
                planning.note(**facts)
                wanted.check()
                if take is not None:
                    take(planning)

    def _write(
        self,
        planning: Planning,
        matcher: PanelMatcher,
        batches: Iterable[Any],
        source: ReopenablePanel,
        now: float,
        *,
        groups: GroupReader,
    ) -> None:
        terms = matcher.terms()
        quotas = list(self._quotas(terms.rooms, terms.values, matcher.output.currency_rates))
        planning.add_quotas(quotas)
        members = matched = requests = 0
        by_quota, sure = Counter[int](), Counter[int]()  # the pairs of each quota, and those that are certain
        for batch in batches:
            codes = batch.column(0).to_pylist()
            planning.check(codes, members, source.name)
            members += len(codes)
            pairs = FlatPairs.of(batch)
            matched += len(pairs.members)
            requests += int((-(-pairs.counts // _REQUEST)).sum())
            quota_ids, is_certain = pairs.quota_ids.tolist(), pairs.is_certain.tolist()
            by_quota.update(quota_ids)
            sure.update(compress(quota_ids, is_certain))
            reserves = batch.column(3).take(arrow(pairs.members)).to_pylist()
            grouped = groups.taken(len(codes))[pairs.members].tolist()
            numbers = planning.add_members([codes[at] for at in pairs.members.tolist()], reserves, grouped)
            planning.add_pairs(pairs.repeated(numbers), quota_ids, pairs.ranks.tolist(), is_certain)
        if not members:
            raise InvalidRequestError(f"{source.name} has no members")
        used = [quota for quota in quotas if by_quota[quota.id]]
        currencies = {quota.currency for quota in used}
        rates = self.allocate.currency_rates
        chance = self.allocate.possible
        expected = {id_: sure[id_] + chance * (number - sure[id_]) for id_, number in by_quota.items()}
        planning.note(
            planned_at=now,
            members=members,
            matched=matched,
            pairs=by_quota.total(),
            certain=sure.total(),
            requests_planned=requests,
            quotas=len(+by_quota),
            room=sum(quota.room for quota in used),
            survey_rooms=json.dumps(dict(terms.survey_rooms)),
            invites=round(sum(expected.values())),
            invited_before=planning.invited(),
            values=json.dumps(sums_by_currency((each, each.value * expected[each.id]) for each in used)),
            currency_rates="" if rates is None else json.dumps([dict(rates.by_id), dict(rates.names)]),
            own_values="" if self.allocate.value is None else "1",
            currency="" if len(currencies) != 1 else currencies.pop(),
            groups=groups.to_json(),
            chances=json.dumps(self._chances(planning, terms.chances)),
            warnings="\n".join(self._warnings(source, matcher)),
        )

    def _quotas(
        self, rooms: Mapping[int, int], values: Mapping[int, float], rates: CurrencyRates | None
    ) -> Iterator[PlannedQuota]:
        for target in self.index.quota_ids.targets():
            survey, quota = target.survey, target.quota
            of_survey = survey.survey_id, survey.wave_id, survey.survey_name or "", survey.price.currency_id
            room, value = rooms.get(quota.quota_id, 0), values.get(quota.quota_id, 0.0)
            if self.allocate.value is None:
                # What is compared is in one unit; what an invite is worth is in the currency of its price.
                if rates is PLACES_ALONE:
                    value *= survey.price.amount
                elif rates is not None:
                    value /= rates.by_id[survey.price.currency_id]
            yield PlannedQuota(quota.quota_id, *of_survey, room, value, _cost(self.cost, survey, quota))

    def _chances(
        self, planning: Planning, chances: Mapping[int, float]
    ) -> dict[str, dict[int, tuple[float, float]]]:
        """Return by plan and quota the IR, and the chance of a complete that the plan counts with."""
        earlier = planning.read("SELECT value FROM facts WHERE name = 'chances'")
        quotas = ((target.quota.quota_id, target.survey) for target in self.index.quota_ids.targets())
        found = {id_: (round(qualifying(survey), 6), round(chances[id_], 6)) for id_, survey in quotas}
        return (json.loads(earlier[0][0]) if earlier else {}) | {str(planning.plan): found}

    @property
    def _currencies(self) -> set[int]:
        return {target.survey.price.currency_id for target in self.index.quota_ids.targets()}

    def _warnings(self, source: ReopenablePanel, matcher: PanelMatcher) -> Iterator[str]:
        yield from self.notes
        here = {target.survey.survey_id for target in self.index.quota_ids.targets()}
        if taken := [count for (_, survey_id), count in self.taken.items() if survey_id in here]:
            yield (
                f"other campaigns hold room for {count_of(sum(taken), 'pair')} in"
                f" {count_of(len(taken), 'quota')} of these surveys; it was left to them"
            )
        if self.allocate.counts_prices_alike(self._currencies):
            yield not_compared(self._currencies)
        missing = missing_questions(source, matcher)
        if missing:
            shown = ", ".join(map(str, missing[:_NAMED])) + (", ..." if len(missing) > _NAMED else "")
            yield (
                f"the panel has no column for {len(missing):,} of {len(matcher.questions):,} questions, so "
                f"they count as not answered: {shown}"
            )
        if self.index.diagnostics:
            first = self.index.diagnostics[0]
            yield (
                f"the inventory has {len(self.index.diagnostics):,} oddities, which count as possible; the "
                f"first: quota {first.quota_id}, {first.message}"
            )

    # --- What members got before

    def _held(self, ledger: CampaignLedger, *, is_top_up: bool) -> dict[str, set[int]]:
        """Return the surveys that must not be requested again for each member, by its `stored_code`."""
        surveys: dict[str, set[int]] = {}
        held = (
            (code, survey_id, wave_id)
            for code, survey_id, wave_id, state, result_code in (ledger.delivered() if is_top_up else ())
            if is_final(self.rules, state, result_code)
        )
        known = partial(held_in, rules=self.rules, own=ledger.path, owner=self.owner)
        waves: dict[int, set[int]] = {}
        for target in self.index.quota_ids.targets():
            waves.setdefault(target.survey.survey_id, set()).add(target.survey.wave_id)
        for code, survey_id, wave_id in chain(held, *map(known, self.leave_out)):
            # Another wave is another survey; 0 stands for any.
            if survey_id in waves and (not wave_id or wave_id in waves[survey_id]):
                surveys.setdefault(stored_code(code), set()).add(survey_id)
        return surveys

    def _room_left(self, allocate: Allocate, used: Iterable[tuple[int, int, int]]) -> Allocate:
        """Return the allocation with the room that pairs leave, given as quota, survey and number."""
        terms = PanelMatcher(self.index, allocate).terms()
        rooms, survey_rooms = dict(terms.rooms), dict(terms.survey_rooms)
        for quota_id, survey_id, count in used:
            if quota_id in rooms:
                rooms[quota_id] = max(0, rooms[quota_id] - count)
            if survey_id in survey_rooms:
                survey_rooms[survey_id] = max(0, survey_rooms[survey_id] - count)
        return evolve(allocate, room=rooms, survey_room=survey_rooms)


def plan_of(ledger: CampaignLedger) -> Plan | None:
    """Return the plan in a ledger; None if there is none."""
    if not ledger.plan:
        return None
    with ledger.as_written():
        return _plan_in(ledger)


def _plan_in(ledger: CampaignLedger) -> Plan:
    facts = dict(ledger.read("SELECT name, value FROM facts"))
    limits = ledger.limits()
    invites = int(facts["invites"])
    sums = {int(each): amount for each, amount in json.loads(facts["values"]).items()}
    if limits.max_invites is not None:
        # Earlier plans of the ledger have used a part of the cap.
        left = max(0, limits.max_invites - int(facts["invited_before"]))
        share = min(1.0, left / invites) if invites else 0.0
        invites, sums = min(invites, left), {each: share * amount for each, amount in sums.items()}
    counts: dict[str, Any] = {
        name: int(facts[name]) for name in ("members", "matched", "pairs", "certain", "quotas", "room")
    }
    return Plan(
        **counts,
        requests=int(facts["requests_planned"]),
        expected_invites=invites,
        expected_value=ledger.adding()(sums),
        currency_id=int(facts["currency"]) if facts["currency"].isdecimal() else None,
        by_currency={} if facts["own_values"] else sums,
        currency_rates=ledger.currency_rates(),
        number=ledger.plan,
        warnings=tuple(filter(None, facts["warnings"].split("\n"))),
        limits=limits.in_words(),
    )


def sums_by_currency(values: Iterable[tuple[PlannedQuota, float]]) -> dict[int, float]:
    """Return the sums of some values of quotas, by currency."""
    sums: dict[int, float] = {}
    for quota, value in values:
        add_to(sums, quota.currency or 0, value)
    return sums


def _cost(cost: Cost, survey: Survey, quota: Quota) -> float:
    if isinstance(cost, Mapping):
        found: float = cost.get(quota.quota_id, 0.0)
    else:
        found = cost(survey, quota) if callable(cost) else cost
    name = f"the cost of quota {quota.quota_id}"
    if number_from_0(found, name) == inf:
        raise InvalidRequestError(f"{name} must be a finite number")
    return float(found)
