"""JSON files of the broker's `config` directory, written as Java writes them and read back leniently.

Text form: tabs, no blank after a colon, members in alphabetical order; a map with numbers as keys is on one line with
bare keys. A change is written to `.tmp`, the old file becomes `.bak`, then `.tmp` replaces it: at any moment a complete
version is on disk.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import msgspec

from downrange.protocol.bodies.body import BodyError, decode_body, encode_body
from downrange.settings import ConfigError
from downrange.store.files import OS_FILES

T = TypeVar("T", bound=msgspec.Struct)


def pretty(value: Any, depth: int = 0) -> str:
    """The text of a JSON value; keys that are numbers are written without quotes, as Java does."""
    if isinstance(value, dict):
        if not value:
            return "{}"
        indent, outer = "\t" * (depth + 1), "\t" * depth
        if all(key.lstrip("-").isdigit() for key in value):
            inside = ",".join(f"{key}:{pretty(member, depth + 1)}" for key, member in value.items())
            return f"{{{inside}\n{outer}}}"
        inside = f",\n{indent}".join(
            f"{msgspec.json.encode(key).decode()}:{pretty(member, depth + 1)}" for key, member in value.items()
        )
        return f"{{\n{indent}{inside}\n{outer}}}"
    return msgspec.json.encode(value).decode()


class JsonFile:
    """One table on disk. The broker's thread calls `load` and `save`, which work on typed bodies.

    Holds always: an older version never replaces a newer one, whichever threads write them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._name = str(path)
        self._backup = f"{path}.bak"
        self._temporary = f"{path}.tmp"
        self._writing = Lock()
        self._versions = count(1)
        self._written_version = 0

    def load(self, body_type: type[T]) -> T | None:
        """The table saved last; the `.bak` if the file is missing, empty or damaged; None if neither exists."""
        for path, is_last in ((self.path, False), (Path(self._backup), True)):
            try:
                text = path.read_bytes()
            except (FileNotFoundError, NotADirectoryError):  # a wrong directory is reported by the store
                continue
            except OSError as error:
                raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
            if not text.strip():
                continue
            try:
                return decode_body(body_type, text)
            except BodyError as error:
                if is_last:
                    raise ConfigError(
                        f"{self.path} and its .bak cannot be read: {error}; repair or remove both"
                    ) from None
        return None

    def save(self, body: msgspec.Struct) -> None:
        """Replace the file; the new file is on the disk when this returns."""
        self.prepare_save(body)()

    def prepare_save(self, body: msgspec.Struct) -> Callable[[], None]:
        """A function that saves `body` in any thread; it does nothing once a newer version was saved."""
        return partial(self._save_version, next(self._versions), body)

    def _save_version(self, version: int, body: msgspec.Struct) -> None:
        text = pretty(msgspec.json.decode(encode_body(body))).encode()
        with self._writing:
            if version > self._written_version:
                self._replace(text)
                self._written_version = version

    def _replace(self, text: bytes) -> None:
        try:
            self._write(text)
        except FileNotFoundError:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._write(text)
        with suppress(FileNotFoundError):
            os.replace(self._name, self._backup)
        os.replace(self._temporary, self._name)
        OS_FILES.sync_directory(self.path.parent)  # until then a power cut may bring the old file back

    def _write(self, text: bytes) -> None:
        with open(self._temporary, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())


class SavedTable(ABC):
    """A table with a file of its own. A change marks it as unsaved; a service saves it soon, in any thread."""

    def __init__(self, file: JsonFile) -> None:
        self._file = file
        self._is_unsaved = False
        self.on_unsaved: Callable[[], None] = lambda: None
        """Called when there is something to save."""

    @abstractmethod
    def table(self) -> msgspec.Struct:
        """The whole table in the form in which it is saved and sent to slaves."""

    def mark_unsaved(self) -> None:
        self._is_unsaved = True
        self.on_unsaved()

    def prepare_save(self) -> Callable[[], None] | None:
        """A function that saves the table as it is now, in any thread; None when it is saved already."""
        if not self._is_unsaved:
            return None
        self._is_unsaved = False
        return self._file.prepare_save(self.table())

    def save(self) -> None:
        """Save now; the file is on the disk when this returns."""
        write = self.prepare_save()
        if write is not None:
            write()
