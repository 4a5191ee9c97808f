"""Access control of RocketMQ 4.x: who signed a request, and does plain_acl.yml allow it? [PlainPermissionManager]

Order of the checks: address on the global white list; access key; address on the white list of the account; signature;
then for each right that the request needs: administrator, or permission for the topic or group.

An address on a white list stands in for a signature when messages are sent and received. It never makes an
administrator: these requests need the signature of an `admin` account, from everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from downrange.auth.access_control import Account, Action, Need, ResourceType
from downrange.auth.plain_accounts import PlainAccount
from downrange.auth.remote_address import Addresses, matches
from downrange.model.topics import TRACE_TOPIC
from downrange.protocol.codes import ResponseCode
from downrange.protocol.command import Command
from downrange.protocol.errors import BrokerError
from downrange.protocol.signing import ACCESS_KEY, is_signed_with

_MESSAGING: Final = frozenset({Action.PUB, Action.SUB})
_TRACE: Final = Need(ResourceType.TOPIC, TRACE_TOPIC, frozenset({Action.PUB}))
_LONGEST_NAME: Final = 255


class PlainAccessControl:
    """The accounts in force. `put` replaces them all at once."""

    def __init__(self) -> None:
        self.generation = 0
        self._accounts: Mapping[str, PlainAccount] = {}
        self._white_addresses: Addresses = ()
        self._secrets: Mapping[str, bytes] = {}

    def __repr__(self) -> str:
        return f"<PlainAccessControl {len(self._accounts)} accounts, generation {self.generation}>"

    def put(self, accounts: Mapping[str, PlainAccount], white_addresses: Addresses) -> None:
        self._accounts = dict(accounts)
        self._white_addresses = white_addresses
        self._secrets = {key: account.secret_key.encode() for key, account in accounts.items()}
        self.generation += 1

    def administrator(self) -> tuple[str, str] | None:
        """Name and secret of an account that may do everything, for parts of a server that ask servers themselves."""
        found = (account for account in self._accounts.values() if account.is_unlimited)
        account = next(found, None)
        return None if account is None else (account.access_key, account.secret_key)

    @property
    def secrets(self) -> Mapping[str, bytes]:
        return self._secrets

    def authenticate(self, command: Command, address: str) -> Account:
        """The account of a request. Raises with the words of RocketMQ when there is none."""
        key = command.ext_fields.get(ACCESS_KEY)
        account = None if key is None else self._accounts.get(key)
        is_own_address = account is not None and matches(account.white_addresses, address)
        if is_own_address or matches(self._white_addresses, address):
            if account is not None and self._is_signed(command, account):
                return Account(account.access_key, account.is_admin, is_white=True)
            return Account(account.access_key if account is not None and is_own_address else "", is_white=True)
        if key is None:
            raise refused("No accessKey is configured")
        if account is None:
            raise refused(f"No acl config for {key[:_LONGEST_NAME]}")
        if not self._is_signed(command, account):
            raise refused(f"Check signature failed for accessKey={account.access_key}")
        return Account(account.access_key, account.is_admin)

    def _is_signed(self, command: Command, account: PlainAccount) -> bool:
        return is_signed_with(command, self._secrets[account.access_key])

    def authorize(self, account: Account, needs: Sequence[Need], command: Command, address: str) -> None:
        """Raise unless the account has every one of these rights."""
        if not account.is_admin and not all(need.actions & _MESSAGING for need in needs):
            raise refused(_needs_admin(account, command.code))
        if account.is_white:
            return
        owner = self._accounts.get(account.name)
        if owner is None:
            raise refused(f"No acl config for {account.name}")
        # RocketMQ's order, as far as it was seen: groups before topics.
        for need in sorted(needs, key=lambda need: need.resource_type is not ResourceType.GROUP):
            if not _may(owner, need):
                raise refused(f"No default permission for {_resource(need)}")


def refused(sentence: str) -> BrokerError:
    """The refusal with the code and the words of RocketMQ 4.x, without the name of a Java method that follows there."""
    return BrokerError(f"org.apache.rocketmq.acl.common.AclException: {sentence}", ResponseCode.SYSTEM_ERROR)


def _needs_admin(account: Account, code: int) -> str:
    text = f"Need admin permission for request code={code}, but accessKey={account.name or 'null'} is not"
    return f"{text}; an address on a white list is not enough, sign the request" if account.is_white else text


def _may(owner: PlainAccount, need: Need) -> bool:
    if need == _TRACE:  # every account may report what became of its messages
        return True
    if owner.is_unlimited or (owner.is_admin and need.actions - _MESSAGING):
        return True
    permissions = owner.groups if need.resource_type is ResourceType.GROUP else owner.topics
    return bool(permissions.of(need.name) & need.actions)


def _resource(need: Need) -> str:
    return f"{need.resource_type.value.lower()}:{need.name[:_LONGEST_NAME]}"
