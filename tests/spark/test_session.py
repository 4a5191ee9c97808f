from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from pyspark.sql import SparkSession


def test_workers_load_spark_from_where_it_is_installed(spark: SparkSession) -> None:
    """A zip has no bytecode: from there every new process would compile what it imports."""

    def origin(_: Iterable[int]) -> Iterator[str]:
        import pyspark

        yield pyspark.__file__

    (found,) = spark.sparkContext.parallelize([1], 1).mapPartitions(origin).collect()
    assert ".zip" not in found


def test_workers_and_the_jvm_talk_through_unix_sockets(spark: SparkSession) -> None:
    def sockets(_: Iterable[int]) -> Iterator[str]:
        yield os.environ["PYTHON_UNIX_DOMAIN_ENABLED"].lower()

    assert spark.sparkContext.parallelize([1], 1).mapPartitions(sockets).collect() == ["true"]
