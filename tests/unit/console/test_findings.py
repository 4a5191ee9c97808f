"""What is wrong, in sentences: each rule with a snapshot in which it holds, and one in which it does not."""

from __future__ import annotations

from datetime import UTC

import pytest

from downrange.client.admin.runtime import BrokerRuntime
from downrange.client.brokers import Broker
from downrange.clock import ManualClock
from downrange.console.answers import Answers
from downrange.console.findings import Finding, Harm, Looked, differing_keys, findings
from downrange.console.history import History
from downrange.console.snapshot import (
    BrokerState,
    Controllers,
    GroupState,
    Member,
    QueueEnds,
    QueueProgress,
    Replicas,
    Snapshot,
    TopicState,
    Waiting,
)
from downrange.model.message import MessageQueue
from downrange.model.subscription import subscribe
from downrange.model.topics import TopicConfig
from downrange.protocol.bodies.statistics import TopicOffset, TopicStats

NOW = 1_800_000_000_000
QUEUE = MessageQueue("orders", "broker-a", 0)


def healthy() -> Snapshot:
    snapshot = Snapshot("prod", at=NOW)
    runtime = BrokerRuntime({"commitLogDiskRatio": "0.2", "commitLogMaxOffset": str(100 << 20)})
    snapshot.brokers["10.0.0.1:10911"] = BrokerState(Broker("10.0.0.1:10911", "broker-a", "c", 0), runtime, NOW)
    return snapshot


def group(behind: int = 0, *, members: int = 1, moved: int = 0, oldest: int | None = None) -> GroupState:
    found = GroupState("billing", at=NOW, members_at=NOW)
    found.queues[QUEUE] = QueueProgress(100 + behind, 100, moved_at=NOW - moved, oldest=oldest, asked_at=NOW)
    for number in range(members):
        found.members[f"c{number}"] = Member(f"c{number}", queues=frozenset([QUEUE]) if not number else frozenset())
    if behind:
        found.behind_since = NOW - 600_000
    return found


def found_in(snapshot: Snapshot, history: History | None = None) -> dict[str, Finding]:
    return {one.kind: one for one in findings(Looked(snapshot, history or History(), NOW, UTC))}


def test_a_healthy_cluster_has_no_findings() -> None:
    snapshot = healthy()
    snapshot.groups["billing"] = group()
    assert found_in(snapshot) == {}


def test_no_name_server() -> None:
    snapshot = Snapshot("prod", error="connection refused")
    assert "connection refused" in found_in(snapshot)["no-namesrv"].text


def test_a_broker_that_is_gone_or_silent() -> None:
    snapshot = healthy()
    snapshot.lost["broker-b"] = NOW - 60_000
    snapshot.brokers["10.0.0.1:10911"].error = "no answer within 2 s"
    found = found_in(snapshot)
    assert found["broker-gone"].text.startswith("broker-b is gone since")
    assert "no answer within 2 s" in found["broker-silent"].text
    assert found["broker-silent"].link == "/c/prod/brokers/broker-a"


@pytest.mark.parametrize(("ratio", "harm"), [("0.74", None), ("0.81", Harm.RISK), ("0.93", Harm.LOSS)])
def test_a_full_disk(ratio: str, harm: Harm | None) -> None:
    snapshot = healthy()
    snapshot.brokers["10.0.0.1:10911"].runtime = BrokerRuntime({"commitLogDiskRatio": ratio})
    found = found_in(snapshot).get("disk")
    assert (found.harm if found else None) == harm


def test_a_slave_behind() -> None:
    snapshot = healthy()
    slave = Broker("10.0.0.2:10911", "broker-a", "c", 1)
    snapshot.brokers[slave.address] = BrokerState(slave, BrokerRuntime({"commitLogMaxOffset": str(50 << 20)}), NOW)
    assert "50 MiB behind" in found_in(snapshot)["slave-behind"].text


def test_controllers_and_replicas_out_of_sync() -> None:
    snapshot = healthy()
    snapshot.controllers = Controllers("10.0.0.9:9878", {}, {"broker-a": Replicas("10.0.0.1:10911", (1, 2), ())})
    assert found_in(snapshot) == {}
    snapshot.controllers = Controllers("", {"10.0.0.9:9878": "refused"}, {"broker-a": Replicas("", (1,), (2, 3))})
    found = found_in(snapshot)
    assert found["no-controller"].text.startswith("No controller leads")
    assert "refused" in found["controller-silent"].text
    assert found["no-master"].harm is Harm.LOSS
    assert found["not-in-sync"].text == "broker-a: 2 replicas (2, 3) not in sync, which cannot become master."


