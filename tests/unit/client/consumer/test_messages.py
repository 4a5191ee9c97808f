from __future__ import annotations

import zlib
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from downrange.client.consumer.messages import ReceivedMessage, read_pulled, received, wanted
from downrange.model.errors import MessageError
from downrange.model.message import MessageQueue, PhysicalOffset, QueueOffset, StoredMessage, SysFlag
from downrange.model.message_id import HostPort, pack_host
from downrange.model.record import CorruptRecord, decode_records, encode_record
from downrange.model.subscription import subscribe
from downrange.protocol.framing import FrameDecoder
from tests.support.golden import scenarios

QUEUE = MessageQueue("orders", "broker-a", 2)
RETRY = MessageQueue("%RETRY%billing", "broker-a", 0)


def record(
    body: bytes = b"body",
    *,
    offset: int = 7,
    topic: str = "orders",
    properties: str = "",
    sys_flag: int = 0,
    host: str = "10.0.0.1",
) -> bytes:
    message = StoredMessage(
        topic=topic,
        queue_id=2,
        queue_offset=QueueOffset(offset),
        physical_offset=PhysicalOffset(1000),
        body=body,
        properties_text=properties,
        sys_flag=sys_flag,
        flag=5,
        born_timestamp=1_700_000_000_001,
        born_host=HostPort(host, 55),
        store_timestamp=1_700_000_000_002,
        store_host=HostPort(host, 10911),
        reconsume_times=3,
        prepared_transaction_offset=0,
        body_crc=0,
        store_size=0,
    )
    packed = pack_host(host, 55), pack_host(host, 10911)
    return encode_record(message, *packed)


def read(data: bytes, queue: MessageQueue = QUEUE, **options: object) -> list[ReceivedMessage]:
    return read_pulled(data, queue, min_offset=1, max_offset=9, **options)  # type: ignore[arg-type]


def facts(message: ReceivedMessage) -> tuple[object, ...]:
    return (
        message.queue_offset,
        message.physical_offset,
        message.stored_body,
        message.properties_text,
        message.sys_flag,
        message.flag,
        message.born_timestamp,
        message.born_host,
        message.store_timestamp,
        message.store_host,
        message.reconsume_times,
        message.prepared_transaction_offset,
        message.body_crc,
        message.store_size,
        message.message_id,
        message.offset_message_id,
        message.tags,
        message.keys,
    )


def pulled_by_java() -> Iterator[bytes]:
    """The bodies of every answer to a pull that the genuine brokers gave."""
    for rows in scenarios().values():
        pulls = set()
        for row in rows:
            if not row.is_response and row.code == 11:
                pulls.add((row.connection, row.opaque))
            elif row.is_response and row.code == 0 and (row.connection, row.opaque) in pulls:
                (command,) = FrameDecoder().feed(row.frame)
                yield command.body_bytes


def test_the_fast_reader_agrees_with_the_model_on_everything_genuine_brokers_sent() -> None:
    bodies = list(pulled_by_java())
    assert len(bodies) > 50
    for body in bodies:
        expected = [facts(received(stored, QUEUE)) for stored in decode_records(body)]
        assert [facts(message) for message in read(body)] == expected


@given(st.lists(st.tuples(st.binary(max_size=50), st.text(max_size=20), st.sampled_from(["10.0.0.1", "fe80::1"]))))
def test_both_readers_agree(messages: list[tuple[bytes, str, str]]) -> None:
    data = b"".join(record(body, properties=text, host=host) for body, text, host in messages)
    assert [facts(message) for message in read(data)] == [
        facts(received(stored, QUEUE)) for stored in decode_records(data)
    ]


@given(st.data())
def test_an_answer_that_is_cut_off_is_refused_and_never_read_in_part(data: st.DataObject) -> None:
    first = record(b"one", properties="TAGS\x01A\x02")
    whole = first + record(b"two")
    cut = data.draw(st.integers(1, len(whole) - 1).filter(lambda cut: cut != len(first)))
    with pytest.raises(CorruptRecord):
        read(whole[:cut])


@pytest.mark.parametrize("position", [0, 84, 85, 86, 87, 92, 99, 100])
def test_lengths_that_do_not_add_up_are_refused(position: int) -> None:
    damaged = bytearray(record())
    damaged[position] ^= 0x41
    with pytest.raises(CorruptRecord):
        read(bytes(damaged))


def test_a_message_tells_what_java_tells() -> None:
    (message,) = read(record(properties="TAGS\x01A\x02KEYS\x01k1 k2\x02UNIQ_KEY\x01id\x02color\x01red\x02"))
    assert (message.topic, message.body, message.tags, message.keys) == ("orders", b"body", "A", ["k1", "k2"])
    assert (message.broker_name, message.queue_id, message.reconsume_times) == ("broker-a", 2, 3)
    assert message.message_id == "id"
    assert message.properties["color"] == "red"
    assert message.properties["MIN_OFFSET"] == "1"
    assert message.properties["MAX_OFFSET"] == "9"
    assert message.transaction_id is None
    assert repr(message) == "<ReceivedMessage orders broker-a:2@7 reconsume_times=3>"


def test_a_message_of_a_transaction_knows_its_id() -> None:
    (message,) = read(record(properties="UNIQ_KEY\x01id\x02TRAN_MSG\x01true\x02"))
    assert message.transaction_id == "id"


def test_a_retried_message_shows_the_topic_it_was_sent_to() -> None:
    (message,) = read(record(topic=RETRY.topic, properties="RETRY_TOPIC\x01orders\x02"), RETRY)
    assert (message.topic, message.queue.topic) == ("orders", "%RETRY%billing")


def test_namespaces_are_not_shown() -> None:
    (message,) = read(record(), MessageQueue("tenant%orders", "broker-a", 0), namespace="tenant")
    assert message.topic == "orders"
    again = record(properties="RETRY_TOPIC\x01tenant%orders\x02")
    (message,) = read(again, MessageQueue("%RETRY%tenant%billing", "broker-a", 0), namespace="tenant")
    assert message.topic == "orders"


def test_offsets_of_mapped_queues_are_moved() -> None:
    assert [message.queue_offset for message in read(record() + record(host="fe80::1"), offset_delta=100)] == [107, 107]


def test_a_compressed_body_is_read_when_asked_for() -> None:
    (message,) = read(record(zlib.compress(b"plain"), sys_flag=int(SysFlag.COMPRESSED)))
    assert message.plain is None
    assert message.body == b"plain"
    assert message.body is message.body  # inflated once


def test_a_body_that_cannot_be_decompressed_fails_where_it_is_used() -> None:
    (message,) = read(record(b"not zlib", sys_flag=int(SysFlag.COMPRESSED), properties="UNIQ_KEY\x01id\x02"))
    assert message.tags is None
    with pytest.raises(MessageError, match="body of id cannot be decompressed"):
        _ = message.body


def test_tags_of_equal_hash_are_told_apart() -> None:
    # "Aa" and "BB" have the same hash in Java, so a broker sends both.
    messages = read(record(properties="TAGS\x01Aa\x02") + record(properties="TAGS\x01BB\x02") + record())
    assert [message.tags for message in wanted(messages, subscribe("orders", "Aa || C"))] == ["Aa"]
    assert len(wanted(messages, subscribe("orders", "*"))) == 3
    assert len(wanted(messages, subscribe("orders", "a > 1", "SQL92"))) == 3
