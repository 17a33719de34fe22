"""Parts of a panel, matched separately and combined."""

from __future__ import annotations

import pickle

import pyarrow as pa
import pytest
from panel_kit import generated_panel

from sampling_async.matching import (
    Counts,
    PanelMatcher,
    Sample,
    TopK,
)


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


def test_a_matcher_is_small_to_send(generated):
    index, panel = generated
    matcher = PanelMatcher(index)
    before = len(pickle.dumps(matcher))
    list(matcher.map_batches(panel.to_batches()))
    assert len(pickle.dumps(matcher)) < 2 * before < 1_000_000
