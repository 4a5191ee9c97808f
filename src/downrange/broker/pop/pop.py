"""POP as the rest of the broker calls it: pop, acknowledge, change invisible times. In process, without the wire.

    request = PopRequest(topic="orders", group="billing", invisible_millis=30_000, poll_millis=15_000,
                         filter=pop_filter("TAG", "paid"))
    popped = await pop.receive(request)                      # waits for `poll_millis` when there is nothing
    for message, handle, delivered_before in popped.messages():
        ...
        await pop.ack("orders", "billing", [handle])         # the message does not come again
        handle = await pop.change_invisible_time("orders", "billing", handle, 60_000)   # the new handle; 0: at once

`receive` raises BrokerError with RocketMQ's code when the topic, group, queue or filter is wrong; `popped.status` is
FOUND, NO_MESSAGE or FULL (too many wait). Handles are `ReceiptHandle`s (`protocol/bodies/pop.py`): `str(handle)` is the
text of POP_CK, `ReceiptHandle.parse` reads it and ignores what a proxy appended. `ack` takes the handles of one topic
and group, also of retry topics: the handle says which topic it was. Handles whose lease is over have no effect.
`begin_receive`, `begin_ack` and `begin_change` do the work at once, for callers without a task of their own.

How it works: a pop reads from the offset of the group, writes a checkpoint for each queue that gave messages to the
revive topic (`records.py`), moves the offset and answers; an acknowledgement writes a record, too. So at any moment the
log and consumerOffset.json together tell which messages are held, and a broker that was killed goes on where it was
(`revival.py`). What is not acknowledged in time is copied to the retry topic of the group, and waiting pops are woken.
Ordered pops (`orders.py`) move the offset when messages are acknowledged, and never use a retry topic.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable
from functools import partial
from itertools import count
from typing import Any, Final

from downrange.broker.groups import CommittedOffsets
from downrange.broker.live_config import LiveConfig
from downrange.broker.message_writer import MessageWriter
from downrange.broker.pop.leases import Lease, LeaseKey, Leases
from downrange.broker.pop.orders import OrderKey, OrderStates
from downrange.broker.pop.popped import Popped, PoppedQueue, PopRequest, PopStatus, offsets_of, only
from downrange.broker.pop.records import REVIVE_QUEUES, ReviveRecords
from downrange.broker.pop.waiting import EARLIER_SECONDS, Waiter, WaitingPops
from downrange.broker.pull_checks import FAQ
from downrange.broker.tables import Tables
from downrange.clock import Clock
from downrange.model.message_id import pack_host
from downrange.model.topics import Perm, TopicConfig, pop_retry_topic
from downrange.protocol.bodies.pop import (
    ANY_QUEUE,
    MOST_MESSAGES,
    NORMAL,
    ORDERLY_REVIVE_QUEUE,
    RETRY_V1,
    RETRY_V2,
    ReceiptHandle,
)
from downrange.protocol.codes import ResponseCode
from downrange.protocol.errors import (
    BrokerError,
    MessageIllegal,
    NoPermission,
    ServiceNotAvailable,
    SubscriptionGroupNotExist,
    TopicNotExist,
)
from downrange.store.config import BrokerRole
from downrange.store.new_message import NewMessage, PutMessageStatus
from downrange.store.new_messages import NewMessages
from downrange.store.read_result import GetMessageStatus

log = logging.getLogger(__name__)

# Of a hundred pops so many look into the retry topic first, or messages there would starve behind a long backlog.
_RETRY_FIRST_PERCENT: Final = 20
# A filter that wants next to nothing: so often a pop reads on in one queue before others get their turn.
_MOST_READS: Final = 32
_READ: Final = int(Perm.READ)
_LOST: Final = (
    GetMessageStatus.OFFSET_TOO_SMALL,
    GetMessageStatus.OFFSET_OVERFLOW_BADLY,
    GetMessageStatus.OFFSET_FOUND_NULL,
)
_SKIPPED: Final = (GetMessageStatus.NO_MATCHED_MESSAGE, GetMessageStatus.MESSAGE_WAS_REMOVING)


Ack = tuple[LeaseKey, Iterable[int], int, int]
"""Messages that were consumed: the key of their lease, their offsets, and revive queue and invisible time."""


class Pop:
    """Leases messages to consumers.

    Holds always: a message that a consumer holds has a checkpoint in the log, and the offset of the group is behind it;
    of an ordered pop, the offset is not behind a message that was not acknowledged. `check` says so.
    """

    def __init__(
        self,
        config: LiveConfig,
        tables: Tables,
        writer: MessageWriter,
        orders: OrderStates,
        waiting: WaitingPops,
        clock: Clock,
    ) -> None:
        broker = config.broker
        self.config = config
        self.tables = tables
        self.writer = writer
        self.store = writer.store
        self.orders = orders
        self.waiting = waiting
        self.clock = clock
        self.leases = Leases()
        self.host = pack_host(broker.broker_ip1, broker.listen_port)
        self.records = ReviveRecords(broker.broker_cluster_name, broker.broker_name, self.host)
        self.wanted = asyncio.Event()
        """Set when a lease is due before `wakes_at`."""
        self.wakes_at = 0
        """When the service that ends leases looks at them next."""
        self.read_to = dict.fromkeys(range(REVIVE_QUEUES), 0)
        """For each revive queue the offset up to which its records are known."""
        self.unlocks: dict[OrderKey, int] = {}
        """When queues that are blocked by ordered pops are free again."""
        self._offsets: CommittedOffsets = tables.offsets
        self._turns = count()
        writer.waiting_pops = waiting

    def __repr__(self) -> str:
        return f"<Pop {self.leases!r} ordered={len(self.orders)} {self.waiting!r}>"

    # --- pop ----------------------------------------------------------------------------------------------------

    async def receive(self, request: PopRequest) -> Popped:
        """Messages that nobody else holds, or none when there were none in time."""
        found = self.begin_receive(request)
        popped = await found if isinstance(found, asyncio.Future) else found
        if popped.end_offset:
            await self.safe(popped.end_offset)
        return popped

    def begin_receive(self, request: PopRequest) -> Popped | asyncio.Future[Popped]:
        """`receive` at once; a future when the pop waits."""
        topic = self.check(request)
        popped = self._pop(request, topic)
        if popped.queues:
            return popped
        seconds = self._wait_seconds(request.born_millis, request.poll_millis)
        if seconds <= 0:
            return popped
        if self.waiting.is_full(request.topic, request.group, request.queue_id):
            popped.status = PopStatus.FULL
            return popped
        future: asyncio.Future[Popped] = asyncio.get_running_loop().create_future()
        waiter = Waiter(
            request.topic,
            request.group,
            request.queue_id,
            partial(self._pop_again, request),
            partial(self._nothing, request),
            (request.filter, request.attempt_id if request.is_orderly else None),
            future,
            request.owner,
        )
        self.waiting.add(waiter, seconds)
        if popped.rest and not request.is_orderly:  # a filter that has not seen all messages yet
            self.waiting.wake(request.topic, request.group)
        return future

    def _wait_seconds(self, born_millis: int, poll_millis: int) -> float:
        now = self.clock.now()
        waited = max(0, now - born_millis) if born_millis else 0
        return (poll_millis - waited) / 1000 - EARLIER_SECONDS

    def check(self, request: PopRequest) -> TopicConfig:
        """The topic of a request; raises BrokerError when the request may not be carried out."""
        broker = self.config.broker
        self.refuse_on_slave()
        if not broker.broker_permission & _READ:
            raise NoPermission(f"the broker[{broker.broker_ip1}] pop message is forbidden")
        if request.max_messages > MOST_MESSAGES:
            raise BrokerError(
                f"the broker[{broker.broker_ip1}] pop message's num is greater than {MOST_MESSAGES}",
                ResponseCode.INVALID_PARAMETER,
            )
        topic = self.readable_topic(request.topic)
        if request.queue_id >= topic.read_queue_nums:
            raise BrokerError(_illegal_queue(request.queue_id, topic, request.peer), ResponseCode.INVALID_PARAMETER)
        self.check_group(request.group)
        return topic

    def refuse_on_slave(self) -> None:
        if self.config.store.broker_role is BrokerRole.SLAVE:
            raise ServiceNotAvailable("this broker is a slave: its master leases messages and takes acknowledgements")

    def readable_topic(self, name: str) -> TopicConfig:
        topic = self.known_topic(name)
        if not topic.perm & _READ:
            raise NoPermission(f"the topic[{name}] peeking message is forbidden")
        return topic

    def known_topic(self, name: str) -> TopicConfig:
        topic = self.tables.topics.get(name)
        if topic is None:
            raise TopicNotExist(f"topic[{name}] not exist, apply first please! {FAQ}")
        return topic

    def check_group(self, name: str) -> None:
        group = self.tables.groups.find(name, auto_create=self.config.broker.auto_create_subscription_group)
        if group is None:
            raise SubscriptionGroupNotExist(f"subscription group [{name}] does not exist, {FAQ}")
        if not group.consume_enable:
            raise NoPermission(f"subscription group no permission, {name}")

    def _pop_again(self, request: PopRequest) -> Popped | None:
        self.refuse_on_slave()
        topic = self.tables.topics.get(request.topic)
        if topic is None:
            return None
        popped = self._pop(request, topic)
        if popped.queues:
            return popped
        if popped.rest and not request.is_orderly:
            self.waiting.wake(request.topic, request.group)
        return None

    def _nothing(self, request: PopRequest) -> Popped:
        queue = ORDERLY_REVIVE_QUEUE if request.is_orderly else next(self._turns) % REVIVE_QUEUES
        return Popped(request, self.clock.now(), queue, self.config.broker.broker_name)

    def _pop(self, request: PopRequest, topic: TopicConfig) -> Popped:
        """Take what is there."""
        popped = self._nothing(request)
        dice = random.randrange(100)  # noqa: S311  spreading, not secrecy
        retried = request.is_orderly
        if not retried and dice < _RETRY_FIRST_PERCENT:
            self._take_retries(popped, request)
            retried = True
        if request.queue_id != ANY_QUEUE:
            self._take(popped, request, request.topic, NORMAL, request.queue_id)
        else:
            queues = topic.read_queue_nums
            for number in range(queues):
                self._take(popped, request, request.topic, NORMAL, (dice + number) % queues)
        if not retried:
            self._take_retries(popped, request)
        if popped.queues:
            self._lease(popped, request)
        return popped

    def _take_retries(self, popped: Popped, request: PopRequest) -> None:
        """Take messages of the one retry topic that has any, or else of the usual one."""
        group, name = request.group, request.topic
        for version, flag in ((1, RETRY_V1), (2, RETRY_V2)):
            topic = pop_retry_topic(group, name, version=version)
            if topic in self.tables.topics and self._take(popped, request, topic, flag, 0):
                return

    def _take(self, popped: Popped, request: PopRequest, topic: str, flag: int, queue_id: int) -> bool:
        """Read messages of one queue, as far as the request has room for them; whether there were any."""
        group, wanted = request.group, request.filter
        room = max(1, request.max_messages) - popped.message_count
        offset = self._offset(topic, group, queue_id, request.init_mode if flag == NORMAL else 0)
        if request.is_orderly and self.orders.is_blocked((topic, group, queue_id), request.attempt_id, popped.pop_time):
            return False
        if room <= 0 or self._is_crowded(topic, group, queue_id):
            popped.rest += max(0, self.store.max_offset_of(topic, queue_id) - offset)
            return False
        for _ in range(_MOST_READS):
            read = self.store.read(
                topic, queue_id, offset, room, matches=wanted.matches_entry, matches_record=wanted.matches_record
            )
            if read.byte_count:
                slices = read.slices
                offsets = offsets_of(read, offset, slices)
                if request.is_orderly and (acked := self.orders.acked_from((topic, group, queue_id), offset)):
                    offsets = tuple(each for each in offsets if each not in acked)
                    slices = only(slices, offsets)
                if offsets:
                    next_offset = int(read.next_begin_offset)
                    found = PoppedQueue(topic, flag, queue_id, offset, next_offset, offsets, slices, read.byte_count)
                    popped.queues.append(found)
                    popped.rest += max(0, read.max_offset - next_offset)
                    return True
            elif read.status not in _SKIPPED and (read.status not in _LOST or read.next_begin_offset == offset):
                return False
            offset = int(read.next_begin_offset)
            self._offsets.commit(topic, group, queue_id, offset)  # nothing of all that is wanted
        popped.rest += max(0, self.store.max_offset_of(topic, queue_id) - offset)
        return False

    def _is_crowded(self, topic: str, group: str, queue_id: int) -> bool:
        broker = self.config.broker
        return (
            broker.enable_pop_message_threshold
            and self.leases.in_flight(topic, group, queue_id) > broker.pop_inflight_message_threshold
        )

    def _offset(self, topic: str, group: str, queue_id: int, init_mode: int) -> int:
        """The offset of a group; where a new group begins is committed at once."""
        offset = self._offsets.get(topic, group, queue_id)
        if offset is None or offset < 0:
            offset = self.first_offset(topic, queue_id, init_mode)
            self._offsets.commit(topic, group, queue_id, offset)
        return offset

    def first_offset(self, topic: str, queue_id: int, init_mode: int) -> int:
        store = self.store
        lowest = max(0, store.min_offset_of(topic, queue_id))
        if init_mode == 0 or (lowest == 0 and not store.is_beyond_memory(topic, queue_id, 0)):
            return lowest
        return max(0, store.max_offset_of(topic, queue_id) - 1)

    def _lease(self, popped: Popped, request: PopRequest) -> None:
        """Messages are given away: note it in the log, then in memory."""
        group = request.group
        popped.status = PopStatus.FOUND
        for queue in popped.queues:
            self.writer.statistics.got(queue.topic, group, len(queue.offsets), queue.byte_count)
        if request.is_orderly:
            for queue in popped.queues:  # the time of a pop is its name: no two pops of a queue share one
                before = self.orders.get((queue.topic, group, queue.queue_id))
                if before is not None and before.pop_time >= popped.pop_time:
                    popped.pop_time = before.pop_time + 1
            for queue in popped.queues:
                key = queue.topic, group, queue.queue_id
                queue.counts = self.orders.popped(
                    key, queue.offsets, popped.pop_time, popped.invisible_time, request.attempt_id
                )
                self.unlock_later(key)
            popped.end_offset = self._note_orders((queue.topic, group, queue.queue_id) for queue in popped.queues)
            return
        leases = [
            Lease(
                LeaseKey(queue.topic, group, queue.queue_id, queue.start_offset, popped.pop_time),
                queue.offsets,
                popped.invisible_time,
                popped.revive_queue,
            )
            for queue in popped.queues
        ]
        while any(lease.key in self.leases for lease in leases):  # an offset was set back within a millisecond
            popped.pop_time += 1
            for lease in leases:
                lease.key = lease.key._replace(pop_time=popped.pop_time)
        batch = self._append([self.records.checkpoint(lease, popped.pop_time) for lease in leases])
        for lease, queue, place in zip(leases, popped.queues, batch.places, strict=True):
            lease.revive_offset = place[2]
            self._add(lease)
            self._offsets.commit(queue.topic, group, queue.queue_id, queue.next_offset)
        popped.end_offset = batch.end_offset

    def _note_orders(self, keys: Iterable[OrderKey]) -> int:
        """Write the states of ordered pops to the log; returns its end."""
        now = self.clock.now()
        batch = self._append(self.records.order(key, self.orders.body(key), now) for key in keys)
        for state, (_, _, offset) in zip(batch.states, batch.places, strict=True):
            self.orders.noted(state.queue_id, offset)
        return batch.end_offset

    def _add(self, lease: Lease) -> None:
        self.leases.add(lease)
        if lease.visible_at < self.wakes_at:
            self.wanted.set()

    def unlock_later(self, key: OrderKey) -> None:
        """Wake waiting pops when a queue that is blocked now is free again."""
        self.unlocks[key] = until = self.orders.blocked_until(key)
        if until < self.wakes_at:
            self.wanted.set()

    def _append(self, messages: Iterable[NewMessage]) -> NewMessages:
        """Store records of the revive topic; raises ServiceNotAvailable when they cannot be stored now."""
        self.tables.topics.ensure(self.records.topic, REVIVE_QUEUES)
        batch = NewMessages()
        refusal = self.writer.add(batch, list(messages)) or self.writer.append(batch)
        if refusal is not None:
            raise ServiceNotAvailable(f"a record of the revive topic cannot be stored: {refusal.reason}")
        self.written(batch)
        return batch

    def written(self, batch: NewMessages) -> None:
        """Our own records need not be read again."""
        revive_topic, read_to = self.records.topic, self.read_to
        for state, (_, _, offset) in zip(batch.states, batch.places, strict=True):
            if state.topic == revive_topic and read_to[state.queue_id] == offset:
                read_to[state.queue_id] = offset + 1

    # --- acknowledge --------------------------------------------------------------------------------------------

    async def ack(self, topic: str, group: str, handles: Iterable[ReceiptHandle]) -> None:
        """The messages of these handles were consumed. Returns when that is as safe as this broker promises."""
        await self.safe(self.begin_ack(group, [(self.source(topic, group, handle), handle) for handle in handles]))

    def source(self, topic: str, group: str, handle: ReceiptHandle) -> str:
        """The topic that the message of a handle was read from. Raises BrokerError when topic or queue are not here."""
        if handle.retry_flag != NORMAL:
            topic = pop_retry_topic(group, topic, version=handle.retry_flag)
        self.check_place(topic, handle.queue_id, "")
        return topic

    def check_place(self, topic: str, queue_id: int, peer: str) -> None:
        known = self.known_topic(topic)
        if not 0 <= queue_id < known.read_queue_nums:
            raise MessageIllegal(_illegal_queue(queue_id, known, peer))

    def begin_ack(self, group: str, acks: Iterable[tuple[str, ReceiptHandle]]) -> int:
        """`ack` at once, for pairs of the topic that was read and a handle.

        Returns the offset up to which the log has to be safe; 0 when nothing was written.
        """
        together: dict[tuple[LeaseKey, int, int], list[int]] = {}
        for topic, handle in acks:
            key = LeaseKey(topic, group, handle.queue_id, handle.start_offset, handle.pop_time)
            together.setdefault((key, handle.revive_queue, handle.invisible_time), []).append(handle.offset)
        return self.acknowledge([(key, offsets, queue, time) for (key, queue, time), offsets in together.items()])

    def acknowledge(self, acks: Iterable[Ack]) -> int:
        """End leases. Returns as `begin_ack` does."""
        self.refuse_on_slave()
        now = self.clock.now()
        messages: list[NewMessage] = []
        ordered: list[int] = []
        ended: list[tuple[Lease, list[int]]] = []
        for key, offsets, revive_queue, invisible_time in acks:
            if revive_queue == ORDERLY_REVIVE_QUEUE:
                records = list(self._acknowledge_in_order(key, sorted(set(offsets)), invisible_time, now))
                ordered += range(len(messages), len(messages) + len(records))
                messages += records
                continue
            lease = self.leases.get(key)
            open_offsets = [] if lease is None else lease.open_of(offsets)
            if lease is not None and open_offsets:
                messages.append(
                    self.records.acknowledgement(key, open_offsets, lease.revive_queue, lease.visible_at, now)
                )
                ended.append((lease, open_offsets))
        if not messages:
            return 0
        batch = self._append(messages)
        for number in ordered:
            self.orders.noted(messages[number].queue_id, batch.places[number][2])
        for lease, open_offsets in ended:
            self.leases.acknowledge(lease, open_offsets)
        self._offsets.mark_unsaved()
        return batch.end_offset

    def _acknowledge_in_order(
        self, key: LeaseKey, offsets: list[int], invisible_time: int, now: int
    ) -> Iterable[NewMessage]:
        topic, group, queue_id, _, pop_time = key
        place = topic, group, queue_id
        for offset in offsets:
            committed = self._offsets.get(topic, group, queue_id)
            if committed is not None and offset < committed:
                continue
            try:
                next_offset = self.orders.acknowledge(place, offset, pop_time)
            except KeyError:
                raise MessageIllegal(
                    f"offset is illegal, key:{topic}@{group}@{queue_id}, commit:{offset}, "
                    f"store:{self.store.min_offset_of(topic, queue_id)}~{self.store.max_offset_of(topic, queue_id)}"
                ) from None
            if next_offset is None and self.orders.get(place) is None and offset == committed:
                next_offset = offset + 1  # its pop was forgotten: RocketMQ would pass over all messages before it
            if next_offset is None:
                continue
            self._offsets.commit(topic, group, queue_id, next_offset)
            if not self.orders.is_blocked(place, None, now):
                self.unlocks.pop(place, None)
                self.waiting.wake(topic, group)
            yield self.records.acknowledgement(
                key, [offset], queue_id % REVIVE_QUEUES, pop_time + invisible_time, now, next_offset=next_offset
            )

    # --- change the invisible time ------------------------------------------------------------------------------

    async def change_invisible_time(
        self, topic: str, group: str, handle: ReceiptHandle, invisible_millis: int
    ) -> ReceiptHandle:
        """Let a message be visible again so long from now; 0: at once. Returns the new handle of the message."""
        changed, end_offset = self.begin_change(self.source(topic, group, handle), group, handle, invisible_millis)
        await self.safe(end_offset)
        return changed

    def begin_change(
        self, topic: str, group: str, handle: ReceiptHandle, invisible_millis: int
    ) -> tuple[ReceiptHandle, int]:
        """`change_invisible_time` at once, for the topic that was read.

        Returns the new handle, and the offset up to which the log has to be safe. A handle whose lease is over changes
        nothing: the message comes again, or was acknowledged.
        """
        self.refuse_on_slave()
        now = self.clock.now()
        queue_id, offset = handle.queue_id, handle.offset
        if handle.is_orderly:
            place = topic, group, queue_id
            if not self.orders.change(place, offset, handle.pop_time, now + invisible_millis):
                return handle, 0
            self.unlock_later(place)
            changed = handle._replace(invisible_time=now + invisible_millis - handle.pop_time)
            return changed, self._note_orders((place,))
        old = LeaseKey(topic, group, queue_id, handle.start_offset, handle.pop_time)
        lease = self.leases.get(old)
        key = LeaseKey(topic, group, queue_id, offset, now)
        while key in self.leases or key == old:
            key = key._replace(pop_time=key.pop_time + 1)
        changed = handle._replace(start_offset=offset, pop_time=key.pop_time, invisible_time=invisible_millis)
        if lease is None or not lease.open_of((offset,)):
            return changed, 0
        again = Lease(key, (offset,), invisible_millis, lease.revive_queue)
        batch = self._append(
            (
                self.records.checkpoint(again, now),
                self.records.acknowledgement(old, [offset], lease.revive_queue, lease.visible_at, now),
            )
        )
        again.revive_offset = batch.places[0][2]
        self.leases.acknowledge(lease, (offset,))
        self._add(again)
        self._offsets.mark_unsaved()
        return changed, batch.end_offset

    # --- looking without taking ---------------------------------------------------------------------------------

    def has_message(self, topic: TopicConfig, request: PopRequest) -> bool:
        """Whether a pop might find something."""
        group, name = request.group, request.topic
        queues = range(topic.read_queue_nums) if request.queue_id == ANY_QUEUE else (request.queue_id,)
        for queue_id in queues:
            if request.is_orderly and self.orders.is_blocked(
                (name, group, queue_id), request.attempt_id, self.clock.now()
            ):
                continue
            if self.backlog(name, group, queue_id, request.init_mode) > 0:
                return True
        if request.is_orderly:
            return False
        retries = (pop_retry_topic(group, name, version=version) for version in (1, 2))
        return any(each in self.tables.topics and self.backlog(each, group, 0, 0) > 0 for each in retries)

    def backlog(self, topic: str, group: str, queue_id: int, init_mode: int = 0) -> int:
        """How many messages of a queue no consumer of a group has got."""
        offset = self._offsets.get(topic, group, queue_id)
        if offset is None or offset < 0:
            offset = self.first_offset(topic, queue_id, init_mode)
        return max(0, self.store.max_offset_of(topic, queue_id) - offset)

    def begin_notification(self, request: PopRequest) -> bool | asyncio.Future[bool] | None:
        """Whether there are messages; a future when the request waits for one; None when too many wait."""
        topic = self.check(request)
        if self.has_message(topic, request):
            return True
        seconds = self._wait_seconds(request.born_millis, request.poll_millis)
        if seconds <= 0:
            return False
        if self.waiting.is_full(request.topic, request.group, request.queue_id):
            return None
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        attempt = partial(self._has_message_now, request)
        waiter = Waiter(
            request.topic, request.group, request.queue_id, attempt, lambda: False, None, future, request.owner
        )
        self.waiting.add(waiter, seconds)
        return future

    def _has_message_now(self, request: PopRequest) -> bool | None:
        topic = self.tables.topics.get(request.topic)
        return True if topic is not None and self.has_message(topic, request) else None

    # --- safety -------------------------------------------------------------------------------------------------

    async def safe(self, end_offset: int) -> None:
        """Wait until the log up to here is as safe as this broker promises."""
        if end_offset and self.writer.makes_wait:
            await self.when_safe(end_offset)

    def when_safe(self, end_offset: int) -> asyncio.Future[Any]:
        """A future for `safe`; its error is what a reply has to say."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def tell(status: PutMessageStatus) -> None:
            if not future.done():
                if status is PutMessageStatus.PUT_OK:
                    future.set_result(None)
                else:
                    future.set_exception(ServiceNotAvailable(f"not safe yet: {status.value}"))

        self.writer.tell_when_safe(end_offset, tell)
        return future

    def check_invariants(self) -> None:
        """Raise AssertionError unless everything holds that holds always."""
        for lease in self.leases:
            assert lease.left, f"{lease} is over"
            assert lease.revive_offset >= 0, f"{lease} has no record"
        self.waiting.check()


def _illegal_queue(queue_id: int, topic: TopicConfig, peer: str) -> str:
    return (
        f"queueId[{queue_id}] is illegal, topic:[{topic.topic_name}] "
        f"topicConfig.readQueueNums:[{topic.read_queue_nums}] consumer:[/{peer}]"
    )
