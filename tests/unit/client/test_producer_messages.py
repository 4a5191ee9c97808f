"""Which messages are refused before anything is sent, and what the others become on the wire."""

from __future__ import annotations

import itertools
import random
import zlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from downrange.client.compression import Compression, CompressionMissing, compress, plain_body
from downrange.client.config import ProducerConfig
from downrange.client.errors import SendFailed
from downrange.client.producer import outgoing as rules
from downrange.client.producer.outgoing import (
    Outgoing,
    OutgoingRules,
    check_batch,
    make_batch,
    make_outgoing,
    properties_text,
)
from downrange.client.producer.producer import AsyncProducer
from downrange.model.errors import MessageError
from downrange.model.hashing import java_hash
from downrange.model.message import Message, MessageQueue, SysFlag
from downrange.model.properties import decode_properties
from downrange.protocol.bodies.fields import encode_fields
from downrange.protocol.bodies.send import SendMessageRequest, decode_batch, encode_entry
from downrange.protocol.bodies.send_template import LONGEST_FRAME, SendTemplate, encode_send
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command
from downrange.protocol.framing import FrameDecoder, encode
from downrange.settings import ConfigError
from tests.support.golden import scenarios
from tests.unit.client.fake_cluster import TOPIC, FakeCluster, reply
from tests.unit.client.scripted import answer_sends, in_turn, producer_of, sends, stored, where_sends_went
from tests.unit.client.test_ids_and_bodies import stored as stored_message

CONFIG = ProducerConfig()


def genuine_sends(scenario: str) -> list[Command]:
    """The sends of the genuine Java client."""
    found = []
    for row in scenarios()[f"498-json/{scenario}"]:
        (command,) = FrameDecoder().feed(row.frame)
        if row.sender == "client" and not row.is_response and command.code in (310, 320):
            found.append(command)
    assert found
    return found


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (Message("", b"x"), rules.InvalidTopic),
        (Message("  ", b"x"), rules.InvalidTopic),
        (Message("t" * 128, b"x"), rules.InvalidTopic),
        (Message("bad topic", b"x"), rules.InvalidTopic),
        (Message("bad/../topic", b"x"), rules.InvalidTopic),
        (Message(None, b"x"), rules.InvalidTopic),  # type: ignore[arg-type]
        (Message("SCHEDULE_TOPIC_XXXX", b"x"), rules.ForbiddenTopic),
        (Message("RMQ_SYS_TRANS_HALF_TOPIC", b"x"), rules.ForbiddenTopic),
        (Message(TOPIC, b""), rules.BodyMissing),
        (Message(TOPIC, None), rules.BodyMissing),  # type: ignore[arg-type]
        (Message(TOPIC, "text"), rules.InvalidBody),  # type: ignore[arg-type]
        (Message(TOPIC, b"x" * 101), rules.BodyTooLarge),
        (Message(TOPIC, b"x", tags="a\x01b"), rules.InvalidProperty),
        (Message(TOPIC, b"x", keys=7), rules.InvalidProperty),  # type: ignore[arg-type]
        (Message(TOPIC, b"x", properties={"UNIQ_KEY": "mine"}), rules.InvalidProperty),
        (Message(TOPIC, b"x", properties={"a": ""}), rules.InvalidProperty),
        (Message(TOPIC, b"x", properties={"a\x02": "b"}), rules.InvalidProperty),
        (Message(TOPIC, b"x", properties={"a": "€" * 11_000}), rules.InvalidProperty),
        (Message(TOPIC, b"x", delay_level=-1), rules.InvalidDelayLevel),
    ],
)
async def test_a_message_that_breaks_a_rule_is_not_sent(
    cluster: FakeCluster, message: Message, error: type[MessageError]
) -> None:
    answer_sends(cluster, stored)
    async with producer_of(cluster.namesrv, config=ProducerConfig(max_message_size=100)) as producer:
        for send in (producer.send, producer.send_oneway, producer.send_async):
            with pytest.raises(error) as caught:
                await send(message)
            assert type(caught.value) is error
            assert not caught.value.retriable
        assert "on_their_way=0" in repr(producer)
    assert where_sends_went(cluster) == {"broker-a": 0, "broker-b": 0}


@pytest.mark.parametrize("group", ["", "bad group", "g" * 256, "DEFAULT_PRODUCER"])
def test_a_group_needs_a_proper_name(group: str) -> None:
    with pytest.raises(rules.InvalidGroup):
        AsyncProducer(group, "127.0.0.1:1")


