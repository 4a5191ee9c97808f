"""Batches that workers have: handed over, given up when they take too long, waited for when the consumer stops."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final, Generic

from downrange.client.consumer.config import ConsumerConfig
from downrange.client.consumer.listener import Listener
from downrange.client.consumer.workers import Batch, Q, Report, Workers, workers
from downrange.clock import Clock

log = logging.getLogger(__name__)

_LONGEST_CHECK_SECONDS: Final = 60.0


class RunningBatches(Generic[Q]):
    """The batches of one consumption that workers have not reported yet. Used on the consumer's event loop.

    Holds always: a batch is among them from `submit` until `remove`, which is for whoever gets the `report`.
    """

    def __init__(self, config: ConsumerConfig, listener: Listener, report: Report, clock: Clock) -> None:
        self._config = config
        self._listener = listener
        self._report = report
        self._clock = clock
        self._workers: Workers | None = None
        self._batches: set[Batch[Q]] = set()

    def __len__(self) -> int:
        return len(self._batches)

    def submit(self, batches: Sequence[Batch[Q]]) -> None:
        """Have batches consumed."""
        self._batches.update(batches)
        if self._workers is None:
            self._workers = workers(self._listener, self._config.consume_threads, self._report, self._clock.monotonic)
        self._workers.submit(batches)

    def remove(self, batch: Batch[Q]) -> None:
        """A batch was reported."""
        self._batches.discard(batch)

    async def watch(self, give_up_late: Callable[[float], None]) -> None:
        """Call `give_up_late` with the monotonic time at regular intervals, for ever."""
        while True:
            await self._clock.sleep(min(self._config.consume_timeout_seconds, _LONGEST_CHECK_SECONDS))
            give_up_late(self._clock.monotonic())

    def late(self, now: float, what_follows: str) -> Iterator[Batch[Q]]:
        """Batches whose callbacks take longer than `consume_timeout_seconds`; each is given up, once."""
        limit = self._config.consume_timeout_seconds
        for batch in list(self._batches):
            if not batch.is_given_up and batch.started and not batch.ended and now - batch.started > limit:
                batch.is_given_up = True
                log.error("callback takes longer than %g s, %s messages=%s", limit, what_follows, list(batch.messages))
                yield batch

    def stop(self) -> None:
        """Begin no further batch."""
        if self._workers is not None:
            self._workers.stop()

    async def wait(self, all_ended: Awaitable[object], timeout: float) -> bool:
        """Wait for the end of all work; whether it came in time. Else a warning names the messages still running."""
        try:
            async with asyncio.timeout(timeout):
                await all_ended
        except TimeoutError:
            running = [message for batch in self._batches for message in batch.messages if batch.started]
            log.warning("callbacks still running, their messages will come again messages=%s", running)
            return False
        return True

    def end(self) -> None:
        """Let go of threads and tasks."""
        if self._workers is not None:
            self._workers.end()
