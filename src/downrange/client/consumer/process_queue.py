"""The messages of one queue between their pull and the end of their callback."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from downrange.client.consumer.messages import ReceivedMessage
from downrange.model.message import MessageQueue


class ProcessQueue:
    """The messages a consumer holds of one queue. [ProcessQueue]

    Holds always: `done_offset` is the smallest offset that is not finished, or where the next pull begins when all are,
    so a group that starts again from it misses nothing. After `drop` results count no more: the queue belongs
    to somebody else. Used on the consumer's event loop only.
    """

    def __init__(self, queue: MessageQueue, next_offset: int) -> None:
        self.queue = queue
        self.next_offset = next_offset
        """Where the next pull begins."""
        self.is_dropped = False
        self.byte_count = 0
        self.last_pull_millis = 0
        self.last_consume_millis = 0
        self.last_lock_millis = 0
        self.locked_until: float | None = None
        """Orderly consumers: when the lock of this queue is no longer to be trusted, by the monotonic clock."""
        self.locked_by = ""
        """The address of the master that granted the lock: another master knows nothing of it."""
        self.lock_again: Callable[[], object] = lambda: None
        """Called when the lock is not to be trusted any more."""
        self.corrections = 0
        """How often in a row the broker said that our offset is outside the queue."""
        self._unfinished: dict[int, ReceivedMessage] = {}
        self._order: deque[int] = deque()
        self._taken: list[ReceivedMessage] = []
        self._newest = next_offset - 1
        self._room = asyncio.Event()
        self._arrived = asyncio.Event()

    def __repr__(self) -> str:
        state = " dropped" if self.is_dropped else ""
        return f"<ProcessQueue {self.queue} next={self.next_offset} messages={self.message_count}{state}>"

    # --- how much -------------------------------------------------------------------------------------------------

    @property
    def message_count(self) -> int:
        return len(self._unfinished)

    @property
    def span(self) -> int:
        """From the oldest unfinished message to the newest."""
        return self._newest - self._oldest() if self._unfinished else 0

    @property
    def done_offset(self) -> int:
        return self._oldest() if self._unfinished else self.next_offset

    @property
    def reach(self) -> tuple[int, int]:
        """The smallest and largest offset in memory; zeros when there is none."""
        return (self._oldest(), self._newest) if self._unfinished else (0, 0)

    @property
    def taken_reach(self) -> tuple[int, int, int]:
        """How many messages an orderly callback has at the moment, and their smallest and largest offset."""
        if not self._taken:
            return 0, 0, 0
        return len(self._taken), self._taken[0].queue_offset, self._taken[-1].queue_offset

    def _oldest(self) -> int:
        order = self._order
        while order[0] not in self._unfinished:
            order.popleft()
        return order[0]

    # --- in and out -----------------------------------------------------------------------------------------------

    def put(self, messages: Iterable[ReceivedMessage], next_offset: int) -> None:
        """Add the messages of a pull; the next pull begins at `next_offset`."""
        for message in messages:
            offset = message.queue_offset
            self._unfinished[offset] = message
            self._order.append(offset)
            self.byte_count += len(message.stored_body)
            self._newest = offset
        self.next_offset = next_offset
        self._arrived.set()

    def finish(self, messages: Iterable[ReceivedMessage]) -> None:
        """These are done: consumed, sent back, or given up."""
        for message in messages:
            held = self._unfinished.pop(message.queue_offset, None)
            if held is not None:
                self.byte_count -= len(held.stored_body)
        if not self._unfinished:
            self._order.clear()
        self._room.set()

    def unfinished(self, offset: int) -> bool:
        return offset in self._unfinished

    def replace(self, message: ReceivedMessage) -> None:
        """Replace a message by its copy with another count of deliveries."""
        self._unfinished[message.queue_offset] = message

    def drop(self) -> None:
        """Give the queue up: nothing that still runs counts any more."""
        self.is_dropped = True
        self._room.set()
        self._arrived.set()

    # --- in order -------------------------------------------------------------------------------------------------

    def take(self, most: int) -> Sequence[ReceivedMessage]:
        """The oldest messages, for callbacks in order; they stay unfinished until `finish_first_taken`."""
        assert not self._taken, "one callback at a time"
        if self._unfinished:
            self._oldest()
            known = (self._unfinished.get(offset) for offset in self._order)
            self._taken = list(itertools.islice((message for message in known if message is not None), most))
        return self._taken

    def finish_first_taken(self, count: int) -> None:
        """Finish the first `count` of the messages that were taken; the others come first again."""
        self.finish(self._taken[:count])
        self._taken = []

    def distrust_lock(self) -> None:
        """Consume nothing more before the lock is granted again: there may be a new master."""
        if self.locked_until is not None:
            self.locked_until = None
            self.lock_again()

    # --- waiting --------------------------------------------------------------------------------------------------

    async def wait_for_room(self) -> None:
        """Until something was finished, or the queue was dropped."""
        self._room.clear()
        await self._room.wait()

    async def wait_for_messages(self) -> None:
        """Until there is something to consume, or the queue was dropped."""
        while not self._unfinished and not self.is_dropped:
            self._arrived.clear()
            await self._arrived.wait()