@pytest.mark.parametrize(
    "options",
    [
        {"send_timeout_seconds": 0},
        {"attempt_timeout_seconds": -1.0},
        {"retry_times_when_send_failed": -1},
        {"max_message_size": 0},
        {"compression_level": 77},
        {"fault_strategy": "best"},
    ],
)
def test_settings_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ProducerConfig(**options)


# --- as they travel ---------------------------------------------------------------------------------------------------


def outgoing(message: Message, message_id: str, config: ProducerConfig, topic: str) -> Outgoing:
    return make_outgoing(message, topic, message_id[:-4], int(message_id[-4:], 16), 0, OutgoingRules.of(config))


def test_a_send_has_the_fields_of_the_genuine_client() -> None:
    (first, *_) = genuine_sends("send_ordered")
    theirs = first.header(SendMessageRequest)
    properties = decode_properties(theirs.properties)
    message = Message(theirs.topic, first.body_bytes, tags=properties["TAGS"], keys=properties["KEYS"])
    ready = outgoing(message, properties["UNIQ_KEY"], CONFIG, message.topic)
    assert ready.body == first.body_bytes
    assert decode_properties(ready.properties) == properties
    template = SendTemplate(
        ready.code,
        theirs.producer_group,
        theirs.topic,
        theirs.bname or "",
        default_topic=CONFIG.create_topic_key,
        default_topic_queue_nums=CONFIG.default_topic_queue_nums,
    )
    raw = template.fields(theirs.queue_id, ready.sys_flag, theirs.born_timestamp, ready.flag, theirs.properties)
    ours = Command(ready.code, raw_ext=raw, body=ready.body)
    (received,) = FrameDecoder().feed(encode(ours, opaque=1))
    assert received.ext_fields == first.ext_fields


def test_a_delayed_and_a_namespaced_send_match_the_genuine_client() -> None:
    delayed = genuine_sends("send_delay")[0].header(SendMessageRequest)
    theirs = decode_properties(delayed.properties)
    message = Message("T", b"x", tags=theirs["TAGS"], keys=theirs["KEYS"], delay_level=1)
    assert decode_properties(properties_text(message, theirs["UNIQ_KEY"])) == theirs
    spaced = genuine_sends("namespace_vip")[0].header(SendMessageRequest)
    theirs = decode_properties(spaced.properties)
    config = ProducerConfig(namespace="gsnsA")
    message = Message("TopicInNs", b"x", tags=theirs["TAGS"], keys=theirs["KEYS"])
    assert decode_properties(outgoing(message, theirs["UNIQ_KEY"], config, spaced.topic).properties) == theirs


def test_a_batch_matches_the_genuine_client() -> None:
    command = genuine_sends("send_batch")[0]
    header = command.header(SendMessageRequest)
    theirs = decode_batch(command.body_bytes)
    ids = [decode_properties(entry.properties)["UNIQ_KEY"] for entry in theirs]
    members = [
        Message(
            header.topic,
            entry.body,
            tags=(found := decode_properties(entry.properties))["TAGS"],
            keys=found["KEYS"],
            properties={"n": found["n"]},
        )
        for entry in theirs
    ]
    assert len({each[:-4] for each in ids}) == 1
    numbers = (int(each[-4:], 16) for each in ids)
    (ready,) = make_batch(
        tuple(members), header.topic, header.topic, ids[0][:-4], numbers.__next__, 0, OutgoingRules.of(CONFIG)
    )
    assert ready.code == command.code
    assert decode_properties(ready.properties) == decode_properties(header.properties)
    ours = decode_batch(ready.body)
    assert [entry.body for entry in ours] == [entry.body for entry in theirs]
    assert [decode_properties(entry.properties) for entry in ours] == [
        decode_properties(entry.properties) for entry in theirs
    ]
    assert all(entry.properties.endswith("\x02") for entry in ours)  # 4.8 appends without a separator


