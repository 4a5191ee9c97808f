"""Brings messages back that were not acknowledged in time, and all leases after a restart. [PopReviveService]

Leases are in memory, with a record each in the revive topic. Two numbers for each revive queue are saved together with
the offsets of the groups, in consumerOffset.json:

* of CID_RMQ_SYS_REVIVE_GROUP: the last record that is no longer needed (Java goes on behind it, too),
* of `SEEN_GROUP`, which is ours: the end of the queue then. Checkpoints from there on are younger than the offsets of
  groups in the file, which therefore have to be moved behind the messages of these checkpoints. Those of Java, which
  went through the timer topic, never are: Java's offsets are moved before.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import replace
from time import perf_counter
from typing import Final

from downrange.broker.delayed import stored_text
from downrange.broker.pop.leases import Lease, LeaseKey, bits_of
from downrange.broker.pop.records import REVIVE_QUEUES, Acknowledged, OrderBody, came_by_timer, read_record
from downrange.broker.pop.state import PopState
from downrange.clock import sleep_or_set
from downrange.model import properties as names
from downrange.model.properties import decode_properties
from downrange.model.record import CorruptRecord
from downrange.model.topics import RETRY_PREFIX, REVIVE_GROUP, pop_retry_topic, popped_topic
from downrange.store.kept_message import KeptMessage, read_kept
from downrange.store.new_message import NewMessage
from downrange.store.new_messages import NewMessages

log = logging.getLogger(__name__)

SEEN_GROUP: Final = "CID_RMQ_SYS_REVIVE_SEEN"
# Most leases ended in one turn of the loop, for which others have to wait.
_TURN_LEASES: Final = 64
# The wall clock may be set by an operator, and Java's records come without a word: look at least this often.
_LONGEST_PAUSE_SECONDS: Final = 1.0
_RETRY_MILLIS: Final = 1000
_CLEAN_SECONDS: Final = 60.0
_READ_AT_ONCE: Final = 512
_MOST_TIMES: Final = 0x7FFFFFFF
_FAILURES_PER_LOG_LINE: Final = 600


class Revival:
    """Ends leases whose time is over: their messages go to the retry topic, and waiting pops are woken.

    Holds always: the copy of a message is in the log before the record that its lease is over.
    """

    def __init__(self, pop: PopState) -> None:
        self._pop = pop
        self._clock = pop.clock
        self._offsets = pop.tables.offsets
        self._failures = 0
        self._cleaned_at = 0.0

    # --- after a restart ----------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Read the records that are still needed, at the start of a master and when a slave becomes master."""
        pop, topic = self._pop, self._pop.records.topic
        pop.leases.clear()
        pop.unlocks.clear()
        self._offsets.on_table = self._commit_positions
        known = pop.tables.topics.get(topic)
        if known is not None and known.read_queue_nums < REVIVE_QUEUES:  # found by its queues after a crash
            pop.tables.topics.put(replace(known, read_queue_nums=REVIVE_QUEUES, write_queue_nums=REVIVE_QUEUES))
        for queue_id in range(REVIVE_QUEUES):
            finished = self._offsets.get(topic, REVIVE_GROUP, queue_id)
            seen = self._offsets.get(topic, SEEN_GROUP, queue_id)
            lowest = pop.store.min_offset_of(topic, queue_id)
            start = max(lowest, 0 if finished is None else finished + 1)
            self._read(queue_id, start, 0 if seen is None else seen)
        pop.own_records = 0
        for group in {lease.key.group for lease in pop.leases}:  # one that came just before a crash is not in its file
            pop.tables.groups.find(group, auto_create=pop.config.broker.auto_create_subscription_group)
        if pop.leases:
            log.info("leases recovered leases=%d", len(pop.leases))

    def rest(self) -> None:
        """The broker is no master any more: another one answers pops, ends leases, and says how far it is."""
        self._pop.leases.clear()
        self._pop.unlocks.clear()
        self._pop.waiting.wake_all()
        self._offsets.on_table = lambda: None

    def read_on(self) -> None:
        """Take records that others put into the revive topic: a timer that held those of Java."""
        pop, topic = self._pop, self._pop.records.topic
        ends: dict[int, int] = {queue_id: pop.store.max_offset_of(topic, queue_id) for queue_id in pop.read_to}
        new = sum(ends.values()) - sum(pop.read_to.values())
        if pop.store.follower.at_once and new == pop.own_records:  # else ours may come into their queues later
            pop.read_to = ends
        else:
            for queue_id, read_to in list(pop.read_to.items()):
                self._read(queue_id, read_to, ends[queue_id], only_of_timer=True)
        pop.own_records = 0

    def _read(self, queue_id: int, start: int, seen: int, *, only_of_timer: bool = False) -> None:
        store, topic = self._pop.store, self._pop.records.topic
        offset = start
        while entries := store.entries(topic, queue_id, offset, _READ_AT_ONCE):
            for entry in entries:
                kept = self._kept(entry.physical_offset)
                if kept is not None and (not only_of_timer or came_by_timer(kept)):
                    self._apply(kept, is_new=offset >= seen and not came_by_timer(kept))
                offset += 1
        self._pop.read_to[queue_id] = offset

    def _kept(self, physical_offset: int) -> KeptMessage | None:
        record = self._pop.store.record_at(physical_offset)
        try:
            return None if record is None else read_kept(record)
        except CorruptRecord:
            return None

    def _apply(self, kept: KeptMessage, *, is_new: bool) -> None:
        """Repeat what a record says; `is_new` if it is younger than the offsets of the groups."""
        leases = self._pop.leases
        match read_record(kept):
            case Lease() as lease:
                if lease.held:
                    leases.add([lease])
                elif (replaced := leases.get(lease.key)) is not None:
                    leases.end([(replaced, replaced.held)])
                self._pop.wanted.set()
                if is_new and lease.held:
                    self._raise_offset(*lease.key[:3], lease.key.start_offset + lease.held.bit_length())
            case Acknowledged(key=key, offsets=offsets, next_offset=next_offset):
                if next_offset is None:
                    known = leases.get(key)
                    if known is not None:
                        leases.end([(known, bits_of(key.start_offset, offsets))])
                else:
                    self._repeat_in_order(key, offsets)
                    self._pop.orders.noted(kept.message.queue_id, kept.queue_offset)
                    if is_new:
                        self._raise_offset(*key[:3], next_offset)
            case OrderBody(topic=name, group=group, queue_id=queue_id, state=state):
                self._pop.orders.repeat((name, group, queue_id), state)
                self._pop.orders.noted(kept.message.queue_id, kept.queue_offset)
                self._pop.unlock_later((name, group, queue_id))
            case None:
                log.warning("record of the revive topic ignored queue=%d", kept.message.queue_id)

    def _repeat_in_order(self, key: LeaseKey, offsets: tuple[int, ...]) -> None:
        for offset in offsets:
            if self._pop.orders.get(key[:3]) is not None:
                with suppress(KeyError):  # the state is that of another pop
                    self._pop.orders.acknowledge(key[:3], offset, key.pop_time)

    def _raise_offset(self, topic: str, group: str, queue_id: int, offset: int) -> None:
        committed = self._offsets.get(topic, group, queue_id)
        if committed is None or committed < offset:
            self._offsets.commit(topic, group, queue_id, offset)

    def _commit_positions(self) -> None:
        """Add our two numbers for each revive queue to the offsets that are about to be saved."""
        topic = self._pop.records.topic
        if topic not in self._pop.tables.topics:
            return
        for queue_id, (needed, end) in self._pop.needed_records().items():
            for group, offset in ((REVIVE_GROUP, needed - 1), (SEEN_GROUP, end)):
                if end and self._offsets.get(topic, group, queue_id) != offset:
                    self._offsets.commit(topic, group, queue_id, offset)

    # --- running ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Revive messages for as long as the broker is a master."""
        wanted = self._pop.wanted
        while True:
            wanted.clear()
            seconds = self.revive()
            self._pop.wakes_at = self._clock.now() + round(seconds * 1000)
            if seconds <= 0:
                await asyncio.sleep(0)
                continue
            await sleep_or_set(self._clock, seconds, wanted)

    def revive(self) -> float:
        """End leases that are due, as many as one turn may; return the seconds until more are due."""
        pop, now, began = self._pop, self._clock.now(), perf_counter()
        self.read_on()
        for lease in pop.leases.due(now, _TURN_LEASES):
            self._end(lease, now)
        for key, until in list(pop.unlocks.items()):
            if until <= now:
                del pop.unlocks[key]
                pop.waiting.wake(key[0], key[1])
        if self._clock.monotonic() - self._cleaned_at > _CLEAN_SECONDS:
            self._cleaned_at = self._clock.monotonic()
            self._clean(now)
        pop.scan_millis.observe((perf_counter() - began) * 1000)
        times = [*pop.unlocks.values()]
        if (next_due := pop.leases.next_due) is not None:
            times.append(next_due)
        if not times:
            return _LONGEST_PAUSE_SECONDS
        return min(max(0, min(times) - now) / 1000, _LONGEST_PAUSE_SECONDS)

    def _end(self, lease: Lease, now: int) -> None:
        """Copy the messages of a lease to the retry topic, and end the lease."""
        pop = self._pop
        topic, group, queue_id, _, pop_time = lease.key
        left = lease.left
        copies: list[NewMessage] = []
        if topic in pop.tables.topics and pop.tables.groups.get(group) is not None:
            retry = self._retry_topic(topic, group)
            found = (self._copy(topic, queue_id, offset, retry, pop_time) for offset in left)
            copies = [copy for copy in found if copy is not None]
        batch = NewMessages()
        refusal = None
        for copy in copies:
            refusal = refusal or pop.writer.add(batch, (copy,))
        over = pop.records.acknowledgement(lease, lease.held, now)
        refusal = refusal or pop.writer.add(batch, (over,)) or pop.writer.append(batch)
        if refusal is not None:
            if self._failures % _FAILURES_PER_LOG_LINE == 0:
                log.error(
                    "messages cannot be revived, trying on topic=%s group=%s status=%s reason=%s",
                    topic, group, refusal.status.value, refusal.reason,
                )  # fmt: skip
            self._failures += 1
            pop.leases.postpone(lease, now + _RETRY_MILLIS)
            return
        self._failures = 0
        pop.own_records += 1
        if copies:
            pop.revived[popped_topic(topic, group), group] += len(copies)
        pop.acknowledgements += 1
        pop.leases.end([(lease, lease.held)])
        self._offsets.mark_unsaved()
        if copies:
            pop.waiting.wake(popped_topic(topic, group), group)

    def _retry_topic(self, topic: str, group: str) -> str:
        """The retry topic for messages of a topic, which exists then; messages of a retry topic go there again."""
        if topic.startswith(RETRY_PREFIX) and popped_topic(topic, group) != topic:
            return topic
        version = 2 if self._pop.config.broker.enable_retry_topic_v2 else 1
        retry = pop_retry_topic(group, topic, version=version)
        self._pop.tables.topics.ensure(retry, 1)
        if self._offsets.get(retry, group, 0) is None:
            self._offsets.commit(retry, group, 0, 0)
        return retry

    def _copy(self, topic: str, queue_id: int, offset: int, retry: str, pop_time: int) -> NewMessage | None:
        """A message as it comes again; None when it is no longer in the store."""
        physical_offset = self._pop.store.physical_offset_of(topic, queue_id, offset)
        kept = self._kept(physical_offset) if physical_offset >= 0 else None
        if kept is None:
            log.warning("message not revived reason=it is gone topic=%s queue=%d offset=%d", topic, queue_id, offset)
            return None
        message, properties = kept.message, decode_properties(kept.text)
        if message.reconsume_times == 0 or names.FIRST_POP_TIME not in properties:
            properties[names.FIRST_POP_TIME] = str(pop_time)
        message.topic, message.queue_id = retry, 0
        message.properties = stored_text(properties)
        message.born_host = message.store_host = self._pop.host
        message.reconsume_times = min(message.reconsume_times + 1, _MOST_TIMES)
        message.prepared_transaction_offset = 0
        return message

    def _clean(self, now: int) -> None:
        """Write the records of leases again that are so old that their files may be deleted; forget old orders."""
        pop = self._pop
        pop.orders.clean(now)
        old = now - max(1, pop.config.store.file_reserved_time) * 3600 * 1000 // 2
        for lease in [lease for lease in pop.leases if lease.key.pop_time < old]:
            result = pop.writer.append_one(pop.records.checkpoint(lease, now))
            lease.revive_offset = int(result.queue_offset) or lease.revive_offset
