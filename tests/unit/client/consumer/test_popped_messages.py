"""Popped messages as a genuine 5.3.3 broker sends them, and the handles genuine clients made of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from downrange.client.consumer.pop.messages import PoppedMessage, read_popped
from downrange.client.consumer.pop.requests import ack_request, batch_ack_request, change_request
from downrange.model import properties as names
from downrange.protocol.bodies.body import decode_body
from downrange.protocol.bodies.pop import (
    AckMessageRequest,
    BatchAckMessageBody,
    ChangeInvisibleTimeRequest,
    ChangeInvisibleTimeResponse,
    PopMessageRequest,
    ReceiptHandle,
    decode_bits,
)
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command
from downrange.protocol.errors import BrokerError
from downrange.protocol.framing import FrameDecoder
from tests.support.golden import scenarios

SCENARIOS = ("pop_basic", "pop_batch_ack", "pop_change", "pop_order", "pop_push_consumer", "pop_revive")
POP, ACK, CHANGE, BATCH = (
    RequestCode.POP_MESSAGE,
    RequestCode.ACK_MESSAGE,
    RequestCode.CHANGE_MESSAGE_INVISIBLETIME,
    RequestCode.BATCH_ACK_MESSAGE,
)


def conversation(scenario: str) -> Iterator[tuple[Command, Command]]:
    """Requests of a genuine client about popped messages, with the answers of a genuine broker."""
    asked: dict[tuple[int, int], Command] = {}
    for row in scenarios("pop-533.tar.xz")[f"pop-533/{scenario}"]:
        (command,) = FrameDecoder().feed(row.frame)
        if not row.is_response:
            asked[row.connection, row.opaque] = command
            continue
        question = asked.get((row.connection, row.opaque))
        if question is not None and question.code in (POP, ACK, CHANGE, BATCH):
            yield question, command


def messages_of(scenario: str) -> dict[str, PoppedMessage]:
    """All messages of a scenario by their receipt handles."""
    found = {}
    for question, answer in conversation(scenario):
        if question.code == POP and answer.code == 0:
            asked = question.header(PopMessageRequest)
            for message in read_popped(answer, asked.topic, asked.consumer_group, "broker-a", ""):
                found[str(message.receipt_handle)] = message
    return found


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_handles_are_those_that_genuine_clients_make(scenario: str) -> None:
    messages = messages_of(scenario)
    assert messages
    changed: dict[str, str] = {}
    checked = 0
    for question, answer in conversation(scenario):
        if question.code == POP:
            continue
        if question.code == BATCH:
            for ack in decode_body(BatchAckMessageBody, question.body_bytes).acks:
                for offset in decode_bits(ack.bits, ack.start_offset):
                    handle = ReceiptHandle(
                        *(ack.start_offset, ack.pop_time, ack.invisible_time, ack.revive_queue_id, int(ack.retry)),
                        *("broker-a", ack.queue_id, offset),
                    )
                    assert str(handle) in messages
                    checked += 1
            continue
        text = question.header(AckMessageRequest).extra_info
        checked += 1
        message = messages.get(changed.get(text, text))
        assert message is not None, text
        assert message.queue.topic == question.header(AckMessageRequest).topic
        if question.code == CHANGE and answer.code == 0:
            handle = ReceiptHandle.parse(text).changed(answer.header(ChangeInvisibleTimeResponse))
            changed[str(handle)] = changed.get(text, text)
    assert checked


def test_messages_that_came_again() -> None:
    again = [message for message in messages_of("pop_revive").values() if message.receipt_handle.retry_flag]
    assert [message.delivery_attempt for message in again][:2] == [2, 3]
    for message in again:
        assert message.topic == message.wire_topic
        assert message.queue.topic == f"%RETRY%pop_revive_{message.topic}"
        # The broker says in the message itself what we made of the answer's header.
        assert names.find_property(message.properties_text, names.POP_CK) == str(message.receipt_handle)
        assert message.properties[names.POP_CK] == str(message.receipt_handle)


def test_deliveries_of_ordered_pops_are_counted() -> None:
    counts = [(message.body, message.reconsume_times) for message in messages_of("pop_order").values()]
    assert counts == [
        *((b"o0", 0), (b"o1", 0), (b"o0", 0), (b"o1", 0), (b"o0", 1), (b"o1", 1)),
        *((b"o1", 2), (b"o2", 0), (b"o3", 0)),
    ]  # the second pop had the attempt id of the first


def test_requests_are_those_of_genuine_clients() -> None:
    messages = messages_of("pop_change")
    asked = [question for question, _ in conversation("pop_change") if question.code in (ACK, CHANGE)]
    checked = 0
    for question in asked:
        message = messages.get(question.ext_fields["extraInfo"])
        if message is None:
            continue  # about a message whose invisible time was changed
        group = question.ext_fields["consumerGroup"]
        if question.code == ACK:
            ours = ack_request(message, group)
        else:
            ours = change_request(message, group, question.header(ChangeInvisibleTimeRequest).invisible_time)
        assert ours.ext_fields == question.ext_fields
        checked += 1
    assert checked > 2


def test_a_batch_of_acknowledgements_is_that_of_the_genuine_client() -> None:
    messages = list(messages_of("pop_batch_ack").values())
    question = next(question for question, _ in conversation("pop_batch_ack") if question.code == BATCH)
    genuine = decode_body(BatchAckMessageBody, question.body_bytes)
    wanted = {(ack.queue_id, offset) for ack in genuine.acks for offset in decode_bits(ack.bits, ack.start_offset)}
    of_pop = [message for message in messages if message.receipt_handle.pop_time == genuine.acks[0].pop_time]
    ours = batch_ack_request(
        [message for message in of_pop if (message.queue_id, message.queue_offset) in wanted],
        genuine.acks[0].consumer_group,
        "broker-a",
    )
    decoded = decode_body(BatchAckMessageBody, ours.body_bytes)
    assert sorted(decoded.acks, key=repr) == sorted(genuine.acks, key=repr)


def test_an_answer_that_cannot_be_read() -> None:
    question, answer = next(pair for pair in conversation("pop_basic") if pair[0].code == POP and pair[1].code == 0)
    asked = question.header(PopMessageRequest)
    fields = {**answer.ext_fields, "msgOffsetInfo": "0 9 77"}
    wrong = answer.reply(0, ext_fields=fields, body=answer.body_bytes)
    with pytest.raises(BrokerError, match="no handle for the record at 0"):
        read_popped(wrong, asked.topic, asked.consumer_group, "broker-a", "")
    cut = answer.reply(0, ext_fields=dict(answer.ext_fields), body=answer.body_bytes[:-3])
    with pytest.raises(BrokerError, match="cannot be read"):
        read_popped(cut, asked.topic, asked.consumer_group, "broker-a", "")
