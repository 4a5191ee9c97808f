"""Figures for operators: 28, 208, 303, 308, 314, 315, 317."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from downrange.broker.handlers.progress import NOTHING_TO_CORRECT
from downrange.model.message import MessageQueue
from downrange.model.topics import BUILT_IN_GROUPS, SubscriptionGroupConfig, TopicConfig
from downrange.protocol import java_json
from downrange.protocol.bodies.body import decode_body
from downrange.protocol.bodies.kv_config import KVTable
from downrange.protocol.bodies.offsets import (
    CloneGroupOffsetRequest,
    CorrectionOffsets,
    DelayOffsets,
    QueryCorrectionOffsetRequest,
)
from downrange.protocol.bodies.statistics import (
    BrokerStatsData,
    ConsumeStats,
    ConsumeStatsList,
    ConsumeTimeSpanRequest,
    ConsumeTimeSpans,
    GetBrokerConsumeStatsRequest,
    GetConsumeStatsRequest,
    OffsetWrapper,
    QueueTimeSpan,
    ViewBrokerStatsRequest,
)
from downrange.protocol.codes import RequestCode, ResponseCode
from tests.unit.broker.admin_broker import NOW, AdminBroker, golden_reply


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[AdminBroker]:
    made = AdminBroker(tmp_path)
    yield made
    made.store.close()


def queue(topic: str, queue_id: int) -> MessageQueue:
    return MessageQueue(topic, "broker-a", queue_id)


def at(broker_offset: int, consumer_offset: int, last_timestamp: int = 0) -> OffsetWrapper:
    return OffsetWrapper(broker_offset=broker_offset, consumer_offset=consumer_offset, last_timestamp=last_timestamp)


def count_gets(broker: AdminBroker, topic: str, group: str) -> None:
    """20 messages within ten seconds."""
    for _ in range(10):
        broker.clock.tick(1)
        broker.statistics.got(topic, group, 2, 200)
        broker.statistics.sample(broker.clock.now())


async def test_progress_of_a_group_over_its_read_queues(broker: AdminBroker) -> None:
    broker.topics.put(TopicConfig("TopicA", read_queue_nums=2, write_queue_nums=4))
    broker.topic("TopicB", 1)
    for _ in range(3):
        broker.put("TopicA", 0)
    broker.put("TopicB", 0)
    broker.offsets.commit("TopicA", "groupA", 0, 2)
    broker.offsets.commit("TopicB", "groupA", 0, 1)
    broker.offsets.commit("Deleted", "groupA", 0, 1)
    count_gets(broker, "TopicA", "groupA")

    reply = await broker.ask(RequestCode.GET_CONSUME_STATS, GetConsumeStatsRequest("groupA"))
    stats = decode_body(ConsumeStats, reply.body_bytes)
    assert stats.offset_table == {
        queue("TopicA", 0): at(3, 2, NOW + 1000),
        queue("TopicA", 1): at(0, 0),
        queue("TopicB", 0): at(1, 1, NOW + 3000),
    }
    assert stats.consume_tps == pytest.approx(broker.statistics.get_tps("TopicA", "groupA"))
    assert stats.consume_tps > 0
    ours, captured = java_json.loads(reply.body_bytes), _captured("admin_consumer", 208)
    assert ours.keys() == captured.keys()
    (first, *_), (captured_first, *_) = ours["offsetTable"].values(), captured["offsetTable"].values()
    assert first.keys() == captured_first.keys()


def _captured(scenario: str, code: int) -> Any:
    return java_json.loads(golden_reply(f"498-json/{scenario}", code).body_bytes)


@pytest.mark.parametrize(
    ("header", "topics"),
    [
        (GetConsumeStatsRequest("groupA", topic="TopicA"), {"TopicA"}),
        (GetConsumeStatsRequest("groupA", topic=""), {"TopicA", "TopicB"}),
        (GetConsumeStatsRequest("groupA", topic_list="TopicB;TopicC;"), {"TopicB", "TopicC"}),
        (GetConsumeStatsRequest("groupA", topic="TopicX"), set()),
        (GetConsumeStatsRequest("nobody"), set()),
    ],
)
async def test_progress_can_be_asked_for_some_topics(
    broker: AdminBroker, header: GetConsumeStatsRequest, topics: set[str]
) -> None:
    for topic in ("TopicA", "TopicB", "TopicC"):
        broker.topic(topic, 1)
    for topic in ("TopicA", "TopicB"):
        broker.offsets.commit(topic, "groupA", 0, 1)
    reply = await broker.ask(RequestCode.GET_CONSUME_STATS, header)
    assert {one.topic for one in decode_body(ConsumeStats, reply.body_bytes).offset_table} == topics


async def test_topics_an_online_group_no_longer_subscribes_to_are_left_out(broker: AdminBroker) -> None:
    for topic in ("TopicA", "TopicB"):
        broker.topic(topic, 1)
        broker.offsets.commit(topic, "groupA", 0, 1)
    broker.consumer("groupA", topics={"TopicB": "*"})
    reply = await broker.ask(RequestCode.GET_CONSUME_STATS, GetConsumeStatsRequest("groupA"))
    assert set(decode_body(ConsumeStats, reply.body_bytes).offset_table) == {queue("TopicB", 0)}


async def test_progress_of_every_group_and_how_much_is_left(broker: AdminBroker) -> None:
    broker.topic("TopicA", 1)
    broker.topic("Ordered", 1, order=True)
    for _ in range(5):
        broker.put("TopicA")
        broker.put("Ordered")
    for group, offset in (("groupA", 2), ("groupB", 5)):
        broker.groups.put(SubscriptionGroupConfig(group))
        broker.offsets.commit("TopicA", group, 0, offset)
    broker.offsets.commit("Ordered", "groupB", 0, 4)

    async def ask(is_order: bool) -> ConsumeStatsList:
        reply = await broker.ask(RequestCode.GET_BROKER_CONSUME_STATS, GetBrokerConsumeStatsRequest(is_order))
        return decode_body(ConsumeStatsList, reply.body_bytes)

    everything = await ask(False)
    assert everything.broker_addr == "127.0.0.1:10911"
    assert everything.total_diff == 3 + 0 + 1
    by_group = {group: stats for one in everything.consume_stats_list for group, stats in one.items()}
    assert by_group.keys() == {*BUILT_IN_GROUPS, "groupA", "groupB"}
    assert by_group["TOOLS_CONSUMER"] == ()
    assert [one.offset_table for one in by_group["groupB"]] == [
        {queue("Ordered", 0): at(5, 4, NOW + 7000)},
        {queue("TopicA", 0): at(5, 5, NOW + 8000)},
    ]
    ordered = await ask(True)
    assert ordered.total_diff == 1
    assert _captured("admin_consumer", 317).keys() == {"brokerAddr", "consumeStatsList", "totalDiff"}


async def test_the_progress_of_every_group_keeps_nobody_else_waiting(broker: AdminBroker) -> None:
    answered = []

    async def ask(code: RequestCode, header: msgspec.Struct) -> None:
        await broker.ask(code, header)
        answered.append(code)

    await asyncio.gather(
        ask(RequestCode.GET_BROKER_CONSUME_STATS, GetBrokerConsumeStatsRequest(False)),
        ask(RequestCode.GET_CONSUME_STATS, GetConsumeStatsRequest("groupA")),
    )
    assert answered == [RequestCode.GET_CONSUME_STATS, RequestCode.GET_BROKER_CONSUME_STATS]


async def test_time_spans_show_where_in_time_a_group_is(broker: AdminBroker) -> None:
    broker.topics.put(TopicConfig("TopicA", read_queue_nums=1, write_queue_nums=3))
    for _ in range(4):
        broker.put("TopicA", 0)
    broker.put("TopicA", 1)
    broker.offsets.commit("TopicA", "groupA", 0, 2)
    header = ConsumeTimeSpanRequest("TopicA", "groupA")
    reply = await broker.ask(RequestCode.QUERY_CONSUME_TIME_SPAN, header)
    now = broker.clock.now()
    assert decode_body(ConsumeTimeSpans, reply.body_bytes).consume_time_span_set == (
        QueueTimeSpan(
            message_queue=queue("TopicA", 0),
            min_time_stamp=NOW,
            max_time_stamp=NOW + 3000,
            consume_time_stamp=NOW + 1000,
            delay_time=now - (NOW + 2000),
        ),
        QueueTimeSpan(  # nothing consumed yet: the first message waits
            message_queue=queue("TopicA", 1),
            min_time_stamp=NOW + 4000,
            max_time_stamp=NOW + 4000,
            consume_time_stamp=NOW + 4000,
            delay_time=now - (NOW + 4000),
        ),
        QueueTimeSpan(  # empty
            message_queue=queue("TopicA", 2),
            min_time_stamp=-1,
            max_time_stamp=-1,
            consume_time_stamp=-1,
            delay_time=0,
        ),
    )
    derived = {"consumeTimeStampStr", "maxTimeStampStr", "minTimeStampStr"}  # Java writes them, nobody reads them
    captured = _captured("admin_consumer", 303)["consumeTimeSpanSet"][0]
    ours = java_json.loads(reply.body_bytes)["consumeTimeSpanSet"][0]
    assert ours.keys() == captured.keys() - derived

    broker.offsets.commit("TopicA", "groupA", 0, 4)
    reply = await broker.ask(RequestCode.QUERY_CONSUME_TIME_SPAN, header)
    caught_up = decode_body(ConsumeTimeSpans, reply.body_bytes).consume_time_span_set[0]
    assert (caught_up.consume_time_stamp, caught_up.delay_time) == (NOW + 3000, 0)


async def test_time_spans_of_an_unknown_topic_are_refused(broker: AdminBroker) -> None:
    refusal = await broker.refused(RequestCode.QUERY_CONSUME_TIME_SPAN, ConsumeTimeSpanRequest("TopicX", "groupA"))
    assert refusal == (ResponseCode.TOPIC_NOT_EXIST, "topic[TopicX] not exist")


@pytest.mark.parametrize(
    ("compare", "left_out", "expected"),
    [
        ("groupA", None, {0: 4, 1: 2}),
        ("groupA", "", {0: 4, 1: 2}),
        ("groupA", "groupA,groupB", {0: NOTHING_TO_CORRECT, 1: 2}),
        ("groupA", "groupC,groupA", {0: NOTHING_TO_CORRECT, 1: 2}),
        ("nobody", "groupC", {0: 4, 1: 2}),
        ("nobody", "groupA,groupB,groupC", {}),
    ],
)
async def test_correction_offsets_are_the_smallest_committed(
    broker: AdminBroker, compare: str, left_out: str | None, expected: dict[int, int]
) -> None:
    broker.offsets.commit("TopicA", "groupA", 0, 4)
    broker.offsets.commit("TopicA", "groupB", 0, 6)
    broker.offsets.commit("TopicA", "groupB", 1, 2)
    broker.offsets.commit("TopicA", "groupC", 0, 5)
    broker.offsets.commit("TopicA", "groupC", 1, 2)
    broker.offsets.commit("TopicB", "groupA", 0, 1)
    header = QueryCorrectionOffsetRequest(compare_group=compare, topic="TopicA", filter_groups=left_out)
    reply = await broker.ask(RequestCode.QUERY_CORRECTION_OFFSET, header)
    assert decode_body(CorrectionOffsets, reply.body_bytes).correction_offsets == expected
    assert broker.offsets.get("TopicA", "groupA", 0) == 4, "looking must not delete"


async def test_a_group_behind_the_oldest_message_goes_on_there(tmp_path: Path) -> None:
    broker = AdminBroker(tmp_path, mapped_file_size_commit_log=1024, mapped_file_size_consume_queue=100)
    broker.topic("TopicA", 1)
    for _ in range(30):
        broker.put("TopicA")
    broker.offsets.commit("TopicA", "late", 0, 1)
    broker.offsets.commit("TopicA", "groupA", 0, 25)
    broker.store.write_pending()
    assert broker.store.take_oldest_files(1)
    broker.store.delete_dependents()
    oldest = broker.store.min_offset_of("TopicA", 0)
    assert 1 < oldest < 25

    header = QueryCorrectionOffsetRequest(compare_group="nobody", topic="TopicA")
    reply = await broker.ask(RequestCode.QUERY_CORRECTION_OFFSET, header)
    assert decode_body(CorrectionOffsets, reply.body_bytes).correction_offsets == {0: 25}
    reply = await broker.ask(RequestCode.QUERY_CONSUME_TIME_SPAN, ConsumeTimeSpanRequest("TopicA", "late"))
    (span,) = decode_body(ConsumeTimeSpans, reply.body_bytes).consume_time_span_set
    assert span.min_time_stamp == NOW + oldest * 1000
    assert span.delay_time == broker.clock.now() - span.min_time_stamp
    broker.store.close()


@pytest.mark.parametrize("topic", ["TopicA", "", None])
async def test_offsets_are_cloned_in_one_topic_or_in_all(broker: AdminBroker, topic: str | None) -> None:
    for name in ("TopicA", "TopicB"):
        broker.topic(name)
        broker.offsets.commit(name, "groupA", 1, 7)
    header = CloneGroupOffsetRequest(src_group="groupA", dest_group="groupB", topic=topic)
    reply = await broker.ask(RequestCode.CLONE_GROUP_OFFSET, header)
    assert (reply.code, reply.body) == (0, b"")
    assert broker.offsets.get("TopicA", "groupB", 1) == 7
    assert broker.offsets.get("TopicB", "groupB", 1) == (None if topic else 7)
    broker.offsets.commit("TopicA", "groupA", 1, 8)
    assert broker.offsets.get("TopicA", "groupB", 1) == 7, "the clone is a copy"


async def test_offsets_of_topics_an_online_group_left_are_cloned_only_when_offline_is_said(broker: AdminBroker) -> None:
    broker.topic("TopicA")
    broker.offsets.commit("TopicA", "groupA", 0, 7)
    broker.consumer("groupA", topics={"TopicB": "*"})
    for offline, expected in ((False, None), (True, 7)):
        header = CloneGroupOffsetRequest(src_group="groupA", dest_group="groupB", topic="TopicA", offline=offline)
        await broker.ask(RequestCode.CLONE_GROUP_OFFSET, header)
        assert broker.offsets.get("TopicA", "groupB", 0) == expected


async def test_a_counter_is_shown_and_an_unknown_one_refused_as_captured(broker: AdminBroker) -> None:
    count_gets(broker, "TopicA", "groupA")
    reply = await broker.ask(
        RequestCode.VIEW_BROKER_STATS_DATA, ViewBrokerStatsRequest("GROUP_GET_NUMS", "TopicA@groupA")
    )
    assert decode_body(BrokerStatsData, reply.body_bytes).stats_minute.sum == 20
    assert java_json.loads(reply.body_bytes).keys() == _captured("cluster_admin", 315).keys()

    captured = golden_reply("498-json/cluster_admin", 315, lambda reply: reply.code != 0)
    refusal = await broker.refused(
        RequestCode.VIEW_BROKER_STATS_DATA, ViewBrokerStatsRequest("GROUP_GET_NUMS", "gsTopicA@gscg_off")
    )
    assert refusal == (captured.code, captured.remark)


async def test_runtime_information_has_every_captured_key(broker: AdminBroker) -> None:
    broker.put()
    reply = await broker.ask(RequestCode.GET_BROKER_RUNTIME_INFO)
    table = decode_body(KVTable, reply.body_bytes).table
    captured = decode_body(KVTable, golden_reply("498-json/cluster_admin", 28).body_bytes).table
    missing = {key for key in captured if not key.startswith("commitLogDiskRatio_")} - table.keys()
    assert missing == set()
    assert table["scheduleMessageOffset_1"] == "2,3"
    assert table["commitLogMaxOffset"] == str(broker.store.max_offset)
    assert table["runtime"] == "[ 0 days, 0 hours, 0 minutes, 1 seconds ]"


async def test_45_tells_slaves_how_far_delayed_messages_are(broker: AdminBroker) -> None:
    reply = await broker.ask(RequestCode.GET_ALL_DELAY_OFFSET)
    assert decode_body(DelayOffsets, reply.body_bytes).offset_table == {1: 2}
