"""What can go wrong with files."""

from __future__ import annotations

from downrange.model.errors import StoreError

__all__ = ["DiskFull", "FlushFailed", "StoreClosed", "StoreCorrupt", "StoreError", "StoreLocked"]


class StoreLocked(StoreError):
    """Another process has this directory open."""


class StoreCorrupt(StoreError):
    """Files of this store contradict each other in a way that must not be repaired silently."""


class DiskFull(StoreError):
    """The disk took no more bytes."""


class FlushFailed(StoreError):
    """The disk refused a sync. What was written may be lost even if a later sync succeeds: the log takes no more."""


class StoreClosed(StoreError):
    """The store was shut down, or was opened for reading only."""
