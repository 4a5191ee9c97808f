"""Users and ACLs in the form in which requests carry them and a broker keeps them, and back.

Reading is strict: a type, an action or a decision with an unknown name is an error. The sentences begin as those of
RocketMQ 5.3.3 do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from downrange.auth.access_control import Action
from downrange.auth.policies import (
    Acl,
    Decision,
    Policy,
    PolicyEntry,
    PolicyType,
    Resource,
    Sources,
    action_names,
    parse_actions,
)
from downrange.auth.users import AccessRuleError, User, UserStatus, UserType, check_username, named, username_of
from downrange.protocol.bodies.users import AccountTable, AclInfo, PolicyEntryInfo, PolicyInfo, UserInfo

T = TypeVar("T")


def encoded_accounts(users: Iterable[User], acls: Iterable[Acl]) -> bytes:
    """All users and ACLs, with the passwords: the JSON of an `AccountTable`."""
    table = AccountTable(
        users=tuple(replace(user_info(user), password=user.password) for user in users), acls=tuple(map(acl_info, acls))
    )
    return msgspec.json.encode(table)  # not encode_body, which takes ten times as long: there may be thousands


def user_info(user: User) -> UserInfo:
    """A user as answers show it: without the password."""
    return UserInfo(username=user.username, user_type=user.user_type.value, user_status=user.user_status.value)


def acl_info(acl: Acl) -> AclInfo:
    return AclInfo(
        subject=acl.subject,
        policies=tuple(
            PolicyInfo(policy_type=policy.policy_type.value, entries=tuple(map(_entry_info, policy.entries)))
            for policy in acl.policies
        ),
    )


def _entry_info(entry: PolicyEntry) -> PolicyEntryInfo:
    return PolicyEntryInfo(
        resource=str(entry.resource),
        actions=action_names(entry.actions),
        source_ips=entry.sources.texts or None,
        decision=entry.decision.value,
    )


def accounts_of(table: AccountTable) -> tuple[list[User], list[Acl]]:
    """The users and ACLs that a broker kept or a master sent."""
    return [_user(info) for info in table.users], [acl_of(info) for info in table.acls]


def _user(info: UserInfo) -> User:
    if not info.username or not info.password:
        raise AccessRuleError("a user needs a name and a password")
    check_username(info.username)
    return User(info.username, info.password, user_type_of(info), user_status_of(info))


def user_type_of(info: UserInfo, otherwise: UserType = UserType.NORMAL) -> UserType:
    return named(UserType, info.user_type, "userType") if info.user_type else otherwise


def user_status_of(info: UserInfo, otherwise: UserStatus = UserStatus.ENABLE) -> UserStatus:
    return named(UserStatus, info.user_status, "userStatus") if info.user_status else otherwise


def acl_of(info: AclInfo) -> Acl:
    """The ACL of a request, of a broker's file or of a master."""
    acl = Acl(username_of(info.subject or ""), ())
    return acl.merged(Policy(policy_type_of(one.policy_type), tuple(map(_entry, one.entries))) for one in info.policies)


def policy_type_of(text: str | None) -> PolicyType:
    return named(PolicyType, text, "policyType") if text else PolicyType.CUSTOM


def _entry(info: PolicyEntryInfo) -> PolicyEntry:
    return PolicyEntry(
        resource_of(info.resource or ""),
        _actions(info.actions or ()),
        _checked("The decision is null or illegal.", lambda: named(Decision, info.decision or "", "decision")),
        _checked("The source ip is invalid.", lambda: Sources.parse(info.source_ips or ())),
    )


def resource_of(text: str) -> Resource:
    return _checked("The resource is null.", lambda: Resource.parse(text))


def _actions(names: tuple[str, ...]) -> tuple[Action, ...]:
    if not names:
        raise AccessRuleError("The actions is empty.")
    if any(name.casefold() == "any" for name in names):
        raise AccessRuleError("The actions can not be Any.")
    return _checked("The actions is empty.", lambda: parse_actions(names))


def _checked(sentence: str, parse: Callable[[], T]) -> T:
    """What `parse` returns; its error begins with RocketMQ's sentence."""
    try:
        return parse()
    except AccessRuleError as error:
        raise AccessRuleError(f"{sentence} {error}") from None
