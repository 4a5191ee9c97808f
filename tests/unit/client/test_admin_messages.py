"""Operator actions on single messages."""

from __future__ import annotations

import pytest

from downrange.client.admin import Admin
from downrange.client.admin.messages import choose_queue
from downrange.client.errors import MessageNotFound, NoRoute
from downrange.client.producer.send_result import SendStatus
from downrange.model.errors import MessageError
from downrange.model.message import Message, MessageQueue, StoredMessage
from downrange.model.message_id import pack_host
from downrange.model.properties import decode_properties, encode_properties
from downrange.model.record import decode_record, encode_record
from downrange.protocol.bodies.pull import PullMessageResponse
from downrange.protocol.bodies.query import QueryMessageResponse
from downrange.protocol.bodies.routes import BrokerData, QueueData, TopicRouteData
from downrange.protocol.bodies.send import SendMessageResponse
from downrange.protocol.codes import RequestCode
from downrange.protocol.errors import InternalError, NoPermission
from tests.unit.client.fake_cluster import (
    TOPIC,
    Answering,
    FakeBroker,
    FakeCluster,
    captured,
    genuine,
    mqadmin_sent,
    reply,
)

ID = "C000020246E79A24E7E54A7646920000"
INDEX = QueryMessageResponse(index_last_update_timestamp=1, index_last_update_phyoffset=1)
NONE_FOUND = reply(22, "can not find message, maybe time range not correct", header=INDEX)


def record(broker: FakeBroker, key: str, unique_key: str = ID, *, topic: str = TOPIC, stored: int = 5) -> bytes:
    """A message as `broker` stores it."""
    host, _, port = broker.address.rpartition(":")
    model = decode_record(captured("query_message", 33).body_bytes)
    properties = encode_properties({"KEYS": key, "UNIQ_KEY": unique_key})
    message = StoredMessage(
        **{
            **{name: getattr(model, name) for name in StoredMessage.__slots__},
            "topic": topic,
            "properties_text": properties,
            "store_timestamp": stored,
            "body": b"body",
        }
    )
    return encode_record(message, pack_host("10.0.0.9", 1), pack_host(host, int(port)))


def found(*records: bytes) -> Answering:
    return reply(header=INDEX, body=b"".join(records))


async def test_an_offset_id_is_looked_up_at_the_address_it_holds(cluster: FakeCluster, admin: Admin) -> None:
    stored = decode_record(record(cluster.broker, "k"))
    cluster.broker.answers[RequestCode.VIEW_MESSAGE_BY_ID] = reply(body=record(cluster.broker, "k"))
    message = await admin.messages.by_offset_id(stored.offset_message_id)
    assert message == stored
    assert cluster.broker.fields(33) == [{"offset": str(stored.physical_offset)}]
    cluster.broker.answers[RequestCode.VIEW_MESSAGE_BY_ID] = reply(1, "can not find message by the offset")
    with pytest.raises(MessageNotFound, match="can not find message"):
        await admin.messages.by_offset_id(stored.offset_message_id)


@pytest.mark.parametrize("text", ["", "zz", "0A00000100009FCF000000000000002Z", "0A" * 20])
async def test_an_id_that_is_none_is_refused(admin: Admin, text: str) -> None:
    with pytest.raises(MessageError, match="not an offset message id"):
        await admin.messages.by_offset_id(text)
    with pytest.raises(MessageNotFound, match="name its topic"):
        await admin.messages.view(text)


async def test_a_key_found_by_its_hash_only_is_dropped(cluster: FakeCluster, admin: Admin) -> None:
    a, b = cluster.brokers.values()
    a.answers[RequestCode.QUERY_MESSAGE] = found(
        record(a, "k1 k2"), record(a, "K1"), record(a, "k1", topic="elsewhere")
    )
    b.answers[RequestCode.QUERY_MESSAGE] = NONE_FOUND
    result = await admin.messages.by_key(TOPIC, "k1")
    assert {broker.name: [one.keys for one in messages] for broker, messages in result.done.items()} == {
        "broker-a": [["k1", "k2"]],
        "broker-b": [],
    }
    assert a.fields(12) == [{**mqadmin_sent("query_message", 12, 1), "topic": TOPIC, "key": "k1"}]
    b.answers[RequestCode.QUERY_MESSAGE] = reply(1, "index is being rebuilt")
    # A second more than asked for, because the index knows whole seconds only.
    result = await admin.messages.by_key(TOPIC, "k1", max_messages=3, begin=5005, end=6006)
    assert [broker.name for broker in result.failed] == ["broker-b"]
    sent = a.fields(12)[-1]
    assert (sent["maxNum"], sent["beginTimestamp"], sent["endTimestamp"]) == ("3", "4005", "6006")


