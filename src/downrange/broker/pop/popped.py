"""What is asked of a pop, and what a pop found."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from typing import Final, NamedTuple

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
    OffsetInfo,
    ReceiptHandle,
    offset_info,
)
from downrange.protocol.errors import SubscriptionParseFailed
from downrange.store.read_result import ReadResult

_SIZE: Final = struct.Struct(">i")
_OFFSET: Final = struct.Struct(">q")


@dataclass(frozen=True, slots=True, kw_only=True)
class PopRequest:
    """Messages are wanted: of `topic`, for `group`, for `invisible_millis`.

    `queue_id` -1 means any queue. A pop that finds nothing waits for `poll_millis` since `born_millis`, or since now.
    `init_mode` decides where a group begins that is new here: 0 with the oldest message, 1 with the newest.
    """

    topic: str
    group: str
    invisible_millis: int
    queue_id: int = ANY_QUEUE
    max_messages: int = MOST_MESSAGES
    poll_millis: int = 0
    born_millis: int = 0
    init_mode: int = 0
    filter: MessageFilter = EVERYTHING
    is_orderly: bool = False
    attempt_id: str | None = None
    owner: object = None
    """Whose request it is; when the owner is dropped, the request no longer waits."""
    peer: str = ""


class PopStatus(Enum):
    """How a pop ended."""

    FOUND = "FOUND"
    NO_MESSAGE = "NO_MESSAGE_IN_QUEUE"
    FULL = "POLLING_FULL"
    """Too many pops wait already."""


class PoppedMessage(NamedTuple):
    """One message with the handle by which it is acknowledged.

    `message.topic` is the topic that was asked for, also if the message came from a retry topic; `handle` names the
    queue and the offset there. `delivered_before` counts earlier deliveries.
    """

    message: StoredMessage
    handle: ReceiptHandle
    delivered_before: int


@dataclass(slots=True)
class PoppedQueue:
    """Messages of one queue: `offsets` of `topic`, and their records as they lie in the log."""

    topic: str
    retry_flag: int
    queue_id: int
    start_offset: int
    next_offset: int
    offsets: tuple[int, ...]
    slices: list[memoryview]
    byte_count: int
    counts: list[int] | None = None
    """How often each message was delivered before; of ordered pops only."""


@dataclass(slots=True)
class Popped:
    """The answer to a pop."""

    request: PopRequest
    pop_time: int
    revive_queue: int
    broker_name: str
    status: PopStatus = field(default=PopStatus.NO_MESSAGE, init=False)
    rest: int = field(default=0, init=False)
    """About how many more messages wait in the queues that were looked at."""
    queues: list[PoppedQueue] = field(default_factory=list, init=False)
    end_offset: int = field(default=0, init=False)
    """The log up to here must be safe before the messages are given away; 0 when nothing was written."""

    @property
    def invisible_time(self) -> int:
        return self.request.invisible_millis

    @property
    def message_count(self) -> int:
        return sum(len(queue.offsets) for queue in self.queues)

    @property
    def start_offset_info(self) -> str:
        return ";".join([f"{queue.retry_flag} {queue.queue_id} {queue.start_offset}" for queue in self.queues])

    @property
    def msg_offset_info(self) -> str:
        return offset_info(OffsetInfo(queue.retry_flag, queue.queue_id, queue.offsets) for queue in self.queues)

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
                found += queue.slices
            else:
                found += [memoryview(_as_of(self, queue, message)) for message in _decoded(queue)]
        return found

    def messages(self) -> Iterator[PoppedMessage]:
        """The messages one by one, decoded, with their handles."""
        for queue in self.queues:
            for number, message in enumerate(_decoded(queue)):
                before = message.reconsume_times if queue.counts is None else queue.counts[number]
                if queue.retry_flag != NORMAL:
                    message = replace(message, topic=self.request.topic)
                yield PoppedMessage(message, self.handle(queue, message.queue_offset), before)


def _decoded(queue: PoppedQueue) -> Iterator[StoredMessage]:
    for piece in queue.slices:
        at = 0
        while at < len(piece):
            (size,) = _SIZE.unpack_from(piece, at)
            yield decode_record(piece[at : at + size])
            at += size


def _as_of(popped: Popped, queue: PoppedQueue, message: StoredMessage) -> bytes:
    properties = decode_properties(message.properties_text)
    properties.setdefault(names.POP_CK, str(popped.handle(queue, message.queue_offset)))
    message = replace(message, topic=popped.request.topic, properties_text=encode_properties(properties))
    return encode_record(message, pack_host(*message.born_host), pack_host(*message.store_host))


def offsets_of(read: ReadResult, start: int, slices: list[memoryview]) -> tuple[int, ...]:
    """The queue offsets of the messages that a read found."""
    if read.next_begin_offset - start == read.message_count:  # nothing was skipped: nearly every pop
        return tuple(range(start, start + read.message_count))
    found = []
    for piece in slices:
        at, end = 0, len(piece)
        while at < end:
            found.append(_OFFSET.unpack_from(piece, at + QUEUE_OFFSET_AT)[0])
            at += _SIZE.unpack_from(piece, at)[0]
    return tuple(found)


def only(slices: list[memoryview], offsets: tuple[int, ...]) -> list[memoryview]:
    """The records of some queue offsets."""
    wanted, found = set(offsets), []
    for piece in slices:
        at, end = 0, len(piece)
        while at < end:
            (size,) = _SIZE.unpack_from(piece, at)
            if _OFFSET.unpack_from(piece, at + QUEUE_OFFSET_AT)[0] in wanted:
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
