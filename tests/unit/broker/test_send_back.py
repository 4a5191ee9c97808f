from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from downrange.model.message import StoredMessage
from downrange.model.topics import SubscriptionGroupConfig, TopicConfig
from downrange.protocol.bodies.send import ConsumerSendMessageBackRequest
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command, request
from downrange.protocol.framing import FrameDecoder
from tests.support.golden import scenarios
from tests.support.golden_store import unpack
from tests.unit.broker.wired import WiredBroker, wire
from tests.unit.store.small_store import put, read_all

DELAYED = "SCHEDULE_TOPIC_XXXX"


@pytest.fixture
async def broker(tmp_path: Path) -> Any:
    wired = wire(tmp_path)
    yield wired
    wired.close()


def send_back(offset: int, level: int = 0, *, group: str = "g", most: int | None = None, **fields: Any) -> Command:
    header = ConsumerSendMessageBackRequest(
        offset=offset, group=group, delay_level=level, max_reconsume_times=most, **fields
    )
    return request(RequestCode.CONSUMER_SEND_MSG_BACK, header)


def only(broker: WiredBroker, topic: str, queue_id: int = 0) -> StoredMessage:
    (message,) = read_all(broker.store, topic, queue_id)
    return message


# --- what the genuine broker does -------------------------------------------------------------------------------


@pytest.fixture
async def golden(tmp_path: Path) -> Any:
    """The genuine broker's store, opened by ours, and the records it has."""
    store = unpack("clean", tmp_path)
    keys = ("mappedFileSizeCommitLog", "mappedFileSizeConsumeQueue", "maxHashSlotNum", "maxIndexNum")
    log_size, queue_size, slots, entries = (store.setting(key) for key in keys)
    wired = wire(
        tmp_path,
        mapped_file_size_commit_log=log_size,
        mapped_file_size_consume_queue=queue_size,
        max_hash_slot_num=slots,
        max_index_num=entries,
    )
    yield wired, {record.physical_offset: record for record in store.records()}
    wired.close()


def same(ours: StoredMessage, theirs: StoredMessage) -> None:
    """Equal but for when and where they were stored, and the order of the properties."""
    assert ours.properties == theirs.properties
    blank = {"queue_offset": 0, "physical_offset": 0, "store_timestamp": 0, "properties_text": ""}
    assert replace(ours, **blank) == replace(theirs, **blank)  # type: ignore[arg-type]


async def test_a_message_sent_back_is_stored_as_the_genuine_broker_stored_it(
    golden: tuple[WiredBroker, dict[int, StoredMessage]],
) -> None:
    broker, records = golden
    # Its first message of gsRetry went back twice, with at most one retry: 96626 -> 97138 (delayed) -> 101017 (dead).
    reply = broker.ask(send_back(96626, 1, group="gscg_retry", most=1))
    assert (reply.code, reply.raw_ext, reply.remark) == (0, None, None)
    same(read_all(broker.store, DELAYED, 0)[-1], records[97138])
    assert broker.ask(send_back(100225, 1, group="gscg_retry", most=1)).code == 0
    same(read_all(broker.store, "%DLQ%gscg_retry", 0)[-1], records[101017])


async def test_refusals_have_the_genuine_broker_s_words(broker: WiredBroker) -> None:
    rows = [row for row in scenarios()["498-json/wrong_requests"] if "send back" in row.note]
    commands = [next(iter(FrameDecoder().feed(row.frame))) for row in rows]
    replies = {command.opaque: command for command in commands if command.is_response}
    asked = [command for command in commands if command.code == 36 and not command.is_response]
    assert len(asked) == 2
    for command in asked:
        create = command.ext_fields["group"] != "gscg_unknown"
        broker.config.broker = replace(broker.config.broker, auto_create_subscription_group=create)
        ours, theirs = broker.ask(command), replies[command.opaque]
        assert (ours.code, ours.remark, ours.raw_ext) == (theirs.code, theirs.remark, theirs.raw_ext)


# --- retries ----------------------------------------------------------------------------------------------------


