"""The records of the revive topic, `rmq_sys_REVIVE_LOG_<cluster>`, as RocketMQ 5 writes them.

A checkpoint (TAGS `ck`) says which messages a pop leased, an acknowledgement (`ack` for one message, `bAck` for
several) that they are not to come again. Java lets each record wait in the timer topic until it is due; we write it to
the revive topic at once, where Java finds it, too. TIMER_DELIVER_MS says when Java looks at it.

    ck    {"bm":0,"bn":"broker-a","c":"GA","d":[0,1],"it":10000,"n":2,"pt":..,"q":1,"reviveTime":..,"ro":0,"so":7,
           "t":"T"}
    ack   {"ao":7,"bn":"broker-a","c":"GA","pt":..,"q":1,"so":7,"t":"T"}
    bAck  {"ao":-1,"aol":[7,8],"bn":"broker-a","c":"GA","pt":..,"q":1,"so":7,"t":"T"}

Ordered pops write their state (`order`, in the form of consumerOrderInfo.json), and acknowledgements whose property
ORDERLY is the offset of the group then. Java has none of both, and ignores ours. Java's records have a UNIQ_KEY, which
nobody ever looks for; ours have none, since the entry in the key index would cost as much as all the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec
from msgspec import field

from downrange.broker.pop.leases import MOST_SPAN, Lease, LeaseKey
from downrange.broker.pop.orders import OrderInfoBody, OrderKey
from downrange.model import properties as names
from downrange.model.topics import REVIVE_TOPIC_PREFIX
from downrange.protocol.bodies.body import Body, BodyError, decode_body, encode_body
from downrange.protocol.bodies.fields import Int32, Int64
from downrange.protocol.bodies.pop import offset_list
from downrange.store.kept_message import KeptMessage
from downrange.store.new_message import NewMessage

REVIVE_QUEUES: Final = 8
_CK: Final = b"ck"
_ACK: Final = b"ack"
_BATCH_ACK: Final = b"bAck"
_ORDER: Final = b"order"
_ORDERLY: Final = "ORDERLY"
_PROPERTIES: Final = b"TIMER_DELIVER_MS\x01%d\x02TAGS\x01%b"
# Java reads a checkpoint this long before the acknowledgements of its messages.
_CK_EARLIER_MILLIS: Final = 1000
# So many texts for topics and groups are kept.
_MOST_TEXTS: Final = 4096
_encode = msgspec.json.Encoder().encode


class CheckpointBody(Body, frozen=True, kw_only=True):
    """The JSON of a checkpoint. Old versions wrote no `d`: then the offsets follow each other."""

    bits: Int32 = field(name="bm", default=0)
    broker_name: str | None = field(name="bn", default=None)
    group: str = field(name="c")
    differences: tuple[Int64, ...] | None = field(name="d", default=None)
    invisible_time: Int64 = field(name="it")
    number: Int32 = field(name="n")
    pop_time: Int64 = field(name="pt")
    queue_id: Int32 = field(name="q")
    start_offset: Int64 = field(name="so")
    topic: str = field(name="t")


class AckBody(Body, frozen=True, kw_only=True):
    """The JSON of an acknowledgement."""

    offset: Int64 = field(name="ao", default=-1)
    offsets: tuple[Int64, ...] | None = field(name="aol", default=None)
    group: str = field(name="c")
    pop_time: Int64 = field(name="pt")
    queue_id: Int32 = field(name="q")
    start_offset: Int64 = field(name="so")
    topic: str = field(name="t")


class OrderBody(Body, frozen=True, kw_only=True):
    """The JSON of the state of an ordered pop."""

    group: str = field(name="c")
    queue_id: Int32 = field(name="q")
    state: OrderInfoBody = field(name="s")
    topic: str = field(name="t")


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Messages of one lease that were acknowledged."""

    key: LeaseKey
    offsets: tuple[int, ...]
    next_offset: int | None = None
    """The offset of the group then; None unless the messages were popped in order."""


class _Texts(NamedTuple):
    """The JSON of records about the messages of one topic that one group popped, with a place for each number."""

    checkpoint: bytes
    ack: bytes
    batch_ack: bytes