def test_controllers_are_those_of_the_settings_of_brokers() -> None:
    snapshot = healthy()
    assert snapshot.controller_addresses == []
    settings = {"enableControllerMode": "true", "controllerAddr": "c1:9878;c2:9878"}
    snapshot.brokers["10.0.0.1:10911"].settings = settings
    assert snapshot.controller_addresses == ["c1:9878", "c2:9878"]


def test_a_group_without_members_stuck_or_growing() -> None:
    snapshot = healthy()
    snapshot.groups["billing"] = group(10, members=0)
    assert found_in(snapshot)["group-without-members"].text == (
        "billing is 10 behind since 07:50:00, and no member runs."
    )
    snapshot.groups["billing"] = group(10, moved=61_000, oldest=90_000)
    assert "stuck" in found_in(snapshot)["group-stuck"].text
    snapshot.groups["billing"] = group(500, moved=1_000, oldest=90_000)
    history = History()
    for second in range(0, 120, 10):
        history.add("group:billing", NOW / 1000 - 120 + second, (100 + 5 * second, 10, 0))
    text = found_in(snapshot, history)["group-growing"].text
    assert "+5/s" in text
    assert "the oldest waits for 90 s" in text
    todo = found_in(snapshot, history)["group-growing"].todo
    assert "make the members quicker" in todo, "another member would have no queue"
    for number in (1, 2):
        snapshot.groups["billing"].queues[MessageQueue("orders", "broker-a", number)] = QueueProgress(0, 0)
    assert found_in(snapshot, history)["group-growing"].todo == "Start more members: 1 member for 3 queues."


@pytest.mark.parametrize("how", ["silent", "gone"])
def test_queues_of_a_broker_that_tells_nothing_are_not_called_stuck(how: str) -> None:
    """Its last figures are old: whether its queues move, and who holds them, is not known."""
    snapshot = healthy()
    one = group(10, moved=300_000, oldest=90_000)
    one.queues[QUEUE].asked_at = NOW - 290_000
    one.members["c0"].queues = frozenset()
    snapshot.groups["billing"] = one
    if how == "silent":
        snapshot.brokers["10.0.0.1:10911"].error = "no answer within 2 s"
    else:
        snapshot.lost["broker-a"] = NOW - 290_000
    assert set(found_in(snapshot)) == {f"broker-{how}"}
    assert set(snapshot.unheard) == {"broker-a"}


def test_a_broker_that_is_gone_for_a_day_is_no_longer_counted() -> None:
    snapshot = healthy()
    snapshot.groups["billing"] = group(10)
    snapshot.lost["broker-a"] = NOW - 1000
    snapshot.forget_lost(NOW - 1001)
    assert snapshot.groups["billing"].behind == 10
    snapshot.forget_lost(NOW - 999)
    assert snapshot.groups["billing"].behind == 0
    assert snapshot.lost == {}


def test_a_slave_that_is_gone() -> None:
    snapshot = healthy()
    snapshot.lost_slaves["broker-a", 1] = NOW
    assert found_in(snapshot)["slave-gone"].text.startswith("Slave 1 of broker-a is gone since")
    snapshot.controllers = Controllers("10.0.0.9:9878", {}, {})
    assert found_in(snapshot) == {}, "a controller gives ids anew, and says itself which replicas are not in sync"


def test_messages_on_their_way_are_no_finding() -> None:
    snapshot = healthy()
    snapshot.groups["billing"] = group(3, moved=100, oldest=200)
    assert found_in(snapshot) == {}


def test_members_that_subscribe_differently() -> None:
    snapshot = healthy()
    one = group(members=2)
    one.members["c0"].subscriptions = (subscribe("orders", "paid"),)
    one.members["c1"].subscriptions = (subscribe("orders", "paid || sent"),)
    snapshot.groups["billing"] = one
    text = found_in(snapshot)["subscriptions-differ"].text
    assert '1 member with "paid"' in text
    assert "Messages get lost" in text
    one.members["c1"].subscriptions = (subscribe("orders", "paid"),)
    assert found_in(snapshot) == {}


