"""The NumPy decoder gives what the plain decoder gives, on records of the genuine broker and on awkward ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema

from downrange.client.compression import Compression, compress, plain_body
from downrange.model.errors import MessageError
from downrange.model.message import MessageQueue, PhysicalOffset, QueueOffset, StoredMessage
from downrange.model.message_id import HostPort, pack_host
from downrange.model.properties import find_property
from downrange.model.record import CorruptRecord, decode_record, encode_record
from downrange.spark import decoder as decoder_module
from downrange.spark import property_arrays, record_arrays
from downrange.spark.decoder import Decoder, Fetched, Origin
from downrange.spark.record_arrays import walk
from downrange.spark.schema import message_schema
from tests.support import in_python
from tests.support.golden_store import unpack

SCHEMA = to_arrow_schema(message_schema(include_properties=True), timezone="UTC")
QUEUE = MessageQueue("orders", "broker-a", 3)
EVERYTHING = Origin(QUEUE, 0, 1 << 62)


def message(number: int = 0, **changes: Any) -> StoredMessage:
    stored = StoredMessage(
        topic="orders",
        queue_id=3,
        queue_offset=QueueOffset(number),
        physical_offset=PhysicalOffset(number * 1000),
        body=b"body %d" % number,
        properties_text="KEYS\x01a b\x02TAGS\x01paid\x02UNIQ_KEY\x01C0A80001\x02",
        sys_flag=0,
        flag=7,
        born_timestamp=1_763_200_000_000 + number,
        born_host=HostPort("10.0.0.1", 50_000 + number % 3),
        store_timestamp=1_763_200_000_100 + number,
        store_host=HostPort("10.0.0.2", 10_911),
        reconsume_times=number % 4,
        prepared_transaction_offset=0,
        body_crc=0,
        store_size=0,
    )
    return replace(stored, **changes)


def record(stored: StoredMessage) -> bytes:
    return encode_record(stored, pack_host(*stored.born_host), pack_host(*stored.store_host))


def as_v2(v1: bytes, topic: bytes) -> bytes:
    """The same record as 5.x writes it for a long topic: other magic number, topic length in two bytes."""
    stored = decode_record(v1)
    at = v1.rindex(len(stored.topic).to_bytes(1, "big") + stored.topic.encode())
    rest = v1[at + 1 + len(stored.topic) :]
    whole = v1[:at] + len(topic).to_bytes(2, "big") + topic + rest
    return len(whole).to_bytes(4, "big") + bytes.fromhex("DAA320AB") + whole[8:]


def expected(stored: StoredMessage, queue: MessageQueue) -> dict[str, Any]:
    """A row made by the plain decoder."""
    return {
        "topic": queue.topic,
        "broker": queue.broker_name,
        "queue_id": stored.queue_id,
        "queue_offset": stored.queue_offset,
        "physical_offset": stored.physical_offset,
        "msg_id": stored.offset_message_id,
        "unique_key": stored.unique_key,
        "keys": find_property(stored.properties_text, "KEYS"),
        "tags": stored.tags,
        "body": plain_body(stored),
        "born_time": stored.born_timestamp * 1000,
        "store_time": stored.store_timestamp * 1000,
        "born_host": str(stored.born_host),
        "store_host": str(stored.store_host),
        "reconsume_times": stored.reconsume_times,
        "sys_flag": stored.sys_flag,
        "properties": stored.properties,
    }


def rows(batches: Sequence[pa.RecordBatch]) -> list[dict[str, Any]]:
    found = []
    for batch in batches:
        batch.validate(full=True)
        for name in ("born_time", "store_time"):
            if name in batch.schema.names:
                at = batch.schema.get_field_index(name)
                batch = batch.set_column(at, name, batch.column(at).view(pa.int64()))
        for row in batch.to_pylist():
            if "properties" in row:
                assert len(row["properties"]) == len(dict(row["properties"])), "a map must not have a key twice"
                row["properties"] = dict(row["properties"])
            found.append(row)
    return found


PURE_RECORD_ARRAYS = in_python.in_python(record_arrays)


def decoded(records: Sequence[bytes], origin: Origin = EVERYTHING, **settings: Any) -> list[dict[str, Any]]:
    """By the compiled twins where they were built, and the same without them."""
    buffer = b"".join(records)
    starts = walk(buffer)
    assert starts.tobytes() == PURE_RECORD_ARRAYS.walk_records(buffer)
    found = list(Decoder(SCHEMA, **settings).batches(Fetched(buffer, starts, origin)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(property_arrays, "split_properties", lambda *_: None)
        patch.setattr(record_arrays, "read_heads", lambda *_: None)
        pure = list(Decoder(SCHEMA, **settings).batches(Fetched(buffer, starts, origin)))
    assert found == pure
    return rows(found)


def assert_same(records: Sequence[bytes]) -> None:
    assert decoded(records) == [expected(decode_record(one), QUEUE) for one in records]


@pytest.mark.parametrize("name", ["clean", "ext", "killed"])
def test_records_of_the_genuine_broker(name: str, tmp_path: Path) -> None:
    store = unpack(name, tmp_path)
    wanted = list(store.records())
    assert len(wanted) > 20
    data = b"".join(path.read_bytes() for path in sorted((store.root / "commitlog").iterdir()))
    first = min(one.physical_offset for one in wanted)
    starts = np.array([one.physical_offset - first for one in wanted])
    found = rows(list(Decoder(SCHEMA).batches(Fetched(data, starts, EVERYTHING))))
    assert found == [expected(one, QUEUE) for one in wanted]


def test_the_schema_is_what_spark_expects() -> None:
    buffer = record(message())
    (batch,) = Decoder(SCHEMA).batches(Fetched(buffer, walk(buffer), EVERYTHING))
    assert batch.schema.equals(SCHEMA)


AWKWARD = {
    "plain": [message(1), message(2)],
    "nothing in it": [message(1, body=b"", properties_text="")],
    "properties without an end": [message(1, properties_text="TAGS\x01a"), message(2, properties_text="KEYS\x01b")],
    "a separator first": [message(1, properties_text="TAGS\x01a"), message(2, properties_text="\x02KEYS\x01b\x02")],
    "a value with the separator of names": [message(1, properties_text="a\x01b\x01c\x02TAGS\x01x\x02")],
    "no name, no value, no separator": [message(1, properties_text="\x01v\x02n\x01\x02junk\x02TAGS\x01x\x02")],
    "a name twice": [message(1, properties_text="TAGS\x01old\x02a\x01b\x02TAGS\x01new\x02"), message(2)],
    "a later empty value": [message(1, properties_text="TAGS\x01old\x02TAGS\x01\x02")],
    "names that only begin alike": [message(1, properties_text="TAGSX\x011\x02XTAGS\x012\x02TAG\x013\x02")],
    "unicode": [message(1, properties_text="TAGS\x01größe\x02キー\x01値\x02", body="日本".encode())],
    "ipv6": [
        message(1, born_host=HostPort("2001:db8::1", 1)),
        message(2, store_host=HostPort("2001:db8::2", 2)),
        message(3, born_host=HostPort("2001:db8::3", 3), store_host=HostPort("2001:db8::4", 4)),
        message(4),
    ],
    "separators in the body": [message(1, body=b"\x01\x02TAGS\x01no\x02" * 20), message(2, properties_text="")],
    "many names": [message(n, properties_text="".join(f"n{n}-{m}\x01v\x02" for m in range(40))) for n in range(4)],
}


@pytest.mark.parametrize("stored", AWKWARD.values(), ids=AWKWARD.keys())
def test_awkward_records(stored: Sequence[StoredMessage]) -> None:
    assert_same([record(one) for one in stored])


def test_a_name_twice_among_many_names() -> None:
    many = "".join(f"n{number}\x01{number}\x02" for number in range(70))
    assert_same([record(message(1, properties_text=many + "n3\x01again\x02")), record(message(2))])


def test_long_topics_of_5x() -> None:
    assert_same([as_v2(record(message(1)), b"t" * 200), record(message(2)), as_v2(record(message(3)), b"x")])


@pytest.mark.parametrize("kind", list(Compression))
def test_compressed_bodies_are_inflated(kind: Compression) -> None:
    body, flag = compress(b"the same again " * 50, kind, 1)
    assert flag
    records = [record(message(1)), record(message(2, body=body, sys_flag=flag)), record(message(3))]
    assert_same(records)
    assert decoded(records)[1]["body"] == b"the same again " * 50


def test_a_body_that_inflates_to_too_much_is_an_error() -> None:
    body, flag = compress(bytes(100_000), Compression.ZLIB, 9)
    with pytest.raises(MessageError, match=r"message 5 of orders on broker-a queue 3 is larger than 1000 bytes"):
        decoded([record(message(5, body=body, sys_flag=flag))], max_body_bytes=1000)


def test_a_damaged_checksum_is_found_when_asked_for() -> None:
    whole = bytearray(record(message(1)))
    whole[8] ^= 1
    assert decoded([bytes(whole)])
    with pytest.raises(CorruptRecord, match=r"orders on broker-a queue 3.*checksum"):
        decoded([bytes(whole)], check_crc=True)


def test_text_that_is_not_utf8_is_shown_with_replacements() -> None:
    whole = record(message(1, properties_text="TAGS\x01abc\x02")).replace(b"abc", b"a\xffc")
    (row,) = decoded([whole])
    assert row["tags"] == "a�c"
    assert row["properties"] == {"TAGS": "a�c"}


def test_an_absurd_time_stays_far_away() -> None:
    (row,) = decoded([record(message(1, born_timestamp=2**63 - 1))])
    assert row["born_time"] > 9_000_000_000_000_000_000


def test_queue_offsets_are_moved_by_the_delta() -> None:
    found = decoded([record(message(number)) for number in range(5)], Origin(QUEUE, 100, 105, offset_delta=100))
    assert [row["queue_offset"] for row in found] == [100, 101, 102, 103, 104]


def test_only_wanted_tags_are_kept() -> None:
    # "Aa" and "BB" have the same hash in Java: a broker lets both through.
    records = [record(message(n, properties_text=f"TAGS\x01{tag}\x02" if tag else "")) for n, tag in
               enumerate(["Aa", "BB", "", "Aa", "C"])]  # fmt: skip
    assert [row["queue_offset"] for row in decoded(records, tags=frozenset({"Aa", "C"}))] == [0, 3, 4]


def test_only_the_time_wanted_is_kept() -> None:
    first = message(0).store_timestamp
    found = decoded([record(message(number)) for number in range(10)], store_time=range(first + 2, first + 4))
    assert [row["queue_offset"] for row in found] == [2, 3]


def test_batches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_module, "MAX_ROWS", 7)
    monkeypatch.setattr(decoder_module, "MAX_BYTES", 2_000)
    buffer = b"".join(record(message(n, body=bytes(900 if n < 10 else 10))) for n in range(40))
    batches = list(Decoder(SCHEMA).batches(Fetched(buffer, walk(buffer), EVERYTHING)))
    assert [one for batch in batches for one in batch.column("queue_offset").to_pylist()] == list(range(40))
    assert max(batch.num_rows for batch in batches) == 7
    assert max(batch.num_rows for batch in batches[:3]) == 2


@pytest.mark.parametrize("columns", [["body"], ["tags", "queue_offset"], ["properties"], ["msg_id", "topic"]])
def test_only_the_columns_asked_for(columns: list[str]) -> None:
    schema = pa.schema([SCHEMA.field(name) for name in columns])
    buffer = b"".join(record(message(number)) for number in range(3))
    found = rows(list(Decoder(schema).batches(Fetched(buffer, walk(buffer), EVERYTHING))))
    assert found == [{name: expected(message(n), QUEUE)[name] for name in columns} for n in range(3)]


DAMAGE = {
    "size": (0, b"\x7f\xff\xff\xff"),
    "small size": (0, b"\x00\x00\x00\x10"),
    "magic": (4, b"\x00\x00\x00\x00"),
    "body length": (84, b"\x00\x00\x7f\xff"),
    "negative body length": (84, b"\xff\xff\xff\xff"),
    "hosts": (36, b"\x00\x00\x00\x30"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_record_is_an_error(damage: tuple[int, bytes]) -> None:
    at, wrong = damage
    good = record(message(1))
    bad = good[:at] + wrong + good[at + len(wrong) :]
    with pytest.raises(CorruptRecord):
        list(Decoder(SCHEMA).batches(Fetched(good + bad, np.array([0, len(good)]), EVERYTHING)))


@given(st.binary(min_size=1, max_size=6), st.data())
@settings(max_examples=300, deadline=None)
def test_damage_anywhere_is_never_worse_than_an_error(noise: bytes, data: st.DataObject) -> None:
    good = record(message(1))
    at = data.draw(st.integers(0, len(good) - len(noise)))
    bad = good[:at] + noise + good[at + len(noise) :]
    starts = np.array([0, len(good), 2 * len(good)])
    try:
        found = list(Decoder(SCHEMA).batches(Fetched(good + bad + good, starts, EVERYTHING)))
    except (CorruptRecord, MessageError):
        return
    assert sum(batch.num_rows for batch in found) >= 2


texts = st.text(alphabet="ab\x01\x02é=", max_size=12)


@given(st.lists(st.tuples(texts, st.binary(max_size=9)), min_size=1, max_size=8))
@settings(max_examples=300, deadline=None)
def test_any_properties(parts: list[tuple[str, bytes]]) -> None:
    assert_same([record(message(n, properties_text=text, body=body)) for n, (text, body) in enumerate(parts)])


def test_a_reply_that_is_cut_off_is_an_error() -> None:
    whole = record(message(1))
    for end in (3, 50, len(whole) - 1):
        with pytest.raises(CorruptRecord):
            walk(whole[:end])
