from __future__ import annotations

import json
import struct
import zlib
from typing import Any

import msgspec
import pytest

from downrange.model.message import MessageQueue
from downrange.model.subscription import Subscription, subscribe
from downrange.model.topics import SubscriptionGroupConfig, TopicConfig
from downrange.protocol.bodies.admin import GetBrokerConfigResponse
from downrange.protocol.bodies.body import BodyError, decode_body, encode_body, encode_java_body
from downrange.protocol.bodies.consumers import ConsumerRunningInfo, QueueOffsets
from downrange.protocol.bodies.data_version import DataVersion
from downrange.protocol.bodies.fields import FieldError, Header, Int32, Int64, decode_fields, encode_fields
from downrange.protocol.bodies.groups import (
    ConsumerData,
    ConsumeType,
    DeleteSubscriptionGroupRequest,
    HeartbeatData,
    LockBatchBody,
    MessageModel,
    ProducerData,
    SubscriptionGroupTable,
)
from downrange.protocol.bodies.offsets import ConsumerOffsets, GetMaxOffsetRequest, SearchOffsetRequest
from downrange.protocol.bodies.pull import PullMessageRequest
from downrange.protocol.bodies.registration import RegisterBrokerBody, decode_registration, encode_registration
from downrange.protocol.bodies.routes import BrokerData, QueueData, TopicRouteData
from downrange.protocol.bodies.send import (
    BatchEntry,
    SendMessageRequest,
    decode_batch,
    decode_send_v1,
    encode_batch,
    encode_send_v1,
)
from downrange.protocol.bodies.statistics import ConsumeStats, OffsetWrapper
from downrange.protocol.bodies.topics import CreateTopicRequest, TopicConfigTable, TopicQueueMappingInfo

QUEUE_0 = MessageQueue("TopicA", "broker-a", 0)
QUEUE_1 = MessageQueue("TopicA", "broker-a", 1)


# --- headers


class Every(Header, frozen=True, kw_only=True):
    """A header with every kind of field."""

    text: str
    some_number: Int32
    big: Int64 = 0
    share: float = 0.0
    is_force: bool = False
    maybe: Int32 | None = None


def test_fields_travel_as_strings_and_none_stays_at_home() -> None:
    header = Every(text="t", some_number=-1, big=2**40, share=0.5, is_force=True)
    fields = {"text": "t", "someNumber": "-1", "big": "1099511627776", "share": "0.5", "isForce": "true"}
    assert encode_fields(header) == fields
    assert decode_fields(Every, fields) == header
    assert decode_fields(Every, {**fields, "AccessKey": "unknown to us"}) == header


@pytest.mark.parametrize(
    ("change", "field", "problem"),
    [
        ({"text": None}, "text", "missing required field 'text'"),
        ({"someNumber": "x"}, "someNumber", "field 'someNumber' is not a number: 'x'"),
        ({"someNumber": ""}, "someNumber", "field 'someNumber' is not a number: ''"),
        ({"someNumber": "1.5"}, "someNumber", "field 'someNumber' is not a number: '1.5'"),
        ({"someNumber": "2147483648"}, "someNumber", "field 'someNumber' is out of range: '2147483648'"),
        ({"maybe": "-2147483649"}, "maybe", "field 'maybe' is out of range: '-2147483649'"),
        ({"big": "9223372036854775808"}, "big", "field 'big' is out of range: '9223372036854775808'"),
        ({"share": "half"}, "share", "field 'share' is not a number: 'half'"),
        ({"isForce": "perhaps"}, "isForce", "field 'isForce' is not true or false: 'perhaps'"),
    ],
)
def test_a_missing_or_wrong_field_is_named(change: dict[str, str | None], field: str, problem: str) -> None:
    fields = {"text": "t", "someNumber": "1", **change}
    with pytest.raises(FieldError) as refused:
        decode_fields(Every, {name: value for name, value in fields.items() if value is not None})
    assert str(refused.value) == problem
    assert refused.value.field == field


