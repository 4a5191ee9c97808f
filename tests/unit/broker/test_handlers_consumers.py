"""Running consumers seen and steered by operators: 307, 309, 222 with 220, 223 with 221."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from downrange.broker.handlers import consumers as consumer_handlers
from downrange.model.message import MessageQueue
from downrange.model.message_id import offset_message_id
from downrange.model.record import decode_record
from downrange.protocol.bodies.body import decode_body, encode_java_body
from downrange.protocol.bodies.consumers import (
    ConsumeMessageDirectlyRequest,
    ConsumerStatus,
    GetConsumerRunningInfoRequest,
    GetConsumerStatusRequest,
    QueueOffset,
    QueueOffsetList,
    QueueOffsets,
    ResetOffsetRequest,
)
from downrange.protocol.codes import LanguageCode, RequestCode, ResponseCode
from downrange.protocol.command import Command
from downrange.transport.connection import Connection
from tests.unit.broker.admin_broker import HOST, NOW, AdminBroker, golden_reply

RESET = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET
STATUS = RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[AdminBroker]:
    made = AdminBroker(tmp_path)
    yield made
    made.store.close()


class Listener:
    """A consumer's handler: keeps what it was asked and answers what it was told to."""

    def __init__(self, code: int = 0, body: bytes = b"", remark: str | None = None, silent: bool = False) -> None:
        self.asked: list[Command] = []
        self._answer = code, body, remark
        self._silent = silent

    def __call__(self, command: Command, connection: Connection) -> Command | None:
        self.asked.append(command)
        code, body, remark = self._answer
        return None if self._silent else command.reply(code, remark, body=body)


def queue(queue_id: int, topic: str = "TopicA") -> MessageQueue:
    return MessageQueue(topic, "broker-a", queue_id)


# --- relaying ---------------------------------------------------------------------------------------------------------


async def test_running_information_is_what_the_consumer_says(broker: AdminBroker) -> None:
    listener = Listener(body=b'{"properties":{}}', remark="not set any response code")
    broker.consumer("groupA", "10.0.0.9@1", handler=listener)
    broker.consumer("groupA", "10.0.0.9@2", handler=Listener(code=1))
    header = GetConsumerRunningInfoRequest(consumer_group="groupA", client_id="10.0.0.9@1", jstack_enable=True)
    reply = await broker.ask(RequestCode.GET_CONSUMER_RUNNING_INFO, header)
    assert (reply.code, reply.body_bytes, reply.remark) == (0, b'{"properties":{}}', "not set any response code")
    (asked,) = listener.asked
    assert (asked.code, asked.is_oneway) == (RequestCode.GET_CONSUMER_RUNNING_INFO, False)
    assert dict(asked.ext_fields) == {
        "consumerGroup": "groupA",
        "clientId": "10.0.0.9@1",
        "jstackEnable": "true",
    }


async def test_a_consumers_refusal_is_relayed(broker: AdminBroker) -> None:
    broker.consumer("groupA", "10.0.0.9@1", handler=Listener(code=1, remark="The Consumer Group <groupA> not exist"))
    header = GetConsumerRunningInfoRequest(consumer_group="groupA", client_id="10.0.0.9@1")
    refusal = await broker.refused(RequestCode.GET_CONSUMER_RUNNING_INFO, header)
    assert refusal == (1, "The Consumer Group <groupA> not exist")


async def test_a_consumer_that_is_not_online_is_told_as_captured(broker: AdminBroker) -> None:
    captured = golden_reply("498-json/wrong_requests", 307)
    header = GetConsumerRunningInfoRequest(consumer_group="gsnobody", client_id="x")
    refusal = await broker.refused(RequestCode.GET_CONSUMER_RUNNING_INFO, header)
    assert refusal == (captured.code, captured.remark)
    broker.consumer("groupA", "10.0.0.9@1")
    header = GetConsumerRunningInfoRequest(consumer_group="groupA", client_id="10.0.0.9@2")
    _, remark = await broker.refused(RequestCode.GET_CONSUMER_RUNNING_INFO, header)
    assert remark == "The Consumer <groupA> <10.0.0.9@2> not online"


