"""Pops: messages that nobody else holds are read and leased."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from itertools import count
from random import random
from typing import Final

from downrange.broker.pop.leases import Lease, LeaseKey, bits_of
from downrange.broker.pop.looking import Looking
from downrange.broker.pop.popped import Popped, PoppedQueue, PopRequest, bits_of_read, only
from downrange.broker.pop.records import REVIVE_QUEUES
from downrange.broker.pop.state import PopState, illegal_queue
from downrange.broker.pull_checks import FAQ
from downrange.model.topics import Perm, TopicConfig, pop_retry_topic
from downrange.protocol.bodies.pop import (
    ANY_QUEUE,
    MOST_MESSAGES,
    NORMAL,
    ORDERLY_REVIVE_QUEUE,
    RETRY_V1,
    RETRY_V2,
)
from downrange.protocol.codes import ResponseCode
from downrange.protocol.errors import BrokerError, NoPermission, ServiceNotAvailable, SubscriptionGroupNotExist
from downrange.store.config import BrokerRole
from downrange.store.queue.backlog import Records, pieces_of
from downrange.store.queue.queue_entry import ENTRY_SIZE
from downrange.store.read_result import GetMessageStatus

log = logging.getLogger(__name__)

# This part of all pops looks into the retry topic first, or messages there would starve behind a long backlog.
_RETRIES_FIRST: Final = 0.2
# A filter that wants next to nothing: so often a pop reads on in one queue before others get their turn.
_MOST_READS: Final = 32
_READ: Final = int(Perm.READ)
_SLAVE: Final = BrokerRole.SLAVE
_LOST: Final = (
    GetMessageStatus.OFFSET_TOO_SMALL,
    GetMessageStatus.OFFSET_OVERFLOW_BADLY,
    GetMessageStatus.OFFSET_FOUND_NULL,
)
_SKIPPED: Final = (GetMessageStatus.NO_MATCHED_MESSAGE, GetMessageStatus.MESSAGE_WAS_REMOVING)


class Receiving:
    """Takes messages for consumers, in two steps of one turn of the loop: `take` for each pop, `lease` for all of them.

    Ordered pops are leased when they are taken: they take messages that are still at the offset of the group.

    Holds always: `take` moves the offset of a group behind what it found, and `lease` moves the offset back if what was
    found could not be leased.
    """

    def __init__(self, state: PopState, looking: Looking) -> None:
        self._state = state
        self._looking = looking
        self._read = state.store.read
        self._turns = count()
        state.waiting.before_answers = self.lease

    # --- checks -------------------------------------------------------------------------------------------------

    def check(self, request: PopRequest, peer: str) -> TopicConfig:
        """The topic of a request; raises BrokerError when the request may not be carried out."""
        state = self._state
        broker = state.config.broker
        topic, group = state.tables.topics.get(request.topic), state.tables.groups.get(request.group)
        if (
            topic is not None
            and group is not None
            and group.consume_enable
            and broker.broker_permission & topic.perm & _READ
            and request.max_messages <= MOST_MESSAGES
            and request.queue_id < topic.read_queue_nums
            and state.config.store.broker_role is not _SLAVE
        ):
            return topic  # nearly always; otherwise RocketMQ's order decides what is named
        state.refuse_on_slave()
        if not broker.broker_permission & _READ:
            raise NoPermission(f"the broker[{broker.broker_ip1}] pop message is forbidden")
        if request.max_messages > MOST_MESSAGES:
            raise BrokerError(
                f"the broker[{broker.broker_ip1}] pop message's num is greater than {MOST_MESSAGES}",
                ResponseCode.INVALID_PARAMETER,
            )
        topic = self.readable_topic(request.topic)
        if request.queue_id >= topic.read_queue_nums:
            raise BrokerError(illegal_queue(request.queue_id, topic, peer), ResponseCode.INVALID_PARAMETER)
        self.check_group(request.group)
        return topic

    def readable_topic(self, name: str) -> TopicConfig:
        topic = self._state.known_topic(name)
        if not topic.perm & _READ:
            raise NoPermission(f"the topic[{name}] peeking message is forbidden")
        return topic

    def check_group(self, name: str) -> None:
        state = self._state
        group = state.tables.groups.find(name, auto_create=state.config.broker.auto_create_subscription_group)
        if group is None:
            raise SubscriptionGroupNotExist(f"subscription group [{name}] does not exist, {FAQ}")
        if not group.consume_enable:
            raise NoPermission(f"subscription group no permission, {name}")

    # --- taking -------------------------------------------------------------------------------------------------

    def nothing(self, request: PopRequest) -> Popped:
        """The answer to a pop that finds nothing."""
        return self._begin(request, self._state.clock.now())

    def _begin(self, request: PopRequest, now: int) -> Popped:
        queue = ORDERLY_REVIVE_QUEUE if request.is_orderly else next(self._turns) % REVIVE_QUEUES
        return Popped(request, now, queue, self._state.config.broker.broker_name)

    def take(self, request: PopRequest, topic: TopicConfig, now: int, count: int = 1) -> list[Popped]:
        """Messages that are there, for so many pops that ask for the same; of ordered pops, for one.

        Nobody gets them unless `lease` follows in this turn of the loop. If one of the pops fails, all fail.
        """
        pops: list[Popped] = []
        try:
            while len(pops) < count:
                if not request.is_plain or not self._take_new(pops, request, topic, now, count):
                    popped = self._begin(request, now)
                    pops.append(popped)
                    self._take_all(popped, topic)
        except Exception:
            for popped in reversed(pops):
                self._give_back(popped)
            raise
        if request.is_orderly and pops[0].queues:
            self._lease_in_order(pops[0])  # at once: it is what blocks the queues for others
        return pops

    def _give_back(self, popped: Popped) -> None:
        """Move the offset of the group back before messages that were taken and could not be leased."""
        if not popped.request.is_orderly:
            for queue in reversed(popped.queues):
                self._state.offsets.commit(queue.topic, popped.request.group, queue.queue_id, queue.start_offset)

    def _take_new(self, pops: list[Popped], request: PopRequest, topic: TopicConfig, now: int, count: int) -> bool:
        """Add pops that find what is usual until there are so many, and say whether there was one.

        Usual are messages in the last file of the log, while no messages of the group wait in its retry topics.
        """
        state, name, group = self._state, request.topic, request.group
        if state.config.broker.enable_pop_message_threshold or self._has_retries(request):
            return False
        queues, begun = topic.read_queue_nums, len(pops)
        turns = int(random() * queues), count - begun  # noqa: S311  spreading, not secrecy
        offsets = state.offsets.of_queues(name, group)
        found, log_file = state.store.take_unread(name, queues, offsets, turns, max(1, request.max_messages))
        if log_file is None:
            return False
        view, start, readable = log_file.view, log_file.start, log_file.readable
        is_moved = False
        for left, taken in found:
            popped = self._begin(request, now)
            popped.rest = left
            is_moved = is_moved or bool(taken)
            popped.queues = [
                PoppedQueue(
                    name,
                    NORMAL,
                    (queue_id, offset),
                    (1 << len(entries) // ENTRY_SIZE) - 1,
                    (entries, view, start, readable),
                    byte_count,
                )
                for queue_id, offset, entries, byte_count in taken
            ]
            pops.append(popped)
        if is_moved:
            state.offsets.moved(name, group)
        return len(pops) > begun

    def _has_retries(self, request: PopRequest) -> bool:
        """Whether messages of the group wait in one of its retry topics."""
        state, group = self._state, request.group
        for topic, _ in _retry_topics(group, request.topic):
            if topic in state.tables.topics:
                offset = state.offsets.get(topic, group, 0)
                if offset is None or offset != state.store.max_offset_of(topic, 0):
                    return True
        return False

    def _take_all(self, popped: Popped, topic: TopicConfig) -> None:
        """Look into all queues that a request names, and into the retry topics."""
        request = popped.request
        retries_first = not request.is_orderly and random() < _RETRIES_FIRST  # noqa: S311  spreading, not secrecy
        if retries_first:
            self._take_retries(popped, request)
        if request.queue_id == ANY_QUEUE:
            queues = topic.read_queue_nums
            first = int(random() * queues)  # noqa: S311
            for number in range(first, first + queues):
                self._take_queue(popped, number % queues)
        else:
            self._take_queue(popped, request.queue_id)
        if not (request.is_orderly or retries_first):
            self._take_retries(popped, request)

    def _take_queue(self, popped: Popped, queue_id: int) -> None:
        request = popped.request
        offset = self._offset(request.topic, request.group, queue_id, request.init_mode)
        self._take(popped, request.topic, NORMAL, queue_id, offset)

    def _offset(self, topic: str, group: str, queue_id: int, init_mode: int) -> int:
        """Where a group goes on in a queue."""
        offset = self._state.offsets.get(topic, group, queue_id)
        return self._begin_queue(topic, group, queue_id, init_mode) if offset is None or offset < 0 else offset

    def _begin_queue(self, topic: str, group: str, queue_id: int, init_mode: int) -> int:
        """Where a group begins that is new: that is committed at once."""
        offset = self._looking.first_offset(topic, queue_id, init_mode)
        self._state.offsets.commit(topic, group, queue_id, offset)
        return offset

    def _take_retries(self, popped: Popped, request: PopRequest) -> None:
        """Take messages of the one retry topic that has any, or else of the usual one."""
        topics = self._state.tables.topics
        for topic, flag in _retry_topics(request.group, request.topic):
            if topic in topics and self._take(popped, topic, flag, 0, self._offset(topic, request.group, 0, 0)):
                return

    def _take(self, popped: Popped, topic: str, flag: int, queue_id: int, offset: int) -> bool:
        """Read messages of a queue from `offset` on, as many as the request has room for; whether there were any."""
        state, request, room = self._state, popped.request, popped.room
        group, offsets = request.group, state.offsets
        if request.is_orderly and state.orders.is_blocked(
            (topic, group, queue_id), request.attempt_id, popped.pop_time
        ):
            return False
        if room <= 0 or self._is_crowded(topic, group, queue_id):
            popped.rest += max(0, state.store.max_offset_of(topic, queue_id) - offset)
            return False
        wanted = request.filter
        for _ in range(_MOST_READS):
            read = self._read(
                topic, queue_id, offset, room, matches=wanted.matches_entry, matches_record=wanted.matches_record
            )
            next_offset: int = read.next_begin_offset
            if byte_count := read.byte_count:
                bits, records = bits_of_read(read, offset), read.records
                if request.is_orderly:
                    bits, records = self._without_acked((topic, group, queue_id), offset, bits, records, byte_count)
                else:
                    offsets.commit(topic, group, queue_id, next_offset)
                if bits:
                    popped.queues.append(PoppedQueue(topic, flag, (queue_id, offset), bits, records, byte_count))
                    popped.rest += max(0, read.max_offset - next_offset)
                    return True
            elif read.status not in _SKIPPED and (read.status not in _LOST or next_offset == offset):
                return False
            offset = next_offset
            offsets.commit(topic, group, queue_id, offset)  # nothing of all that is wanted
        popped.rest += max(0, state.store.max_offset_of(topic, queue_id) - offset)
        return False

    def _without_acked(
        self, key: tuple[str, str, int], start: int, bits: int, records: Records, byte_count: int
    ) -> tuple[int, Records]:
        """What is left of messages of an ordered pop without those that were acknowledged before."""
        acked = bits_of(start, self._state.orders.acked_from(key, start)) & bits
        if acked:
            bits -= acked
            records = only(pieces_of(records, byte_count), start, bits)
        return bits, records

    def _is_crowded(self, topic: str, group: str, queue_id: int) -> bool:
        broker = self._state.config.broker
        return (
            broker.enable_pop_message_threshold
            and self._state.leases.in_flight(topic, group, queue_id) > broker.pop_inflight_message_threshold
        )

    # --- leasing ------------------------------------------------------------------------------------------------

    def lease(self, pops: Sequence[Popped]) -> None:
        """Messages are given away: note it in the log, then in memory. `Popped.error` says where that failed."""
        try:
            self._lease(pops)
        except Exception as error:
            log.exception("messages could not be leased pops=%d", len(pops))
            for popped in reversed(pops):
                if not popped.end_offset:  # it has no checkpoint
                    popped.error = ServiceNotAvailable(f"messages could not be leased: {error}")
                    self._give_back(popped)

    def _lease(self, pops: Sequence[Popped]) -> None:
        made: list[tuple[Popped, PoppedQueue]] = []
        leases: list[Lease] = []
        state = self._state
        got, held = state.writer.statistics.got, state.leases
        for popped in pops:
            request, queues = popped.request, popped.queues
            group = request.group
            for queue in queues:
                got(queue.topic, group, queue.bits.bit_count(), queue.byte_count)
            if request.is_orderly:
                continue
            keys = _keys(popped)
            while not held.isdisjoint(keys):  # an offset may be set back within a millisecond
                popped.pop_time += 1
                keys = _keys(popped)
            for key, queue in zip(keys, queues, strict=True):
                leases.append(Lease(key, queue.bits, request.invisible_millis, popped.revive_queue))
                made.append((popped, queue))
        if made:
            self._note(made, leases)

    def _note(self, made: list[tuple[Popped, PoppedQueue]], leases: list[Lease]) -> None:
        """Store the checkpoints of leases, and give back what has none."""
        state = self._state
        error: BrokerError | None = None
        stored = 0
        try:
            batch = state.append_checkpoints(leases)
        except ServiceNotAvailable as refused:
            error = refused
        else:
            stored, end_offset = batch.stored, batch.end_offset
            for (popped, _), lease, place in zip(made, leases, batch.places, strict=False):
                lease.revive_offset = place[2]
                popped.end_offset = end_offset
            state.hold(leases[:stored])
        for popped, queue in reversed(made[stored:]):
            popped.error = error or ServiceNotAvailable("a checkpoint could not be stored: pop again")
            state.offsets.commit(queue.topic, popped.request.group, queue.queue_id, queue.start_offset)

    def _lease_in_order(self, popped: Popped) -> None:
        state, group, attempt_id = self._state, popped.request.group, popped.request.attempt_id
        keys = [(queue.topic, group, queue.queue_id) for queue in popped.queues]
        for key in keys:  # the time of a pop is its name: no two pops of a queue share one
            before = state.orders.get(key)
            if before is not None and before.pop_time >= popped.pop_time:
                popped.pop_time = before.pop_time + 1
        for key, queue in zip(keys, popped.queues, strict=True):
            queue.counts = state.orders.popped(
                key, tuple(queue.offsets), popped.pop_time, popped.invisible_time, attempt_id
            )
            state.unlock_later(key)
        try:
            popped.end_offset = state.note_orders(keys)
        except ServiceNotAvailable as error:
            popped.error = error


def _keys(popped: Popped) -> list[LeaseKey]:
    """The keys of the leases that a pop makes."""
    group, pop_time = popped.request.group, popped.pop_time
    return [LeaseKey(one.topic, group, one.queue_id, one.start_offset, pop_time) for one in popped.queues]


@lru_cache(maxsize=4096)
def _retry_topics(group: str, topic: str) -> tuple[tuple[str, int], ...]:
    return tuple(
        (pop_retry_topic(group, topic, version=version), flag) for version, flag in ((1, RETRY_V1), (2, RETRY_V2))
    )
