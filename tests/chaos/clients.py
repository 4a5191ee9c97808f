"""Real clients as processes that write their history: `python -m tests.chaos.clients KIND NAMESRV HISTORY NAME …`.

    produce NAMESRV HISTORY NAME RATE   sends to all queues, RATE messages in a second; 0: as many as it can
    keyed   NAMESRV HISTORY NAME RATE   one message after another for each key, all of a key to one queue
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
from pathlib import Path
from typing import Any, Final

from downrange import AsyncProducer, Message, MQError
from downrange.client.config import ClientConfig, split_addresses
from downrange.client.consumer.config import ConsumerConfig
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.consumer.push import AsyncPushConsumer
from downrange.client.producer.send_result import SendStatus
from downrange.protocol.bodies.groups import ConsumeFromWhere
from downrange.transport.loop import run
from tests.support.history import HistoryWriter

TOPIC: Final = "chaos"
QUEUES: Final = 4
_WORKERS: Final = 32
_KEYS: Final = 16
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

    def __init__(self, producer: AsyncProducer, writer: HistoryWriter, rate: float, stop: asyncio.Event) -> None:
        self._producer = producer
        self._writer = writer
        self._rate = rate
        self._stop = stop
        self._count = 0
        self._began = time.monotonic()

    async def work(self, sharding_key: str | None = None) -> None:
        while not self._stop.is_set():
            self._count += 1
            message_id = f"{self._writer.process}-{self._count}"
            body = f"{message_id} ".encode() * (1, 3, 30)[self._count % 3]
            due = self._began + self._count / self._rate if self._rate else 0.0
            if (wait := due - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            await self._send(Message(TOPIC, body, keys=message_id, sharding_key=sharding_key), message_id)

    async def _send(self, message: Message, message_id: str) -> None:
        known: dict[str, Any] = {"topic": TOPIC, "id": message_id, "crc": checksum(message.body)}
        self._writer.write("send", "invoke", **known)
        try:
            result = await self._producer.send(message)
        except MQError:
            self._writer.write("send", "info", **known)
            await asyncio.sleep(_REFUSED_SECONDS)
            return
        phase = "ok" if result.status is SendStatus.SEND_OK else "info"
        queue = f"{result.queue.broker_name}/{result.queue.queue_id}"
        self._writer.write("send", phase, **known, queue=queue, offset=result.queue_offset)


async def produce(namesrv: str, writer: HistoryWriter, rate: float, stop: asyncio.Event, *, is_keyed: bool) -> None:
    async with AsyncProducer("chaos-producers", config_of(namesrv)) as producer:
        sender = Sender(producer, writer, rate, stop)
        print("ready", flush=True)
        async with asyncio.TaskGroup() as tasks:
            for number in range(_KEYS if is_keyed else _WORKERS):
                tasks.create_task(sender.work(f"key-{number}" if is_keyed else None))


async def consume(namesrv: str, writer: HistoryWriter, group: str, stop: asyncio.Event, *, is_orderly: bool) -> None:
    async def take(message: ReceivedMessage) -> None:
        queue = f"{message.broker_name}/{message.queue_id}"
        place: dict[str, Any] = {"topic": TOPIC, "queue": queue, "offset": message.queue_offset, "group": group}
        if is_orderly:
            writer.write("consume", "begin", **place)
        writer.write("read", "ok", **place, id=id_of(message.body), crc=checksum(message.body))
        if is_orderly:
            writer.write("consume", "end", **place)

    config = ConsumerConfig(orderly=is_orderly, consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
    consumer = AsyncPushConsumer(group, config_of(namesrv), config, on_message=take)
    await consumer.subscribe(TOPIC)
    async with consumer:
        print("ready", flush=True)
        await stop.wait()


async def main(kind: str, namesrv: str, history: str, name: str, last: str) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    writer = HistoryWriter(Path(history), name)
    if kind in ("produce", "keyed"):
        await produce(namesrv, writer, float(last), stop, is_keyed=kind == "keyed")
    else:
        await consume(namesrv, writer, last, stop, is_orderly=kind == "orderly")


if __name__ == "__main__":
    run(main(*sys.argv[1:]))
