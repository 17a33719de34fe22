"""The output `Allocate`: the quotas of each member, so that all quotas get as many members as they can use."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from attrs import evolve, field, frozen

from sampling_async import InvalidRequestError
from sampling_async._contract.checks import (
    number_above_0,
    require_instance,
    whole_number,
    whole_of_31_bits,
)
from sampling_async._contract.currencies import CurrencyRates, must_count_alike, not_compared, rates_or_none
from sampling_async.matching.panel._arrow import MEMBER_CODE, arrow, lists_of, member_codes, pa
from sampling_async.matching.panel._columns import (
    INVITES_LEFT,
    columns_read,
    invite_limits,
    weights,
)
from sampling_async.matching.panel._kernel import packed
from sampling_async.matching.panel._prices import (
    SPREAD,
    Prices,
    Rates,
    Value,
    best_first,
    best_of_each,
    chances,
    currencies_of,
    first_of_each,
    market_of,
    numbered,
    prices_of,
)
from sampling_async.matching.panel._sample import PriceSample, hashed, seed_of_64_bits
from sampling_async.matching.panel._top_k import (
    Collector,
    best_of,
    by_member,
    pairs_of,
    places_within,
    ranked_pairs,
    split,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from attrs import Attribute
    from numpy.typing import NDArray

    from sampling_async.matching._program import Target
    from sampling_async.matching.panel._kernel import Kernel
    from sampling_async.matching.panel._plan import CompactInventory, Market
    from sampling_async.matching.panel._top_k import Pairs

_LOG: Final = logging.getLogger("sampling_async.matching")
_MOST_BITS: Final = 12
_STRIDES: Final = np.random.default_rng(7).integers(1, 2**63, _MOST_BITS, dtype=np.uint64) | np.uint64(1)
"""Odd factors that turn a quota ID into numbers of bits."""

_DEPTH: Final = 8
"""Candidates of a member for each quota that it gets: the best ones may be full when its turn comes."""

_MEAN_DEPTH: Final = 4  # candidates of the average member for each quota that it gets

_AT_ONCE: Final = 16_384  # members whose quotas are chosen together


def _share(_: object, attribute: Attribute[Any], value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise InvalidRequestError(f"{attribute.name} must be from 0 to 1, not {value!r:.40}")


def _from_0(_: object, attribute: Attribute[Any], value: object) -> None:
    whole_number(value, attribute.name, least=0, most=2**31 - 1)


def _by_id(_: object, attribute: Attribute[Any], value: object) -> None:
    require_instance(value, Mapping | None, attribute.name, "numbers by ID, such as {17: 100}")


def _value(owner: object, attribute: Attribute[Any], value: object) -> None:
    if not callable(value):
        _by_id(owner, attribute, value)


def _above_0(_: object, attribute: Attribute[Any], value: object) -> None:
    number_above_0(value, attribute.name, "times what is needed")


@frozen
class Allocate:
    """Quotas for each member, chosen together: no quota gets more members than it can use.

    `TopK` gives each member its best quotas, and so sends all members to the same ones, which are full soon.
    Here each quota has a room and a price. Prices are derived from a sample of the panel: if more members would
    take a quota than it can use, its price rises until only members without a better quota take it. Then each
    member, in the order of the panel, gets the quotas with room left whose value exceeds their price the most.
    A member gets one quota of a survey. Recontact lists, exclusions and device types hold as in all outputs.

    Method: prices from a sample, by a subgradient ascent of the dual of the assignment problem, see Agrawal,
    Wang and Ye, "A Dynamic Near-Optimal Algorithm for Online Linear Programming" (Operations Research 62(4),
    2014); then one greedy pass at these prices.

    The panel is read twice, unless `prices` are given, see `PanelMatcher.derive_prices`. Memory does not grow
    with it. The sample, the prices and the candidates of a member do not depend on how the panel is divided
    into batches or among workers. The choice is made in the order of the panel, 16,384 members at a time: the
    same members in another order are given other quotas, of nearly the same value.

    The result has a row for each member with the columns of `TopK`: `member_code`, `quota_ids` (first the
    certain, then the possible ones, both best first) and `certain`. A panel may have a column `invites_left`,
    the most invites that a member may get today, as daily and weekly caps say; null means `per_member`. With
    `reserves`, a column of this name has the next best quotas of each member, the best first and one of each
    survey, in case that one of its quotas turns out to be full. No room is set aside for reserves.

    Attributes:
        per_member: How many quotas of a member at most.
        room: How many invites each quota can use, by quota ID; a quota that is missing gets none. Default: the
            completes that it still needs, divided by the IR and by `rates`, times `overshoot`.
        survey_room: The same by survey ID; a survey that is missing has no cap. Default: as for `room`, by the
            completes that the survey still needs; no cap if `room` is given.
        value: What an invite is worth: by quota ID (a quota that is missing is worth 0), or a function of the
            `Survey` and the `Quota`. Default: the price times the IR.
        currency_rates: What one unit of each currency is worth, by currency ID, if the prices are in several.
            Without rates, each of these prices counts as 1, and a warning is logged.
        weight: A column of the panel, a number of 0 or more by which the value counts for a member, such as its
            expected response; null counts as 1. Any expression of your columns can make it.
        rates: The share of invites that members follow: one number, or by quota ID. Default: 1, not known. With
            the `LearnedRates` of a ledger of outcomes, the share of invites that end in a complete, by which
            the price is multiplied in place of the IR.
        overshoot: A factor for the default room: 1.2 is a fifth more.
        possible: The value of a possible match as a share of that of a certain one; 0 leaves it out.
        reserves: How many further quotas of a member are listed at most; 0 for none.
        seed: The seed of the sample and of the order of equal quotas.
        prices: The result of `PanelMatcher.derive_prices`; None: prices are derived from the panel.

    Raises:
        InvalidRequestError: A number is not in its range, or an argument is of another kind.
    """

    per_member: int = field(default=5, validator=whole_of_31_bits)
    room: Mapping[int, int] | None = field(default=None, validator=_by_id, repr=False, kw_only=True)
    survey_room: Mapping[int, int] | None = field(default=None, validator=_by_id, repr=False, kw_only=True)
    value: Value = field(default=None, validator=_value, repr=False, kw_only=True)
    weight: str | None = field(default=None, kw_only=True)
    rates: Rates = field(default=1.0, repr=False, kw_only=True)
    overshoot: float = field(default=1.0, validator=_above_0, kw_only=True)
    possible: float = field(default=0.5, validator=_share, kw_only=True)
    reserves: int = field(default=0, validator=_from_0, kw_only=True)
    seed: int = field(default=0, validator=seed_of_64_bits, kw_only=True)
    prices: Prices | None = field(default=None, repr=False, kw_only=True)
    currency_rates: CurrencyRates | None = field(
        default=None, converter=rates_or_none, repr=False, kw_only=True
    )

    @property
    def schema(self) -> Any:
        """The Arrow schema of the result."""
        return pa.schema([*_RESULT, (RESERVES, pa.list_(pa.int64()))] if self.reserves else _RESULT)

    def market(self, targets: Sequence[Target]) -> Market:
        """Return the market of some quotas."""
        currencies = currencies_of(targets)
        if self.counts_prices_alike(currencies) and self.currency_rates is None:
            _LOG.warning("%s", not_compared(currencies))
        return market_of(
            targets,
            value=self.value,
            room=self.room,
            survey_room=self.survey_room,
            rates=self.rates,
            overshoot=self.overshoot,
            currency_rates=self.currency_rates,
        )

    def counts_prices_alike(self, currency_ids: Iterable[int]) -> bool:
        """Return whether it compares by IR and places alone, because currencies have no rates."""
        return self.value is None and must_count_alike(currency_ids, self.currency_rates)

    @property
    def candidates(self) -> Candidates:
        """The output from which the allocation is made."""
        return Candidates(self.per_member, self.possible, self.weight, self.seed)

    @property
    def price_sample(self) -> PriceSample:
        """The output from which prices are derived."""
        return PriceSample(self.per_member, self.weight, self.seed)

    def with_prices_of(self, sample: Any, source: CompactInventory) -> Allocate:
        """Return this allocation with the prices derived from a sample of the panel."""
        return evolve(self, prices=prices_of(source, sample, self.possible, _MEAN_DEPTH * self.per_member))

    def priced(self, source: CompactInventory) -> Market:
        """Return the market of an inventory with the prices of this allocation, if it has any."""
        assert source.market is not None
        if self.prices is None:
            return source.market
        prices, reach = self.prices.by_quota, self.prices.reach
        ids = source.quota_ids.tolist()
        return evolve(
            source.market,
            prices=np.array([prices.get(quota_id, 0.0) for quota_id in ids]),
            reach=np.array([reach.get(quota_id, 1.0) for quota_id in ids]),
        )

    def merged(self, table: Any, source: CompactInventory) -> Any:
        """Return the result for a whole panel, given the candidates of its parts."""
        return pa.Table.from_batches(self.allocated(table.to_batches(), source), schema=self.schema)

    def allocated(self, candidates: Iterable[Any], source: CompactInventory) -> Iterator[Any]:
        """Yield the result, from batches of candidates in the order of the panel."""
        allocation = _Allocation(self, source)
        for group in _in_groups(candidates):
            yield allocation.of(group)


RESERVES: Final = "reserves"
"""The column of the result with the next best quotas of each member."""

_RESULT: Final = [(MEMBER_CODE, pa.string()), ("quota_ids", pa.list_(pa.int64())), ("certain", pa.int32())]
_CANDIDATES: Final = [
    *_RESULT,
    (INVITES_LEFT, pa.int64()),
    ("weight", pa.float64()),
    ("chance", pa.int64()),  # the hash of the member code
]


@frozen
class Candidates:
    """An output: the quotas that a member may get, more than it gets, because some may be full by then."""

    per_member: int
    possible: float
    weight: str | None
    seed: int

    @property
    def schema(self) -> Any:
        return pa.schema(_CANDIDATES)

    @property
    def columns(self) -> frozenset[str]:
        return columns_read(self.weight)

    def hashes(self, batch: Any, first: int) -> NDArray[np.uint64]:
        return hashed(member_codes(batch, first).to_pylist(), self.seed)

    def completed(self, batch: Any, first: int, lists: Any, certain: Any, hashes: NDArray[np.uint64]) -> Any:
        """Return some members with their candidates, and with what else counts of them."""
        columns = [
            member_codes(batch, first),
            lists,
            certain,
            invite_limits(batch, self.per_member, first),
            weights(batch, self.weight, first),
            arrow(hashes.view(np.int64)),
        ]
        return pa.record_batch(columns, schema=self.schema)

    def of_others(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield candidates that were not found by this package, in the form of this output."""
        first = 0
        for batch in batches:
            names = [name for name, _ in _RESULT]
            missing = [name for name in names if name not in batch.schema.names]
            if missing:
                raise InvalidRequestError(
                    f"the candidates have no column {missing[0]!r}; they need {', '.join(names)}"
                )
            try:
                lists, certain = (batch.column(name).cast(kind) for name, kind in _RESULT[1:])
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as exc:
                raise InvalidRequestError(f"the candidates are no lists of quota IDs: {exc}") from None
            if lists.null_count or certain.null_count or lists.flatten().null_count:
                raise InvalidRequestError("the candidates have a null: a member without any has an empty list")
            yield self.completed(batch, first, lists, certain, self.hashes(batch, first))
            first += len(batch)

    def collector(self, source: CompactInventory) -> Collector:
        return _Collecting(self, source)

    def merged(self, table: Any, source: CompactInventory) -> Any:  # noqa: ARG002
        """Return the rows unchanged: each row is of another member."""
        return table


