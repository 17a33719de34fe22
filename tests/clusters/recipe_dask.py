"""A panel against all quotas on Dask: on the cluster of a Client, or in threads where there is none."""

from pathlib import Path

import dask
import dask.dataframe as dd
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds

from sampling_async import Quotas, from_json
from sampling_async.matching import Allocate, Counts, PanelMatcher, QuotaIndex, Sample, TopK

index = QuotaIndex(from_json(Quotas, Path("inventory.json").read_bytes()))
files = sorted(map(str, Path("panel").absolute().glob("*.parquet")))


@dask.delayed
def matched(matcher, file):
    batches = ds.dataset(file).to_batches()
    return pa.Table.from_batches(matcher.map_batches(batches), matcher.part_schema)


@dask.delayed
def merged(matcher, parts):
    return matcher.merged(pa.concat_tables(parts))


def reduced(output):
    matcher = dask.delayed(PanelMatcher(index, output))  # once to each worker, which keeps what it has planned
    parts = [matched(matcher, file) for file in files]
    while len(parts) > 1:
        parts = [merged(matcher, parts[at : at + 8]) for at in range(0, len(parts), 8)]
    return parts[0].compute()


counts = reduced(Counts())
sample = reduced(Sample(100))


# Quotas for each member, chosen together: one step finds the prices, the next one makes candidates.
def parts_of(matcher):
    return pa.concat_tables(dask.compute(*(matched(matcher, file) for file in files)))


matcher = PanelMatcher(index, Allocate(5))
priced = matcher.with_prices(parts_of(matcher.price_sampler()))
allocated = priced.merged(parts_of(priced))


# The best quotas of each member, of a data frame, written where they are made.
def chosen(members, matcher):
    return matcher.run(members).read_pandas(types_mapper=pd.ArrowDtype)


matcher = PanelMatcher(index, TopK(20))
meta = matcher.schema.empty_table().to_pandas(types_mapper=pd.ArrowDtype)
panel = dd.read_parquet(files, dtype_backend="pyarrow")
panel.map_partitions(chosen, dask.delayed(matcher), meta=meta).to_parquet("best")
