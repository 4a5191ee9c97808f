"""The file of `--auth file`: a line for each user with name, role and the scrypt hash of the password."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Final

from downrange.settings import ConfigError

_COST: Final = 1 << 14
_BLOCK: Final = 8
_LONGEST: Final = 256


class Role(IntEnum):
    """What a person may do; each role may do what those before it may."""

    VIEWER = 1
    OPERATOR = 2
    ADMIN = 3

    @property
    def word(self) -> str:
        return self.name.lower()


def role_of(text: str) -> Role:
    try:
        return Role[text.upper()]
    except KeyError:
        raise ConfigError(f"role {text!r}: expected viewer, operator or admin") from None


@dataclass(frozen=True, slots=True)
class User:
    """One line of the file."""

    name: str
    role: Role
    salt: bytes = field(repr=False)
    digest: bytes = field(repr=False)

    def line(self) -> str:
        return f"{self.name}:{self.role.word}:scrypt:{self.salt.hex()}:{self.digest.hex()}"


def hashed(password: str, salt: bytes) -> bytes:
    return hashlib.scrypt(password.encode()[: _LONGEST * 4], salt=salt, n=_COST, r=_BLOCK, p=1, dklen=32)


class UsersFile:
    """The users; the file is read again when it has changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: tuple[int, int] | None = None
        self._users: dict[str, User] = {}
        self._nobody = User("", Role.VIEWER, secrets.token_bytes(16), secrets.token_bytes(32))
        self.users()

    def users(self) -> dict[str, User]:
        try:
            status = self.path.stat()
            stamp = (status.st_mtime_ns, status.st_size)
            if stamp != self._stamp:
                self._users = read_users(self.path)
                self._stamp = stamp
        except FileNotFoundError:
            raise ConfigError(
                f"--users {self.path}: there is no such file; make it: downrange console add-user"
            ) from None
        return self._users

    def check(self, name: str, password: str) -> User | None:
        """The user, if the password is theirs. Takes as long for a user that does not exist."""
        user = self.users().get(name)
        known = user or self._nobody
        is_right = hmac.compare_digest(hashed(password, known.salt), known.digest)
        return user if is_right else None

    def role(self, name: str) -> Role | None:
        """The role that a user has now; None when the user was removed."""
        user = self.users().get(name)
        return None if user is None else user.role


def read_users(path: Path) -> dict[str, User]:
    found: dict[str, User] = {}
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        parts = line.split(":")
        try:
            name, role, kind, salt, digest = parts
            if kind != "scrypt" or not name:
                raise ValueError(kind)
            found[name] = User(name, role_of(role), bytes.fromhex(salt), bytes.fromhex(digest))
        except ValueError:
            raise ConfigError(
                f"{path}:{number}: expected name:role:scrypt:salt:hash; `downrange console add-user` writes such lines"
            ) from None
    return found


def add_user(path: Path, name: str, role: Role, password: str) -> bool:
    """Add a user or change theirs; whether the user is new. Only the owner can read the file."""
    if not name or ":" in name or not name.isprintable() or name.startswith("#") or len(name) > _LONGEST:
        raise ConfigError(f"user {name!r}: a name is printable and has no colon")
    if len(password) < 8:
        raise ConfigError("a password has at least 8 characters")
    users = read_users(path) if path.exists() else {}
    is_new = name not in users
    salt = secrets.token_bytes(16)
    users[name] = User(name, role, salt, hashed(password, salt))
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.writelines(user.line() + "\n" for user in users.values())
    beside.replace(path)
    return is_new
