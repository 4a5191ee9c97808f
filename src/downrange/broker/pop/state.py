"""What all parts of POP share: leases, the states of ordered pops, waiting pops, and the way into the revive topic."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from downrange.broker.groups import CommittedOffsets
from downrange.broker.live_config import LiveConfig
from downrange.broker.message_writer import MessageWriter
from downrange.broker.pop.leases import Lease, Leases
from downrange.broker.pop.orders import OrderKey, OrderStates
from downrange.broker.pop.records import REVIVE_QUEUES, Places, ReviveRecords, add_acknowledgements, add_checkpoints
from downrange.broker.pop.waiting import WaitingPops
from downrange.broker.pull_checks import FAQ
from downrange.broker.tables import Tables
from downrange.clock import Clock
from downrange.model.histogram import Histogram
from downrange.model.message_id import pack_host
from downrange.model.topics import TopicConfig
from downrange.protocol.errors import MessageIllegal, ServiceNotAvailable, TopicNotExist
from downrange.store.config import BrokerRole
from downrange.store.new_message import NewMessage, Refusal
from downrange.store.new_messages import NewMessages

_SLAVE: Final = BrokerRole.SLAVE
_SCAN_MILLIS_BOUNDS: Final = (1, 10, 100, 1000, 2000, 3000)


class PopState:
    """The leases of one broker, and what makes them last.

    Holds always: a message that a consumer holds has a checkpoint in the log, and the offset of the group is behind it;
    of an ordered pop, the offset is not behind a message that was not acknowledged.
    """

    def __init__(
        self, config: LiveConfig, tables: Tables, writer: MessageWriter, orders: OrderStates, clock: Clock
    ) -> None:
        broker = config.broker
        self.config = config
        self.tables = tables
        self.writer = writer
        self.store = writer.store
        self.orders = orders
        self.clock = clock
        self.offsets: CommittedOffsets = tables.offsets
        self.waiting = writer.waiting_pops = WaitingPops()
        self.leases = Leases()
        self.host = pack_host(broker.broker_ip1, broker.listen_port)
        self.records = ReviveRecords(broker.broker_cluster_name, broker.broker_name, self.host)
        self._places: Places = self.store.queues.states, self.records.topic, self.host
        self.wanted = asyncio.Event()
        """Set when a lease is due before `wakes_at`."""
        self.wakes_at = 0
        """When the service that ends leases looks at them next."""
        self.read_to = dict.fromkeys(range(REVIVE_QUEUES), 0)
        """For each revive queue the offset up to which `Revival` has seen its records."""
        self.own_records = 0
        """How many records this broker has put into revive queues since then: they need not be read."""
        self.unlocks: dict[OrderKey, int] = {}
        """When queues that are blocked by ordered pops are free again."""
        self.checkpoints = 0
        """Records of leases that were stored since the start."""
        self.acknowledgements = 0
        """Records of ended leases that were stored since the start."""
        self.scan_millis = Histogram(_SCAN_MILLIS_BOUNDS)
        """How long it took to look for leases that are due."""
        self.revived: Counter[tuple[str, str]] = Counter()
        """Messages that came again since the start, by topic and group."""

    def __repr__(self) -> str:
        return f"<PopState {self.leases!r} ordered={len(self.orders)} {self.waiting!r}>"

    # --- checks -------------------------------------------------------------------------------------------------

    def refuse_on_slave(self) -> None:
        if self.config.store.broker_role is _SLAVE:
            raise ServiceNotAvailable("this broker is a slave: its master leases messages and takes acknowledgements")

    def known_topic(self, name: str) -> TopicConfig:
        topic = self.tables.topics.get(name)
        if topic is None:
            raise TopicNotExist(f"topic[{name}] not exist, apply first please! {FAQ}")
        return topic

    def check_place(self, topic: str, queue_id: int, peer: str) -> None:
        """Raise BrokerError unless there is such a queue."""
        known = self.known_topic(topic)
        if not 0 <= queue_id < known.read_queue_nums:
            raise MessageIllegal(illegal_queue(queue_id, known, peer))

    def offset_range(self, topic: str, queue_id: int) -> tuple[int, int]:
        """The smallest and the largest offset of a queue."""
        return self.store.min_offset_of(topic, queue_id), self.store.max_offset_of(topic, queue_id)

    @property
    def overdue_millis(self) -> int:
        """How late the oldest lease is that should have ended; 0 when none is late."""
        due = self.leases.next_due
        return 0 if due is None else max(0, self.clock.now() - due)

    def needed_records(self) -> dict[int, tuple[int, int]]:
        """For each revive queue the offset of the first record that is still needed, and the end of the queue."""
        oldest = self.leases.oldest_records()
        found: dict[int, tuple[int, int]] = {}
        for queue_id in range(REVIVE_QUEUES):
            end = self.store.max_offset_of(self.records.topic, queue_id)
            found[queue_id] = min(oldest.get(queue_id, end), self.orders.needed_from(queue_id, end)), end
        return found

    def check_invariants(self) -> None:
        """Raise AssertionError unless everything holds that holds always."""
        for lease in self.leases:
            assert lease.held, f"{lease} is over"
            assert lease.revive_offset >= 0, f"{lease} has no record"
        self.waiting.check()

    # --- changes ------------------------------------------------------------------------------------------------

    def append_checkpoints(self, leases: list[Lease]) -> NewMessages:
        """Store the records of leases, as `append` does."""
        batch, records, now = NewMessages(), self.records, self.clock.now()
        refusal = None
        if not add_checkpoints(batch, leases, records.texts, self._places, self.store.limits.surely_fits, now):
            refusal = self.writer.add_each(batch, [records.checkpoint(lease, now) for lease in leases])
        self._store(batch, refusal)
        self.checkpoints += batch.stored
        return batch

    def append_acknowledgements(self, ended: list[tuple[Lease, int]]) -> NewMessages:
        """Store the records that leases are over: for each the bits of messages that it held. As `append` does."""
        batch, records, now = NewMessages(), self.records, self.clock.now()
        refusal = None
        if not add_acknowledgements(batch, ended, records.texts, self._places, self.store.limits.surely_fits, now):
            messages = [records.acknowledgement(lease, bits, now) for lease, bits in ended]
            refusal = self.writer.add_each(batch, messages)
        self._store(batch, refusal)
        self.acknowledgements += batch.stored
        return batch

    def append(self, messages: Sequence[NewMessage]) -> NewMessages:
        """Store records of the revive topic, each on its own. Raises ServiceNotAvailable when none can be stored now.

        Fewer may be stored than were given (`NewMessages.stored`): the first ones.
        """
        batch = NewMessages()
        self._store(batch, self.writer.add_each(batch, messages))
        return batch

    def append_together(self, messages: Sequence[NewMessage]) -> NewMessages:
        """Store all records of the revive topic, or none. Raises ServiceNotAvailable when they cannot be stored now."""
        batch = NewMessages()
        self._store(batch, self.writer.add(batch, messages))
        return batch

    def _store(self, batch: NewMessages, refusal: Refusal | None) -> None:
        self.tables.topics.ensure(self.records.topic, REVIVE_QUEUES)
        refusal = refusal or self.writer.append(batch)
        if refusal is not None and not batch.stored:
            raise ServiceNotAvailable(f"a record of the revive topic cannot be stored: {refusal.reason}")
        self.own_records += batch.stored

    def hold(self, leases: list[Lease]) -> None:
        """Messages are held from now on."""
        self.leases.add(leases)
        wakes_at = self.wakes_at
        for lease in leases:
            if lease.visible_at < wakes_at:
                self.wanted.set()
                break

    def unlock_later(self, key: OrderKey) -> None:
        """Wake waiting pops when a queue that is blocked now is free again."""
        self.unlocks[key] = until = self.orders.blocked_until(key)
        if until < self.wakes_at:
            self.wanted.set()

    def note_orders(self, keys: Iterable[OrderKey]) -> int:
        """Write the states of ordered pops to the log; returns its end."""
        now = self.clock.now()
        messages = [self.records.order(key, self.orders.body(key), now) for key in keys]
        batch = self.append(messages)
        for message, (_, _, offset) in zip(messages, batch.places, strict=False):
            self.orders.noted(message.queue_id, offset)
        return batch.end_offset


def illegal_queue(queue_id: int, topic: TopicConfig, peer: str) -> str:
    return (
        f"queueId[{queue_id}] is illegal, topic:[{topic.topic_name}] "
        f"topicConfig.readQueueNums:[{topic.read_queue_nums}] consumer:[/{peer}]"
    )
