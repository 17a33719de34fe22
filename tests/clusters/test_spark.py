"""Spark, in local mode with two cores: the JVM and Python workers as on a cluster."""

from __future__ import annotations

import sys

import pytest
from clusters_kit import check, check_allocation, needs, ran

pytestmark = [
    needs("pyspark"),
    pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning"),
]


@pytest.fixture
def spark(monkeypatch):
    from pyspark.sql import SparkSession  # noqa: PLC0415  where it is installed

    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.files.openCostInBytes": "0",
        "spark.sql.files.maxPartitionBytes": "60000",  # several partitions
    }
    builder = SparkSession.builder.master("local[2]")
    for name, value in settings.items():
        builder = builder.config(name, value)
    with builder.getOrCreate() as session:
        yield session


def test_spark_gives_the_same_results(folder, spark):
    variables = ran("spark")
    assert variables["panel"].rdd.getNumPartitions() > 2
    check(folder, variables)
    check_allocation(folder, variables)
