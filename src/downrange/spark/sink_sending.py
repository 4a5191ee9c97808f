"""Sends the messages of a task: many requests at a time, but messages with a sharding key in order."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from downrange.client.errors import SendFailed, code_of
from downrange.client.producer.forwarding import ForwardedMessage
from downrange.client.producer.producer import AsyncProducer
from downrange.client.producer.retry import FLOW_CONTROL_CODES
from downrange.client.producer.send_result import SendResult, SendStatus
from downrange.model.errors import MQError
from downrange.model.hashing import java_hash
from downrange.model.message import Message, MessageQueue
from downrange.model.topics import RETRY_PREFIX

MAX_BATCH_ROWS: Final = 2000
_OVERHEAD: Final = 150
"""Bytes that a small message takes in a batch besides its body, roughly."""
FIRST_PAUSE_SECONDS: Final = 0.02
LONGEST_PAUSE_SECONDS: Final = 1.0


class NotSafelyStored(MQError):
    """A broker has the message, but not as safely as its settings promise; the text has the send status."""

    retriable = True


class GivenUp(MQError):
    """The rest of a task's messages was not sent, because the task failed."""


@dataclass(slots=True)
class _Lane:
    """Messages for the next request. If the lane has a queue, each request waits for the one before."""

    topic: str
    queue: MessageQueue | None
    messages: list[Message] = field(default_factory=list)
    size: int = 0
    tail: asyncio.Task[None] | None = None


class Sending:
    """The sends of one task. `put` returns when there is room for more, `finish` when all are acknowledged.

    Holds always: after an error nothing more is sent, and `put` and `finish` raise it. Used on one event loop.
    """

    def __init__(self, producer: AsyncProducer, *, batch_bytes: int, max_in_flight: int) -> None:
        self._producer = producer
        self._batch_bytes = batch_bytes
        self._room = asyncio.Semaphore(max_in_flight)
        self._lanes: dict[tuple[str, MessageQueue | None], _Lane] = {}
        self._queues: dict[str, tuple[MessageQueue, ...]] = {}
        self._on_their_way: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None

    async def put(self, messages: Iterable[Message]) -> None:
        for message in messages:
            queue = await queue_of(message, self._producer, self._queues) if message.sharding_key else None
            await self._add(message, queue)
        self._raise_error()

    async def _add(self, message: Message, queue: MessageQueue | None) -> None:
        """Put a message into its lane, and send what the lane has when the message does not fit in."""
        lane = self._lane(message.topic, queue)
        if self._goes_alone(message):
            # Earlier messages of the lane must be sent first, to keep the order.
            await self._flush(lane)
            await self._start(lane, [message])
            return
        size = len(message.body) + _OVERHEAD
        if lane.messages and (lane.size + size > self._batch_bytes or _born(lane.messages[0]) != _born(message)):
            await self._flush(lane)
        lane.messages.append(message)
        lane.size += size
        if len(lane.messages) >= MAX_BATCH_ROWS:
            await self._flush(lane)

    async def finish(self) -> None:
        """Send waiting messages and await every acknowledgement. When it raises, no send is under way."""
        try:
            for lane in self._lanes.values():
                await self._flush(lane)
        finally:
            await self._all_back()
        self._raise_error()

    async def give_up(self) -> None:
        """Send nothing more; returns when no send is under way."""
        self._error = self._error or GivenUp("the task failed")
        await self._all_back()

    async def _all_back(self) -> None:
        if self._on_their_way:
            await asyncio.wait(self._on_their_way)

    async def _deliver(self, lane: _Lane, messages: list[Message]) -> None:
        async def send() -> None:
            nonlocal messages
            if len(messages) == 1:
                check_safe([await self._producer.send(messages[0], queue=lane.queue)])
                return
            try:
                check_safe(await self._producer.send_batch(messages, queue=lane.queue))
            except SendFailed as error:
                messages = messages[len(error.stored) :]
                raise

        await unless_busy(send, self._producer.config.send_timeout_seconds)

    def _goes_alone(self, message: Message) -> bool:
        # Large bodies are compressed, which RocketMQ does for single messages only.
        return (
            message.is_delayed
            or not message.body  # only a forwarded message can be empty, and no batch takes it
            or len(message.body) >= self._producer.config.compress_over_bytes
            or message.topic.startswith(RETRY_PREFIX)
        )

    def _lane(self, topic: str, queue: MessageQueue | None) -> _Lane:
        key = (topic, queue)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = _Lane(topic, queue)
        return lane

    async def _flush(self, lane: _Lane) -> None:
        if lane.messages:
            messages, lane.messages, lane.size = lane.messages, [], 0
            await self._start(lane, messages)

    async def _start(self, lane: _Lane, messages: list[Message]) -> None:
        await self._room.acquire()
        if self._error is not None:
            self._room.release()
            raise self._error
        before = lane.tail if lane.queue is not None else None
        task = asyncio.get_running_loop().create_task(self._run(lane, messages, before))
        lane.tail = task
        self._on_their_way.add(task)
        task.add_done_callback(self._on_their_way.discard)

    async def _run(self, lane: _Lane, messages: list[Message], before: asyncio.Task[None] | None) -> None:
        try:
            if before is not None:
                await asyncio.wait([before])
            if self._error is None:
                await self._deliver(lane, messages)
        except BaseException as error:
            self._error = self._error or error
        finally:
            self._room.release()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


def _born(message: Message) -> int | None:
    """The time of birth that the request must have; None for messages that are born when they are sent."""
    return message.born_timestamp if isinstance(message, ForwardedMessage) else None


async def queue_of(
    message: Message, producer: AsyncProducer, known: dict[str, tuple[MessageQueue, ...]]
) -> MessageQueue:
    """The queue that an ordered send of the producer would choose; `known` keeps the queues for the whole task."""
    queues = known.get(message.topic)
    if queues is None:
        queues = known[message.topic] = await producer.queues(message.topic)
    assert message.sharding_key is not None
    return queues[abs(java_hash(message.sharding_key)) % len(queues)]


def check_safe(results: Iterable[SendResult]) -> None:
    for result in results:
        if result.status is not SendStatus.SEND_OK:
            raise NotSafelyStored(
                f"{result.queue.broker_name} has the message {result.message_id} of {result.queue.topic}, "
                f"but not safely: {result.status}"
            )


def _is_busy(error: MQError) -> bool:
    """Whether only flow control made a send fail, so that it was not stored; after a time-out it may be stored."""
    errors = [attempt.error for attempt in error.attempts] if isinstance(error, SendFailed) else [error]
    return all(code_of(one) in FLOW_CONTROL_CODES for one in errors)


async def unless_busy(send: Callable[[], Awaitable[None]], seconds: float) -> None:
    """Call `send` again while a busy broker refuses it: a refused message was not stored, so this is harmless."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    pause = FIRST_PAUSE_SECONDS
    while True:
        try:
            return await send()
        except MQError as error:
            if not _is_busy(error) or loop.time() + pause > deadline:
                raise
        await asyncio.sleep(pause * random.uniform(0.5, 1.5))  # noqa: S311  spreads load, guards nothing
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