@given(
    group=st.text("ab%_-|", min_size=1, max_size=9),
    topic=st.text("ab%d_", min_size=1, max_size=9),
    broker=st.text(min_size=1, max_size=9).filter(lambda text: "\ud800" not in text),
    properties=st.text(st.characters(codec="utf-8"), max_size=40),
    numbers=st.tuples(st.integers(0, 9), st.integers(0, 999), st.integers(0, 2**62), st.integers(-9, 9)),
    batch=st.booleans(),
)
def test_a_template_fills_in_what_field_by_field_encoding_gives(
    group: str, topic: str, broker: str, properties: str, numbers: tuple[int, int, int, int], batch: bool
) -> None:
    broker = broker.encode("utf-8", "ignore").decode() or "b"
    queue_id, sys_flag, born, flag = numbers
    code = RequestCode.SEND_BATCH_MESSAGE if batch else RequestCode.SEND_MESSAGE_V2
    template = SendTemplate(code, group, topic, broker, default_topic="TBW102", default_topic_queue_nums=4)
    header = SendMessageRequest(
        producer_group=group,
        topic=topic,
        queue_id=queue_id,
        sys_flag=sys_flag,
        born_timestamp=born,
        flag=flag,
        properties=properties,
        batch=batch,
        bname=broker,
    )
    command = Command(code, raw_ext=template.fields(queue_id, sys_flag, born, flag, properties), body=b"body")
    whole = encode(command, opaque=7)
    (received,) = FrameDecoder().feed(whole)
    assert received.ext_fields == encode_fields(header)
    numbers_and_text = queue_id, sys_flag, born, flag, properties
    assert encode_send(template.pieces, 7, *numbers_and_text, b"body", LONGEST_FRAME) == whole


async def test_names_carry_the_namespace_on_the_wire_only(cluster: FakeCluster) -> None:
    answer_sends(cluster, stored)
    async with producer_of(cluster.namesrv, config=ProducerConfig(namespace="tenant")) as producer:
        result = await producer.send(Message("invoices", b"x"))
        assert result.queue.topic == "invoices"
        (header,) = [header for broker in cluster.brokers.values() for header in sends(broker)]
        assert (header.topic, header.producer_group) == ("tenant%invoices", "tenant%producers")
        with pytest.raises(rules.InvalidTopic):  # too long only with its namespace
            await producer.send(Message("t" * 124, b"x"))


# --- compression ------------------------------------------------------------------------------------------------------


def test_bodies_from_4_kib_are_compressed_and_say_with_what() -> None:
    small = outgoing(Message("T", b"x" * 4095), "ID0000", CONFIG, "T")
    assert (small.body, small.sys_flag) == (b"x" * 4095, 0)
    large = outgoing(Message("T", b"x" * 4096), "ID0000", CONFIG, "T")
    assert large.sys_flag == SysFlag.COMPRESSED | SysFlag.ZLIB
    assert zlib.decompress(large.body) == b"x" * 4096
    assert plain_body(stored_message(large.body, large.sys_flag)) == b"x" * 4096


def test_a_body_that_would_not_get_smaller_is_sent_as_it_is() -> None:
    noise = random.Random(1).randbytes(5000)
    assert compress(noise, Compression.ZLIB, 5) == (noise, 0)


@pytest.mark.parametrize("kind", [Compression.LZ4, Compression.ZSTD])
def test_other_compressions_work_where_installed_and_say_so_where_not(kind: Compression) -> None:
    try:
        config = ProducerConfig(compression=kind, compression_level=3)
    except CompressionMissing as error:
        assert "downrange[compression]" in str(error)  # noqa: PT017  both ends of the test are real installations
        flag = {Compression.LZ4: SysFlag.LZ4, Compression.ZSTD: SysFlag.ZSTD}[kind]
        with pytest.raises(MessageError, match="downrange"):
            plain_body(stored_message(b"?", SysFlag.COMPRESSED | flag))
        return
    ready = outgoing(Message("T", b"text " * 2000), "ID0000", config, "T")
    assert len(ready.body) < 5000
    packed = stored_message(ready.body, ready.sys_flag)
    assert plain_body(packed) == b"text " * 2000
    assert plain_body(packed, max_bytes=10_000) == b"text " * 2000
    with pytest.raises(MessageError, match="larger than 9999"):
        plain_body(packed, max_bytes=9999)
    with pytest.raises(MessageError, match="cut off"):
        plain_body(stored_message(ready.body[:-3], ready.sys_flag))
    with pytest.raises(MessageError, match="cannot be decompressed"):
        plain_body(stored_message(b"nonsense", ready.sys_flag))


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ([], "without messages"),
        ([Message("A", b"x"), Message("B", b"x")], "one topic"),
        ([Message("A", b"x", delay_level=3)], "delayed"),
        ([Message("%RETRY%g", b"x")], "retry topic"),
        ([Message("A", b"x"), Message("A", b"x", wait_store_msg_ok=False)], "agree"),
    ],
)
def test_messages_that_cannot_share_a_batch(members: list[Message], why: str) -> None:
    with pytest.raises(rules.InvalidBatch, match=why):
        check_batch(members)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=40), st.integers(500, 1500))
