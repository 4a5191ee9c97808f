from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from downrange.model.message import PhysicalOffset, QueueOffset, StoredMessage
from downrange.model.message_id import HostPort, pack_host
from downrange.model.record import MAGIC_V1, MAGIC_V2, CorruptRecord, decode_record, encode_record
from downrange.store.kept_message import read_kept

V4, V6 = HostPort("10.0.0.1", 40911), HostPort("2001:db8::1", 10911)
MESSAGE = StoredMessage(
    topic="orders",
    queue_id=3,
    queue_offset=QueueOffset(17),
    physical_offset=PhysicalOffset(1 << 40),
    body=b"pay \0 me",
    properties_text="TAGS\x01ß\x02KEYS\x01one two",
    sys_flag=1,
    flag=-5,
    born_timestamp=1_790_000_000_000,
    born_host=V4,
    store_timestamp=1_790_000_000_001,
    store_host=V4,
    reconsume_times=2,
    prepared_transaction_offset=99,
    body_crc=0,
    store_size=0,
)


def record(message: StoredMessage) -> bytes:
    return encode_record(message, pack_host(*message.born_host), pack_host(*message.store_host))


def as_version_2(raw: bytes) -> bytes:
    """The record with a topic length of two bytes, as 5.x writes long topics."""
    topic_at = raw.index(b"\x06orders")
    changed = raw[:topic_at] + b"\0" + raw[topic_at:]
    return len(changed).to_bytes(4, "big") + MAGIC_V2.to_bytes(4, "big") + changed[8:]


@pytest.mark.parametrize("version", [MAGIC_V1, MAGIC_V2])
@pytest.mark.parametrize("store_host", [V4, V6])
@pytest.mark.parametrize("born_host", [V4, V6])
def test_a_record_is_read_as_it_was_stored(born_host: HostPort, store_host: HostPort, version: int) -> None:
    raw = record(replace(MESSAGE, born_host=born_host, store_host=store_host))
    raw = as_version_2(raw) if version == MAGIC_V2 else raw
    stored, kept = decode_record(raw), read_kept(memoryview(raw))
    message = kept.message
    assert (message.topic, message.queue_id, message.body, message.flag) == ("orders", 3, stored.body, -5)
    assert (message.born_host, message.store_host) == (pack_host(*born_host), pack_host(*store_host))
    assert (message.sys_flag, message.reconsume_times) == (stored.sys_flag, 2)
    assert (message.born_timestamp, kept.store_timestamp) == (stored.born_timestamp, stored.store_timestamp)
    assert (kept.queue_offset, kept.physical_offset, message.prepared_transaction_offset) == (17, 1 << 40, 99)
    assert kept.text == stored.properties_text == message.properties.decode()
    assert (kept.find("TAGS"), kept.find("WAIT")) == ("ß", None)


@given(st.data())
def test_what_is_no_record_to_one_reader_is_none_to_the_other(data: st.DataObject) -> None:
    raw = bytearray(as_version_2(record(MESSAGE)) if data.draw(st.booleans()) else record(MESSAGE))
    for at, value in data.draw(st.lists(st.tuples(st.integers(0, len(raw) - 1), st.integers(0, 255)), max_size=3)):
        raw[at] = value
    whole = raw[: data.draw(st.integers(0, len(raw)) | st.just(len(raw)))]
    try:
        stored = decode_record(whole)
    except CorruptRecord:
        with pytest.raises(CorruptRecord):
            read_kept(memoryview(whole))
    else:
        if stored.store_size == len(whole):
            kept = read_kept(memoryview(whole))
            assert (kept.message.topic, kept.message.body, kept.text) == (
                stored.topic,
                stored.body,
                stored.properties_text,
            )
        else:
            with pytest.raises(CorruptRecord):  # it is given whole records only
                read_kept(memoryview(whole))
