"""The broker's configuration: request 26 shows it, request 25 changes keys that may change while running."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from downrange.broker.config import BLACK_LIST, REMOTELY_CHANGEABLE, BrokerConfig, shown_without_effect
from downrange.broker.live_config import LiveConfig
from downrange.broker.routes import RouteTable
from downrange.broker.topics import Topics
from downrange.clock import Clock
from downrange.protocol.bodies.admin import GetBrokerConfigResponse
from downrange.protocol.bodies.data_version import DataVersion
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command
from downrange.protocol.errors import BrokerError, NoPermission
from downrange.settings import (
    ConfigError,
    Property,
    format_properties,
    format_value,
    parse_properties,
    parse_value,
    read_properties,
    settings_of,
    to_properties,
)
from downrange.store.config import StoreConfig
from downrange.store.files import OS_FILES
from downrange.store.message_store import MessageStore
from downrange.transport.connection import Connection
from downrange.transport.tls_config import TlsMode, resolved

log = logging.getLogger(__name__)


class ConfigHandlers:
    """Shows and changes the configuration in force.

    Holds always: a request is obeyed as a whole or not at all, and every change is also in a file that the next start
    reads after `broker.conf`. This file has only the keys that were changed, so that an edited `broker.conf` still
    determines all others.
    """

    def __init__(self, config: LiveConfig, store: MessageStore, topics: Topics, path: Path, clock: Clock) -> None:
        self._config = config
        self._store = store
        self._topics = topics
        self._path = path
        self._clock = clock
        self._version = DataVersion(counter=0, timestamp=clock.now())

    @property
    def routes(self) -> RouteTable:
        return {
            RequestCode.GET_BROKER_CONFIG: self.get,
            RequestCode.UPDATE_BROKER_CONFIG: self.update,
        }

    def get(self, command: Command, connection: Connection) -> Command:
        """Request 26: show the configuration, with the keys of RocketMQ that have no effect here."""
        broker = self._config.broker
        table = shown_without_effect(broker.without_effect)
        table["useTLS"] = format_value(resolved(broker.tls).mode is TlsMode.ENFORCING)
        table |= {"brokerIP2": broker.broker_ip1 or "", "namesrvAddr": ""}  # as long as they are not set
        table |= to_properties(broker) | to_properties(self._config.store)
        table["storePathCommitLog"] = ",".join(map(str, self._config.store.commit_log_paths))
        return command.reply(header=GetBrokerConfigResponse.of(self._version), body=format_properties(table).encode())

    def update(self, command: Command, connection: Connection) -> Command:
        """Request 25: change settings; if one key or value is wrong, nothing is changed."""
        try:
            given = parse_properties(command.body_bytes.decode())
        except UnicodeDecodeError:
            raise BrokerError("the configuration is not UTF-8 text") from None
        if not BLACK_LIST.isdisjoint(given):
            raise NoPermission("Can not update config in black list.")
        if refused := given.keys() - REMOTELY_CHANGEABLE:
            allowed = ", ".join(sorted(REMOTELY_CHANGEABLE))
            raise NoPermission(f"{min(refused)} can not be updated while running; these keys can: {allowed}")
        if given:
            self._apply(given)
            changes = ", ".join(f"{key}={value.value}" for key, value in given.items())
            log.info("configuration updated %s peer=%s", changes, connection.peer)
        return command.reply()

    def _apply(self, given: Mapping[str, Property]) -> None:
        broker = replace(self._config.broker, **_changes(BrokerConfig, given))
        store = replace(self._config.store, **_changes(StoreConfig, given))
        self._save(given)
        self._config.broker = broker
        self._config.store = self._store.config = store
        self._store.set_max_message_size(store.max_message_size)
        self._version = self._version.bumped(self._clock.now())
        if "brokerPermission" in given:
            # Every registered topic shows the broker's permission: tell the name servers at once.
            self._topics.bump()

    def _save(self, given: Mapping[str, Property]) -> None:
        kept = read_properties(self._path) if self._path.exists() else {}
        table = {key: value.value for key, value in {**kept, **given}.items() if key in REMOTELY_CHANGEABLE}
        temporary = self._path.with_name(self._path.name + ".tmp")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("w", encoding="utf-8") as file:
                file.write(format_properties(table))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._path)
            OS_FILES.sync_directory(self._path.parent)
        except OSError as error:
            raise ConfigError(f"cannot write {self._path}: {error.strerror or error}; nothing was changed") from None


def _changes(config_class: type[Any], given: Mapping[str, Property]) -> dict[str, Any]:
    """Field -> new value, for the given keys that belong to this class."""
    return {
        known.field: parse_value(known, known.key, given[known.key])
        for known in settings_of(config_class)
        if known.key in given
    }
