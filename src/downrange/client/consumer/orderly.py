"""Consumption in order: of each queue one message at a time, the next only after the one before."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from downrange.client.consumer.config import ConsumerConfig
from downrange.client.consumer.listener import Listener
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.consumer.offsets import OffsetTable
from downrange.client.consumer.process_queue import ProcessQueue
from downrange.client.consumer.redelivery import Redelivery
from downrange.client.consumer.retry import BadAnswer, Later, Verdict, orderly_failure, verdict
from downrange.client.consumer.statistics import ConsumeStatistics
from downrange.client.consumer.workers import NotConsumed
from downrange.clock import Clock
from downrange.model.message import MessageQueue

log = logging.getLogger(__name__)

# So many messages are handed to a thread at once, and for so long: crossing threads costs more than a short callback.
_RUN_MESSAGES: Final = 64
_RUN_SECONDS: Final = 0.05
_SHORTEST_REST_SECONDS: Final = 0.01
_LONGEST_REST_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class Run:
    """The result of consuming messages in order: how many calls succeeded, and why it ended."""

    done: int
    failed: Sequence[ReceivedMessage] = ()
    later: Later = field(default_factory=Later)
    calls: int = 0
    was_given_back: bool = False


class OrderlyConsumption:
    """One task per queue that calls the callback message by message.

    Holds always: at most one callback runs per queue, also across a reset or the loss and return of a queue; one is
    begun only while the broker's lock of the queue is to be trusted; after a failure the same message comes next.
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
        self._threads = ThreadPoolExecutor(config.consume_threads, thread_name_prefix="downrange consume")
        self._at_once = asyncio.Semaphore(config.consume_threads)
        self._tasks: dict[ProcessQueue, asyncio.Task[None]] = {}
        self._busy: dict[MessageQueue, asyncio.Lock] = {}
        self._stopping = asyncio.Event()

    def __repr__(self) -> str:
        return f"<OrderlyConsumption queues={len(self._tasks)}>"

    @property
    def needs_lock(self) -> bool:
        """Broadcasting consumers share no queues, so they need no locks."""
        return not self._config.is_broadcasting

    @property
    def busy_queues(self) -> Collection[MessageQueue]:
        return {process_queue.queue for process_queue in self._tasks}

    def begin(self, process_queue: ProcessQueue) -> None:
        """Begin to consume a queue: the messages that `ProcessQueue.put` adds."""
        task = asyncio.create_task(self._consume(process_queue), name=f"downrange consume {process_queue.queue}")
        self._tasks[process_queue] = task
        task.add_done_callback(lambda ended: self._task_ended(process_queue, ended))

    def _task_ended(self, process_queue: ProcessQueue, task: asyncio.Task[None]) -> None:
        self._tasks.pop(process_queue, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("consumption ended queue=%s", process_queue.queue, exc_info=error)

    def accept(self, process_queue: ProcessQueue, messages: Sequence[ReceivedMessage]) -> None:
        """The queue's task sees them by itself."""

    async def end_of(self, process_queue: ProcessQueue) -> None:
        """Wait until nothing of a dropped queue runs any more: only then may another consumer have it."""
        task = self._tasks.get(process_queue)
        if task is not None:
            await asyncio.wait([task])

    # --- one queue ------------------------------------------------------------------------------------------------

    async def _consume(self, queue: ProcessQueue) -> None:
        async with self._busy.setdefault(queue.queue, asyncio.Lock()):
            while not self._must_stop(queue):
                await first_of(queue.wait_for_messages(), self._stopping)
                if self._must_stop(queue):
                    return
                if not self.may_consume(queue):
                    await first_of(self._clock.sleep(self._config.pull_delay_when_exception_seconds), self._stopping)
                    continue
                messages = queue.take(max(_RUN_MESSAGES, self._listener.batch_size))
                begun = self._clock.monotonic()
                async with self._at_once:
                    run = await self._run(messages, lambda: not self._must_stop(queue) and self.may_consume(queue))
                await self._settle(queue, run, self._clock.monotonic() - begun)

    def _must_stop(self, queue: ProcessQueue) -> bool:
        return queue.is_dropped or self._stopping.is_set()

    def may_consume(self, process_queue: ProcessQueue) -> bool:
        """Whether the lock of the queue is to be trusted."""
        if not self.needs_lock:
            return True
        return process_queue.locked_until is not None and self._clock.monotonic() < process_queue.locked_until

    async def _run(self, messages: Sequence[ReceivedMessage], may_go_on: Callable[[], bool]) -> Run:
        if self._listener.is_async:
            return await self._run_here(messages, may_go_on)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run_in_thread, messages, may_go_on)

    def _run_in_thread(self, messages: Sequence[ReceivedMessage], may_go_on: Callable[[], bool]) -> Run:
        size = self._listener.batch_size
        ends = self._clock.monotonic() + _RUN_SECONDS
        done = calls = 0
        while done < len(messages) and (not calls or (self._clock.monotonic() < ends and may_go_on())):
            batch = messages[done : done + size]
            calls += 1
            try:
                outcome = verdict(self._listener.call(batch), len(batch))
            except BaseException as error:
                outcome = _failure(batch, error)
            done += outcome.done
            if outcome.done < len(batch):
                return Run(done, batch[outcome.done :], outcome.later, calls)
        return Run(done, calls=calls)

    async def _run_here(self, messages: Sequence[ReceivedMessage], may_go_on: Callable[[], bool]) -> Run:
        size = self._listener.batch_size
        ends = self._clock.monotonic() + _RUN_SECONDS
        done = calls = 0
        while done < len(messages) and (not calls or (self._clock.monotonic() < ends and may_go_on())):
            batch = messages[done : done + size]
            calls += 1
            try:
                outcome = verdict(await self._listener.call(batch), len(batch))
            except NotConsumed:
                return Run(done, calls=calls, was_given_back=True)
            except Exception as error:
                outcome = _failure(batch, error)
            done += outcome.done
            if outcome.done < len(batch):
                return Run(done, batch[outcome.done :], outcome.later, calls)
        return Run(done, calls=calls)

    async def _settle(self, queue: ProcessQueue, run: Run, seconds: float) -> None:
        """Finish the messages that succeeded, and decide what follows a failure."""
        now = self._clock.monotonic()
        self._statistics.topic(queue.queue.topic).consumed(now, seconds, run.done, len(run.failed), run.calls)
        queue.last_consume_millis = self._clock.now()
        self._finish(queue, run.done)
        if run.failed:
            await self._fail(queue, run.failed, run.later)

    def _finish(self, queue: ProcessQueue, count: int) -> None:
        queue.finish_first_taken(count)
        # Even when the queue is being given up: its lock is kept until this is over, so the result counts.
        if count and self.may_consume(queue):
            self._offsets.update(queue.queue, queue.done_offset)

    async def _fail(self, queue: ProcessQueue, messages: Sequence[ReceivedMessage], later: Later) -> None:
        failure = orderly_failure(messages, 0 if later.delay_level < 0 else self._config.reconsume_limit)
        for message in failure.dead:
            if self._config.is_broadcasting or await self._redelivery.make_dead_letter(message):
                queue.finish((message,))
            else:
                queue.replace(message.with_reconsume_times(message.reconsume_times + 1))
        for message in failure.again:
            queue.replace(message)
        if self.may_consume(queue):
            self._offsets.update(queue.queue, queue.done_offset)
        if any(queue.unfinished(message.queue_offset) for message in messages):
            await first_of(self._clock.sleep(rest_seconds(self._config, later)), self._stopping)

    # --- the end --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Nothing to look after: an orderly callback may take as long as it likes."""

    async def drain(self, timeout: float) -> bool:
        """Begin nothing more, and wait for the callbacks that run; whether all ended in time."""
        self._stopping.set()
        if not self._tasks:
            return True
        _, running = await asyncio.wait(list(self._tasks.values()), timeout=timeout)
        return not running

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)


def _failure(batch: Sequence[ReceivedMessage], error: BaseException) -> Verdict:
    if isinstance(error, BadAnswer):
        log.error("callback answered wrongly messages=%s reason=%s", list(batch), error)
    else:
        log.warning("callback failed messages=%s", list(batch), exc_info=error)
    return Verdict(0, Later())


def rest_seconds(config: ConsumerConfig, later: Later) -> float:
    """How long a queue rests after a failure, within limits."""
    wanted = config.suspend_current_queue_seconds if later.suspend_seconds is None else later.suspend_seconds
    return min(max(wanted, _SHORTEST_REST_SECONDS), _LONGEST_REST_SECONDS)


async def first_of(work: Coroutine[Any, Any, None], stopping: asyncio.Event) -> None:
    """Wait for `work` to end, or for the consumer to stop."""
    waiting = [asyncio.ensure_future(work), asyncio.ensure_future(stopping.wait())]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waiting:
            each.cancel()
