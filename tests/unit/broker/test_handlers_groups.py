"""Groups for operators: 200, 201, 203, 204, 207, 225, 328, 352."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from downrange.broker.clients import Client
from downrange.model.subscription import subscribe
from downrange.model.topics import BUILT_IN_GROUPS, ExponentialRetryPolicy, GroupRetryPolicy, SubscriptionGroupConfig
from downrange.protocol import java_json
from downrange.protocol.bodies.body import decode_body, encode_body
from downrange.protocol.bodies.groups import (
    Connection,
    ConsumerConnection,
    ConsumerGroupRequest,
    DeleteSubscriptionGroupRequest,
    GroupRequest,
    ProducerConnection,
    ProducerGroupRequest,
    ProducerInfo,
    ProducerTable,
    SubscriptionGroups,
    SubscriptionGroupTable,
)
from downrange.protocol.codes import LanguageCode, RequestCode, ResponseCode
from downrange.store.config import BrokerRole
from downrange.transport.serving import refuse
from tests.unit.broker.admin_broker import NOW, AdminBroker, golden_reply, linked


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[AdminBroker]:
    made = AdminBroker(tmp_path)
    yield made
    made.store.close()


def produce(broker: AdminBroker, group: str, client_id: str, port: int, language: int = LanguageCode.JAVA) -> None:
    broker_end, _ = linked(refuse, refuse, ("10.0.0.9", port))
    broker.producers.heartbeat(group, Client(broker_end, client_id, language, 409, NOW))


async def test_a_group_is_created_and_changed_as_its_body_says(broker: AdminBroker) -> None:
    version = broker.groups.data_version.counter
    for retries in (3, 5):
        config = SubscriptionGroupConfig("groupA", consume_broadcast_enable=False, retry_max_times=retries)
        reply = await broker.ask(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=encode_body(config))
        assert (reply.code, reply.body) == (0, b"")
        assert broker.groups.get("groupA") == config
    assert broker.groups.data_version.counter == version + 2


async def test_a_group_of_a_5_x_tool_is_understood(broker: AdminBroker) -> None:
    body = (
        b'{"attributes":{},"brokerId":0,"consumeBroadcastEnable":false,"consumeEnable":true,"consumeFromMinEnable":'
        b'false,"consumeMessageOrderly":false,"consumeTimeoutMinute":15,"groupName":"groupA","groupRetryPolicy":'
        b'{"type":"CUSTOMIZED"},"groupSysFlag":0,"notifyConsumerIdsChangedEnable":true,"retryMaxTimes":3,'
        b'"retryQueueNums":2,"whichBrokerWhenConsumeSlowly":1}'
    )
    assert (await broker.ask(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body)).code == 0
    assert broker.groups.get("groupA") == SubscriptionGroupConfig(
        "groupA",
        consume_broadcast_enable=False,
        consume_from_min_enable=False,
        retry_max_times=3,
        retry_queue_nums=2,
    )


async def test_a_retry_policy_is_kept_and_shown(broker: AdminBroker) -> None:
    body = (
        b'{"groupName":"groupA","groupRetryPolicy":{"exponentialRetryPolicy":{"initial":700,"max":9000,"multiplier":1.5},'
        b'"type":"EXPONENTIAL"}}'
    )
    assert (await broker.ask(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body)).code == 0
    known = broker.groups.get("groupA")
    assert known is not None
    assert known.group_retry_policy == GroupRetryPolicy("EXPONENTIAL", ExponentialRetryPolicy(700, 9000, 1.5))
    shown = await broker.ask(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
    assert (
        b'"groupRetryPolicy":{"exponentialRetryPolicy":{"initial":700,"max":9000,"multiplier":1.5}' in shown.body_bytes
    )


@pytest.mark.parametrize(
    ("body", "part_of_remark"),
    [
        (b'{"groupName":"g","groupRetryPolicy":{"type":"NEVER"}}', "of type NEVER: expected CUSTOMIZED or EXPONENTIAL"),
        (
            b'{"groupName":"g","groupRetryPolicy":{"type":"EXPONENTIAL","exponentialRetryPolicy":{"initial":9,"max":1}}}',
            "expected 0 < initial <= max",
        ),
        (b'{"groupName":"g","groupRetryPolicy":{"customizedRetryPolicy":{"next":[]}}}', "a list of pauses"),
        (b"", "SubscriptionGroupConfig"),
        (b"{", "SubscriptionGroupConfig"),
        (b"{}", "SubscriptionGroupConfig"),
        (b'{"groupName":" "}', "The specified group is blank."),
        (b'{"groupName":"a/b"}', "illegal characters"),
        (b'{"groupName":"groupA","retryQueueNums":-1}', "retryQueueNums=-1 of group[groupA]: expected 0 to 65536"),
        (b'{"groupName":"groupA","retryMaxTimes":2147483648}', "retryMaxTimes=2147483648 of group[groupA]"),
        (b'{"groupName":"groupA","brokerId":9223372036854775808}', "expected a number of 64 bits"),
        (b'{"groupName":"groupA","retryQueueNums":"many"}', "SubscriptionGroupConfig"),
    ],
)
async def test_a_bad_group_is_refused_with_the_reason(broker: AdminBroker, body: bytes, part_of_remark: str) -> None:
    code, remark = await broker.refused(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body)
    assert code == ResponseCode.SYSTEM_ERROR
    assert part_of_remark in remark
    assert len(broker.groups) == len(BUILT_IN_GROUPS)


async def test_several_groups_are_created_all_or_none(broker: AdminBroker) -> None:
    code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST
    good, bad = SubscriptionGroupConfig("groupA"), SubscriptionGroupConfig("a b")
    await broker.refused(code, body=encode_body(SubscriptionGroups((good, bad))))
    assert broker.groups.get("groupA") is None
    assert (await broker.ask(code, body=encode_body(SubscriptionGroups((good,))))).code == 0
    assert broker.groups.get("groupA") == good


async def test_all_groups_come_with_their_data_version_and_the_captured_members(broker: AdminBroker) -> None:
    broker.groups.put(SubscriptionGroupConfig("groupA"))
    reply = await broker.ask(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
    assert decode_body(SubscriptionGroupTable, reply.body_bytes) == broker.groups.table()
    ours = java_json.loads(reply.body_bytes)
    captured = java_json.loads(golden_reply("498-json/topic_admin", 201).body_bytes)
    assert ours.keys() == captured.keys()
    assert ours["subscriptionGroupTable"]["TOOLS_CONSUMER"] == captured["subscriptionGroupTable"]["TOOLS_CONSUMER"]


async def test_one_group_can_be_asked_for(broker: AdminBroker) -> None:
    config = broker.groups.put(SubscriptionGroupConfig("groupA", retry_max_times=2))
    reply = await broker.ask(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, GroupRequest("groupA"))
    assert decode_body(SubscriptionGroupConfig, reply.body_bytes) == config
    code, _ = await broker.refused(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, GroupRequest("groupX"))
    assert code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST


@pytest.mark.parametrize(
    ("header", "offset_left"),
    [
        (DeleteSubscriptionGroupRequest(group_name="groupA"), 7),
        (DeleteSubscriptionGroupRequest(group_name="groupA", remove_offset=False), 7),
        (DeleteSubscriptionGroupRequest(group_name="groupA", remove_offset=True), None),
        (DeleteSubscriptionGroupRequest(group_name="groupA", clean_offset=True), None),
    ],
)
async def test_a_deleted_group_takes_its_offsets_along_only_when_told(
    broker: AdminBroker, header: DeleteSubscriptionGroupRequest, offset_left: int | None
) -> None:
    broker.groups.put(SubscriptionGroupConfig("groupA"))
    broker.offsets.commit("TopicA", "groupA", 0, 7)
    broker.offsets.commit("TopicA", "groupB", 0, 8)
    reply = await broker.ask(RequestCode.DELETE_SUBSCRIPTIONGROUP, header)
    assert (reply.code, reply.body) == (0, b"")
    assert broker.groups.get("groupA") is None
    assert broker.offsets.get("TopicA", "groupA", 0) == offset_left
    assert broker.offsets.get("TopicA", "groupB", 0) == 8


@pytest.mark.parametrize(
    ("code", "header"),
    [
        (RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, None),
        (RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, None),
        (RequestCode.DELETE_SUBSCRIPTIONGROUP, DeleteSubscriptionGroupRequest(group_name="TOOLS_CONSUMER")),
    ],
)
async def test_a_slave_changes_no_group(
    tmp_path: Path, code: int, header: DeleteSubscriptionGroupRequest | None
) -> None:
    broker = AdminBroker(tmp_path, broker_role=BrokerRole.SLAVE)
    _, remark = await broker.refused(code, header, body=b'{"groupName":"groupA"}')
    assert remark == "Can't modify topic or subscription group from slave, please execute it from master."
    assert len(broker.groups) == len(BUILT_IN_GROUPS)
    broker.store.close()


async def test_the_consumers_of_a_group_and_what_they_subscribe_to(broker: AdminBroker) -> None:
    broker.consumer("groupA", "10.0.0.9@1", topics={"TopicA": "TagA || TagB"}, port=52000)
    broker.consumer("groupA", "10.0.0.9@2", topics={"TopicA": "TagA || TagB"}, port=52001, version=405)
    reply = await broker.ask(RequestCode.GET_CONSUMER_CONNECTION_LIST, ConsumerGroupRequest("groupA"))
    assert decode_body(ConsumerConnection, reply.body_bytes) == ConsumerConnection(
        connection_set=(
            Connection(client_id="10.0.0.9@1", client_addr="10.0.0.9:52000", language="JAVA", version=409),
            Connection(client_id="10.0.0.9@2", client_addr="10.0.0.9:52001", language="JAVA", version=405),
        ),
        subscription_table={"TopicA": subscribe("TopicA", "TagA || TagB", version=NOW)},
        consume_type="CONSUME_PASSIVELY",
        message_model="CLUSTERING",
        consume_from_where="CONSUME_FROM_FIRST_OFFSET",
    )
    captured = java_json.loads(golden_reply("498-json/reset_offset", 203).body_bytes)
    ours = java_json.loads(reply.body_bytes)
    assert ours.keys() == captured.keys()
    assert ours["connectionSet"][0].keys() == captured["connectionSet"][0].keys()
    assert ours["subscriptionTable"]["TopicA"].keys() == captured["subscriptionTable"]["gsReset"].keys()


async def test_a_group_that_is_not_online_is_told_as_captured(broker: AdminBroker) -> None:
    captured = golden_reply("498-json/wrong_requests", 203)
    refusal = await broker.refused(RequestCode.GET_CONSUMER_CONNECTION_LIST, ConsumerGroupRequest("gsnobody"))
    assert refusal == (captured.code, captured.remark)
    captured = golden_reply("498-json/wrong_requests", 204)
    refusal = await broker.refused(RequestCode.GET_PRODUCER_CONNECTION_LIST, ProducerGroupRequest("gsnobody"))
    assert refusal == (captured.code, captured.remark)


async def test_the_producers_of_one_group_and_of_all(broker: AdminBroker) -> None:
    produce(broker, "pgroupA", "10.0.0.9@1", 52000)
    produce(broker, "pgroupB", "10.0.0.9@2", 52001, language=99)
    reply = await broker.ask(RequestCode.GET_PRODUCER_CONNECTION_LIST, ProducerGroupRequest("pgroupA"))
    assert decode_body(ProducerConnection, reply.body_bytes) == ProducerConnection(
        (Connection(client_id="10.0.0.9@1", client_addr="10.0.0.9:52000", language="JAVA", version=409),)
    )
    reply = await broker.ask(RequestCode.GET_ALL_PRODUCER_INFO)
    assert decode_body(ProducerTable, reply.body_bytes).data == {
        "pgroupA": (
            ProducerInfo(
                client_id="10.0.0.9@1",
                remote_ip="/10.0.0.9:52000",
                language="JAVA",
                version=409,
                last_update_timestamp=NOW,
            ),
        ),
        "pgroupB": (
            ProducerInfo(
                client_id="10.0.0.9@2",
                remote_ip="/10.0.0.9:52001",
                language="OTHER",
                version=409,
                last_update_timestamp=NOW,
            ),
        ),
    }
    captured = java_json.loads(golden_reply("498-json/admin_consumer", 328).body_bytes)
    ours = java_json.loads(reply.body_bytes)
    assert ours["data"]["pgroupA"][0].keys() == captured["data"]["gspg_admin"][0].keys()
