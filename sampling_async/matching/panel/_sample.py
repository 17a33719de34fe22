"""The outputs that draw members by hashes: `Sample`, and the sample from which prices are derived."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from attrs import field, frozen

from sampling_async import InvalidRequestError
from sampling_async._contract.checks import is_whole, whole_of_31_bits
from sampling_async.matching.panel._arrow import MEMBER_CODE, arrow, member_codes, pa
from sampling_async.matching.panel._columns import (
    INVITES_LEFT,
    columns_read,
    invite_limits,
    weights,
)
from sampling_async.matching.panel._kernel import members_in
from sampling_async.matching.panel._top_k import Collector, count_of, known_rows, pairs_of, places_within, split

if TYPE_CHECKING:
    from collections.abc import Iterable

    from attrs import Attribute
    from numpy.typing import NDArray

    from sampling_async.matching.panel._kernel import Kernel
    from sampling_async.matching.panel._plan import CompactInventory

_WORD: Final = 64
_LAST: Final = np.iinfo(np.uint64).max
_MARGIN: Final = 2
_MOST_PLACES: Final = 2**27  # 4 GB
_LONGEST_SEED: Final = 64
MIDDLE: Final = np.uint64(1 << 63)
"""Flips the highest bit, which maps unsigned to signed numbers in order. Spark has signed numbers only."""


def seed_of_64_bits(_: object, attribute: Attribute[Any], value: object) -> None:
    """Check that a seed fits the key of a hash."""
    if not is_whole(value) or value.bit_length() > _LONGEST_SEED:
        raise InvalidRequestError(
            f"{attribute.name} must be a whole number of at most 64 bits, not {value!r:.40}"
        )


@frozen
class Sample:
    """A random sample of each quota's members: certain ones and, if these are too few, possible ones.

    There is one row for each quota and member drawn: `quota_id`, `member_code`, `certain`, and `priority`. The
    members with the lowest priorities are drawn. The result depends only on the member codes, the quotas and
    the seed, and not on how the panel is divided.

    Attributes:
        per_quota: How many members of a quota at most. Memory for so many is allocated for every quota.
        seed: A whole number of 64 bits at most; another seed draws other members.
    """

    per_quota: int = field(default=100, validator=whole_of_31_bits)
    seed: int = field(default=0, validator=seed_of_64_bits)

    @property
    def schema(self) -> Any:
        """The Arrow schema of the output."""
        return pa.schema(
            [
                ("quota_id", pa.int64()),
                (MEMBER_CODE, pa.string()),
                ("certain", pa.bool_()),
                ("priority", pa.int64()),
            ]
        )

    def collector(self, source: CompactInventory) -> Collector:
        """Return a collector that draws members."""
        return _WheelDraw(self, source)

    def merged(self, table: Any, source: CompactInventory) -> Any:
        """Return the sample of a whole panel, given the samples of its parts."""
        table, quota = known_rows(table, source)
        certain = table.column("certain").to_numpy()
        order = np.lexsort((table.column("priority").to_numpy(), ~certain, quota))
        return table.take(arrow(order[places_within(quota[order]) < self.per_quota]))


def _within(
    rows: NDArray[np.uint64],
    which: NDArray[np.intp],
    starts: NDArray[np.intp],
    lengths: NDArray[np.intp],
    size: int,
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the row and the member of each bit in some rows (`which`), within a range of members.

    For each of `rows` it begins at `starts` and has `lengths` members. It may reach around: after the last of
    `size` members comes member 0.
    """
    # Split a range that reaches around into two: from its start to the last member, and from member 0 on.
    ends = starts[which] + lengths[which]
    around = ends > size
    row = np.concatenate([which, which[around]])
    first = np.concatenate([starts[which], np.zeros(around.sum(), dtype=np.intp)])
    end = np.concatenate([np.minimum(ends, size), ends[around] - size])
    # List the words that each range touches, find the bits in them, and drop the bits before and after the
    # range.
    words = np.maximum(-(-end // _WORD) - first // _WORD, 0)
    of = np.repeat(np.arange(len(row)), words)
    word = first[of] // _WORD + np.arange(len(of)) - np.repeat(np.cumsum(words) - words, words)
    at, bit = members_in(rows[row[of], word])
    of, member = of[at], word[at] * _WORD + bit
    kept = (member >= first[of]) & (member < end[of])
    return row[of[kept]], member[kept]


def hashed(texts: Iterable[str], seed: int) -> NDArray[np.uint64]:
    """Return a hash of 64 bits of each text; another seed gives others."""
    key = seed.to_bytes(16, "little", signed=True)
    hashes = [blake2b(text.encode(), digest_size=8, key=key).digest() for text in texts]
    return np.frombuffer(b"".join(hashes), dtype="<u8").astype(np.uint64)


class _Drawn:
    """The members of each quota with the lowest priorities so far, ascending; `_LAST` is an unused place."""

    def __init__(self, quotas: int, per_quota: int) -> None:
        self.priorities = np.full((quotas, per_quota), _LAST, dtype=np.uint64)
        self.codes = np.full((quotas, per_quota), "", dtype=object)

    @property
    def limits(self) -> NDArray[np.uint64]:
        """For each quota, the highest priority kept: only members below it can still be drawn."""
        return self.priorities[:, -1]

    def add(self, quotas: NDArray[np.intp], priorities: NDArray[np.uint64], codes: NDArray[np.object_]) -> None:
        """Add members to some quotas, a row for each quota, and keep those with the lowest priorities."""
        both = np.concatenate([self.priorities[quotas], priorities], axis=1)
        all_codes = np.concatenate([self.codes[quotas], codes], axis=1)
        order = np.argsort(both, axis=1, kind="stable")[:, : self.priorities.shape[1]]
        self.priorities[quotas] = np.take_along_axis(both, order, axis=1)
        self.codes[quotas] = np.take_along_axis(all_codes, order, axis=1)


class _WheelDraw(Collector):
    """Draws members by a hash of the member code, turned by a hash of the quota ID, as on a wheel.

    The priority of a member is the sum of both hashes modulo 2**64. Members sorted by their own hash are
    therefore sorted by priority for every quota: from some place on to the last one, and then from the first
    one on. The members below a limit are one range of them. After many members were drawn, the limits are low,
    and most quotas need nobody from a new chunk.

    Example, on a wheel of 100 instead of 2**64: the hashes of members are 10, 40, 90, and that of the quota is
    30. The priorities are 40, 70, 20. The wheel begins at -30, which is 70: the order is 90, 10, 40. With a
    limit of 50, the range ends at 50 - 30 = 20, so the members with 90 and 10 are in it.
    """

    def __init__(self, output: Sample, source: CompactInventory) -> None:
        self._output, self._source = output, source
        most = _MOST_PLACES // max(1, len(source.quota_ids))
        if output.per_quota > most:
            raise InvalidRequestError(
                f"a sample (--sample) may have {most:,} members of each of {len(source.quota_ids):,} quotas, "
                f"not {output.per_quota:,}: memory is allocated for all"
            )
        turns = self._turns = hashed(map(str, source.quota_ids.tolist()), output.seed)
        self._certain = _Drawn(len(turns), output.per_quota)
        self._others = _Drawn(len(turns), output.per_quota)
        self._codes = np.zeros(0, dtype=object)
        self._hashes = np.zeros(0, dtype=np.uint64)

    def begin(self, batch: Any, first: int) -> Any:
        # Sort the batch by hash, so that the members of a range are next to each other.
        codes = np.array(member_codes(batch, first).to_pylist(), dtype=object)
        hashes = hashed(codes, self._output.seed)
        order = np.argsort(hashes, kind="stable")
        self._codes, self._hashes = codes[order], hashes[order]
        return batch.take(arrow(order))

    def add(self, kernel: Kernel, members: slice) -> None:
        hashes, codes = self._hashes[members], self._codes[members]
        for block in kernel.plan.blocks:
            certain, others = split(kernel, block)
            self._draw(self._certain, block.quotas, certain, hashes, codes)
            # Only quotas with too few certain members so far can need possible ones.
            short = self._certain.limits[block.quotas] == _LAST
            self._draw(self._others, block.quotas[short], others[short], hashes, codes)

    def _draw(
        self,
        drawn: _Drawn,
        quotas: NDArray[np.intp],
        rows: NDArray[np.uint64],
        hashes: NDArray[np.uint64],
        codes: NDArray[np.object_],
    ) -> None:
        turns, limits, found = self._turns[quotas], drawn.limits[quotas], count_of(rows)
        size, n = len(hashes), self._output.per_quota
        # Each quota's range: its first member, and how many members have a priority below the limit. Unsigned
        # numbers wrap around, so `-turns` and `limits - turns` are modulo 2**64.
        starts, ends = np.searchsorted(hashes, -turns), np.searchsorted(hashes, limits - turns)
        # A range that reaches around ends before it starts.
        lengths = ends - starts + np.where(limits - turns < -turns, size, 0)
        lengths = np.where(limits == _LAST, size, lengths)
        # The matching members are spread evenly over the wheel, so a part of the range mostly has the `n`
        # members needed. With n = 100, and 1000 matching of 6000 members: 2 * 100 * 6000 / 1000 + 64 = 1264
        # members, of which about 210 match.
        parts = np.minimum(lengths, _MARGIN * n * size // np.maximum(found, 1) + _WORD)
        left = np.flatnonzero((found > 0) & (lengths > 0))
        # First look at a part of each range; then at the whole range, for the quotas that did not find enough.
        for reach in (parts, lengths):
            if not len(left):
                return
            row, member = _within(rows, left, starts, reach, size)
            priorities = hashes[member] + turns[row]
            order = np.lexsort((priorities, row))
            row, member, priorities = row[order], member[order], priorities[order]
            place = places_within(row)  # of a member in its row, from the lowest priority on
            kept = place < n
            row, member, priorities, place = row[kept], member[kept], priorities[kept], place[kept]
            hit = np.bincount(row, minlength=len(quotas))
            is_done = (hit[left] == n) | (reach[left] == lengths[left])
            done = left[is_done & (hit[left] > 0)]
            # Bring the members of the rows that are done into a matrix, a row for each quota.
            at = np.full(len(quotas), -1)
            at[done] = np.arange(len(done))
            kept = at[row] >= 0
            of = np.full((len(done), n), "", dtype=object)
            of_priorities = np.full((len(done), n), _LAST, dtype=np.uint64)
            of[at[row[kept]], place[kept]] = codes[member[kept]]
            of_priorities[at[row[kept]], place[kept]] = priorities[kept]
            drawn.add(quotas[done], of_priorities, of)
            left = left[~is_done]

    def end(self) -> Any:
        tables = [
            self._table(drawn, is_certain=is_certain)
            for drawn, is_certain in ((self._certain, True), (self._others, False))
        ]
        return _one_batch(self._output.merged(pa.concat_tables(tables), self._source))

    def _table(self, drawn: _Drawn, *, is_certain: bool) -> Any:
        quota, place = np.nonzero(drawn.priorities != _LAST)
        columns = [
            arrow(self._source.quota_ids[quota]),
            pa.array(drawn.codes[quota, place], pa.string()),
            pa.array(np.full(len(quota), is_certain)),
            arrow((drawn.priorities[quota, place] ^ MIDDLE).view(np.int64)),
        ]
        return pa.table(columns, schema=self._output.schema)


PRICE_MEMBERS: Final = 2_048
"""Members in the sample that prices are learned from."""

_COUNT: Final = 5  # the place of the column "members"


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
        return _PriceDraw(self, source)

    def of_candidates(self, batches: Iterable[Any], source: CompactInventory) -> Any:
        drawing, first = _PriceDraw(self, source), 0
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
        kept = np.argsort(priorities, kind="stable")[:PRICE_MEMBERS]
        counts = np.zeros(len(kept), dtype=np.int64)
        counts[0] = table.column("members").to_numpy().sum()
        return table.take(arrow(kept)).set_column(_COUNT, "members", arrow(counts))


class _PriceDraw(Collector):
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
        if len(kept) > PRICE_MEMBERS:
            kept = np.sort(np.argpartition(hashes, PRICE_MEMBERS)[:PRICE_MEMBERS])
        self._hashes = hashes[kept]
        self._limits = invite_limits(batch, self._output.per_member, first).take(arrow(kept))
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
        member, place, is_certain = pairs_of(batch.column(1), batch.column(2), self._source)
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
        if sum(map(len, self._drawn)) == PRICE_MEMBERS:
            last = max(batch.column(0).to_numpy().max() for batch in self._drawn)
            self._limit = np.array([last], dtype=np.int64).view(np.uint64)[0] ^ MIDDLE

    def _merged(self) -> Any:
        table = pa.Table.from_batches(self._drawn, schema=self._output.schema)
        return self._output.merged(table, self._source).combine_chunks()

    def end(self) -> Any:
        table = self._merged()
        counts = np.zeros(len(table), dtype=np.int64)
        counts[:1] = self._count
        return _one_batch(table.set_column(_COUNT, "members", arrow(counts)).cast(self._output.schema))


def _one_batch(table: Any) -> Any:
    columns = [column.combine_chunks() for column in table.columns]
    return pa.RecordBatch.from_arrays(columns, schema=table.schema)


def _digest_of(source: CompactInventory) -> int:
    digest = blake2b(source.quota_ids.tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
