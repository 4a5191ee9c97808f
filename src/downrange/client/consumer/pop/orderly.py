"""Popped messages handed to callbacks in order: of each queue one after the other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from downrange.client.consumer.concurrent import judge
from downrange.client.consumer.orderly import first_of, rest_seconds
from downrange.client.consumer.pop.concurrent import PopConsumption, popped
from downrange.client.consumer.pop.messages import PoppedMessage
from downrange.client.consumer.pop.queue import PopQueue
from downrange.client.consumer.retry import Later
from downrange.client.consumer.workers import Batch
from downrange.model.message import MessageQueue

log = logging.getLogger(__name__)


class PopOrderlyConsumption(PopConsumption):
    """One task for the messages of one queue out of one pop.

    The broker gives nobody the next messages of a queue before all of these were acknowledged, or their leases are
    over. After a failure the queue rests, and the same message comes next; nothing is acknowledged out of order.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._runs: set[asyncio.Task[None]] = set()
        self._ends: dict[Batch[PopQueue], asyncio.Future[None]] = {}
        self._stopping = asyncio.Event()

    def accept(self, queue: PopQueue, messages: Sequence[PoppedMessage]) -> None:
        self._holding.add(queue, messages)
        of_queue: dict[MessageQueue, list[PoppedMessage]] = {}
        for message in messages:
            of_queue.setdefault(message.queue, []).append(message)
        for name, run in of_queue.items():
            task = asyncio.create_task(self._run(queue, run), name=f"downrange consume {name}")
            self._runs.add(task)
            task.add_done_callback(self._run_ended)

    def _run_ended(self, task: asyncio.Task[None]) -> None:
        self._runs.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("consumption ended", exc_info=error)
        self._check_all_done()

    async def _run(self, queue: PopQueue, messages: list[PoppedMessage]) -> None:
        while messages and not self._stopping.is_set() and not queue.is_dropped:
            batch: Batch[PopQueue] = Batch(queue, messages[: self._listener.batch_size])
            self._ends[batch] = asyncio.get_running_loop().create_future()
            self._batches.submit([batch])
            await self._ends[batch]
            if batch.was_skipped:
                break
            outcome = judge(batch)
            self._count(batch, outcome.done)
            self._holding.ack(popped(batch)[: outcome.done])
            failed = popped(batch)[outcome.done :]
            messages = self._after_failure(failed, outcome.later) + messages[len(batch.messages) :]
            if failed:
                await first_of(self._clock.sleep(rest_seconds(self._config, outcome.later)), self._stopping)
        self._holding.give_back(messages)

    def _after_failure(self, failed: Sequence[PoppedMessage], later: Later) -> list[PoppedMessage]:
        """Make dead letters of messages at their limit; the others come again, one delivery older."""
        again = []
        for message in failed:
            if later.delay_level < 0 or message.reconsume_times >= self._config.reconsume_limit:
                self._holding.bury(message)
            else:
                msgspec.structs.force_setattr(message, "reconsume_times", message.reconsume_times + 1)
                again.append(message)
        return again

    def _ended(self, batches: Sequence[Batch[PopQueue]]) -> None:
        for batch in batches:
            self._batches.remove(batch)
            end = self._ends.pop(batch, None)
            if end is not None and not end.done():
                end.set_result(None)

    def give_up_late(self, now: float) -> None:
        """An orderly callback may take as long as it likes."""

    async def drain(self, timeout: float) -> bool:
        self._stopping.set()
        return await super().drain(timeout)

    def _check_all_done(self) -> None:
        if not self._runs:
            super()._check_all_done()

    async def close(self) -> None:
        runs = list(self._runs)
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)
        await super().close()