async def test_the_oldest_copy_of_a_unique_id_wins(cluster: FakeCluster, admin: Admin) -> None:
    a, b = cluster.brokers.values()
    a.answers[RequestCode.QUERY_MESSAGE] = found(record(a, "k", stored=9), record(a, "k", "F" * 32, stored=1))
    b.answers[RequestCode.QUERY_MESSAGE] = found(record(b, "k", stored=7))
    message = await admin.messages.by_unique_key(TOPIC, ID)
    assert (message.store_timestamp, str(message.store_host)) == (7, b.address)
    assert a.fields(12) == [{**mqadmin_sent("query_message", 12, 0), "topic": TOPIC, "key": ID}]


async def test_a_unique_id_nobody_has_names_the_brokers_that_were_not_asked(cluster: FakeCluster, admin: Admin) -> None:
    a, b = cluster.brokers.values()
    a.answers[RequestCode.QUERY_MESSAGE] = NONE_FOUND
    b.answers[RequestCode.QUERY_MESSAGE] = reply(1, "tired")
    with pytest.raises(MessageNotFound, match=r"broker-b .* could not be asked: .*tired"):
        await admin.messages.by_unique_key(TOPIC, ID)
    a.answers[RequestCode.QUERY_MESSAGE] = reply(1, "tired too")
    with pytest.raises(InternalError):
        await admin.messages.by_unique_key(TOPIC, ID)


async def test_with_a_topic_either_id_is_found(cluster: FakeCluster, admin: Admin) -> None:
    a, b = cluster.brokers.values()
    stored = decode_record(record(a, "k"))
    for broker in (a, b):
        broker.answers[RequestCode.QUERY_MESSAGE] = NONE_FOUND
    a.answers[RequestCode.VIEW_MESSAGE_BY_ID] = reply(body=record(a, "k"))
    assert await admin.messages.view(stored.offset_message_id, TOPIC) == stored
    a.answers[RequestCode.QUERY_MESSAGE] = found(record(a, "k"))
    assert await admin.messages.view(ID, TOPIC) == stored
    with pytest.raises(MessageNotFound, match="no message 12 in the topic"):
        await admin.messages.view("12", TOPIC)


async def test_the_message_at_a_place_of_a_queue(cluster: FakeCluster, admin: Admin) -> None:
    stored = decode_record(record(cluster.broker, "k"))
    ends = PullMessageResponse(suggest_which_broker_id=0, next_begin_offset=1, min_offset=0, max_offset=1)
    found = reply(header=ends, body=record(cluster.broker, "k"))
    cluster.broker.answers[RequestCode.PULL_MESSAGE] = found
    assert await admin.messages.by_queue_offset(TOPIC, "broker-a", 1, stored.queue_offset) == stored
    for answer in (reply(19, header=ends), reply(21, header=ends), found):
        cluster.broker.answers[RequestCode.PULL_MESSAGE] = answer
        with pytest.raises(MessageNotFound, match="no message 99"):
            await admin.messages.by_queue_offset(TOPIC, "broker-a", 1, 99)
    with pytest.raises(NoRoute, match="not on the broker nobody"):
        await admin.messages.by_queue_offset(TOPIC, "nobody", 1, 0)


# --- sending ----------------------------------------------------------------------------------------------------------


def stored_at(queue_id: int) -> SendMessageResponse:
    return SendMessageResponse(msg_id="0A" * 16, queue_id=queue_id, queue_offset=42)


async def test_a_message_is_sent_with_everything_attached_to_it(cluster: FakeCluster, admin: Admin) -> None:
    b = cluster.brokers["broker-b"]
    b.answers[RequestCode.SEND_MESSAGE_V2] = reply(header=stored_at(1))
    message = Message(TOPIC, "Grüße".encode(), "TagA", "k1 k2", flag=7, properties={"colour": "red"})
    result = await admin.messages.send(message, "broker-b", 1)
    assert (result.status, result.queue, result.queue_offset) == (
        SendStatus.SEND_OK,
        MessageQueue(TOPIC, "broker-b", 1),
        42,
    )
    (sent,) = b.fields(310)
    genuine_names = set(captured_send())
    assert set(sent) == genuine_names
    assert (sent["b"], sent["e"], sent["h"], sent["n"]) == (TOPIC, "1", "7", "broker-b")
    assert decode_properties(sent["i"]) == {
        "colour": "red",
        "TAGS": "TagA",
        "KEYS": "k1 k2",
        "UNIQ_KEY": result.message_id,
        "WAIT": "true",
    }
    assert b.asked[-1].body_bytes == "Grüße".encode()
    assert result.offset_message_id == "0A" * 16