async def test_a_consumer_that_is_too_old_is_not_asked(broker: AdminBroker) -> None:
    listener = Listener()
    broker.consumer("groupA", "10.0.0.9@1", handler=listener, version=61)
    header = GetConsumerRunningInfoRequest(consumer_group="groupA", client_id="10.0.0.9@1")
    _, remark = await broker.refused(RequestCode.GET_CONSUMER_RUNNING_INFO, header)
    assert "too low to finish, please upgrade it to V3_1_8_SNAPSHOT" in remark
    assert listener.asked == []


async def test_a_consumer_that_does_not_answer_times_out(broker: AdminBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    assert consumer_handlers.RELAY_SECONDS == 10
    monkeypatch.setattr(consumer_handlers, "RELAY_SECONDS", 0.01)
    broker.consumer("groupA", "10.0.0.9@1", handler=Listener(silent=True))
    header = GetConsumerRunningInfoRequest(consumer_group="groupA", client_id="10.0.0.9@1")
    code, remark = await broker.refused(RequestCode.GET_CONSUMER_RUNNING_INFO, header)
    assert code == ResponseCode.CONSUME_MSG_TIMEOUT
    assert remark.startswith("consumer <groupA> <10.0.0.9@1> Timeout: ")


async def test_a_consumer_that_goes_away_while_asked_is_an_error_at_once(broker: AdminBroker) -> None:
    def leave(command: Command, connection: Connection) -> None:
        connection.abort()

    broker.consumer("groupA", "10.0.0.9@1", handler=leave)
    header = GetConsumerRunningInfoRequest(consumer_group="groupA", client_id="10.0.0.9@1")
    code, remark = await broker.refused(RequestCode.GET_CONSUMER_RUNNING_INFO, header)
    assert code == ResponseCode.SYSTEM_ERROR
    assert remark.startswith("invoke consumer <groupA> <10.0.0.9@1> Exception: ")


async def test_a_message_is_handed_to_one_consumer(broker: AdminBroker) -> None:
    result = b'{"autoCommit":true,"consumeResult":"CR_SUCCESS","order":false,"spentTimeMills":0}'
    listener = Listener(body=result)
    broker.consumer("groupA", "10.0.0.9@1", handler=listener)
    broker.put(body=b"other")
    stored = broker.put(body=b"this one")
    message_id = offset_message_id(HOST, stored.physical_offset)
    header = ConsumeMessageDirectlyRequest(consumer_group="groupA", client_id="10.0.0.9@1", msg_id=message_id)
    reply = await broker.ask(RequestCode.CONSUME_MESSAGE_DIRECTLY, header)
    assert (reply.code, reply.body_bytes) == (0, result)
    (asked,) = listener.asked
    assert dict(asked.ext_fields) == {
        "consumerGroup": "groupA",
        "clientId": "10.0.0.9@1",
        "msgId": message_id,
        "brokerName": "broker-a",
    }
    assert decode_record(asked.body_bytes).body == b"this one"


@pytest.mark.parametrize(
    ("changes", "part_of_remark"),
    [
        ({"client_id": None}, "The Consumer <groupA> <None> not online"),
        ({"msg_id": None}, "missing required field 'msgId'"),
        ({"msg_id": "0A"}, "not an offset message id"),
        ({"msg_id": offset_message_id(HOST, 12345)}, "can not find message by the offset, 12345"),
    ],
)
async def test_a_message_that_cannot_be_handed_over(
    broker: AdminBroker, changes: dict[str, Any], part_of_remark: str
) -> None:
    listener = Listener()
    broker.consumer("groupA", "10.0.0.9@1", handler=listener)
    broker.put()
    values = {"consumer_group": "groupA", "client_id": "10.0.0.9@1", "msg_id": offset_message_id(HOST, 0)}
    header = ConsumeMessageDirectlyRequest(**(values | changes))
    code, remark = await broker.refused(RequestCode.CONSUME_MESSAGE_DIRECTLY, header)
    assert code == ResponseCode.SYSTEM_ERROR
    assert part_of_remark in remark
    assert listener.asked == []


# --- reset offsets ----------------------------------------------------------------------------------------------------


def reset(timestamp: int, *, is_force: bool = True, **changes: Any) -> ResetOffsetRequest:
    values: dict[str, Any] = {"topic": "TopicA", "group": "groupA"}
    return ResetOffsetRequest(timestamp=timestamp, is_force=is_force, **(values | changes))


@pytest.fixture
def consumed(broker: AdminBroker) -> AdminBroker:
    """Two queues with five messages each, a second apart; the group is at 2 in the first and at 4 in the second."""
    broker.topic("TopicA", 2)
    for _ in range(5):
        broker.put("TopicA", 0)
        broker.put("TopicA", 1)
    broker.offsets.commit("TopicA", "groupA", 0, 2)
    broker.offsets.commit("TopicA", "groupA", 1, 4)
    return broker


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (reset(-1), {queue(0): 5, queue(1): 5}),
        (reset(-1, is_force=False), {queue(0): 2, queue(1): 4}),
        (reset(NOW + 6000), {queue(0): 3, queue(1): 2}),
        (reset(NOW + 6000, is_force=False), {queue(0): 2, queue(1): 2}),
        (reset(NOW - 3_600_000), {queue(0): 0, queue(1): 0}),
        (reset(-1, queue_id=-1, offset=-1), {queue(0): 5, queue(1): 5}),
        (reset(-1, queue_id=1, offset=3), {queue(1): 3}),
        (reset(-1, queue_id=1), {queue(1): 5}),
    ],
)
async def test_every_consumer_of_the_group_is_told_where_to_go_on(
    consumed: AdminBroker, header: ResetOffsetRequest, expected: dict[MessageQueue, int]
) -> None:
    listeners = [Listener(), Listener()]
    for number, listener in enumerate(listeners):
        consumed.consumer("groupA", f"10.0.0.9@{number}", handler=listener, port=52000 + number)
    reply = await consumed.ask(RESET, header)
    assert reply.code == 0
    assert decode_body(QueueOffsets, reply.body_bytes).offset_table == expected
    for listener in listeners:
        (order,) = listener.asked
        assert (order.code, order.is_oneway) == (RequestCode.RESET_CONSUMER_CLIENT_OFFSET, True)
        assert dict(order.ext_fields) == {
            "topic": "TopicA",
            "group": "groupA",
            "timestamp": str(header.timestamp),
            "isForce": "false",
        }
        assert decode_body(QueueOffsets, order.body_bytes).offset_table == expected
    assert consumed.offsets.of("TopicA", "groupA") == {0: 2, 1: 4}, "the consumers commit, not the broker"


