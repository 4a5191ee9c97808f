"""Keeps the garbage collector of a Spark worker from looking at imported modules."""

from __future__ import annotations

import gc
import sys

_known_modules = 0


def freeze_imports() -> None:
    """Exclude all objects that exist now from garbage collection, which a Spark worker runs after every task.

    Called before every piece of work: Spark and Arrow import more when they first need it, pandas above all.
    """
    global _known_modules
    if len(sys.modules) != _known_modules:
        _known_modules = len(sys.modules)
        gc.freeze()
