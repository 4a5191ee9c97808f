"""Messages per second of a push consumer that drains a backlog, against the bare decode of the same pulls.

128-byte bodies with a tag and a key, 8 queues, a broker process of its own on the same machine. Wall rates depend on
what else runs; the consumer's own CPU per message repeats better. `MESSAGES` sets the size of the backlog.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.report import QUICK, Figure, best_rate, table
from downrange.client.consumer.config import ConsumerConfig
from downrange.client.consumer.messages import ReceivedMessage, read_pulled
from downrange.client.consumer.push import AsyncPushConsumer
from downrange.client.producer.producer import AsyncProducer
from downrange.model.message import Message, MessageQueue
from downrange.model.record import decode_records
from downrange.protocol.bodies.groups import ConsumeFromWhere
from downrange.protocol.bodies.pull import PullMessageRequest, PullSysFlag
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import request
from downrange.transport.loop import run as run_loop
from downrange.transport.pool import connect
from tests.support.standalone_process import standalone_process

TOPIC = "backlog"
MESSAGES = int(os.environ.get("MESSAGES", "10000" if QUICK else "200000"))
ROUNDS = 1 if QUICK else 3
_groups = itertools.count()


async def fill(namesrv: str) -> None:
    """The backlog, sent in batches from several coroutines at once."""

    async def some(numbers: Sequence[int]) -> None:
        for at in range(0, len(numbers), 200):
            part = numbers[at : at + 200]
            await producer.send_batch([Message(TOPIC, b"x" * 128, tags="TagA", keys=f"key-{n}") for n in part])

    async with AsyncProducer("bench", namesrv) as producer:
        await asyncio.gather(*(some(range(first, MESSAGES, 8)) for first in range(8)))


async def one_pull(broker: str) -> bytes:
    connection = await connect(broker)
    header = PullMessageRequest(
        consumer_group="bench",
        topic=TOPIC,
        queue_id=0,
        queue_offset=0,
        max_msg_nums=32,
        sys_flag=int(PullSysFlag.SUBSCRIPTION),
        commit_offset=0,
        suspend_timeout_millis=0,
        subscription="*",
        sub_version=0,
    )
    reply = await connection.request(request(RequestCode.PULL_MESSAGE, header), 5)
    await connection.drain(1)
    return reply.body_bytes


class Drain:
    """Counts messages until the backlog is through."""

    def __init__(self) -> None:
        self.count = 0
        self.done = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self.count += count
            if self.count >= MESSAGES:
                self._loop.call_soon_threadsafe(self.done.set)


async def drain(namesrv: str, kind: str) -> tuple[float, float]:
    """Seconds and CPU seconds one consumer takes for the whole backlog."""
    progress = Drain()

    def plain(message: ReceivedMessage) -> None:
        progress.add(1)

    async def asynchronous(message: ReceivedMessage) -> None:
        progress.count += 1
        if progress.count >= MESSAGES:
            progress.done.set()

    def batch(messages: Sequence[ReceivedMessage]) -> None:
        progress.add(len(messages))

    orderly = kind.startswith("orderly")
    config = ConsumerConfig(
        orderly=orderly,
        consume_from_where=ConsumeFromWhere.FIRST_OFFSET,
        consume_message_batch_max_size=32 if kind == "batch" else 1,
    )
    callbacks: dict[str, dict[str, Callable[..., object]]] = {
        "plain": {"on_message": plain},
        "async": {"on_message": asynchronous},
        "batch": {"on_batch": batch},
        "loop": {},
        "orderly plain": {"on_message": plain},
        "orderly async": {"on_message": asynchronous},
    }
    consumer = AsyncPushConsumer(f"bench-{next(_groups)}", namesrv, config, **callbacks[kind])  # type: ignore[arg-type]
    await consumer.subscribe(TOPIC)
    start, cpu = time.perf_counter(), time.process_time()
    async with consumer:
        if kind == "loop":
            async for _ in consumer:
                progress.count += 1
                if progress.count >= MESSAGES:
                    break
        else:
            await progress.done.wait()
        return time.perf_counter() - start, time.process_time() - cpu


def run() -> list[Figure]:
    kinds = ("plain", "async", "batch", "loop", "orderly plain", "orderly async")
    seconds = dict.fromkeys(kinds, float("inf"))
    cpu = dict.fromkeys(kinds, float("inf"))
    with (
        tempfile.TemporaryDirectory() as directory,
        standalone_process(
            Path(directory), {"defaultTopicQueueNums": 8, "waitTimeMillsInSendQueue": 10_000}, log_level="ERROR"
        ) as cluster,
    ):
        run_loop(fill(cluster.namesrv))
        pulled = run_loop(one_pull(cluster.broker))
        for _ in range(ROUNDS):
            for kind in kinds:
                wall, own = run_loop(drain(cluster.namesrv, kind))
                seconds[kind] = min(seconds[kind], wall)
                cpu[kind] = min(cpu[kind], own)
    queue = MessageQueue(TOPIC, "broker-a", 0)

    def decode() -> int:
        return sum(len(read_pulled(pulled, queue, min_offset=0, max_offset=0)) for _ in range(2000))

    decoded = best_rate(decode)
    records = best_rate(lambda: sum(len(list(decode_records(pulled))) for _ in range(300)))
    figures = [
        Figure("bare decode of pulls", decoded, "messages/s", 1.0, "bare decode"),
        Figure("the model's decode_records", records, "messages/s", records / decoded, "bare decode"),
    ]
    for kind in kinds:
        rate = MESSAGES / seconds[kind]
        figures.append(Figure(f"drained, {kind}", rate, "messages/s", rate / decoded, "bare decode"))
        figures.append(Figure(f"drained, {kind}: CPU of the consumer", cpu[kind] / MESSAGES * 1e6, "µs a message"))
    return figures


if __name__ == "__main__":
    print(table(run()))
