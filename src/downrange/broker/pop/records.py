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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import msgspec
from msgspec import field

from downrange.broker.pop.leases import Lease, LeaseKey
from downrange.broker.pop.orders import OrderInfoBody, OrderKey
from downrange.model import properties as names
from downrange.model.topics import REVIVE_TOPIC_PREFIX
from downrange.protocol.bodies.body import Body, BodyError, decode_body, encode_body
from downrange.protocol.bodies.fields import Int32, Int64
from downrange.store.kept_message import KeptMessage
from downrange.store.new_message import NewMessage

REVIVE_QUEUES: Final = 8
_CK: Final = "ck"
_ACK: Final = "ack"
_BATCH_ACK: Final = "bAck"
_ORDER: Final = "order"
_ORDERLY: Final = "ORDERLY"
# Java reads a checkpoint this long before the acknowledgements of its messages.
_CK_EARLIER_MILLIS: Final = 1000
_text = msgspec.json.Encoder().encode


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


class ReviveRecords:
    """Makes the records of one broker."""

    def __init__(self, cluster: str, broker_name: str, host: bytes) -> None:
        self.topic = REVIVE_TOPIC_PREFIX + cluster
        self._broker_json = _json(broker_name)
        self._host = host

    def checkpoint(self, lease: Lease, now: int) -> NewMessage:
        """The record that makes a lease last. Messages that were acknowledged already are left out."""
        topic, group, queue_id, start, pop_time = lease.key
        offsets = lease.offsets if not lease.acked else lease.left
        first, count = offsets[0] - start, len(offsets)
        if offsets[-1] - offsets[0] == count - 1:  # they follow each other: nearly every pop
            differences = _numbers(first, count)
        else:
            differences = ",".join([str(offset - start) for offset in offsets])
        body = (
            f'{{"bm":0,"bn":{self._broker_json},"c":{_json(group)},"d":[{differences}],"it":{lease.invisible_time},'
            f'"n":{count},"pt":{pop_time},"q":{queue_id},"reviveTime":{lease.visible_at},"ro":0,"so":{start},'
            f'"t":{_json(topic)}}}'
        )
        return self._message(lease.revive_queue, body, _CK, lease.visible_at - _CK_EARLIER_MILLIS, now)

    def acknowledgement(
        self,
        key: LeaseKey,
        offsets: Sequence[int],
        revive_queue: int,
        due: int,
        now: int,
        *,
        next_offset: int | None = None,
    ) -> NewMessage:
        """The record that ends the lease of some messages. `due` is when the lease would have ended.

        `next_offset` is the offset of the group now, if the messages were popped in order.
        """
        topic, group, queue_id, start, pop_time = key
        tail = (
            f'"bn":{self._broker_json},"c":{_json(group)},"pt":{pop_time},"q":{queue_id},"so":{start},'
            f'"t":{_json(topic)}}}'
        )
        more = "" if next_offset is None else f"{names.PROPERTY_SEPARATOR}{_ORDERLY}\x01{next_offset}"
        first, tags = (offsets[0], _ACK) if len(offsets) == 1 else (-1, _BATCH_ACK)
        head = f'{{"ao":{first},' if tags is _ACK else f'{{"ao":{first},"aol":[{",".join(map(str, offsets))}],'
        return self._message(revive_queue, head + tail, tags, due, now, more)

    def order(self, key: OrderKey, state: OrderInfoBody, now: int) -> NewMessage:
        """The record of the state that an ordered pop, or a change of an invisible time, has left."""
        topic, group, queue_id = key
        body = encode_body(OrderBody(topic=topic, group=group, queue_id=queue_id, state=state)).decode()
        return self._message(queue_id % REVIVE_QUEUES, body, _ORDER, now, now)

    def _message(self, queue_id: int, body: str, tags: str, due: int, now: int, more: str = "") -> NewMessage:
        properties = f"TIMER_DELIVER_MS\x01{due}\x02TAGS\x01{tags}{more}"
        return NewMessage(self.topic, queue_id, body.encode(), properties.encode(), now, self._host, self._host)


def read_record(kept: KeptMessage) -> Lease | Acknowledged | OrderBody | None:
    """What a record of the revive topic says; None when it says nothing that can be read."""
    tags = kept.find(names.TAGS)
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
    start = body.start_offset
    differences = body.differences or tuple(range(body.number))
    key = LeaseKey(body.topic, body.group, body.queue_id, start, body.pop_time)
    offsets = tuple(start + difference for difference in differences)
    acked = body.bits & ((1 << len(offsets)) - 1)
    return Lease(key, offsets, body.invisible_time, kept.message.queue_id, kept.queue_offset, acked)


@lru_cache(maxsize=1024)
def _numbers(first: int, count: int) -> str:
    return ",".join(map(str, range(first, first + count)))


@lru_cache(maxsize=4096)
def _json(text: str) -> str:
    return _text(text).decode()
