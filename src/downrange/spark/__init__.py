"""Topics as Spark DataFrames: the data source `rocketmq`, its sink, and pipelines. No other package imports pyspark.

import downrange.spark
spark = downrange.spark.session()
orders = spark.read.format("rocketmq").option("namesrv", "127.0.0.1:9876").option("subscribe", "orders").load()
"""

from downrange.spark.session import register, session

__all__ = ["register", "session"]
