"""Access control of name servers and controllers: accounts of either generation, and brokers by their addresses.

RocketMQ's name servers and controllers ask nobody for an account, and its brokers do not sign: with `aclEnable` they go
on working if their addresses are in `allowedBrokerAddresses`. The accounts are those of plain_acl.yml, the Super users
of ACL 2.0 that the configuration names, or those of a broker in the same process.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from downrange.auth.access_config import AccessConfig
from downrange.auth.access_control import AccessControl, Account, Need
from downrange.auth.accounts import Accounts
from downrange.auth.configured_users import configured_first_user, configured_inner_user
from downrange.auth.guard import Guard, Outcome
from downrange.auth.needs import Rule
from downrange.auth.plain_acl_files import PLAIN_ACL, PlainAclFiles
from downrange.auth.remote_address import Addresses, matches, parse_addresses
from downrange.auth.user_access_control import AccessSettings, UserAccessControl
from downrange.clock import Clock
from downrange.protocol.command import Command
from downrange.protocol.errors import NoPermission
from downrange.settings import ConfigError


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests of one kind of server."""

    needs: Mapping[int, Rule]
    is_of_broker: Callable[[Command], bool]
    """Whether brokers send such requests."""
    reads: frozenset[int]
    """Codes of every client, and views of operators without any secret."""


_LISTED: Final = Account("", is_admin=True, is_white=True)


class ServerAccessControl:
    """The accounts, if there are any, and the addresses of brokers, which need no account.

    Without accounts, only the requests of brokers are looked at.
    """

    def __init__(
        self, accounts: AccessControl | None, brokers: Addresses, is_of_broker: Callable[[Command], bool]
    ) -> None:
        self._accounts = accounts
        self._is_of_broker = is_of_broker
        self._brokers = brokers

    @property
    def generation(self) -> int:
        return 0 if self._accounts is None else self._accounts.generation

    @property
    def secrets(self) -> Mapping[str, bytes]:
        return {} if self._accounts is None else self._accounts.secrets

    def authenticate(self, command: Command, address: str) -> Account:
        """The account of a request."""
        is_of_broker = self._is_of_broker(command)
        if is_of_broker and matches(self._brokers, address):
            return _LISTED
        if self._accounts is not None:
            return self._accounts.authenticate(command, address)
        if is_of_broker:
            raise NoPermission(f"no broker may register from {address}: it is not in allowedBrokerAddresses")
        return _LISTED

    def authorize(self, account: Account, needs: Sequence[Need], command: Command, address: str) -> None:
        """Raise unless the account has every one of these rights."""
        if account is not _LISTED and self._accounts is not None:
            self._accounts.authorize(account, needs, command, address)


class LentAccounts:
    """The accounts of a broker in this process, which starts after the server; until then nobody has an account."""

    lender: AccessControl | None = None

    @property
    def generation(self) -> int:
        return 0 if self.lender is None else self.lender.generation + 1

    @property
    def secrets(self) -> Mapping[str, bytes]:
        return {} if self.lender is None else self.lender.secrets

    def authenticate(self, command: Command, address: str) -> Account:
        if self.lender is None:
            raise NoPermission("the broker that knows the accounts is starting")
        return self.lender.authenticate(command, address)

    def authorize(self, account: Account, needs: Sequence[Need], command: Command, address: str) -> None:
        assert self.lender is not None, "authenticate comes first"
        self.lender.authorize(account, needs, command, address)


class _NoMessages:
    """The stored messages of a server that stores none."""

    def topic_at(self, physical_offset: int) -> str | None:
        return None

    def topic_of_half_message(self, physical_offset: int) -> str | None:
        return None


@dataclass(frozen=True, slots=True)
class ServerAccess:
    """Makes the guard of a server, with the files that its accounts come from."""

    control: ServerAccessControl
    needs: Mapping[int, Rule]
    files: PlainAclFiles | None
    open_codes: frozenset[int]

    def guard(self, served: Container[int]) -> Callable[[Callable[[Outcome], None]], Guard]:
        """A function that makes the guard from what hears of its outcomes."""
        return partial(Guard, self.control, self.needs, _NoMessages(), served, open_codes=self.open_codes)

    def services(self) -> dict[str, Coroutine[Any, Any, None]]:
        """What has to run for as long as the server does."""
        return {} if self.files is None else {"plain_acl": self.files.watch()}


def server_access(
    config: AccessConfig, requests: Requests, clock: Clock, lent: LentAccounts | None = None
) -> ServerAccess | None:
    """The access control that a configuration asks for; None lets everybody in. Raises ConfigError.

    With `authenticationEnabled=true` the accounts are those of a broker in this process, if there is one.
    """
    check_accounts(config, lent)
    brokers = broker_addresses(config)
    files = None
    accounts: AccessControl | None = None
    if config.acl_enable:
        assert config.acl_file is not None
        files = PlainAclFiles(config.acl_file, clock)
        accounts = files.access_control
    elif config.authentication_enabled:
        accounts = lent or _configured_users(config)
    elif not brokers:
        return None
    is_open = accounts is None or config.anonymous_read_enable
    control = ServerAccessControl(accounts, brokers, requests.is_of_broker)
    return ServerAccess(control, requests.needs, files, requests.reads if is_open else frozenset())


def check_accounts(config: AccessConfig, lent: LentAccounts | None = None) -> None:
    """Raise ConfigError, without any secret in it, for accounts that cannot be had."""
    if config.acl_enable and config.authentication_enabled:
        raise ConfigError("aclEnable=true and authenticationEnabled=true: choose one of the two")
    if config.acl_enable and config.acl_file is None:
        raise ConfigError("aclEnable=true needs aclFile, the file with the accounts, or a configuration file beside it")
    if not _configured_users(config).accounts.users and config.authentication_enabled and lent is None:
        raise ConfigError(
            "authenticationEnabled=true needs initAuthenticationUser, innerClientAuthenticationCredentials, or both"
        )


def is_limited(config: AccessConfig) -> bool:
    """Whether changes need an account."""
    return config.acl_enable or config.authentication_enabled


ACCOUNTS: Final = "aclEnable=true or authenticationEnabled=true"
"""The settings that switch `is_limited` on."""


def _configured_users(config: AccessConfig) -> UserAccessControl:
    first = configured_first_user(config.init_authentication_user)
    inner = configured_inner_user(config.inner_client_authentication_credentials)
    users = {user.username: user for user in (first, inner) if user is not None}
    return UserAccessControl(Accounts(users=users), AccessSettings(""), inner)


def broker_addresses(config: AccessConfig) -> Addresses:
    """The addresses of `allowedBrokerAddresses`."""
    try:
        return tuple(one for part in config.allowed_broker_addresses.split(";") for one in parse_addresses(part))
    except ValueError as error:
        raise ConfigError(f"allowedBrokerAddresses: {error}") from None


def found_beside(config_file: Path | None, config: AccessConfig) -> Path | None:
    """The file with the accounts: relative to the configuration file, and `plain_acl.yml` beside it by default."""
    if not config.acl_enable or (config.acl_file is None and config_file is None):
        return config.acl_file
    directory = config_file.parent if config_file is not None else Path()
    return (directory / (config.acl_file or PLAIN_ACL)).absolute()
