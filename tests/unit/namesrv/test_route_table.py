from __future__ import annotations

from dataclasses import replace

from downrange.model.topics import TopicConfig
from downrange.namesrv.route_table import BrokerIdentity, RouteTable
from downrange.protocol.bodies.data_version import DataVersion
from downrange.protocol.bodies.routes import QueueData

MASTER_A = BrokerIdentity("C1", "broker-a", "10.0.0.1:10911", 0)
SLAVE_A = BrokerIdentity("C1", "broker-a", "10.0.0.2:10911", 1)
MASTER_B = BrokerIdentity("C2", "broker-b", "10.0.0.3:10911", 0)
V1 = DataVersion(counter=1, timestamp=1)
V2 = DataVersion(counter=2, timestamp=2)


def topic(name: str, queues: int = 4, perm: int = 6, sys_flag: int = 0) -> TopicConfig:
    return TopicConfig(name, queues, queues, perm, topic_sys_flag=sys_flag)


class Table(RouteTable):
    """A route table with a clock, and one connection per broker unless told otherwise."""

    now = 1000

    def up(
        self,
        broker: BrokerIdentity,
        *topics: TopicConfig,
        version: DataVersion = V1,
        connection: object = None,
        ha: str = "ha",
    ) -> tuple[str | None, str | None]:
        done = self.register(
            broker,
            ha,
            version,
            topics,
            now=self.now,
            connection=connection or broker.broker_addr,
        )
        return done.master_addr, done.ha_server_addr


def addresses(table: RouteTable, name: str) -> dict[str, dict[int, str]] | None:
    route = table.route(name)
    if route is None:
        return None
    return {broker.broker_name: broker.broker_addrs for broker in route.broker_datas}


def perms(table: RouteTable, name: str) -> list[int]:
    route = table.route(name)
    assert route is not None
    return [queue.perm for queue in route.queue_datas]


def test_a_route_lists_all_brokers_of_a_topic_with_all_their_ids() -> None:
    table = Table()
    table.up(MASTER_A, topic("T"))
    table.up(SLAVE_A)
    table.up(MASTER_B, topic("T", 8))
    assert addresses(table, "T") == {
        "broker-a": {0: "10.0.0.1:10911", 1: "10.0.0.2:10911"},
        "broker-b": {0: "10.0.0.3:10911"},
    }
    route = table.route("T")
    assert route is not None
    assert [(q.broker_name, q.write_queue_nums) for q in route.queue_datas] == [("broker-a", 4), ("broker-b", 8)]
    assert table.route("unknown") is None


def test_a_slave_learns_its_master_once_that_is_alive() -> None:
    table = Table()
    assert table.up(SLAVE_A, topic("T")) == (None, None)
    assert table.route("T") is None, "topics come from masters only"
    assert table.up(MASTER_A, ha="10.0.0.1:10912") == (None, None)
    assert table.up(SLAVE_A) == ("10.0.0.1:10911", "10.0.0.1:10912")


def test_topics_are_taken_when_the_data_version_changed() -> None:
    table = Table()
    table.up(MASTER_A, topic("T", 4))
    table.up(MASTER_A, topic("T", 8))
    route = table.route("T")
    assert route is not None
    assert route.queue_datas[0].read_queue_nums == 4
    table.up(MASTER_A, topic("T", 8), version=V2)
    route = table.route("T")
    assert route is not None
    assert route.queue_datas[0].read_queue_nums == 8


def test_a_topic_left_out_of_a_registration_stays_unless_asked_otherwise() -> None:
    for drop, expected in ((False, ("T", "U", "V")), (True, ("U", "V"))):
        table = Table(drop_topics_left_out=drop)
        table.up(MASTER_A, topic("T"), topic("U"))
        table.up(MASTER_A, topic("U"), topic("V"), version=V2)
        assert table.topics() == expected
        table.up(MASTER_A, topic("W"), version=DataVersion(counter=3))
        assert table.topics() == (*expected, "W"), "one topic alone is an incremental registration"


def test_an_address_has_one_id_only() -> None:
    table = Table()
    table.up(MASTER_A, topic("T"))
    table.up(SLAVE_A)
    table.up(BrokerIdentity("C1", "broker-a", SLAVE_A.broker_addr, 0), topic("T"))
    assert addresses(table, "T") == {"broker-a": {0: SLAVE_A.broker_addr}}


def test_unregistering_the_last_address_removes_broker_cluster_and_topics() -> None:
    table = Table()
    table.up(MASTER_A, topic("T"), topic("U"))
    table.up(SLAVE_A)
    table.up(MASTER_B, topic("U"))
    table.unregister(MASTER_A)
    assert addresses(table, "T") == {"broker-a": {1: SLAVE_A.broker_addr}}, "while a slave is left the topics stay"
    table.unregister(SLAVE_A)
    assert table.topics() == ("U",)
    assert table.cluster_info().cluster_addr_table == {"C2": {"broker-b"}}
    table.unregister(SLAVE_A)  # again: nothing to do
    assert "brokers=1 topics=1" in repr(table)


def test_a_closed_connection_removes_its_broker_but_not_one_that_came_back_over_another() -> None:
    table = Table()
    table.up(MASTER_A, topic("T"), connection="first")
    table.up(MASTER_A, topic("T"), connection="second")
    assert table.drop_connection("first") == []
    assert table.route("T") is not None
    assert table.drop_connection("second") == [MASTER_A.broker_addr]
    assert table.route("T") is None
    table.up(MASTER_A, topic("T"), connection="third")
    assert table.route("T") is not None, "the same data version counts as new after the broker was forgotten"


