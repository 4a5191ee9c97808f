"""Delayed messages (level 1, one second) through the Python client: how late they come, a few and very many at a time.

Lateness is the time from one second after a message was made until a push consumer has it.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from bench.report import QUICK, Figure, table
from bench.served import served
from downrange.client.consumer.config import ConsumerConfig
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.consumer.push import AsyncPushConsumer
from downrange.client.producer.producer import AsyncProducer
from downrange.load import Histogram
from downrange.model.message import Message
from downrange.protocol.bodies.groups import ConsumeFromWhere
from downrange.transport.loop import run as run_loop

RATE: Final = 500
STEADY_SECONDS: Final = 1 if QUICK else 5
BURST: Final = 1_000 if QUICK else 20_000
DELAY_MILLIS: Final = 1000


class Arrivals:
    """Messages as they come, until as many as were sent have come."""

    def __init__(self, expected: int) -> None:
        self._left = expected
        self.done = asyncio.Event()
        self.lateness = Histogram()
        self.early = 0

    async def add(self, message: ReceivedMessage) -> None:
        late = time.time() * 1000 - message.born_timestamp - DELAY_MILLIS
        self.early += late < -1  # both clocks are cut to milliseconds
        self.lateness.record(int(late * 1e6))
        self._left -= 1
        if self._left == 0:
            self.done.set()


async def deliver(namesrv: str, topic: str, count: int, rate: float | None) -> tuple[Arrivals, float]:
    """Send `count` messages, at a rate or at once; who came when, and seconds from the first due to the last come."""
    arrivals = Arrivals(count)
    config = ConsumerConfig(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
    async with AsyncProducer("bench", namesrv) as producer:
        await producer.send(Message(topic, b"makes the topic"))
        consumer = AsyncPushConsumer(f"bench-{topic}", namesrv, config, on_message=arrivals.add)
        await consumer.subscribe(topic, "delayed")
        async with consumer:
            started = time.monotonic()

            async def send(first: int, step: int) -> None:
                for number in range(first, count, step):
                    if rate is not None:
                        await asyncio.sleep(started + number / rate - time.monotonic())
                    await producer.send(Message(topic, b"x" * 128, tags="delayed", delay_level=1))

            await asyncio.gather(*(send(first, 64) for first in range(64)))
            async with asyncio.timeout(60):
                await arrivals.done.wait()
            return arrivals, time.monotonic() - started - DELAY_MILLIS / 1000


def run() -> list[Figure]:
    with served() as running:
        steady, _ = run_loop(deliver(running.namesrv, "steady", RATE * STEADY_SECONDS, RATE))
        burst, seconds = run_loop(deliver(running.namesrv, "burst", BURST, None))
    figures = [
        Figure(f"late at {RATE} messages/s, {name}", steady.lateness.percentile(percent) / 1e6, "ms")
        for name, percent in (("p50", 50), ("p99", 99), ("max", 100))
    ]
    return [
        *figures,
        Figure("delivered too early", steady.early + burst.early, "messages"),
        Figure(f"{BURST:,} at once: sent, delayed and received", BURST / seconds, "messages/s"),
        Figure(f"{BURST:,} at once: late, p99", burst.lateness.percentile(99) / 1e6, "ms"),
    ]


if __name__ == "__main__":
    print(table(run()))
