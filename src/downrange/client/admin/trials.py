"""What operators try out on a cluster: how long sends take, who would get which queue, what stands in a queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from downrange.client.config import ProducerConfig
from downrange.client.consumer.allocation import Averagely, allocate
from downrange.client.consumer.rebalance import readable_queues
from downrange.client.session import Session
from downrange.model.errors import MQError
from downrange.model.message import Message, MessageQueue
from downrange.model.topics import TOOLS_GROUP
from downrange.protocol.bodies.body import decode_body
from downrange.protocol.bodies.query import ConsumeQueueEntries, QueryConsumeQueueRequest
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import request


@dataclass(frozen=True, slots=True)
class TriedSend:
    """One message that was sent to measure: the broker, whether it took the message, and the milliseconds."""

    broker: str
    is_ok: bool
    millis: float
    problem: str | None = None


class TrialAdmin:
    """Tries of an operator; they send messages of their own and change nothing else."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def sends(self, topic: str, count: int, size: int) -> list[TriedSend]:
        """Send `count` messages of `size` bytes to a topic, one after the other, without further attempts."""
        from downrange.client.producer.producer import AsyncProducer  # not for those who only ask a cluster

        config = ProducerConfig(retry_times_when_send_failed=0)
        tried = []
        async with AsyncProducer(TOOLS_GROUP, config=config, session=self._session) as producer:
            for _ in range(count):
                begun = self._session.clock.monotonic()
                broker, problem = "", None
                try:
                    broker = (await producer.send(Message(topic, b"a" * size))).queue.broker_name
                except MQError as error:
                    problem = str(error)
                millis = (self._session.clock.monotonic() - begun) * 1000
                tried.append(TriedSend(broker, problem is None, millis, problem))
        return tried

    async def allocation(self, topic: str, clients: Sequence[str]) -> dict[str, tuple[MessageQueue, ...]]:
        """The queues of a topic that each client of a group would get, if these were all of its clients."""
        queues = readable_queues(topic, await self._session.look_up_route(topic))
        return {one: tuple(allocate(Averagely(), one, queues, clients)) for one in sorted(clients)}

    async def queue_entries(
        self, broker: str, queue: tuple[str, int], index: int, count: int, group: str | None = None
    ) -> ConsumeQueueEntries:
        """Entries of a consume queue on one broker, from number `index` on."""
        topic, queue_id = queue
        header = QueryConsumeQueueRequest(
            topic=topic, queue_id=queue_id, index=index, count=count, consumer_group=group
        )
        command = request(RequestCode.QUERY_CONSUME_QUEUE, header)
        reply = await self._session.ask(await self._session.broker(broker), command)
        return decode_body(ConsumeQueueEntries, reply.body_bytes)