class _Collecting(Collector):
    def __init__(self, output: Candidates, source: CompactInventory) -> None:
        assert source.market is not None
        self._output, self._quota_ids = output, source.quota_ids
        market = source.market
        # Quotas without room, and possible matches that bring less than their price, are no candidates.
        has_room = (market.rooms > 0) & (market.values > 0)
        gains = output.possible * market.values - market.prices
        may_gain = gains >= -SPREAD * output.possible * market.values
        self._wanted = has_room, has_room & (may_gain if output.weight is None else True)
        # A quota that reaches a quarter of its members takes those whose hashes have two bits set. Which
        # bits, differs from quota to quota.
        self._levels = np.floor(-np.log2(np.maximum(market.reach, 2.0**-_MOST_BITS))).astype(np.int64)
        ids = source.quota_ids.astype(np.uint64)
        self._bits = (ids[:, None] * _STRIDES[None] >> np.uint64(58)).astype(np.intp)
        self._batch: Any = None
        self._first = 0

    def begin(self, batch: Any, first: int) -> Any:
        self._batch, self._first = batch, first
        self._hashes = self._output.hashes(batch, first)
        return batch

    def add(self, kernel: Kernel, members: slice) -> Any:
        count = members.stop - members.start
        bytes_ = self._hashes[members, None].view(np.uint8)
        bits = np.unpackbits(bytes_, axis=1, bitorder="little").T
        self._masks = packed(np.ascontiguousarray(bits).view(bool))
        (sure, certain), (others, possible) = self._best(kernel, count)
        # A stable sort keeps the order of each member: the certain ones, then the possible ones, best first.
        member = np.repeat(np.tile(np.arange(count), 2), np.concatenate([certain, possible]))
        quota = np.concatenate([sure, others])[by_member(member)]
        some = self._batch.slice(members.start, count)
        lists = lists_of(arrow(self._quota_ids[quota]), certain + possible)
        first = self._first + members.start
        counts = arrow(certain.astype(np.int32))
        return self._output.completed(some, first, lists, counts, self._hashes[members])

    def _best(self, kernel: Kernel, count: int) -> list[tuple[NDArray[np.intp], NDArray[np.int64]]]:
        """Return the certain and the possible quotas, both the best of each member, and how many each has."""
        n = self._output.per_member
        most = _DEPTH * n
        found: list[list[Pairs]] = [[], []]
        had = np.zeros((2, count), dtype=np.int64)
        self._collect(kernel, found, had, most, self._thin)
        # A member with too few candidates may take any quota that fits; the others have enough.
        enough = np.where(had.sum(axis=0) < n, 0, most)
        had += enough
        self._collect(kernel, found, had, most, None)
        had -= enough
        return [best_of(pairs, each, most) for pairs, each in zip(found, had, strict=True)]

    def _collect(
        self,
        kernel: Kernel,
        found: list[list[Pairs]],
        had: NDArray[np.int64],
        most: int,
        leave_out: Callable[[NDArray[np.intp], NDArray[np.uint64]], None] | None,
    ) -> None:
        """Add pairs of both kinds in the order of rank, until each member has enough of both."""
        for block in kernel.plan.blocks:
            has_room = packed(had < most)
            if not has_room.any():
                return
            for plane, rows in enumerate(split(kernel, block)):
                wanted = self._wanted[plane][block.quotas]
                if wanted.any() and has_room[plane].any():
                    pairs = ranked_pairs(block.quotas[wanted], rows[wanted], has_room[plane], leave_out)
                    found[plane].append(pairs)
                    had[plane] += np.bincount(pairs[1], minlength=had.shape[1])

    def _thin(self, quotas: NDArray[np.intp], rows: NDArray[np.uint64]) -> None:
        """Keep only some of the members of a quota: otherwise all would be candidates of the same quotas."""
        levels, bits = self._levels[quotas], self._bits[quotas]
        for turn in range(levels.max(initial=0)):
            some = np.flatnonzero(levels > turn)
            rows[some] &= self._masks[bits[some, turn]]


