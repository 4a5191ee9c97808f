"""A1 with the default times: when another master is elected, the old one has stopped by its own lease.

Heartbeats and their answers are late or lost, and the master may be given no processor for a while. A master is
replaced because it was silent; one that may acknowledge alone also because its connection was closed, after its lease.
"""

from __future__ import annotations

import random
from heapq import heappop, heappush
from itertools import count

import pytest

from downrange.broker.config import BrokerConfig
from downrange.controller.config import ControllerConfig
from downrange.controller.election import is_due
from downrange.controller.liveness import Heard, Liveness, ReplicaKey
from downrange.controller.state import BrokerSet, Replica
from downrange.model.fencing import Mastership

RUNS = 2000
SECONDS = 30.0
KEY = ReplicaKey("b", 1)
SILENT = BrokerConfig().controller_heart_beat_timeout_mills / 1000
BEAT = BrokerConfig().broker_heartbeat_interval / 1000
LEASE = ControllerConfig().lease_millis / 1000
SCAN = ControllerConfig().scan_not_active_broker_interval / 1000
SET = BrokerSet(
    cluster_name="c", broker_name="b", master=1, master_epoch=1, sync_state_set=frozenset((1, 2)), is_new=False,
    replicas={1: Replica("h:1", "h:1;1"), 2: Replica("h:2", "h:2;1")},
)  # fmt: skip


class BothLead(AssertionError):
    """A master could still acknowledge when another one was elected."""


def elected_at(
    seed: int, *, lease: float = LEASE, is_unsafe: bool = False, kind: type[Mastership] = Mastership
) -> float:
    """When another master is elected in one run; infinity for never. Raises BothLead."""
    chance, numbers = random.Random(seed), count()
    term, liveness = kind(1, 1, 0, frozenset((1,)), 1), Liveness()
    events: list[tuple[float, int, str, float]] = []

    def at(time: float, what: str, sent: float = 0.0) -> None:
        heappush(events, (time, next(numbers), what, sent))

    def sends(now: float, what: str, sent: float) -> None:
        if chance.random() < 0.85:
            at(now + (chance.uniform(0, 3) if chance.random() < 0.2 else 0.0), what, sent)

    at(0.0, "heartbeat", 0.0)
    at(BEAT, "beats")
    at(SCAN, "scans")
    if is_unsafe:
        at(chance.uniform(0, SECONDS), "closes")
    while events:
        now, _, what, sent = heappop(events)
        match what:
            case "beats" if now < SECONDS:
                sends(now, "heartbeat", now)
                at(now + (chance.uniform(0, 5) if chance.random() < 0.05 else BEAT), "beats")
            case "heartbeat":
                liveness.heartbeat(KEY, Heard(now, SILENT, connection="c"))
                liveness.lease("b", now + lease)
                sends(now, "answer", sent)
            case "answer":
                term.renewed(sent, lease)
            case "closes":
                liveness.not_found(KEY, "c")
            case "scans" if now < 2 * SECONDS:
                alive = liveness.alive("b", (1,), now) | {2}
                if is_due(SET, alive, may_be_leased=is_unsafe and now <= liveness.leased_until("b")):
                    if term.leads(now):
                        raise BothLead(f"seed {seed}: the lease ends at {term.deadline}, and it is {now}")
                    return now
                at(now + SCAN, "scans")
    return float("inf")


@pytest.mark.parametrize("is_unsafe", [False, True])
def test_a_master_has_stopped_when_another_one_is_elected(is_unsafe: bool) -> None:
    times = [elected_at(seed, is_unsafe=is_unsafe) for seed in range(RUNS)]
    assert sum(time < SECONDS for time in times) > RUNS / 2, "the model must do something"


class WithoutMargin(Mastership):
    def renewed(self, sent_at: float, lease_seconds: float) -> None:
        self.deadline = max(self.deadline or 0.0, sent_at + lease_seconds)


class ComesBack(Mastership):
    """A lease that ran out is renewed by an answer that was under way."""

    def leads(self, now: float) -> bool:
        return True


@pytest.mark.parametrize(("kind", "lease"), [(WithoutMargin, LEASE), (ComesBack, LEASE), (Mastership, 3.0)])
def test_without_the_lease_two_of_them_lead(kind: type[Mastership], lease: float) -> None:
    def run_all() -> None:
        for seed in range(RUNS):
            elected_at(seed, kind=kind, lease=lease)

    with pytest.raises(BothLead):
        run_all()
