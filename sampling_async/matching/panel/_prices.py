"""The prices of an allocation, derived from a sample of the panel, and the pairs that are chosen by them."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from attrs import field, frozen

from sampling_async import InvalidRequestError
from sampling_async.matching.panel._arrow import arrow, pa
from sampling_async.matching.panel._collectors import (
    Places,
    best_first,
    first_of_each,
    numbered,
    places_within,
    split,
)
from sampling_async.matching.panel._columns import member_codes, numbers
from sampling_async.matching.panel._sample import MIDDLE, hashed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from sampling_async.matching.panel._collectors import Collector
    from sampling_async.matching.panel._kernel import Kernel
    from sampling_async.matching.panel._market import Market
    from sampling_async.matching.panel._plan import CompactInventory

_FACTORS: Final = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_HALF: Final = np.uint64(32)
_UNIT: Final = 2.0**-64

INVITES_LEFT: Final = "invites_left"
"""The column of the panel with the most invites that a member may get today, as its caps say."""

SPREAD: Final = 0.02
"""The part of its value that a pair gains by chance: members who tie should not all take the same quota."""


def chances(members: NDArray[np.uint64], quotas: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return a number from 0 to 1 for each pair, which depends on nothing but the two hashes."""
    mixed = members * _FACTORS[0] ^ quotas * _FACTORS[1]
    mixed ^= mixed >> _HALF
    mixed *= _FACTORS[2]
    mixed ^= mixed >> _HALF
    chance: NDArray[np.float64] = mixed.astype(np.float64) * _UNIT
    return chance


