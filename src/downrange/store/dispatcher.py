"""From the records of the log to their consume queues and the key index.

Messages that were just appended and records that are replayed, after a crash or on a slave, take this one way.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from typing import Final

from downrange.compiled import accelerated
from downrange.model.hashing import tags_code
from downrange.model.message import PhysicalOffset
from downrange.model.properties import DELAY, TAGS, find_property, find_tags_and_keys
from downrange.store.bulk_replay import BulkReplay
from downrange.store.errors import StoreError
from downrange.store.index.key_index import KeyIndex
from downrange.store.log.commit_log import CommitLog
from downrange.store.log.walk import Walk, WalkedRecord
from downrange.store.new_message import NewMessage
from downrange.store.new_messages import NewMessages, Place
from downrange.store.queue.queue_tails import ROW
from downrange.store.queue.queues import ConsumeQueues, QueueState
from downrange.store.refusals import Refusals

log = logging.getLogger(__name__)

_NOT_IN_A_QUEUE: Final = 4  # the bit of sysFlag that prepared and rolled-back messages have
_ROLLBACK: Final = 12  # these bits of sysFlag
_NO_HOST: Final = bytes(8)

# topic, properties, store timestamp -> the bit map of the filters that match
BitmapOf = Callable[[str, bytes, int], bytes]


@accelerated
def put_entries(
    messages: NewMessages, number: int, stop: int, rows: array[int], memory: bytearray
) -> tuple[int, list[int]]:
    """Put the queue entries of messages from `number` on, up to `stop` or the first message that is unusual.

    Return the number of the first message without an entry, and the rows of the queues that are full now and have to be
    written. `rows` and `memory` are those of `QueueTails`, with room for a block for each message.
    """
    places, states, sent = messages.places[number:stop], messages.states[number:stop], messages.messages[number:stop]
    for each, (place, state, message) in enumerate(zip(places, states, sent, strict=True), number):
        if message.sys_flag & _NOT_IN_A_QUEUE:
            continue
        if place[2] == 0 and state.queue.max_physical_offset > 0:
            return each, []  # the first message of a queue that has messages is unusual
        put_entry(messages, each, place, state)
    return stop, []


def put_entry(messages: NewMessages, number: int, place: Place, state: QueueState) -> None:
    """Put the queue entry of one stored message."""
    code = messages.code(number) if messages.special else None
    if code is None:
        code = tags_code(messages.tags(number) or "")
    physical_offset, size, queue_offset = place
    state.queue.put(queue_offset, physical_offset, size, code)
    if state.tails.rows[state.row] <= queue_offset:  # it is replayed: nothing has numbered it
        state.next_offset = state.queue.max_offset


class Dispatcher:
    """Applies records to everything that is derived from the log. For the store's own thread only."""

    def __init__(
        self,
        queues: ConsumeQueues,
        index: KeyIndex | None,
        delay_millis: tuple[int, ...],
        bitmap_of: BitmapOf | None = None,
    ) -> None:
        self.queues = queues
        self.index = index
        self._delay_millis = delay_millis
        self._bitmap_of = bitmap_of
        # Store time of the newest record that has its queue entry: what the checkpoint may claim after a flush.
        self.last_store_timestamp = 0

    def apply(self, messages: NewMessages, number: int, stop: int) -> None:
        """Enter messages that lie in the log, from `number` to `stop`, into their queues and the index.

        Entries that are there already stay as they are.
        """
        if messages.special:
            self._set_codes(messages, number, stop)
        at, queues = number, self.queues
        tails = queues.tails
        while at < stop:
            at, full = put_entries(messages, at, stop, tails.rows, tails.memory)
            self._spill(full)
            if at < stop:
                self._put_unusual(messages, at)
                at += 1
        self.last_store_timestamp = messages.timestamp(stop - 1)
        if self.index is not None:
            self.index.put(messages, number, stop)

    def apply_usual(self, messages: NewMessages) -> None:
        """Apply replayed messages up to the first that does not simply come next in its queue; cut off the rest."""
        queues = self.queues
        reached, full = put_entries(messages, 0, len(messages), queues.tails.rows, queues.tails.memory)
        self._spill(full)
        messages.cut(reached)
        if reached:
            self.last_store_timestamp = messages.timestamp(reached - 1)
            if self.index is not None:
                self.index.put(messages, 0, reached)

    def _spill(self, full: list[int]) -> None:
        for row in full:
            state = self.queues.by_row[row // ROW]
            assert state is not None
            state.queue.spill()

    def _put_unusual(self, messages: NewMessages, number: int) -> None:
        """Put the entry of a message that does not simply come next in its queue."""
        state, place = messages.states[number], messages.places[number]
        physical_offset, size, queue_offset = place
        if queue_offset == 0 and physical_offset + size > state.queue.max_physical_offset > 0:
            # A queue has one first message. This topic was deleted and made again: forget its former life.
            self.queues.destroy(state)
        put_entry(messages, number, place, state)

    def _set_codes(self, messages: NewMessages, number: int, stop: int) -> None:
        """Say what the entries of special queues hold."""
        states, places = messages.states, messages.places
        for special in messages.special:
            if number <= special < stop:
                text = messages.properties(special).decode("utf-8", "replace")
                physical_offset, size, _ = places[special]
                timestamp = messages.timestamp(special)
                messages.set_code(special, self._special_code(states[special], physical_offset + size, timestamp, text))

    def index_only(self, record: WalkedRecord) -> None:
        """Enter a replayed record into the index and leave its queue alone."""
        physical_offset, _, topic, _, _, sys_flag, store_timestamp, properties = record
        if self.index is not None and sys_flag & _ROLLBACK != _ROLLBACK:
            _, unique, keys = find_tags_and_keys(properties.decode("utf-8", "replace"))
            if unique or keys:
                name = topic.decode("utf-8", "replace")
                self.index.put_keys([(name, unique, keys, physical_offset, store_timestamp)])

    def _special_code(self, state: QueueState, physical_end: int, store_timestamp: int, text: str) -> int:
        """What stands in the entry of a delayed message, or of one with an ext unit, instead of a tag hash."""
        code = self._delivery_time(text, store_timestamp) if state.is_schedule else None
        if code is None:
            code = tags_code(find_property(text, TAGS) or "")
        if state.ext is None or physical_end <= state.queue.max_physical_offset:
            return code  # the second: the entry is there already, and so is its unit
        bitmap = self._bitmap_of(state.topic, text.encode(), store_timestamp) if self._bitmap_of else b""
        return state.ext.put(code, store_timestamp, bitmap)

    def _delivery_time(self, text: str, store_timestamp: int) -> int | None:
        delay = find_property(text, DELAY)
        if delay is None or not (delay.isascii() and delay.isdigit()):
            return None
        level = min(int(delay), len(self._delay_millis))
        return store_timestamp + self._delay_millis[level - 1] if level > 0 else None

    def replay(self, record: WalkedRecord) -> NewMessages | None:
        """Apply one record of a walk; return it when it takes part in a queue."""
        physical_offset, size, topic, queue_id, queue_offset, sys_flag, store_timestamp, properties = record
        state = self.queues.of_record(topic, queue_id)
        if state is None:
            return None
        messages = NewMessages()
        message = NewMessage(state.topic, queue_id, b"", properties, 0, _NO_HOST, _NO_HOST, 0, sys_flag)
        messages.add(state, message, True)
        messages.place([(physical_offset, size, queue_offset)], store_timestamp)
        self.apply(messages, 0, 1)
        return None if sys_flag & _NOT_IN_A_QUEUE else messages


class LogFollower:
    """Lets queues and index follow the log, in order and without gaps.

    Holds always: every record before `offset` is in its queue and in the index, and no record that ends behind `limit`.
    For the store's own thread.
    """

    def __init__(self, commit_log: CommitLog, dispatcher: Dispatcher, refusals: Refusals, *, is_slave: bool) -> None:
        self.offset = PhysicalOffset(0)
        self.limit: int | None = None
        """The confirm offset of a broker under a controller: records that end behind it are in no queue yet."""
        self.at_once = not commit_log.segments.is_pooled
        """Can records be applied when they were appended? Those in the transient pool only after a commit."""
        self.dispatcher = dispatcher
        self.is_slave = is_slave
        self._commit_log = commit_log
        self._refusals = refusals

    def __repr__(self) -> str:
        return f"<LogFollower offset={self.offset} behind={self.behind_bytes}>"

    @property
    def behind_bytes(self) -> int:
        # A slave may know that the rest of a file is blank before it has got it.
        return max(0, self._commit_log.max_offset - self.offset)

    def set_limit(self, limit: int | None) -> None:
        """Move the limit; `dispatch_pending` then applies what lies before it."""
        self.limit = limit
        self.at_once = limit is None and not self._commit_log.segments.is_pooled

    def dispatch_pending(self, applied: Callable[[NewMessages], None] = lambda messages: None) -> None:
        """Apply what lies in the log beyond the last applied record; `applied` is called with the messages."""
        commit_log, limit = self._commit_log, self.limit
        while self.offset < (commit_log.max_offset if limit is None else min(limit, commit_log.max_offset)):
            bulk = BulkReplay(self.dispatcher, applied)
            if limit is not None:
                bulk.end = PhysicalOffset(limit)
            walk = commit_log.walk(max(self.offset, commit_log.min_offset), bulk=bulk)
            try:
                for record in walk:
                    self.offset = record.physical_offset  # until this one is applied, too
                    if limit is not None and record.physical_offset + record.size > limit:
                        self._refusals.allow("dispatch")
                        return
                    messages = self.dispatcher.replay(record)
                    if messages is not None:
                        applied(messages)
            except (OSError, StoreError) as error:
                self.failed(error)
                return
            self.offset = walk.end
            if walk.records:
                commit_log.last_store_timestamp = walk.last_timestamp
            if self.is_slave:
                if walk.end < commit_log.max_offset and not walk.is_cut_short:
                    self._refuse_to_follow(walk)
                    return
                break  # the rest of this record is still under way
            if walk.damage is None:
                break
            log.error("cannot dispatch: %s; the rest of this file is skipped", walk.damage)
            self.offset = min(commit_log.next_file_offset(self.offset), commit_log.max_offset)
        self._refusals.allow("dispatch")

    def failed(self, error: Exception) -> None:
        """The log has the record, its queue does not: refuse more until `dispatch_pending` got through."""
        log.error("dispatch failed offset=%d: %s", self.offset, error)
        self._refusals.refuse("dispatch", f"a consume queue or the index cannot be written: {error}")

    def _refuse_to_follow(self, walk: Walk) -> None:
        """What the master sent cannot be read: its log is not the continuation of this one."""
        found = walk.damage or f"no record at {walk.end}: zeros"
        text = f"the log from the master does not fit this one: {found}; give this slave an empty directory"
        if self._refusals.get("master's log") != text:
            log.error("cannot follow: %s", text)
        self._refusals.refuse("master's log", text)
