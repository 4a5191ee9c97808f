"""The configuration in force: that of the file with the changes made while running."""

from __future__ import annotations

from downrange.broker.config import BrokerConfig
from downrange.store.config import StoreConfig


class LiveConfig:
    """Holds the two configurations by reference, so that a change reaches every part at once."""

    __slots__ = ("broker", "store")

    def __init__(self, broker: BrokerConfig, store: StoreConfig) -> None:
        self.broker = broker
        self.store = store

    @property
    def ha_address(self) -> str:
        """The address at which slaves find this broker."""
        return f"{self.broker.broker_ip2 or self.broker.broker_ip1}:{self.ha_port}"

    @property
    def ha_port(self) -> int:
        return self.store.ha_listen_port or self.broker.listen_port + 1
