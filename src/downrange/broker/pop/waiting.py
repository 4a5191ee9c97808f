"""Pops and notifications that found nothing and wait: until a message comes, until one is visible again, or for a time.

They wait under (topic, group, queue id), where -1 is any queue. What wakes them is tried at the end of the loop's turn,
first come, first served: whoever finds nothing keeps its place. [PopLongPollingService]
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from downrange.broker.pop.popped import Popped
from downrange.protocol.bodies.pop import ANY_QUEUE

MOST_PER_KEY: Final = 1024
MOST_IN_ALL: Final = 100_000
EARLIER_SECONDS: Final = 0.05
"""So long before its client gives up a waiting pop is answered."""


def wait_seconds(now: int, born_millis: int, poll_millis: int) -> float:
    """How long a request may wait that its client sent at `born_millis` (0: just now); not positive: not at all."""
    waited = max(0, now - born_millis) if born_millis else 0
    return (poll_millis - waited) / 1000 - EARLIER_SECONDS


@dataclass(eq=False, slots=True)
class Waiter:
    """One waiting request. `attempt` tries again: its result, or None when there is still nothing.

    `answer` is called once: with a result, with the error of an attempt, or with None when the owner has gone. `alike`
    is equal for waiters of one group of which one finds nothing if another finds nothing; None for those that take
    nothing away, which are all asked.
    """

    topic: str
    group: str
    queue_id: int
    attempt: Callable[[], Any | None]
    give_up: Callable[[], Any]
    answer: Callable[[Any], None]
    alike: Hashable | None
    owner: object = None
    timer: asyncio.TimerHandle | None = None


_InOrder = dict[Waiter, None]


class WaitingPops:
    """All waiting pops of a broker.

    Holds always: whoever does not wait any more was answered, once.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.topics: dict[str, dict[tuple[str, int], _InOrder]] = {}
        """Topic -> (group, queue id) -> waiters; empty: nobody waits."""
        self._by_owner: dict[object, _InOrder] = {}
        self._count = 0
        self._woken: dict[tuple[str, str | None], set[int]] = {}
        self.before_answers: Callable[[list[Popped]], None] = lambda found: None
        """Called with all that pops have found that were woken together, before they are answered."""

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
            waiter.answer(None)

    def check(self) -> None:
        """Raise AssertionError unless everything holds that holds always."""
        waiting = [w for groups in self.topics.values() for waiters in groups.values() for w in waiters]
        assert len(waiting) == len(set(waiting)) == self._count
        assert set(waiting) == {waiter for waiters in self._by_owner.values() for waiter in waiters}
        assert all(groups and all(groups.values()) for groups in self.topics.values()), "empty keys are forgotten"
        assert all(waiter.timer is not None for waiter in waiting), "whoever waits is answered some time"

    def _try_all(self) -> None:
        woken, self._woken = self._woken, {}
        found: list[tuple[Waiter, Any]] = []
        for (topic, only), queues in woken.items():
            for (group, queue_id), waiters in list(self.topics.get(topic, {}).items()):
                if only in (None, group) and (queue_id == ANY_QUEUE or queue_id in queues or ANY_QUEUE in queues):
                    found += self._try(list(waiters))
        self._answer(found)

    def _try(self, waiters: list[Waiter]) -> Iterator[tuple[Waiter, Any]]:
        """Let waiters try again; return those that need not wait any more, each with what it has found."""
        in_vain: set[Hashable] = set()
        for waiter in waiters:
            if waiter.timer is None or (waiter.alike is not None and waiter.alike in in_vain):
                continue
            try:
                result = waiter.attempt()
            except Exception as error:
                result = error
            if result is not None:
                self._forget(waiter)
                yield waiter, result
            elif waiter.alike is not None:
                in_vain.add(waiter.alike)

    def _answer(self, found: list[tuple[Waiter, Any]]) -> None:
        self.before_answers([result for _, result in found if isinstance(result, Popped)])
        for waiter, result in found:
            waiter.answer(result)

    def _expire(self, waiter: Waiter) -> None:
        found = list(self._try([waiter]))
        if not found:
            self._forget(waiter)
            found.append((waiter, waiter.give_up()))
        self._answer(found)

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
