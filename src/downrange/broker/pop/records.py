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
from downrange.compiled import accelerated
from downrange.model import properties as names
from downrange.model.topics import REVIVE_TOPIC_PREFIX
from downrange.protocol.bodies.body import Body, BodyError, decode_body, encode_body
from downrange.protocol.bodies.fields import Int32, Int64
from downrange.protocol.bodies.pop import offset_list
from downrange.store.kept_message import KeptMessage
from downrange.store.new_message import NewMessage
from downrange.store.new_messages import NewMessages
from downrange.store.queue.queues import QueueState

REVIVE_QUEUES: Final = 8
_CK: Final = b"ck"
_ACK: Final = b"ack"
_BATCH_ACK: Final = b"bAck"
_ORDER: Final = b"order"
_ORDERLY: Final = "ORDERLY"
_PROPERTIES: Final = b"TIMER_DELIVER_MS\x01%d\x02TAGS\x01%b"
# Java reads a checkpoint this long before the acknowledgements of its messages.
CK_EARLIER_MILLIS: Final = 1000
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


class Texts(NamedTuple):
    """The JSON of records about the messages of one topic that one group popped: what stands around each number."""

    checkpoint: tuple[bytes, ...]
    """Around the distances of the offsets, invisible time, number, pop time, queue, time of revival and start."""
    ack: tuple[bytes, ...]
    """Around the offset, pop time, queue and start."""
    batch_ack: tuple[bytes, ...]
    """Around the offsets, pop time, queue and start."""


AllTexts = dict[tuple[str, str], Texts]
"""By topic and group."""
Places = tuple[dict[tuple[str, int], QueueState], str, bytes]
"""All queues of the store, the revive topic, and the packed address of the broker."""


@accelerated
def add_checkpoints(
    batch: NewMessages, leases: list[Lease], texts: AllTexts, places: Places, fits: int, now: int
) -> bool:
    """Add the records of leases (`ReviveRecords.checkpoint`) to a batch; False, and none is added, if one is unusual.

    Usual is a lease of less than 64 offsets for whose topic and group there is a text, if its revive queue is there and
    body and properties have at most `fits` bytes. Python adds nothing here: to it all leases are unusual, and callers
    add the records one by one.
    """
    return False


@accelerated
def add_acknowledgements(
    batch: NewMessages, ended: list[tuple[Lease, int]], texts: AllTexts, places: Places, fits: int, now: int
) -> bool:
    """Add the records that leases are over (`ReviveRecords.acknowledgement`), as `add_checkpoints` does."""
    return False


class ReviveRecords:
    """Makes the records of one broker."""

    def __init__(self, cluster: str, broker_name: str, host: bytes) -> None:
        self.topic = REVIVE_TOPIC_PREFIX + cluster
        self._broker = _encode(broker_name)
        self._host = host
        self.texts: AllTexts = {}
        """The texts of the topics and groups for which a record was made so far."""

    def checkpoint(self, lease: Lease, now: int) -> NewMessage:
        """The record that makes a lease last. Messages that were acknowledged already are left out."""
        topic, group, queue_id, start, pop_time = lease.key
        held, visible_at = lease.held, lease.visible_at
        numbers = lease.invisible_time, held.bit_count(), pop_time, queue_id, visible_at, start
        body = _filled(self._texts_of(topic, group).checkpoint, offset_list(0, held), *numbers)
        properties = _PROPERTIES % (visible_at - CK_EARLIER_MILLIS, _CK)
        return NewMessage(self.topic, lease.revive_queue, body, properties, now, self._host, self._host)

    def acknowledgement(self, lease: Lease, bits: int, now: int) -> NewMessage:
        """The record that ends the lease of some messages: bit n for the offset `lease.key.start_offset + n`."""
        topic, group, queue_id, start, pop_time = lease.key
        texts = self._texts_of(topic, group)
        text, tags = (texts.batch_ack, _BATCH_ACK) if bits & (bits - 1) else (texts.ack, _ACK)
        body = _filled(text, offset_list(start, bits), pop_time, queue_id, start)
        properties = _PROPERTIES % (lease.visible_at, tags)
        return NewMessage(self.topic, lease.revive_queue, body, properties, now, self._host, self._host)

    def ordered_acknowledgement(self, key: LeaseKey, offset: int, due: int, now: int, next_offset: int) -> NewMessage:
        """The record that a message was acknowledged that was popped in order; `next_offset` is the group's offset."""
        topic, group, queue_id, start, pop_time = key
        body = _filled(self._texts_of(topic, group).ack, b"%d" % offset, pop_time, queue_id, start)
        properties = _PROPERTIES % (due, _ACK) + f"\x02{_ORDERLY}\x01{next_offset}".encode()
        return NewMessage(self.topic, key.queue_id % REVIVE_QUEUES, body, properties, now, self._host, self._host)

    def order(self, key: OrderKey, state: OrderInfoBody, now: int) -> NewMessage:
        """The record of the state that an ordered pop, or a change of an invisible time, has left."""
        topic, group, queue_id = key
        body = encode_body(OrderBody(topic=topic, group=group, queue_id=queue_id, state=state))
        properties = _PROPERTIES % (now, _ORDER)
        return NewMessage(self.topic, queue_id % REVIVE_QUEUES, body, properties, now, self._host, self._host)

    def _texts_of(self, topic: str, group: str) -> Texts:
        found = self.texts.get((topic, group))
        if found is None:
            if len(self.texts) >= _MOST_TEXTS:
                self.texts.clear()
            broker, of_group, of_topic = self._broker, _encode(group), b',"t":%b}' % _encode(topic)
            behind = b'"bn":%b,"c":%b,"pt":' % (broker, of_group), b',"q":', b',"so":', of_topic
            found = self.texts[topic, group] = Texts(
                (
                    b'{"bm":0,"bn":%b,"c":%b,"d":[' % (broker, of_group),
                    b'],"it":', b',"n":', b',"pt":', b',"q":', b',"reviveTime":', b',"ro":0,"so":', of_topic,
                ),
                (b'{"ao":', b"," + behind[0], *behind[1:]),
                (b'{"ao":-1,"aol":[', b"]," + behind[0], *behind[1:]),
            )  # fmt: skip
        return found


def _filled(text: tuple[bytes, ...], offsets: bytes, *numbers: int) -> bytes:
    """The text with what it stands around."""
    parts = [text[0], offsets]
    for part, number in zip(text[1:], numbers, strict=False):
        parts += part, b"%d" % number
    return b"".join((*parts, text[-1]))


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
