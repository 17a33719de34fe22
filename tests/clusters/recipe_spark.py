"""A panel against all quotas on Spark."""

from pathlib import Path

from pyspark.sql import SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.pandas.types import from_arrow_schema

from sampling_async import Quotas, from_json
from sampling_async.matching import Allocate, Counts, PanelMatcher, QuotaIndex, Sample, TopK

index = QuotaIndex(from_json(Quotas, Path("inventory.json").read_bytes()))
spark = SparkSession.builder.getOrCreate()
panel = spark.read.parquet("panel")


def matched(matcher):
    shared = spark.sparkContext.broadcast(matcher)  # once to each worker, which keeps what it has planned

    def of_partition(batches):
        return shared.value.map_batches(batches)

    return panel.mapInArrow(of_partition, from_arrow_schema(matcher.schema))


# The best quotas of each member, written where they are made.
matched(PanelMatcher(index, TopK(20))).write.parquet("best")

# How many members each quota has: parts are summed up by Spark, and put in order here.
matcher = PanelMatcher(index, Counts())
of_quota = matched(matcher).groupBy("quota_id", "survey_id", "needed", F.lit(0).alias("shortfall"))
sums = of_quota.agg(F.sum("certain").alias("certain"), F.sum("possible").alias("possible"))
counts = matcher.merged(sums.toArrow())

# A hundred members of each quota: the first of all that were drawn by parts.
first = Window.partitionBy("quota_id").orderBy(F.desc("certain"), "priority")
drawn = matched(PanelMatcher(index, Sample(100))).withColumn("place", F.row_number().over(first))
drawn.where("place <= 100").drop("place").write.parquet("sample")


# Quotas for each member, chosen together: one step finds the prices, the next one makes candidates. Parts come
# in any order, so the members are put into one.
def parts_of(matcher):
    shared = spark.sparkContext.broadcast(matcher)

    def of_partition(batches):
        return shared.value.map_batches(batches)

    return panel.mapInArrow(of_partition, from_arrow_schema(matcher.part_schema)).toArrow()


matcher = PanelMatcher(index, Allocate(5))
priced = matcher.with_prices(parts_of(matcher.price_sampler()))
allocated = priced.merged(parts_of(priced).sort_by("member_code"))
