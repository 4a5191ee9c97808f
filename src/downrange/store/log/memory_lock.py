"""Keeping a mapping in memory: mlock, which Python does not offer.

Without the privilege, or beyond its limit, the kernel refuses; then pages may be swapped out as any others, which costs
time and nothing else.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os

log = logging.getLogger(__name__)

_libc = ctypes.CDLL(None, use_errno=True)
for _function in (_libc.mlock, _libc.munlock):
    _function.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def lock(mapping: mmap.mmap) -> bool:
    """Keep the pages of a mapping in memory, as long as it lives or until `unlock`; whether the kernel agreed."""
    if _libc.mlock(_address(mapping), len(mapping)) == 0:
        return True
    log.info("memory cannot be locked bytes=%d reason=%s", len(mapping), os.strerror(ctypes.get_errno()))
    return False


def unlock(mapping: mmap.mmap) -> None:
    _libc.munlock(_address(mapping), len(mapping))


def _address(mapping: mmap.mmap) -> int:
    # The view that tells the address is gone when this returns, so it does not keep the mapping from being closed.
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))
