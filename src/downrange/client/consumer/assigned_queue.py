"""One queue of a lite pull consumer: the messages fetched ahead, and the offsets fetched, read and committed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.consumer.pull import PullResult
from downrange.model.message import MessageQueue
from downrange.model.subscription import Subscription
from downrange.protocol.bodies.consumers import ProcessQueueInfo


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """How much of one queue may be fetched ahead before fetching rests."""

    max_messages: int
    max_bytes: int
    max_span: int


class AssignedQueue:
    """The messages of one queue that wait for `poll`, and three places in it.

    Holds always: `done <= position <= fetch_offset`. Messages before `done` the user is through with, those before
    `position` were handed out, those before `fetch_offset` were fetched. Does no I/O; used on one event loop.
    """

    def __init__(self, queue: MessageQueue, subscription: Subscription, offset: int) -> None:
        self.queue = queue
        self.subscription = subscription
        self.done = offset
        self.position = offset
        self.fetch_offset = offset
        self.byte_count = 0
        self.is_paused = False
        self.is_ready = False
        """Whether it stands in the consumer's line of queues that have messages."""
        self.may_fetch = asyncio.Event()
        self._messages: deque[ReceivedMessage] = deque()

    def __repr__(self) -> str:
        paused = " paused" if self.is_paused else ""
        places = f"done={self.done} position={self.position} fetch={self.fetch_offset}"
        return f"<AssignedQueue {self.queue.topic} {self.queue.broker_name}:{self.queue.queue_id} {places}{paused}>"

    def __len__(self) -> int:
        return len(self._messages)

    def reason_to_wait(self, limits: FetchLimits) -> str | None:
        """Why nothing more of this queue should be fetched for now."""
        if self.is_paused:
            return "paused"
        if len(self) > limits.max_messages:
            return f"{len(self)} messages wait, more than {limits.max_messages}"
        if self.byte_count > limits.max_bytes:
            return f"{self.byte_count} bytes wait, more than {limits.max_bytes}"
        if self._messages:
            span = self._messages[-1].queue_offset - self._messages[0].queue_offset
            if span > limits.max_span:
                return f"the messages that wait span {span} offsets, more than {limits.max_span}"
        return None

    def add(self, result: PullResult) -> None:
        """Add the messages of a pull from `fetch_offset`."""
        self._messages.extend(result.messages)
        self.byte_count += sum(message.store_size for message in result.messages)
        self.fetch_offset = result.next_offset
        if not self._messages:
            self.position = self.fetch_offset  # nothing in between was for us
            self.done = min(self.done, self.position)  # a queue that was made anew begins before the old one ended

    def take(self, most: int) -> list[ReceivedMessage]:
        """Hand out the next messages."""
        count = min(most, len(self._messages))
        messages = [self._messages.popleft() for _ in range(count)]
        self.byte_count -= sum(message.store_size for message in messages)
        self.position = self._messages[0].queue_offset if self._messages else self.fetch_offset
        return messages

    def put_back(self, messages: Sequence[ReceivedMessage]) -> None:
        """Take back the last messages handed out: their reader did not get to them."""
        if messages and self.done <= messages[0].queue_offset < self.position:
            self._messages.extendleft(reversed(messages))
            self.byte_count += sum(message.store_size for message in messages)
            self.position = messages[0].queue_offset

    def settle(self) -> None:
        """The user is through with everything handed out."""
        self.done = self.position

    def seek(self, offset: int) -> None:
        """Go on at `offset` and forget the fetched messages."""
        self._messages.clear()
        self.byte_count = 0
        self.done = self.position = self.fetch_offset = offset

    def info(self) -> ProcessQueueInfo:
        """The state of the queue for operators."""
        return ProcessQueueInfo(
            commit_offset=self.done,
            cached_msg_min_offset=self._messages[0].queue_offset if self._messages else 0,
            cached_msg_max_offset=self._messages[-1].queue_offset if self._messages else 0,
            cached_msg_count=len(self),
            cached_msg_size_in_mib=self.byte_count // (1024 * 1024),
        )
