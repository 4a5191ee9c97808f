"""Real clients as processes that write their history: `python -m tests.chaos.clients KIND NAMESRV HISTORY NAME …`.

    produce NAMESRV HISTORY NAME RATE   sends to all queues, RATE messages in a second; 0: as many as it can
    batches NAMESRV HISTORY NAME RATE   as produce; half of its sends are batches
    keyed   NAMESRV HISTORY NAME RATE   as batches; one send after another for each key, all of a key to one queue
    consume NAMESRV HISTORY NAME GROUP  a push consumer
    orderly NAMESRV HISTORY NAME GROUP  a push consumer that takes queues in their order

Each says `ready`, and ends in order after SIGTERM: a producer when all its sends have ended.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
import zlib
from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, Final

from downrange import AsyncProducer, Message, MessageQueue, MQError
from downrange.client.config import ClientConfig, split_addresses
from downrange.client.consumer.config import ConsumerConfig
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.consumer.push import AsyncPushConsumer
from downrange.client.producer.send_result import SendStatus
from downrange.protocol.bodies.groups import ConsumeFromWhere
from downrange.transport.loop import run
from tests.chaos.hasty_broker import LOCK_LIVES_SECONDS
from tests.support.history import HistoryWriter

TOPIC: Final = "chaos"
QUEUES: Final = 4
_WORKERS: Final = 32
_KEYS: Final = 16
_BATCH: Final = 32
_REFUSED_SECONDS: Final = 0.02


def checksum(body: bytes) -> int:
    return zlib.crc32(body) & 0x7FFFFFFF


def id_of(body: bytes) -> str:
    return body.partition(b" ")[0].decode()


def config_of(namesrv: str) -> ClientConfig:
    """Clients that hear of changes soon: rounds are short."""
    return ClientConfig(split_addresses(namesrv), heartbeat_seconds=1.0, route_seconds=2.0)


class Sender:
    """Sends from many tasks at once until it is told to stop."""

    def __init__(
        self, producer: AsyncProducer, writer: HistoryWriter, rate: float, stop: asyncio.Event, sizes: Sequence[int]
    ) -> None:
        """`sizes`: how many messages one send has, and the next, and so on in turn."""
        self._producer = producer
        self._writer = writer
        self._rate = rate
        self._stop = stop
        self._sizes = sizes
        self._count = 0
        self._began = time.monotonic()

    async def work(self, queue: MessageQueue | None = None) -> None:
        for size in cycle(self._sizes):
            if self._stop.is_set():
                return
            messages = [self._next() for _ in range(size)]
            due = self._began + self._count / self._rate if self._rate else 0.0
            if (wait := due - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            await self._send(messages, queue)

    def _next(self) -> Message:
        self._count += 1
        message_id = f"{self._writer.process}-{self._count}"
        return Message(TOPIC, f"{message_id} ".encode() * (1, 3, 30)[self._count % 3], keys=message_id)

    async def _send(self, messages: Sequence[Message], queue: MessageQueue | None) -> None:
        """Messages that are stored side by side or not at all."""
        sent: list[dict[str, Any]] = [
            {"topic": TOPIC, "id": id_of(message.body), "crc": checksum(message.body)} for message in messages
        ]
        self._write("invoke", sent)
        try:
            if len(messages) == 1:
                results = [await self._producer.send(messages[0], queue=queue)]
            else:
                results = await self._producer.send_batch(messages, queue=queue)
        except MQError:
            self._write("info", sent)
            await asyncio.sleep(_REFUSED_SECONDS)
            return
        first = results[0]
        assert [result.queue_offset - first.queue_offset for result in results] == list(range(len(messages)))
        place = f"{first.queue.broker_name}/{first.queue.queue_id}"
        places = [{**known, "queue": place, "offset": at} for at, known in enumerate(sent, first.queue_offset)]
        self._write("ok" if first.status is SendStatus.SEND_OK else "info", places)

    def _write(self, phase: str, messages: Iterable[dict[str, Any]]) -> None:
        self._writer.write_all([self._writer.event("send", phase, **known) for known in messages])


async def produce(namesrv: str, writer: HistoryWriter, rate: float, stop: asyncio.Event, kind: str) -> None:
    async with AsyncProducer("chaos-producers", config_of(namesrv)) as producer:
        sender = Sender(producer, writer, rate, stop, (1,) if kind == "produce" else (1, _BATCH))
        queues = await producer.queues(TOPIC)
        print("ready", flush=True)
        async with asyncio.TaskGroup() as tasks:
            for number in range(_KEYS if kind == "keyed" else _WORKERS):
                tasks.create_task(sender.work(queues[number % len(queues)] if kind == "keyed" else None))


async def consume(namesrv: str, writer: HistoryWriter, group: str, stop: asyncio.Event, *, is_orderly: bool) -> None:
    async def take(message: ReceivedMessage) -> None:
        queue = f"{message.broker_name}/{message.queue_id}"
        place: dict[str, Any] = {"topic": TOPIC, "queue": queue, "offset": message.queue_offset, "group": group}
        if is_orderly:
            writer.write("consume", "begin", **place)
        taken = [writer.event("read", "ok", **place, id=id_of(message.body), crc=checksum(message.body))]
        if is_orderly:
            taken.append(writer.event("consume", "end", **place))
        writer.write_all(taken)

    config = ConsumerConfig(
        orderly=is_orderly,
        consume_from_where=ConsumeFromWhere.FIRST_OFFSET,
        pull_delay_when_exception_seconds=0.1,  # else a consumer would sleep through the short life of a broker
        rebalance_seconds=2.0,
        lock_renewal_seconds=3.0,
        lock_lives_seconds=LOCK_LIVES_SECONDS / 2,
    )
    consumer = AsyncPushConsumer(group, config_of(namesrv), config, on_message=take)
    await consumer.subscribe(TOPIC)
    async with consumer:
        print("ready", flush=True)
        await stop.wait()


async def main(kind: str, namesrv: str, history: str, name: str, last: str) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    writer = HistoryWriter(Path(history), name)
    if kind in ("produce", "batches", "keyed"):
        await produce(namesrv, writer, float(last), stop, kind)
    else:
        await consume(namesrv, writer, last, stop, is_orderly=kind == "orderly")


if __name__ == "__main__":
    run(main(*sys.argv[1:]))
