"""Rows -> messages, and lists of half messages -> bytes."""

from __future__ import annotations

import zlib
from typing import Any

import pyarrow as pa
import pytest

from downrange.client.producer.send_result import SendResult, SendStatus
from downrange.client.producer.transaction_producer import HalfSent
from downrange.model.errors import MessageError
from downrange.model.message import Message, MessageQueue
from downrange.spark import half_message_lists as pages
from downrange.spark.half_message_lists import BadPage, Half, HalfList, halves_of, unpack_halves
from downrange.spark.sink_rows import RowKey, RowReader

KEY = RowKey("q", 3, 1, 0)


def read(option: str | None = "t", /, *, attempt: str | None = None, **columns: Any) -> list[Message]:
    return RowReader(option, KEY, attempt).messages(pa.record_batch(columns))


def test_every_column_finds_its_place() -> None:
    (message,) = read(
        None,
        topic=["orders"],
        body=pa.array([b"\x00\xff"]),
        tags=["paid"],
        keys=["k1 k2"],
        sharding_key=["customer"],
        delay=pa.array([3], pa.int32()),
        properties=pa.array([[("a", "1"), ("b", "2")]], pa.map_(pa.string(), pa.string())),
    )
    assert message == Message(
        "orders",
        b"\x00\xff",
        tags="paid",
        keys="k1 k2",
        sharding_key="customer",
        delay_level=3,
        properties={"a": "1", "b": "2", "SPARK_ROW": "q/3/1/0"},
    )


def test_nulls_are_nothing_at_all() -> None:
    (message,) = read(
        body=["text"],
        tags=pa.array([None], pa.string()),
        keys=pa.array([None], pa.list_(pa.string())),
        sharding_key=pa.array([None], pa.string()),
        delay=pa.array([None], pa.int64()),
        deliver_at=pa.array([None], pa.timestamp("us", tz="UTC")),
        properties=pa.array([None], pa.map_(pa.string(), pa.string())),
    )
    assert message == Message("t", b"text", properties={"SPARK_ROW": "q/3/1/0"})


def test_times_of_delivery() -> None:
    millis = 1_800_000_000_123
    times = pa.array([millis * 1000 + 999, None], pa.timestamp("us", tz="Europe/Berlin"))
    assert [message.deliver_at for message in read(body=["a", "b"], deliver_at=times)] == [millis, None]
    assert [message.deliver_at for message in read(body=["a"], deliver_at=pa.array([millis], pa.int64()))] == [millis]
    with pytest.raises(MessageError, match=r"row q/3/1/0: deliver_at is -1 ms, before 1970"):
        read(body=["a"], deliver_at=pa.array([-1], pa.int64()))
    with pytest.raises(MessageError, match=r"row q/3/1/1: it has delay and deliver_at"):
        read(body=["a", "b"], deliver_at=pa.array([None, 5], pa.int64()), delay=pa.array([3, 3], pa.int32()))


def test_keys_as_a_list() -> None:
    (message,) = read(body=["b"], keys=pa.array([["a", None, "b", ""]], pa.list_(pa.string())))
    assert message.keys == "a b"
    with pytest.raises(MessageError, match="the key 'a b' holds a blank"):
        read(body=["b"], keys=pa.array([["a b"]], pa.list_(pa.string())))


def test_rows_are_numbered_through_all_batches_of_a_task() -> None:
    reader = RowReader("t", KEY)
    batch = pa.record_batch({"body": ["é", "b"]})
    rows = [message.properties["SPARK_ROW"] for _ in range(2) for message in reader.messages(batch)]
    assert rows == ["q/3/1/0", "q/3/1/1", "q/3/1/2", "q/3/1/3"]
    assert reader.count == 4
    assert str(RowKey.parse(rows[3])) == rows[3]


def test_half_messages_carry_their_attempt() -> None:
    (message,) = read(attempt="abc", body=["b"])
    assert message.properties["SPARK_ATTEMPT"] == "abc"


def test_the_topic_of_the_option_wins() -> None:
    (message,) = read("all", topic=["one"], body=["b"])
    assert message.topic == "all"


@pytest.mark.parametrize("column", ["topic", "body"])
def test_a_row_without_topic_or_body_is_named(column: str) -> None:
    columns: dict[str, Any] = {"topic": ["a", "b"], "body": ["c", "d"], column: ["x", None]}
    with pytest.raises(MessageError, match=f"row q/3/1/1: {column} is null"):
        read(None, **columns)


@pytest.mark.parametrize("text", ["", "q/1/2", "q/1/2/x", "q/1/2/3/4"])
def test_what_is_no_row_key(text: str) -> None:
    with pytest.raises(MessageError, match="is not a row key"):
        RowKey.parse(text)


def half(number: int, *, is_ordered: bool = False) -> Half:
    queue = MessageQueue("orders", f"broker-{number % 2}", number % 3)
    result = SendResult(SendStatus.SEND_OK, f"{number:032X}", "", queue, number)
    sent = HalfSent(
        result=result,
        producer_group="group",
        topic="ns%orders",
        broker_address=f"10.0.0.{number % 2}:10911",
        commit_log_offset=number << 33,
    )
    return Half(sent, is_ordered)


def test_halves_come_back_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PAGE_HALVES", 10)
    some = [half(number, is_ordered=number % 4 == 0) for number in range(25)]
    sent = HalfList()
    assert sent.pages() == ()
    for one in some:
        sent.add(one)
    packed = sent.pages()
    assert len(packed) == 3
    assert halves_of(packed) == some


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"no zlib",
        zlib.compress(b"no json"),
        zlib.compress(b'{"group":"g","queues":[],"halves":[[0,1,2,"id",false]]}'),
        zlib.compress(b'{"v":2,"group":"g","queues":[],"halves":[]}'),
    ],
)
def test_what_is_no_list_of_halves(page: bytes) -> None:
    with pytest.raises(BadPage):
        unpack_halves(page)
