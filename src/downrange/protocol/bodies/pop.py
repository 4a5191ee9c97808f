"""POP consumption: headers and bodies of 200050-200055, 200151 and 400-402, and the texts inside of them.

A popped message is known by its receipt handle, the property POP_CK, eight items separated by blanks:

    startOffset popTime invisibleTime reviveQid retryFlag brokerName queueId offset

The answer to a pop does not hold handles but three short texts, from which a client makes them; `offset_list` and
`order_count_info` write parts of them, `read_offset_info` and `read_order_count_info` read them:

    startOffsetInfo   0 2 0;0 3 0               flag, queue, offset where reading began
    msgOffsetInfo     0 2 0,1,2;0 3 0,1         flag, queue, offsets of the messages
    orderCountInfo    0 qo2%1 1;0 2 0           of ordered pops: how often messages and queues were delivered before

The flag says which topic was read: 0 the topic itself, 1 its retry topic, 2 its retry topic with a name of version 2.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from typing import Final, NamedTuple

from msgspec import field

from downrange.compiled import accelerated_if_usual
from downrange.model.errors import MQError
from downrange.model.message import MessageQueue
from downrange.model.topics import pop_retry_topic
from downrange.protocol.bodies.body import Body
from downrange.protocol.bodies.fields import Header, Int32, Int64

NORMAL: Final = 0
RETRY_V1: Final = 1
RETRY_V2: Final = 2
ORDERLY_REVIVE_QUEUE: Final = 999
"""The reviveQid of ordered pops, which have no records in the revive topic that Java would read."""
ANY_QUEUE: Final = -1
PULL: Final = "PULL"
POP: Final = "POP"
MOST_MESSAGES: Final = 32


class HandleError(MQError):
    """A receipt handle or an offset text cannot be read."""


class ReceiptHandle(NamedTuple):
    """The lease of one message. It names the pop that took the message, but not the consumer that popped."""

    start_offset: int
    pop_time: int
    invisible_time: int
    revive_queue: int
    retry_flag: int
    broker_name: str
    queue_id: int
    offset: int

    def __str__(self) -> str:
        return " ".join(map(str, self))

    @property
    def is_orderly(self) -> bool:
        return self.revive_queue == ORDERLY_REVIVE_QUEUE

    @property
    def visible_at(self) -> int:
        """When the lease is over, in milliseconds since 1970."""
        return self.pop_time + self.invisible_time

    def source(self, topic: str, group: str) -> str:
        """The topic that was read, as requests name it: a retry topic of the group if the message came again."""
        return topic if self.retry_flag == NORMAL else pop_retry_topic(group, topic, version=self.retry_flag)

    def changed(self, answer: ChangeInvisibleTimeResponse) -> ReceiptHandle:
        """The handle after a change of the invisible time: a lease of its own, which begins with this message."""
        return self._replace(
            start_offset=self.start_offset if self.is_orderly else self.offset,
            pop_time=answer.pop_time,
            invisible_time=answer.invisible_time,
            revive_queue=answer.revive_qid,
        )

    @classmethod
    def parse(cls, text: str) -> ReceiptHandle:
        """Read a handle. Further items, as those that a proxy adds, are ignored."""
        items = text.split(" ")
        if len(items) < len(cls._fields):
            raise HandleError(f"extraInfo {text!r} is no receipt handle: it has {len(items)} parts, 8 are expected")
        try:
            start, pop_time, invisible, revive, flag = map(int, items[:5])
            handle = cls(start, pop_time, invisible, revive, flag, items[5], int(items[6]), int(items[7]))
        except ValueError:
            raise HandleError(
                f"extraInfo {text!r} is no receipt handle: a part that should be a number is not"
            ) from None
        if handle.retry_flag not in (NORMAL, RETRY_V1, RETRY_V2):
            raise HandleError(f"extraInfo {text!r} is no receipt handle: its retry flag is not 0, 1 or 2")
        return handle


def offsets_of(start: int, bits: int) -> list[int]:
    """The offsets that a bit set names: bit n stands for `start + n`."""
    return [start + number for number in range(bits.bit_length()) if bits >> number & 1]


@accelerated_if_usual
def offset_list(start: int, bits: int) -> bytes:
    """The offsets that a bit set names, bit n for `start + n`, separated by commas."""
    return b",".join([b"%d" % (start + number) for number in range(bits.bit_length()) if bits >> number & 1])


class OffsetInfo(NamedTuple):
    """One entry of msgOffsetInfo, or of startOffsetInfo with one offset."""

    retry_flag: int
    queue_id: int
    offsets: tuple[int, ...]


def read_offset_info(text: str | None) -> list[OffsetInfo]:
    """The entries of startOffsetInfo or msgOffsetInfo."""
    entries = []
    for entry in (text or "").split(";"):
        if entry:
            try:
                flag, queue_id, offsets = entry.split(" ")
                entries.append(OffsetInfo(int(flag), int(queue_id), tuple(map(int, offsets.split(",")))))
            except ValueError:
                raise HandleError(f"offset info {entry!r} is not '<flag> <queue> <offset>,<offset>,...'") from None
    return entries


def order_count_info(queue_id: int, counts: Iterable[tuple[int, int]]) -> str:
    """The part of orderCountInfo for one queue; `counts` has each offset and how often it was delivered before."""
    pairs = list(counts)
    entries = [f"{NORMAL} qo{queue_id}%{offset} {count}" for offset, count in pairs if count > 0]
    entries.append(f"{NORMAL} {queue_id} {min((count for _, count in pairs), default=0)}")
    return ";".join(entries)


def read_order_count_info(text: str | None) -> dict[str, int]:
    """How often messages (`qo<queue>%<offset>`) and queues (`<queue>`) of an ordered pop were delivered before."""
    found = {}
    for entry in (text or "").split(";"):
        parts = entry.split(" ")
        if len(parts) == 3 and parts[2].isdecimal():
            found[parts[1]] = int(parts[2])
    return found


def encode_bits(offsets: Iterable[int], start: int) -> str:
    """Offsets as the bit set of a batch ack: base64 of the little-endian bytes, bit n for the offset `start + n`."""
    bits = 0
    for offset in offsets:
        bits |= 1 << (offset - start)
    return base64.b64encode(bits.to_bytes((bits.bit_length() + 7) // 8, "little")).decode()


def decode_bits(text: str, most: int = 8192) -> int:
    """The bits of a batch ack; raises HandleError when they are no base64, or more than `most`."""
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise HandleError(f"the bit set {text[:40]!r} of a batch ack is not base64") from None
    if len(raw) * 8 > most:
        raise HandleError(f"the bit set of a batch ack has {len(raw)} bytes, {most // 8} are the most")
    return int.from_bytes(raw, "little")


class PopMessageRequest(Header, frozen=True, kw_only=True):
    """200050. Queue -1: any; `init_mode`: a new group begins with the oldest message (0) or with the newest (1)."""

    consumer_group: str
    topic: str
    queue_id: Int32
    max_msg_nums: Int32
    invisible_time: Int64
    poll_time: Int64 = 0
    born_time: Int64 = 0
    init_mode: Int32 = 0
    exp_type: str | None = None
    exp: str | None = None
    order: bool = False
    attempt_id: str | None = None


class PopMessageResponse(Header, frozen=True, kw_only=True):
    """Also of refusals (all numbers 0) and of 200052, where only `rest_num` counts."""

    pop_time: Int64 = 0
    invisible_time: Int64 = 0
    revive_qid: Int32 = 0
    rest_num: Int64 = 0
    start_offset_info: str | None = None
    msg_offset_info: str | None = None
    order_count_info: str | None = None


def handles_of(response: PopMessageResponse, broker_name: str) -> list[ReceiptHandle]:
    """The handles of the messages in the answer to a pop, in the order of their records."""
    starts = {
        (entry.retry_flag, entry.queue_id): entry.offsets[0] for entry in read_offset_info(response.start_offset_info)
    }
    return [
        ReceiptHandle(
            starts.get((flag, queue_id), offset),
            response.pop_time,
            response.invisible_time,
            response.revive_qid,
            flag,
            broker_name,
            queue_id,
            offset,
        )
        for flag, queue_id, offsets in read_offset_info(response.msg_offset_info)
        for offset in offsets
    ]


class AckMessageRequest(Header, frozen=True, kw_only=True):
    """200051. `topic` is the topic that was read: the retry topic if the flag in `extra_info` says so."""

    consumer_group: str
    topic: str
    queue_id: Int32
    extra_info: str
    offset: Int64


class ChangeInvisibleTimeRequest(Header, frozen=True, kw_only=True):
    """200053. `invisible_time` counts from now."""

    consumer_group: str
    topic: str
    queue_id: Int32
    extra_info: str
    offset: Int64
    invisible_time: Int64


class ChangeInvisibleTimeResponse(Header, frozen=True, kw_only=True):
    """With the old start, flag, broker, queue and offset these make the new handle."""

    pop_time: Int64 = 0
    invisible_time: Int64 = 0
    revive_qid: Int32 = 0


class PeekMessageRequest(Header, frozen=True, kw_only=True):
    """200052."""

    consumer_group: str
    topic: str
    queue_id: Int32
    max_msg_nums: Int32


class NotificationRequest(Header, frozen=True, kw_only=True):
    """200054."""

    consumer_group: str
    topic: str
    queue_id: Int32
    poll_time: Int64 = 0
    born_time: Int64 = 0
    order: bool = False
    attempt_id: str | None = None


class NotificationResponse(Header, frozen=True, kw_only=True):
    has_msg: bool = False
    polling_full: bool = False


class PollingInfoRequest(Header, frozen=True, kw_only=True):
    """200055."""

    consumer_group: str
    topic: str
    queue_id: Int32


class PollingInfoResponse(Header, frozen=True, kw_only=True):
    polling_num: Int32 = 0


class BatchAck(Body, frozen=True, kw_only=True):
    """The messages of one pop and queue that are acknowledged; `topic` is the normal topic, whatever the flag says."""

    consumer_group: str = field(name="c")
    topic: str = field(name="t")
    retry: str = field(name="r", default="0")
    start_offset: Int64 = field(name="so")
    queue_id: Int32 = field(name="q")
    revive_queue_id: Int32 = field(name="rq")
    pop_time: Int64 = field(name="pt")
    invisible_time: Int64 = field(name="it")
    bits: str = field(name="b", default="")


class BatchAckMessageBody(Body, frozen=True, kw_only=True):
    """200151."""

    broker_name: str | None = None
    acks: tuple[BatchAck, ...] = ()


class QueryAssignmentBody(Body, frozen=True, kw_only=True):
    """400."""

    topic: str
    consumer_group: str
    client_id: str = ""
    strategy_name: str = "AVG"
    message_model: str = "CLUSTERING"


class QueueAssignment(Body, frozen=True, kw_only=True):
    """A queue that a consumer gets, and how it consumes the queue: PULL or POP. With POP, queue -1 is all queues."""

    message_queue: MessageQueue
    mode: str = "PULL"


class AssignmentBody(Body, frozen=True, kw_only=True):
    """The answer to 400. None: the consumer keeps what it has."""

    message_queue_assignments: tuple[QueueAssignment, ...] | None = None


class MessageRequestMode(Body, frozen=True, kw_only=True):
    """401, and an entry of 402: how a group consumes a topic."""

    topic: str
    consumer_group: str
    mode: str = "PULL"
    pop_share_queue_num: Int32 = 0


class MessageRequestModes(Body, frozen=True, kw_only=True):
    """The answer to 402, and the content of messageRequestMode.json: topic -> group -> mode."""

    message_request_mode_map: dict[str, dict[str, MessageRequestMode]] = field(default_factory=dict)