async def test_a_message_waits_in_the_delay_topic_and_knows_where_it_belongs(broker: WiredBroker) -> None:
    result = put(broker.store, b"body", "orders", 3, {"KEYS": "k", "TAGS": "t"}, flag=9, sys_flag=1)
    assert broker.ask(send_back(result.physical_offset, 5)).code == 0
    again = only(broker, DELAYED, 4)
    origin = read_all(broker.store, "orders", 3)[0]
    assert again.properties == {
        "KEYS": "k",
        "TAGS": "t",
        "RETRY_TOPIC": "orders",
        "ORIGIN_MESSAGE_ID": origin.offset_message_id,
        "WAIT": "false",
        "DELAY": "5",
        "REAL_TOPIC": "%RETRY%g",
        "REAL_QID": "0",
    }
    for name in ("body", "flag", "sys_flag", "born_timestamp", "born_host", "store_host"):
        assert getattr(again, name) == getattr(origin, name), name
    assert again.reconsume_times == 1
    assert broker.groups.get("g") == SubscriptionGroupConfig("g")
    assert broker.topics.get("%RETRY%g") == TopicConfig("%RETRY%g", 1, 1, 6)


@pytest.mark.parametrize(
    ("times", "asked", "stored"), [(0, 0, 3), (5, 0, 8), (15, 0, 18), (0, 7, 7), (5, 1, 1), (0, 99, 18)]
)
async def test_the_delay_grows_with_the_attempts_unless_the_consumer_says(
    times: int, asked: int, stored: int, broker: WiredBroker
) -> None:
    result = put(broker.store, topic="orders", reconsume_times=times)
    broker.ask(send_back(result.physical_offset, asked))
    again = only(broker, DELAYED, stored - 1)
    assert again.properties["DELAY"] == str(stored)
    assert again.reconsume_times == times + 1


async def test_the_first_topic_and_id_are_kept_over_all_retries(broker: WiredBroker) -> None:
    properties = {"RETRY_TOPIC": "orders", "ORIGIN_MESSAGE_ID": "first", "REAL_TOPIC": "%RETRY%old", "REAL_QID": "7"}
    result = put(broker.store, topic="%RETRY%g", properties=properties, reconsume_times=1)
    broker.ask(send_back(result.physical_offset))
    found = only(broker, DELAYED, 3).properties
    assert (found["RETRY_TOPIC"], found["ORIGIN_MESSAGE_ID"]) == ("orders", "first")
    assert (found["REAL_TOPIC"], found["REAL_QID"]) == ("%RETRY%g", "0")


async def test_retries_spread_over_the_group_s_queues(broker: WiredBroker) -> None:
    broker.groups.put(replace(SubscriptionGroupConfig("g"), retry_queue_nums=4))
    offset = put(broker.store, topic="orders").physical_offset
    for _ in range(100):
        broker.ask(send_back(offset, 1, unit_mode=True))
    queues = {message.properties["REAL_QID"] for message in read_all(broker.store, DELAYED, 0)}
    assert queues == {"0", "1", "2", "3"}
    assert broker.topics.get("%RETRY%g") == TopicConfig("%RETRY%g", 4, 4, 6, topic_sys_flag=2)


async def test_attempts_counted_below_zero_are_not_delayed(broker: WiredBroker) -> None:
    result = put(broker.store, topic="orders", reconsume_times=-9)
    assert broker.ask(send_back(result.physical_offset)).code == 0
    assert only(broker, "%RETRY%g").reconsume_times == -8


async def test_statistics_name_the_topic_the_consumer_knows(broker: WiredBroker) -> None:
    result = put(broker.store, topic="%RETRY%g", properties={"RETRY_TOPIC": "orders"}, reconsume_times=1)
    calls: list[tuple[str, ...]] = []
    broker.statistics.sent_back = lambda *call: calls.append(call)  # type: ignore[method-assign]
    broker.statistics.sent_to_dlq = lambda *call: calls.append(call)  # type: ignore[method-assign]
    broker.ask(send_back(result.physical_offset))
    assert calls == [("orders", "g")]
    broker.ask(send_back(result.physical_offset, -1))
    assert calls == [("orders", "g"), ("orders", "g"), ("g",)]


