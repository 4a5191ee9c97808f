"""What is asked of a pop, and what a pop found."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Final

import msgspec

from downrange.broker.compiled_sql import compiled
from downrange.broker.filtering import EVERYTHING, MessageFilter, sql_filter, tag_filter
from downrange.model import properties as names
from downrange.model.message import StoredMessage
from downrange.model.message_id import pack_host
from downrange.model.properties import decode_properties, encode_properties
from downrange.model.record import QUEUE_OFFSET_AT, decode_record, encode_record
from downrange.model.sql.errors import SqlError
from downrange.model.subscription import SQL92, TAG, subscribe
from downrange.protocol.bodies.pop import (
    ANY_QUEUE,
    MOST_MESSAGES,
    NORMAL,
    ReceiptHandle,
    offsets_of,
)
from downrange.protocol.errors import BrokerError, SubscriptionParseFailed
from downrange.store.queue.backlog import Records, pieces_of
from downrange.store.read_result import ReadResult

_SIZE: Final = struct.Struct(">i")
_OFFSET: Final = struct.Struct(">q")


class PopRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Messages are wanted: of `topic`, for `group`, for `invisible_millis`.

    `queue_id` -1 means any queue. A pop that finds nothing may wait for `poll_millis`. `init_mode` decides where a
    group begins that is new here: 0 with the oldest message, 1 with the newest.
    """

    topic: str
    group: str
    invisible_millis: int
    queue_id: int = ANY_QUEUE
    max_messages: int = MOST_MESSAGES
    poll_millis: int = 0
    init_mode: int = 0
    filter: MessageFilter = EVERYTHING
    is_orderly: bool = False
    attempt_id: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether any message of any queue will do."""
        wanted = self.filter
        return (
            self.queue_id == ANY_QUEUE
            and not self.is_orderly
            and wanted.matches_entry is None
            and wanted.matches_record is None
        )


class PoppedQueue:
    """Messages of one queue of `topic`: bit n of `bits` for the offset `start_offset + n`, and their records."""

    __slots__ = ("bits", "byte_count", "counts", "queue_id", "records", "retry_flag", "start_offset", "topic")

    def __init__(
        self, topic: str, retry_flag: int, place: tuple[int, int], bits: int, records: Records, byte_count: int
    ) -> None:
        """`place` is the queue id, and the offset where reading began."""
        self.topic = topic
        self.retry_flag = retry_flag
        self.queue_id, self.start_offset = place
        self.bits = bits
        self.records = records
        self.byte_count = byte_count
        self.counts: list[int] | None = None
        """How often each message was delivered before; of ordered pops only."""

    @property
    def offsets(self) -> list[int]:
        return offsets_of(self.start_offset, self.bits)


def messages_of(queue: PoppedQueue) -> Iterator[StoredMessage]:
    """The messages of a queue, decoded."""
    for piece in pieces_of(queue.records, queue.byte_count):
        at = 0
        while at < len(piece):
            (size,) = _SIZE.unpack_from(piece, at)
            yield decode_record(piece[at : at + size])
            at += size


class Popped:
    """The answer to a pop: what was found in which queues."""

    end_offset = 0
    """The log up to here must be safe before the messages are given away; 0 when nothing was written."""
    is_refused = False
    """Whether too many pops wait for this one to wait, too."""
    error: BrokerError | None = None
    """Why the messages cannot be given away."""

    def __init__(self, request: PopRequest, pop_time: int, revive_queue: int, broker_name: str) -> None:
        self.request = request
        self.pop_time = pop_time
        self.revive_queue = revive_queue
        self.broker_name = broker_name
        self.rest = 0
        """About how many more messages wait in the queues that were looked at."""
        self.queues: list[PoppedQueue] = []

    @property
    def room(self) -> int:
        """How many more messages the pop may take."""
        return max(1, self.request.max_messages) - sum([queue.bits.bit_count() for queue in self.queues])

    @property
    def invisible_time(self) -> int:
        return self.request.invisible_millis

    def handle(self, queue: PoppedQueue, offset: int) -> ReceiptHandle:
        return ReceiptHandle(
            queue.start_offset,
            self.pop_time,
            self.invisible_time,
            self.revive_queue,
            queue.retry_flag,
            self.broker_name,
            queue.queue_id,
            offset,
        )

    def records(self) -> list[memoryview]:
        """The records as remoting clients get them: those of a retry topic look like messages of the topic itself."""
        found: list[memoryview] = []
        for queue in self.queues:
            if queue.retry_flag == NORMAL:
                found += pieces_of(queue.records, queue.byte_count)
            else:
                found += [memoryview(_as_of(self, queue, message)) for message in messages_of(queue)]
        return found


def _as_of(popped: Popped, queue: PoppedQueue, message: StoredMessage) -> bytes:
    properties = decode_properties(message.properties_text)
    properties.setdefault(names.POP_CK, str(popped.handle(queue, message.queue_offset)))
    message = replace(message, topic=popped.request.topic, properties_text=encode_properties(properties))
    return encode_record(message, pack_host(*message.born_host), pack_host(*message.store_host))


def bits_of_read(read: ReadResult, start: int) -> int:
    """The messages that a read from the offset `start` on has found, as bits of a lease."""
    count = read.message_count
    if read.next_begin_offset - start == count:  # nothing was skipped: nearly every pop
        return (1 << count) - 1
    bits = 0
    for piece in pieces_of(read.records, read.byte_count):
        at, end = 0, len(piece)
        while at < end:
            bits |= 1 << (_OFFSET.unpack_from(piece, at + QUEUE_OFFSET_AT)[0] - start)
            at += _SIZE.unpack_from(piece, at)[0]
    return bits


def only(pieces: list[memoryview], start: int, bits: int) -> list[memoryview]:
    """The records of some messages, which are named as those of a lease."""
    found = []
    for piece in pieces:
        at, end = 0, len(piece)
        while at < end:
            (size,) = _SIZE.unpack_from(piece, at)
            if bits >> (_OFFSET.unpack_from(piece, at + QUEUE_OFFSET_AT)[0] - start) & 1:
                found.append(piece[at : at + size])
            at += size
    return found


@lru_cache(maxsize=4096)
def pop_filter(expression_type: str | None, expression: str | None) -> MessageFilter:
    """The filter that a pop names. Raises SubscriptionParseFailed when it cannot be read."""
    kind = expression_type or TAG
    if kind == TAG:
        return tag_filter(subscribe("", expression or "*"))
    found = compiled(expression or "") if kind == SQL92 else None
    if found is None or isinstance(found, SqlError):
        raise SubscriptionParseFailed("parse the consumer's subscription failed")
    return sql_filter(found)
