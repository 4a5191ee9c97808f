"""Pops and notifications that found nothing and wait: until a message comes, until one is visible again, or for a time.

They wait under (topic, group, queue id), where -1 is any queue. What wakes them is tried at the end of the loop's turn,
first come, first served: whoever finds nothing keeps its place. [PopLongPollingService]
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Final

from downrange.protocol.bodies.pop import ANY_QUEUE

MOST_PER_KEY: Final = 1024
MOST_IN_ALL: Final = 100_000
EARLIER_SECONDS: Final = 0.05
"""So long before its client gives up a waiting pop is answered."""


@dataclass(eq=False, slots=True)
class Waiter:
    """One waiting request. `attempt` tries again: its result, or None when there is still nothing.

    `alike` is equal for waiters of one group of which one finds nothing if another finds nothing; None for those that
    take nothing away, which are all asked.
    """

    topic: str
    group: str
    queue_id: int
    attempt: Callable[[], Any | None]
    give_up: Callable[[], Any]
    alike: Hashable | None
    future: asyncio.Future[Any]
    owner: object = None
    timer: asyncio.TimerHandle | None = None


_InOrder = dict[Waiter, None]


class WaitingPops:
    """All waiting pops of a broker.

    Holds always: a waiter is answered once, or its owner has gone, or its future was cancelled.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.topics: dict[str, dict[tuple[str, int], _InOrder]] = {}
        """Topic -> (group, queue id) -> waiters; empty: nobody waits."""
        self._by_owner: dict[object, _InOrder] = {}
        self._count = 0
        self._woken: dict[tuple[str, str | None], set[int]] = {}

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"<WaitingPops waiters={len(self)} topics={len(self.topics)}>"

    def number(self, topic: str, group: str, queue_id: int) -> int:
        """How many pops wait under a key."""
        waiters = self.topics.get(topic, {}).get((group, queue_id), {})
        return sum(waiter.alike is not None for waiter in waiters)

    def is_full(self, topic: str, group: str, queue_id: int) -> bool:
        if self._count >= MOST_IN_ALL:
            return True
        waiters = self.topics.get(topic, {}).get((group, queue_id))
        return waiters is not None and len(waiters) >= MOST_PER_KEY

    def add(self, waiter: Waiter, seconds: float) -> None:
        """Let a request wait until it finds something or `seconds` are over."""
        self.topics.setdefault(waiter.topic, {}).setdefault((waiter.group, waiter.queue_id), {})[waiter] = None
        self._by_owner.setdefault(waiter.owner, {})[waiter] = None
        self._count += 1
        waiter.timer = self._loop.call_later(seconds, self._expire, waiter)
        waiter.future.add_done_callback(lambda _: self._forget(waiter))

    def wake(self, topic: str, group: str | None = None, queue_id: int = ANY_QUEUE) -> None:
        """There may be messages: in a queue, or in any; for a group, or for all."""
        if topic in self.topics:
            if not self._woken:
                self._loop.call_soon(self._try_all)
            self._woken.setdefault((topic, group), set()).add(queue_id)

    def wake_all(self) -> None:
        """Answer everybody: the broker stops."""
        for groups in list(self.topics.values()):
            for waiters in list(groups.values()):
                for waiter in list(waiters):
                    self._expire(waiter)

    def drop(self, owner: object) -> None:
        """The connection of some waiters is gone: nothing is taken for them any more."""
        for waiter in list(self._by_owner.get(owner, ())):
            self._forget(waiter)
            if not waiter.future.done():
                waiter.future.cancel()

    def check(self) -> None:
        """Raise AssertionError unless everything holds that holds always."""
        waiting = [w for groups in self.topics.values() for waiters in groups.values() for w in waiters]
        assert len(waiting) == len(set(waiting)) == self._count
        assert set(waiting) == {waiter for waiters in self._by_owner.values() for waiter in waiters}
        assert all(groups and all(groups.values()) for groups in self.topics.values()), "empty keys are forgotten"
        assert all(not waiter.future.done() for waiter in waiting), "whoever was answered does not wait"

    def _try_all(self) -> None:
        woken, self._woken = self._woken, {}
        for (topic, only), queues in woken.items():
            for group, queue_id in list(self.topics.get(topic, ())):
                if only in (None, group) and (queue_id == ANY_QUEUE or queue_id in queues or ANY_QUEUE in queues):
                    self._try(list(self.topics.get(topic, {}).get((group, queue_id), ())))

    def _try(self, waiters: list[Waiter]) -> None:
        in_vain: set[Hashable] = set()
        for waiter in waiters:
            if waiter.future.done() or (waiter.alike is not None and waiter.alike in in_vain):
                continue
            try:
                result = waiter.attempt()
            except Exception as error:
                self._forget(waiter)
                waiter.future.set_exception(error)
                continue
            if result is not None:
                self._forget(waiter)
                waiter.future.set_result(result)
            elif waiter.alike is not None:
                in_vain.add(waiter.alike)

    def _expire(self, waiter: Waiter) -> None:
        self._try([waiter])
        if not waiter.future.done():
            self._forget(waiter)
            waiter.future.set_result(waiter.give_up())

    def _forget(self, waiter: Waiter) -> None:
        if waiter.timer is None:
            return
        waiter.timer.cancel()
        waiter.timer = None
        self._count -= 1
        key = waiter.group, waiter.queue_id
        groups = self.topics[waiter.topic]
        del groups[key][waiter]
        if not groups[key]:
            del groups[key]
            if not groups:
                del self.topics[waiter.topic]
        owned = self._by_owner[waiter.owner]
        del owned[waiter]
        if not owned:
            del self._by_owner[waiter.owner]
