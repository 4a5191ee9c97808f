"""Pulls that found nothing and wait for a message to arrive.

A pull is looked up by its queue. When the queue grows, it is asked again at the end of the loop's turn, so that it
gets everything that arrived in that turn; when its time is over, it is asked again too, and answers that there is
nothing new.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TypeVar

from downrange.broker.filtering import EVERYTHING, MessageFilter
from downrange.model import properties as names
from downrange.model.hashing import tags_code
from downrange.model.message import TopicQueue
from downrange.model.properties import find_property
from downrange.protocol.command import Command
from downrange.transport.connection import Connection
from downrange.transport.serving import LaterReply

K = TypeVar("K")


class HeldPull(ABC):
    """One waiting pull. What `HeldPulls` keeps ends with one call: of `answer`, or of `give_up` when nobody listens."""

    __slots__ = ("connection", "filter", "offset", "queue", "timer")

    def __init__(self, queue: TopicQueue, offset: int, message_filter: MessageFilter, connection: Connection) -> None:
        self.queue = queue
        self.offset = offset
        self.filter = message_filter
        self.connection = connection
        self.timer: asyncio.TimerHandle | None = None

    @abstractmethod
    def answer(self) -> None:
        """Look again, and answer with what is there now."""

    @abstractmethod
    def give_up(self) -> None:
        """Forget it unanswered."""


class PromisedPull(HeldPull):
    """A waiting pull whose handler returned a promise: how to ask again, and where the answer goes."""

    __slots__ = ("_read", "reply")

    def __init__(
        self,
        queue: TopicQueue,
        offset: int,
        message_filter: MessageFilter,
        connection: Connection,
        read: Callable[[], Command],
        reply: LaterReply,
    ) -> None:
        super().__init__(queue, offset, message_filter, connection)
        self._read = read
        self.reply = reply

    def answer(self) -> None:
        if self.reply.done():
            return
        try:
            self.reply.set_result(self._read())
        except Exception as error:
            self.reply.set_exception(error)

    def give_up(self) -> None:
        self.reply.cancel()


_Queue = tuple[str, int]  # a TopicQueue, or one that was cheaper to make
_InOrder = dict[HeldPull, None]  # a set that remembers who came first


class HeldPulls:
    """All waiting pulls of a broker.

    Holds always: a pull is held under its queue and its connection, or under neither; each is answered exactly once,
    unless its connection closes first.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._by_queue: dict[_Queue, _InOrder] = {}
        self._by_connection: dict[Connection, _InOrder] = {}
        self._grown: dict[_Queue, _Arrived] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_queue.values()))

    def __repr__(self) -> str:
        return f"<HeldPulls pulls={len(self)} queues={len(self._by_queue)}>"

    def hold(
        self,
        queue: TopicQueue,
        offset: int,
        message_filter: MessageFilter,
        answer: Callable[[], Command],
        connection: Connection,
        seconds: float,
    ) -> LaterReply:
        """Keep a pull until its queue grows or `seconds` are over; `answer` is asked then."""
        reply: LaterReply = self._loop.create_future()
        self.keep(PromisedPull(queue, offset, message_filter, connection, answer, reply), seconds)
        return reply

    def keep(self, held: HeldPull, seconds: float) -> None:
        """The same for a pull that answers by itself."""
        self._by_queue.setdefault(held.queue, {})[held] = None
        self._by_connection.setdefault(held.connection, {})[held] = None
        held.timer = self._loop.call_later(seconds, self._release, held)

    @property
    def queues(self) -> dict[_Queue, _InOrder]:
        """The queues that pulls wait for."""
        return self._by_queue

    def is_waited_for(self, queue: TopicQueue) -> bool:
        return queue in self._by_queue

    def notify(self, topic: str, queue_id: int, queue_offset: int, properties: bytes) -> None:
        """A message was stored. Cheap when nobody waits for its queue."""
        queue = topic, queue_id
        if queue in self._by_queue:
            self._arrived_in(queue).add(queue_offset, properties)

    def notify_batch(
        self, topic: str, queue_id: int, last_offset: int, properties: Callable[[], Iterable[bytes]]
    ) -> None:
        """Messages of one queue were stored, up to `last_offset`; `properties` gives theirs if a filter wants them."""
        self._arrived_in((topic, queue_id)).add_batch(last_offset, properties)

    def _arrived_in(self, queue: _Queue) -> _Arrived:
        if not self._grown:
            self._loop.call_soon(self._wake)
        arrived = self._grown.get(queue)
        if arrived is None:
            arrived = self._grown[queue] = _Arrived()
        return arrived

    def notify_all(self) -> None:
        """Ask every pull again: a permission or a subscription changed, or the broker stops."""
        for pulls in list(self._by_queue.values()):
            for held in list(pulls):
                self._release(held)

    def drop(self, connection: Connection) -> None:
        """The connection is gone: nobody waits any more."""
        for held in list(self._by_connection.get(connection, ())):
            self._forget(held)
            held.give_up()

    def _wake(self) -> None:
        grown, self._grown = self._grown, {}
        for queue, arrived in grown.items():
            for held in list(self._by_queue.get(queue, ())):
                if held.offset <= arrived.last_offset and (held.filter is EVERYTHING or arrived.have_any(held.filter)):
                    self._release(held)

    def _release(self, held: HeldPull) -> None:
        self._forget(held)
        held.answer()

    def _forget(self, held: HeldPull) -> None:
        if held.timer is not None:
            held.timer.cancel()
        _discard(self._by_queue, held.queue, held)
        _discard(self._by_connection, held.connection, held)


def _discard(table: dict[K, _InOrder], key: K, held: HeldPull) -> None:
    pulls = table.get(key)
    if pulls is not None:
        pulls.pop(held, None)
        if not pulls:
            del table[key]


class _Arrived:
    """Messages that came into one queue in one turn. Each is looked at once, and only if a filter wants to know."""

    __slots__ = ("_batches", "_messages", "_seen", "last_offset")

    def __init__(self) -> None:
        self.last_offset = -1
        self._messages: list[bytes] = []
        self._batches: list[Callable[[], Iterable[bytes]]] = []
        self._seen: list[tuple[int, str]] = []  # tags code and properties of the first of them

    def add(self, queue_offset: int, properties: bytes) -> None:
        self.last_offset = queue_offset
        self._messages.append(properties)

    def add_batch(self, last_offset: int, properties: Callable[[], Iterable[bytes]]) -> None:
        self.last_offset = last_offset
        self._batches.append(properties)

    def have_any(self, wanted: MessageFilter) -> bool:
        for batch in self._batches:
            self._messages += batch()
        self._batches.clear()
        seen = self._seen
        for number, properties in enumerate(self._messages):
            if number == len(seen):
                text = properties.decode("utf-8", "replace")
                seen.append((tags_code(find_property(text, names.TAGS) or ""), text))
            if wanted.matches(*seen[number]):
                return True
        return False
