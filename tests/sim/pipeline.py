"""A pipeline of a simulated cluster: the stream reader of our Spark source, called as Spark's driver calls it.

Spark itself is a model here, and a small one: before a batch it writes down where the batch ends, and after the batch
that it is done. A batch that was planned and is not done is read again between the same offsets, and its rows replace
those of the attempt before.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any, Final, NamedTuple

from pyspark.sql.streaming.datasource import ReadMaxRows
from pyspark.sql.types import StructType

import downrange.client.admin.cluster  # noqa: F401  once, and not in the process of every seed that has a pipeline
from downrange.model.errors import MQError
from downrange.model.message import MessageQueue
from downrange.spark import source
from downrange.spark.data_source import RocketMQDataSource
from downrange.spark.offsets import from_json
from downrange.spark.schema import message_schema
from downrange.spark.source import StreamReader
from tests.sim.clients import EVENTS, PAYMENTS, Client
from tests.sim.turns import TurnLoop
from tests.sim.world import World, checksum

PIPELINE: Final = "pipeline"
COLUMNS: Final = ("topic", "broker", "queue_id", "queue_offset", "keys", "body")
SCHEMA: Final = StructType([field for field in message_schema().fields if field.name in COLUMNS])
MOST_ROWS: Final = 20
PAUSE_SECONDS: Final = 2.0
STEP_SECONDS: Final = 0.3
"""Between two steps of a batch, so that a kill may come there."""


class Row(NamedTuple):
    """A row of the result, and when it was read."""

    time: int
    topic: str
    queue: str
    offset: int
    id: str
    crc: int


class Checkpoint:
    """What Spark keeps on a file system that outlives its driver, and the result of the query beside it."""

    def __init__(self) -> None:
        self.ends: list[dict[str, Any]] = []
        self.done = 0
        self.result: list[list[Row]] = []

    def offset(self, queue: MessageQueue) -> int:
        """How far the batches that are done have got."""
        return from_json(self.ends[self.done - 1]).get(queue, 0) if self.done else 0


class Pipeline(Client):
    """A streaming query over two topics."""

    def __init__(self, world: World, name: str, namesrv: tuple[str, ...]) -> None:
        super().__init__(world, name, namesrv)
        self.checkpoint = Checkpoint()

    async def main(self) -> None:
        turns = TurnLoop(self.world.loop, self.machine.clock)
        source.worker_loop = lambda: turns  # type: ignore[attr-defined]
        await turns.drive(lambda: self._supervise(turns))

    def _supervise(self, turns: TurnLoop) -> None:
        """Start the query again when it fails, as operators let their cluster do it."""
        for _ in count():
            try:
                self._query(turns)
            except MQError as error:
                self.world.record("client", "failed", outcome=type(error).__name__)
                turns.sleep(PAUSE_SECONDS)
            else:
                return

    def _query(self, turns: TurnLoop) -> None:
        options = {
            "namesrv": ";".join(self.namesrv),
            "subscribe": f"{EVENTS},{PAYMENTS}",
            "startingOffsets": "earliest",
            "failOnDataLoss": "false",
            "checkCrc": "true",
            "group": PIPELINE,
            "commitGroupOffsets": "true",
        }
        reader = RocketMQDataSource(options).streamReader(SCHEMA)
        assert isinstance(reader, StreamReader)
        first = None if self.checkpoint.done else reader.initialOffset()
        while self.is_wanted:
            if not self._batch(reader, turns, first):
                turns.sleep(PAUSE_SECONDS)

    def _batch(self, reader: StreamReader, turns: TurnLoop, first: dict[str, Any] | None) -> bool:
        """Plan a batch unless one is planned, and carry it out; False when there is nothing new."""
        kept = self.checkpoint
        start = kept.ends[kept.done - 1] if kept.done else first
        assert start is not None
        if len(kept.ends) == kept.done:
            end = reader.latestOffset(start, ReadMaxRows(MOST_ROWS))
            if end == start:
                return False
            kept.ends.append(end)
            for queue, stop in from_json(end).items():
                place = f"{queue.broker_name}/{queue.queue_id}"
                self.world.record("plan", "ok", group=PIPELINE, topic=queue.topic, queue=place, offset=stop - 1)
            turns.sleep(self.chance.expovariate(1 / STEP_SECONDS))
        rows = list(self._read(reader, start, kept.ends[kept.done]))
        turns.sleep(self.chance.expovariate(1 / STEP_SECONDS))
        del kept.result[kept.done :]
        kept.result.append(rows)
        turns.sleep(self.chance.expovariate(1 / STEP_SECONDS))
        kept.done += 1
        return True

    def _read(self, reader: StreamReader, start: dict[str, Any], end: dict[str, Any]) -> Iterator[Row]:
        for task in reader.partitions(start, end):
            for batch in reader.read(task):
                for found in batch.to_pylist():
                    yield Row(
                        int(self.world.loop.time() * 1e9),
                        found["topic"],
                        f"{found['broker']}/{found['queue_id']}",
                        found["queue_offset"],
                        found["keys"],
                        checksum(found["body"]),
                    )

    def tell_result(self) -> None:
        """Put the result of the query into the history."""
        for rows in self.checkpoint.result[: self.checkpoint.done]:
            for row in rows:
                self.world.record("keep", "ok", process=self.name, group=PIPELINE, **row._asdict())
