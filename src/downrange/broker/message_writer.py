"""The one way a message enters this broker: store a batch, count it, wake whatever waits for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from time import perf_counter
from typing import Final

from downrange.broker.pop.waiting import WaitingPops
from downrange.broker.replication.master import Slaves
from downrange.broker.replication.waiting import Tell
from downrange.broker.services.flushing import Flusher
from downrange.broker.statistics import LARGE, Statistics
from downrange.broker.waiting_pulls import WaitingPulls
from downrange.clock import Clock
from downrange.model.message import TopicQueue
from downrange.store.group_commit import FlushOutcome
from downrange.store.message_store import MessageStore
from downrange.store.new_message import AppendResult, NewMessage, PutMessageStatus, Refusal
from downrange.store.new_messages import NewMessages

_PUT_OK = PutMessageStatus.PUT_OK
_WORTH_TELLING: Final = 0.001  # seconds


class MessageWriter:
    """Appends messages, and tells when they are as safe as this broker promises.

    `on_delayed` is called with the queue of the delay topic that got a message, and when that is due if it is known;
    `on_appended` is called with the seconds that storing a batch took, if it took more than a millisecond;
    `on_dispatched` is called with the queues that got messages by another way than `append`.
    """

    def __init__(
        self,
        store: MessageStore,
        pulls: WaitingPulls,
        flusher: Flusher,
        statistics: Statistics,
        clock: Clock,
        slaves: Slaves | None = None,
    ) -> None:
        self.store = store
        self.statistics = statistics
        self.now = clock.now
        self._pulls = pulls
        self._waiting = pulls.queues  # empty: no pull waits
        self._flusher = flusher
        self._slaves = slaves
        self._links: Collection[object] = () if slaves is None else slaves.links  # empty: no slave follows
        # The senders of a SYNC_MASTER, or of a master under a controller, wait for these beside the disk.
        self._copied_by = slaves if slaves is not None and slaves.makes_senders_wait else None
        self.makes_wait = self._copied_by is not None or flusher.is_sync
        """Whether senders wait until their messages are as safe as promised, or are answered at once."""
        self._delays = store.config.delay_level_millis()
        self.max_delay_level = len(self._delays)
        self.waiting_pops: WaitingPops | None = None
        self.on_delayed: Callable[[int, int | None], None] = lambda queue_id, due_millis: None
        self.on_appended: Callable[[float], None] = lambda seconds: None
        self.on_dispatched: Callable[[Collection[TopicQueue]], None] = lambda queues: None
        statistics.take_puts = store.queues.take_counts

    def add(self, messages: NewMessages, group: Sequence[NewMessage]) -> Refusal | None:
        """Add messages to a batch, to be stored together or not at all; or say why they cannot be stored."""
        refusal = self.store.add(messages, group)
        if refusal is not None:
            self.statistics.failed_puts += 1
        return refusal

    def add_each(self, messages: NewMessages, singles: Sequence[NewMessage]) -> Refusal | None:
        """Add messages of which each may be stored without the others; or say why one cannot be stored."""
        refusal = self.store.add_each(messages, singles)
        if refusal is not None:
            self.statistics.failed_puts += 1
        return refusal

    def append(self, messages: NewMessages) -> Refusal | None:
        """Store a batch. On failure say why; then only the first `messages.stored` messages are stored."""
        start = perf_counter()
        refusal = self.store.append(messages)
        seconds = perf_counter() - start
        if seconds > _WORTH_TELLING:
            self.on_appended(seconds)
        if refusal is not None:
            self.statistics.failed_puts += len(messages) - messages.stored
        if self.store.follower.at_once and (refusal is None or messages.stored):
            self._applied(messages)
        if self._links:
            self._wake_slaves()
        return refusal

    def append_one(self, message: NewMessage) -> AppendResult:
        """Store one message."""
        messages = NewMessages()
        refusal = self.add(messages, (message,)) or self.append(messages)
        if refusal is not None:
            return AppendResult(refusal.status, reason=refusal.reason)
        return AppendResult(_PUT_OK, *messages.places[0])

    def _applied(self, messages: NewMessages) -> None:
        """Messages are in their queues: count them, and wake what waits for them."""
        statistics = self.statistics
        statistics.new_puts += messages.stored
        if messages.largest > LARGE:
            for state, (_, size, _) in zip(messages.states, messages.places, strict=False):
                if size > LARGE:
                    statistics.put_large(state.topic, size)
        if self._waiting:
            for state in dict.fromkeys(messages.states):
                if (state.topic, state.queue_id) in self._waiting:
                    properties = partial(messages.properties_for, state)
                    self._pulls.notify(state.topic, state.queue_id, state.queue.max_offset - 1, properties)
        pops = self.waiting_pops
        if pops is not None and pops.topics:
            for state in dict.fromkeys(messages.states):
                if state.topic in pops.topics:
                    pops.wake(state.topic, None, state.queue_id)
        if messages.special:
            self._delayed(messages)

    def _delayed(self, messages: NewMessages) -> None:
        """Count the delayed messages among these, and tell when the first one of each level is due."""
        states, stored = messages.states, messages.stored
        levels: dict[int, list[int]] = {}
        for number in messages.special:
            if states[number].is_schedule and number < stored:
                levels.setdefault(states[number].queue_id, []).append(number)
        for queue_id, numbers in levels.items():
            self.statistics.delayed(self._delays[queue_id] / 1000, len(numbers))
            first = numbers[0]
            self.on_delayed(queue_id, None if states[first].ext is not None else messages.code(first))

    def dispatched(self) -> Collection[TopicQueue]:
        """Records came into the log by another way (transient pool, master): count them, wake what waits for them, and
        return their queues."""
        queues: dict[TopicQueue, None] = {}

        def applied(messages: NewMessages) -> None:
            self._applied(messages)
            for state in dict.fromkeys(messages.states):
                queues[TopicQueue(state.topic, state.queue_id)] = None

        self.store.dispatch_pending(applied)
        if self._links:
            self._wake_slaves()
        if queues:
            self.on_dispatched(queues)
        return queues

    def _wake_slaves(self) -> None:
        if self._slaves is not None:
            self._slaves.wake()

    def tell_when_safe(self, end_offset: int, tell: Tell) -> None:
        """Tell when the log up to here is as safe as this broker promises, or will not be; that may be at once.

        For senders that have to wait (`makes_wait`). `tell` must not raise.
        """
        slaves, flusher = self._copied_by, self._flusher
        if slaves is None:
            flusher.tell_when_flushed(end_offset, partial(_tell_flushed, tell))
        elif not flusher.is_sync:
            slaves.tell_when_copied(end_offset, tell)
        else:
            both = DiskAndSlave(tell)
            flusher.tell_when_flushed(end_offset, both.flushed, may_block=False)  # the slave is at it meanwhile
            slaves.tell_when_copied(end_offset, both.copied)


class DiskAndSlave:
    """Waits for both. The slave's status comes before the disk's, as in RocketMQ."""

    __slots__ = ("_copied", "_flushed", "_tell")

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._flushed: FlushOutcome | None = None
        self._copied: PutMessageStatus | None = None

    def flushed(self, outcome: FlushOutcome) -> None:
        self._flushed = outcome
        self._tell_when_over()

    def copied(self, status: PutMessageStatus) -> None:
        self._copied = status
        self._tell_when_over()

    def _tell_when_over(self) -> None:
        if self._flushed is None or self._copied is None:
            return
        if self._copied is _PUT_OK:
            _tell_flushed(self._tell, self._flushed)
        else:
            self._tell(self._copied)


def _tell_flushed(tell: Tell, flushed: FlushOutcome) -> None:
    tell(_PUT_OK if flushed is FlushOutcome.FLUSHED else PutMessageStatus.FLUSH_DISK_TIMEOUT)
