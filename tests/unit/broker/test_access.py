"""The access control that a configuration asks for: checks, first users, the file with the accounts, migration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from downrange.auth.user_access_control import UserAccessControl
from downrange.auth.users import User, UserStatus, UserType
from downrange.broker.access import plain_access, user_access
from downrange.broker.app import load_config
from downrange.broker.config import REMOTELY_CHANGEABLE, BrokerConfig
from downrange.broker.user_access import inner_user
from downrange.clock import SystemClock
from downrange.settings import MASK, ConfigError, masked, settings_of, to_properties
from downrange.store.config import BrokerRole, StoreConfig
from tests.support.user_requests import INNER, ROOT, settings

AUTH = "org.apache.rocketmq.auth"


def made(root: Path, **more: object) -> UserAccessControl:
    access = user_access(settings(**more), StoreConfig(store_path_root_dir=root))
    assert access.users is not None
    assert access.control is access.users
    return access.users


def load(tmp_path: Path, *lines: str, mode: int = 0o600) -> tuple[BrokerConfig, list[str]]:
    path = tmp_path / "broker.conf"
    path.write_text("\n".join([f"storePathRootDir={tmp_path}", *lines]) + "\n")
    path.chmod(mode)
    config, _, warnings = load_config(path, {})
    return config, warnings


def test_the_configuration_of_a_5_3_3_broker_works_as_it_is(tmp_path: Path) -> None:
    config, warnings = load(
        tmp_path,
        "authenticationEnabled=true",
        "authorizationEnabled = true",
        f"authenticationProvider={AUTH}.authentication.provider.DefaultAuthenticationProvider",
        f"authenticationMetadataProvider={AUTH}.authentication.provider.LocalAuthenticationMetadataProvider",
        f"authorizationMetadataProvider={AUTH}.authorization.provider.LocalAuthorizationMetadataProvider",
        f"authenticationStrategy={AUTH}.authentication.strategy.StatelessAuthenticationStrategy",
        f"initAuthenticationUser={ROOT}",
        f"innerClientAuthenticationCredentials={INNER}",
        "authenticationWhitelist=28, 105",
    )
    assert warnings == []
    assert config.authentication_enabled
    assert inner_user(config) == User("brokers", "innerSecret", UserType.SUPER)


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (["aclEnable=true", "authenticationEnabled=true"], "choose one of the two"),
        (["authorizationEnabled=true"], "authorizationEnabled=true needs authenticationEnabled=true"),
        (["authenticationMetadataProvider=my.Provider"], "my.Provider: this class is not served, expected org.apache"),
        (
            [f"authenticationStrategy={AUTH}.authentication.strategy.StatefulAuthenticationStrategy"],
            "this class is not served, expected .*Stateless",
        ),
        (["authenticationWhitelist=10;11"], "expected request codes, separated by commas"),
        (["authorizationWhitelist=SEND"], "expected request codes, separated by commas"),
        (["authenticationWhitelist=10,3001"], "authenticationWhitelist: request code 3001 administers users"),
        (["authorizationWhitelist=3010"], "authorizationWhitelist: request code 3010 administers users"),
        (
            ["initAuthenticationUser=root:hiddenWord"],
            'initAuthenticationUser: expected {"username":"…","password":"…"}',
        ),
        (['initAuthenticationUser={"username":"root"}'], "initAuthenticationUser: expected"),
        (['initAuthenticationUser={"username":"","password":"hiddenWord"}'], "name and password must not be empty"),
        (['initAuthenticationUser={"username":"r ","password":"hiddenWord"}'], "The username has control characters"),
        (['innerClientAuthenticationCredentials={"accessKey":7,"secretKey":"hiddenWord"}'], "expected {"),
        (
            ["authenticationEnabled=true", "brokerRole=SLAVE", "brokerId=1", f"initAuthenticationUser={ROOT}"],
            "on a slave needs innerClientAuthenticationCredentials",
        ),
    ],
)
def test_a_wrong_setting_is_one_line_without_a_secret(tmp_path: Path, lines: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, *lines)
    assert "hiddenWord" not in str(caught.value)
    assert "Secret" not in str(caught.value)
    assert "\n" not in str(caught.value)
    pattern = complaint.split(".*")
    assert all(part in str(caught.value) for part in pattern), str(caught.value)


def test_a_file_with_secrets_that_others_can_read_gets_a_warning(tmp_path: Path) -> None:
    _, warnings = load(tmp_path, "authenticationEnabled=true", f"initAuthenticationUser={ROOT}", mode=0o644)
    (warning,) = warnings
    assert warning.startswith("others can read initAuthenticationUser in ")
    assert "Secret" not in warning
    assert load(tmp_path, "authenticationEnabled=true", f"initAuthenticationUser={ROOT}", mode=0o600)[1] == []


def test_secrets_are_masked_wherever_settings_are_shown() -> None:
    config = settings()
    shown = to_properties(config)
    assert shown["initAuthenticationUser"] == shown["innerClientAuthenticationCredentials"] == MASK
    assert "Secret" not in f"{shown} {config!r}"
    assert to_properties(BrokerConfig())["initAuthenticationUser"] == ""
    theirs = {"initAuthenticationUser": ROOT, "tls.server.keyPassword": "x", "brokerName": "b", "somePassword": ""}
    assert masked(theirs) == {**theirs, "initAuthenticationUser": MASK, "tls.server.keyPassword": MASK}


def test_no_setting_of_access_control_can_be_changed_remotely() -> None:
    keys = {one.key for one in settings_of(BrokerConfig) if "auth" in one.key.lower() or one.is_secret}
    assert len(keys) >= 7
    assert keys.isdisjoint(REMOTELY_CHANGEABLE)


def test_the_first_user_is_made_once_and_the_own_account_is_always_as_configured(tmp_path: Path) -> None:
    first = made(tmp_path)
    assert {name: user.is_super for name, user in first.accounts.users.items()} == {"brokers": True, "root": True}
    first.accounts.put_user(User("root", "changed", UserType.SUPER, UserStatus.DISABLE))
    first.accounts.put_user(User("brokers", "changed", UserType.NORMAL, UserStatus.DISABLE))
    again = made(tmp_path)
    assert again.accounts.users["root"] == User("root", "changed", UserType.SUPER, UserStatus.DISABLE)
    assert again.accounts.users["brokers"] == User("brokers", "innerSecret", UserType.SUPER)
    assert again.inner == again.accounts.users["brokers"]


def test_a_broker_without_any_user_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no user yet: set initAuthenticationUser"):
        made(tmp_path, init_authentication_user="", inner_client_authentication_credentials="")


def test_a_broker_without_super_user_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made(tmp_path, init_authentication_user=ROOT).accounts.put_user(User("root", "x", UserType.NORMAL))
    made(tmp_path, inner_client_authentication_credentials="").accounts.delete_user("brokers")
    made(tmp_path, inner_client_authentication_credentials="")
    assert "no enabled Super user" in caplog.text


def test_access_control_is_off_unless_asked_for() -> None:
    assert not BrokerConfig().authentication_enabled
    assert plain_access(BrokerConfig(), SystemClock()).control is None


@pytest.mark.parametrize("text", ["", "{", '{"users":7}', '{"users":[{"username":"a","password":7}]}', "hiddenWord"])
def test_a_damaged_file_stops_the_start_without_showing_it(tmp_path: Path, text: str) -> None:
    made(tmp_path)
    (tmp_path / "config" / "auth.json").write_text(text)
    with pytest.raises(ConfigError, match=r"auth\.json is damaged; restore it") as caught:
        made(tmp_path)
    assert "hiddenWord" not in str(caught.value)


@pytest.mark.parametrize(
    "table",
    [
        {"users": [{"username": "a"}]},
        {"users": [{"username": "a", "password": "x", "userType": "god"}]},
        {"users": [], "acls": [{"subject": "a"}]},
        {"acls": [{"subject": "User:a", "policies": [{"entries": [{"resource": "x", "decision": "Allow"}]}]}]},
    ],
)
def test_a_file_with_an_unknown_word_stops_the_start(tmp_path: Path, table: object) -> None:
    made(tmp_path)
    (tmp_path / "config" / "auth.json").write_text(json.dumps(table))
    with pytest.raises(ConfigError, match=r"auth\.json cannot be used: .*; repair it"):
        made(tmp_path)


def test_a_file_that_others_can_read_is_closed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made(tmp_path)
    path = tmp_path / "config" / "auth.json"
    path.chmod(0o644)
    made(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert "passwords were readable by others" in caplog.text


def test_a_change_that_cannot_be_written_does_not_happen(tmp_path: Path) -> None:
    access = made(tmp_path)
    (tmp_path / "config" / ".auth.json.tmp").mkdir()  # in the way of the new file
    with pytest.raises(ConfigError, match=r"cannot write .*auth\.json: .*; nothing was changed"):
        access.accounts.put_user(User("eve", "x"))
    assert "eve" not in access.accounts.users
    (tmp_path / "config" / ".auth.json.tmp").rmdir()
    assert "eve" not in made(tmp_path).accounts.users


def test_a_file_of_a_crash_is_no_way_to_read_the_next_one(tmp_path: Path) -> None:
    left = tmp_path / "config" / ".auth.json.tmp"
    left.parent.mkdir()
    left.write_text("half")
    left.chmod(0o666)
    made(tmp_path)
    assert not left.exists()
    assert (tmp_path / "config" / "auth.json").stat().st_mode & 0o777 == 0o600


ACCOUNT = "accounts:\n- {accessKey: shop-account, secretKey: shopSecret, topicPerms: [orders=PUB]}\n"


def test_accounts_of_1_0_are_migrated_when_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "plain_acl.yml"
    file.write_text(ACCOUNT)
    file.chmod(0o600)
    assert "shop-account" not in made(tmp_path, acl_file=file).accounts.users
    migrated = made(tmp_path, acl_file=file, migrate_auth_from_v1_enabled=True)
    assert migrated.accounts.users["shop-account"] == User("shop-account", "shopSecret")
    assert [str(entry.resource) for entry in migrated.accounts.acls["shop-account"].policies[0].entries] == [
        "Topic:orders"
    ]
    file.unlink()
    assert made(tmp_path, acl_file=file, migrate_auth_from_v1_enabled=True).accounts.users == migrated.accounts.users


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (ACCOUNT.replace("orders=PUB", "orders=EVERYTHING"), "topic orders: 'EVERYTHING' means DENY"),
        (ACCOUNT.replace("orders=PUB", "or*=PUB"), r"Topic 'or\*': a name with \* cannot be migrated"),
        (ACCOUNT.replace("orders=PUB", "orders=PUB=SUB"), "Parse resource permission failed"),
        ("[", "not YAML"),
    ],
)
def test_an_account_that_is_not_clear_stops_the_migration(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "plain_acl.yml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"migrateAuthFromV1Enabled=true: .*{complaint}") as caught:
        made(tmp_path, acl_file=file, migrate_auth_from_v1_enabled=True)
    assert "Secret" not in str(caught.value)


def test_a_migration_needs_to_know_where_the_files_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="migrateAuthFromV1Enabled=true needs aclFile"):
        made(tmp_path, migrate_auth_from_v1_enabled=True)
    config, _ = load(tmp_path, "migrateAuthFromV1Enabled=true")
    assert config.acl_file == tmp_path / "plain_acl.yml"


def test_a_slave_has_its_own_file(tmp_path: Path) -> None:
    store = StoreConfig(store_path_root_dir=tmp_path, broker_role=BrokerRole.SLAVE)
    access = user_access(settings(), store).users
    assert access is not None
    assert set(access.accounts.users) == {"brokers", "root"}
