"""Users and ACLs for operators: requests 3001 to 3010. No operator sees a password. [AdminBrokerProcessor]

A change counts from the next request on, on live connections, too. A slave copies the accounts of its master.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from downrange.auth.account_table import (
    acl_info,
    acl_of,
    encoded_accounts,
    policy_type_of,
    resource_of,
    user_info,
    user_status_of,
    user_type_of,
)
from downrange.auth.accounts import Accounts
from downrange.auth.policies import Acl
from downrange.auth.user_access_control import UserAccessControl
from downrange.auth.users import AccessRuleError, User, check_username, username_of
from downrange.broker.handlers.topics import refuse_on_slave
from downrange.broker.live_config import LiveConfig
from downrange.broker.routes import RouteTable
from downrange.protocol.bodies.body import BodyError, decode_body, encode_body
from downrange.protocol.bodies.users import (
    AclInfo,
    DeleteAclRequest,
    ListAclsRequest,
    ListUsersRequest,
    SubjectRequest,
    UserInfo,
    UsernameRequest,
)
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command
from downrange.protocol.errors import BrokerError, NoPermission
from downrange.protocol.sealing import NONCE_SIZE, seal
from downrange.protocol.signing import ACCESS_KEY
from downrange.transport.connection import Connection

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(eq=False)
class UserHandlers:
    """Requests of operators about users and ACLs. The guard has checked the signature and the right of the cluster."""

    _config: LiveConfig
    _access: UserAccessControl | None

    @property
    def routes(self) -> RouteTable:
        return {
            RequestCode.AUTH_CREATE_USER: self.create_user,
            RequestCode.AUTH_UPDATE_USER: self.update_user,
            RequestCode.AUTH_DELETE_USER: self.delete_user,
            RequestCode.AUTH_GET_USER: self.get_user,
            RequestCode.AUTH_LIST_USER: self.list_users,
            RequestCode.AUTH_CREATE_ACL: self.put_acl,
            RequestCode.AUTH_UPDATE_ACL: self.put_acl,
            RequestCode.AUTH_DELETE_ACL: self.delete_acl,
            RequestCode.AUTH_GET_ACL: self.get_acl,
            RequestCode.AUTH_LIST_ACL: self.list_acls,
        }

    @property
    def _control(self) -> UserAccessControl:
        if self._access is None:
            # Users that anybody made while requests need no signature would be masters of the broker later.
            raise NoPermission("users and ACLs need authenticationEnabled=true in the broker's configuration")
        return self._access

    @property
    def _accounts(self) -> Accounts:
        return self._control.accounts

    def _changeable(self) -> Accounts:
        accounts = self._accounts
        refuse_on_slave(self._config)
        return accounts

    # --- users --------------------------------------------------------------------------------------------------

    def create_user(self, command: Command, connection: Connection) -> Command:
        """Request 3001: create a user."""
        accounts, name, info = self._changeable(), _username(command), _user_info(command)
        legal(lambda: check_username(name))
        if name in accounts.users:
            raise NoPermission("The user is existed")
        if not info.password or not info.password.strip():
            raise NoPermission("The password is blank")
        user = User(name, info.password, legal(lambda: user_type_of(info)), legal(lambda: user_status_of(info)))
        if user.is_super and not self._is_super(command):
            raise BrokerError("The super user can only be create by super user")
        accounts.put_user(user)
        self._note("user created", user.username, command, connection)
        return command.reply()

    def update_user(self, command: Command, connection: Connection) -> Command:
        """Request 3002: change a user; what the request does not name stays."""
        accounts, name, info = self._changeable(), _username(command), _user_info(command)
        old = accounts.users.get(name)
        if old is None:
            raise NoPermission("The user is not exist")
        password = info.password if info.password and info.password.strip() else old.password
        new = User(
            name,
            password,
            legal(lambda: user_type_of(info, old.user_type)),
            legal(lambda: user_status_of(info, old.user_status)),
        )
        if (old.is_super or new.is_super) and not self._is_super(command):
            raise NoPermission("The super user can only be update by super user")
        self._refuse_inner(name)
        accounts.put_user(new)
        self._note("user updated", name, command, connection)
        return command.reply()

    def delete_user(self, command: Command, connection: Connection) -> Command:
        """Request 3003: delete a user and its ACL; a user that does not exist is deleted already."""
        accounts, name = self._changeable(), _username(command)
        user = accounts.users.get(name)
        if user is None:
            return command.reply()
        if user.is_super and not self._is_super(command):
            raise NoPermission("The super user can only be delete by super user")
        self._refuse_inner(name)
        accounts.delete_user(name)
        self._note("user deleted", name, command, connection)
        return command.reply()

    def get_user(self, command: Command, connection: Connection) -> Command:
        """Request 3004: one user; no body when there is none of this name.

        Proxies of RocketMQ check signatures themselves: they get the password, with the brokers' own account over TLS.
        """
        user = self._accounts.users.get(_username(command))
        if user is None:
            return command.reply()
        info = user_info(user)
        if connection.is_tls and self._is_inner(command):
            info = msgspec.structs.replace(info, password=user.password)
        return command.reply(body=encode_body(info))

    def list_users(self, command: Command, connection: Connection) -> Command:
        """Request 3005: all users, or those with a text in their names; for the brokers' own account a sealed table."""
        header = command.header(ListUsersRequest)
        if header.challenge is not None:
            return command.reply(body=self._sealed_accounts(command, header.challenge))
        users = self._accounts.users.values()
        found = tuple(user_info(user) for user in users if (header.filter or "") in user.username)
        return command.reply(body=encode_body(found) if found else b"")

    def _sealed_accounts(self, command: Command, challenge: str) -> bytes:
        inner, accounts = self._control.inner, self._accounts
        if inner is None or not self._is_inner(command):
            raise NoPermission("passwords are for the account of innerClientAuthenticationCredentials only, and sealed")
        table = encoded_accounts(accounts.users.values(), accounts.acls.values())
        return seal(table, inner.password.encode(), challenge, secrets.token_bytes(NONCE_SIZE))

    def _is_inner(self, command: Command) -> bool:
        """Whether a request, whose signature was checked, comes from the brokers' own account."""
        inner = self._control.inner
        return inner is not None and command.ext_fields.get(ACCESS_KEY) == inner.username

    def _is_super(self, command: Command) -> bool:
        user = self._accounts.users.get(command.ext_fields.get(ACCESS_KEY, ""))
        return user is not None and user.is_super

    def _refuse_inner(self, name: str) -> None:
        inner = self._control.inner
        if inner is not None and inner.username == name:
            raise NoPermission(
                f"User:{name} is the brokers' own account; change innerClientAuthenticationCredentials and restart"
            )

    # --- ACLs ---------------------------------------------------------------------------------------------------

    def put_acl(self, command: Command, connection: Connection) -> Command:
        """Requests 3006 and 3007: put rules into the ACL of a user, in the place of those about the same resources."""
        accounts, info = self._changeable(), _decoded(AclInfo, command)
        subject = info.subject or command.header(SubjectRequest).subject
        name = username_of(subject)
        given = refused_as(NoPermission, lambda: acl_of(msgspec.structs.replace(info, subject=subject)))
        if not given.policies:
            raise NoPermission("The policies is empty.")
        known = accounts.acls.get(name, Acl(name, ()))
        refused_as(NoPermission, lambda: accounts.put_acl(known.merged(given.policies)))
        self._note("acl changed", name, command, connection)
        return command.reply()

    def delete_acl(self, command: Command, connection: Connection) -> Command:
        """Request 3008: delete the rule about one resource, or all rules of a user."""
        accounts, header = self._changeable(), command.header(DeleteAclRequest)
        acl = self._acl(header.subject)
        if acl is None:
            raise NoPermission("The acl is not exist.")
        if not header.resource:
            accounts.delete_acl(acl.username)
        else:
            policy_type = refused_as(NoPermission, lambda: policy_type_of(header.policy_type))
            resource = refused_as(NoPermission, lambda: resource_of(header.resource or ""))
            accounts.put_acl(acl.without(policy_type, resource))
        self._note("acl rules deleted", acl.username, command, connection)
        return command.reply()

    def get_acl(self, command: Command, connection: Connection) -> Command:
        """Request 3009: the ACL of a user; no body when it has none."""
        acl = self._acl(command.header(SubjectRequest).subject)
        return command.reply() if acl is None else command.reply(body=encode_body(acl_info(acl)))

    def list_acls(self, command: Command, connection: Connection) -> Command:
        """Request 3010: all ACLs, or the rules with these texts in subject and resource."""
        header = command.header(ListAclsRequest)
        acls = (acl for acl in self._accounts.acls.values() if (header.subject_filter or "") in acl.subject)
        found = tuple(info for acl in acls if (info := _filtered(acl_info(acl), header.resource_filter or "")).policies)
        return command.reply(body=encode_body(found) if found else b"")

    def _acl(self, subject: str) -> Acl | None:
        """The ACL of a user, if it has one."""
        name = username_of(subject)
        if name not in self._accounts.users:
            raise NoPermission("The subject is not exist.")
        return self._accounts.acls.get(name)

    @staticmethod
    def _note(what: str, name: str, command: Command, connection: Connection) -> None:
        by = command.ext_fields.get(ACCESS_KEY)
        log.info("%s username=%s by=%s peer=%s", what, name, by, connection.peer)