def test_a_queue_that_nobody_holds() -> None:
    snapshot = healthy()
    one = group(10, moved=1000, oldest=10_000)
    one.members["c0"].queues = frozenset()
    snapshot.groups["billing"] = one
    assert found_in(snapshot)["queue-without-member"].text == "1 queue of billing with waiting messages has no member."


def test_dead_letters_and_their_rise() -> None:
    snapshot = healthy()
    snapshot.groups["billing"] = group()
    letters = TopicState("%DLQ%billing", at=NOW)
    letters.queues[MessageQueue("%DLQ%billing", "broker-a", 0)] = QueueEnds(0, 512, NOW)
    snapshot.topics[letters.name] = letters
    assert found_in(snapshot)["dead-letters"].harm is Harm.RISK
    history = History()
    history.add("group:billing", NOW / 1000 - 3600, (0, None, 500))
    assert "12 of them since" in found_in(snapshot, history)["dead-letters-rise"].text


def test_the_rate_of_a_topic_is_the_sum_over_its_brokers() -> None:
    """Brokers answer one after another; what one of them has taken is judged by its own last answer."""
    clock = ManualClock(NOW)
    snapshot = healthy()
    snapshot.topics["orders"] = TopicState("orders")
    answers = Answers(snapshot, clock)

    def tell(broker: str, end: int) -> float | None:
        queue = MessageQueue("orders", broker, 0)
        stats = TopicStats(offset_table={queue: TopicOffset(min_offset=0, max_offset=end)})
        answers.ends(Broker(f"{broker}:1", broker, "c", 0), "orders", stats)
        return snapshot.topics["orders"].rate

    assert tell("broker-a", 1000) is None
    clock.tick(0.005)
    assert tell("broker-b", 5000) is None, "its messages of before are no rate"
    clock.tick(9.995)
    assert tell("broker-a", 1100) == 10
    clock.tick(0.005)
    assert tell("broker-b", 5200) == 30
    snapshot.forget_rates("broker-b")
    clock.tick(10)
    assert tell("broker-a", 1100) == 0


def test_half_messages_that_are_old_and_delayed_ones_that_are_late() -> None:
    snapshot = healthy()
    snapshot.brokers["10.0.0.1:10911"].waiting = Waiting(5, 120_000, 2, 3_600_000)
    found = found_in(snapshot)
    assert found["half-old"].text == "2 half messages without an answer, the oldest for 60 min."
    assert found["delayed-late"].text == "Delayed messages are late by 2 min."


def test_a_topic_on_one_broker_of_two() -> None:
    snapshot = healthy()
    other = Broker("10.0.0.3:10911", "broker-b", "c", 0)
    snapshot.brokers[other.address] = BrokerState(other, BrokerRuntime({}), NOW)
    snapshot.brokers["10.0.0.1:10911"].topics["orders"] = TopicConfig("orders")
    snapshot.brokers[other.address].topics["broker-b"] = TopicConfig("broker-b")  # every broker has a topic of its name
    snapshot.topics |= {name: TopicState(name) for name in ("orders", "broker-b", "c", "c_REPLY_TOPIC")}
    assert found_in(snapshot)["one-broker"].text == "1 topic is on one broker only: orders."


def test_name_servers_that_differ() -> None:
    tables = {
        "a": {"orderMessageEnable": "true", "listenPort": "1"},
        "b": {"orderMessageEnable": "false", "listenPort": "2"},
    }
    assert differing_keys(tables) == ["orderMessageEnable"]
    snapshot = healthy()
    snapshot.namesrvs = tables
    assert "orderMessageEnable" in found_in(snapshot)["namesrv-differ"].text


def test_the_most_harmful_comes_first() -> None:
    snapshot = healthy()
    snapshot.groups["billing"] = group(10, members=0)
    snapshot.lost["broker-b"] = NOW
    harms = [one.harm for one in findings(Looked(snapshot, History(), NOW, UTC))]
    assert harms == sorted(harms)
    assert len(harms) == 2
    assert all(one.todo for one in findings(Looked(snapshot, History(), NOW, UTC)))
