from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from downrange.compiled import steps
from downrange.model import record as layout
from downrange.model.errors import MessageError
from downrange.model.message import PhysicalOffset, QueueOffset, StoredMessage, SysFlag
from downrange.model.message_id import HostPort, pack_host, parse_offset_message_id
from downrange.model.record import (
    MAGIC_V2,
    CorruptRecord,
    decode_record,
    decode_records,
    encode_record,
    properties_of,
    record_size,
    store_timestamp_of,
    unpack_record,
)

# A record as RocketMQ 4.9.8 writes it.
VECTOR = bytes.fromhex(
    "0000006FDAA320A73610A6860000000100000000000000000000000700000000000003E8000000000000018BCFE568000A0000090000CB200000"
    "018BCFE568010A00000100002A9F0000000000000000000000000000000568656C6C6F06546F706963410009544147530154616741"
)
hosts = st.builds(
    HostPort, st.ip_addresses(v=4).map(str) | st.ip_addresses(v=6).map(str).filter(lambda a: "ffff:" not in a),
    st.integers(0, 65535),
)  # fmt: skip
HOSTS = pack_host("10.0.0.1", 1), pack_host("10.0.0.2", 2)
int32, int64 = st.integers(-(2**31), 2**31 - 1), st.integers(0, 2**63 - 1)


@st.composite
def messages(draw: st.DrawFn) -> StoredMessage:
    born, store = draw(hosts), draw(hosts)
    flags = draw(st.sampled_from([0, 1, 4, 8, 12, 0x301]))
    flags |= SysFlag.BORN_HOST_V6 if ":" in born.host else 0
    flags |= SysFlag.STORE_HOST_V6 if ":" in store.host else 0
    return StoredMessage(
        topic=draw(st.text("abcXYZ019_-%|", min_size=1, max_size=127)),
        queue_id=draw(int32),
        queue_offset=QueueOffset(draw(int64)),
        physical_offset=PhysicalOffset(draw(int64)),
        body=draw(st.binary(max_size=200)),
        properties_text=draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=50)),
        sys_flag=flags,
        flag=draw(int32),
        born_timestamp=draw(int64),
        born_host=born,
        store_timestamp=draw(int64),
        store_host=store,
        reconsume_times=draw(int32),
        prepared_transaction_offset=draw(int64),
        body_crc=0,
        store_size=0,
    )


def encoded(message: StoredMessage) -> bytes:
    return encode_record(message, pack_host(*message.born_host), pack_host(*message.store_host))


def test_javas_record_is_read_and_written_back_byte_for_byte() -> None:
    message = decode_record(VECTOR, check_crc=True)
    assert (message.topic, message.body, message.tags, message.keys) == ("TopicA", b"hello", "TagA", [])
    assert (message.queue_id, message.queue_offset, message.physical_offset) == (1, 7, 1000)
    assert (str(message.born_host), str(message.store_host)) == ("10.0.0.9:52000", "10.0.0.1:10911")
    assert message.offset_message_id == message.message_id == "0A00000100002A9F00000000000003E8"
    assert message.body_crc == 907060870
    assert encoded(message) == VECTOR


@given(messages())
def test_records_survive_a_round_trip(message: StoredMessage) -> None:
    raw = encoded(message)
    again = decode_record(raw, check_crc=True)
    assert replace(again, body_crc=0, store_size=0) == message
    assert again.store_size == len(raw)
    assert parse_offset_message_id(again.offset_message_id).physical_offset == message.physical_offset


@given(messages(), st.binary(max_size=3), st.binary(max_size=3))
def test_the_parts_of_a_record_within_other_bytes(message: StoredMessage, before: bytes, after: bytes) -> None:
    raw = encoded(message)
    data = before + raw + after
    head, body_at, topic_at, properties_at, end = unpack_record(data, len(before), len(data))
    assert data[body_at : body_at + head[14]] == message.body
    assert data[topic_at : properties_at - 2].decode() == message.topic
    assert data[properties_at:end].decode() == message.properties_text
    assert (head[9], head[11]) == (pack_host(*message.born_host), pack_host(*message.store_host))
    assert (head[5], head[6]) == (message.queue_offset, message.physical_offset)
    assert (record_size(raw), head[0], end - len(before)) == (len(raw), len(raw), len(raw))
    assert store_timestamp_of(raw) == head[10] == message.store_timestamp
    assert record_size(raw[:7]) is record_size(bytes(8)) is None


@given(messages(), st.integers(128, 255))
def test_lengths_are_signed(message: StoredMessage, length: int) -> None:
    for topic, properties in ((b"t" * length, b""), (b"t", b"p" * (length << 8))):
        raw = encode_record(replace(message, topic=topic.decode(), properties_text=properties.decode()), *HOSTS)
        with pytest.raises(CorruptRecord, match="do not add up"):
            unpack_record(raw, 0, len(raw))


@pytest.mark.skipif(steps is None, reason="built without a compiler, or DOWNRANGE_PURE is set")
def test_c_has_the_same_layout() -> None:
    assert steps is not None
    assert {name: getattr(layout, name) for name in steps.RECORD_LAYOUT} == steps.RECORD_LAYOUT


@given(st.lists(messages(), max_size=4))
def test_records_that_follow_each_other_are_read_one_by_one(many: list[StoredMessage]) -> None:
    assert [m.body for m in decode_records(b"".join(map(encoded, many)))] == [m.body for m in many]


@given(messages())
def test_the_properties_are_found_without_decoding_the_rest(message: StoredMessage) -> None:
    raw = encoded(message)
    assert properties_of(raw) == properties_of(memoryview(raw)) == message.properties_text


def test_the_properties_of_a_record_with_a_long_topic() -> None:
    message = decode_record(VECTOR)
    topic = b"t" * 300
    at = 88 + len(message.body)
    long = bytearray(VECTOR[:at] + len(topic).to_bytes(2, "big") + topic + VECTOR[at + 1 + len(message.topic) :])
    long[:8] = len(long).to_bytes(4, "big") + MAGIC_V2.to_bytes(4, "big")
    assert properties_of(bytes(long)) == decode_record(bytes(long)).properties_text == message.properties_text


def test_bytes_that_are_no_record_have_no_properties() -> None:
    assert {properties_of(VECTOR[:length]) for length in range(len(VECTOR))} == {""}


def test_a_record_cut_anywhere_is_refused() -> None:
    for length in range(len(VECTOR)):
        with pytest.raises(CorruptRecord):
            decode_record(VECTOR[:length])


@given(at=st.integers(0, len(VECTOR) - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_is_refused_or_changes_a_field_but_nothing_else_is_raised(at: int, bit: int) -> None:
    damaged = bytearray(VECTOR)
    damaged[at] ^= 1 << bit
    try:
        message = decode_record(bytes(damaged), check_crc=True)
    except CorruptRecord:
        return
    assert message != decode_record(VECTOR)


def test_what_is_not_an_offset_id_is_said_so() -> None:
    for text in ("", "0A", "X" * 32, "0A00000100002A9F00000000000003E"):
        with pytest.raises(MessageError, match="not an offset message id"):
            parse_offset_message_id(text)
