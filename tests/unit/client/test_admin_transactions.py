"""Open transactions: which half messages are left, also where a broker does not let ops be read."""

from __future__ import annotations

from dataclasses import replace

from downrange.client.admin import Admin
from downrange.client.admin.transactions import still_open
from downrange.client.consumer.messages import ReceivedMessage, received
from downrange.model.message import MessageQueue, PhysicalOffset, QueueOffset, StoredMessage
from downrange.model.message_id import HostPort, pack_host
from downrange.model.properties import encode_properties
from downrange.model.record import encode_record
from downrange.model.topics import HALF_TOPIC
from downrange.protocol.bodies.offsets import OffsetResponse
from downrange.protocol.bodies.pull import PullMessageResponse
from downrange.protocol.bodies.query import QueryMessageResponse
from downrange.protocol.bodies.statistics import TopicOffset, TopicStats
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command
from tests.unit.client.fake_cluster import TOPIC, FakeCluster, reply

HOST = HostPort("10.0.0.9", 1)
QUEUE = MessageQueue(HALF_TOPIC, "broker-a", 0)


def half(offset: int, unique_key: str, **properties: str) -> StoredMessage:
    text = {"UNIQ_KEY": unique_key, "REAL_TOPIC": TOPIC, "PGROUP": "shop", **properties}
    return StoredMessage(
        topic=HALF_TOPIC,
        queue_id=0,
        queue_offset=QueueOffset(offset),
        physical_offset=PhysicalOffset(offset * 100),
        body=b"x",
        properties_text=encode_properties(text),
        sys_flag=0,
        flag=0,
        born_timestamp=1000 + offset,
        born_host=HOST,
        store_timestamp=2000 + offset,
        store_host=HOST,
        reconsume_times=0,
        prepared_transaction_offset=0,
        body_crc=0,
        store_size=0,
    )


def seen(*messages: StoredMessage) -> list[ReceivedMessage]:
    return [received(message, QUEUE) for message in messages]


def test_of_several_copies_the_last_counts() -> None:
    copies = seen(half(0, "a"), half(1, "b"), half(2, "a", TRANSACTION_CHECK_TIMES="1"))
    found = still_open(copies, frozenset({0}))  # its first place was left when the message was put back
    assert [(one.message.message_id, one.checks, one.topic, one.producer_group) for one in found] == [
        ("b", 0, TOPIC, "shop"),
        ("a", 1, TOPIC, "shop"),
    ]
    assert [one.message.message_id for one in still_open(copies, frozenset({0, 2}))] == ["b"]


def test_a_copy_ends_with_the_place_it_was_sent_to() -> None:
    copies = seen(half(4, "a", TRAN_PREPARED_QUEUE_OFFSET="1"))
    assert still_open(copies, frozenset({1})) == ()
    assert len(still_open(copies, frozenset({2}))) == 1


async def test_where_ops_cannot_be_read_committed_messages_are_left_out_by_their_id(
    cluster: FakeCluster, admin: Admin
) -> None:
    records = [encode_record(half(at, key), pack_host(*HOST), pack_host(*HOST)) for at, key in enumerate("abc")]
    in_topic = encode_record(replace(half(0, "b"), topic=TOPIC), pack_host(*HOST), pack_host(*HOST))

    def offsets(command: Command) -> Command:
        if command.ext_fields["topic"] != HALF_TOPIC:
            return command.reply(17, "topic not exist")
        table = {QUEUE: TopicOffset(min_offset=0, max_offset=3)}
        return reply(body=TopicStats(offset_table=table))(command)

    def by_id(command: Command) -> Command:
        if command.ext_fields["key"] != "b":
            return command.reply(22, "not found")
        header = QueryMessageResponse(index_last_update_timestamp=0, index_last_update_phyoffset=0)
        return reply(header=header, body=in_topic)(command)

    ends = PullMessageResponse(suggest_which_broker_id=0, next_begin_offset=3, min_offset=0, max_offset=3)
    cluster.brokers["broker-a"].answers |= {
        RequestCode.GET_TOPIC_STATS_INFO: offsets,
        RequestCode.QUERY_CONSUMER_OFFSET: reply(header=OffsetResponse(0)),
        RequestCode.PULL_MESSAGE: reply(header=ends, body=b"".join(records)),
        RequestCode.QUERY_MESSAGE: by_id,
    }
    cluster.brokers["broker-b"].answers[RequestCode.GET_TOPIC_STATS_INFO] = reply(17, "topic not exist")
    found = await admin.transactions.open()
    a, b = found.done.values()
    assert [one.message.message_id for one in a.messages] == ["a", "c"]
    assert not a.is_certain
    assert (b.messages, b.is_certain) == ((), True)
