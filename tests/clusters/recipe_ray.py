"""A panel against all quotas on Ray Data."""

from pathlib import Path

import pyarrow as pa
import ray

from sampling_async import Quotas, from_json
from sampling_async.matching import Allocate, Counts, PanelMatcher, QuotaIndex, Sample, TopK

index = QuotaIndex(from_json(Quotas, Path("inventory.json").read_bytes()))
panel = ray.data.read_parquet(str(Path("panel").absolute()))


class Matching:
    """An actor: it is sent the matcher once, and keeps what it has planned."""

    def __init__(self, matcher):
        self.matcher = matcher

    def __call__(self, members):
        return self.matcher.run(members).read_all()


def matched(matcher):
    return panel.map_batches(
        Matching,
        fn_constructor_args=(matcher,),
        batch_format="pyarrow",
        batch_size=65_536,
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=8),  # a core each
    )


def reduced(matcher):
    return matcher.merged(pa.concat_tables(ray.get(matched(matcher).to_arrow_refs())))


counts = reduced(PanelMatcher(index, Counts()))
sample = reduced(PanelMatcher(index, Sample(100)))
matched(PanelMatcher(index, TopK(20))).write_parquet(str(Path("best").absolute()))


class Parts(Matching):
    """The same, for what is put together from the outputs of parts."""

    def __call__(self, members):
        return pa.Table.from_batches(self.matcher.map_batches(members.to_batches()), self.matcher.part_schema)


def parts_of(matcher):
    parts = panel.map_batches(
        Parts,
        fn_constructor_args=(matcher,),
        batch_format="pyarrow",
        batch_size=65_536,
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=8),
    )
    return pa.concat_tables(ray.get(parts.to_arrow_refs()))


# Quotas for each member, chosen together: one step finds the prices, the next one makes candidates. Parts come
# in any order, so the members are put into one.
matcher = PanelMatcher(index, Allocate(5))
priced = matcher.with_prices(parts_of(matcher.price_sampler()))
allocated = priced.merged(parts_of(priced).sort_by("member_code"))
