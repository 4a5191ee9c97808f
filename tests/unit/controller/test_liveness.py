"""When replicas count as alive."""

from __future__ import annotations

from downrange.controller.election import LOWEST_PRIORITY, Standing
from downrange.controller.liveness import Heard, Liveness, ReplicaKey, heard_of
from downrange.protocol.bodies.members import BrokerHeartbeatRequest

ONE, TWO = ReplicaKey("b", 1), ReplicaKey("b", 2)


def test_a_heartbeat_counts_for_its_timeout() -> None:
    table = Liveness()
    assert not table.is_alive(ONE, 0.0)
    assert table.heartbeat(ONE, Heard(100.0, 3.0))
    assert table.is_alive(ONE, 103.0)
    assert not table.is_alive(ONE, 103.1)
    assert table.heartbeat(TWO, Heard(100.0, 3.0)) is not None
    assert table.heartbeat(ONE, Heard(110.0, 3.0))  # heard of again
    assert not table.heartbeat(ONE, Heard(111.0, 3.0))
    assert table.alive("b", (1, 2, 3), 111.0) == {1}


def test_a_heartbeat_says_how_far_a_replica_is() -> None:
    header = BrokerHeartbeatRequest(cluster_name="c", broker_addr="h:1", broker_name="b", broker_id=1)
    heard = heard_of(header, "connection", 5.0)
    assert (heard.timeout_seconds, heard.standing) == (10.0, Standing(-1, -1, LOWEST_PRIORITY))
    for senseless in (-1, 0):
        named = BrokerHeartbeatRequest(
            cluster_name="c", broker_addr="h:1", broker_name="b", broker_id=1, heartbeat_timeout_mills=senseless
        )
        assert heard_of(named, None, 0.0).timeout_seconds == 10.0
    full = BrokerHeartbeatRequest(
        cluster_name="c", broker_addr="h:1", broker_name="b", broker_id=1, epoch=3, max_offset=1 << 40,
        confirm_offset=7, heartbeat_timeout_mills=1 << 60, election_priority=5,
    )  # fmt: skip
    heard = heard_of(full, None, 0.0)
    assert heard.standing == Standing(3, 1 << 40, 5)
    assert (heard.confirm_offset, heard.address, heard.timeout_seconds) == (7, "h:1", 600.0)
    table = Liveness()
    table.heartbeat(ONE, heard)
    assert table.standings("b", (1, 2)) == {1: heard.standing}


def test_a_log_that_was_cut_looks_as_short_as_it_is() -> None:
    table = Liveness()
    table.heartbeat(ONE, Heard(0.0, 3.0, Standing(3, 100)))
    table.heartbeat(ONE, Heard(1.0, 3.0, Standing(3, 50)))
    assert table.standings("b", (1,))[1].max_offset == 50


def test_a_closed_connection_is_only_a_suspicion() -> None:
    table = Liveness()
    table.heartbeat(ONE, Heard(0.0, 3.0, connection="first"))
    table.heartbeat(TWO, Heard(0.0, 3.0, connection="other"))
    assert table.closed("first") == [ONE]
    assert table.is_alive(ONE, 1.0)
    assert table.not_found(ONE, "first")
    assert not table.is_alive(ONE, 1.0)
    assert table.closed("first") == []  # it is looked for once
    assert table.heartbeat(ONE, Heard(1.0, 3.0, connection="second"))
    assert table.is_alive(ONE, 1.0)


def test_a_replica_that_came_back_over_another_connection_is_not_given_up() -> None:
    table = Liveness()
    table.heartbeat(ONE, Heard(0.0, 3.0, connection="first"))
    table.heartbeat(ONE, Heard(0.1, 3.0, connection="second"))
    assert table.closed("first") == []
    assert not table.not_found(ONE, "first")
    assert table.is_alive(ONE, 1.0)


def test_a_new_leader_gives_everybody_time_but_those_it_found_gone() -> None:
    table = Liveness()
    table.heartbeat(ONE, Heard(0.0, 3.0, connection="first"))
    assert table.not_found(ONE, "first")
    table.heartbeat(TWO, Heard(0.0, 3.0))
    three = ReplicaKey("b", 3)
    table.take_office([ONE, TWO, three], 100.0)
    assert table.alive("b", (1, 2, 3), 100.0) == {2, 3}
    assert table.alive("b", (1, 2, 3), 103.5) == {3}  # 3 was never heard of: it has the default of 10 s
    assert table.alive("b", (1, 2, 3), 110.5) == frozenset()


def test_a_broker_that_asks_is_alive_before_its_first_heartbeat() -> None:
    table = Liveness()
    table.asked(ONE, Heard(5.0))
    assert table.is_alive(ONE, 15.0)
    told = Heard(6.0, 3.0, Standing(2, 100))
    table.heartbeat(ONE, told)
    table.asked(ONE, Heard(7.0))
    assert table.standings("b", (1,)) == {1: told.standing}
    assert not table.is_alive(ONE, 9.5)


def test_a_process_that_stood_still_excuses_the_silence_of_others() -> None:
    table = Liveness()
    table.heartbeat(ONE, Heard(0.0, 3.0, connection="c"))
    table.heartbeat(TWO, Heard(0.0, 3.0, connection="d"))
    assert table.not_found(TWO, "d")
    table.excuse(100.0)
    assert table.alive("b", (1, 2), 102.0) == {1}


def test_leases_only_grow() -> None:
    table = Liveness()
    assert table.leased_until("b") == float("-inf")
    table.lease("b", 5.0)
    table.lease("b", 4.0)
    assert table.leased_until("b") == 5.0


def test_strangers_cannot_fill_the_memory() -> None:
    table = Liveness()
    for number in range(10_000):
        key = ReplicaKey(f"b{number}", 1)
        assert not table.is_full(key)
        table.heartbeat(key, Heard(0.0))
    assert table.is_full(ONE)
    assert not table.is_full(ReplicaKey("b7", 1))
    table.forget(ReplicaKey("b7", 1))
    assert not table.is_full(ONE)
