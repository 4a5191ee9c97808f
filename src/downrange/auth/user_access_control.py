"""ACL 2.0 of RocketMQ 5.x: users sign their requests, and policies say what each of them may do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from downrange.auth.access_control import ANY_NAME, Account, Need, ResourceType
from downrange.auth.accounts import Accounts
from downrange.auth.policies import Acl, Decision
from downrange.auth.users import User, shown, subject_of
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command
from downrange.protocol.errors import NoPermission
from downrange.protocol.signing import ACCESS_KEY, is_signed_with

ACCOUNT_CODES: Final = frozenset(range(RequestCode.AUTH_CREATE_USER, RequestCode.AUTH_LIST_ACL + 1))
"""The requests that administer users and ACLs. No white list has them: they would give away everything else."""


@dataclass(frozen=True, slots=True)
class AccessSettings:
    """What a configuration says about ACL 2.0, apart from users."""

    cluster_name: str
    is_authorizing: bool = True
    """Whether policies count. Without them every user may do everything but administer users."""
    authentication_whitelist: frozenset[int] = frozenset()
    """Codes of requests that need no signature."""
    authorization_whitelist: frozenset[int] = frozenset()
    """Codes of requests that need no right."""


class UserAccessControl:
    """Decides by users and their ACLs. Nothing is remembered between requests. [StatelessAuthenticationStrategy]"""

    def __init__(self, accounts: Accounts, settings: AccessSettings, inner: User | None = None) -> None:
        self.accounts = accounts
        self._settings = settings
        self.inner = inner
        """The account of the servers themselves, if there is one."""

    def __repr__(self) -> str:
        return f"<UserAccessControl {self.accounts!r}>"

    @property
    def generation(self) -> int:
        return self.accounts.generation

    @property
    def secrets(self) -> Mapping[str, bytes]:
        return {name: user.password.encode() for name, user in self.accounts.users.items() if user.is_enabled}

    def authenticate(self, command: Command, address: str) -> Account:
        try:
            user = self._signer_of(command)
        except NoPermission:
            if command.code in self._settings.authentication_whitelist:
                return Account("", is_white=True)
            raise
        return Account(user.username, is_admin=user.is_super)

    def _signer_of(self, command: Command) -> User:
        name = command.ext_fields.get(ACCESS_KEY)
        if not name:
            raise NoPermission("username cannot be null.")
        user = self.accounts.users.get(name)
        if user is None:
            raise NoPermission(f"{subject_of(shown(name))} is not found.")
        if not user.is_enabled:
            raise NoPermission(f"{subject_of(name)} is disabled.")
        if not is_signed_with(command, user.password.encode()):
            raise NoPermission("check signature failed.")
        return user

    def authorize(self, account: Account, needs: Sequence[Need], command: Command, address: str) -> None:
        if account.is_admin or not self._needs_rights(command.code):
            return
        if not account.name:
            raise NoPermission("username cannot be null.")
        acl = self.accounts.acls.get(account.name)
        for need in needs:
            self._check(account.name, acl, self._in_this_cluster(need), address)

    def _needs_rights(self, code: int) -> bool:
        if code in ACCOUNT_CODES:
            return True
        return self._settings.is_authorizing and code not in self._settings.authorization_whitelist

    def _in_this_cluster(self, need: Need) -> Need:
        """A right on a cluster is meant for the one that this server belongs to."""
        if need.resource_type is ResourceType.CLUSTER and need.name == ANY_NAME:
            return need._replace(name=self._settings.cluster_name)
        return need

    def _check(self, username: str, acl: Acl | None, need: Need, address: str) -> None:
        decision = None if acl is None else acl.decision(need, address)
        if decision is Decision.ALLOW:
            return
        why = "no matched policies." if decision is None else "the decision is deny."
        resource = f"{need.resource_type}:{shown(need.name)}"
        raise NoPermission(f"{subject_of(username)} has no permission to access {resource} from {address}, {why}")
