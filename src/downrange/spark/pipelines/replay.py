"""Sends messages of a lake again: chosen by time, key and SQL, with a limited rate, continuing an interrupted run.

Messages are sent in the order of their store times. Those of one queue are sent one after another, so that messages
with a sharding key keep their order; different queues at the same time. After every chunk the position is saved in the
lake: a replay that was killed sends at most the last chunk twice. A replay that is started while it runs elsewhere
takes over: the other one stops before its next chunk.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Final, NamedTuple

import msgspec
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from downrange.client import background_loop
from downrange.client.config import ClientConfig, ProducerConfig
from downrange.client.pipeline_status import PipelineReporter, PipelineStatus
from downrange.client.producer.producer import AsyncProducer
from downrange.spark.lake.lake import Lake
from downrange.spark.lake.layout import LakeBusy, LakeError
from downrange.spark.pipelines.errors import PipelineError, told_in_one_line
from downrange.spark.pipelines.frames import lake_frame
from downrange.spark.pipelines.replay_plan import Choice, Position, State, message_of, read_state, write_state

KIND: Final = "replay"
GROUP: Final = "downrange_replay"
CHUNK: Final = 500
# The columns of a Position after its date, with Spark's types: Spark compares only values of equal types.
_ORDER: Final = {
    "store_micros": "long",
    "topic": "string",
    "broker": "string",
    "queue_id": "int",
    "queue_offset": "long",
}


class Counted(NamedTuple):
    """The number of messages that a dry run found for one topic and day."""

    topic: str
    date: str
    messages: int
    bytes: int


class ReplayReport(NamedTuple):
    """The result of a run: messages sent now, and by all runs of this choice together."""

    sent_now: int
    sent: int
    was_done: bool
    """An earlier run had sent all messages, so this one sent none."""


def chosen(spark: SparkSession, lake: Lake, choice: Choice) -> DataFrame:
    """The messages of a choice, in no order."""
    frame = lake_frame(spark, lake, choice.topics, choice.begin_millis, choice.end_millis)
    if choice.keys:
        wanted = list(choice.keys)
        keys = F.arrays_overlap(F.split("keys", " "), F.array(*map(F.lit, wanted)))
        frame = frame.where(F.coalesce(keys, F.lit(False)) | F.coalesce(F.col("unique_key").isin(wanted), F.lit(False)))
    if choice.where is not None:
        frame = frame.where(F.expr(choice.where))
    return frame


def count(spark: SparkSession, lake: Lake, choice: Choice) -> list[Counted]:
    """Count the messages that a replay would send if there were no earlier run; nothing is sent."""
    with told_in_one_line():
        rows = (
            chosen(spark, lake, choice)
            .groupBy("topic", "date")
            .agg(F.count("*").alias("messages"), F.sum(F.octet_length("body")).alias("bytes"))
            .orderBy("topic", "date")
            .collect()
        )
    return [Counted(row["topic"], str(row["date"]), row["messages"], row["bytes"] or 0) for row in rows]


def replay(
    spark: SparkSession,
    lake: Lake,
    choice: Choice,
    namesrv: str | ClientConfig | None = None,
    *,
    rate: float | None = None,
    again: bool = False,
    on_sent: Callable[[int], None] | None = None,
    stop: threading.Event | None = None,
) -> ReplayReport:
    """Send the messages of a choice, at most `rate` a second; `again` ignores earlier runs. A failed send ends it.

    Setting `stop` ends it after a chunk; the next run continues there.
    """
    if rate is not None and not rate > 0:
        raise PipelineError(f"a rate of {rate:g} messages a second would never end")
    run = lake.begin_run(choice.name)
    state = State(choice) if again else read_state(lake.location, choice)
    if state.is_done:
        return ReplayReport(0, state.sent, True)
    client = namesrv if isinstance(namesrv, ClientConfig) else ClientConfig.of(namesrv)
    sender = _Sender(client, choice, rate)
    with _told(client, lake, choice) as told, told_in_one_line(), sender:
        before = state.sent
        for date in _dates(lake, choice):
            if state.position is not None and date < state.position.date:
                continue
            for chunk in _chunks(_rows(spark, lake, choice, date, state.position), sender.chunk):
                if lake.last_run(choice.name) != run:
                    raise LakeBusy("this replay was started again elsewhere and goes on there")
                sender.send(chunk)
                last = Position(date, *(chunk[-1][name] for name in _ORDER))
                state = msgspec.structs.replace(state, sent=state.sent + len(chunk), position=last)
                write_state(lake.location, state)
                told(chunk)
                if on_sent is not None:
                    on_sent(len(chunk))
                if stop is not None and stop.is_set():
                    return ReplayReport(state.sent - before, state.sent, False)
    write_state(lake.location, msgspec.structs.replace(state, is_done=True))
    return ReplayReport(state.sent - before, state.sent, False)


def _dates(lake: Lake, choice: Choice) -> list[str]:
    found = lake.files(choice.topics, choice.begin_millis, choice.end_millis)
    if choice.topics and (unknown := set(choice.topics) - {file.topic for file in lake.files()}):
        raise LakeError(f"{lake.location} has no messages of {', '.join(sorted(unknown))}")
    return sorted({file.date for file in found})


def _rows(spark: SparkSession, lake: Lake, choice: Choice, date: str, position: Position | None) -> Iterator[Row]:
    """The messages of one day after `position`, in order; Spark sorts and sends them here piece by piece."""
    frame = chosen(spark, lake, choice).where(F.col("date") == date)
    frame = frame.withColumn("store_micros", F.unix_micros("store_time"))
    if position is not None and position.date == date:
        reached = zip(position[1:], _ORDER.items(), strict=True)
        done = F.struct(*(F.lit(value).cast(kind).alias(name) for value, (name, kind) in reached))
        frame = frame.where(F.struct(*_ORDER) > done)
    needed = ("unique_key", "msg_id", "tags", "keys", "body", "properties")
    return frame.select(*_ORDER, *needed).orderBy(*_ORDER).toLocalIterator(prefetchPartitions=True)


def _chunks(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    source = iter(rows)
    while chunk := list(islice(source, size)):
        yield chunk


@contextmanager
def _told(client: ClientConfig, lake: Lake, choice: Choice) -> Iterator[Callable[[list[Row]], None]]:
    """Tell the cluster that the messages are sent to how the replay goes; the error, too, that ends it."""
    reporter = PipelineReporter(client)
    target = choice.target or "the topics they came from"
    status = PipelineStatus(f"{KIND}_{choice.target or 'own'}", KIND, str(lake.location), target)
    began, messages, size = time.monotonic(), 0, 0

    def tell(chunk: list[Row]) -> None:
        nonlocal status, messages, size
        messages += len(chunk)
        size += sum(len(row["body"] or b"") for row in chunk)
        seconds = max(time.monotonic() - began, 1e-9)
        status = replace(status, rows_per_second=messages / seconds, bytes_per_second=size / seconds)
        reporter.tell(status)

    try:
        yield tell
    except Exception as error:
        reporter.tell_error(status, error)
        raise
    finally:
        reporter.close()


class _Sender:
    """Sends chunks and keeps the rate. Belongs to one thread."""

    def __init__(self, client: ClientConfig, choice: Choice, rate: float | None) -> None:
        self._producer = AsyncProducer(GROUP, client, ProducerConfig())
        self._target = choice.target
        self._rate = rate
        # Smaller chunks, so that a slow replay also saves its position a few times a second.
        self.chunk = CHUNK if rate is None else max(1, min(CHUNK, int(rate / 5)))
        self._sent = 0
        self._begun = 0.0

    def __enter__(self) -> None:
        self._background, _ = background_loop.open_client(self._producer.start())
        self._begun = time.monotonic()

    def __exit__(self, *_: object) -> None:
        background_loop.close_client(self._background, self._producer.close())

    def send(self, chunk: list[Row]) -> None:
        """Send a chunk; returns when all messages were acknowledged and the rate allows the next chunk."""
        queues: dict[tuple[str, str, int], list[Row]] = {}
        for row in chunk:
            queues.setdefault((row["topic"], row["broker"], row["queue_id"]), []).append(row)
        self._background.run(self._send(list(queues.values())))
        self._sent += len(chunk)
        if self._rate is not None:
            time.sleep(max(0.0, self._begun + self._sent / self._rate - time.monotonic()))

    async def _send(self, queues: list[list[Row]]) -> None:
        async def one_after_another(rows: list[Row]) -> None:
            for row in rows:
                await self._producer.send(message_of(row, self._target))

        await asyncio.gather(*(one_after_another(rows) for rows in queues))
