"""Lets Spark find the data source by itself: it looks for modules named `pyspark_…` that have a `DefaultSource`."""

from downrange.spark.data_source import RocketMQDataSource


class DefaultSource(RocketMQDataSource):
    """`spark.read.format("rocketmq")` works wherever downrange is installed, without registering anything."""