# The header of a send as a 4.9.8 producer writes it.
SEND_V2 = {
    "a": "pg",
    "b": "TopicA",
    "c": "TBW102",
    "d": "4",
    "e": "1",
    "f": "0",
    "g": "1700000000000",
    "h": "0",
    "i": "TAGS\x01TagA\x02WAIT\x01true",
    "j": "0",
    "k": "false",
    "m": "false",
    "n": "broker-a",
}
SEND_V1 = {
    "producerGroup": "pg",
    "topic": "TopicA",
    "defaultTopic": "TBW102",
    "defaultTopicQueueNums": "4",
    "queueId": "1",
    "sysFlag": "0",
    "bornTimestamp": "1700000000000",
    "flag": "0",
    "properties": "TAGS\x01TagA\x02WAIT\x01true",
    "reconsumeTimes": "0",
    "unitMode": "false",
    "batch": "false",
    "bname": "broker-a",
}
SEND = SendMessageRequest(
    producer_group="pg",
    topic="TopicA",
    queue_id=1,
    born_timestamp=1_700_000_000_000,
    properties="TAGS\x01TagA\x02WAIT\x01true",
    bname="broker-a",
)


def test_a_send_request_is_the_same_in_both_encodings() -> None:
    assert decode_fields(SendMessageRequest, SEND_V2) == SEND
    assert encode_fields(SEND) == SEND_V2
    assert list(encode_fields(SEND)) == list(SEND_V2)  # the order Java's binary codec writes
    assert decode_send_v1({**SEND_V1, "AccessKey": "k"}) == SEND
    assert encode_send_v1(SEND) == SEND_V1


def test_a_send_request_is_read_straight_from_header_text() -> None:
    text = json.dumps({**SEND_V2, "Signature": "s"}).encode()
    assert msgspec.json.decode(text, type=SendMessageRequest, strict=False) == SEND


def test_errors_of_the_long_encoding_use_its_names() -> None:
    with pytest.raises(FieldError, match=r"^missing required field 'queueId'$") as refused:
        decode_send_v1({name: value for name, value in SEND_V1.items() if name != "queueId"})
    assert refused.value.field == "queueId"
    with pytest.raises(FieldError, match=r"^field 'bornTimestamp' is not a number: 'a'$"):
        decode_send_v1({**SEND_V1, "bornTimestamp": "a"})


