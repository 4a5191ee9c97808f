"""The content of plain_acl.yml: accounts and the global white list, read, checked and changed.

    globalWhiteRemoteAddresses: [10.10.103.*]
    accounts:
    - accessKey: shop-producer            longer than 6 characters, as the secret
      secretKey: ...
      whiteRemoteAddress: 192.168.0.*     may ask without a signature from there
      admin: false
      defaultTopicPerm: DENY              DENY, PUB, SUB or PUB|SUB
      defaultGroupPerm: SUB
      topicPerms: [orders=PUB]
      groupPerms: [billing=SUB]
    dataVersion: [{counter: 1, timestamp: 1794808417083}]    written by the broker

An account that is wrong makes the whole file wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from downrange.auth.access_control import ANY_NAME, Action
from downrange.auth.acl_yaml import Yaml
from downrange.auth.remote_address import Addresses, parse_addresses
from downrange.model.errors import MQError
from downrange.model.topics import RETRY_PREFIX
from downrange.protocol.bodies.data_version import DataVersion

WHITE_LIST: Final = "globalWhiteRemoteAddresses"
_ACCOUNTS: Final = "accounts"
_VERSION: Final = "dataVersion"
_ACCESS_KEY: Final = "accessKey"
_SECRET_KEY: Final = "secretKey"  # noqa: S105  the name of a member
_LONGER_THAN: Final = 6
_MEMBERS: Final = frozenset(
    {
        _ACCESS_KEY, _SECRET_KEY, "whiteRemoteAddress", "admin", "defaultTopicPerm", "defaultGroupPerm", "topicPerms",
        "groupPerms",
    }
)  # fmt: skip
_YES_AND_NO: Final = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}

Permission = frozenset[Action]
DENY: Final[Permission] = frozenset()
PERMISSIONS: Final[Mapping[str, Permission]] = {
    "DENY": DENY,
    "PUB": frozenset({Action.PUB}),
    "SUB": frozenset({Action.SUB}),
    "PUB|SUB": frozenset({Action.PUB, Action.SUB}),
    "SUB|PUB": frozenset({Action.PUB, Action.SUB}),
}


class PlainAclError(MQError):
    """Accounts that cannot be used. The text names the account and what is wrong, never a secret."""


class Permissions(NamedTuple):
    """What an account may do with topics, or with groups: by name, and with all others."""

    default: Permission
    by_name: Mapping[str, Permission]

    def of(self, name: str) -> Permission:
        """The permission for a name; for `ANY_NAME` what is allowed with at least one name."""
        if name == ANY_NAME:
            return self.default.union(*self.by_name.values())
        return self.by_name.get(name, self.default)


@dataclass(frozen=True, slots=True)
class PlainAccount:
    access_key: str
    secret_key: str = field(repr=False)
    white_addresses: Addresses
    is_admin: bool
    topics: Permissions
    groups: Permissions

    @property
    def is_unlimited(self) -> bool:
        """Whether the account may use every topic and group: an administrator whose entry lists none."""
        return self.is_admin and not self.topics.by_name and not self.groups.by_name


class PlainAcl(NamedTuple):
    """The content of one file."""

    accounts: tuple[PlainAccount, ...]
    white_addresses: Addresses
    version: DataVersion | None
    warnings: tuple[str, ...]
    """Entries that were accepted, but that hardly mean what their writer wanted."""


def read_acl(content: Yaml) -> PlainAcl:
    """Check the content of a file. Raises a PlainAclError that names the first account that is wrong."""
    warnings: list[str] = []
    members = _mapping(content, "the file")
    warnings += [f"{name[:50]} has no meaning" for name in members if name not in (WHITE_LIST, _ACCOUNTS, _VERSION)]
    accounts: dict[str, PlainAccount] = {}
    for number, entry in enumerate(_list(members.get(_ACCOUNTS), _ACCOUNTS), start=1):
        account = _account(number, entry, warnings)
        if account.access_key in accounts:
            warnings.append(f"account {account.access_key} stands there twice; the first entry counts")
        else:
            accounts[account.access_key] = account
    patterns = [_text(pattern, f"an entry of {WHITE_LIST}") for pattern in _list(members.get(WHITE_LIST), WHITE_LIST)]
    return PlainAcl(tuple(accounts.values()), white_list(patterns), _version(members.get(_VERSION)), tuple(warnings))


def white_list(patterns: Iterable[str]) -> Addresses:
    return tuple(one for pattern in patterns for one in _addresses(pattern, WHITE_LIST))


def _account(number: int, entry: Yaml, warnings: list[str]) -> PlainAccount:
    members = _mapping(entry, f"account {number}")
    key = _text(members.get(_ACCESS_KEY), f"accessKey of account {number}")
    secret = _text(members.get(_SECRET_KEY), f"secretKey of account {number}")
    if len(key) <= _LONGER_THAN or len(secret) <= _LONGER_THAN:
        raise PlainAclError(
            f"The accessKey={key[:50]} and secretKey=****** cannot be null and length should longer than {_LONGER_THAN}"
        )
    if not key.isprintable():
        raise PlainAclError(f"accessKey of account {number} has characters that cannot be printed")
    about = f"account {key[:50]}"
    warnings += [f"{about}: {name[:50]} has no meaning" for name in members if name not in _MEMBERS]
    groups = dict(_resources("group", members.get("groupPerms"), about, warnings))
    topics = dict(_resources("topic", members.get("topicPerms"), about, warnings))
    for name in [name for name in topics if name.startswith(RETRY_PREFIX)]:  # a retry topic belongs to its group
        groups[name.removeprefix(RETRY_PREFIX)] = topics.pop(name)
    return PlainAccount(
        key,
        secret,
        _addresses(_text(members.get("whiteRemoteAddress"), f"{about}: whiteRemoteAddress"), about),
        _yes_or_no(members.get("admin"), f"{about}: admin"),
        Permissions(_permission(members.get("defaultTopicPerm"), f"{about}: defaultTopicPerm", warnings), topics),
        Permissions(_permission(members.get("defaultGroupPerm"), f"{about}: defaultGroupPerm", warnings), groups),
    )


def _resources(kind: str, entries: Yaml, about: str, warnings: list[str]) -> Iterable[tuple[str, Permission]]:
    for entry in _list(entries, f"{about}: {kind}Perms"):
        text = _text(entry, f"{about}: an entry of {kind}Perms")
        parts = [part.strip() for part in text.split("=")]
        if len(parts) != 2 or not all(parts):
            raise PlainAclError(f"{about}: Parse resource permission failed for {kind}:{text[:150]}")
        yield parts[0], _permission(parts[1], f"{about}: {kind} {parts[0][:150]}", warnings)


def _permission(value: Yaml, about: str, warnings: list[str]) -> Permission:
    text = _text(value, about).strip()
    if text and text not in PERMISSIONS:
        warnings.append(f"{about}: {text[:50]!r} means DENY; expected DENY, PUB, SUB or PUB|SUB")
    return PERMISSIONS.get(text, DENY)


def _addresses(pattern: str, about: str) -> Addresses:
    try:
        return parse_addresses(pattern)
    except ValueError as error:
        raise PlainAclError(f"{about}: {error}") from None


def _version(value: Yaml) -> DataVersion | None:
    """The first entry of `dataVersion`; a version that cannot be read counts as none."""
    entry = value[0] if isinstance(value, list) and value else None
    numbers = [str(entry.get(name, "")) for name in ("counter", "timestamp")] if isinstance(entry, dict) else []
    if not numbers or not all(text.isascii() and text.isdecimal() and len(text) < 19 for text in numbers):
        return None
    return DataVersion(counter=int(numbers[0]), timestamp=int(numbers[1]))


def _mapping(value: Yaml, about: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise PlainAclError(f"{about}: expected members like `name: value`")
    return value


def _list(value: Yaml, about: str) -> Sequence[Any]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise PlainAclError(f"{about}: expected a list")
    return value


def _text(value: Yaml, about: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise PlainAclError(f"{about}: expected a text")
    return value


def _yes_or_no(value: Yaml, about: str) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    try:
        return _YES_AND_NO[_text(value, about).lower()]
    except KeyError:
        raise PlainAclError(f"{about}: expected true or false") from None


class AccountChange(NamedTuple):
    """A new account, or new values for members of an account; what is None stays as it is."""

    access_key: str
    secret_key: str
    admin: bool
    white_remote_address: str | None = None
    default_topic_perm: str | None = None
    default_group_perm: str | None = None
    topic_perms: Sequence[str] | None = None
    group_perms: Sequence[str] | None = None

    def __repr__(self) -> str:
        return f"<AccountChange {self.access_key}>"

    def check(self) -> None:
        """Raise a PlainAclError with RocketMQ's words when a permission is not `name=PERM`."""
        for entry in (*(self.topic_perms or ()), *(self.group_perms or ())):
            name, equals, text = entry.partition("=")
            if not equals or "=" in text or not name.strip():
                raise PlainAclError(
                    f"Parse Resource format error for {entry[:150]}.\n"
                    "The expected resource format is 'Res=Perm'. For example: topicA=SUB"
                )
            if text.strip() not in PERMISSIONS:
                raise PlainAclError(
                    f"Parse resource permission error for {entry[:150]}.\n"
                    f"The expected permissions are 'SUB' or 'PUB' or 'SUB|PUB' or 'PUB|SUB' or 'DENY'."
                )

    def members(self) -> dict[str, Yaml]:
        given = {
            _ACCESS_KEY: self.access_key,
            _SECRET_KEY: self.secret_key,
            "whiteRemoteAddress": self.white_remote_address,
            "admin": self.admin,
            "defaultTopicPerm": self.default_topic_perm,
            "defaultGroupPerm": self.default_group_perm,
            "topicPerms": None if self.topic_perms is None else list(self.topic_perms),
            "groupPerms": None if self.group_perms is None else list(self.group_perms),
        }
        return {name: value for name, value in given.items() if value is not None}