async def test_the_order_is_written_as_java_writes_it(consumed: AdminBroker) -> None:
    """Clients in other languages split this text themselves: bare objects as keys, no blanks."""
    listener = Listener()
    consumed.consumer("groupA", handler=listener)
    reply = await consumed.ask(RESET, reset(-1))
    expected = (
        b'{"offsetTable":{{"brokerName":"broker-a","queueId":0,"topic":"TopicA"}:5,'
        b'{"brokerName":"broker-a","queueId":1,"topic":"TopicA"}:5}}'
    )
    assert reply.body_bytes == listener.asked[0].body_bytes == expected
    captured = golden_reply("498-json/reset_offset", 222).body_bytes
    assert captured.startswith(b'{"offsetTable":{{"brokerName":"broker-a","queueId":1,"topic":"gsReset"}:3,{')


async def test_a_c_plus_plus_tool_makes_the_order_a_list(consumed: AdminBroker) -> None:
    listener = Listener()
    consumed.consumer("groupA", handler=listener)
    reply = await consumed.ask(RESET, reset(-1), language=LanguageCode.CPP)
    assert decode_body(QueueOffsetList, listener.asked[0].body_bytes) == QueueOffsetList(
        (
            QueueOffset(topic="TopicA", broker_name="broker-a", queue_id=0, offset=5),
            QueueOffset(topic="TopicA", broker_name="broker-a", queue_id=1, offset=5),
        )
    )
    assert decode_body(QueueOffsets, reply.body_bytes).offset_table == {queue(0): 5, queue(1): 5}


async def test_offsets_of_a_group_that_is_offline_are_not_reset(consumed: AdminBroker) -> None:
    captured = golden_reply("498-json/reset_offset", 222, lambda reply: reply.code != 0)
    assert captured.remark == (
        "Consumer not online, so can not reset offset, Group: gscg_reset Topic: gsReset Timestamp: -1"
    )
    expected = captured.remark.replace("gscg_reset", "groupA").replace("gsReset", "TopicA")
    assert await consumed.refused(RESET, reset(-1)) == (captured.code, expected)


