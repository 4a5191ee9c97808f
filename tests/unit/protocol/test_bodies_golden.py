"""What genuine RocketMQ writes has its type here and survives the round trip: captured frames and samples of bodies."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec
import pytest

from downrange.model.topics import SubscriptionGroupConfig, TopicConfig
from downrange.protocol import java_json
from downrange.protocol.bodies import (
    admin,
    consumers,
    groups,
    kv_config,
    offsets,
    pull,
    query,
    registration,
    replies,
    routes,
    send,
    statistics,
    topics,
    transactions,
)
from downrange.protocol.bodies.body import BodyError, decode_body, encode_body, encode_java_body
from downrange.protocol.bodies.data_version import DataVersion
from downrange.protocol.bodies.fields import FieldError, decode_fields, encode_fields
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command
from downrange.protocol.framing import MAX_FRAME, FrameDecoder
from tests.support.golden import GOLDEN, Row, scenarios


class NoFields(msgspec.Struct, frozen=True):
    """A request or response without a header of its own."""


class Shape(NamedTuple):
    """What the two sides of one request say. A body of None is no JSON: records, properties text, or nothing."""

    request: type[msgspec.Struct] = NoFields
    request_body: type[Any] | None = None
    response: type[msgspec.Struct] = NoFields
    response_body: type[Any] | None = None


R = RequestCode
SHAPES: dict[int, Shape] = {
    R.SEND_MESSAGE: Shape(send.SendMessageRequest, response=send.SendMessageResponse),
    R.SEND_MESSAGE_V2: Shape(send.SendMessageRequest, response=send.SendMessageResponse),
    R.SEND_BATCH_MESSAGE: Shape(send.SendMessageRequest, response=send.SendMessageResponse),
    R.SEND_REPLY_MESSAGE: Shape(send.SendMessageRequest, response=send.SendMessageResponse),
    R.SEND_REPLY_MESSAGE_V2: Shape(send.SendMessageRequest, response=send.SendMessageResponse),
    R.CONSUMER_SEND_MSG_BACK: Shape(send.ConsumerSendMessageBackRequest),
    R.PULL_MESSAGE: Shape(pull.PullMessageRequest, response=pull.PullMessageResponse),
    R.LITE_PULL_MESSAGE: Shape(pull.PullMessageRequest, response=pull.PullMessageResponse),
    R.QUERY_MESSAGE: Shape(query.QueryMessageRequest, response=query.QueryMessageResponse),
    R.VIEW_MESSAGE_BY_ID: Shape(query.ViewMessageRequest),
    R.QUERY_CONSUME_QUEUE: Shape(query.QueryConsumeQueueRequest, response_body=query.ConsumeQueueEntries),
    R.QUERY_CONSUMER_OFFSET: Shape(offsets.QueryConsumerOffsetRequest, response=offsets.OffsetResponse),
    R.UPDATE_CONSUMER_OFFSET: Shape(offsets.UpdateConsumerOffsetRequest),
    R.SEARCH_OFFSET_BY_TIMESTAMP: Shape(offsets.SearchOffsetRequest, response=offsets.OffsetResponse),
    R.GET_MAX_OFFSET: Shape(offsets.GetMaxOffsetRequest, response=offsets.OffsetResponse),
    R.GET_MIN_OFFSET: Shape(offsets.QueueRequest, response=offsets.OffsetResponse),
    R.GET_EARLIEST_MSG_STORETIME: Shape(offsets.QueueRequest, response=offsets.EarliestStoreTimeResponse),
    R.GET_ALL_CONSUMER_OFFSET: Shape(response_body=offsets.ConsumerOffsets),
    R.GET_ALL_DELAY_OFFSET: Shape(response_body=offsets.DelayOffsets),
    R.QUERY_CORRECTION_OFFSET: Shape(offsets.QueryCorrectionOffsetRequest, response_body=offsets.CorrectionOffsets),
    R.CLONE_GROUP_OFFSET: Shape(offsets.CloneGroupOffsetRequest),
    R.UPDATE_AND_CREATE_TOPIC: Shape(topics.CreateTopicRequest),
    R.UPDATE_AND_CREATE_TOPIC_LIST: Shape(request_body=topics.TopicConfigs),
    R.GET_ALL_TOPIC_CONFIG: Shape(response_body=topics.TopicConfigTable),
    R.GET_TOPIC_CONFIG: Shape(topics.TopicRequest, response_body=TopicConfig),
    R.DELETE_TOPIC_IN_BROKER: Shape(topics.TopicRequest),
    R.DELETE_TOPIC_IN_NAMESRV: Shape(topics.DeleteTopicInNamesrvRequest),
    R.HEART_BEAT: Shape(request_body=groups.HeartbeatData),
    R.UNREGISTER_CLIENT: Shape(groups.UnregisterClientRequest),
    R.CHECK_CLIENT_CONFIG: Shape(request_body=groups.CheckClientBody),
    R.GET_CONSUMER_LIST_BY_GROUP: Shape(groups.ConsumerGroupRequest, response_body=groups.ConsumerIds),
    R.NOTIFY_CONSUMER_IDS_CHANGED: Shape(groups.ConsumerGroupRequest),
    R.LOCK_BATCH_MQ: Shape(request_body=groups.LockBatchBody, response_body=groups.LockedQueues),
    R.UNLOCK_BATCH_MQ: Shape(request_body=groups.LockBatchBody),
    R.GET_CONSUMER_CONNECTION_LIST: Shape(groups.ConsumerGroupRequest, response_body=groups.ConsumerConnection),
    R.GET_PRODUCER_CONNECTION_LIST: Shape(groups.ProducerGroupRequest, response_body=groups.ProducerConnection),
    R.GET_ALL_PRODUCER_INFO: Shape(response_body=groups.ProducerTable),
    R.QUERY_TOPIC_CONSUME_BY_WHO: Shape(topics.TopicRequest, response_body=groups.GroupList),
    R.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: Shape(request_body=SubscriptionGroupConfig),
    R.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: Shape(request_body=groups.SubscriptionGroups),
    R.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: Shape(response_body=groups.SubscriptionGroupTable),
    R.DELETE_SUBSCRIPTIONGROUP: Shape(groups.DeleteSubscriptionGroupRequest),
    R.END_TRANSACTION: Shape(transactions.EndTransactionRequest),
    R.CHECK_TRANSACTION_STATE: Shape(transactions.CheckTransactionStateRequest),
    R.RESUME_CHECK_HALF_MESSAGE: Shape(transactions.ResumeCheckHalfMessageRequest),
    R.PUT_KV_CONFIG: Shape(kv_config.PutKVConfigRequest),
    R.GET_KV_CONFIG: Shape(kv_config.KVConfigRequest, response=kv_config.GetKVConfigResponse),
    R.DELETE_KV_CONFIG: Shape(kv_config.KVConfigRequest),
    R.GET_KVLIST_BY_NAMESPACE: Shape(kv_config.KVNamespaceRequest, response_body=kv_config.KVTable),
    R.REGISTER_BROKER: Shape(
        registration.RegisterBrokerRequest,
        registration.RegisterBrokerBody,
        registration.RegisterBrokerResponse,
        kv_config.KVTable,
    ),
    R.UNREGISTER_BROKER: Shape(registration.BrokerIdentityRequest),
    R.QUERY_DATA_VERSION: Shape(
        registration.BrokerIdentityRequest, DataVersion, registration.QueryDataVersionResponse, DataVersion
    ),
    R.REGISTER_TOPIC_IN_NAMESRV: Shape(topics.TopicRequest, routes.TopicRouteData),
    R.GET_ROUTEINFO_BY_TOPIC: Shape(routes.GetRouteInfoRequest, response_body=routes.TopicRouteData),
    R.GET_BROKER_CLUSTER_INFO: Shape(response_body=routes.ClusterInfo),
    R.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: Shape(response_body=routes.TopicList),
    R.GET_TOPICS_BY_CLUSTER: Shape(routes.TopicsByClusterRequest, response_body=routes.TopicList),
    R.GET_SYSTEM_TOPIC_LIST_FROM_NS: Shape(response_body=routes.TopicList),
    R.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: Shape(response_body=routes.TopicList),
    R.GET_UNIT_TOPIC_LIST: Shape(response_body=routes.TopicList),
    R.GET_HAS_UNIT_SUB_TOPIC_LIST: Shape(response_body=routes.TopicList),
    R.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: Shape(response_body=routes.TopicList),
    R.WIPE_WRITE_PERM_OF_BROKER: Shape(routes.BrokerNameRequest, response=routes.WipeWritePermResponse),
    R.ADD_WRITE_PERM_OF_BROKER: Shape(routes.BrokerNameRequest, response=routes.AddWritePermResponse),
    R.UPDATE_NAMESRV_CONFIG: Shape(),
    R.GET_NAMESRV_CONFIG: Shape(),
    R.UPDATE_BROKER_CONFIG: Shape(),
    R.GET_BROKER_CONFIG: Shape(response=admin.GetBrokerConfigResponse),
    R.GET_BROKER_RUNTIME_INFO: Shape(response_body=kv_config.KVTable),
    R.CLEAN_EXPIRED_CONSUMEQUEUE: Shape(),
    R.CLEAN_UNUSED_TOPIC: Shape(),
    R.DELETE_EXPIRED_COMMITLOG: Shape(),
    R.GET_TOPIC_STATS_INFO: Shape(topics.TopicRequest, response_body=statistics.TopicStats),
    R.GET_CONSUME_STATS: Shape(statistics.GetConsumeStatsRequest, response_body=statistics.ConsumeStats),
    R.GET_BROKER_CONSUME_STATS: Shape(
        statistics.GetBrokerConsumeStatsRequest, response_body=statistics.ConsumeStatsList
    ),
    R.QUERY_CONSUME_TIME_SPAN: Shape(statistics.ConsumeTimeSpanRequest, response_body=statistics.ConsumeTimeSpans),
    R.VIEW_BROKER_STATS_DATA: Shape(statistics.ViewBrokerStatsRequest, response_body=statistics.BrokerStatsData),
    R.GET_CONSUMER_RUNNING_INFO: Shape(
        consumers.GetConsumerRunningInfoRequest, response_body=consumers.ConsumerRunningInfo
    ),
    R.CONSUME_MESSAGE_DIRECTLY: Shape(
        consumers.ConsumeMessageDirectlyRequest, response_body=consumers.ConsumeMessageDirectlyResult
    ),
    R.INVOKE_BROKER_TO_RESET_OFFSET: Shape(consumers.ResetOffsetRequest, response_body=consumers.QueueOffsets),
    R.RESET_CONSUMER_CLIENT_OFFSET: Shape(consumers.ResetOffsetRequest, consumers.QueueOffsets),
    R.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: Shape(
        consumers.GetConsumerStatusRequest, response_body=consumers.ConsumerStatus
    ),
    R.GET_CONSUMER_STATUS_FROM_CLIENT: Shape(
        consumers.GetConsumerStatusRequest, response_body=consumers.ConsumerStatus
    ),
    R.PUSH_REPLY_MESSAGE_TO_CLIENT: Shape(replies.PushReplyMessageRequest),
}

# Of other families: access control, 5.x consumption by POP, recall; and a code that does not exist, asked on purpose.
NOT_TYPED = {
    R.UPDATE_AND_CREATE_ACL_CONFIG,
    R.DELETE_ACL_CONFIG,
    R.GET_BROKER_CLUSTER_ACL_INFO,
    R.RECALL_MESSAGE,
    R.QUERY_ASSIGNMENT,
    R.SET_MESSAGE_REQUEST_MODE,
    R.POP_MESSAGE,
    R.ACK_MESSAGE,
    R.CHANGE_MESSAGE_INVISIBLETIME,
    9999,
}
V1 = {R.SEND_MESSAGE, R.SEND_REPLY_MESSAGE}
# Read by access control and by the transport, on any request.
ON_ANY_REQUEST = {"AccessKey", "Signature", "SecurityToken", "ReqT"}
# Announces 5.x's heartbeat v2, which is off unless a client asks for it.
ON_ANY_HEARTBEAT_RESPONSE = {"IS_SUPPORT_HEART_BEAT_V2", "IS_SUB_CHANGE"}
# What the captures hold on purpose: where, and what we say to it.
WRONG_REQUESTS = {
    "send: missing field e": "missing required field 'e'",
    "send: not a number": "field 'e' is not a number: 'x'",
    "raw: get, missing key, list, missing namespace": "missing required field 'key'",
}
UNREADABLE_BODY = "heartbeat with an unreadable body"
# Members only 5.x knows, or texts derived from other members.
UNUSED_MEMBERS = {
    "attributes",
    "consumeMessageOrderly",
    "consumeTimeoutMinute",
    "groupRetryPolicy",
    "groupSysFlag",
    "topicQueueMappingDetailMap",
    "totalInflightDiff",
    "consumeTimeStampStr",
    "maxTimeStampStr",
    "minTimeStampStr",
}
WITH_FULL_HEADER = {
    ResponseCode.SUCCESS,
    ResponseCode.SLAVE_NOT_AVAILABLE,
    ResponseCode.PULL_NOT_FOUND,
    ResponseCode.PULL_RETRY_IMMEDIATELY,
    ResponseCode.PULL_OFFSET_MOVED,
}


class Exchange(NamedTuple):
    """A captured frame with the code of the request it is or answers."""

    row: Row
    command: Command
    code: int


def exchanges(rows: Iterable[Row]) -> Iterator[Exchange]:
    asked: dict[tuple[int, str, int], int] = {}
    for row in rows:
        (command,) = FrameDecoder(max_header=MAX_FRAME).feed(row.frame)
        code = row.code
        if row.is_response:
            code = asked[row.connection, row.receiver, row.opaque]
        else:
            asked[row.connection, row.sender, row.opaque] = code
        if code not in NOT_TYPED:
            yield Exchange(row, command, code)


def fields_again(code: int, header_type: type[msgspec.Struct], command: Command) -> dict[str, str] | FieldError:
    """The ext fields after a round trip through the typed header, or what is wrong with them."""
    try:
        if code in V1 and not command.is_response:
            return send.encode_send_v1(send.decode_send_v1(command.ext_fields))
        header = command.header(header_type)
    except FieldError as error:
        return error
    assert decode_fields(header_type, command.ext_fields) == header
    assert decode_fields(header_type, encode_fields(header)) == header
    return encode_fields(header)


@pytest.mark.parametrize("scenario", sorted(scenarios()))
def test_captured_headers_survive_the_round_trip(scenario: str) -> None:
    for row, command, code in exchanges(scenarios()[scenario]):
        shape = SHAPES[code]
        if row.is_response and command.code not in WITH_FULL_HEADER:
            continue
        again = fields_again(code, shape.response if row.is_response else shape.request, command)
        if isinstance(again, FieldError):
            assert str(again) == WRONG_REQUESTS.get(row.note.removeprefix("request; ")), row.place
            continue
        original = command.ext_fields
        assert {name: again[name] for name in original if name in again} == {
            name: value for name, value in original.items() if name in again
        }, row.place
        unknown = original.keys() - again.keys()
        if not row.is_response:
            unknown -= ON_ANY_REQUEST
            # The driver of these raw requests filled in every field of the family.
            if "raw requests" in row.note or (code == R.GET_TOPIC_CONFIG and "lo" in unknown):
                continue
        elif code == R.HEART_BEAT:
            unknown -= ON_ANY_HEARTBEAT_RESPONSE
        assert not unknown, f"{row.place}: {RequestCode(code).name} has fields we do not know"


@pytest.mark.parametrize("scenario", sorted(scenarios()))
def test_captured_bodies_survive_the_round_trip(scenario: str) -> None:
    for row, command, code in exchanges(scenarios()[scenario]):
        shape = SHAPES[code]
        body_type = shape.response_body if row.is_response else shape.request_body
        data = command.body_bytes
        if not data or body_type is None:
            continue
        if row.note.endswith(UNREADABLE_BODY):
            with pytest.raises(BodyError, match="HeartbeatData: unreadable at character 0"):
                decode_body(body_type, data)
            continue
        if code == R.REGISTER_BROKER and command.ext_fields.get("compressed") == "true":
            registered = registration.decode_registration(data)
            assert registered.topic_config_serialize_wrapper.topic_config_table
            assert registration.decode_registration(registration.encode_registration(registered, 409)) == registered
            continue
        body = decode_body(body_type, data)
        standard = encode_body(body)
        assert decode_body(body_type, standard) == body, row.place
        assert decode_body(body_type, encode_java_body(body)) == body, row.place
        original = java_json.loads(data)
        if original:  # an empty registration gains its empty tables
            assert ordered(json.loads(standard)) == ordered(original), row.place


def samples() -> list[tuple[type[Any], bytes]]:
    types = {kind.__name__: kind for shape in SHAPES.values() for kind in shape if kind is not None}
    types |= {kind.__name__: kind for kind in (consumers.QueueOffsetList, pull.OffsetMovedEvent)}
    lines = (GOLDEN / "body_samples.txt").read_text("utf-8").splitlines()
    pairs = (line.split(" ", 1) for line in lines if not line.startswith("#"))
    return [(types[name], text.encode()) for name, text in pairs]


@pytest.mark.parametrize(("body_type", "data"), samples(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_sample_is_read_and_written_as_equal_data(body_type: type[Any], data: bytes) -> None:
    body = decode_body(body_type, data)
    original = ordered(java_json.loads(data))
    for again in (encode_body(body), encode_java_body(body)):
        assert decode_body(body_type, again) == body
        assert ordered(java_json.loads(again)) == original
    json.loads(encode_body(body))


def ordered(value: Any) -> Any:
    """The value with arrays sorted (Java's sets have no order) and without the members we have no use for."""
    if isinstance(value, dict):
        return {name: ordered(member) for name, member in value.items() if name not in UNUSED_MEMBERS}
    if isinstance(value, list):
        return sorted((ordered(item) for item in value), key=java_json.canonical)
    return value


def test_every_request_of_4_9_that_anyone_sends_has_its_types() -> None:
    unused = {
        R.QUERY_BROKER_OFFSET,
        R.GET_TOPIC_CONFIG_LIST,
        R.GET_TOPIC_NAME_LIST,
        R.TRIGGER_DELETE_FILES,
        R.GET_CLIENT_CONFIG,
        R.SUSPEND_CONSUMER,
        R.RESUME_CONSUMER,
        R.RESET_CONSUMER_OFFSET_IN_CONSUMER,
        R.RESET_CONSUMER_OFFSET_IN_BROKER,
        R.ADJUST_CONSUMER_THREAD_POOL,
        R.WHO_CONSUME_THE_MESSAGE,
        R.REGISTER_FILTER_SERVER,
        R.REGISTER_MESSAGE_FILTER_CLASS,
    }
    access_control_and_timer = {code for code in RequestCode if 50 <= code <= 61}
    assert {code for code in RequestCode if code < 330} - unused - access_control_and_timer <= SHAPES.keys()


def test_the_captures_hold_what_these_tests_are_about() -> None:
    seen = [exchange for rows in scenarios().values() for exchange in exchanges(rows)]
    assert len(seen) > 5000
    assert {code for _, _, code in seen} <= SHAPES.keys()
    assert len({code for _, _, code in seen}) > 60
    notes = {row.note for row, _, _ in seen}
    assert all(any(note.endswith(wrong) for note in notes) for wrong in (*WRONG_REQUESTS, UNREADABLE_BODY))
    assert any(b"{0:" in command.body_bytes for _, command, _ in seen)
    assert any(b"{{" in command.body_bytes for _, command, _ in seen)


def test_captured_routes_are_written_in_both_flavours_as_java_writes_them() -> None:
    flavours = set()
    for rows in scenarios().values():
        for row, command, code in exchanges(rows):
            data = command.body_bytes
            if code != R.GET_ROUTEINFO_BY_TOPIC or not row.is_response or not data:
                continue
            route = decode_body(routes.TopicRouteData, data)
            if len(route.broker_datas) > 1 or len(route.broker_datas[0].broker_addrs) > 1:
                continue  # more than one entry: Java's order of map members is not ours
            is_standard = b'"brokerAddrs":{"' in data
            flavours.add(is_standard)
            assert (encode_body(route) if is_standard else encode_java_body(route)) == data, row.place
    assert flavours == {True, False}
