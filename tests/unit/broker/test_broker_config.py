"""An operator's broker.conf: each key is used, named in a warning, or refused with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from downrange.broker.app import load_config
from downrange.broker.config import BLACK_LIST, REMOTELY_CHANGEABLE, BrokerConfig, keys_without_effect
from downrange.settings import ConfigError, settings_of
from downrange.store.config import BrokerRole, StoreConfig


def config_file(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "broker.conf"
    path.write_text("\n".join([f"storePathRootDir={tmp_path}", *lines]) + "\n")
    return path


def known_keys() -> set[str]:
    return {key for kind in (BrokerConfig, StoreConfig) for one in settings_of(kind) for key in (one.key, *one.aliases)}


def test_the_sample_configuration_of_rocketmq_works_as_it_is(tmp_path: Path) -> None:
    lines = ("brokerClusterName = DefaultCluster", "brokerName = broker-a", "brokerId = 0", "deleteWhen = 04")
    more = ("fileReservedTime = 48", "brokerRole = ASYNC_MASTER", "flushDiskType = ASYNC_FLUSH")
    broker, store, warnings = load_config(config_file(tmp_path, *lines, *more), {})
    assert (broker.broker_name, store.file_reserved_time, warnings) == ("broker-a", 48, [])


def test_a_key_without_effect_is_one_warning(tmp_path: Path) -> None:
    path = config_file(tmp_path, "sendMessageThreadPoolNums=16", "timerWarmEnable=true")
    _, _, warnings = load_config(path, {})
    assert [warning.split()[0] for warning in warnings] == ["sendMessageThreadPoolNums", "timerWarmEnable"]


def test_a_key_nobody_knows_stops_the_start_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key flushDiskTyp; did you mean flushDiskType\? \(.*line 2\)"):
        load_config(config_file(tmp_path, "flushDiskTyp=SYNC_FLUSH"), {})


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("enableDLegerCommitLog=true", "DLedger is not served yet"),
    ],
)
def test_a_promise_this_broker_cannot_keep_stops_the_start(tmp_path: Path, line: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_config(config_file(tmp_path, line), {})


def test_the_file_with_accounts_is_looked_for_beside_the_configuration(tmp_path: Path) -> None:
    for line, expected in (
        ("", tmp_path / "plain_acl.yml"),
        ("aclFile=accounts/all.yml", tmp_path / "accounts" / "all.yml"),
        ("aclFile=/etc/rocketmq/accounts.yml", Path("/etc/rocketmq/accounts.yml")),
    ):
        config, _, _ = load_config(config_file(tmp_path, "aclEnable=true", line), {})
        assert config.acl_file == expected
    config, _, _ = load_config(config_file(tmp_path, "aclEnable=false"), {})
    assert config.acl_file is None


def test_a_slave_needs_an_id_and_a_master_has_0(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="brokerRole=SLAVE needs a brokerId of its own"):
        load_config(config_file(tmp_path, "brokerRole=SLAVE"), {})
    slave, store, warnings = load_config(config_file(tmp_path, "brokerRole=SLAVE", "brokerId=2", "haListenPort=7"), {})
    assert (slave.broker_id, store.broker_role, store.ha_listen_port, warnings) == (2, BrokerRole.SLAVE, 7, [])
    master, _, _ = load_config(config_file(tmp_path, "brokerRole=SYNC_MASTER", "brokerId=2"), {})
    assert master.broker_id == 0


def test_no_key_is_both_used_and_without_effect() -> None:
    assert not known_keys() & keys_without_effect()
    assert known_keys() >= REMOTELY_CHANGEABLE
    assert not REMOTELY_CHANGEABLE & BLACK_LIST


def test_what_was_changed_while_running_is_read_again_if_it_may_be(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "broker.properties").write_text("fileReservedTime=7\nlistenPort=1\n")
    broker, store, _ = load_config(config_file(tmp_path, "fileReservedTime=48"), {})
    assert (store.file_reserved_time, broker.listen_port) == (7, 10911)
