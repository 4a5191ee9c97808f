"""Giving memory back to the system after many objects have gone, where the C library can be asked for it."""

from __future__ import annotations

import ctypes

# glibc keeps what was freed below something that is still in use; others have no such function.
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_back_memory() -> None:
    """Takes some milliseconds: for the moment after a start, or after thousands of queues fell asleep."""
    if _trim is not None:
        _trim(0)
