"""A steady load on brokers under a controller, and what became of every message."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from downrange.client.consumer.config import ConsumerConfig
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.consumer.push import AsyncPushConsumer
from downrange.client.errors import NoRoute
from downrange.client.producer.producer import AsyncProducer
from downrange.client.producer.send_result import SendStatus
from downrange.model.errors import MQError
from downrange.model.message import Message
from downrange.model.record import decode_records
from downrange.protocol.bodies.groups import ConsumeFromWhere
from tests.support.controlled_cluster import ControlledCluster
from tests.support.process_cluster import Server
from tests.support.requests import connected, create_topic, max_offset

TOPIC: Final = "Drill"
QUEUES: Final = 4
_TICK_SECONDS: Final = 0.01
_PULLED: Final = 1024


@dataclass(eq=False)
class FailoverLoad:
    """One producer and one consumer with their default settings; nobody waits for an answer before the next send.

    Times are seconds of `time.monotonic`. Holds always: `acknowledged` and `acknowledged_at` are of one length.
    """

    cluster: ControlledCluster
    rate: float
    acknowledged: list[int] = field(default_factory=list)
    acknowledged_at: list[float] = field(default_factory=list)
    latencies: list[tuple[float, float]] = field(default_factory=list)
    """Start and length of every send that was acknowledged."""
    unconfirmed: int = 0
    """Sends that were answered with another status than SEND_OK: stored, and perhaps lost again."""
    failed: Counter[str] = field(default_factory=Counter)
    failed_example: str = ""
    received_at: list[float] = field(default_factory=list)
    received: Counter[int] = field(default_factory=Counter)
    sent: int = 0
    _is_over: bool = False
    _sends: set[asyncio.Task[None]] = field(default_factory=set)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[FailoverLoad]:
        """Send and consume meanwhile; afterwards all sends have ended."""
        namesrv = self.cluster.namesrv.address
        async with connected((await self.cluster.master()).address) as client:
            await create_topic(client, TOPIC, QUEUES)
        async with AsyncExitStack() as stack:
            producer = await stack.enter_async_context(AsyncProducer("drill", namesrv))
            await _until_routed(producer)
            config = ConsumerConfig(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
            consumer = AsyncPushConsumer("drillers", namesrv, config, on_message=self._receive)
            await stack.enter_async_context(consumer)
            await consumer.subscribe(TOPIC)
            sending = asyncio.create_task(self._send_on(producer))
            try:
                yield self
            finally:
                self._is_over = True
                await sending
                await asyncio.gather(*self._sends)
            await self._until_received()

    async def acknowledges(self, more: int, seconds: float = 60.0) -> None:
        """Wait until so many more messages are acknowledged."""
        wanted = len(self.acknowledged) + more
        async with asyncio.timeout(seconds):
            while len(self.acknowledged) < wanted:
                await asyncio.sleep(0.01)

    def longest_gap(self, since: float, until: float) -> tuple[float, float]:
        """The longest time between two acknowledgements that ends between two moments, and its end."""
        return _longest(self.acknowledged_at, since, until)

    def longest_wait(self, since: float, until: float) -> float:
        """The longest time for which the consumer received nothing."""
        return _longest(self.received_at, since, until)[0]

    async def stored(self, broker: Server) -> Counter[int]:
        """The messages in the queues of a broker, and how often each is there."""
        found: Counter[int] = Counter()
        async with connected(broker.address) as client:
            for queue_id in range(QUEUES):
                end, offset = await max_offset(client, TOPIC, queue_id), 0
                while offset < end:
                    command = client.pull_command(TOPIC, queue_id=queue_id, offset=offset, most=_PULLED)
                    reply = await client.connection.request(command, 10)
                    messages = list(decode_records(reply.body_bytes)) if reply.code == 0 else []
                    assert messages, f"no message at {offset} of queue {queue_id}, which ends at {end}: {reply.remark}"
                    found.update(int(message.body) for message in messages)
                    offset = messages[-1].queue_offset + 1
        return found

    # --- sending and receiving ----------------------------------------------------------------------------------

    async def _send_on(self, producer: AsyncProducer) -> None:
        began = time.monotonic()
        while not self._is_over:
            due = int((time.monotonic() - began) * self.rate)
            # What could not be sent because this process had no processor is made up for, but not all at once.
            for _ in range(min(due - self.sent, int(self.rate))):
                task = asyncio.create_task(self._send(producer, self.sent))
                self.sent += 1
                self._sends.add(task)
                task.add_done_callback(self._sends.discard)
            await asyncio.sleep(_TICK_SECONDS)

    async def _send(self, producer: AsyncProducer, number: int) -> None:
        started = time.monotonic()
        try:
            result = await producer.send(Message(TOPIC, b"%d" % number))
        except MQError as error:
            self.failed[type(error.__cause__ or error).__name__] += 1
            self.failed_example = str(error)
            return
        if result.status is not SendStatus.SEND_OK:
            self.unconfirmed += 1
            return
        now = time.monotonic()
        self.acknowledged.append(number)
        self.acknowledged_at.append(now)
        self.latencies.append((started, now - started))

    async def _receive(self, message: ReceivedMessage) -> None:
        self.received[int(message.body)] += 1
        self.received_at.append(time.monotonic())

    @property
    def not_received(self) -> int:
        return sum(number not in self.received for number in self.acknowledged)

    async def _until_received(self, seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while self.not_received and time.monotonic() < deadline:
            await asyncio.sleep(0.2)


async def _until_routed(producer: AsyncProducer) -> None:
    async with asyncio.timeout(20):
        while True:
            try:
                if await producer.queues(TOPIC):
                    return
            except NoRoute:
                await asyncio.sleep(0.05)


def _longest(at: Sequence[float], since: float, until: float) -> tuple[float, float]:
    first, last = max(1, bisect_left(at, since)), bisect_left(at, until)
    return max(((at[number] - at[number - 1], at[number]) for number in range(first, last)), default=(0.0, since))
