"""Topics for operators: 17, 18, 21, 202, 215, 300, 305, 306, 316, 329, 351."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from downrange.broker.json_file import JsonFile
from downrange.broker.topics import Topics
from downrange.model.message import MessageQueue
from downrange.model.topics import SYSTEM_TOPICS, TopicConfig
from downrange.protocol import java_json
from downrange.protocol.bodies.body import decode_body, encode_body
from downrange.protocol.bodies.groups import GroupList
from downrange.protocol.bodies.routes import TopicList
from downrange.protocol.bodies.statistics import TopicOffset, TopicStats
from downrange.protocol.bodies.topics import CreateTopicRequest, TopicConfigs, TopicConfigTable, TopicRequest
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.store.config import BrokerRole
from tests.unit.broker.admin_broker import NOW, AdminBroker, golden_reply
from tests.unit.store.small_store import clean_up_round


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[AdminBroker]:
    made = AdminBroker(tmp_path)
    yield made
    made.store.close()


def creation(topic: str = "TopicA", **changes: Any) -> CreateTopicRequest:
    values: dict[str, Any] = {
        "topic": topic,
        "default_topic": "TBW102",
        "read_queue_nums": 4,
        "write_queue_nums": 4,
        "perm": 6,
        "topic_filter_type": "SINGLE_TAG",
        "topic_sys_flag": 0,
    }
    return CreateTopicRequest(**(values | changes))


async def test_a_created_topic_is_in_the_table_in_the_file_and_announced(broker: AdminBroker) -> None:
    announced: list[TopicConfig | None] = []
    broker.topics.on_change = announced.append
    version = broker.topics.data_version.counter

    reply = await broker.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, creation())

    assert (reply.code, reply.body, dict(reply.ext_fields)) == (0, b"", {})
    expected = TopicConfig("TopicA", 4, 4)
    assert broker.topics.get("TopicA") == expected
    assert announced == [expected]
    assert broker.topics.data_version.counter == version + 1
    file = JsonFile(broker.store.config.store_path_root_dir / "config" / "topics.json")
    broker.topics.save()
    assert Topics(file, broker.config.broker, broker.clock).get("TopicA") == expected


async def test_a_topic_can_be_changed_but_stays_ordered_if_the_name_server_said_so(broker: AdminBroker) -> None:
    broker.topic("TopicA", 4, order=True)
    await broker.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, creation(write_queue_nums=2, perm=4, order=False))
    assert broker.topics.get("TopicA") == TopicConfig("TopicA", 4, 2, 4, order=True)


@pytest.mark.parametrize(
    ("changes", "remark"),
    [
        ({"topic": "SCHEDULE_TOPIC_XXXX"}, "The topic[SCHEDULE_TOPIC_XXXX] is conflict with system topic."),
        ({"topic": "rmq_sys_x"}, "The topic[rmq_sys_x] is conflict with system topic."),
        ({"topic": "broker-a"}, "The topic[broker-a] is conflict with system topic."),
        ({"topic": "DefaultCluster"}, "The topic[DefaultCluster] is conflict with system topic."),
        ({"topic": " "}, "The specified topic is blank."),
        (
            {"topic": "a/../b"},
            "The specified topic contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$",
        ),
        ({"topic": "t" * 128}, "The specified topic is longer than topic max length."),
        ({"read_queue_nums": -1}, "readQueueNums=-1 of topic[TopicA]: expected 0 to 65536"),
        ({"write_queue_nums": 2_000_000_000}, "writeQueueNums=2000000000 of topic[TopicA]: expected 0 to 65536"),
        ({"perm": 16}, "perm=16 of topic[TopicA]: expected 0 to 15"),
        ({"topic_filter_type": "X"}, "topicFilterType=X of topic[TopicA]: expected SINGLE_TAG or MULTI_TAG"),
    ],
)
async def test_a_bad_topic_is_refused_with_the_reason(
    broker: AdminBroker, changes: dict[str, Any], remark: str
) -> None:
    before = broker.topics.table()
    refusal = await broker.refused(RequestCode.UPDATE_AND_CREATE_TOPIC, creation(**changes))
    assert refusal == (ResponseCode.SYSTEM_ERROR, remark)
    assert broker.topics.table() == before


def test_the_refusal_of_a_system_topic_reads_as_captured() -> None:
    captured = golden_reply("498-json/topic_admin", 17, lambda reply: reply.code != 0)
    assert (captured.code, captured.remark) == (1, "The topic[SCHEDULE_TOPIC_XXXX] is conflict with system topic.")


async def test_a_request_without_a_topic_names_the_field(broker: AdminBroker) -> None:
    refusal = await broker.refused(RequestCode.UPDATE_AND_CREATE_TOPIC, ext_fields={"defaultTopic": "TBW102"})
    assert refusal == (ResponseCode.SYSTEM_ERROR, "missing required field 'topic'")


async def test_several_topics_are_created_all_or_none(broker: AdminBroker) -> None:
    good, bad = TopicConfig("TopicA", 1, 1), TopicConfig("TBW102", 1, 1)
    code = RequestCode.UPDATE_AND_CREATE_TOPIC_LIST
    await broker.refused(code, body=encode_body(TopicConfigs((good, bad))))
    assert "TopicA" not in broker.topics
    reply = await broker.ask(code, body=encode_body(TopicConfigs((good, TopicConfig("TopicB", 1, 1)))))
    assert reply.code == 0
    assert {"TopicA", "TopicB"} <= {config.topic_name for config in broker.topics}


@pytest.mark.parametrize(
    ("code", "header"),
    [
        (RequestCode.UPDATE_AND_CREATE_TOPIC, creation()),
        (RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, None),
        (RequestCode.DELETE_TOPIC_IN_BROKER, TopicRequest("TopicA")),
    ],
)
async def test_a_slave_changes_no_topic(tmp_path: Path, code: int, header: CreateTopicRequest | None) -> None:
    broker = AdminBroker(tmp_path, broker_role=BrokerRole.SLAVE)
    refusal = await broker.refused(code, header)
    assert refusal == (
        ResponseCode.SYSTEM_ERROR,
        "Can't modify topic or subscription group from slave, please execute it from master.",
    )
    broker.store.close()


async def test_a_deleted_topic_takes_its_queues_along_and_leaves_the_committed_offsets(broker: AdminBroker) -> None:
    broker.topic("TopicA")
    broker.topic("TopicB")
    broker.put("TopicA", 1)
    broker.put("TopicB", 0)
    broker.offsets.commit("TopicA", "groupA", 1, 1)
    queues = broker.store.config.store_path_root_dir / "consumequeue"
    broker.store.write_pending()
    assert (queues / "TopicA").exists()

    reply = await broker.ask(RequestCode.DELETE_TOPIC_IN_BROKER, TopicRequest("TopicA"))

    assert (reply.code, reply.body) == (0, b"")
    assert "TopicA" not in broker.topics
    assert broker.store.max_offset_of("TopicA", 1) == 0
    assert not (queues / "TopicA").exists()
    assert broker.store.max_offset_of("TopicB", 0) == 1
    assert broker.offsets.get("TopicA", "groupA", 1) == 1


async def test_deleting_an_unknown_topic_is_no_error_and_a_system_topic_stays(broker: AdminBroker) -> None:
    assert (await broker.ask(RequestCode.DELETE_TOPIC_IN_BROKER, TopicRequest("TopicX"))).code == 0
    captured = golden_reply("498-json/wrong_requests", 215)
    refusal = await broker.refused(RequestCode.DELETE_TOPIC_IN_BROKER, TopicRequest("TBW102"))
    assert refusal == (captured.code, captured.remark)
    assert "TBW102" in broker.topics


async def test_all_topics_come_with_their_data_version(broker: AdminBroker) -> None:
    broker.topic("TopicA", 3)
    reply = await broker.ask(RequestCode.GET_ALL_TOPIC_CONFIG)
    table = decode_body(TopicConfigTable, reply.body_bytes)
    assert table == broker.topics.table()
    assert table.topic_config_table["TopicA"].read_queue_nums == 3


async def test_one_topic_can_be_asked_for(broker: AdminBroker) -> None:
    config = broker.topic("TopicA", 3)
    fields = {"topic": "TopicA", "lo": "true"}
    reply = await broker.ask(RequestCode.GET_TOPIC_CONFIG, ext_fields=fields)
    assert decode_body(TopicConfig, reply.body_bytes) == config
    captured = java_json.loads(golden_reply("533/topic_admin", 351).body_bytes)
    assert java_json.loads(reply.body_bytes).keys() == captured.keys() - {"attributes"}
    code, _ = await broker.refused(RequestCode.GET_TOPIC_CONFIG, TopicRequest("TopicX"))
    assert code == ResponseCode.TOPIC_NOT_EXIST


async def test_system_topics_are_those_nobody_may_create(broker: AdminBroker) -> None:
    broker.topic("TopicA")
    reply = await broker.ask(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER)
    topics = set(decode_body(TopicList, reply.body_bytes).topic_list)
    assert topics == SYSTEM_TOPICS | {"DefaultCluster", "broker-a", "DefaultCluster_REPLY_TOPIC"}


async def test_topic_statistics_give_the_reach_of_each_write_queue(broker: AdminBroker) -> None:
    broker.topics.put(TopicConfig("TopicA", read_queue_nums=1, write_queue_nums=2))
    for _ in range(3):
        broker.put("TopicA", 1)
    reply = await broker.ask(RequestCode.GET_TOPIC_STATS_INFO, TopicRequest("TopicA"))
    assert decode_body(TopicStats, reply.body_bytes).offset_table == {
        MessageQueue("TopicA", "broker-a", 0): TopicOffset(min_offset=0, max_offset=0, last_update_timestamp=0),
        MessageQueue("TopicA", "broker-a", 1): TopicOffset(
            min_offset=0, max_offset=3, last_update_timestamp=NOW + 2000
        ),
    }
    captured = java_json.loads(golden_reply("498-json/topic_admin", 202).body_bytes)
    ours = java_json.loads(reply.body_bytes)
    assert ours.keys() == captured.keys()
    (first, *_), (captured_first, *_) = ours["offsetTable"].values(), captured["offsetTable"].values()
    assert first.keys() == captured_first.keys()


async def test_statistics_of_an_unknown_topic_are_refused_as_captured(broker: AdminBroker) -> None:
    captured = golden_reply("498-json/wrong_requests", 202)
    assert await broker.refused(RequestCode.GET_TOPIC_STATS_INFO, TopicRequest("gsNope")) == (
        captured.code,
        captured.remark,
    )


async def test_a_topic_is_consumed_by_who_subscribes_now_and_by_who_did(broker: AdminBroker) -> None:
    broker.consumer("online", topics={"TopicA": "*"})
    broker.consumer("elsewhere", topics={"TopicB": "*"})
    broker.offsets.commit("TopicA", "gone", 0, 5)
    broker.offsets.commit("TopicA", "online", 0, 5)
    reply = await broker.ask(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, TopicRequest("TopicA"))
    assert decode_body(GroupList, reply.body_bytes).group_list == ("gone", "online")


async def test_queues_of_topics_that_are_gone_are_removed(broker: AdminBroker) -> None:
    broker.topic("TopicA")
    broker.put("TopicA")
    broker.put("Forgotten")
    broker.put("SCHEDULE_TOPIC_XXXX", 2)
    reply = await broker.ask(RequestCode.CLEAN_UNUSED_TOPIC)
    assert (reply.code, reply.body) == (0, b"")
    left = {state.topic for state in broker.store.queues}
    assert left == {"TopicA", "SCHEDULE_TOPIC_XXXX"}


async def test_queues_whose_messages_are_all_deleted_are_removed(tmp_path: Path) -> None:
    broker = AdminBroker(tmp_path, mapped_file_size_commit_log=1024)
    broker.put("Old")
    for _ in range(20):
        broker.put("New")
    assert broker.store.take_oldest_files(1)
    reply = await broker.ask(RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE)
    assert reply.code == 0
    assert {state.topic for state in broker.store.queues} == {"New"}
    broker.store.close()


async def test_expired_files_are_deleted_outside_the_hour_once_asked_for(tmp_path: Path) -> None:
    broker = AdminBroker(tmp_path, mapped_file_size_commit_log=1024, file_reserved_time=0)
    for _ in range(20):
        broker.put("TopicA")
    in_the_future = 32_503_680_000_000
    assert clean_up_round(broker.retention, broker.store, in_the_future)[0] == []
    assert (await broker.ask(RequestCode.DELETE_EXPIRED_COMMITLOG)).code == 0
    assert clean_up_round(broker.retention, broker.store, in_the_future)[0] != []
    broker.store.close()


async def test_a_created_topic_is_registered_before_the_answer(broker: AdminBroker) -> None:
    fields = {"topic": "fresh", "defaultTopic": "TBW102", "readQueueNums": "2", "writeQueueNums": "2", "perm": "6"}
    fields |= {"topicFilterType": "SINGLE_TAG", "order": "false"}
    reply = await broker.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, ext_fields=fields)
    assert reply.code == ResponseCode.SUCCESS
    assert broker.registrations == 1
