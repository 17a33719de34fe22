"""Parts of a panel, matched separately and combined."""

from __future__ import annotations

import pickle

import pyarrow as pa
import pytest
from panel_kit import AGES, generated_panel

from sampling_async import InvalidRequestError
from sampling_async.matching import (
    Allocate,
    Counts,
    PanelMatcher,
    QuotaIndex,
    Sample,
    TopK,
)
from sampling_async.simulator import generate_inventory


@pytest.fixture(scope="module")
def generated():
    return generated_panel()


@pytest.mark.parametrize("output", [Counts(), TopK(5), Sample(6), Sample(6, seed=-3)])
def test_parts_of_a_panel_give_the_same_results_as_the_whole(generated, output):
    index, panel = generated
    matcher = PanelMatcher(index, output)
    whole = matcher.run(panel).read_all()
    copies = [pickle.loads(pickle.dumps(matcher)) for _ in range(3)]
    parts = [
        batch
        for copy, part in zip(copies, (panel.slice(0, 130), panel.slice(130, 1), panel.slice(131)), strict=True)
        for batch in copy.map_batches(part.to_batches())
    ]
    merged = matcher.merged(parts)
    assert merged.schema == matcher.schema == whole.schema
    assert merged == whole == matcher.merged(pa.Table.from_batches(parts))
    if not isinstance(output, TopK):
        assert matcher.merged(parts[::-1]) == whole


@pytest.mark.parametrize("output", [Counts(), TopK(5), Sample(6)])
def test_parts_may_come_back_without_unsigned_types(generated, output):
    index, panel = generated
    matcher = PanelMatcher(index, output)
    whole = matcher.run(panel).read_all()
    assert not any(pa.types.is_unsigned_integer(kind) for kind in whole.schema.types)
    other = {
        pa.string(): pa.large_string(),
        pa.list_(pa.int64()): pa.list_(pa.field("element", pa.int64(), nullable=False)),
    }
    schema = pa.schema([(each.name, other.get(each.type, each.type)) for each in whole.schema])
    back = whole.cast(schema).append_column("partition", pa.nulls(len(whole)))
    assert matcher.merged(back) == whole
    assert matcher.merged(back).schema == matcher.schema


@pytest.mark.parametrize("output", [Counts(), Sample(6)])
def test_parts_from_before_a_quota_closed_are_merged_without_it(output):
    index, panel = QuotaIndex(generate_inventory(9, surveys=30), kinds=AGES), generated_panel()[1]
    parts = list(PanelMatcher(index, output).map_batches(panel.to_batches()))
    counts = PanelMatcher(index).run(panel).read_all().to_pylist()
    closed = max(counts, key=lambda each: each["certain"])["quota_id"]
    index.close(closed)
    after = PanelMatcher(index, output)
    assert after.merged(parts) == after.run(panel).read_all()


def test_an_allocation_takes_nothing_from_parts_about_other_quotas():
    index, panel = QuotaIndex(generate_inventory(9, surveys=30), kinds=AGES), generated_panel()[1]
    parts = list(PanelMatcher(index, Allocate(3)).price_sampler().map_batches(panel.to_batches()))
    assert PanelMatcher(index, Allocate(3)).with_prices(parts).run(panel).read_all()
    index.close(next(iter(index.quota_ids)))
    with pytest.raises(InvalidRequestError, match="made for other quotas"):
        PanelMatcher(index, Allocate(3)).with_prices(parts)


def test_parts_of_another_output_are_refused_and_parts_without_members_may_lose_their_columns(generated):
    index, panel = generated
    counts, best = PanelMatcher(index), PanelMatcher(index, TopK(5))
    with pytest.raises(InvalidRequestError, match=r"no parts of TopK: they have no column member_code"):
        best.merged(counts.run(panel).read_all())
    assert counts.merged(pa.table({})) == counts.merged([]) == counts.run(panel.slice(0, 0)).read_all()


def test_a_matcher_is_small_to_send(generated):
    index, panel = generated
    matcher = PanelMatcher(index)
    before = len(pickle.dumps(matcher))
    list(matcher.map_batches(panel.to_batches()))
    assert len(pickle.dumps(matcher)) < 2 * before < 1_000_000
