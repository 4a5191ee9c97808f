"""The users and policies that a broker's configuration asks for, and the account with which brokers sign."""

from __future__ import annotations

import logging

from downrange.auth.accounts import Accounts
from downrange.auth.configured_users import configured_first_user, configured_inner_user
from downrange.auth.migration import migrate
from downrange.auth.plain_acl_files import accounts_to_migrate
from downrange.auth.user_access_control import ACCOUNT_CODES, AccessSettings, UserAccessControl
from downrange.auth.users import AccessRuleError, User
from downrange.broker.account_file import AccountFile
from downrange.broker.config import BrokerConfig
from downrange.settings import ConfigError
from downrange.store.config import BrokerRole, StoreConfig

log = logging.getLogger(__name__)


def check_access(config: BrokerConfig, role: BrokerRole) -> None:
    """Raise ConfigError, without any secret in it, for a configuration of access control that cannot be kept."""
    if config.acl_enable and config.authentication_enabled:
        raise ConfigError("aclEnable=true and authenticationEnabled=true: choose one of the two")
    if config.authorization_enabled and not config.authentication_enabled:
        raise ConfigError(
            "authorizationEnabled=true needs authenticationEnabled=true: a name that nobody signed gives no rights"
        )
    settings_of_access(config)
    first_user(config)
    inner = inner_user(config)
    if config.authentication_enabled and role is BrokerRole.SLAVE and inner is None:
        raise ConfigError(
            "authenticationEnabled=true on a slave needs innerClientAuthenticationCredentials, those of its master: "
            "it signs with them when it copies tables"
        )


def settings_of_access(config: BrokerConfig) -> AccessSettings:
    return AccessSettings(
        config.broker_cluster_name,
        config.authorization_enabled,
        _codes("authenticationWhitelist", config.authentication_whitelist),
        _codes("authorizationWhitelist", config.authorization_whitelist),
    )


def _codes(key: str, text: str) -> frozenset[int]:
    parts = [part for piece in text.split(",") if (part := piece.strip())]
    for part in parts:
        if not (part.isascii() and part.isdecimal() and len(part) < 10):
            raise ConfigError(f"{key}={text}: expected request codes, separated by commas")
    if refused := ACCOUNT_CODES.intersection(map(int, parts)):
        raise ConfigError(f"{key}: request code {min(refused)} administers users and cannot be free for everybody")
    return frozenset(map(int, parts))


def first_user(config: BrokerConfig) -> User | None:
    """The user of initAuthenticationUser."""
    return configured_first_user(config.init_authentication_user)


def inner_user(config: BrokerConfig) -> User | None:
    """The user of innerClientAuthenticationCredentials, with which brokers sign."""
    return configured_inner_user(config.inner_client_authentication_credentials)


def user_access_control(config: BrokerConfig, store: StoreConfig) -> UserAccessControl:
    """The users and policies of a broker, with those that its configuration asks for.

    The brokers' own account is always as configured: that is how its secret is changed.
    """
    accounts = AccountFile(store.store_path_root_dir / "config" / "auth.json").open()
    first, inner = first_user(config), inner_user(config)
    if first is not None and first.username not in accounts.users:
        accounts.put_user(first)
        log.info("user created from initAuthenticationUser username=%s", first.username)
    if inner is not None:
        accounts.put_user(inner)
    if config.migrate_auth_from_v1_enabled:
        _migrate(config, accounts)
    if not accounts.users:
        raise ConfigError("authenticationEnabled=true, but there is no user yet: set initAuthenticationUser")
    if not any(user.is_super and user.is_enabled for user in accounts.users.values()):
        log.warning("no enabled Super user: nobody can administer this broker hint=set initAuthenticationUser")
    return UserAccessControl(accounts, settings_of_access(config), inner)


def _migrate(config: BrokerConfig, accounts: Accounts) -> None:
    """Make users of the accounts of 4.x; no files are no accounts, so that they can be deleted afterwards."""
    if config.acl_file is None:
        raise ConfigError(
            "migrateAuthFromV1Enabled=true needs aclFile, the file with the accounts, or a broker.conf to look beside"
        )
    try:
        names = migrate(accounts_to_migrate(config.acl_file), accounts)
    except (AccessRuleError, ConfigError) as error:
        raise ConfigError(f"migrateAuthFromV1Enabled=true: {error}") from None
    log.info("accounts migrated count=%d file=%s", len(names), config.acl_file)
