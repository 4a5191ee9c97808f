"""RocketMQ's fault table, row by row, and the defects of older releases that must not come back."""

from __future__ import annotations

import pytest

from downrange.client.producer.fault import Attempt, Outcome
from downrange.client.producer.fault.latency import FaultItem, Latency, LatencyState
from downrange.model.message import MessageQueue

LATENCY = Latency()
QUEUES = tuple(MessageQueue("orders", broker, queue_id) for broker in ("a", "b") for queue_id in range(4))
NOW = 1_000_000.0


@pytest.mark.parametrize(
    ("latency_millis", "avoided_seconds"),
    [
        (0, 0),
        (49.9, 0),
        (50, 0),
        (99, 0),
        (100, 0),
        (549.9, 0),
        (550, 30),
        (999, 30),
        (1000, 60),
        (1999, 60),
        (2000, 120),
        (2999, 120),
        (3000, 180),
        (14_999, 180),
        (15_000, 600),
        (1e9, 600),
    ],
)
def test_each_row_of_the_latency_table(latency_millis: float, avoided_seconds: float) -> None:
    state = LATENCY.learn(LATENCY.initial(), NOW, Attempt("a", latency_millis, Outcome.OK))
    assert state.table["a"] == FaultItem(latency_millis, NOW + avoided_seconds * 1000)
    end = NOW + avoided_seconds * 1000
    assert LATENCY.choose(state, QUEUES, end, None, 0).queue.broker_name == "a"
    if avoided_seconds:
        assert LATENCY.choose(state, QUEUES, end - 1, None, 0).queue.broker_name == "b"


@pytest.mark.parametrize("outcome", list(Outcome))
def test_what_isolates_counts_as_thirty_seconds_and_the_rest_with_its_own_time(outcome: Outcome) -> None:
    state = LATENCY.learn(LATENCY.initial(), NOW, Attempt("a", 3, outcome))
    if outcome in (Outcome.OK, Outcome.NOT_STORE_OK, Outcome.INTERRUPTED):
        assert state.table["a"] == FaultItem(3, NOW)
    else:
        assert state.table["a"] == FaultItem(30_000, NOW + 600_000)


def test_a_good_answer_ends_the_avoidance() -> None:
    state = LATENCY.learn(LATENCY.initial(), NOW, Attempt("a", 3, Outcome.TIMEOUT))
    state = LATENCY.learn(state, NOW + 1, Attempt("a", 3, Outcome.OK))
    assert LATENCY.choose(state, QUEUES, NOW + 1, None, 0).queue == QUEUES[0]


def all_avoided(**latencies: float) -> LatencyState:
    return LatencyState({broker: FaultItem(latency, NOW + 1000) for broker, latency in latencies.items()})


def chosen_in_a_row(state: LatencyState, queues: tuple[MessageQueue, ...], count: int) -> list[MessageQueue]:
    chosen = []
    index = 0
    for _ in range(count):
        choice = LATENCY.choose(state, queues, NOW, None, index + 1)
        queue, index, state = choice.queue, choice.stands_at, choice.state
        chosen.append(queue)
    return chosen


def test_when_all_are_avoided_the_better_half_is_used_in_turn() -> None:
    brokers = ("a", "b", "c", "d", "e")
    queues = tuple(MessageQueue("orders", broker, queue_id) for broker in brokers for queue_id in range(2))
    chosen = chosen_in_a_row(all_avoided(a=900, b=600, c=2000, d=700, e=5000), queues, 8)
    assert {queue.broker_name for queue in chosen} == {"b", "d"}
    assert [queue.broker_name for queue in chosen[:4]] in (["b", "d"] * 2, ["d", "b"] * 2)


def test_all_queues_of_the_one_not_best_are_used() -> None:
    chosen = chosen_in_a_row(all_avoided(a=600, b=900), QUEUES, 8)
    assert {queue.broker_name for queue in chosen} == {"a"}
    assert {queue.queue_id for queue in chosen} == {0, 1, 2, 3}


def test_the_order_is_available_then_latency_then_end_of_avoidance() -> None:
    queues = tuple(MessageQueue("orders", broker, 0) for broker in ("a", "b"))
    earlier = LatencyState({"a": FaultItem(600, NOW + 5), "b": FaultItem(600, NOW + 1)})
    assert LATENCY.choose(earlier, queues, NOW, None, 0).queue.broker_name == "b"
    faster = LatencyState({"a": FaultItem(600, NOW + 5), "b": FaultItem(700, NOW + 1)})
    assert LATENCY.choose(faster, queues, NOW, None, 0).queue.broker_name == "a"
    # A broker of another topic that is available comes first of all, and is of no use here.
    foreign = LatencyState({**faster.table, "x": FaultItem(90_000, NOW)})
    assert "x" not in LATENCY.choose(foreign, queues, NOW, None, 0).state.table


def test_a_broker_without_writable_queues_leaves_the_table_and_the_plain_choice_decides() -> None:
    state = all_avoided(gone=600, a=700, b=800)
    choice = LATENCY.choose(state, QUEUES, NOW, None, 4)
    assert set(choice.state.table) == {"a", "b"}
    assert choice.queue == QUEUES[4]
    assert set(state.table) == {"gone", "a", "b"}


def test_defect_up_to_4_7_1_a_retry_must_not_insist_on_the_broker_that_failed() -> None:
    """Java took an available queue on a retry only if its broker *equalled* the last one."""
    state = LATENCY.initial()
    for broker in ("a", "b"):
        state = LATENCY.learn(state, NOW, Attempt(broker, 5, Outcome.OK))
    for index in range(8):
        assert LATENCY.choose(state, QUEUES, NOW, "a", index).queue == QUEUES[index]
    state = LATENCY.learn(state, NOW, Attempt("a", 5, Outcome.TIMEOUT))
    for index in range(8):
        assert LATENCY.choose(state, QUEUES, NOW, "a", index).queue.broker_name == "b"


def test_defect_up_to_4_9_7_the_last_resort_must_not_write_into_the_shared_queues() -> None:
    """Java set broker name and queue id of the queue object that the route table and all threads share."""
    shared = list(QUEUES)
    chosen = chosen_in_a_row(all_avoided(a=900, b=600), tuple(shared), 16)
    assert {queue.broker_name for queue in chosen} == {"b"}
    assert shared == list(QUEUES)
    assert all(queue in QUEUES for queue in chosen)  # a queue the broker has, not an id made up from the index
    in_turn = [LATENCY.choose(LATENCY.initial(), shared, NOW, None, index).queue for index in range(8)]
    assert in_turn == list(QUEUES)