def captured_send() -> dict[str, str]:
    return mqadmin_sent("cluster_admin", 310)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (10, SendStatus.FLUSH_DISK_TIMEOUT),
        (11, SendStatus.SLAVE_NOT_AVAILABLE),
        (12, SendStatus.FLUSH_SLAVE_TIMEOUT),
    ],
)
async def test_stored_but_not_safe_is_a_status(
    cluster: FakeCluster, admin: Admin, code: int, status: SendStatus
) -> None:
    cluster.broker.answers[RequestCode.SEND_MESSAGE_V2] = reply(code, header=stored_at(0))
    assert (await admin.messages.send(Message(TOPIC, b"x"), "broker-a")).status is status


async def test_a_refused_send_is_an_error(cluster: FakeCluster, admin: Admin) -> None:
    cluster.broker.answers[RequestCode.SEND_MESSAGE_V2] = reply(16, "not yours")
    with pytest.raises(NoPermission, match="not yours"):
        await admin.messages.send(Message(TOPIC, b"x"), "broker-a")
    with pytest.raises(MessageError, match="reserved"):
        await admin.messages.send(Message(TOPIC, b"x", properties={"KEYS": "x"}))
    with pytest.raises(MessageError, match="belongs to the broker"):
        await admin.messages.send(Message("SCHEDULE_TOPIC_XXXX", b"x"))
    with pytest.raises(NoRoute, match="no queue like the one asked for"):
        await admin.messages.send(Message(TOPIC, b"x"), "broker-a", 7)


async def test_an_unknown_topic_follows_the_auto_create_topic(cluster: FakeCluster, admin: Admin) -> None:
    for broker in cluster.brokers.values():
        broker.answers[RequestCode.SEND_MESSAGE_V2] = reply(header=stored_at(0))
    await admin.messages.send(Message("brandnew", b"x"), "broker-a", 3)
    assert cluster.broker.fields(310)[0]["b"] == "brandnew"
    with pytest.raises(NoRoute):  # eight queues are there, four are used
        await admin.messages.send(Message("brandnew", b"x"), "broker-a", 4)


def route(*, perm: int = 6, addresses: dict[int, str]) -> TopicRouteData:
    return TopicRouteData(
        broker_datas=(BrokerData(cluster="c", broker_name="b", broker_addrs=addresses),),
        queue_datas=(QueueData(broker_name="b", read_queue_nums=1, write_queue_nums=2, perm=perm),),
    )


def test_only_queues_that_may_be_written_are_chosen() -> None:
    usable = route(addresses={0: "m:1", 1: "s:1"})
    assert {choose_queue(usable, "t") for _ in range(50)} == {
        (MessageQueue("t", "b", 0), "m:1"),
        (MessageQueue("t", "b", 1), "m:1"),
    }
    for useless in (route(perm=4, addresses={0: "m:1"}), route(addresses={1: "s:1"})):
        with pytest.raises(NoRoute, match="may be written"):
            choose_queue(useless, "t")


# --- consuming and following ------------------------------------------------------------------------------------------


async def test_a_message_is_handed_to_a_running_member(cluster: FakeCluster, admin: Admin) -> None:
    stored = decode_record(record(cluster.broker, "k"))
    cluster.broker.answers[RequestCode.VIEW_MESSAGE_BY_ID] = reply(body=record(cluster.broker, "k"))
    cluster.broker.answers[RequestCode.CONSUME_MESSAGE_DIRECTLY] = genuine("admin_consumer", 309)
    result = await admin.messages.consume_directly("gscg_admin", "10.0.0.9@c54557", stored.offset_message_id)
    assert result.consume_result == "CR_SUCCESS"
    sent = {**mqadmin_sent("admin_consumer", 309), "msgId": stored.offset_message_id}
    assert cluster.broker.fields(309) == [sent]
    cluster.broker.answers[RequestCode.CONSUME_MESSAGE_DIRECTLY] = reply(1, "The Consumer not online")
    with pytest.raises(InternalError, match="not online"):
        await admin.messages.consume_directly("g", "c", stored.offset_message_id)


async def test_a_message_without_trace_says_so(cluster: FakeCluster, admin: Admin) -> None:
    with pytest.raises(NoRoute):
        await admin.messages.trace(ID, "nothere")
    for broker in cluster.brokers.values():
        broker.answers[RequestCode.QUERY_MESSAGE] = NONE_FOUND
    with pytest.raises(MessageNotFound, match="only if told to"):
        await admin.messages.trace(ID)
