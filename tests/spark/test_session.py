from __future__ import annotations

from collections.abc import Iterable, Iterator

from pyspark.sql import SparkSession


def test_workers_load_spark_from_where_it_is_installed(spark: SparkSession) -> None:
    """A zip has no bytecode: from there every new process would compile what it imports."""

    def origin(_: Iterable[int]) -> Iterator[str]:
        import pyspark

        yield pyspark.__file__

    (found,) = spark.sparkContext.parallelize([1], 1).mapPartitions(origin).collect()
    assert ".zip" not in found
