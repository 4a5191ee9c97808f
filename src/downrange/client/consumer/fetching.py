"""Queues are fetched ahead in the background; those that have messages stand in line for `poll`."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Final

from downrange.client.background_work import BackgroundWork
from downrange.client.consumer.assigned_queue import AssignedQueue, FetchLimits
from downrange.client.consumer.lite_pull_config import LitePullConfig
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.consumer.pull import PullConsumer
from downrange.model.errors import MQError
from downrange.model.message import MessageQueue
from downrange.protocol.errors import NoPermission, SubscriptionGroupNotExist, SubscriptionParseFailed

log = logging.getLogger(__name__)

# Errors that do not go away by waiting: an operator must grant, create or correct something.
_REFUSALS: Final = (NoPermission, SubscriptionGroupNotExist, SubscriptionParseFailed)


class Fetching:
    """Pulls the queues of one consumer while there is room, and hands out the messages, one queue after the other.

    Holds always: a queue is pulled by one task with one request at a time; it stands in line if it has messages and is
    not paused. Used on the consumer's event loop.
    """

    def __init__(self, reader: PullConsumer, config: LitePullConfig) -> None:
        self._reader = reader
        self._config = config
        self._limits = FetchLimits(
            config.pull_threshold_for_queue, config.pull_threshold_size_for_queue, config.consume_max_span
        )
        self.line: deque[AssignedQueue] = deque()
        """Queues that have messages."""
        self.unsettled: set[AssignedQueue] = set()
        """Queues whose position moved since the user was last known to be through with everything before it."""
        self.waiting = 0
        """Messages of all queues that wait to be handed out."""
        self._work = BackgroundWork(self.fail)
        self._tasks: dict[MessageQueue, asyncio.Task[None]] = {}
        self._resting: set[AssignedQueue] = set()
        """Queues whose fetching stopped for want of room, or because they are paused."""
        self._arrival = asyncio.Event()
        self._problem: BaseException | None = None

    def __repr__(self) -> str:
        return f"<Fetching queues={len(self._tasks)} waiting={self.waiting} resting={len(self._resting)}>"

    # --- fetching -------------------------------------------------------------------------------------------------

    def start(self, held: AssignedQueue) -> None:
        self._tasks[held.queue] = self._work.start(self._fetch(held), f"fetching {held.queue}")

    async def stop(self, held: AssignedQueue) -> None:
        """Fetch no more of a queue, and hand out none of its fetched messages."""
        task = self._tasks.pop(held.queue, None)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        self.waiting -= len(held)
        self._leave_line(held)
        self.unsettled.discard(held)
        self._resting.discard(held)
        self._let_fetch()

    async def close(self) -> None:
        """Fetch nothing more. Messages that were fetched can still be taken and put back."""
        await self._work.cancel()
        self._tasks.clear()

    async def _fetch(self, held: AssignedQueue) -> None:
        """Pull one batch after another while there is room for it."""
        config = self._config
        while True:
            while held.reason_to_wait(self._limits) or self.waiting > config.pull_threshold_for_all:
                held.may_fetch.clear()
                self._resting.add(held)
                await held.may_fetch.wait()
            try:
                result = await self._reader.pull(
                    held.queue,
                    held.fetch_offset,
                    config.pull_batch_size,
                    wait=config.broker_suspend_seconds,
                    subscription=held.subscription,
                    is_lite=True,
                )
            except MQError as error:
                log.warning("pull failed group=%s queue=%s reason=%s", self._reader.group, held.queue, error)
                if isinstance(error, _REFUSALS):
                    self.fail(error)
                # No need to wait for an old master's return when there is a new one.
                await self._reader.session.route_change(held.queue.topic, config.pull_delay_when_exception_seconds)
                continue
            held.add(result)
            if result.messages:
                self.waiting += len(result.messages)
                self._line_up(held)
            elif held.position != held.done:
                self.unsettled.add(held)

    def _let_fetch(self) -> None:
        """Wake the queues whose fetching rests: there may be room for their messages again."""
        if self._resting and self.waiting <= self._config.pull_threshold_for_all:
            for held in self._resting:
                held.may_fetch.set()
            self._resting.clear()

    def pause(self, held: AssignedQueue) -> None:
        held.is_paused = True
        self._leave_line(held)

    def resume(self, held: AssignedQueue) -> None:
        held.is_paused = False
        held.may_fetch.set()
        self._line_up(held)

    # --- handing out ----------------------------------------------------------------------------------------------

    def take(self, most: int) -> list[ReceivedMessage]:
        """The next messages of the first queue in line, which then goes to its end; none when the line is empty."""
        if not self.line:
            return []
        held = self.line.popleft()
        held.is_ready = False
        messages = held.take(most)
        self.waiting -= len(messages)
        self.unsettled.add(held)
        self._line_up(held)
        self._let_fetch()
        return messages

    def put_back(self, held: AssignedQueue, messages: list[ReceivedMessage]) -> None:
        """The last messages taken of a queue come first again."""
        before = len(held)
        held.put_back(messages)
        self.waiting += len(held) - before
        self._line_up(held)

    async def arrival(self) -> None:
        """Wait until there may be messages in line, or until `wake`. Raises errors that do not go away by waiting."""
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem
        self._arrival.clear()
        await self._arrival.wait()

    def wake(self) -> None:
        self._arrival.set()

    def fail(self, problem: BaseException) -> None:
        """Whoever waits for an arrival must know."""
        self._problem = problem
        self._arrival.set()

    def _line_up(self, held: AssignedQueue) -> None:
        if held and not held.is_ready and not held.is_paused:
            held.is_ready = True
            self.line.append(held)
            self._arrival.set()

    def _leave_line(self, held: AssignedQueue) -> None:
        if held.is_ready:
            held.is_ready = False
            self.line.remove(held)
