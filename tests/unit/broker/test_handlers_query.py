"""Single messages: 12, 33, 321; and requests that are not served yet."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from downrange.broker.handlers import query as query_handlers
from downrange.model.hashing import tags_code
from downrange.model.record import decode_record, decode_records
from downrange.protocol import java_json
from downrange.protocol.bodies.body import decode_body
from downrange.protocol.bodies.query import (
    ConsumeQueueData,
    ConsumeQueueEntries,
    QueryConsumeQueueRequest,
    QueryMessageRequest,
    QueryMessageResponse,
    ViewMessageRequest,
)
from downrange.protocol.codes import RequestCode, ResponseCode
from tests.unit.broker.admin_broker import NOW, AdminBroker, golden_reply


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[AdminBroker]:
    made = AdminBroker(tmp_path)
    yield made
    made.store.close()


def by_key(key: str, **changes: Any) -> QueryMessageRequest:
    values: dict[str, Any] = {
        "topic": "TopicA",
        "key": key,
        "max_num": 32,
        "begin_timestamp": 0,
        "end_timestamp": 0x7FFF_FFFF_FFFF_FFFF,
    }
    return QueryMessageRequest(**(values | changes))


def entries(index: int, count: int, **changes: Any) -> QueryConsumeQueueRequest:
    values: dict[str, Any] = {"topic": "TopicA", "queue_id": 0, "index": index, "count": count}
    return QueryConsumeQueueRequest(**(values | changes))


async def test_a_message_is_viewed_as_it_lies_in_the_log(broker: AdminBroker) -> None:
    broker.put(body=b"first")
    second = broker.put(body=b"second")
    reply = await broker.ask(RequestCode.VIEW_MESSAGE_BY_ID, ViewMessageRequest(second.physical_offset))
    assert reply.code == 0
    record = broker.store.record_at(second.physical_offset)
    assert record is not None
    assert reply.body_bytes == bytes(record)
    assert decode_record(reply.body_bytes).body == b"second"


@pytest.mark.parametrize("offset", [999_999_999, -1, 3])
async def test_where_no_record_begins_nothing_is_found(broker: AdminBroker, offset: int) -> None:
    broker.put()
    captured = golden_reply("498-json/wrong_requests", 33)
    assert captured.remark == "can not find message by the offset, 999999999"
    refusal = await broker.refused(RequestCode.VIEW_MESSAGE_BY_ID, ViewMessageRequest(offset))
    assert refusal == (captured.code, f"can not find message by the offset, {offset}")


async def test_messages_are_found_by_key_and_come_back_to_back(broker: AdminBroker) -> None:
    broker.put(body=b"one", KEYS="k1 k2")
    broker.put(body=b"other", KEYS="k3")
    last = broker.put(body=b"two", KEYS="k2")
    reply = await broker.ask(RequestCode.QUERY_MESSAGE, by_key("k2"))
    assert reply.code == 0
    assert [message.body for message in decode_records(reply.body_bytes)] == [b"one", b"two"]
    header = reply.header(QueryMessageResponse)
    assert header.index_last_update_timestamp == NOW + 2000
    assert header.index_last_update_phyoffset == last.physical_offset


async def test_times_and_the_number_wanted_limit_a_query(broker: AdminBroker) -> None:
    for number in range(4):
        broker.put(body=b"%d" % number, KEYS="k")
    reply = await broker.ask(
        RequestCode.QUERY_MESSAGE, by_key("k", begin_timestamp=NOW + 1000, end_timestamp=NOW + 2000)
    )
    assert [message.body for message in decode_records(reply.body_bytes)] == [b"1", b"2"]
    reply = await broker.ask(RequestCode.QUERY_MESSAGE, by_key("k", max_num=1))
    assert [message.body for message in decode_records(reply.body_bytes)] == [b"3"]


async def test_a_query_by_unique_key_has_the_brokers_own_limit(tmp_path: Path) -> None:
    broker = AdminBroker(tmp_path, default_query_max_num=2)
    for number in range(3):
        broker.put(body=b"%d" % number, UNIQ_KEY="U1")
    for max_num in (1, 32):
        reply = await broker.ask(RequestCode.QUERY_MESSAGE, by_key("U1", unique_key_query=True, max_num=max_num))
        assert [message.body for message in decode_records(reply.body_bytes)] == [b"1", b"2"]
    broker.store.close()


async def test_a_key_nobody_used_is_answered_as_captured(broker: AdminBroker) -> None:
    broker.put(KEYS="k1")
    captured = golden_reply("498-json/wrong_requests", 12)
    for key in ("gszzz", ""):
        reply = await broker.ask(RequestCode.QUERY_MESSAGE, by_key(key))
        assert (reply.code, reply.remark, reply.body) == (captured.code, captured.remark, b"")
        assert dict(reply.ext_fields) == dict(captured.ext_fields)
    reply = await broker.ask(RequestCode.QUERY_MESSAGE, by_key("k1", max_num=-1))
    assert reply.code == ResponseCode.QUERY_NOT_FOUND


async def test_entries_of_a_consume_queue(broker: AdminBroker) -> None:
    stored = [broker.put(TAGS=tag) for tag in ("TagA", "TagB", "TagC")]
    reply = await broker.ask(RequestCode.QUERY_CONSUME_QUEUE, entries(1, 5))
    assert decode_body(ConsumeQueueEntries, reply.body_bytes) == ConsumeQueueEntries(
        min_queue_index=0,
        max_queue_index=3,
        queue_data=tuple(
            ConsumeQueueData(
                physic_offset=result.physical_offset, physic_size=result.size, tags_code=tags_code(tag), eval=False
            )
            for result, tag in zip(stored[1:], ("TagB", "TagC"), strict=True)
        ),
    )
    captured = java_json.loads(golden_reply("498-json/query_message", 321).body_bytes)
    ours = java_json.loads(reply.body_bytes)
    assert ours.keys() == captured.keys()
    assert ours["queueData"][0].keys() == captured["queueData"][0].keys()


async def test_entries_say_whether_the_groups_filter_takes_them(broker: AdminBroker) -> None:
    for tag in ("TagA", "TagB"):
        broker.put(TAGS=tag)
    broker.consumer("groupA", topics={"TopicA": "TagB"})
    reply = await broker.ask(RequestCode.QUERY_CONSUME_QUEUE, entries(0, 2, consumer_group="groupA"))
    body = decode_body(ConsumeQueueEntries, reply.body_bytes)
    assert [entry.eval for entry in body.queue_data] == [False, True]
    assert body.subscription_data is not None
    assert body.subscription_data.expression == "TagB"

    reply = await broker.ask(RequestCode.QUERY_CONSUME_QUEUE, entries(0, 2, consumer_group="offline"))
    body = decode_body(ConsumeQueueEntries, reply.body_bytes)
    assert [entry.eval for entry in body.queue_data] == [False, False]
    assert body.filter_data == "offline@TopicA is not online!"


async def test_one_answer_has_no_more_entries_than_fit(broker: AdminBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(5):
        broker.put()
    monkeypatch.setattr(query_handlers, "MAX_ENTRIES", 3)
    reply = await broker.ask(RequestCode.QUERY_CONSUME_QUEUE, entries(0, 1_000_000))
    assert len(decode_body(ConsumeQueueEntries, reply.body_bytes).queue_data) == 3


@pytest.mark.parametrize(
    ("header", "remark"),
    [
        (entries(0, 1, topic="TopicX"), "0@TopicX is not exist!"),
        (entries(0, 1, queue_id=7), "7@TopicA is not exist!"),
        (entries(1, 1), "Index 1 of 0@TopicA is not exist!"),
        (entries(-1, 1), "Index -1 of 0@TopicA is not exist!"),
        (entries(0, 0), "Index 0 of 0@TopicA is not exist!"),
    ],
)
async def test_entries_that_are_not_there(broker: AdminBroker, header: QueryConsumeQueueRequest, remark: str) -> None:
    broker.put()
    assert await broker.refused(RequestCode.QUERY_CONSUME_QUEUE, header) == (ResponseCode.SYSTEM_ERROR, remark)
    assert len(broker.store.queues) == 1, "asking made a queue"
