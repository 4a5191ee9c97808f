"""Sends messages of another cluster to their queues, in order, and not those that an earlier attempt has sent.

The end of a queue says what was sent before: the last message of an origin has the offset that it had there. A task
looks there before its first send to a queue. Messages come twice only when a request of a dead process is stored after
that look, when the answer to a request was lost, or when more than SEARCHED messages of others lie behind the last one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Final

from downrange.client.admin.queue_reading import MAX_MESSAGES, pull_from
from downrange.client.brokers import Broker
from downrange.client.errors import BrokerNotFound, NoRoute
from downrange.client.producer.producer import AsyncProducer
from downrange.client.session import Session
from downrange.model.errors import MQError
from downrange.model.message import MessageQueue
from downrange.spark.mirror_rows import MirrorRow, QueueMap, origin_offset
from downrange.spark.sink_sending import Sending

log = logging.getLogger(__name__)

SEARCHED: Final = 20_000
"""How many messages at the end of a queue are looked through."""
QUEUE_SECONDS: Final = 60.0
"""How long to wait for a queue that the driver is about to create."""


class QueueMissing(MQError):
    """The target has no such queue."""


class MirrorSending(Sending):
    """The sends of one task of a mirror. One lane for each queue, whose requests are sent one after the other."""

    def __init__(
        self, producer: AsyncProducer, session: Session, queues: QueueMap, *, batch_bytes: int, max_in_flight: int
    ) -> None:
        super().__init__(producer, batch_bytes=batch_bytes, max_in_flight=max_in_flight)
        self._session = session
        self._map = queues
        self._sent_before: dict[MessageQueue, int] = {}
        """The offset of the last message of each queue of the source that is at the target; -1 when none is."""

    async def put_rows(self, rows: Iterable[MirrorRow]) -> None:
        for row in rows:
            target = self._map.target(row.queue)
            last = self._sent_before.get(row.queue)
            if last is None:
                last = self._sent_before[row.queue] = await self._look(row.queue, target)
            if row.offset > last:
                await self._add(row.message, target)
        self._raise_error()

    async def _look(self, queue: MessageQueue, target: MessageQueue) -> int:
        broker = await self._broker_of(target)
        last = await last_of_origin(self._session, broker, target, self._map.origin(queue))
        if last is not None:
            log.info("mirrored before queue=%s up to=%d", queue, last)
        return -1 if last is None else last

    async def _broker_of(self, target: MessageQueue) -> Broker:
        """The master of a queue; waits for a queue that is not there yet."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + QUEUE_SECONDS
        while True:
            try:
                # Not the producer's queues: for a topic that does not exist these are those of the model topic.
                route = await self._session.look_up_route(target.topic)
                if any(
                    data.broker_name == target.broker_name and target.queue_id < data.write_queue_nums
                    for data in route.queue_datas
                ):
                    return await self._session.broker(target.broker_name)
            except (NoRoute, BrokerNotFound) as error:
                log.info("queue not found yet queue=%s reason=%s", target, error)
            if loop.time() > deadline:
                raise QueueMissing(
                    f"{target.broker_name} of the target has no queue {target.queue_id} of {target.topic} to write to: "
                    "give the topic as many queues as it has at the source"
                )
            await asyncio.sleep(0.5)


async def last_of_origin(
    session: Session, broker: Broker, queue: MessageQueue, origin: str, before: int | None = None
) -> int | None:
    """The offset at its origin of the last message of `origin` in a queue, or the last one in front of `before`."""
    there = await pull_from(session, broker, queue, 0, 1)
    end = there.max_offset if before is None else min(before, there.max_offset)
    first = max(there.min_offset, end - SEARCHED)
    while end > first:
        begin = max(first, end - MAX_MESSAGES)
        found = None
        at = begin
        while at < end:  # a broker may give fewer messages than were asked for
            pulled = await pull_from(session, broker, queue, at)
            for message in pulled.messages:
                offset = origin_offset(message.properties, origin)
                if message.queue_offset < end and offset is not None:
                    found = offset
            if pulled.next_offset <= at:
                break
            at = pulled.next_offset
        if found is not None:
            return found
        end = begin
    return None
