"""The configuration in force: what the file said, with what was changed while running."""

from __future__ import annotations

from downrange.broker.config import BrokerConfig
from downrange.store.config import StoreConfig


class LiveConfig:
    """Holds the two configurations by reference, so that a change reaches every part at once."""

    __slots__ = ("broker", "store")

    def __init__(self, broker: BrokerConfig, store: StoreConfig) -> None:
        self.broker = broker
        self.store = store
