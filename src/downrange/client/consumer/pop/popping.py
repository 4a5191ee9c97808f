"""Popping for push consumers: for each assigned queue one task with one request at a time."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, Protocol

from downrange.client.consumer.pop.leases import INIT_MODES, Leases, Wish
from downrange.client.consumer.pop.messages import PoppedMessage
from downrange.client.consumer.pop.queue import PopQueue
from downrange.client.consumer.pulling import FLOW_CONTROL_PAUSE_SECONDS, Membership
from downrange.client.consumer.rebalance import changes
from downrange.client.consumer.statistics import ConsumeStatistics
from downrange.model.errors import MQError
from downrange.model.message import MessageQueue
from downrange.model.subscription import Subscription
from downrange.protocol.errors import FlowControl

log = logging.getLogger(__name__)

_NEWEST: Final = 1


class PopReceiver(Protocol):
    """Where popped messages go."""

    def accept(self, queue: PopQueue, messages: Sequence[PoppedMessage]) -> None: ...


class Popping:
    """The pops of one push consumer. `subscriptions` is the consumer's own table. Used on one event loop."""

    def __init__(
        self,
        membership: Membership,
        subscriptions: Mapping[str, Subscription],
        leases: Leases,
        receiver: PopReceiver,
        statistics: ConsumeStatistics,
    ) -> None:
        self._session, self._group, self._config = membership
        self._clock = self._session.clock
        self._subscriptions = subscriptions
        self._leases = leases
        self._receiver = receiver
        self._statistics = statistics
        self._tasks: dict[PopQueue, asyncio.Task[None]] = {}
        self._resumed = asyncio.Event()
        self._resumed.set()

    def __repr__(self) -> str:
        return f"<Popping {self._group} queues={len(self._tasks)}>"

    def __iter__(self) -> Iterator[PopQueue]:
        return iter(list(self._tasks))

    @property
    def names(self) -> Sequence[MessageQueue]:
        return sorted(queue.queue for queue in self._tasks)

    async def hold(self, topic: str, mine: Collection[MessageQueue]) -> None:
        """Pop exactly these queues of a topic. Messages that were popped of others are consumed all the same."""
        held = {queue.queue: queue for queue in self._tasks if queue.queue.topic == topic}
        change = changes(held, mine)
        if change:
            log.info("popped queues change group=%s added=%s removed=%s", self._group, change.added, change.removed)
        await self._stop([held[name] for name in change.removed])
        for name in change.added:
            self._begin(PopQueue(name))

    async def restart(self, topic: str) -> None:
        """The subscription changed: a pop the broker holds would still be answered by the old one."""
        names = [queue.queue for queue in self._tasks if queue.queue.topic == topic]
        await self.hold(topic, ())
        await self.hold(topic, names)

    async def stop(self) -> None:
        """Pop nothing more, and begin nothing with what was popped. Messages in an answer on its way are given back."""
        queues = list(self._tasks)
        for queue in queues:
            queue.drop()
        await self._stop(queues)

    async def _stop(self, queues: Collection[PopQueue]) -> None:
        tasks = [self._tasks[queue] for queue in queues]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def pause(self) -> None:
        self._resumed.clear()

    def resume(self) -> None:
        self._resumed.set()

    def _begin(self, queue: PopQueue) -> None:
        task = asyncio.create_task(self._pop_for_ever(queue), name=f"downrange pop {queue.queue}")
        self._tasks[queue] = task
        task.add_done_callback(lambda _: self._tasks.pop(queue, None))

    async def _pop_for_ever(self, queue: PopQueue) -> None:
        pause = self._config.pull_delay_when_exception_seconds
        attempt: str | None = None
        waits = True
        while not queue.is_dropped:
            await self._resumed.wait()
            if queue.message_count > self._config.pop_threshold_for_queue:
                await queue.wait_for_room()
                continue
            if self._config.orderly and attempt is None:
                attempt = uuid.uuid4().hex
            try:
                is_early = await self._pop(queue, attempt, self._config.broker_suspend_seconds if waits else 0.0)
                attempt = None  # kept after a failure: the answer to a pop that was carried out may have been lost
                if not is_early:
                    continue
                # Too many wait at the broker, or its clock is far ahead of ours: look without waiting, now and then.
                waits = not waits
                if not waits:
                    continue
            except FlowControl:
                await self._clock.sleep(FLOW_CONTROL_PAUSE_SECONDS)
                continue
            except MQError as error:
                log.warning("pop failed queue=%s reason=%s", queue.queue, error)
                self._session.refresh_soon(queue.queue.topic)
            except Exception:
                log.exception("pop failed queue=%s", queue.queue)  # a defect; the other queues go on
            await self._clock.sleep(pause)

    async def _pop(self, queue: PopQueue, attempt: str | None, poll_seconds: float) -> bool:
        """Pop once; whether the broker said much earlier than it should that there is nothing."""
        config, name = self._config, queue.queue
        subscription = self._subscriptions.get(name.topic)
        if subscription is None:  # unsubscribed: the queue is about to go
            await self._clock.sleep(config.pull_delay_when_exception_seconds)
            return False
        wish = Wish(
            subscription,
            config.pop_batch_nums,
            round(config.pop_invisible_seconds * 1000),
            INIT_MODES.get(config.consume_from_where, _NEWEST),
            name.queue_id,
            attempt,
        )
        queue.last_pop_millis = self._clock.now()
        begun = self._clock.monotonic()
        messages = await self._leases.pop(name.broker_name, wish, poll_seconds)
        seconds = self._clock.monotonic() - begun
        if not messages:
            return seconds <= poll_seconds / 2 or not poll_seconds
        self._statistics.topic(name.topic).pulled(self._clock.monotonic(), seconds, len(messages))
        queue.put(messages)
        self._receiver.accept(queue, messages)
        return False
