"""The selection order of the documents: two brokers with four queues each."""

from __future__ import annotations

import random
import threading

import pytest

from downrange.client.producer.fault import Attempt, NoQueue, Outcome, QueueChooser, strategy
from downrange.client.producer.fault.chooser import INDEX_MASK
from downrange.model.message import MessageQueue
from downrange.settings import ConfigError

QUEUES = tuple(MessageQueue("orders", broker, queue_id) for broker in ("a", "b") for queue_id in range(4))


class StartAt(random.Random):
    """The index begins where the test wants it."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.start = start

    def getrandbits(self, k: int, /) -> int:
        return self.start


def chooser(name: str, start: int = INDEX_MASK) -> QueueChooser:
    return QueueChooser(strategy(name), StartAt(start))  # type: ignore[arg-type]


def names(choices: list[MessageQueue]) -> list[str]:
    return [f"{queue.broker_name}{queue.queue_id}" for queue in choices]


@pytest.mark.parametrize("name", ["round_robin", "latency", "adaptive"])
def test_while_all_is_well_every_queue_comes_in_turn(name: str) -> None:
    one = chooser(name)
    chosen = []
    for now in range(10):
        queue = one.choose(QUEUES, now)
        one.learn(now, Attempt(queue.broker_name, 1.0, Outcome.OK))
        chosen.append(queue)
    assert names(chosen) == ["a0", "a1", "a2", "a3", "b0", "b1", "b2", "b3", "a0", "a1"]


def test_round_robin_skips_the_broker_that_failed_and_goes_on_behind_it() -> None:
    one = chooser("round_robin")
    assert names([one.choose(QUEUES, 0)]) == ["a0"]
    assert names([one.choose(QUEUES, 0, "a")]) == ["b0"]
    assert names([one.choose(QUEUES, 0) for _ in range(4)]) == ["b1", "b2", "b3", "a0"]


def test_round_robin_forgets_the_failure_with_the_message() -> None:
    one = chooser("round_robin")
    for now in range(8):
        one.learn(now, Attempt("a", 3000, Outcome.TIMEOUT))
    assert names([one.choose(QUEUES, 0)]) == ["a0"]


def test_round_robin_uses_the_failed_broker_when_there_is_no_other() -> None:
    one = chooser("round_robin")
    assert names([one.choose(QUEUES[:4], 0, "a"), one.choose(QUEUES[:4], 0)]) == ["a0", "a1"]


@pytest.mark.parametrize("name", ["latency", "adaptive"])
def test_an_avoided_broker_is_left_out_and_its_load_reaches_every_queue_of_the_others(name: str) -> None:
    one = chooser(name)
    one.learn(0, Attempt("b", 1, Outcome.OK))
    one.learn(0, Attempt("a", 3000, Outcome.CONNECTION_LOST))
    chosen = [one.choose(QUEUES, 1) for _ in range(64)]
    assert {queue.broker_name for queue in chosen} == {"b"}
    assert {queue.queue_id for queue in chosen} == {0, 1, 2, 3}


def test_latency_walks_from_the_next_index_without_moving_it() -> None:
    one = chooser("latency")
    one.learn(0, Attempt("a", 3000, Outcome.TIMEOUT))
    assert names([one.choose(QUEUES, 1) for _ in range(6)]) == ["b0", "b0", "b0", "b0", "b0", "b1"]


@pytest.mark.parametrize("name", ["round_robin", "latency", "adaptive"])
def test_the_index_survives_its_wrap(name: str) -> None:
    # Java's Math.abs(Integer.MIN_VALUE) is negative, and so was the position in the list.
    seven = QUEUES[:7]
    one = chooser(name, INDEX_MASK - 3)
    chosen = [one.choose(seven, 0) for _ in range(6)]
    turns = [(INDEX_MASK - 2) % 7, (INDEX_MASK - 1) % 7, INDEX_MASK % 7, 0, 1, 2]
    assert chosen == [seven[turn] for turn in turns]


def test_each_topic_has_its_own_turn() -> None:
    # With one index for both, two topics sent in turns would each reach every second queue only.
    one = chooser("round_robin")
    others = tuple(MessageQueue("payments", queue.broker_name, queue.queue_id) for queue in QUEUES)
    chosen = [(one.choose(QUEUES, 0), one.choose(others, 0)) for _ in range(8)]
    assert [first for first, _ in chosen] == list(QUEUES)
    assert [second for _, second in chosen] == list(others)


def test_each_thread_has_its_own_turn_and_all_share_what_was_learned() -> None:
    one = QueueChooser(strategy("latency"), random.Random(5))
    chosen: dict[str, list[MessageQueue]] = {}

    def send(name: str) -> None:
        chosen[name] = [one.choose(QUEUES, 0) for _ in range(8)]
        one.learn(0, Attempt(name, 3000, Outcome.TIMEOUT))

    for name in ("x", "y"):
        thread = threading.Thread(target=send, args=(name,))
        thread.start()
        thread.join()
    assert sorted(chosen["x"]) == sorted(chosen["y"]) == sorted(QUEUES)
    assert chosen["x"][0] != chosen["y"][0]  # random starts; true for this seed
    assert set(one.state.table) == {"x", "y"}


def test_producers_that_start_together_spread_out() -> None:
    starts = {QueueChooser(strategy("round_robin"), random.Random(seed)).choose(QUEUES, 0) for seed in range(100)}
    assert starts == set(QUEUES)


def test_no_queue_is_an_error_of_its_own() -> None:
    with pytest.raises(NoQueue, match="no writable queue"):
        chooser("latency").choose((), 0)


def test_a_broker_is_handed_out_for_probing_once_until_its_result_is_known() -> None:
    one = chooser("adaptive")
    one.learn(0, Attempt("a", 3000, Outcome.TIMEOUT))
    due = one.next_probe_at()
    assert due is not None
    assert one.probes(due - 1) == ()
    assert one.probes(due) == ("a",)
    assert one.probes(due + 1) == ()
    one.probed(due + 50, "a", ok=False, latency_millis=50)
    later = one.next_probe_at()
    assert later is not None
    assert later > due
    assert one.probes(later) == ("a",)


def test_only_adaptive_probes() -> None:
    for name in ("round_robin", "latency"):
        one = chooser(name)
        one.learn(0, Attempt("a", 3000, Outcome.TIMEOUT))
        before = one.state
        one.probed(1, "a", ok=True, latency_millis=1)
        assert (one.probes(1e9), one.next_probe_at(), one.state) == ((), None, before)


def test_a_wrong_name_or_option_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="no fault strategy 'fastest'; there are round_robin, latency, adaptive"):
        strategy("fastest")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="ramp_seconds"):
        strategy("adaptive", ramp_seconds=3)
    with pytest.raises(ConfigError, match="least_share must be at most 1"):
        strategy("adaptive", least_share=2)
    with pytest.raises(ConfigError, match="ramp_millis must be positive"):
        strategy("adaptive", ramp_millis=0)
    with pytest.raises(ConfigError, match="must hold"):
        strategy("adaptive", first_probe_millis=5000)
    with pytest.raises(ConfigError, match="same number"):
        strategy("latency", latency_max=(1, 2))
    with pytest.raises(ConfigError, match="ascend"):
        strategy("latency", latency_max=(7, 6, 5, 4, 3, 2, 1))
    with pytest.raises(ConfigError, match="round_robin"):
        strategy("round_robin", smoothing=1)
