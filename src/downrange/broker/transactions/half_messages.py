"""Which half messages wait for the end of their transaction."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

from downrange.broker.groups import CommittedOffsets
from downrange.broker.message_writer import MessageWriter
from downrange.broker.transactions.records import again, committed, number, operation, real_topic
from downrange.model import properties as names
from downrange.model.message import StoredMessage, TopicQueue
from downrange.model.record import CorruptRecord, decode_record
from downrange.model.topics import HALF_TOPIC, OP_HALF_TOPIC, TRANSACTION_GROUP
from downrange.model.transaction_ops import ended_offsets
from downrange.store.kept_message import KeptMessage, read_kept
from downrange.store.message_store import MessageStore
from downrange.store.new_message import AppendResult, NewMessage, PutMessageStatus

log = logging.getLogger(__name__)

T = TypeVar("T")

_QUEUE_ID: Final = 0
_READ_ENTRIES: Final = 1000
_PUT_OK: Final = PutMessageStatus.PUT_OK


class HalfMessages:
    """The half queue of this broker, and which of its messages have ended.

    Holds always: every half message from `first` on that is not in `_ended` waits for its end, and none before `first`
    does. `first` and the place in the op queue are kept as offsets of the group CID_RMQ_SYS_TRANS, where RocketMQ keeps
    them; `first` passes a message only when its end is on disk, so that a power cut cannot lose an end for good.
    A message that waits takes no memory here; one that has ended does until all before it have ended, too. Used by the
    loop's thread only.
    """

    def __init__(
        self, store: MessageStore, writer: MessageWriter, offsets: CommittedOffsets, broker_host: bytes
    ) -> None:
        self._store = store
        self._writer = writer
        self._offsets = offsets
        self._broker_host = broker_host
        self.waiting: Counter[str] = Counter()
        self.load()

    def load(self) -> None:
        """Read the log again, at the start and when a slave becomes master."""
        self.first = self._saved(HALF_TOPIC)
        self._op_offset = self._saved(OP_HALF_TOPIC)
        # Half offset -> where in the log its end lies; those of the ops from `_op_offset` on, in their order.
        self._ended: dict[int, int] = {}
        self._ops: deque[int] = deque()
        # A message that was checked lies further back again; a late end still names the place it was sent to.
        self._moved: dict[int, int] = {}
        self.waiting.clear()
        self._read_ops()
        self._read_waiting()
        self._ended = {half_offset: end for half_offset, end in self._ended.items() if half_offset >= self.first}

    def __repr__(self) -> str:
        return f"<HalfMessages first={self.first} end={self.end} waiting={self.waiting.total()}>"

    @property
    def end(self) -> int:
        """The offset the next half message will get."""
        return self._store.max_offset_of(HALF_TOPIC, _QUEUE_ID)

    # --- what happens to them -----------------------------------------------------------------------------------

    def stored(self, topic: str) -> None:
        """A half message for this topic was put into the half queue."""
        self.waiting[topic] += 1

    def current(self, half_offset: int) -> int | None:
        """Where the half message lies that was once at this offset; None when it has ended."""
        half_offset = self._latest(half_offset)
        return half_offset if self._is_waiting(half_offset) else None

    def ended(self, half_offset: int, text: str, found_at: int) -> AppendResult:
        """Store that a half message has ended; what it leaves behind must be stored already.

        `text` is that of its properties, as they lie at `half_offset` or where it lay before, at `found_at`.
        """
        result = self._end(half_offset)
        if result.status is _PUT_OK:
            self._count_down(real_topic(text))
            for other in self.ended_with(half_offset, text, found_at)[1:]:
                self._end(other)
        return result

    def ended_with(self, half_offset: int, text: str, found_at: int) -> list[int]:
        """The offsets that are noted when this half message ends: its own, then the one it was sent to, if another.

        In this order: then the op queue is not left behind before both are passed.
        """
        sent_to = number(text, names.TRAN_PREPARED_QUEUE_OFFSET)
        if sent_to is None:
            sent_to = found_at
        return [half_offset, sent_to] if 0 <= sent_to != half_offset else [half_offset]

    def operation(self, half_offset: int, now: int) -> NewMessage:
        """The op message that notes the end; `noted` is told when it is stored."""
        return operation(half_offset, _QUEUE_ID, now, self._broker_host)

    def noted(self, offsets: Sequence[int], topic: str, ends: Sequence[int]) -> None:
        """A half message has ended: an op message for each of `offsets` was stored, and lies in the log up to the
        offset of `ends` that belongs to it."""
        for half_offset, end_offset in zip(offsets, ends, strict=True):
            self._note(half_offset, end_offset)
        self._count_down(topic)

    def put_back(self, stored: StoredMessage, changes: dict[str, str]) -> tuple[NewMessage, AppendResult]:
        """Move a half message to the end of its queue, so that those behind it can be looked at.

        Both are written in one go: at worst a crash leaves the message there twice, never not at all.
        """
        copy = again(stored, changes)
        result = self._writer.append_one(copy)
        if result.status is _PUT_OK:
            # A note under the place it was sent to would be the end of all its copies, for RocketMQ and for us.
            if names.TRAN_PREPARED_QUEUE_OFFSET not in changes:
                self._end(stored.queue_offset)
            self._ended.setdefault(stored.queue_offset, result.end_offset)
            self._moved[stored.queue_offset] = result.queue_offset
        return copy, result

    def unreadable(self, half_offset: int) -> bool:
        """A message that waits could not be read. If its file has expired, it has ended; call `count_again` then.

        Otherwise it waits on: what cannot be read now may be readable when the disk has been repaired.
        """
        physical_offset = self._store.physical_offset_of(HALF_TOPIC, _QUEUE_ID, half_offset)
        has_expired = (
            half_offset < self._store.min_offset_of(HALF_TOPIC, _QUEUE_ID)
            or 0 <= physical_offset < self._store.min_offset
        )
        log.error("half message cannot be read queue_offset=%d expired=%s", half_offset, has_expired)
        return has_expired and self._end(half_offset).status is _PUT_OK

    def count_again(self) -> None:
        """Count the waiting messages of each topic anew: a message that cannot be read does not tell its topic."""
        self.waiting.clear()
        self._read_waiting()

    def _end(self, half_offset: int) -> AppendResult:
        result = self._writer.append_one(self.operation(half_offset, self._writer.now()))
        if result.status is _PUT_OK:
            self._note(half_offset, result.end_offset)
        else:
            log.error("end of a transaction not noted queue_offset=%d status=%s", half_offset, result.status.value)
        return result

    def _note(self, half_offset: int, end_offset: int) -> None:
        if half_offset >= self.first:
            self._ended[half_offset] = end_offset
        self._ops.append(half_offset)

    def _count_down(self, topic: str) -> None:
        self.waiting[topic] -= 1
        if self.waiting[topic] <= 0:
            del self.waiting[topic]

    # --- looking ------------------------------------------------------------------------------------------------

    def offsets_waiting(self) -> Iterator[int]:
        """The half messages that wait, oldest first. Messages may come and end while a caller iterates."""
        half_offset = self.first
        while half_offset < self.end:
            if half_offset not in self._ended:
                yield half_offset
            half_offset += 1

    def destinations(self) -> Iterator[TopicQueue]:
        """The real queues of the half messages that wait. After a crash nothing else may be known of their topics."""
        for half_offset in self.offsets_waiting():
            half_message = self.kept_at(self._store.physical_offset_of(HALF_TOPIC, _QUEUE_ID, half_offset))
            message = committed(half_message) if half_message is not None else None
            if message is not None:
                yield TopicQueue(message.topic, message.queue_id)

    def read(self, half_offset: int) -> StoredMessage | None:
        physical_offset = self._store.physical_offset_of(HALF_TOPIC, _QUEUE_ID, half_offset)
        return self.at(physical_offset) if physical_offset >= 0 else None

    def is_at(self, half_offset: int, physical_offset: int) -> bool:
        """Whether the half message with this queue offset lies at this place of the log."""
        return self._store.physical_offset_of(HALF_TOPIC, _QUEUE_ID, half_offset) == physical_offset

    def at(self, physical_offset: int) -> StoredMessage | None:
        """The record at this place of the log, of whatever topic."""
        return self._decoded(physical_offset, decode_record)

    def kept_at(self, physical_offset: int) -> KeptMessage | None:
        """The record at this place of the log, in the form in which it can be stored once more."""
        return self._decoded(physical_offset, read_kept)

    def _decoded(self, physical_offset: int, decode: Callable[[memoryview], T]) -> T | None:
        record = self._store.record_at(physical_offset)
        try:
            return decode(record) if record is not None else None
        except CorruptRecord:
            return None

    def _latest(self, half_offset: int) -> int:
        while half_offset in self._moved:
            half_offset = self._moved[half_offset]
        return half_offset

    def _is_waiting(self, half_offset: int) -> bool:
        return half_offset >= self.first and half_offset not in self._ended

    # --- progress -----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Pass over what has ended for good, and commit how far that is."""
        first, flushed = self.first, self._store.flushed_offset
        while (end := self._ended.get(self.first)) is not None and end <= flushed:
            del self._ended[self.first]
            self.first += 1
        op_offset = self._op_offset
        while self._ops and self._ops[0] < self.first:
            self._ops.popleft()
            self._op_offset += 1
        if self.first != first or op_offset != self._op_offset:
            self._offsets.commit(HALF_TOPIC, TRANSACTION_GROUP, _QUEUE_ID, self.first)
            self._offsets.commit(OP_HALF_TOPIC, TRANSACTION_GROUP, _QUEUE_ID, self._op_offset)

    def forget_moves(self) -> None:
        """Let go of the places of messages that have ended since."""
        self._moved = {before: latest for before in self._moved if self._is_waiting(latest := self._latest(before))}

    # --- start --------------------------------------------------------------------------------------------------

    def _saved(self, topic: str) -> int:
        """The committed offset of this broker in a queue, moved into the queue: a recovery may have cut the end of the
        queue, and its first files may have been deleted."""
        lowest, highest = self._store.min_offset_of(topic, _QUEUE_ID), self._store.max_offset_of(topic, _QUEUE_ID)
        saved = self._offsets.get(topic, TRANSACTION_GROUP, _QUEUE_ID)
        return lowest if saved is None else max(lowest, min(saved, highest))

    def _read_ops(self) -> None:
        at = self._op_offset
        while entries := self._store.entries(OP_HALF_TOPIC, _QUEUE_ID, at, _READ_ENTRIES):
            for entry in entries:
                op = self.at(entry.physical_offset)
                offsets = ended_offsets(op.tags, op.body) if op is not None else []
                for half_offset in offsets:
                    self._ended[half_offset] = entry.physical_offset + entry.size
                self._ops.append(max(offsets, default=-1))
            at += len(entries)

    def _read_waiting(self) -> None:
        for half_offset in self.offsets_waiting():
            stored = self.read(half_offset)
            if stored is None:
                continue
            self.waiting[real_topic(stored.properties_text)] += 1
            sent_to = number(stored.properties_text, names.TRAN_PREPARED_QUEUE_OFFSET)
            if sent_to is not None and sent_to >= 0:
                self._read_copy(half_offset, sent_to, real_topic(stored.properties_text))

    def _read_copy(self, half_offset: int, sent_to: int, topic: str) -> None:
        """A half message that was put back: it takes the place of the one before it."""
        before = self._latest(sent_to)
        if before == sent_to and sent_to in self._ended:
            # RocketMQ notes the end of a message it has put back under the place it was sent to.
            self._end(half_offset)
            self._count_down(topic)
        elif before != half_offset:
            if self._is_waiting(before):
                self._ended[before] = 0
                self._count_down(topic)
            self._moved[before] = half_offset
