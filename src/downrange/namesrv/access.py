"""Who may change what a name server knows: accounts of plain_acl.yml, and brokers by their addresses. Off by default.

RocketMQ's name servers ask nobody for an account, and its brokers do not sign: with `aclEnable` they go on working if
their addresses are in `allowedBrokerAddresses`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from downrange.auth.access_control import Account, Need
from downrange.auth.guard import Guard, Outcome
from downrange.auth.needs import NAMESRV_NEEDS
from downrange.auth.plain_acl import PlainAccessControl
from downrange.auth.plain_acl_files import PlainAclFiles
from downrange.auth.remote_address import Addresses, matches, parse_addresses
from downrange.clock import Clock
from downrange.namesrv.config import NamesrvConfig
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command
from downrange.protocol.errors import NoPermission
from downrange.settings import ConfigError

OF_BROKERS: Final = frozenset(
    {
        RequestCode.REGISTER_BROKER,
        RequestCode.UNREGISTER_BROKER,
        RequestCode.QUERY_DATA_VERSION,
        RequestCode.BROKER_HEARTBEAT,
        RequestCode.REGISTER_TOPIC_IN_NAMESRV,
    }
)
"""The requests that brokers send."""
READS: Final = frozenset(
    {
        RequestCode.GET_ROUTEINFO_BY_TOPIC,
        RequestCode.GET_BROKER_CLUSTER_INFO,
        RequestCode.GET_BROKER_MEMBER_GROUP,
        RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
        RequestCode.GET_TOPICS_BY_CLUSTER,
        RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS,
        RequestCode.GET_UNIT_TOPIC_LIST,
        RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST,
        RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST,
    }
)
"""The requests of every client, and views of operators without any secret."""
_LISTED: Final = Account("", is_admin=True, is_white=True)


class NamesrvAccessControl:
    """The accounts of plain_acl.yml, if there are any, and the addresses of brokers, which need no account.

    Without accounts, only the requests of brokers are looked at.
    """

    def __init__(self, accounts: PlainAccessControl | None, brokers: Addresses) -> None:
        self._accounts = accounts
        self._brokers = brokers

    @property
    def generation(self) -> int:
        return 0 if self._accounts is None else self._accounts.generation

    @property
    def secrets(self) -> Mapping[str, bytes]:
        return {} if self._accounts is None else self._accounts.secrets

    def authenticate(self, command: Command, address: str) -> Account:
        """The account of a request."""
        is_of_broker = command.code in OF_BROKERS
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


class _NoMessages:
    """The stored messages of a name server."""

    def topic_at(self, physical_offset: int) -> str | None:
        return None

    def topic_of_half_message(self, physical_offset: int) -> str | None:
        return None


@dataclass(frozen=True, slots=True)
class NamesrvAccess:
    """Makes the guard of a name server, with the files that its accounts come from."""

    control: NamesrvAccessControl
    files: PlainAclFiles | None
    open_codes: frozenset[int]

    def guard(self, served: Container[int]) -> Callable[[Callable[[Outcome], None]], Guard]:
        """A function that makes the guard from what hears of its outcomes."""
        return partial(Guard, self.control, NAMESRV_NEEDS, _NoMessages(), served, open_codes=self.open_codes)

    def services(self) -> dict[str, Coroutine[Any, Any, None]]:
        """What has to run for as long as the name server does."""
        return {} if self.files is None else {"plain_acl": self.files.watch()}


def namesrv_access(config: NamesrvConfig, clock: Clock) -> NamesrvAccess | None:
    """The access control that a configuration asks for; None lets everybody in. Raises ConfigError."""
    brokers = broker_addresses(config)
    if not config.acl_enable:
        return NamesrvAccess(NamesrvAccessControl(None, brokers), None, READS) if brokers else None
    if config.acl_file is None:
        raise ConfigError("aclEnable=true needs aclFile, the file with the accounts, or a namesrv.conf to look beside")
    files = PlainAclFiles(config.acl_file, clock)
    open_codes = READS if config.anonymous_read_enable else frozenset[int]()
    return NamesrvAccess(NamesrvAccessControl(files.access_control, brokers), files, open_codes)


def broker_addresses(config: NamesrvConfig) -> Addresses:
    """The addresses of `allowedBrokerAddresses`."""
    try:
        return tuple(one for part in config.allowed_broker_addresses.split(";") for one in parse_addresses(part))
    except ValueError as error:
        raise ConfigError(f"allowedBrokerAddresses: {error}") from None
