"""The files that keep the controller id of a broker, in RocketMQ's form. [BrokerMetadata, TempBrokerMetadata]

    brokerIdentity       cluster#brokerName#id            the id is this broker's for ever
    brokerIdentity-temp  cluster#brokerName#id#checkCode  the id was applied for, and perhaps given

A change is written to another name, synced and renamed into place: a crash leaves the old file or the new one, never
half of one. An application whose answer is lost is repeated with the id and check code of the temporary file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

from downrange.settings import ConfigError

IDENTITY: Final = "brokerIdentity"
TEMPORARY: Final = "brokerIdentity-temp"


class Application(NamedTuple):
    """An id that a broker applies for, and the code that shows a repeated application to be its own."""

    broker_id: int
    check_code: str


class IdentityFiles:
    """The identity of one broker in its store directory.

    A file that names another cluster or broker is refused and never overwritten: its store belongs to another broker.
    """

    def __init__(self, directory: Path, cluster: str, broker_name: str) -> None:
        self._directory = directory
        self._names = [cluster, broker_name]

    def broker_id(self) -> int | None:
        """The id that was given to this broker; None when none was."""
        parts = self._read(IDENTITY, 3)
        return None if parts is None else int(parts[2])

    def application(self) -> Application | None:
        """The id that was applied for last, until it is known to be given."""
        parts = self._read(TEMPORARY, 4)
        return None if parts is None else Application(int(parts[2]), parts[3])

    def apply(self, application: Application) -> None:
        """Keep an application; to be called before it is sent."""
        self._write(TEMPORARY, str(application.broker_id), application.check_code)

    def accepted(self, broker_id: int) -> None:
        """Keep the id that was given."""
        self._write(IDENTITY, str(broker_id))
        self.withdraw()

    def withdraw(self) -> None:
        """Forget the application: it was accepted or refused."""
        (self._directory / TEMPORARY).unlink(missing_ok=True)

    def _read(self, name: str, count: int) -> list[str] | None:
        path = self._directory / name
        try:
            text = path.read_text("utf-8").strip()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from None
        parts = text.split("#", count - 1)
        if len(parts) != count or not parts[2].isdecimal():
            raise ConfigError(f"{path}: {text!r} is not cluster#brokerName#id; restore the file, or empty the store")
        if parts[:2] != self._names:
            raise ConfigError(
                f"{path} belongs to the broker {parts[1]} of the cluster {parts[0]}, not to {self._names[1]} of "
                f"{self._names[0]}; correct brokerName and brokerClusterName, or use another storePathRootDir"
            )
        return parts

    def _write(self, name: str, *more: str) -> None:
        path = self._directory / name
        new = path.with_name(name + ".new")
        with new.open("w", encoding="utf-8") as file:
            file.write("#".join([*self._names, *more]))
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
        directory = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
