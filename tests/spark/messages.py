"""Messages for tests of the source, and the rows they must become."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from downrange import Message
from downrange.spark.options import parse_options
from downrange.spark.store_reader import Stores
from downrange.testing import EmbeddedBroker


def send(mq: EmbeddedBroker, topic: str, numbers: Iterable[int], *, size: int = 0) -> list[bytes]:
    """Messages `0`, `1`, …, each with a tag (a, b, c in turn), a key and two properties; their bodies."""
    bodies = []
    waiting: list[Message] = []
    producer = mq.producer()
    for number in numbers:
        body = b"%d" % number + b"." * size
        bodies.append(body)
        properties = {"number": str(number), "parity": "even" if number % 2 == 0 else "odd"}
        waiting.append(Message(topic, body, tags="abc"[number % 3], keys=f"key-{number}", properties=properties))
        if len(waiting) == (100 if size > 500 else 500):
            producer.send_batch(waiting)
            waiting = []
    for message in waiting[:8]:  # one by one, so that every queue gets some
        producer.send(message)
    if waiting[8:]:
        producer.send_batch(waiting[8:])
    return bodies


def source(spark: SparkSession, namesrv: str, **options: object) -> DataFrame:
    return spark.read.format("rocketmq").options(namesrv=namesrv, **{k: str(v) for k, v in options.items()}).load()


def bodies(frame: DataFrame) -> list[bytes]:
    return sorted((bytes(row.body) for row in frame.select("body").collect()), key=_number)


def numbers(frame: DataFrame) -> list[int]:
    return [_number(body) for body in bodies(frame)]


def _number(body: bytes) -> int:
    return int(body.rstrip(b"."))


def checksum(parts: Iterable[bytes]) -> int:
    """The same for the same bodies in any order; Spark computes it as `sum(crc32(body))`."""
    return sum(zlib.crc32(part) for part in parts)


def wait_for_queue_files(store: Path, topic: str, count: int) -> None:
    """A broker writes its queues once a second, or when they have grown by some hundred entries."""
    stores = Stores(parse_options({"storePath": str(store), "subscribe": topic}))
    deadline = time.monotonic() + 60
    while (
        sum(there.maximum - there.minimum for there in stores.reach(stores.queues(), must_answer=True).values()) < count
    ):
        assert time.monotonic() < deadline, f"{count} messages of {topic} are not in the queue files"
        time.sleep(0.05)
