from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from downrange.model.message import MessageQueue
from downrange.model.subscription import Subscription
from downrange.model.topics import SubscriptionGroupConfig, TopicConfig
from downrange.protocol.bodies.body import BodyError, decode_body, encode_body, encode_java_body
from downrange.protocol.bodies.consumers import ConsumerRunningInfo, ConsumerStatus, QueueOffsets
from downrange.protocol.bodies.data_version import DataVersion
from downrange.protocol.bodies.fields import FieldError, decode_fields, encode_fields
from downrange.protocol.bodies.groups import ConsumerData, HeartbeatData, LockBatchBody, SubscriptionGroupTable
from downrange.protocol.bodies.offsets import ConsumerOffsets, UpdateConsumerOffsetRequest
from downrange.protocol.bodies.pull import PullMessageRequest
from downrange.protocol.bodies.registration import RegisterBrokerBody, decode_registration, encode_registration
from downrange.protocol.bodies.routes import BrokerData, ClusterInfo, QueueData, TopicRouteData
from downrange.protocol.bodies.send import (
    BatchEntry,
    SendMessageRequest,
    SendMessageResponse,
    decode_batch,
    decode_send_v1,
    encode_batch,
    encode_send_v1,
)
from downrange.protocol.bodies.topics import TopicConfigTable

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
INTS = st.integers(-(2**31), 2**31 - 1)
LONGS = st.integers(-(2**63), 2**63 - 1)
QUEUES = st.builds(MessageQueue, TEXTS, TEXTS, INTS)
VERSIONS = st.builds(DataVersion, counter=LONGS, timestamp=LONGS, state_version=st.none() | LONGS)
SUBSCRIPTIONS = st.builds(
    Subscription, TEXTS, TEXTS, TEXTS, st.frozensets(TEXTS), st.frozensets(INTS), LONGS, st.booleans()
)
TOPICS = st.builds(TopicConfig, TEXTS, INTS, INTS, INTS, TEXTS, INTS, st.booleans())
WORDS = st.from_regex(r"[A-Za-z_%|-]{1,12}", fullmatch=True)
BROKERS = st.builds(
    BrokerData,
    cluster=TEXTS,
    broker_name=TEXTS,
    broker_addrs=st.dictionaries(st.integers(0, 9), TEXTS),
    enable_acting_master=st.none() | st.booleans(),
    zone_name=st.none(),
)

BODIES = st.one_of(
    st.builds(
        HeartbeatData,
        client_id=TEXTS,
        consumer_data_set=st.lists(
            st.builds(ConsumerData, group_name=TEXTS, subscription_data_set=st.lists(SUBSCRIPTIONS).map(tuple)),
            max_size=3,
        ).map(tuple),
    ),
    st.builds(LockBatchBody, consumer_group=TEXTS, client_id=TEXTS, mq_set=st.frozensets(QUEUES)),
    st.builds(QueueOffsets, st.dictionaries(QUEUES, LONGS)),
    st.builds(
        ConsumerStatus,
        message_queue_table=st.dictionaries(QUEUES, LONGS),
        consumer_table=st.dictionaries(TEXTS, st.dictionaries(QUEUES, LONGS)),
    ),
    st.builds(ConsumerOffsets, offset_table=st.dictionaries(TEXTS, st.dictionaries(INTS, LONGS))),
    st.builds(
        TopicRouteData,
        broker_datas=st.lists(BROKERS, max_size=3).map(tuple),
        queue_datas=st.lists(st.builds(QueueData, broker_name=TEXTS, perm=INTS), max_size=3).map(tuple),
    ),
    st.builds(
        ClusterInfo,
        broker_addr_table=st.dictionaries(TEXTS, BROKERS, max_size=3),
        cluster_addr_table=st.dictionaries(TEXTS, st.frozensets(TEXTS), max_size=3),
    ),
    st.builds(TopicConfigTable, topic_config_table=st.dictionaries(TEXTS, TOPICS, max_size=3), data_version=VERSIONS),
    st.builds(
        SubscriptionGroupTable,
        subscription_group_table=st.dictionaries(TEXTS, st.builds(SubscriptionGroupConfig, TEXTS), max_size=3),
    ),
)