def _in_groups(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield batches of one size, except the last one, so that the division of the panel does not matter."""
    waiting: list[Any] = []
    count = 0
    for batch in batches:
        start = 0
        while start < len(batch):
            part = batch.slice(start, _AT_ONCE - count)
            start, count = start + len(part), count + len(part)
            waiting.append(part)
            if count == _AT_ONCE:
                yield pa.concat_batches(waiting)
                waiting, count = [], 0
    if waiting:
        yield pa.concat_batches(waiting)


class _Allocation:
    """Gives quotas to one group of members after the other, while there is room."""

    def __init__(self, output: Allocate, source: CompactInventory) -> None:
        assert source.market is not None
        self._output, self._market = output, source.market
        self._source, self._quota_ids = source, source.quota_ids
        self._rooms = self._market.rooms.copy()
        self._survey_rooms = self._market.survey_rooms.copy()
        self._typical_weight = 1.0 if output.prices is None else output.prices.typical_weight

    def of(self, batch: Any) -> Any:
        codes, lists, certain, most, weight, chance = (batch.column(at) for at in range(6))
        member, quota, is_certain = pairs_of(lists, certain, self._source)
        value = self._market.values[quota] * np.where(is_certain, 1.0, self._output.possible)
        value *= weight.to_numpy()[member] / self._typical_weight
        hashes = chance.to_numpy().view(np.uint64)
        by_chance = chances(hashes[member], self._quota_ids[quota].astype(np.uint64))
        gains = value * (1 + SPREAD * by_chance) - self._market.prices[quota]
        order = best_first(member, gains)
        member, quota, is_certain, gains = member[order], quota[order], is_certain[order], gains[order]
        numbers = numbered(member, self._market.surveys[quota])
        taken = self._given(member, quota, numbers, gains, most.to_numpy().copy())
        # Certain before possible, each by what it brings.
        taken = taken[np.lexsort((-gains[taken], ~is_certain[taken], member[taken]))]
        sure = np.bincount(member[taken][is_certain[taken]], minlength=len(batch))
        columns = [codes, self._lists(member[taken], quota[taken], len(batch)), arrow(sure.astype(np.int32))]
        if self._output.reserves:
            left = self._left(member, numbers, taken)
            columns.append(self._lists(member[left], quota[left], len(batch)))
        return pa.record_batch(columns, schema=self._output.schema)

    def _lists(self, member: NDArray[np.intp], quota: NDArray[np.intp], members: int) -> Any:
        return lists_of(arrow(self._quota_ids[quota]), np.bincount(member, minlength=members))

    def _left(
        self, member: NDArray[np.intp], numbers: NDArray[np.intp], taken: NDArray[np.intp]
    ) -> NDArray[np.intp]:
        """Return the next best pairs of each member, member by member, of surveys without a pair so far."""
        left = first_of_each(_of_others(np.arange(len(member)), numbers, taken), numbers)
        kept: NDArray[np.intp] = left[places_within(member[left]) < self._output.reserves]
        return kept

    def _given(
        self,
        member: NDArray[np.intp],
        quota: NDArray[np.intp],
        numbers: NDArray[np.intp],
        gains: NDArray[np.float64],
        left: NDArray[np.int64],
    ) -> NDArray[np.intp]:
        """Return the pairs that are taken, and count down the rooms."""
        surveys = self._market.surveys[quota]
        given: list[NDArray[np.intp]] = []
        alive = np.arange(len(member))
        while len(alive):
            has_room = (self._rooms[quota[alive]] > 0) & (self._survey_rooms[surveys[alive]] > 0)
            alive = alive[has_room & (left[member[alive]] > 0)]
            best, others = best_of_each(member[alive], numbers[alive], gains[alive], left)
            wanted = alive[best]
            # Where more members want a quota than there is room, those come first who would lose most.
            wanted = wanted[np.argsort(others[member[wanted]] - gains[wanted], kind="stable")]
            taken = _first_with_room(wanted, quota[wanted], self._rooms)
            taken = _first_with_room(taken, surveys[taken], self._survey_rooms)
            given.append(taken)
            self._rooms -= np.bincount(quota[taken], minlength=len(self._rooms))
            self._survey_rooms -= np.bincount(surveys[taken], minlength=len(self._survey_rooms))
            left -= np.bincount(member[taken], minlength=len(left))
            if not len(wanted):
                break
            alive = _of_others(alive, numbers, taken)
        return np.concatenate(given) if given else np.zeros(0, dtype=np.intp)


def _of_others(pairs: NDArray[np.intp], numbers: NDArray[np.intp], taken: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the pairs whose numbers are not those of pairs that are taken."""
    is_taken = np.zeros(numbers.max(initial=-1) + 1, dtype=bool)
    is_taken[numbers[taken]] = True
    return pairs[~is_taken[numbers[pairs]]]


def _first_with_room(
    pairs: NDArray[np.intp], groups: NDArray[np.int64], rooms: NDArray[np.int64]
) -> NDArray[np.intp]:
    """Return the first pairs of each group, as many as it has room for."""
    order = np.argsort(groups, kind="stable")
    within = places_within(groups[order]) < rooms[groups[order]]
    return pairs[np.sort(order[within])]