def with_account(content: Yaml, change: AccountChange) -> Yaml:
    """The content of a file with a new or changed account."""
    entries = list(_list(_mapping(content, "the file").get(_ACCOUNTS), _ACCOUNTS))
    for place, entry in enumerate(entries):
        if _mapping(entry, "an account").get(_ACCESS_KEY) == change.access_key:
            entries[place] = {**entry, **change.members()}
            break
    else:
        entries.append(change.members())
    return {**(content or {}), _ACCOUNTS: entries}


def without_account(content: Yaml, access_key: str) -> Yaml:
    """The content of a file without an account, however often it stands there."""
    entries = _list(_mapping(content, "the file").get(_ACCOUNTS), _ACCOUNTS)
    kept = [entry for entry in entries if _mapping(entry, "an account").get(_ACCESS_KEY) != access_key]
    return {**(content or {}), _ACCOUNTS: kept}


def with_white_list(content: Yaml, patterns: Sequence[str]) -> Yaml:
    """The content of a file with another global white list."""
    return {**_mapping(content, "the file"), WHITE_LIST: list(patterns)}


def to_write(content: Yaml, version: DataVersion) -> Yaml:
    """The content with its version, and with the types that RocketMQ writes: `admin: true`, not `admin: 'true'`."""
    entries = [
        {**entry, "admin": _yes_or_no(entry["admin"], "admin")} if "admin" in entry else entry
        for entry in _list(content.get(_ACCOUNTS), _ACCOUNTS)
    ]
    ours = {_VERSION: [{"counter": version.counter, "timestamp": version.timestamp}]}
    others = {name: value for name, value in content.items() if name != _VERSION}
    return {**others, **({_ACCOUNTS: entries} if _ACCOUNTS in content else {}), **ours}
