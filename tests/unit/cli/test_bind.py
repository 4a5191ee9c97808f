"""Which addresses a server may listen on, and files with secrets that others can read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from downrange.broker.app import load_config, protections
from downrange.broker.config import BrokerConfig
from downrange.cli.process import check_bind
from downrange.controller.app import load_config as load_controller_config
from downrange.controller.app import protections as controller_protections
from downrange.controller.config import ControllerConfig
from downrange.namesrv.app import load_config as load_namesrv_config
from downrange.namesrv.app import protections as namesrv_protections
from downrange.namesrv.config import NamesrvConfig
from downrange.settings import ConfigError, Property
from downrange.store.config import BrokerRole, StoreConfig

ALL, NONE, SOME = (
    {"aclEnable=true": True, "tls": True},
    {"aclEnable=true": False, "tls": False},
    {"a": True, "b": False},
)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_is_always_allowed(host: str) -> None:
    check_bind(host, NONE, insecure=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "", "some.host"])
def test_every_other_address_needs_all_protections_or_a_word(host: str) -> None:
    check_bind(host, ALL, insecure=False)
    check_bind(host, NONE, insecure=True)
    with pytest.raises(ConfigError, match="set aclEnable=true, tls, or add --insecure"):
        check_bind(host, NONE, insecure=False)
    with pytest.raises(ConfigError, match="set b, or add --insecure"):
        check_bind(host, SOME, insecure=False)


def test_what_protects_a_broker_and_a_name_server(tmp_path: Path) -> None:
    def missing(config: BrokerConfig, store: StoreConfig) -> set[str]:
        return {name for name, is_on in protections(config, store).items() if not is_on}

    access, tls = "aclEnable=true or authenticationEnabled=true", "tls.server.mode=enforcing"
    replication = "haSecretFile or haAllowedSlaveAddresses"
    assert missing(BrokerConfig(), StoreConfig()) == {access, tls, replication}
    assert missing(BrokerConfig(), StoreConfig(broker_role=BrokerRole.SLAVE)) == {access, tls}
    allowed = StoreConfig(ha_allowed_slave_addresses="10.1.2.3")
    assert missing(BrokerConfig(acl_enable=True), allowed) == {tls}
    assert missing(BrokerConfig(authentication_enabled=True), allowed) == {tls}
    for namesrv in (NamesrvConfig(acl_enable=True), NamesrvConfig(authentication_enabled=True)):
        assert namesrv_protections(namesrv) == {access: True, tls: False}
    for controller in (ControllerConfig(acl_enable=True), ControllerConfig(authentication_enabled=True)):
        assert controller_protections(controller) == {access: True, tls: False}


@pytest.mark.parametrize("load", [load_namesrv_config, load_controller_config])
def test_secrets_of_name_servers_and_controllers_get_a_warning_too(
    tmp_path: Path, load: Callable[[Path, dict[str, Property]], tuple[object, list[str]]]
) -> None:
    file = tmp_path / "server.conf"
    file.write_text('innerClientAuthenticationCredentials={"accessKey":"inner","secretKey":"words"}\n')
    file.chmod(0o644)
    keys = "innerClientAuthenticationCredentials"
    assert load(file, {})[1] == [f"others can read {keys} in {file}: chmod 600 {file}"]
    file.chmod(0o600)
    assert load(file, {})[1] == []


def test_files_with_secrets_that_others_can_read_get_one_warning_each(tmp_path: Path) -> None:
    secret, file = tmp_path / "ha-secret", tmp_path / "broker.conf"
    secret.write_text("a secret of many characters")
    file.write_text(
        f"haSecretFile={secret}\nstorePathRootDir={tmp_path}\nnamesrvAddr=127.0.0.1:9876\n"
        'initAuthenticationUser={"username":"root","password":"words"}\n'
        'innerClientAuthenticationCredentials={"accessKey":"inner","secretKey":"words"}\n'
    )
    for path in (secret, file):
        path.chmod(0o644)
    keys = "initAuthenticationUser and innerClientAuthenticationCredentials"
    assert load_config(file, {})[2] == [
        f"others can read {keys} in {file}: chmod 600 {file}",
        f"others can read haSecretFile in {secret}: chmod 600 {secret}",
    ]
    for path in (secret, file):
        path.chmod(0o600)
    assert load_config(file, {})[2] == []
