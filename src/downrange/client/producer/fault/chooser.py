"""The queue choice of one producer: a fault strategy with its state."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any, Final

from downrange.client.producer.fault.attempt import Attempt, Outcome
from downrange.client.producer.fault.strategy import FaultStrategy
from downrange.model.errors import MQError
from downrange.model.message import MessageQueue

INDEX_MASK: Final = 0x7FFF_FFFF
"""The index goes round to 0 after 31 bits. Java took the absolute value of a wrapped int, which can be negative."""


class NoQueue(MQError):
    """There is no queue to choose from: the topic has no writable queue on any broker that is up."""

    retriable = True


class QueueChooser:
    """One producer's fault strategy, what it has learned, and where its round robin stands.

    All threads share what was learned. Each thread has its own index for each topic, started at random, so that
    producers that start together spread out, and two topics that are sent in turns still reach all their queues. The
    tasks of one event loop share an index, which spreads their sends more evenly. Any thread may call.
    """

    def __init__(self, strategy: FaultStrategy[Any], random_source: random.Random | None = None) -> None:
        self.strategy = strategy
        self._state = strategy.initial()
        self.learns = self._state is not None
        """False for a strategy without a state: it takes every queue in turn, but for retries."""
        self._random = random_source or random.Random()  # noqa: S311  spreads load, guards nothing
        self._local = threading.local()
        self._lock = threading.Lock()
        self._being_probed: set[str] = set()

    def __repr__(self) -> str:
        return f"<QueueChooser {self.strategy.name} {self._state}>"

    @property
    def state(self) -> Any:
        """The faults that the strategy has learned, in a type of its own."""
        return self._state

    def next_index(self, topic: str) -> int:
        """The calling thread's next index in its round robin over the queues of `topic`."""
        indexes: dict[str, int] = self._local.__dict__
        index = indexes.get(topic)
        if index is None:
            index = self._random.getrandbits(31)
        index = indexes[topic] = (index + 1) & INDEX_MASK
        return index

    def choose(self, queues: Sequence[MessageQueue], now_millis: float, last_broker: str | None = None) -> MessageQueue:
        """The queue for the next attempt; `last_broker` is where the attempt before it, of the same message, failed."""
        if not queues:
            raise NoQueue("no writable queue to choose from")
        topic = queues[0].topic
        index = self.next_index(topic)
        if not self.learns and last_broker is None:  # nothing to ask the strategy for, nor to guard
            return queues[index % len(queues)]
        with self._lock:
            choice = self.strategy.choose(self._state, queues, now_millis, last_broker, index)
            self._state = choice.state
        self._local.__dict__[topic] = choice.stands_at & INDEX_MASK
        return choice.queue

    def attempt_ended(self, now_millis: float, broker: str, latency_millis: float, outcome: Outcome) -> None:
        """`learn`, unless the strategy never learns."""
        if self.learns:
            self.learn(now_millis, Attempt(broker, latency_millis, outcome))

    def learn(self, now_millis: float, attempt: Attempt) -> None:
        with self._lock:
            self._state = self.strategy.learn(self._state, now_millis, attempt)

    def probes(self, now_millis: float) -> tuple[str, ...]:
        """Brokers to probe now. Each is handed out once; the caller owes it a `probed`, also when the probe fails."""
        with self._lock:
            due = set(self.strategy.probes(self._state, now_millis)) - self._being_probed
            self._being_probed |= due
        return tuple(sorted(due))

    def next_probe_at(self) -> float | None:
        """When to ask for `probes` next; None while no broker needs one."""
        return self.strategy.next_probe_at(self._state)

    def probed(self, now_millis: float, broker: str, ok: bool, latency_millis: float) -> None:
        with self._lock:
            self._being_probed.discard(broker)
            self._state = self.strategy.probed(self._state, now_millis, broker, ok, latency_millis)
