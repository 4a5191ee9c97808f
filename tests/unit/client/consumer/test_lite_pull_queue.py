"""One assigned queue: what waits in it, what it may still take, and how far everybody is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from downrange.client.consumer.assigned_queue import AssignedQueue, FetchLimits
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.consumer.pull import PullResult, PullStatus
from downrange.model.message import MessageQueue, PhysicalOffset, QueueOffset
from downrange.model.subscription import subscribe

QUEUE = MessageQueue("orders", "broker-a", 0)
LIMITS = FetchLimits(max_messages=1000, max_bytes=100 << 20, max_span=2000)


def message(offset: int, size: int = 100) -> ReceivedMessage:
    return ReceivedMessage(
        "orders", QUEUE, QueueOffset(offset), PhysicalOffset(0), b"x", "", 0, 0, 0, b"", 0, b"", 0, 0, 0, size, 0, 0
    )


def pulled(offsets: list[int], next_offset: int, size: int = 100) -> PullResult:
    return PullResult(PullStatus.FOUND, [message(offset, size) for offset in offsets], next_offset, 0, next_offset)


def assigned(start: int = 0) -> AssignedQueue:
    return AssignedQueue(QUEUE, subscribe("orders", "*"), start)


def offsets(messages: list[ReceivedMessage]) -> list[int]:
    return [each.queue_offset for each in messages]


def test_messages_leave_in_order_and_positions_follow() -> None:
    held = assigned(5)
    held.add(pulled([5, 6, 8], 10))
    assert (held.done, held.position, held.fetch_offset) == (5, 5, 10)
    assert offsets(held.take(2)) == [5, 6]
    assert (held.done, held.position) == (5, 8)  # 7 was not for us
    held.settle()
    assert offsets(held.take(10)) == [8]
    assert (held.done, held.position, held.byte_count) == (8, 10, 0)


def test_what_is_put_back_is_handed_out_again() -> None:
    held = assigned()
    held.add(pulled([0, 1, 2, 3], 4))
    taken = held.take(3)
    held.put_back(taken[1:])
    assert held.position == 1
    held.settle()
    assert held.done == 1
    assert offsets(held.take(10)) == [1, 2, 3]


def test_after_a_seek_old_messages_cannot_be_put_back() -> None:
    held = assigned()
    held.add(pulled([0, 1, 2, 3], 4))
    taken = held.take(3)
    held.seek(40)
    held.put_back(taken)
    assert (len(held), held.done, held.position, held.fetch_offset, held.byte_count) == (0, 40, 40, 40, 0)


def test_a_queue_made_anew_begins_before_the_old_one_ended() -> None:
    held = assigned(50)
    held.add(PullResult(PullStatus.OFFSET_ILLEGAL, (), 0, 0, 3))
    assert (held.done, held.position, held.fetch_offset) == (0, 0, 0)


def test_a_paused_queue_waits() -> None:
    held = assigned()
    held.is_paused = True
    assert held.reason_to_wait(LIMITS) == "paused"


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (pulled(list(range(1000)), 1000), None),
        (pulled(list(range(1001)), 1001), "1001 messages wait, more than 1000"),
        (pulled([0], 1, size=100 << 20), None),
        (pulled([0], 1, size=(100 << 20) + 1), "104857601 bytes wait, more than 104857600"),
        (pulled([0, 2000], 2001), None),
        (pulled([0, 2001], 2002), "the messages that wait span 2001 offsets, more than 2000"),
    ],
)
def test_limits_are_those_of_rocketmq(result: PullResult, reason: str | None) -> None:
    held = assigned()
    held.add(result)
    assert held.reason_to_wait(LIMITS) == reason


@given(st.data())
def test_whatever_happens_nothing_is_lost_or_repeated_and_places_stay_in_order(data: st.DataObject) -> None:
    held = assigned()
    seen: list[int] = []
    next_offset = 0
    expected: list[int] = []
    for _ in range(data.draw(st.integers(1, 30))):
        match data.draw(st.sampled_from(["pull", "take", "settle", "put back"])):
            case "pull":
                step = data.draw(st.integers(0, 5))
                wanted = [next_offset + n for n in range(step) if data.draw(st.booleans())]
                next_offset += step
                expected += wanted
                held.add(pulled(wanted, next_offset))
            case "take":
                seen += offsets(held.take(data.draw(st.integers(1, 4))))
            case "settle":
                held.settle()
            case "put back":
                taken = held.take(data.draw(st.integers(1, 4)))
                keep = data.draw(st.integers(0, len(taken)))
                seen += offsets(taken[:keep])
                held.put_back(taken[keep:])
        assert held.done <= held.position <= held.fetch_offset
        assert held.byte_count == 100 * len(held)
    seen += offsets(held.take(10_000))
    assert seen == expected
