"""Consumption without order: any number of messages of a queue at the same time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Coroutine, Sequence
from typing import Any

from downrange.client.consumer.config import ConsumerConfig
from downrange.client.consumer.listener import Listener
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.consumer.offsets import OffsetTable
from downrange.client.consumer.process_queue import ProcessQueue
from downrange.client.consumer.redelivery import Redelivery
from downrange.client.consumer.retry import FIRST_RETRY_LEVEL, BadAnswer, Later, Verdict, verdict
from downrange.client.consumer.running_batches import RunningBatches
from downrange.client.consumer.statistics import ConsumeStatistics
from downrange.client.consumer.workers import Batch
from downrange.clock import Clock
from downrange.model.message import MessageQueue

log = logging.getLogger(__name__)


class _Sum:
    """The messages of one queue whose callbacks ended in the same turn of the loop."""

    __slots__ = ("calls", "done", "failed", "seconds")

    def __init__(self) -> None:
        self.calls = 0
        self.seconds = 0.0
        self.done: list[ReceivedMessage] = []
        self.failed = 0


class ConcurrentConsumption:
    """Hands messages to workers, and decides what follows: done, or to be delivered again.

    Holds always: a message is finished in its process queue only after its callback succeeded, or after a broker has
    taken it back. Finished messages move the queue's offset to the smallest unfinished one.
    """

    def __init__(
        self,
        config: ConsumerConfig,
        listener: Listener,
        offsets: OffsetTable,
        redelivery: Redelivery,
        statistics: ConsumeStatistics,
        clock: Clock,
    ) -> None:
        self._config = config
        self._listener = listener
        self._offsets = offsets
        self._redelivery = redelivery
        self._statistics = statistics
        self._clock = clock
        self._batches: RunningBatches[ProcessQueue] = RunningBatches(config, listener, self._ended, clock)
        self._tasks: set[asyncio.Task[None]] = set()
        self._retries: set[asyncio.Task[None]] = set()
        self._is_stopping = False
        self._all_done = asyncio.Event()

    def __repr__(self) -> str:
        return f"<ConcurrentConsumption batches={len(self._batches)} sending_back={len(self._tasks)}>"

    @property
    def needs_lock(self) -> bool:
        return False

    @property
    def busy_queues(self) -> Collection[MessageQueue]:
        return ()

    def may_consume(self, process_queue: ProcessQueue) -> bool:
        return True

    def begin(self, process_queue: ProcessQueue) -> None:
        """A queue was taken on; its messages come through `accept`."""

    def accept(self, process_queue: ProcessQueue, messages: Sequence[ReceivedMessage]) -> None:
        """Have these messages consumed. They are in the process queue already."""
        size = self._listener.batch_size
        if size == 1:
            batches = [Batch(process_queue, (message,)) for message in messages]
        else:
            batches = [Batch(process_queue, messages[at : at + size]) for at in range(0, len(messages), size)]
        self._batches.submit(batches)

    async def end_of(self, process_queue: ProcessQueue) -> None:
        """A queue was dropped: nothing of it counts any more, so there is nothing to wait for."""

    # --- results --------------------------------------------------------------------------------------------------

    def _ended(self, batches: Sequence[Batch[ProcessQueue]]) -> None:
        """Reported by the workers. Many batches of one queue move its offset once."""
        sums: dict[ProcessQueue, _Sum] = {}
        for batch in batches:
            self._batches.remove(batch)
            if batch.was_skipped or batch.is_given_up:
                continue
            queue = batch.queue
            total = sums.get(queue)
            if total is None:
                total = sums[queue] = _Sum()
            messages = batch.messages
            total.calls += 1
            total.seconds += batch.ended - batch.started
            if batch.answer is None and batch.error is None:  # nearly always
                total.done += messages
                continue
            outcome = judge(batch)
            total.done += messages[: outcome.done]
            total.failed += len(messages) - outcome.done
            if outcome.done < len(messages) and not queue.is_dropped:
                self._fail(queue, messages[outcome.done :], outcome.later)
        for queue, total in sums.items():
            self._settle(queue, total)
        self._check_all_done()

    def _settle(self, queue: ProcessQueue, total: _Sum) -> None:
        queue.last_consume_millis = self._clock.now()
        self._statistics.topic(queue.queue.topic).consumed(
            self._clock.monotonic(), total.seconds, len(total.done), total.failed, total.calls
        )
        if queue.is_dropped:
            log.info("results do not count, the queue was given up queue=%s calls=%d", queue.queue, total.calls)
        elif total.done:
            self._finish(queue, total.done)

    def _finish(self, queue: ProcessQueue, messages: Sequence[ReceivedMessage]) -> None:
        queue.finish(messages)
        if not queue.is_dropped:
            self._offsets.update(queue.queue, queue.done_offset, increase_only=True)

    def _fail(self, queue: ProcessQueue, messages: Sequence[ReceivedMessage], later: Later) -> None:
        if self._config.is_broadcasting:
            log.warning("messages given up, broadcasting does not retry messages=%s", list(messages))
            self._finish(queue, messages)
        else:
            self._spawn(self._deliver_again(queue, messages, later.delay_level), self._tasks)

    async def _deliver_again(self, queue: ProcessQueue, messages: Sequence[ReceivedMessage], delay_level: int) -> None:
        for message in messages:
            if queue.is_dropped:
                return
            if await self._redelivery.deliver_again(message, delay_level):
                self._finish(queue, (message,))
            else:
                self._spawn(self._retry_here(queue, message), self._retries)

    async def _retry_here(self, queue: ProcessQueue, message: ReceivedMessage) -> None:
        """No broker took it: it stays unfinished, so it is not lost, and is consumed here once more."""
        await self._clock.sleep(self._config.local_retry_seconds)
        if not queue.is_dropped and not self._is_stopping:
            again = message.with_reconsume_times(message.reconsume_times + 1)
            queue.replace(again)
            self.accept(queue, (again,))

    # --- time -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Look for messages that take too long, for ever."""
        await self._batches.watch(self.give_up_late)

    def give_up_late(self, now: float) -> None:
        """Send back what is being consumed for too long: a stuck callback must not hold its queue for ever."""
        for batch in self._batches.late(now, "message is sent back"):
            self._fail(batch.queue, batch.messages, Later(FIRST_RETRY_LEVEL))

    # --- the end --------------------------------------------------------------------------------------------------

    async def drain(self, timeout: float) -> bool:
        """Begin nothing more, and wait for the callbacks that run; whether all ended in time."""
        self._is_stopping = True
        self._batches.stop()
        for task in self._retries:
            task.cancel()
        self._check_all_done()
        return await self._batches.wait(self._all_done.wait(), timeout)

    def _check_all_done(self) -> None:
        if self._is_stopping and not self._batches and not self._tasks:
            self._all_done.set()

    async def close(self) -> None:
        self._batches.end()
        tasks = [*self._tasks, *self._retries]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None], among: set[asyncio.Task[None]]) -> None:
        task = asyncio.create_task(work, name="downrange redelivery")
        among.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            among.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("redelivery failed", exc_info=error)
            self._check_all_done()

        task.add_done_callback(ended)


def judge(batch: Batch[Any]) -> Verdict:
    """The meaning of a callback's answer or exception."""
    if batch.error is None:
        try:
            return verdict(batch.answer, len(batch.messages))
        except BadAnswer as error:
            log.error("callback answered wrongly messages=%s reason=%s", list(batch.messages), error)
    else:
        log.warning("callback failed messages=%s", list(batch.messages), exc_info=batch.error)
    return Verdict(0, Later())
