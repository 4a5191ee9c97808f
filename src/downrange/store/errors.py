"""What can go wrong with files."""

from __future__ import annotations

from downrange.model.errors import MQError


class StoreError(MQError):
    """The store cannot do what was asked."""


class StoreLocked(StoreError):
    """Another process has this directory open."""


class StoreCorrupt(StoreError):
    """Files of this store contradict each other in a way that must not be repaired silently."""


class DiskFull(StoreError):
    """The disk took no more bytes."""
