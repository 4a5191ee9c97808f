"""Another broker is master before a send with the default time-out has failed: the default times add up to less."""

from __future__ import annotations

from downrange.broker.config import BrokerConfig
from downrange.client.config import ProducerConfig
from downrange.client.producer.attempts import LAST_ATTEMPT_SECONDS
from downrange.client.route_chase import LONGEST_PAUSE_SECONDS
from downrange.client.silent_brokers import LOOK_SECONDS, SILENT_SECONDS
from downrange.controller.config import ControllerConfig
from downrange.controller.leadership import LEASE_SECONDS, MARGIN_SECONDS, RENEW_SECONDS
from downrange.model.fencing import lease_deadline
from downrange.store.config import StoreConfig

SEND = ProducerConfig().send_timeout_seconds - LAST_ATTEMPT_SECONDS
NOTICED = LONGEST_PAUSE_SECONDS  # from a new route at the name server to a client that looks for it


def test_a_master_that_hangs_is_replaced_in_time() -> None:
    silent = BrokerConfig().controller_heart_beat_timeout_mills + ControllerConfig().scan_not_active_broker_interval
    assert silent / 1000 + NOTICED < SEND
    assert silent / 1000 > SILENT_SECONDS + LOOK_SECONDS, "clients look for the new master before it is elected"


def test_a_slave_that_hangs_leaves_in_time() -> None:
    assert StoreConfig().ha_max_time_slave_not_catchup / 1000 < SEND


def test_a_leading_controller_is_replaced_in_time() -> None:
    assert LEASE_SECONDS + NOTICED < SEND
    assert 2 * RENEW_SECONDS < LEASE_SECONDS - MARGIN_SECONDS, "one renewal may fail"


def test_a_call_that_etcd_lost_with_its_leader_is_repeated_in_time() -> None:
    assert 2 * ControllerConfig().etcd_timeout_mills / 1000 + NOTICED < SEND


def test_a_master_that_may_be_replaced_has_stopped_by_its_own_lease() -> None:
    lease, beat = ControllerConfig().lease_millis, BrokerConfig().broker_heartbeat_interval
    trusted = lease_deadline(0.0, lease / 1000) * 1000
    assert trusted <= BrokerConfig().controller_heart_beat_timeout_mills
    assert 3 * beat < trusted, "two heartbeats may be lost"