@pytest.mark.parametrize(
    ("header", "remark"),
    [
        (reset(-1, group="gscg_none"), "THe consumer group <gscg_none> not exist"),
        (
            reset(-1, topic="TopicX"),
            "[reset-offset] reset offset failed, no topic in this broker. topic=TopicX",
        ),
        (reset(-1, queue_id=2), "[reset-offset] topic[TopicA] has no queue 2"),
    ],
)
async def test_offsets_that_cannot_be_reset(consumed: AdminBroker, header: ResetOffsetRequest, remark: str) -> None:
    listener = Listener()
    consumed.consumer("groupA", handler=listener)
    consumed.consumer("gscg_none", handler=listener)
    assert await consumed.refused(RESET, header) == (ResponseCode.SYSTEM_ERROR, remark)
    assert listener.asked == []


async def test_no_consumer_is_told_when_one_is_too_old(consumed: AdminBroker) -> None:
    listener = Listener()
    consumed.consumer("groupA", "10.0.0.9@1", handler=listener)
    consumed.consumer("groupA", "10.0.0.9@2", handler=listener, version=27)
    code, remark = await consumed.refused(RESET, reset(-1))
    assert code == ResponseCode.SYSTEM_ERROR
    assert remark.startswith("the client does not support this feature. version=")
    assert listener.asked == []


async def test_a_consumer_that_just_went_away_does_not_keep_the_others_from_being_told(consumed: AdminBroker) -> None:
    listener = Listener()
    gone = consumed.consumer("groupA", "10.0.0.9@1", port=52000)
    consumed.consumer("groupA", "10.0.0.9@2", handler=listener, port=52001)
    gone.abort()
    assert (await consumed.ask(RESET, reset(-1))).code == 0
    assert len(listener.asked) == 1


# --- status -----------------------------------------------------------------------------------------------------------


def holding(offsets: dict[MessageQueue, int]) -> Listener:
    return Listener(body=encode_java_body(ConsumerStatus(message_queue_table=offsets)))


async def test_the_status_of_all_consumers_or_of_one(broker: AdminBroker) -> None:
    first, second = holding({queue(0): 5}), holding({queue(1): 2})
    broker.consumer("groupA", "10.0.0.9@1", handler=first, port=52000)
    broker.consumer("groupA", "10.0.0.9@2", handler=second, port=52001)
    reply = await broker.ask(STATUS, GetConsumerStatusRequest(topic="TopicA", group="groupA"))
    everyone = {"10.0.0.9@1": {queue(0): 5}, "10.0.0.9@2": {queue(1): 2}}
    assert decode_body(ConsumerStatus, reply.body_bytes) == ConsumerStatus(consumer_table=everyone)
    assert reply.body_bytes.startswith(b'{"consumerTable":{"10.0.0.9@1":{{"brokerName":"broker-a","queueId":0,')
    assert dict(first.asked[0].ext_fields) == {"topic": "TopicA", "group": "groupA"}
    assert first.asked[0].code == RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT

    header = GetConsumerStatusRequest(topic="TopicA", group="groupA", client_addr="10.0.0.9@2")
    reply = await broker.ask(STATUS, header)
    assert decode_body(ConsumerStatus, reply.body_bytes).consumer_table == {"10.0.0.9@2": {queue(1): 2}}
    assert (len(first.asked), len(second.asked)) == (1, 2)


async def test_a_consumer_that_gives_no_status_is_left_out(
    broker: AdminBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert consumer_handlers.STATUS_SECONDS == 5
    monkeypatch.setattr(consumer_handlers, "STATUS_SECONDS", 0.5)  # the silent one costs all of it
    for number, handler in enumerate(
        [holding({queue(0): 5}), Listener(code=1), Listener(body=b"{"), Listener(silent=True)]
    ):
        broker.consumer("groupA", f"10.0.0.9@{number}", handler=handler, port=52000 + number)
    reply = await broker.ask(STATUS, GetConsumerStatusRequest(topic="TopicA", group="groupA"))
    assert decode_body(ConsumerStatus, reply.body_bytes).consumer_table == {"10.0.0.9@0": {queue(0): 5}}


async def test_the_status_of_nobody_is_refused(broker: AdminBroker) -> None:
    refusal = await broker.refused(STATUS, GetConsumerStatusRequest(topic="TopicA", group="groupA"))
    assert refusal == (ResponseCode.SYSTEM_ERROR, "No Any Consumer online in the consumer group: [groupA]")
