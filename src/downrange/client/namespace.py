"""Namespaces: tenants of one cluster. On the wire a name is `namespace%name`; users see the name alone."""

from __future__ import annotations

from typing import Final

from downrange.model.topics import (
    BUILT_IN_GROUPS,
    DLQ_PREFIX,
    RETRY_PREFIX,
    SYSTEM_GROUP_PREFIX,
    is_system_topic,
)

_SEPARATOR: Final = "%"
_PREFIXES: Final = (RETRY_PREFIX, DLQ_PREFIX)


def wrap(namespace: str, name: str) -> str:
    """The name of a topic or group on the wire. Names of the system, and names already wrapped, stay as they are."""
    if not namespace or is_system_topic(name) or name in BUILT_IN_GROUPS or name.startswith(SYSTEM_GROUP_PREFIX):
        return name
    prefix, rest = _cut(name)
    if rest.startswith(namespace + _SEPARATOR):
        return name
    return f"{prefix}{namespace}{_SEPARATOR}{rest}"


def unwrap(namespace: str, name: str) -> str:
    """The name a user of `namespace` knows."""
    prefix, rest = _cut(name)
    return prefix + rest.removeprefix(namespace + _SEPARATOR) if namespace else name


def _cut(name: str) -> tuple[str, str]:
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return prefix, name[len(prefix) :]
    return "", name
