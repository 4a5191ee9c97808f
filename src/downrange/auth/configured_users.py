"""Users in settings: `initAuthenticationUser`, and `innerClientAuthenticationCredentials` with which servers sign."""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from downrange.auth.users import AccessRuleError, User, UserType, check_username
from downrange.settings import ConfigError

T = TypeVar("T")

INNER_CREDENTIALS: Final = "innerClientAuthenticationCredentials"


class _InitUser(msgspec.Struct):
    username: str
    password: str


class _InnerCredentials(msgspec.Struct, rename="camel"):
    access_key: str
    secret_key: str


def configured_first_user(text: str) -> User | None:
    """The user of initAuthenticationUser. Raises ConfigError, without any secret in it."""
    key = "initAuthenticationUser"
    given = _decoded(key, text, _InitUser, '{"username":"…","password":"…"}')
    return None if given is None else _super_user(key, given.username, given.password)


def configured_inner_user(text: str) -> User | None:
    """The user of innerClientAuthenticationCredentials. Raises ConfigError, without any secret in it."""
    given = _decoded(INNER_CREDENTIALS, text, _InnerCredentials, '{"accessKey":"…","secretKey":"…"}')
    return None if given is None else _super_user(INNER_CREDENTIALS, given.access_key, given.secret_key)


def _decoded(key: str, text: str, kind: type[T], expected: str) -> T | None:
    if not text.strip():
        return None
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise ConfigError(f"{key}: expected {expected}") from None


def _super_user(key: str, name: str, password: str) -> User:
    try:
        check_username(name)
    except AccessRuleError as error:
        raise ConfigError(f"{key}: {error}") from None
    if not name or not password.strip():
        raise ConfigError(f"{key}: name and password must not be empty")
    return User(name, password, UserType.SUPER)
