"""Errors of the store."""

from __future__ import annotations

from downrange.model.errors import StoreError

__all__ = ["DiskFull", "FlushFailed", "StoreClosed", "StoreCorrupt", "StoreError", "StoreLocked"]


class StoreLocked(StoreError):
    """Another process has this directory open."""


class StoreCorrupt(StoreError):
    """Files of this store contradict each other, and it would be wrong to repair them silently."""


class DiskFull(StoreError):
    """The disk is full."""


class FlushFailed(StoreError):
    """A sync failed. Bytes may be lost even if a later sync succeeds, so the log takes no more messages."""


class StoreClosed(StoreError):
    """The store was shut down, or was opened for reading only."""
