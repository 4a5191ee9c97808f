"""Settings that requests change while a server runs: only those on a list, all or none, and kept in a file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, TypeVar

from downrange.protocol.errors import BrokerError, NoPermission
from downrange.settings import (
    ConfigError,
    Property,
    format_properties,
    parse_properties,
    parse_value,
    read_properties,
    settings_of,
    to_properties,
)

C = TypeVar("C")


@dataclasses.dataclass(frozen=True, slots=True)
class RemotelyChangeable:
    """The keys that a request may change, and those that are refused with RocketMQ's own words."""

    keys: frozenset[str]
    black_list: frozenset[str]

    def changed(self, config: C, body: bytes) -> C:
        """The configuration with the changes of a properties text. Raises if one of its keys or values is wrong."""
        try:
            given = parse_properties(body.decode())
        except UnicodeDecodeError:
            raise BrokerError("the configuration is not UTF-8 text") from None
        if not self.black_list.isdisjoint(given):
            raise NoPermission("Can not update config in black list.")
        changes: dict[str, Any] = {}
        for known in settings_of(type(config)):
            if known.key in given and known.key in self.keys:
                changes[known.field] = parse_value(known, known.key, given.pop(known.key))
        if given:
            allowed = ", ".join(sorted(self.keys))
            raise NoPermission(f"{min(given)} can not be updated while running; these keys can: {allowed}")
        return dataclasses.replace(config, **changes)  # type: ignore[type-var]

    def keep(self, config: object, path: Path) -> None:
        """Write the settings that may have been changed. Raises ConfigError."""
        kept = {key: value for key, value in to_properties(config).items() if key in self.keys}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(format_properties(kept), "utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror or error}; nothing was changed") from None

    def kept(self, path: Path) -> dict[str, Property]:
        """The settings of the file that `keep` writes."""
        if not path.exists():
            return {}
        return {key: value for key, value in read_properties(path).items() if key in self.keys}
