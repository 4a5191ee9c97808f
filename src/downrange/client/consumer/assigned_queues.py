"""The queues a lite pull consumer reads: taken and given up, and how far it is in each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping

from downrange.client.consumer.assigned_queue import AssignedQueue
from downrange.client.consumer.fetching import Fetching
from downrange.client.consumer.lite_pull_config import LitePullConfig
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.consumer.offsets import HALF_AN_HOUR_MILLIS, OffsetStore, start_offset
from downrange.client.consumer.rebalance import changes, share
from downrange.client.errors import NotAssigned
from downrange.client.namespace import wrap
from downrange.client.session import Session
from downrange.model.errors import MQError
from downrange.model.message import MessageQueue
from downrange.model.subscription import Subscription
from downrange.protocol.bodies.consumers import ProcessQueueInfo

log = logging.getLogger(__name__)


class AssignedQueues:
    """The queues of one consumer, with the messages held of each. Used on the consumer's event loop.

    Holds always: a queue that is held is fetched; its committed offset is never beyond the messages that the user has
    finished.
    """

    def __init__(
        self, session: Session, group: str, config: LitePullConfig, offsets: OffsetStore, fetching: Fetching
    ) -> None:
        self._session = session
        self._group = group
        self._config = config
        self._offsets = offsets
        self._fetching = fetching
        self._start_millis = config.consume_timestamp or session.clock.now() - HALF_AN_HOUR_MILLIS
        self._queues: dict[MessageQueue, AssignedQueue] = {}
        self._sharing_out = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<AssignedQueues {self._group} queues={len(self._queues)}>"

    def __len__(self) -> int:
        return len(self._queues)

    def __iter__(self) -> Iterator[MessageQueue]:
        return iter(self._queues)

    def get(self, queue: MessageQueue) -> AssignedQueue | None:
        return self._queues.get(queue)

    def assigned(self, queue: MessageQueue) -> AssignedQueue:
        """A queue as the user calls it; raises NotAssigned."""
        held = self._queues.get(self.on_the_wire(queue))
        if held is None:
            raise NotAssigned(
                f"queue {queue.queue_id} of {queue.topic} on {queue.broker_name} is not assigned to this consumer"
            )
        return held

    def on_the_wire(self, queue: MessageQueue) -> MessageQueue:
        """The user's name of a queue with the namespace."""
        return queue._replace(topic=wrap(self._config.namespace, queue.topic))

    def positions(self, topic: str) -> Mapping[MessageQueue, int]:
        """How far the user is with the queues of a topic."""
        return {queue: held.done for queue, held in self._queues.items() if queue.topic == topic}

    def info(self) -> dict[MessageQueue, ProcessQueueInfo]:
        """The state of each queue for operators."""
        return {queue: held.info() for queue, held in self._queues.items()}

    # --- which queues ---------------------------------------------------------------------------------------------

    async def assign(self, wanted: Iterable[MessageQueue], subscriptions: Mapping[str, Subscription]) -> None:
        """Hold exactly these queues; raises when a broker cannot say where to begin."""
        change = changes(self._queues, list(wanted))
        for queue in change.removed:
            await self._give_up(queue)
        for queue in change.added:
            await self._take(queue, subscriptions[queue.topic])

    async def share_out(self, subscriptions: Mapping[str, Subscription]) -> bool:
        """Hold exactly our share of each topic; whether that could be told and reached."""
        async with self._sharing_out:
            is_balanced = True
            if self._config.auto_commit:
                # The consumer that takes a queue over asks for its offset at about this time: it should be fresh.
                await self._offsets.persist()
            for queue in [queue for queue in self._queues if queue.topic not in subscriptions]:
                await self._give_up(queue)
            for topic, subscription in list(subscriptions.items()):
                try:
                    is_balanced &= await self._share_out_one(topic, subscription)
                except MQError as error:
                    log.info("queues not shared out group=%s topic=%s reason=%s", self._group, topic, error)
                    is_balanced = False
            return is_balanced

    async def _share_out_one(self, topic: str, subscription: Subscription) -> bool:
        mine = await share(self._session, self._group, topic, self._config)
        change = changes([queue for queue in self._queues if queue.topic == topic], mine)
        is_balanced = True
        for queue in change.removed:
            await self._give_up(queue)
        for queue in change.added:
            try:
                await self._take(queue, subscription)
            except MQError as error:
                log.warning("queue not taken group=%s queue=%s reason=%s", self._group, queue, error)
                is_balanced = False
        for queue in mine:  # the expression may be a new one
            if queue in self._queues:
                self._queues[queue].subscription = subscription
        return is_balanced

    async def _take(self, queue: MessageQueue, subscription: Subscription) -> None:
        known = await self._offsets.load(queue)
        offset = await start_offset(self._session, queue, known, self._config.consume_from_where, self._start_millis)
        if known is not None:
            self._offsets.table.remember(queue, offset)
        held = self._queues[queue] = AssignedQueue(queue, subscription, offset)
        self._fetching.start(held)
        log.info("queue taken group=%s queue=%s offset=%d", self._group, queue, offset)

    async def _give_up(self, queue: MessageQueue) -> None:
        """Commit the offset of a queue. The next owner gets the messages again that the user has in hand now."""
        held = self._queues.pop(queue)
        await self._fetching.stop(held)
        if self._config.auto_commit:
            await self._offsets.persist([queue], confirmed=True)
        self._offsets.table.forget(queue)
        log.info("queue given up group=%s queue=%s offset=%d", self._group, queue, held.done)

    # --- how far --------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """The user is through with everything handed out."""
        unsettled = self._fetching.unsettled
        if unsettled:
            for held in unsettled:
                held.settle()
                self._offsets.table.update(held.queue, held.done)
            unsettled.clear()

    def give_back(self, messages: list[ReceivedMessage]) -> None:
        """Undo the hand-out of the last messages of one queue."""
        held = self._queues.get(messages[0].queue) if messages else None
        if held is not None:
            self._fetching.put_back(held, messages)

    async def seek(self, held: AssignedQueue, offset: int) -> None:
        """Go on at `offset`."""
        await self._fetching.stop(held)  # it may wait for a message at the old place
        held.seek(offset)
        if held.queue in self._queues:
            self._offsets.table.update(held.queue, offset)
            self._fetching.start(held)