def test_a_silent_broker_expires_after_two_minutes() -> None:
    table = Table()
    table.up(MASTER_A, topic("T"), connection="a")
    table.up(MASTER_B, topic("T"), connection="b")
    table.now += 100_000
    assert table.query_data_version(MASTER_B.broker_addr, V1, now=table.now) == (False, V1)
    assert table.expire(1000 + 120_000) == []
    assert table.expire(1000 + 120_001) == ["a"]
    assert addresses(table, "T") == {"broker-b": {0: MASTER_B.broker_addr}}
    table.heartbeat(MASTER_B.broker_addr, now=table.now + 50_000, connection="b2")
    assert table.expire(table.now + 50_000 + 120_000) == []
    assert table.expire(table.now + 50_000 + 120_001) == ["b2"]
    assert "brokers=0 topics=0" in repr(table)


def test_the_data_version_tells_whether_to_register_again() -> None:
    table = Table()
    assert table.query_data_version(MASTER_A.broker_addr, V1, now=5) == (True, None)
    table.up(MASTER_A, topic("T"))
    assert table.query_data_version(MASTER_A.broker_addr, V1, now=5) == (False, V1)
    assert table.query_data_version(MASTER_A.broker_addr, V2, now=5) == (True, V1)


def test_write_permission_of_a_broker_can_be_wiped_and_given_back() -> None:
    table = Table()
    table.up(MASTER_A, topic("T"), topic("U", perm=7))
    table.up(MASTER_B, topic("T"))
    assert table.wipe_write_perm("broker-a") == 2
    assert perms(table, "T") == [4, 6]
    assert perms(table, "U") == [5]
    table.up(MASTER_A, topic("T"))
    assert perms(table, "T") == [4, 6], "the same data version does not bring it back"
    assert table.add_write_perm("broker-a") == 2
    assert perms(table, "T") == [6, 6]
    assert table.wipe_write_perm("nobody") == 0


def test_topics_can_be_listed_by_cluster_and_flag() -> None:
    table = Table()
    table.up(MASTER_A, topic("T"), topic("unit", sys_flag=1), topic("sub", sys_flag=2), topic("both", sys_flag=3))
    table.up(MASTER_B, topic("T"), topic("B"))
    assert set(table.topics_of_cluster("C2")) == {"T", "B"}
    assert table.topics_of_cluster("C9") == ()
    assert set(table.unit_topics(with_bits=1)) == {"unit", "both"}
    assert set(table.unit_topics(with_bits=2)) == {"sub", "both"}
    assert set(table.unit_topics(with_bits=2, without_bits=1)) == {"sub"}
    assert table.system_topics() == (("C1", "C2", "broker-a", "broker-b"), MASTER_A.broker_addr)


def test_a_topic_can_be_deleted_everywhere_or_in_one_cluster() -> None:
    table = Table()
    table.up(MASTER_A, topic("T"), topic("U"))
    table.up(MASTER_B, topic("T"), topic("U"))
    table.delete_topic("T", "C1")
    assert addresses(table, "T") == {"broker-b": {0: MASTER_B.broker_addr}}
    table.delete_topic("U")
    assert table.route("U") is None
    table.delete_topic("never seen")


def test_one_topic_can_be_registered_by_a_broker_that_is_known() -> None:
    table = Table()
    table.up(MASTER_A, topic("T"))
    table.register_topic("N", [QueueData(broker_name="broker-a", perm=6), QueueData(broker_name="stranger", perm=6)])
    assert addresses(table, "N") == {"broker-a": {0: MASTER_A.broker_addr}}


def test_a_fingerprint_stands_for_the_last_registration_of_a_live_broker() -> None:
    table = Table()
    address = MASTER_A.broker_addr
    table.register(MASTER_A, "ha", V1, [topic("T")], now=1, connection=1, fingerprint=b"one")
    assert table.version_by(address, b"one") == V1
    assert table.version_by(address, b"two") is None
    assert table.version_by(MASTER_B.broker_addr, b"one") is None
    table.register(MASTER_A, "ha", V2, [topic("U")], now=2, connection=1, fingerprint=b"two")
    assert table.version_by(address, b"one") is None
    assert table.version_by(address, b"two") == V2
    table.drop_connection(1)
    assert table.version_by(address, b"two") is None  # its topics have gone: they must be read again


def elected(epoch: int, counter: int = 1) -> DataVersion:
    return DataVersion(counter=counter, timestamp=1, state_version=epoch)


def test_a_broker_elected_later_takes_the_place_of_the_master() -> None:
    table = Table()
    table.up(MASTER_A, topic("T"), version=elected(1))
    table.up(SLAVE_A, version=elected(1))
    table.up(replace(SLAVE_A, broker_id=0), topic("T"), topic("U"), version=elected(2))
    assert addresses(table, "U") == {"broker-a": {0: SLAVE_A.broker_addr}}


def test_a_broker_elected_earlier_does_not_take_the_place_of_the_master() -> None:
    table = Table()
    table.up(MASTER_A, topic("T"), version=elected(2))
    late = replace(SLAVE_A, broker_id=0)
    assert table.up(late, topic("U"), version=elected(1, counter=9)) == (None, None)
    assert addresses(table, "T") == {"broker-a": {0: MASTER_A.broker_addr}}
    assert addresses(table, "U") is None
    table.unregister(MASTER_A)
    table.up(late, topic("T"), version=elected(1))
    assert addresses(table, "T") == {"broker-a": {0: late.broker_addr}}, "nobody else claims to be master now"


def test_a_broker_that_leaves_does_not_take_its_successor_along() -> None:
    table = Table()
    table.up(MASTER_A, topic("T"), version=elected(1))
    table.up(replace(SLAVE_A, broker_id=0), topic("T"), version=elected(2))
    table.unregister(MASTER_A)
    assert addresses(table, "T") == {"broker-a": {0: SLAVE_A.broker_addr}}
