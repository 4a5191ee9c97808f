"""Where Spark looks for data sources on its own: modules named `pyspark_…` that have a `DefaultSource`."""

from downrange.spark.data_source import RocketMQDataSource


class DefaultSource(RocketMQDataSource):
    """`spark.read.format("rocketmq")` works wherever downrange is installed, without registering anything."""