def best_of_each(
    members: NDArray[np.intp], numbers: NDArray[np.intp], gains: NDArray[np.float64], most: NDArray[np.int64]
) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Return the pairs that each member would take: those that gain most, one of each survey, at most `most`.

    The pairs are in the order of `best_first`, and have the `numbered` of their surveys. It may be fewer, if a
    member's best pairs are many of the same survey. Also return the gain of each member's next best pair, 0 if
    there is none.
    """
    pairs = np.flatnonzero(gains > 0)
    # A few more than are wanted are enough, mostly: some may be of the same survey.
    pairs = pairs[places_within(members[pairs]) < _SPARE * most[members[pairs]]]
    pairs = first_of_each(pairs, numbers)
    place = places_within(members[pairs])
    next_best = pairs[place == most[members[pairs]]]
    others = np.zeros(len(most))
    others[members[next_best]] = gains[next_best]
    return pairs[place < most[members[pairs]]], others


def columns_read(weight: str | None) -> frozenset[str]:
    """Return the columns of the panel that only an allocation reads."""
    return frozenset({INVITES_LEFT} if weight is None else {INVITES_LEFT, weight})


def limits(batch: Any, per_member: int, first: int) -> Any:
    if INVITES_LEFT not in batch.schema.names:
        return arrow(np.full(len(batch), per_member, dtype=np.int64))
    left, is_known = numbers(batch.column(INVITES_LEFT), INVITES_LEFT, first)
    return arrow(np.where(is_known, np.clip(left, 0, per_member), per_member).astype(np.int64))


def weights(batch: Any, name: str | None, first: int) -> Any:
    if name is None:
        return arrow(np.ones(len(batch)))
    if name not in batch.schema.names:
        raise InvalidRequestError(f"the panel has no column {name!r}, which Allocate(weight=...) names")
    try:
        column = batch.column(name).cast(pa.float64()).fill_null(1.0)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise InvalidRequestError(f"column {name!r} of the panel must hold numbers") from None
    values = column.to_numpy(zero_copy_only=False)
    wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if len(wrong):
        raise InvalidRequestError(
            f"column {name!r} of the panel must hold numbers from 0 on; row {first + wrong[0]} does not"
        )
    return column


MEMBERS: Final = 2_048
"""Members in the sample."""

_SLACK: Final = 2.0  # candidates of a quota for each place that it has, at least

_HALVINGS: Final = 40


@frozen(eq=False)
class Prices:
    """The result of `PanelMatcher.derive_prices`: prices of the quotas, derived from a panel.

    Attributes:
        by_quota: The price of an invite, by quota ID: what a place in the quota and in its survey is worth.
        reach: The share of a quota's members that become its candidates, by quota ID, from 0 to 1.
        typical_weight: The mean weight of the members.
    """

    by_quota: Mapping[int, float] = field(repr=False)
    reach: Mapping[int, float] = field(repr=False)
    typical_weight: float = 1.0


_ROUNDS: Final = 60
_FIRST_STEP: Final = 0.03
_SLOWING: Final = 6
_STEEPEST: Final = 2.0
_ENTRIES: Final = 256
_SPARE: Final = 3
_COUNT: Final = 5
_LAST: Final = np.iinfo(np.uint64).max


@frozen
class PriceSample:
    """An output: a sample of the members, each with all quotas that fit, from which prices are derived.

    The members with the lowest hashes of their codes are drawn, however the panel is divided.
    """

    per_member: int
    weight: str | None
    seed: int

    @property
    def schema(self) -> Any:
        """The Arrow schema of the output. The first row of a part has the number of its members."""
        return pa.schema(
            [
                ("priority", pa.int64()),
                ("certain", pa.binary()),
                ("possible", pa.binary()),
                (INVITES_LEFT, pa.int64()),
                ("weight", pa.float64()),
                ("members", pa.int64()),
                ("quotas", pa.int64()),  # a digest of their IDs, whose places are those of the bits
            ]
        )

    @property
    def columns(self) -> frozenset[str]:
        return columns_read(self.weight)

    def collector(self, source: CompactInventory) -> Collector:
        return _SampleDraw(self, source)

    def of_candidates(self, batches: Iterable[Any], source: CompactInventory) -> Any:
        drawing, first = _SampleDraw(self, source), 0
        for batch in batches:
            drawing.add_candidates(batch, first)
            first += len(batch)
        return pa.Table.from_batches([drawing.end()])

    def merged(self, table: Any, source: CompactInventory) -> Any:
        if not len(table):
            return table
        if (table.column("quotas").to_numpy() != _digest_of(source)).any():
            raise InvalidRequestError(
                "these parts were made for other quotas than this matcher has; all parts must be of one "
                "PanelMatcher, made when no quota had closed that it does not know of"
            )
        priorities = table.column("priority").to_numpy()
        kept = np.argsort(priorities, kind="stable")[:MEMBERS]
        counts = np.zeros(len(kept), dtype=np.int64)
        counts[0] = table.column("members").to_numpy().sum()
        return table.take(arrow(kept)).set_column(_COUNT, "members", arrow(counts))


class _SampleDraw:
    def __init__(self, output: PriceSample, source: CompactInventory) -> None:
        self._output, self._source = output, source
        self._count = 0
        self._limit = _LAST
        self._hashes = np.zeros(0, dtype=np.uint64)
        self._drawn: list[Any] = []

    def begin(self, batch: Any, first: int) -> Any:
        hashes = hashed(member_codes(batch, first).to_pylist(), self._output.seed)
        self._count += len(hashes)
        kept = np.flatnonzero(hashes < self._limit)
        if len(kept) > MEMBERS:
            kept = np.sort(np.argpartition(hashes, MEMBERS)[:MEMBERS])
        self._hashes = hashes[kept]
        self._limits = limits(batch, self._output.per_member, first).take(arrow(kept))
        self._weights = weights(batch, self._output.weight, first).take(arrow(kept))
        return batch.take(arrow(kept))

    def add(self, kernel: Kernel, members: slice) -> None:
        count, quotas = members.stop - members.start, len(self._source.quota_ids)
        both = np.zeros((2, count, quotas), dtype=bool)
        for block in kernel.plan.blocks:
            for plane, rows in zip(both, split(kernel, block), strict=True):
                bits = np.unpackbits(rows.view(np.uint8), axis=1, count=count, bitorder="little")
                plane[:, block.quotas] = bits.T
        self._draw(both, members)

    def add_candidates(self, batch: Any, first: int) -> None:
        batch = self.begin(batch, first)
        member, place, is_certain = Places(self._source.quota_ids).pairs(batch.column(1), batch.column(2))
        both = np.zeros((2, len(batch), len(self._source.quota_ids)), dtype=bool)
        both[np.where(is_certain, 0, 1), member, place] = True
        if len(batch):
            self._draw(both, slice(0, len(batch)))

    def _draw(self, both: NDArray[np.bool_], members: slice) -> None:
        """Add members, given the quotas that each fits, certainly and possibly."""
        count = members.stop - members.start
        certain, possible = ([each.tobytes() for each in np.packbits(plane, axis=1)] for plane in both)
        priorities = (self._hashes[members] ^ MIDDLE).view(np.int64)
        columns = [arrow(priorities), pa.array(certain, pa.binary()), pa.array(possible, pa.binary())]
        columns += [each.slice(members.start, count) for each in (self._limits, self._weights)]
        columns.append(arrow(np.zeros(count, dtype=np.int64)))
        columns.append(arrow(np.full(count, _digest_of(self._source), dtype=np.int64)))
        self._drawn.append(pa.record_batch(columns, schema=self._output.schema))
        if len(self._drawn) > 1:
            self._drawn = self._merged().to_batches()
        if sum(map(len, self._drawn)) == MEMBERS:
            last = max(batch.column(0).to_numpy().max() for batch in self._drawn)
            self._limit = np.array([last], dtype=np.int64).view(np.uint64)[0] ^ MIDDLE

    def _merged(self) -> Any:
        table = pa.Table.from_batches(self._drawn, schema=self._output.schema)
        return self._output.merged(table, self._source).combine_chunks()

    def end(self) -> Any:
        table = self._merged()
        counts = np.zeros(len(table), dtype=np.int64)
        counts[:1] = self._count
        (batch,) = table.set_column(_COUNT, "members", arrow(counts)).cast(
            self._output.schema
        ).to_batches() or [pa.RecordBatch.from_pylist([], schema=self._output.schema)]
        return batch


def _digest_of(source: CompactInventory) -> int:
    digest = blake2b(source.quota_ids.tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def prices_of(source: CompactInventory, sample: Any, possible: float, depth: float) -> Prices:
    """Return the prices at which supply and demand meet, by a merged sample of the panel.

    Prices begin at 0. In each round, each member of the sample takes the quotas whose value exceeds their price
    most. If a quota is taken by more members than it has room for, its price rises; if by fewer, it falls. The
    steps become smaller. See `Allocate` for the method. `depth` is how many candidates of a member there should
    be on average, at most.
    """
    market = source.market
    assert market is not None
    quotas = len(market.values)
    if not (len(sample) and quotas):
        return Prices({}, {})
    planes = [
        np.unpackbits(
            np.frombuffer(b"".join(sample.column(name).to_pylist()), dtype=np.uint8).reshape(len(sample), -1),
            axis=1,
            count=quotas,
        ).T
        for name in ("certain", "possible")
    ]
    fits = np.concatenate(planes).view(bool)
    share = len(sample) / max(len(sample), int(sample.column("members").to_numpy().sum()))
    weights = sample.column("weight").to_numpy()
    typical = float(weights.mean()) or 1.0
    demand = _Demand(fits, market, sample.column(INVITES_LEFT).to_numpy(), weights / typical, possible)
    rooms, survey_rooms = market.rooms * share + 0.5, market.survey_rooms * share + 0.5
    worth = np.zeros(len(survey_rooms))
    np.maximum.at(worth, market.surveys, market.values)
    prices, of_surveys = np.zeros(quotas), np.zeros(len(survey_rooms))
    total, late = np.zeros(quotas), _ROUNDS // 2
    for turn in range(_ROUNDS):
        step = _FIRST_STEP / (1 + turn / _SLOWING)
        taken, of_survey = demand.at(prices + of_surveys[market.surveys])
        of_surveys += step * worth * np.clip(np.log((of_survey + 0.5) / survey_rooms), -_STEEPEST, _STEEPEST)
        of_surveys = np.clip(of_surveys, 0, worth)
        prices += step * market.values * np.clip(np.log((taken + 0.5) / rooms), -_STEEPEST, _STEEPEST)
        # Both together are at most the value: above it, a place would stay free although somebody fits.
        prices = np.clip(prices, 0, np.maximum(0, market.values - of_surveys[market.surveys]))
        # The prices swing around the right ones, so the mean of the later rounds is better than the last ones.
        if turn >= late:
            total += np.minimum(market.values, prices + of_surveys[market.surveys])
    # About how many members of the panel fit each quota. The sample may miss some, so count one more.
    fitting = (fits.reshape(2, quotas, -1).sum(axis=(0, 2)) + 1) / share
    reach = _reach(market, fitting, len(sample) / share, depth)
    ids = source.quota_ids.tolist()
    found = total / (_ROUNDS - late)
    return Prices(
        dict(zip(ids, found.tolist(), strict=True)), dict(zip(ids, reach.tolist(), strict=True)), typical
    )


def _reach(market: Market, fitting: NDArray[np.float64], members: float, depth: float) -> NDArray[np.float64]:
    """Return the share of each quota's members that become its candidates, in proportion to its room.

    It is 1 as long as a member has no more candidates than fit its list. Otherwise the lists of all members
    would hold the same quotas, and the others would get nobody.
    """
    least, most = 0.0, float(fitting.max(initial=1.0))
    for _ in range(_HALVINGS):
        slack = (least + most) / 2
        reach = np.minimum(1.0, slack * market.rooms / fitting)
        if (reach * fitting).sum() > depth * members:
            most = slack
        else:
            least = slack
    reach = np.minimum(1.0, most * market.rooms / fitting)
    return np.maximum(reach, np.minimum(1.0, _SLACK * market.rooms / fitting))


class _Demand:
    """What the members of a sample would take at some prices."""

    def __init__(
        self,
        fits: NDArray[np.bool_],
        market: Market,
        most: NDArray[np.int64],
        weights: NDArray[np.float64],
        possible: float,
    ) -> None:
        self._fits, self._market = fits, market
        self._most, self._weights = most, weights
        self._heaviest = weights.max(initial=0) * (1 + SPREAD)
        count = len(market.values)
        self._quotas = np.tile(np.arange(count), 2)
        self._values = np.concatenate([market.values, market.values * possible])
        self._open = np.tile(market.rooms > 0, 2)
        self._hashes = np.arange(fits.shape[1], dtype=np.uint64)

    def at(self, prices: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return how many members would take each quota, and how many each survey."""
        costs = prices[self._quotas]
        entries = np.flatnonzero(self._open & (self._heaviest * self._values > costs))
        entries = entries[np.argsort((costs - self._values)[entries], kind="stable")]
        members, quotas, gained = [], [], []
        # A member needs more than it takes: some are of the same survey, and chance changes the order.
        wanted = _SPARE * self._most
        left = np.flatnonzero(self._most)
        had = np.zeros(len(left), dtype=np.int64)
        for start in range(0, len(entries), _ENTRIES):
            some = entries[start : start + _ENTRIES]
            entry, at = np.nonzero(self._fits[np.ix_(some, left)])
            entry = some[entry]
            members.append(left[at])
            quotas.append(self._quotas[entry])
            chance = 1 + SPREAD * chances(self._hashes[left[at]], self._quotas[entry].astype(np.uint64))
            gained.append(self._values[entry] * self._weights[left[at]] * chance - costs[entry])
            had += np.bincount(at, minlength=len(left))
            still = had < wanted[left]
            left, had = left[still], had[still]
            if not len(left):
                break
        surveys = self._market.surveys
        if not members:
            return np.zeros(len(surveys), dtype=np.int64), np.zeros_like(self._market.survey_rooms)
        member, gains = np.concatenate(members), np.concatenate(gained)
        order = best_first(member, gains)
        member, gains, quota = member[order], gains[order], np.concatenate(quotas)[order]
        best, _ = best_of_each(member, numbered(member, surveys[quota]), gains, self._most)
        taken = quota[best]
        return (
            np.bincount(taken, minlength=len(surveys)),
            np.bincount(surveys[taken], minlength=len(self._market.survey_rooms)),
        )
