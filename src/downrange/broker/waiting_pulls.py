"""Pulls that found nothing and wait for a message to arrive. [PullRequestHoldService]

A pull is looked up by its queue. When the queue grows, the pull reads again at the end of the loop's turn, so that it
gets everything that arrived in that turn; when its time is over, it reads again too, and answers that there is nothing
new.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from downrange.broker.filtering import EVERYTHING, MessageFilter
from downrange.model import properties as names
from downrange.model.hashing import tags_code
from downrange.model.message import TopicQueue
from downrange.model.properties import find_property
from downrange.protocol.command import Buffer
from downrange.transport.connection import Connection

K = TypeVar("K")


@dataclass(eq=False, slots=True)
class WaitingPull:
    """One waiting pull: the queue and the offset it waits for, and `read`, which makes its reply of what is there then.

    `read` must not raise. Its connection counts the pull among the requests that it answers later.
    """

    queue: TopicQueue
    offset: int
    filter: MessageFilter
    connection: Connection
    read: Callable[[], Iterable[Buffer]]
    timer: asyncio.TimerHandle | None = None


_Queue = tuple[str, int]  # a TopicQueue, or one that was cheaper to make
_InOrder = dict[WaitingPull, None]  # a set that remembers which pull came first


class WaitingPulls:
    """All waiting pulls of a broker.

    Holds always: a pull waits under its queue and its connection, or under neither; each is answered exactly once,
    unless its connection closes first. `check` says so.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._by_queue: dict[_Queue, _InOrder] = {}
        self._by_connection: dict[Connection, _InOrder] = {}
        self._grown: dict[_Queue, _Arrived] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_queue.values()))

    def __repr__(self) -> str:
        return f"<WaitingPulls pulls={len(self)} queues={len(self._by_queue)}>"

    def add(self, pull: WaitingPull, seconds: float) -> None:
        """Let a pull wait until its queue grows or `seconds` are over."""
        self._by_queue.setdefault(pull.queue, {})[pull] = None
        self._by_connection.setdefault(pull.connection, {})[pull] = None
        pull.timer = self._loop.call_later(seconds, self._answer, pull)
        pull.connection.begin_answering(1)

    @property
    def queues(self) -> dict[_Queue, _InOrder]:
        """The queues that pulls wait for."""
        return self._by_queue

    def notify(self, topic: str, queue_id: int, last_offset: int, properties: Callable[[], Iterable[bytes]]) -> None:
        """Messages up to `last_offset` were stored; `properties` is called if a filter has to look at theirs."""
        queue = topic, queue_id
        if queue in self._by_queue:
            self._arrived_in(queue).add(last_offset, properties)

    def _arrived_in(self, queue: _Queue) -> _Arrived:
        if not self._grown:
            self._loop.call_soon(self._wake)
        arrived = self._grown.get(queue)
        if arrived is None:
            arrived = self._grown[queue] = _Arrived()
        return arrived

    def notify_all(self) -> None:
        """Answer every pull: a permission or a subscription changed, or the broker stops."""
        for pulls in list(self._by_queue.values()):
            for pull in list(pulls):
                self._answer(pull)

    def drop(self, connection: Connection) -> None:
        """The connection is gone: its pulls are forgotten, unanswered."""
        for pull in list(self._by_connection.get(connection, ())):
            self._forget(pull)
            connection.end_answering(1)

    def check(self) -> None:
        """Raise AssertionError unless everything holds that holds always."""
        for table in (self._by_queue, self._by_connection):
            assert all(table.values()), "a queue or connection without waiting pulls is forgotten"
        waiting = {pull for pulls in self._by_queue.values() for pull in pulls}
        assert waiting == {pull for pulls in self._by_connection.values() for pull in pulls}
        for pull in waiting:
            assert pull in self._by_queue[pull.queue], "a pull waits under its own queue"
            assert pull in self._by_connection[pull.connection], "a pull waits under its own connection"
            assert pull.timer is not None, "a pull waits for a time"
            assert not pull.timer.cancelled(), "a pull waits for a time"
        assert len(waiting) == len(self), "a pull waits once"

    def _wake(self) -> None:
        grown, self._grown = self._grown, {}
        for queue, arrived in grown.items():
            for pull in list(self._by_queue.get(queue, ())):
                if pull.offset <= arrived.last_offset and (pull.filter is EVERYTHING or arrived.have_any(pull.filter)):
                    self._answer(pull)

    def _answer(self, pull: WaitingPull) -> None:
        self._forget(pull)
        pull.connection.end_answering(1, *pull.read())

    def _forget(self, pull: WaitingPull) -> None:
        if pull.timer is not None:
            pull.timer.cancel()
        _discard(self._by_queue, pull.queue, pull)
        _discard(self._by_connection, pull.connection, pull)


def _discard(table: dict[K, _InOrder], key: K, pull: WaitingPull) -> None:
    pulls = table.get(key)
    if pulls is not None:
        pulls.pop(pull, None)
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

    def add(self, last_offset: int, properties: Callable[[], Iterable[bytes]]) -> None:
        self.last_offset = last_offset
        self._batches.append(properties)

    def have_any(self, wanted: MessageFilter) -> bool:
        for properties in self._batches:
            self._messages += properties()
        self._batches.clear()
        seen = self._seen
        for number, stored in enumerate(self._messages):
            if number == len(seen):
                text = stored.decode("utf-8", "replace")
                seen.append((tags_code(find_property(text, names.TAGS) or ""), text))
            if wanted.matches(*seen[number]):
                return True
        return False