def test_a_batch_is_split_by_size_in_order(sizes: list[int], most: int) -> None:
    members = tuple(Message("T", bytes([size % 256]) * size) for size in sizes)
    limits = OutgoingRules.of(replace(CONFIG, max_message_size=most))
    requests = make_batch(members, "T", "T", "0" * 28, itertools.count().__next__, 0, limits)
    assert [entry.body for ready in requests for entry in decode_batch(ready.body)] == [m.body for m in members]
    assert all(len(ready.body) <= most for ready in requests)
    # No request could have taken the first message of the next one as well.
    for one, following in itertools.pairwise(requests):
        first = following.messages[0]
        assert len(one.body) + len(encode_entry(0, first.body, properties_text(first, "0" * 32).encode())) > most


def test_one_message_too_large_for_a_batch_is_told() -> None:
    config = replace(CONFIG, max_message_size=100)
    with pytest.raises(rules.BodyTooLarge, match="send it alone"):
        make_batch((Message("T", b"x" * 90),), "T", "T", "ID", itertools.count().__next__, 0, OutgoingRules.of(config))


async def test_every_message_of_a_batch_has_its_result(cluster: FakeCluster) -> None:
    def store_all(command: Command) -> Command:
        count = len(decode_batch(command.body_bytes))
        fields = dict(stored(command).ext_fields)
        return command.reply(ext_fields={**fields, "msgId": ",".join(f"ID{n}" for n in range(count))})

    answer_sends(cluster, store_all)
    members = [Message(TOPIC, b"x" * 400, keys=str(n)) for n in range(5)]
    async with producer_of(cluster.namesrv, config=ProducerConfig(max_message_size=1200)) as producer:
        results = await producer.send_batch(members)
    assert [result.queue_offset for result in results] == [7, 8, 7, 8, 7]
    assert [result.offset_message_id for result in results] == ["ID0", "ID1", "ID0", "ID1", "ID0"]
    assert len({result.message_id for result in results}) == 5
    requests = [header for broker in cluster.brokers.values() for header in sends(broker)]
    assert [header.batch for header in requests] == [True, True, True]


async def test_a_batch_that_fails_half_way_tells_what_is_stored(cluster: FakeCluster) -> None:
    answer_sends(cluster, in_turn(stored, reply(13, "no")))
    async with producer_of(cluster.namesrv, config=ProducerConfig(max_message_size=700)) as producer:
        with pytest.raises(SendFailed) as caught:
            await producer.send_batch([Message(TOPIC, b"x" * 400) for _ in range(3)])
    assert len(caught.value.stored) == 1
    assert caught.value.code == 13


# --- order ------------------------------------------------------------------------------------------------------------


async def test_a_sharding_key_chooses_the_queue_as_javas_selector_by_hash(cluster: FakeCluster) -> None:
    answer_sends(cluster, stored)
    async with producer_of(cluster.namesrv) as producer:
        queues = await producer.queues(TOPIC)
        for key in ("order-1", "order-2", "polygenelubricants"):  # the last one hashes to the smallest int
            results = [await producer.send(Message(TOPIC, b"x", sharding_key=key)) for _ in range(3)]
            assert {result.queue for result in results} == {queues[abs(java_hash(key)) % len(queues)]}
    header = next(header for broker in cluster.brokers.values() for header in sends(broker))
    assert decode_properties(header.properties)["__SHARDINGKEY"]


async def test_a_selector_sees_all_queues_in_order_and_decides(cluster: FakeCluster) -> None:
    answer_sends(cluster, stored)
    seen: list[list[MessageQueue]] = []

    def last(queues: Any, message: Message) -> MessageQueue:
        seen.append(list(queues))
        chosen: MessageQueue = queues[-1]
        return chosen

    async with producer_of(cluster.namesrv) as producer:
        result = await producer.send(Message(TOPIC, b"x"), selector=last)
        assert seen == [list(await producer.queues(TOPIC))]
    assert result.queue == MessageQueue(TOPIC, "broker-b", 1)


async def test_oneway_sends_ask_for_no_answer(cluster: FakeCluster) -> None:
    answer_sends(cluster, stored)
    async with producer_of(cluster.namesrv) as producer:
        for _ in range(2000):
            await producer.send_oneway(Message(TOPIC, b"x" * 100))
    asked = [c for broker in cluster.brokers.values() for c in broker.asked if c.code == RequestCode.SEND_MESSAGE_V2]
    assert len(asked) == 2000
    assert all(command.is_oneway for command in asked)
