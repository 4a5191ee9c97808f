"""Popped messages handed to callbacks, any number at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from downrange.client.consumer.concurrent import judge
from downrange.client.consumer.config import ConsumerConfig
from downrange.client.consumer.listener import Listener
from downrange.client.consumer.pop.holding import Holding, retry_seconds
from downrange.client.consumer.pop.messages import PoppedMessage
from downrange.client.consumer.pop.queue import PopQueue
from downrange.client.consumer.retry import Later
from downrange.client.consumer.running_batches import RunningBatches
from downrange.client.consumer.statistics import ConsumeStatistics
from downrange.client.consumer.workers import Batch
from downrange.clock import Clock


class PopConsumption:
    """Hands popped messages to workers; acknowledges what is done, and lets the rest come again.

    Holds always: a message is acknowledged only after its callback succeeded; one that was not begun when the consumer
    stops is given back at once.
    """

    def __init__(
        self,
        config: ConsumerConfig,
        listener: Listener,
        holding: Holding,
        statistics: ConsumeStatistics,
        clock: Clock,
    ) -> None:
        self._config = config
        self._listener = listener
        self._holding = holding
        self._statistics = statistics
        self._clock = clock
        self._batches: RunningBatches[PopQueue] = RunningBatches(config, listener, self._ended, clock)
        self._is_stopping = False
        self._all_done = asyncio.Event()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} batches={len(self._batches)} {self._holding!r}>"

    def accept(self, queue: PopQueue, messages: Sequence[PoppedMessage]) -> None:
        """Have these messages consumed."""
        self._holding.add(queue, messages)
        size = self._listener.batch_size
        self._batches.submit([Batch(queue, messages[at : at + size]) for at in range(0, len(messages), size)])

    # --- results --------------------------------------------------------------------------------------------------

    def _ended(self, batches: Sequence[Batch[PopQueue]]) -> None:
        """Reported by the workers."""
        done: list[PoppedMessage] = []
        for batch in batches:
            self._batches.remove(batch)
            messages = popped(batch)
            if batch.is_given_up:
                continue
            if batch.was_skipped:
                self._holding.give_back(messages)
                continue
            outcome = judge(batch)
            self._count(batch, outcome.done)
            done += messages[: outcome.done]
            for message in messages[outcome.done :]:
                self._fail(message, outcome.later)
        self._holding.ack(done)
        self._check_all_done()

    def _count(self, batch: Batch[PopQueue], done: int) -> None:
        seconds, failed = batch.ended - batch.started, len(batch.messages) - done
        self._statistics.topic(batch.queue.queue.topic).consumed(self._clock.monotonic(), seconds, done, failed, 1)

    def _fail(self, message: PoppedMessage, later: Later) -> None:
        if later.delay_level < 0 or message.reconsume_times >= self._config.reconsume_limit:
            self._holding.bury(message)
        else:
            self._holding.fail(message, retry_seconds(message.reconsume_times, later.delay_level))

    # --- time -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Look for messages that take too long, for ever."""
        await self._batches.watch(self.give_up_late)

    def give_up_late(self, now: float) -> None:
        """Renew no longer what is being consumed for too long: a stuck callback must not keep its message for ever."""
        for batch in self._batches.late(now, "message will come again"):
            for message in popped(batch):
                self._holding.forget(message)

    # --- the end --------------------------------------------------------------------------------------------------

    async def drain(self, timeout: float) -> bool:
        """Begin nothing more, wait for callbacks that run and for brokers to know the results; whether that was all."""
        self._is_stopping = True
        self._batches.stop()
        self._check_all_done()
        return await self._batches.wait(self._settled(), timeout)

    async def _settled(self) -> None:
        await self._all_done.wait()
        await self._holding.settle()

    def _check_all_done(self) -> None:
        if self._is_stopping and not self._batches:
            self._all_done.set()

    async def close(self) -> None:
        self._batches.end()
        await self._holding.close()


def popped(batch: Batch[PopQueue]) -> list[PoppedMessage]:
    return [message for message in batch.messages if isinstance(message, PoppedMessage)]
