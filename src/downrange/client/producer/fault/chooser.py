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

BUNDLE: Final = 16
_NONE: Final = (0, 0.0)


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
        self._calm_millis = 0.0
        self._untold: dict[str, tuple[int, float]] = {}
        """Good answers that the strategy was not told yet, while all is calm: their number, and the longest latency."""
        self._told: dict[str, int] = {}
        """How many attempts the strategy was told: of a broker it knows little of, every one."""
        self._patience: dict[str, float | None] = {}

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
        if last_broker is None and (self._calm_millis or not self.learns):  # nothing to ask for, nor to guard
            return queues[index % len(queues)]
        with self._lock:
            choice = self.strategy.choose(self._state, queues, now_millis, last_broker, index)
            if choice.state is not self._state:
                self._take(choice.state, now_millis)
        self._local.__dict__[topic] = choice.stands_at & INDEX_MASK
        return choice.queue

    def patience_millis(self, broker: str) -> float | None:
        """How long to wait for an answer of `broker` before another is asked; None: as long as the send may take."""
        known = self._patience
        try:
            return known[broker]
        except KeyError:
            millis = known[broker] = self.strategy.patience_millis(self._state, broker)
            return millis

    def attempt_ended(self, now_millis: float, broker: str, latency_millis: float, outcome: Outcome) -> None:
        """`learn`, unless the strategy never learns. While all is calm, good answers are told in bundles."""
        if not self.learns or (outcome is Outcome.INTERRUPTED and self._calm_millis):
            return
        if outcome is Outcome.OK and latency_millis <= self._calm_millis:
            count, longest = self._untold.get(broker, _NONE)
            if count < BUNDLE and 2 * count < self._told.get(broker, 0):
                # Threads may overwrite each other's: a few answers less do not matter.
                self._untold[broker] = count + 1, max(longest, latency_millis)
                return
        self.learn(now_millis, Attempt(broker, latency_millis, outcome))

    def learn(self, now_millis: float, attempt: Attempt) -> None:
        with self._lock:
            state, learn = self._state, self.strategy.learn
            while self._untold:
                broker, (count, longest) = self._untold.popitem()
                state = learn(state, now_millis, Attempt(broker, longest, Outcome.OK, count))
                self._told[broker] = self._told.get(broker, 0) + count
            self._told[attempt.broker] = self._told.get(attempt.broker, 0) + 1
            self._take(learn(state, now_millis, attempt), now_millis)

    def _take(self, state: Any, now_millis: float) -> None:
        """Replace the state, and what is derived from it."""
        self._state = state
        self._patience = {}
        self._calm_millis = self.strategy.calm_millis(state, now_millis)

    def probes(self, now_millis: float) -> tuple[str, ...]:
        """Brokers to probe now. Each is handed out once; the caller owes it a `probed`, also when the probe fails."""
        if self._calm_millis:  # nothing is avoided
            return ()
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
            self._take(self.strategy.probed(self._state, now_millis, broker, ok, latency_millis), now_millis)
