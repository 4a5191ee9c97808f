"""A listener that tells a cluster how far streaming queries are."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from downrange.client.admin import Admin
from downrange.client.admin.pipelines import PipelineNotFound
from downrange.client.config import ClientConfig
from downrange.client.pipeline_status import PipelineStatus
from downrange.spark.progress import LagListener
from downrange.testing import EmbeddedBroker, broker
from tests.spark.messages import send


@pytest.fixture
def mq() -> Iterator[EmbeddedBroker]:
    with broker() as running:
        running.create_topic("orders", 2)
        yield running


async def last_status(namesrv: str, name: str, *, has_error: bool) -> PipelineStatus:
    """The last status of a query; Spark calls listeners a moment after the batch."""
    async with Admin(ClientConfig.of(namesrv)) as admin, asyncio.timeout(60):
        while True:
            try:
                last = (await admin.pipelines.status(name))[-1]
            except PipelineNotFound:
                await asyncio.sleep(0.05)
                continue
            if (last.last_error is not None) == has_error:
                return last


def test_a_query_tells_the_cluster_its_progress_and_its_end(
    spark: SparkSession, mq: EmbeddedBroker, tmp_path: Path
) -> None:
    listener = LagListener(lambda name, lag: None, namesrv=mq.namesrv)
    spark.streams.addListener(listener)
    try:
        send(mq, "orders", range(20))
        orders = (
            spark.readStream.format("rocketmq")
            .options(namesrv=mq.namesrv, subscribe="orders", startingOffsets="earliest")
            .load()
        )

        def sink(frame: DataFrame, number: int) -> None:
            if number:
                raise ValueError("no disk")
            frame.count()

        writer = orders.writeStream.foreachBatch(sink).option("checkpointLocation", str(tmp_path)).queryName("totals")
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        status = asyncio.run(last_status(mq.namesrv, "totals", has_error=False))
        assert (status.kind, status.lag) == ("stream", {"orders": 0})
        assert status.rows_per_second is not None
        assert status.batch_seconds is not None
        send(mq, "orders", range(20, 40))
        with pytest.raises(StreamingQueryException):
            writer.trigger(availableNow=True).start().awaitTermination()
        assert asyncio.run(last_status(mq.namesrv, "totals", has_error=True)).last_error
    finally:
        spark.streams.removeListener(listener)
        listener.close()
