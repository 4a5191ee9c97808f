"""Users and their access rules, as requests 3001 to 3010 carry them. A member that is None does not travel."""

from __future__ import annotations

from downrange.protocol.bodies.body import Body
from downrange.protocol.bodies.fields import Header


class UserInfo(Body, frozen=True, kw_only=True, omit_defaults=True):
    """A user. Our brokers answer without the password; RocketMQ's show it."""

    username: str | None = None
    password: str | None = None
    user_type: str | None = None
    user_status: str | None = None

    def __repr__(self) -> str:  # a password must not get into a log
        return f"UserInfo({self.username!r}, {self.user_type!r}, {self.user_status!r})"


class UsernameRequest(Header, frozen=True):
    """Requests 3001 AUTH_CREATE_USER, 3002 AUTH_UPDATE_USER, 3003 AUTH_DELETE_USER and 3004 AUTH_GET_USER."""

    username: str = ""


class ListUsersRequest(Header, frozen=True, kw_only=True):
    """Request 3005 AUTH_LIST_USER."""

    filter: str | None = None
    """A part of the names of the wanted users."""
    challenge: str | None = None
    """Not of RocketMQ: answer with an `AccountTable` sealed for this challenge, see sealing.py. Only the brokers' own
    account may ask for that."""


class PolicyEntryInfo(Body, frozen=True, kw_only=True, omit_defaults=True):
    """One rule: `Topic:T`, `["Pub","Sub"]`, `["10.1.0.0/16"]`, `Allow`."""

    resource: str | None = None
    actions: tuple[str, ...] | None = None
    source_ips: tuple[str, ...] | None = None
    decision: str | None = None


class PolicyInfo(Body, frozen=True, kw_only=True, omit_defaults=True):
    """The Custom or the Default rules of a user."""

    policy_type: str | None = None
    entries: tuple[PolicyEntryInfo, ...] = ()


class AclInfo(Body, frozen=True, kw_only=True, omit_defaults=True):
    """All rules of one user, whose name stands in `User:NAME`."""

    subject: str | None = None
    policies: tuple[PolicyInfo, ...] = ()


class SubjectRequest(Header, frozen=True):
    """Requests 3006 AUTH_CREATE_ACL, 3007 AUTH_UPDATE_ACL and 3009 AUTH_GET_ACL."""

    subject: str = ""


class DeleteAclRequest(Header, frozen=True, kw_only=True):
    """Request 3008 AUTH_DELETE_ACL: the rule about one resource, or all rules."""

    subject: str = ""
    policy_type: str | None = None
    resource: str | None = None


class ListAclsRequest(Header, frozen=True, kw_only=True):
    """Request 3010 AUTH_LIST_ACL."""

    subject_filter: str | None = None
    resource_filter: str | None = None


class AccountTable(Body, frozen=True, kw_only=True, omit_defaults=True):
    """All users, with their passwords, and all their rules: for a broker's file, and sealed for its slaves."""

    users: tuple[UserInfo, ...] = ()
    acls: tuple[AclInfo, ...] = ()

    def __repr__(self) -> str:
        return f"<AccountTable users={len(self.users)} acls={len(self.acls)}>"
