"""Which brokers there are: those that come, go, and change their roles."""

from __future__ import annotations

from downrange.client.brokers import Broker
from downrange.client.config import ClientConfig
from downrange.clock import ManualClock
from downrange.console.clusters import Cluster
from downrange.console.history_file import HistoryFile
from downrange.console.sampler import Sampler
from downrange.console.schedule import Pace

ONE, TWO = "10.0.0.1:10911", "10.0.0.2:10911"


def replica(address: str, broker_id: int) -> Broker:
    return Broker(address, "broker-a", "c", broker_id)


def new_sampler(file: HistoryFile | None = None) -> tuple[Cluster, Sampler]:
    clock = ManualClock()
    cluster = Cluster("prod", ClientConfig.of("127.0.0.1:1"), clock)
    return cluster, Sampler(cluster, Pace(), file or HistoryFile(None))


def test_a_slave_that_becomes_master_is_known_as_master() -> None:
    cluster, sampler = new_sampler()
    sampler.keep_list([replica(ONE, 0), replica(TWO, 2)], 1000)
    sampler.keep_list([replica(TWO, 0)], 2000)
    assert [one.broker for one in cluster.snapshot.masters] == [replica(TWO, 0)]
    assert cluster.snapshot.lost == {}
    sampler.keep_list([], 3000)
    assert cluster.snapshot.lost == {"broker-a": 3000}
    sampler.keep_list([replica(ONE, 0)], 4000)
    assert cluster.snapshot.lost == {}


def test_a_broker_whose_master_is_gone_has_slaves_only() -> None:
    cluster, sampler = new_sampler()
    sampler.keep_list([replica(ONE, 0), replica(TWO, 1)], 1000)
    sampler.keep_list([replica(TWO, 1)], 2000)
    assert cluster.snapshot.lost == {"broker-a": 2000}
    sampler.keep_list([replica(ONE, 1), replica(TWO, 0)], 3000)
    sampler.keep_list([replica(ONE, 1), replica(TWO, 2)], 4000)
    assert cluster.snapshot.lost == {"broker-a": 4000}, "nobody is master, though both are there"


def test_a_slave_that_goes_and_comes() -> None:
    cluster, sampler = new_sampler()
    sampler.keep_list([replica(ONE, 0), replica(TWO, 1)], 1000)
    sampler.keep_list([replica(ONE, 0)], 2000)
    assert cluster.snapshot.lost_slaves == {("broker-a", 1): 2000}
    sampler.keep_list([replica(ONE, 0), replica(TWO, 1)], 3000)
    assert cluster.snapshot.lost_slaves == {}


def test_a_broker_that_was_there_before_a_restart_is_missed() -> None:
    file = HistoryFile(None)
    now = ManualClock().now()
    file.write_figures("prod", [("broker:broker-a", (now / 1000 - 60, 1.0)), ("broker:broker-b", (now / 1000, 1.0))])
    cluster, sampler = new_sampler(file)
    sampler.load()
    assert cluster.snapshot.lost == {}, "the list of brokers is not known yet"
    sampler.keep_list([replica(ONE, 0)], now)
    assert cluster.snapshot.lost == {"broker-b": now}
