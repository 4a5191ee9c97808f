"""Users and ACLs made of the accounts of 1.0, the access control of 4.x. White addresses have no counterpart."""

from __future__ import annotations

from collections.abc import Iterable

from downrange.auth.access_control import ANY_NAME, Action, ResourceType
from downrange.auth.accounts import Accounts
from downrange.auth.plain_accounts import Permissions, PlainAccount
from downrange.auth.policies import (
    ALL_ACTIONS,
    Acl,
    Decision,
    Pattern,
    Policy,
    PolicyEntry,
    PolicyType,
    Resource,
)
from downrange.auth.users import AccessRuleError, User, UserType, check_username


def migrate(plain: Iterable[PlainAccount], accounts: Accounts) -> list[str]:
    """Make users of the accounts that are none yet; return their names."""
    new = [account for account in plain if account.access_key not in accounts.users]
    users, acls = zip(*map(migrated, new), strict=True) if new else ((), ())
    accounts.replace_all([*accounts.users.values(), *users], [*accounts.acls.values(), *acls])
    return [account.access_key for account in new]


def migrated(account: PlainAccount) -> tuple[User, Acl]:
    """The user, and the ACL with which it may do what the account could."""
    check_username(account.access_key)
    user_type = UserType.SUPER if account.is_admin else UserType.NORMAL
    acl = Acl(account.access_key, ())
    for kind, permissions in ((ResourceType.TOPIC, account.topics), (ResourceType.GROUP, account.groups)):
        acl = acl.merged(_policies(kind, permissions))
    return User(account.access_key, account.secret_key, user_type), acl


def _policies(kind: ResourceType, permissions: Permissions) -> tuple[Policy, Policy]:
    custom, default = [], []
    for name, actions in permissions.by_name.items():
        resource = _literal(kind, name)
        custom.append(_entry(resource, actions))
        if actions and permissions.default - actions:  # to 1.0 the default permission is for other names only
            default.append(PolicyEntry(resource, _in_order(permissions.default - actions), Decision.DENY))
    if permissions.default:
        default.append(_entry(Resource(kind, Pattern.ANY), permissions.default))
    return Policy(PolicyType.CUSTOM, tuple(custom)), Policy(PolicyType.DEFAULT, tuple(default))


def _literal(kind: ResourceType, name: str) -> Resource:
    if ANY_NAME in name:  # to 1.0 the sign means nothing; here it would give more than the account had
        raise AccessRuleError(f"{kind} {name!r}: a name with * cannot be migrated")
    return Resource(kind, Pattern.LITERAL, name)


def _entry(resource: Resource, actions: frozenset[Action]) -> PolicyEntry:
    if not actions:
        return PolicyEntry(resource, ALL_ACTIONS, Decision.DENY)
    return PolicyEntry(resource, _in_order(actions), Decision.ALLOW)


def _in_order(actions: frozenset[Action]) -> tuple[Action, ...]:
    return tuple(action for action in Action if action in actions)