# --- dead letters -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "level", "most", "version", "is_dead"),
    [
        (15, 0, None, 409, False),
        (16, 0, None, 409, True),
        (0, -1, None, 409, True),
        (1, 0, 1, 409, True),
        (1, 0, 1, 120, False),  # clients before 3.4.9 do not mean it
        (16, 0, 17, 409, False),
        (0, 0, 0, 409, True),
        (2147483647, 0, None, 409, True),
    ],
)
async def test_the_last_attempt_ends_in_the_dead_letter_queue(
    times: int, level: int, most: int | None, version: int, is_dead: bool, broker: WiredBroker
) -> None:
    result = put(broker.store, topic="orders", reconsume_times=times)
    command = msgspec.structs.replace(send_back(result.physical_offset, level, most=most), version=version)
    assert broker.ask(command).code == 0
    assert ("%DLQ%g" in broker.topics) == is_dead
    if is_dead:
        assert broker.topics.get("%DLQ%g") == TopicConfig("%DLQ%g", 1, 1, 6)
        dead = only(broker, "%DLQ%g")
        assert dead.properties["DELAY"] == "0"
        assert dead.properties["RETRY_TOPIC"] == "orders"
        assert dead.reconsume_times == min(times + 1, 2147483647)


async def test_the_group_s_own_limit_holds_when_the_consumer_names_none(broker: WiredBroker) -> None:
    broker.groups.put(replace(SubscriptionGroupConfig("g"), retry_max_times=2))
    result = put(broker.store, topic="orders", reconsume_times=2)
    broker.ask(send_back(result.physical_offset))
    assert len(read_all(broker.store, "%DLQ%g")) == 1


# --- refusals ---------------------------------------------------------------------------------------------------


async def test_a_group_without_retry_queues_drops_its_failures(broker: WiredBroker) -> None:
    broker.groups.put(replace(SubscriptionGroupConfig("g"), retry_queue_nums=0))
    before = broker.store.max_offset
    assert broker.ask(send_back(999)).code == 0
    assert broker.store.max_offset == before
    assert "%RETRY%g" not in broker.topics


async def test_a_broker_or_topic_that_is_not_writable_takes_nothing(broker: WiredBroker) -> None:
    offset = put(broker.store, topic="orders").physical_offset
    broker.topics.put(TopicConfig("%RETRY%g", 1, 1, 4))
    reply = broker.ask(send_back(offset))
    assert (reply.code, reply.remark) == (16, "the topic[%RETRY%g] sending message is forbidden")
    broker.config.broker = replace(broker.config.broker, broker_permission=4)
    reply = broker.ask(send_back(offset))
    assert (reply.code, reply.remark) == (16, "the broker[10.0.0.1] sending message is forbidden")


@pytest.mark.parametrize("offset", [1, -1, 10**12])
async def test_an_offset_where_no_message_begins_is_refused(offset: int, broker: WiredBroker) -> None:
    put(broker.store, topic="orders")
    reply = broker.ask(send_back(offset))
    assert (reply.code, reply.remark) == (1, f"look message by offset failed, {offset}")


async def test_bytes_that_only_look_like_a_record_are_refused(broker: WiredBroker) -> None:
    head = (120).to_bytes(4, "big") + (0xDAA320A7).to_bytes(4, "big")
    result = put(broker.store, head + b"\xff" * 200, topic="orders")
    reply = broker.ask(send_back(result.physical_offset + 88))
    assert (reply.code, reply.remark) == (1, f"look message by offset failed, {result.physical_offset + 88}")


async def test_a_message_that_cannot_be_stored_is_not_counted(broker: WiredBroker) -> None:
    offset = put(broker.store, topic="orders").physical_offset
    broker.store.set_disk_full(True)
    reply = broker.ask(send_back(offset, -1))
    assert (reply.code, reply.remark) == (1, "SERVICE_NOT_AVAILABLE")
    assert dict(broker.statistics.to_dlq) == {}