@given(BODIES)
def test_a_body_survives_the_round_trip_in_both_flavours(body: Any) -> None:
    standard = encode_body(body)
    json.loads(standard)
    assert decode_body(type(body), standard) == body
    assert decode_body(type(body), encode_java_body(body)) == body


MEMBERS = TEXTS | st.sampled_from(
    ["offsetTable", "mqTable", "topicConfigTable", "clientID", "consumerDataSet", "subscriptionDataSet", "mqSet", "{}"]
)
JSON = st.recursive(
    st.none() | st.booleans() | LONGS | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(MEMBERS, inner, max_size=4),
    max_leaves=12,
)


@given(
    st.sampled_from([HeartbeatData, QueueOffsets, ConsumerRunningInfo, TopicConfigTable, LockBatchBody, ClusterInfo]),
    st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()),
)
def test_any_body_is_read_or_refused(body_type: type[Any], data: bytes) -> None:
    try:
        body = decode_body(body_type, data)
    except BodyError:
        return
    assert isinstance(body, body_type)


SENDS = st.builds(
    SendMessageRequest,
    producer_group=TEXTS,
    topic=TEXTS,
    default_topic=TEXTS,
    default_topic_queue_nums=INTS,
    queue_id=INTS,
    sys_flag=INTS,
    born_timestamp=LONGS,
    flag=INTS,
    properties=TEXTS,
    reconsume_times=INTS,
    unit_mode=st.booleans(),
    max_reconsume_times=st.none() | INTS,
    batch=st.booleans(),
    bname=st.none() | TEXTS,
)
HEADERS = st.one_of(
    SENDS,
    st.builds(SendMessageResponse, msg_id=TEXTS, queue_id=INTS, queue_offset=LONGS, trace_on=st.none() | st.booleans()),
    st.builds(UpdateConsumerOffsetRequest, consumer_group=TEXTS, topic=TEXTS, queue_id=INTS, commit_offset=LONGS),
)


@given(HEADERS)
def test_a_header_survives_the_round_trip(header: Any) -> None:
    assert decode_fields(type(header), encode_fields(header)) == header


@given(SENDS)
def test_a_send_request_survives_the_long_encoding(request: SendMessageRequest) -> None:
    assert decode_send_v1(encode_send_v1(request)) == request


@given(st.dictionaries(st.sampled_from(PullMessageRequest.__struct_encode_fields__), TEXTS | LONGS.map(str)))
def test_any_fields_are_read_or_refused_by_name(fields: dict[str, str]) -> None:
    try:
        decode_fields(PullMessageRequest, fields)
    except FieldError as error:
        assert error.field in PullMessageRequest.__struct_encode_fields__  # noqa: PT017


@given(st.lists(st.builds(BatchEntry, INTS, st.binary(max_size=50), TEXTS)))
def test_a_batch_survives_the_round_trip(entries: list[BatchEntry]) -> None:
    assert decode_batch(encode_batch(entries)) == entries


@given(st.binary(max_size=80))
def test_any_batch_is_read_or_refused(data: bytes) -> None:
    try:
        entries = decode_batch(data)
    except BodyError:
        return
    assert len(encode_batch(entries)) == len(data)


@given(
    st.lists(
        st.builds(TopicConfig, WORDS, INTS, INTS, INTS, WORDS), max_size=5, unique_by=lambda each: each.topic_name
    ),
    VERSIONS,
    st.lists(TEXTS, max_size=2).map(tuple),
)
def test_a_deflated_registration_survives_the_round_trip(
    topics: list[TopicConfig], version: DataVersion, servers: tuple[str, ...]
) -> None:
    body = RegisterBrokerBody(
        topic_config_serialize_wrapper=TopicConfigTable(
            topic_config_table={topic.topic_name: topic for topic in topics}, data_version=version
        ),
        filter_server_list=servers,
    )
    assert decode_registration(encode_registration(body, 409)) == body
