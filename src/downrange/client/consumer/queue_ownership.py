"""Which queues a consumer owns: taken when they become its share, given up when they become another's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, Protocol

from downrange.client.consumer.addresses import find_address
from downrange.client.consumer.assignment import assigned
from downrange.client.consumer.offsets import HALF_AN_HOUR_MILLIS, OffsetStore, start_offset
from downrange.client.consumer.pop.popping import Popping
from downrange.client.consumer.process_queue import ProcessQueue
from downrange.client.consumer.pulling import Membership, Pulling, Receiver
from downrange.client.consumer.queue_locks import QueueLocks
from downrange.client.consumer.rebalance import Changes, changes
from downrange.client.consumer.running_info import process_queue_info
from downrange.model.errors import MQError
from downrange.model.message import MessageQueue
from downrange.protocol.bodies.consumers import ProcessQueueInfo

log = logging.getLogger(__name__)

RESET_WAIT_SECONDS: Final = 10.0


class Consumption(Receiver, Protocol):
    """How messages reach the callback: in order or not."""

    @property
    def needs_lock(self) -> bool:
        """Whether a broker must grant a queue before it may be consumed."""
        ...

    @property
    def busy_queues(self) -> Collection[MessageQueue]:
        """Queues that no other consumer may have yet, because an ordered callback runs."""
        ...

    def begin(self, process_queue: ProcessQueue) -> None: ...
    async def end_of(self, process_queue: ProcessQueue) -> None: ...
    async def run(self) -> None: ...
    async def drain(self, timeout: float) -> bool: ...
    async def close(self) -> None: ...


class QueueOwnership:
    """The queues of one consumer. There is one change at a time: a rebalance, a release, or a reset.

    Holds always: a queue that is held is pulled and consumed; one that needs a lock is held only after its broker
    granted it, consumed only while the process that granted it is the master, and unlocked only after its last callback
    ended. Used on the consumer's event loop.
    """

    def __init__(
        self,
        membership: Membership,
        offsets: OffsetStore,
        consumption: Consumption,
        pulling: Pulling,
        popping: Popping,
    ) -> None:
        self._session, self._group, self._config = membership
        self._clock = self._session.clock
        self._offsets = offsets
        self._consumption = consumption
        self._pulling = pulling
        self._popping = popping
        self._locks = QueueLocks(self._session, self._group)
        self._queues: dict[MessageQueue, ProcessQueue] = {}
        self._leaving: dict[ProcessQueue, asyncio.Task[None]] = {}
        self._changing = asyncio.Lock()
        self._started_millis = self._clock.now()
        self._is_closing = False
        self._lock_again = asyncio.Event()

    def __repr__(self) -> str:
        return f"<QueueOwnership {self._group} queues={len(self._queues)} leaving={len(self._leaving)}>"

    def __iter__(self) -> Iterator[ProcessQueue]:
        return iter(list(self._queues.values()))

    def __len__(self) -> int:
        return len(self._queues)

    @property
    def names(self) -> Sequence[MessageQueue]:
        return sorted(self._queues)

    def positions(self, topic: str) -> Mapping[MessageQueue, int]:
        """How far we are with the queues of a topic."""
        table = self._offsets.table
        return {
            queue.queue: queue.done_offset if (offset := table.get(queue.queue)) is None else offset
            for queue in self
            if queue.queue.topic == topic
        }

    def info(self) -> Mapping[MessageQueue, ProcessQueueInfo]:
        """The state of each queue for operators."""
        table = self._offsets.table
        return {
            queue.queue: process_queue_info(
                queue,
                table.get(queue.queue),
                is_locked=self._config.orderly and self._consumption.may_consume(queue),
            )
            for queue in self
        }

    # --- sharing out ----------------------------------------------------------------------------------------------

    async def share_out(self, topics: Collection[str], changed: set[str]) -> bool:
        """Hold exactly our share of each topic; whether that was reached. Adds the topics that changed to `changed`."""
        is_balanced = True
        async with self._changing:
            for topic in topics:
                if self._is_closing:
                    return True
                try:
                    is_balanced &= await self._share_out_one(topic, changed)
                except MQError as error:
                    log.info("queues not shared out topic=%s group=%s reason=%s", topic, self._group, error)
                    is_balanced = False
        return is_balanced

    async def _share_out_one(self, topic: str, changed: set[str]) -> bool:
        share = await assigned(self._session, self._group, topic, self._config)
        held = [queue for queue in self._queues if queue.topic == topic]
        kept = [queue for queue in held if queue.broker_name in share.silent]
        pops = {queue for queue in self._popping.names if queue.topic == topic}
        popped = {*share.popped, *(queue for queue in pops if queue.broker_name in share.silent)}
        await self._popping.hold(topic, pops & popped)
        is_held = await self._hold_pulled(topic, changes(held, {*share.pulled, *kept}), changed)
        if popped != pops:  # pops begin where pulls have ended
            changed.add(topic)
            await self._popping.hold(topic, popped)
        return is_held and not share.silent

    async def _hold_pulled(self, topic: str, change: Changes, changed: set[str]) -> bool:
        if not change:
            return True
        log.info("queues change group=%s added=%s removed=%s", self._group, change.added, change.removed)
        await self._release(change.removed)
        taken = await self._take_on(change.added)
        if taken or change.removed:
            changed.add(topic)
        return taken == len(change.added)

    async def _take_on(self, added: Sequence[MessageQueue]) -> int:
        """Begin with the queues that are free, and return how many there were."""
        # One that is still being given up, with a callback running, must not begin a second time.
        leaving = {queue.queue for queue in self._leaving}
        free = [queue for queue in added if queue not in leaving]
        asked_at = self._clock.monotonic()
        granted: Mapping[MessageQueue, str] = {}
        if self._consumption.needs_lock and free:
            granted = await self._locks.lock(free)
            free = [queue for queue in free if queue in granted]
        offsets = await asyncio.gather(*map(self._start_offset, free))
        for name, offset in zip(free, offsets, strict=True):
            if offset is not None:
                queue = ProcessQueue(name, offset)
                self._grant(queue, asked_at, granted.get(name, ""))
                self._begin(queue)
        return sum(offset is not None for offset in offsets)

    async def _start_offset(self, queue: MessageQueue) -> int | None:
        """Where to begin; None when that cannot be found out now, for then messages could be skipped or repeated."""
        start_millis = self._config.consume_timestamp
        if start_millis is None:
            start_millis = self._started_millis - HALF_AN_HOUR_MILLIS
        try:
            known = await self._offsets.load(queue)
            return await start_offset(self._session, queue, known, self._config.consume_from_where, start_millis)
        except MQError as error:
            log.warning("queue not taken on queue=%s reason=%s", queue, error)
            return None

    def _begin(self, queue: ProcessQueue) -> None:
        self._queues[queue.queue] = queue
        if not self._is_closing:
            self._consumption.begin(queue)
            self._pulling.begin(queue)

    # --- giving up ------------------------------------------------------------------------------------------------

    async def release_topic(self, topic: str) -> None:
        async with self._changing:
            await self._popping.hold(topic, ())
            await self._release([queue for queue in self._queues if queue.topic == topic])

    async def _release(self, removed: Collection[MessageQueue]) -> None:
        """Commit the offset of a queue, so that its next owner begins there."""
        dropped = [self._queues.pop(name) for name in removed]
        for queue in dropped:
            queue.drop()
        await self._pulling.stop(dropped)
        if not self._consumption.needs_lock:
            await self._forget([queue.queue for queue in dropped])
            return
        for queue in dropped:
            # Other queues may go on while a callback of this one takes its time.
            self._leaving[queue] = asyncio.create_task(self._leave(queue), name=f"downrange leave {queue.queue}")

    async def _leave(self, queue: ProcessQueue) -> None:
        """Keep the lock of a queue until its running callback has ended, so that no other consumer begins before."""
        try:
            await self._consumption.end_of(queue)
            await self._forget([queue.queue])
            await self._locks.unlock([queue.queue])
        finally:
            del self._leaving[queue]

    async def _forget(self, queues: Collection[MessageQueue]) -> None:
        await self._offsets.persist(queues, confirmed=True)
        for queue in queues:
            self._offsets.forget(queue)

    async def stop(self, timeout: float) -> None:
        """Make no further change after the present one: the locks it was granted must be given back later."""
        self._is_closing = True
        try:
            async with asyncio.timeout(timeout), self._changing:
                pass
        except TimeoutError:
            log.warning("queues are being shared out, not waiting for it group=%s", self._group)

    async def close(self) -> None:
        """Give the locks back, but for queues where a callback still runs: theirs must run out."""
        for queue in self:
            queue.drop()
        leaving = list(self._leaving.values())
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        free = [queue for queue in self._queues if queue not in self._consumption.busy_queues]
        if self._consumption.needs_lock and free:
            await self._locks.unlock(free)

    # --- going on elsewhere ---------------------------------------------------------------------------------------

    async def restart_all(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Go on from these offsets, as far as the queues are held."""
        for name, offset in offsets.items():
            queue = self._queues.get(name)
            if queue is not None:
                await self.restart(queue, offset)

    async def restart(self, queue: ProcessQueue, offset: int) -> None:
        """Drop the messages held of a queue, commit another offset, and go on from there."""
        async with self._changing:
            name = queue.queue
            if self._queues.get(name) is not queue or self._is_closing:
                return  # given up meanwhile, and perhaps taken on anew: then it began where the group is
            queue.drop()
            await self._pulling.stop([queue])
            await self._end_before_restart(queue)
            self._offsets.table.update(name, offset)
            await self._offsets.persist([name], confirmed=True)
            fresh = ProcessQueue(name, offset)
            fresh.corrections = queue.corrections + 1
            fresh.locked_until, fresh.locked_by = queue.locked_until, queue.locked_by
            fresh.lock_again = queue.lock_again
            fresh.last_lock_millis = queue.last_lock_millis
            self._begin(fresh)

    async def _end_before_restart(self, queue: ProcessQueue) -> None:
        try:
            async with asyncio.timeout(RESET_WAIT_SECONDS):
                await self._consumption.end_of(queue)
        except TimeoutError:
            # The new process queue waits for the callback nevertheless, see OrderlyConsumption.
            log.warning("callback still running queue=%s", queue.queue)

    # --- locks ----------------------------------------------------------------------------------------------------

    async def renew_locks_regularly(self) -> None:
        """Renew the locks every period; at once when a broker has a new master, and soon after it granted none."""
        self._session.route_watchers.add(self._distrust_old_masters)
        try:
            while True:
                seconds = self._config.lock_renewal_seconds
                if not all(map(self._consumption.may_consume, self)):
                    seconds = self._config.pull_delay_when_exception_seconds
                await self._pause(seconds)
                await self.renew_locks()
        finally:
            self._session.route_watchers.discard(self._distrust_old_masters)

    async def _pause(self, seconds: float) -> None:
        """A pause that ends early when a lock is to be taken again."""
        waiting = [asyncio.ensure_future(self._clock.sleep(seconds)), asyncio.ensure_future(self._lock_again.wait())]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waiting:
                each.cancel()
        self._lock_again.clear()

    def _distrust_old_masters(self, topic: str) -> None:
        """Consume no queue of a broker that has another master than the one that granted its lock, or none."""
        route = self._session.known_route(topic)
        for queue in [*self._queues.values(), *self._leaving]:
            if route is None or queue.queue.topic != topic:
                continue
            master = find_address(route, queue.queue.broker_name)
            if master is None or not master.is_master or master.address != queue.locked_by:
                queue.distrust_lock()

    async def renew_locks(self) -> None:
        """Renew the locks of the queues; a queue whose lock is refused is not consumed until it is granted again."""
        if not self._consumption.needs_lock:
            return
        asked_at = self._clock.monotonic()
        queues = {queue.queue: queue for queue in [*self._queues.values(), *self._leaving]}
        granted = await self._locks.lock(list(queues))
        for name, queue in queues.items():
            if name in granted:
                self._grant(queue, asked_at, granted[name])

    def _grant(self, queue: ProcessQueue, asked_at: float, address: str) -> None:
        queue.locked_by, queue.lock_again = address, self._lock_again.set
        queue.locked_until = asked_at + self._config.lock_lives_seconds
        queue.last_lock_millis = self._clock.now()