@pytest.mark.parametrize(
    ("header_type", "fields"),
    [  # as 4.9.8 clients write them
        (
            PullMessageRequest,
            '{"queueId":"0","maxMsgNums":"32","sysFlag":"3","suspendTimeoutMillis":"15000","commitOffset":"7",'
            '"bname":"broker-a","topic":"TopicA","queueOffset":"7","expressionType":"TAG","subVersion":"1700000000000",'
            '"consumerGroup":"groupA"}',
        ),
        (GetMaxOffsetRequest, '{"queueId":"0","committed":"true","topic":"TopicA"}'),
        (SearchOffsetRequest, '{"queueId":"0","topic":"TopicA","boundaryType":"LOWER","timestamp":"1"}'),
        (
            CreateTopicRequest,
            '{"readQueueNums":"8","perm":"6","writeQueueNums":"8","topicFilterType":"SINGLE_TAG","topic":"TopicA",'
            '"attributes":"+message.type=FIFO","force":"false","defaultTopic":"TBW102","order":"false",'
            '"topicSysFlag":"0"}',
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_headers_of_the_specification_survive_the_round_trip(header_type: type[msgspec.Struct], fields: str) -> None:
    assert encode_fields(decode_fields(header_type, json.loads(fields))) == json.loads(fields)


def test_a_create_topic_request_makes_a_topic_config() -> None:
    fields = {"topic": "T", "defaultTopic": "TBW102", "readQueueNums": "8", "writeQueueNums": "4", "perm": "6"}
    request = decode_fields(CreateTopicRequest, {**fields, "topicFilterType": "MULTI_TAG", "order": "true"})
    assert request.config == TopicConfig("T", 8, 4, 6, "MULTI_TAG", order=True)


@pytest.mark.parametrize(("name", "removes"), [("removeOffset", True), ("cleanOffset", True), ("other", False)])
def test_both_names_for_removing_offsets_are_understood(name: str, removes: bool) -> None:
    assert decode_fields(DeleteSubscriptionGroupRequest, {"groupName": "g", name: "true"}).removes_offsets is removes


def test_the_version_of_a_broker_configuration_is_json_in_a_field() -> None:
    version = DataVersion(counter=3, timestamp=1_700_000_000_000)
    response = GetBrokerConfigResponse.of(version)
    assert encode_fields(response) == {"version": '{"counter":3,"timestamp":1700000000000}'}
    assert response.data_version == version


# --- bodies


def test_members_are_written_in_javas_order_and_none_is_left_out() -> None:
    heartbeat = HeartbeatData(
        client_id="c",
        producer_data_set=(ProducerData("p"),),
        consumer_data_set=(
            ConsumerData(
                group_name="g",
                consume_type=ConsumeType.ACTIVELY,
                message_model=MessageModel.BROADCASTING,
                subscription_data_set=(subscribe("T", "TagB || TagA", version=1),),
            ),
        ),
    )
    text = (
        '{"clientID":"c","consumerDataSet":[{"consumeFromWhere":"CONSUME_FROM_LAST_OFFSET","consumeType":'
        '"CONSUME_ACTIVELY","groupName":"g","messageModel":"BROADCASTING","subscriptionDataSet":[{"classFilterMode":'
        'false,"codeSet":[2598919,2598920],"expressionType":"TAG","subString":"TagB || TagA","subVersion":1,"tagsSet":'
        '["TagA","TagB"],"topic":"T"}],"unitMode":false}],"producerDataSet":[{"groupName":"p"}]}'
    )
    assert encode_body(heartbeat).decode() == text
    assert decode_body(HeartbeatData, text.encode()) == heartbeat


def test_queues_and_numbers_as_keys_are_quoted_for_everyone_and_bare_for_old_java() -> None:
    offsets = QueueOffsets({QUEUE_1: 6})
    key = '{"brokerName":"broker-a","queueId":1,"topic":"TopicA"}'
    assert encode_body(offsets).decode() == f'{{"offsetTable":{{{json.dumps(key)}:6}}}}'
    assert encode_java_body(offsets).decode() == f'{{"offsetTable":{{{key}:6}}}}'
    committed = ConsumerOffsets(offset_table={"T@g": {0: 7, 1: 9}, "123@g": {}})
    assert encode_body(committed) == b'{"offsetTable":{"T@g":{"0":7,"1":9},"123@g":{}}}'
    assert encode_java_body(committed) == b'{"offsetTable":{"T@g":{0:7,1:9},"123@g":{}}}'


def test_bodies_surface_as_values_of_the_model() -> None:
    queue = '{"brokerName":"broker-a","queueId":%d,"topic":"TopicA"}'
    stats = decode_body(
        ConsumeStats, f'{{"offsetTable":{{{queue % 0}:{{"brokerOffset":10,"consumerOffset":7}}}}}}'.encode()
    )
    assert stats.offset_table == {QUEUE_0: OffsetWrapper(broker_offset=10, consumer_offset=7)}
    assert stats.offset_table[QUEUE_0].behind == 3
    lock = f'{{"clientId":"c","consumerGroup":"g","mqSet":[{queue % 1},{queue % 0}]}}'.encode()
    assert decode_body(LockBatchBody, lock).mq_set == {QUEUE_0, QUEUE_1}
    group = b'{"groupName":"g","retryMaxTimes":3}'
    assert decode_body(SubscriptionGroupConfig, group) == SubscriptionGroupConfig("g", retry_max_times=3)
    table = b'{"subscriptionGroupTable":{"g":' + group + b"}}"
    assert decode_body(SubscriptionGroupTable, table).subscription_group_table["g"].retry_max_times == 3
    topics = b'{"topicConfigTable":{"T":{"topicName":"T","perm":4,"unknown":[]}}}'
    assert decode_body(TopicConfigTable, topics).topic_config_table == {"T": TopicConfig("T", perm=4)}


def test_null_counts_as_absent_anywhere() -> None:
    text = (
        b'{"clientID":"c","consumerDataSet":[{"groupName":"g","unitMode":null,"subscriptionDataSet":'
        b'[{"topic":"T","tagsSet":null,"subVersion":null}]}],"producerDataSet":null}'
    )
    (consumer,) = decode_body(HeartbeatData, text).consumer_data_set
    assert consumer.subscription_data_set == (Subscription("T"),)
    assert decode_body(DataVersion, b'{"counter":null,"timestamp":5}') == DataVersion(timestamp=5)


def test_running_info_may_hold_properties_that_are_not_strings() -> None:
    info = decode_body(ConsumerRunningInfo, b'{"properties":{"a":"1","b":2,"c":true,"d":null}}')
    assert info.properties == {"a": "1", "b": 2, "c": True}


@pytest.mark.parametrize(
    ("body_type", "data", "problem"),
    [
        (DataVersion, b"", "DataVersion: expected a value"),
        (DataVersion, b"\xff", "DataVersion: not UTF-8"),
        (DataVersion, b"[]", "DataVersion: Expected `object`, got `array`"),
        (DataVersion, b'{"counter":"x"}', r"Expected `int`, got `str` - at `\$.counter`"),
        (DataVersion, b'{"counter":9223372036854775808}', r"Expected `int` <= 9223372036854775807 - at `\$.counter`"),
        (HeartbeatData, b'{"clientID":"c","producerDataSet":[{}]}', "missing required field `groupName`"),
        (LockBatchBody, b'{"clientId":"c","consumerGroup":"g","mqSet":[{"topic":"T"}]}', "queue without 'brokerName'"),
        (LockBatchBody, b'{"clientId":"c","consumerGroup":"g","mqSet":[7]}', r"got `int` - at `\$.mqSet\[0\]`"),
        (LockBatchBody, b'{"clientId":"c","consumerGroup":"g","mqSet":7}', r"at `\$.mqSet`"),
        (QueueOffsets, b'{"offsetTable":{"no queue":1}}', "the key 'no queue' is not a message queue"),
        (QueueOffsets, b'{"offsetTable":{"[[]]":1}}', "is not a message queue"),
        (QueueOffsets, b'{"offsetTable":{{"topic":[],"brokerName":"b","queueId":0}:1}}', "is not a message queue"),
        (QueueOffsets, b'{"offsetTable":[]}', r"at `\$.offsetTable`"),
        (TopicConfigTable, b'{"topicConfigTable":{"T":{"perm":6}}}', "missing required field `topic_name`"),
        (TopicConfigTable, b'{"topicConfigTable":{"T":5}}', r"got `int` - at `\$.topicConfigTable\[...\]`"),
        (ConsumerOffsets, b'{"offsetTable":{"T@g":{"x":1}}}', "Expected `int`"),
    ],
)
def test_a_body_of_the_wrong_shape_is_refused_with_the_place(body_type: type[Any], data: bytes, problem: str) -> None:
    with pytest.raises(BodyError, match=problem):
        decode_body(body_type, data)


def test_a_route_is_written_in_either_flavour() -> None:
    route = TopicRouteData(
        broker_datas=(
            BrokerData(cluster="c", broker_name="b", broker_addrs={0: "10.0.0.1:10911", 1: "10.0.0.2:10911"}),
        ),
        queue_datas=(QueueData(broker_name="b", read_queue_nums=4, write_queue_nums=4, perm=6),),
    )
    standard = encode_body(route)
    assert b'{"0":"10.0.0.1:10911","1":"10.0.0.2:10911"}' in standard
    old = encode_java_body(route)
    assert b'{0:"10.0.0.1:10911",1:"10.0.0.2:10911"}' in old
    assert decode_body(TopicRouteData, old) == decode_body(TopicRouteData, standard) == route


def test_4_8_names_the_topic_flags_of_a_route_differently() -> None:
    queue = decode_body(QueueData, b'{"brokerName":"b","perm":6,"readQueueNums":4,"topicSynFlag":1,"writeQueueNums":4}')
    assert queue.topic_syn_flag == 1


def test_a_data_version_is_bumped_by_one_change() -> None:
    assert DataVersion(counter=3, timestamp=5).bumped(9) == DataVersion(counter=4, timestamp=9)


# --- batches

# A batch body as a 4.9.8 producer writes it.
BATCH = bytes.fromhex(
    "000000240000000000000000000000000000000568656C6C6F0009544147530154616741"
    "0000001F00000000000000000000000000000002686900074B455953016B31"
)
BATCH_ENTRIES = [BatchEntry(0, b"hello", "TAGS\x01TagA"), BatchEntry(0, b"hi", "KEYS\x01k1")]


def test_a_batch_has_javas_bytes() -> None:
    assert encode_batch(BATCH_ENTRIES) == BATCH
    assert decode_batch(BATCH) == BATCH_ENTRIES
    assert decode_batch(b"") == []


def test_a_batch_cut_anywhere_else_than_between_entries_is_refused() -> None:
    for length in range(1, len(BATCH)):
        if length == 36:
            assert decode_batch(BATCH[:length]) == BATCH_ENTRIES[:1]
            continue
        with pytest.raises(BodyError, match="batch entry at byte"):
            decode_batch(BATCH[:length])


@pytest.mark.parametrize(
    ("position", "value", "problem"),
    [
        (0, 0, "body of 5 bytes in an entry of 0"),
        (0, -1, "body of 5 bytes in an entry of -1"),
        (0, 0x7FFFFFFF, "in an entry of 2147483647"),
        (16, -5, "body of -5 bytes"),
        (16, 0x7FFFFFFF, "body of 2147483647 bytes"),
        (16, 4, "do not end the entry"),
    ],
)
def test_a_batch_whose_lengths_lie_is_refused(position: int, value: int, problem: str) -> None:
    lying = bytearray(BATCH)
    struct.pack_into(">i", lying, position, value)
    with pytest.raises(BodyError, match=problem):
        decode_batch(bytes(lying))


def test_batch_properties_have_their_limits() -> None:
    with pytest.raises(BodyError, match="properties of 32768 bytes"):
        encode_batch([BatchEntry(0, b"", "x" * 32768)])
    with pytest.raises(BodyError, match="not UTF-8"):
        decode_batch(BATCH[:27] + b"\xff" + BATCH[28:])


# --- registration

# A compressed registration body as a 4.9.8 broker writes it.
REGISTRATION = bytes.fromhex(
    "78DA63606050AF564ACE2FCD2B492D52B232D6512AC9CC4D2D2E49CC2D50B232343740805A0606064620160FC92FC84C76543001423385604F"
    "3F771FD7F8104777A01453742C00332112F4"
)
TOPICS = RegisterBrokerBody(
    topic_config_serialize_wrapper=TopicConfigTable(
        topic_config_table={"TopicA": TopicConfig("TopicA", 4, 4)},
        data_version=DataVersion(counter=3, timestamp=1_700_000_000_000),
    )
)


def test_a_deflated_registration_is_javas() -> None:
    assert decode_registration(REGISTRATION) == TOPICS
    assert zlib.decompress(encode_registration(TOPICS, 409)) == zlib.decompress(REGISTRATION)


def test_a_deflated_registration_of_5x_has_attributes_and_mappings() -> None:
    text = b'TopicA 4 4 6 SINGLE_TAG {"message.type":"NORMAL OR NOT"}'
    plain = zlib.decompress(REGISTRATION)
    old = b"TopicA 4 4 6 SINGLE_TAG"
    newer = plain.replace(len(old).to_bytes(4, "big") + old, len(text).to_bytes(4, "big") + text)
    assert decode_registration(zlib.compress(newer)) == TOPICS
    mapping = TopicQueueMappingInfo(topic="TopicA", total_queues=8, bname="broker-a", curr_id_map={0: 0, 1: 1})
    mapped = msgspec.structs.replace(
        TOPICS,
        topic_config_serialize_wrapper=msgspec.structs.replace(
            TOPICS.topic_config_serialize_wrapper, topic_queue_mapping_info_map={"TopicA": mapping}
        ),
    )
    assert decode_registration(encode_registration(mapped, 413)) == mapped
    assert decode_registration(encode_registration(mapped, 409)) == TOPICS


def test_a_deflated_registration_cut_anywhere_is_refused() -> None:
    for length in range(len(REGISTRATION)):
        with pytest.raises(BodyError):
            decode_registration(REGISTRATION[:length])
    plain = zlib.decompress(REGISTRATION)
    for length in range(len(plain)):
        with pytest.raises(BodyError):
            decode_registration(zlib.compress(plain[:length]))


def test_a_registration_cannot_inflate_without_bound() -> None:
    with pytest.raises(BodyError, match="inflates to more than 1000 bytes"):
        decode_registration(zlib.compress(bytes(100_000)), max_inflated=1000)
    assert decode_registration(REGISTRATION, max_inflated=len(zlib.decompress(REGISTRATION))) == TOPICS


@pytest.mark.parametrize(
    ("plain", "problem"),
    [
        (b"", "cut off at byte 0"),
        (struct.pack(">i", 100), "piece of 100 bytes at byte 4"),
        (struct.pack(">i", -1), "piece of -1 bytes"),
        (struct.pack(">i2si", 2, b"{}", 0x7FFFFFFF), "announces 2147483647 pieces"),
        (struct.pack(">i2sii5s", 2, b"{}", 1, 5, b"T 4 4"), "topic that cannot be read: 'T 4 4'"),
        (struct.pack(">i2sii13s", 2, b"{}", 1, 13, b"T 4 x 6 SINGL"), "topic that cannot be read"),
        (struct.pack(">i2sii1s", 2, b"{}", 1, 1, b"\xff"), "not UTF-8"),
        (struct.pack(">i2si", 2, b"xx", 0), "DataVersion: unreadable"),
    ],
)
def test_a_registration_that_lies_is_refused(plain: bytes, problem: str) -> None:
    with pytest.raises(BodyError, match=problem):
        decode_registration(zlib.compress(plain))
