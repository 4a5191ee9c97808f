"""Users of ACL 2.0, the access control of 5.x: their names, passwords, types and states."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeVar

from downrange.model.errors import MQError

_MOST_NAME_CHARACTERS: Final = 255
_SUBJECT_TYPE: Final = "user"

E = TypeVar("E", bound=StrEnum)


class AccessRuleError(MQError):
    """A user or an access rule that cannot be; the text says what is wrong with it."""


class UserType(StrEnum):
    """A Super user may do everything; the rights of a Normal user are those of its ACL."""

    SUPER = "Super"
    NORMAL = "Normal"


class UserStatus(StrEnum):
    """A disabled user keeps its password and its ACL, but its requests are refused."""

    ENABLE = "enable"
    DISABLE = "disable"


@dataclass(frozen=True, slots=True)
class User:
    """One user. The name is the access key and the password the secret key with which requests are signed."""

    username: str
    password: str = field(repr=False)
    user_type: UserType = UserType.NORMAL
    user_status: UserStatus = UserStatus.ENABLE

    @property
    def is_super(self) -> bool:
        return self.user_type is UserType.SUPER

    @property
    def is_enabled(self) -> bool:
        return self.user_status is UserStatus.ENABLE


def shown(name: str) -> str:
    """A name that a peer made up, fit for a log line: not too long, and nothing that could end the line."""
    return "".join(letter if letter.isprintable() else "?" for letter in name[:_MOST_NAME_CHARACTERS])


def check_username(name: str) -> None:
    """Raise unless a user can have this name: it stands in log lines and in the `User:NAME` of an ACL."""
    if len(name) > _MOST_NAME_CHARACTERS:
        raise AccessRuleError(f"The username has more than {_MOST_NAME_CHARACTERS} characters")
    if not name.isprintable() or name != name.strip():
        raise AccessRuleError("The username has control characters, or blanks around it")


def named(members: type[E], text: str, what: str) -> E:
    """The member of an enumeration with this name, in capital or small letters."""
    wanted = text.casefold()
    for member in members:
        if member.value.casefold() == wanted:
            return member
    raise AccessRuleError(f"The {what} {text!r} is unknown, expected {' or '.join(members)}")


def subject_of(username: str) -> str:
    """The name of a user as the subject of an ACL."""
    return f"User:{username}"


def username_of(subject: str) -> str:
    """The user that a subject `User:NAME` means."""
    kind, colon, name = subject.partition(":")
    if not colon or kind.casefold() != _SUBJECT_TYPE or not name:
        raise AccessRuleError(f"The subject {subject!r} is unknown, expected User:NAME")
    return name
