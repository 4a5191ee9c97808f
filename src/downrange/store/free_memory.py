"""Gives memory back to the system after many objects were freed, if the C library can do this."""

from __future__ import annotations

import ctypes

# glibc keeps freed memory below memory that is still in use; other libraries have no such function.
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_back_memory() -> None:
    """Give free memory back. It takes milliseconds: for after a start, or when thousands of queues fell asleep."""
    if _trim is not None:
        _trim(0)
