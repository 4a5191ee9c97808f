"""The name server's key-value configuration: namespace -> key -> value, kept in one small JSON file."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from downrange.settings import ConfigError


class _File(msgspec.Struct):
    configTable: dict[str, dict[str, str]] = msgspec.field(default_factory=dict)  # noqa: N815  the name in Java's file


class KVConfig:
    """Values by namespace and key; every change is on disk before its method returns.

    A change replaces the whole file; the file before it stays as `.bak`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._table = self._load()

    def _load(self) -> dict[str, dict[str, str]]:
        backup = self._path.with_name(self._path.name + ".bak")
        broken: Exception | None = None
        for path in (self._path, backup):
            try:
                text = path.read_bytes()
                if text.strip():
                    return msgspec.json.decode(text, type=_File).configTable
            except FileNotFoundError:
                continue
            except NotADirectoryError:
                parent = next(one for one in path.parents if one.exists())
                raise ConfigError(f"{parent} is a file: a directory is needed there for {self._path.name}") from None
            except (OSError, msgspec.DecodeError) as error:
                broken = broken or error
        if broken is not None:
            raise ConfigError(f"cannot read {self._path} nor its .bak: {broken}; repair or remove them") from None
        return {}

    def _save(self, table: dict[str, dict[str, str]]) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_name(self._path.name + ".tmp")
            with temporary.open("wb") as file:
                file.write(msgspec.json.encode(_File(table)))
                file.flush()
                os.fsync(file.fileno())
            if self._path.exists():
                os.replace(self._path, self._path.with_name(self._path.name + ".bak"))
            os.replace(temporary, self._path)
        except OSError as error:
            raise ConfigError(f"cannot write {self._path}: {error.strerror or error}; nothing was changed") from None
        self._table = table

    def put(self, namespace: str, key: str, value: str) -> None:
        self._save({**self._table, namespace: {**self._table.get(namespace, {}), key: value}})

    def delete(self, namespace: str, key: str) -> None:
        if key in self._table.get(namespace, {}):
            rest = {name: value for name, value in self._table[namespace].items() if name != key}
            self._save({**self._table, namespace: rest})

    def get(self, namespace: str, key: str) -> str | None:
        return self._table.get(namespace, {}).get(key)

    def namespace(self, namespace: str) -> dict[str, str] | None:
        """All keys and values of a namespace; None when nothing was ever put there."""
        return self._table.get(namespace)