def _username(command: Command) -> str:
    name = command.header(UsernameRequest).username
    if not name.strip():
        raise BrokerError("The username is blank", ResponseCode.INVALID_PARAMETER)
    return name


def _user_info(command: Command) -> UserInfo:
    return _decoded(UserInfo, command)


def _decoded(kind: type[T], command: Command) -> T:
    try:
        return decode_body(kind, command.body_bytes)
    except BodyError:  # without its text, which may quote a password
        raise BrokerError(f"the body of request {command.code} is not the JSON of a {kind.__name__}") from None


def _filtered(acl: AclInfo, resource: str) -> AclInfo:
    policies = (
        msgspec.structs.replace(
            policy, entries=tuple(one for one in policy.entries if resource in (one.resource or ""))
        )
        for policy in acl.policies
    )
    return msgspec.structs.replace(acl, policies=tuple(policy for policy in policies if policy.entries))


def legal(make: Callable[[], T]) -> T:
    """What `make` returns; its error becomes code 29, INVALID_PARAMETER."""
    return refused_as(lambda remark: BrokerError(remark, ResponseCode.INVALID_PARAMETER), make)


def refused_as(error: Callable[[str], BrokerError], make: Callable[[], T]) -> T:
    """What `make` returns; an AccessRuleError becomes this error."""
    try:
        return make()
    except AccessRuleError as reason:
        raise error(str(reason)) from None