class ReviveRecords:
    """Makes the records of one broker."""

    def __init__(self, cluster: str, broker_name: str, host: bytes) -> None:
        self.topic = REVIVE_TOPIC_PREFIX + cluster
        self._broker = _json(broker_name)
        self._host = host
        self._texts: dict[tuple[str, str], _Texts] = {}

    def checkpoint(self, lease: Lease, now: int) -> NewMessage:
        """The record that makes a lease last. Messages that were acknowledged already are left out."""
        topic, group, queue_id, start, pop_time = lease.key
        held, visible_at = lease.held, lease.visible_at
        body = self._texts_of(topic, group).checkpoint % (
            offset_list(0, held), lease.invisible_time, held.bit_count(), pop_time, queue_id, visible_at, start,
        )  # fmt: skip
        properties = _PROPERTIES % (visible_at - _CK_EARLIER_MILLIS, _CK)
        return NewMessage(self.topic, lease.revive_queue, body, properties, now, self._host, self._host)

    def acknowledgement(self, key: LeaseKey, bits: int, revive_queue: int, due: int, now: int) -> NewMessage:
        """The record that ends the lease of some messages: bit n for the offset `key.start_offset + n`.

        `due` is when the lease would have ended.
        """
        body, tags = self._ack_body(key, bits)
        return NewMessage(self.topic, revive_queue, body, _PROPERTIES % (due, tags), now, self._host, self._host)

    def ordered_acknowledgement(self, key: LeaseKey, offset: int, due: int, now: int, next_offset: int) -> NewMessage:
        """The record that a message was acknowledged that was popped in order; `next_offset` is the group's offset."""
        topic, group, queue_id, start, pop_time = key
        body = self._texts_of(topic, group).ack % (offset, pop_time, queue_id, start)
        properties = _PROPERTIES % (due, _ACK) + f"\x02{_ORDERLY}\x01{next_offset}".encode()
        return NewMessage(self.topic, key.queue_id % REVIVE_QUEUES, body, properties, now, self._host, self._host)

    def _ack_body(self, key: LeaseKey, bits: int) -> tuple[bytes, bytes]:
        """The JSON of an acknowledgement, and its TAGS."""
        topic, group, queue_id, start, pop_time = key
        texts = self._texts_of(topic, group)
        if bits & (bits - 1) == 0:
            return texts.ack % (start + bits.bit_length() - 1, pop_time, queue_id, start), _ACK
        return texts.batch_ack % (offset_list(start, bits), pop_time, queue_id, start), _BATCH_ACK

    def order(self, key: OrderKey, state: OrderInfoBody, now: int) -> NewMessage:
        """The record of the state that an ordered pop, or a change of an invisible time, has left."""
        topic, group, queue_id = key
        body = encode_body(OrderBody(topic=topic, group=group, queue_id=queue_id, state=state))
        properties = _PROPERTIES % (now, _ORDER)
        return NewMessage(self.topic, queue_id % REVIVE_QUEUES, body, properties, now, self._host, self._host)

    def _texts_of(self, topic: str, group: str) -> _Texts:
        found = self._texts.get((topic, group))
        if found is None:
            if len(self._texts) >= _MOST_TEXTS:
                self._texts.clear()
            broker, group_json, topic_json = self._broker, _json(group), _json(topic)
            tail = b'"bn":%b,"c":%b,"pt":%%d,"q":%%d,"so":%%d,"t":%b}' % (broker, group_json, topic_json)
            found = self._texts[topic, group] = _Texts(
                b'{"bm":0,"bn":%b,"c":%b,"d":[%%b],"it":%%d,"n":%%d,"pt":%%d,"q":%%d,"reviveTime":%%d,"ro":0,"so":%%d,'
                b'"t":%b}' % (broker, group_json, topic_json),
                b'{"ao":%d,' + tail,
                b'{"ao":-1,"aol":[%b],' + tail,
            )
        return found


def read_record(kept: KeptMessage) -> Lease | Acknowledged | OrderBody | None:
    """What a record of the revive topic says; None when it says nothing that can be read."""
    tags = (kept.find(names.TAGS) or "").encode()
    try:
        if tags == _CK:
            return _lease(decode_body(CheckpointBody, kept.message.body), kept)
        if tags == _ORDER:
            return decode_body(OrderBody, kept.message.body)
        if tags in (_ACK, _BATCH_ACK):
            ack = decode_body(AckBody, kept.message.body)
            key = LeaseKey(ack.topic, ack.group, ack.queue_id, ack.start_offset, ack.pop_time)
            offsets = ack.offsets if tags == _BATCH_ACK and ack.offsets is not None else (ack.offset,)
            next_offset = kept.find(_ORDERLY)
            is_orderly = next_offset is not None and next_offset.isdecimal()
            return Acknowledged(key, offsets, int(next_offset or 0) if is_orderly else None)
    except BodyError:
        pass
    return None


def came_by_timer(kept: KeptMessage) -> bool:
    """Whether Java wrote this record: it waited in the timer topic."""
    return kept.find(names.TIMER_OUT_MS) is not None


def _lease(body: CheckpointBody, kept: KeptMessage) -> Lease:
    differences = body.differences or range(min(body.number, MOST_SPAN))
    held = 0
    for number, difference in enumerate(differences):
        if not 0 <= difference < MOST_SPAN:
            raise BodyError(f"a checkpoint of messages that are {difference} offsets apart")
        if not body.bits >> number & 1:
            held |= 1 << difference
    key = LeaseKey(body.topic, body.group, body.queue_id, body.start_offset, body.pop_time)
    return Lease(key, held, body.invisible_time, kept.message.queue_id, kept.queue_offset)


def _json(text: str) -> bytes:
    """The text as JSON, to stand in a template for numbers."""
    return _encode(text).replace(b"%", b"%%")
