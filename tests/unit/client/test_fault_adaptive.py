"""The rules of `adaptive`, one by one, and what holds whatever happens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from downrange.client.producer.fault import Attempt, Outcome
from downrange.client.producer.fault.adaptive import FAILURES, Adaptive, AdaptiveSettings, AdaptiveState, Stage
from downrange.model.message import MessageQueue

ADAPTIVE = Adaptive()
SETTINGS = ADAPTIVE.settings
BROKERS = ("a", "b", "c", "d")
QUEUES = tuple(MessageQueue("orders", broker, queue_id) for broker in BROKERS for queue_id in range(4))


@dataclass
class Producer:
    """Replays events on a clock of its own."""

    now: float = 0.0
    index: int = 0
    state: AdaptiveState = field(default_factory=ADAPTIVE.initial)

    def attempt(self, broker: str, latency: float = 2, outcome: Outcome = Outcome.OK) -> None:
        self.now += latency
        self.state = ADAPTIVE.learn(self.state, self.now, Attempt(broker, latency, outcome))

    def all_well(self) -> None:
        for broker in BROKERS:
            self.attempt(broker)

    def choose(self, last_broker: str | None = None, queues: tuple[MessageQueue, ...] = QUEUES) -> str:
        self.index += 1
        choice = ADAPTIVE.choose(self.state, queues, self.now, last_broker, self.index)
        self.state = choice.state
        return choice.queue.broker_name

    def load(self, count: int = 4000) -> Counter[str]:
        return Counter(self.choose() for _ in range(count))

    def probe(self, *, ok: bool, latency: float = 2) -> None:
        """Wait for the next probe that is due and answer it."""
        due = ADAPTIVE.next_probe_at(self.state)
        assert due is not None
        self.now = max(self.now, due)
        for broker in ADAPTIVE.probes(self.state, self.now):
            self.now += latency
            self.state = ADAPTIVE.probed(self.state, self.now, broker, ok, latency)

    def try_out(self, broker: str, latency: float = 2, outcome: Outcome = Outcome.OK) -> None:
        """A good probe, and the message that tries the broker."""
        self.probe(ok=True)
        while self.choose() != broker:
            pass
        self.attempt(broker, latency, outcome)


@pytest.fixture
def producer() -> Producer:
    one = Producer()
    one.all_well()
    return one


@pytest.mark.parametrize("outcome", sorted(FAILURES))
def test_one_failure_and_the_broker_gets_probes_instead_of_messages(producer: Producer, outcome: Outcome) -> None:
    producer.attempt("a", 5, outcome)
    assert "a" not in producer.load()
    assert ADAPTIVE.probes(producer.state, producer.now) == ()
    assert ADAPTIVE.probes(producer.state, producer.now + SETTINGS.first_probe_millis) == ("a",)


def test_what_an_avoided_broker_loses_is_spread_over_all_others(producer: Producer) -> None:
    producer.attempt("a", 5, Outcome.TIMEOUT)
    load = producer.load()
    assert all(load[broker] == pytest.approx(4000 / 3, rel=0.1) for broker in "bcd")


@pytest.mark.parametrize("outcome", [Outcome.INTERRUPTED, Outcome.REFUSED, Outcome.NOT_STORE_OK])
def test_what_is_not_the_brokers_fault_does_not_count_against_it(producer: Producer, outcome: Outcome) -> None:
    producer.attempt("a", 5, outcome)
    assert producer.load()["a"] == 1000


def test_probes_that_fail_come_at_growing_intervals(producer: Producer) -> None:
    producer.attempt("a", 5, Outcome.TIMEOUT)
    times = [producer.now]
    for _ in range(5):
        producer.probe(ok=False, latency=0.1)
        times.append(producer.now)
    gaps = [round(later - earlier) for earlier, later in pairwise(times)]
    assert gaps == [500, 1000, 2000, 2000, 2000]


def test_after_a_good_probe_one_message_tries_the_broker_and_then_its_share_grows(producer: Producer) -> None:
    producer.attempt("a", 5, Outcome.TIMEOUT)
    producer.probe(ok=False)
    producer.probe(ok=True)
    assert ADAPTIVE.next_probe_at(producer.state) is None
    assert "a" not in {producer.choose("b") for _ in range(50)}, "a retry is no trial"
    assert producer.load()["a"] == 1
    producer.attempt("a")
    shares = []
    for _ in range(5):
        shares.append(producer.load()["a"] / 1000)
        producer.now += SETTINGS.ramp_millis / 4
    assert shares == pytest.approx([0.1, 0.25, 0.5, 0.75, 1.0], abs=0.05)


def test_a_trial_without_news_is_followed_by_a_probe_that_decides(producer: Producer) -> None:
    producer.attempt("a", 5, Outcome.TIMEOUT)
    producer.try_out("a", 2, Outcome.INTERRUPTED)
    tried = producer.state
    producer.probe(ok=True)
    assert producer.state.avoided == frozenset()
    producer.state = tried
    producer.probe(ok=False)
    assert "a" not in producer.load()


@pytest.mark.parametrize(("latency", "outcome"), [(800, Outcome.OK), (5, Outcome.TIMEOUT), (5, Outcome.FLOW_CONTROL)])
def test_a_broker_whose_probes_are_fast_but_whose_messages_fail_or_drag_gets_one_message_at_a_time(
    producer: Producer, latency: float, outcome: Outcome
) -> None:
    producer.attempt("a", 5, Outcome.TIMEOUT)
    waits = []
    for _ in range(5):
        producer.try_out("a", latency, outcome)
        assert "a" not in producer.load(400)
        due = ADAPTIVE.next_probe_at(producer.state)
        assert due is not None
        waits.append(round(due - producer.now))
    assert waits == [2000, 8000, 16_000, 16_000, 16_000]


@pytest.mark.parametrize(("latency", "share"), [(2, 1.0), (20, 1.0), (40, 0.5), (80, 0.25), (160, 0.125)])
def test_a_slow_broker_gets_load_in_proportion_to_the_best(producer: Producer, latency: float, share: float) -> None:
    for _ in range(30):
        producer.attempt("a", latency)
        producer.attempt("b", 2)
    assert producer.load()["a"] / 1000 == pytest.approx(share, rel=0.15)


def test_slowness_without_news_is_forgotten(producer: Producer) -> None:
    for _ in range(20):
        producer.attempt("a", 100)
    assert producer.load()["a"] < 300
    producer.now += 5 * SETTINGS.forget_millis
    assert producer.load()["a"] > 850


def test_a_broker_below_the_least_share_is_avoided_until_a_probe_is_fast(producer: Producer) -> None:
    for _ in range(2):
        producer.attempt("a", 800)
    assert "a" not in producer.load()
    for _ in range(3):
        producer.probe(ok=True, latency=800)
    assert "a" not in producer.load()
    producer.try_out("a")
    producer.now += SETTINGS.ramp_millis
    assert producer.load()["a"] == 1000


def test_slowness_takes_away_at_most_half_of_the_brokers(producer: Producer) -> None:
    for _ in range(20):
        for broker in "abc":
            producer.attempt(broker, 800)
    assert len(producer.state.avoided) == 2
    assert producer.load()["d"] > 3000


def test_when_all_are_slow_nobody_is_slow(producer: Producer) -> None:
    for _ in range(50):
        for broker in BROKERS:
            producer.attempt(broker, 800)
    while ADAPTIVE.next_probe_at(producer.state) is not None:
        producer.probe(ok=True, latency=800)
    for broker in sorted(producer.state.avoided):
        producer.attempt(broker, 800)
    producer.now += SETTINGS.ramp_millis
    assert min(producer.load().values()) > 900


def test_flow_control_lowers_the_share_but_does_not_take_the_broker_away(producer: Producer) -> None:
    for _ in range(10):
        producer.attempt("a", 1, Outcome.FLOW_CONTROL)
    assert 100 < producer.load()["a"] < 300


def test_each_relapse_makes_the_wait_longer_and_a_long_good_time_forgives(producer: Producer) -> None:
    waits = []
    for quiet in (0.0, 5_000.0, 5_000.0, 5_000.0, 5_000.0, SETTINGS.relapse_millis):
        producer.now += quiet
        producer.attempt("a", 1, Outcome.CONNECT_FAILED)
        due = ADAPTIVE.next_probe_at(producer.state)
        assert due is not None
        waits.append(round(due - producer.now))
        producer.try_out("a")
    assert waits == [500, 2000, 8000, 16_000, 16_000, 500]


def test_a_failed_trial_is_a_relapse_however_long_the_broker_was_away(producer: Producer) -> None:
    producer.attempt("a", 5, Outcome.TIMEOUT)
    away_until = producer.now + 2 * SETTINGS.relapse_millis
    while producer.now < away_until:
        producer.probe(ok=False)
    producer.try_out("a", 5, Outcome.BROKER_ERROR)
    assert ADAPTIVE.next_probe_at(producer.state) == producer.now + 2000


def test_late_news_of_attempts_begun_before_a_change_is_ignored(producer: Producer) -> None:
    producer.attempt("a", 5, Outcome.CONNECTION_LOST)
    avoided = producer.state
    for _ in range(3):  # answers that were on their way when the connection broke
        producer.state = ADAPTIVE.learn(producer.state, producer.now + 1, Attempt("a", 4, Outcome.OK))
    assert producer.state == avoided
    producer.try_out("a")
    reopened = producer.state
    late = Attempt("a", 3000, Outcome.TIMEOUT)
    assert ADAPTIVE.learn(reopened, producer.now + 1, late) == reopened


def test_a_retry_goes_elsewhere_unless_the_failed_broker_is_the_only_one_open(producer: Producer) -> None:
    assert {producer.choose("a") for _ in range(50)} == {"b", "c", "d"}
    for broker in "bcd":
        producer.attempt(broker, 5, Outcome.CONNECT_FAILED)
    assert {producer.choose("a") for _ in range(50)} == {"a"}


def test_when_all_are_avoided_all_are_tried_and_success_brings_one_back(producer: Producer) -> None:
    for broker in BROKERS:
        producer.attempt(broker, 5, Outcome.CONNECT_FAILED)
    assert producer.load() == Counter(dict.fromkeys(BROKERS, 1000))
    assert "b" not in {producer.choose("b") for _ in range(50)}
    producer.attempt("c", 5)
    assert set(producer.load()) == {"c"}


def test_when_all_are_avoided_those_that_answer_come_before_the_dead(producer: Producer) -> None:
    for _ in range(3):
        producer.attempt("d", 800)
    for broker in "abc":
        producer.attempt(broker, 5, Outcome.CONNECT_FAILED)
    assert set(producer.load()) == {"d"}


def test_failed_messages_do_not_put_off_the_probe(producer: Producer) -> None:
    for broker in BROKERS:
        producer.attempt(broker, 1, Outcome.CONNECT_FAILED)
    due = ADAPTIVE.next_probe_at(producer.state)
    for _ in range(1000):
        producer.attempt("a", 0.1, Outcome.CONNECT_FAILED)
    assert ADAPTIVE.next_probe_at(producer.state) == due


# --- whatever happens ---

latencies = st.sampled_from([0.0, 1.0, 5.0, 30.0, 150.0, 800.0, 3000.0])
outcomes = st.sampled_from(Outcome)
events = st.one_of(
    st.tuples(st.just("attempt"), st.sampled_from(BROKERS), latencies, outcomes),
    st.tuples(st.just("probe"), st.sampled_from(BROKERS), latencies, st.booleans()),
    st.tuples(st.just("wait"), st.just(""), st.sampled_from([0.0, 100.0, 1000.0, 20_000.0]), st.none()),
)
histories = st.lists(events, max_size=40)


def after(history: list[tuple[str, str, float, Outcome | bool | None]]) -> Producer:
    producer = Producer()
    for kind, broker, millis, result in history:
        producer.now += millis
        if isinstance(result, Outcome):
            producer.state = ADAPTIVE.learn(producer.state, producer.now, Attempt(broker, millis, result))
        elif kind == "probe":
            producer.state = ADAPTIVE.probed(producer.state, producer.now, broker, bool(result), millis)
    return producer


@given(
    history=histories,
    queues=st.lists(st.sampled_from(QUEUES), min_size=1, unique=True).map(tuple),
    last_broker=st.none() | st.sampled_from(BROKERS),
    index=st.integers(0, 2**31 - 1),
)
def test_it_always_finds_one_of_the_queues(
    history: list[tuple[str, str, float, Outcome | bool | None]],
    queues: tuple[MessageQueue, ...],
    last_broker: str | None,
    index: int,
) -> None:
    producer = after(history)
    queue = ADAPTIVE.choose(producer.state, queues, producer.now, last_broker, index).queue
    assert queue in queues
    ready = {
        broker
        for broker, health in producer.state.brokers.items()
        if last_broker is None and health.avoidance is not None and health.avoidance.stage is Stage.READY
    }
    open_elsewhere = {q.broker_name for q in queues} - producer.state.avoided - {last_broker}
    if open_elsewhere:
        assert queue.broker_name in open_elsewhere | ready


@given(history=histories)
def test_the_set_of_avoided_brokers_is_that_of_the_broker_table(
    history: list[tuple[str, str, float, Outcome | bool | None]],
) -> None:
    state = after(history).state
    assert state.avoided == {broker for broker, health in state.brokers.items() if health.avoidance is not None}


@given(history=histories)
def test_every_broker_returns_in_bounded_time_once_it_is_well(
    history: list[tuple[str, str, float, Outcome | bool | None]],
) -> None:
    """...that is, the longest wait for a probe, and the time the messages take to come round to it."""
    producer = after(history)
    healed_at = producer.now
    while producer.state.avoided:
        if ADAPTIVE.next_probe_at(producer.state) is not None:
            producer.probe(ok=True, latency=0.5)
        else:
            producer.attempt(producer.choose(), 0.5)
        assert producer.now - healed_at <= SETTINGS.longest_relapse_millis + 2 * len(QUEUES)


@given(broker=st.sampled_from(BROKERS), seconds_down=st.floats(0.0, 3600.0))
def test_after_a_single_outage_it_is_back_at_full_load_within_five_seconds(broker: str, seconds_down: float) -> None:
    producer = Producer()
    producer.all_well()
    producer.attempt(broker, 5, Outcome.CONNECT_FAILED)
    healed_at = producer.now + seconds_down * 1000
    while (due := ADAPTIVE.next_probe_at(producer.state)) is not None:
        producer.probe(ok=due >= healed_at)
    while producer.state.avoided:
        producer.attempt(producer.choose())
    producer.now = max(producer.now, healed_at) + SETTINGS.ramp_millis
    assert producer.load(160)[broker] == 40
    assert producer.now - healed_at <= 5000


@given(history=histories, healthy=st.sampled_from(BROKERS))
def test_a_healthy_broker_is_never_starved(
    history: list[tuple[str, str, float, Outcome | bool | None]], healthy: str
) -> None:
    """Whatever the others do: one that always answers in 2 ms gets at least its fair share."""
    producer = Producer()
    for kind, broker, millis, result in history:
        producer.now += millis
        if broker == healthy:
            producer.attempt(healthy, 2)
        elif isinstance(result, Outcome):
            producer.state = ADAPTIVE.learn(producer.state, producer.now, Attempt(broker, millis, result))
        elif kind == "probe":
            producer.state = ADAPTIVE.probed(producer.state, producer.now, broker, bool(result), millis)
    slack = len(BROKERS)  # a trial of each other broker
    assert producer.load(800)[healthy] >= 200 - slack


def test_the_parameters_are_the_callers() -> None:
    eager = Adaptive(AdaptiveSettings(first_probe_millis=10, ramp_millis=1))
    state = eager.learn(eager.initial(), 100, Attempt("a", 1, Outcome.TIMEOUT))
    assert eager.next_probe_at(state) == 110
    state = eager.learn(state, 112, Attempt("a", 1, Outcome.OK))
    assert eager.share(state, "a", 113) == 1
