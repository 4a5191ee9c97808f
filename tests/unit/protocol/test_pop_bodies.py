"""The texts of POP: receipt handles, offset infos, bit sets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from downrange.protocol.bodies.body import decode_body, encode_body
from downrange.protocol.bodies.pop import (
    BatchAck,
    BatchAckMessageBody,
    ChangeInvisibleTimeResponse,
    HandleError,
    OffsetInfo,
    PopMessageResponse,
    ReceiptHandle,
    decode_bits,
    encode_bits,
    handles_of,
    offset_info,
    order_count_info,
    read_offset_info,
    read_order_count_info,
)

HANDLE = ReceiptHandle(100, 1700000000000, 60000, 3, 0, "broker-a", 1, 102)


def test_a_handle_is_eight_items() -> None:
    assert str(HANDLE) == "100 1700000000000 60000 3 0 broker-a 1 102"
    assert ReceiptHandle.parse(str(HANDLE)) == HANDLE
    assert ReceiptHandle.parse(f"{HANDLE} 4711") == HANDLE  # a proxy adds the place in the log


@pytest.mark.parametrize(
    "text", ["", "nonsense", "1 2 3 4 0 b 6", "a 2 3 4 0 b 6 7", "1 2 3 4 3 b 6 7", "1 2 3 4 0 b 6 x"]
)
def test_what_is_no_handle_is_named(text: str) -> None:
    with pytest.raises(HandleError, match="is no receipt handle"):
        ReceiptHandle.parse(text)


def test_handles_are_made_of_the_answer_to_a_pop() -> None:
    response = PopMessageResponse(
        pop_time=1700000000000,
        invisible_time=60000,
        revive_qid=3,
        start_offset_info="0 1 100;1 0 7",
        msg_offset_info="0 1 100,102;1 0 7",
    )
    first, second, retried = handles_of(response, "broker-a")
    assert first == HANDLE._replace(offset=100)
    assert second == HANDLE
    assert retried == HANDLE._replace(start_offset=7, retry_flag=1, queue_id=0, offset=7)


@given(st.lists(st.builds(OffsetInfo, st.integers(0, 2), st.integers(0, 9), st.tuples(st.integers(0), st.integers(0)))))
def test_offset_infos_are_read_as_they_were_written(entries: list[OffsetInfo]) -> None:
    assert read_offset_info(offset_info(entries)) == entries


def test_an_offset_info_that_cannot_be_read_is_named() -> None:
    with pytest.raises(HandleError, match="'0 1'"):
        read_offset_info("0 1")


def test_counts_of_ordered_pops() -> None:
    assert order_count_info(0, [(0, 0), (1, 0)]) == "0 0 0"
    assert order_count_info(1, [(5, 2), (6, 0)]) == "0 qo1%5 2;0 1 0"


def test_bit_sets() -> None:
    assert encode_bits([100, 102, 109], 100) == "BQI="
    assert decode_bits("BQI=", 100) == [100, 102, 109]
    with pytest.raises(HandleError, match="not base64"):
        decode_bits("*", 0)
    with pytest.raises(HandleError, match="are the most"):
        decode_bits("A" * 4000, 0)


@given(st.sets(st.integers(50, 200)))
def test_bit_sets_are_read_as_they_were_written(offsets: set[int]) -> None:
    assert decode_bits(encode_bits(offsets, 50), 50) == sorted(offsets)


def test_the_body_of_a_batch_ack() -> None:
    text = (
        b'{"acks":[{"b":"BQI=","c":"groupA","it":60000,"pt":1700000000000,"q":1,"r":"0","rq":3,"so":100,"t":"TopicA"}],'
        b'"brokerName":"broker-a"}'
    )
    ack = BatchAck(
        consumer_group="groupA",
        topic="TopicA",
        start_offset=100,
        queue_id=1,
        revive_queue_id=3,
        pop_time=1700000000000,
        invisible_time=60000,
        bits="BQI=",
    )
    body = BatchAckMessageBody(broker_name="broker-a", acks=(ack,))
    assert decode_body(BatchAckMessageBody, text) == body
    assert encode_body(body) == text


def test_a_changed_handle_begins_with_its_own_message() -> None:
    handle = ReceiptHandle.parse("100 1700000000000 60000 3 0 broker-a 1 102")
    changed = handle.changed(ChangeInvisibleTimeResponse(pop_time=1700000005000, invisible_time=9000, revive_qid=3))
    assert str(changed) == "102 1700000005000 9000 3 0 broker-a 1 102"
    assert changed.visible_at == 1700000014000
    # The lease of an ordered pop stays as it is, with another end.
    ordered = ReceiptHandle.parse("100 1700000000000 60000 999 0 broker-a 1 102")
    answer = ChangeInvisibleTimeResponse(pop_time=1700000000000, invisible_time=14000, revive_qid=999)
    assert str(ordered.changed(answer)) == "100 1700000000000 14000 999 0 broker-a 1 102"


def test_the_topic_that_was_read() -> None:
    handle = ReceiptHandle.parse("0 1 2 3 0 broker-a 0 0")
    topics = [handle._replace(retry_flag=flag).source("TopicX", "GA") for flag in (0, 1, 2)]
    assert topics == ["TopicX", "%RETRY%GA_TopicX", "%RETRY%GA+TopicX"]


def test_counts_of_ordered_pops_are_read() -> None:
    counts = read_order_count_info("0 qo0%0 1;0 qo0%1 1;0 0 1;0 2 0")
    assert counts == {"qo0%0": 1, "qo0%1": 1, "0": 1, "2": 0}
    assert read_order_count_info(None) == read_order_count_info("0 x;;1 2 y") == {}
