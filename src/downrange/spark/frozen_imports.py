"""Keep imported modules out of the garbage collection of Spark's workers."""

from __future__ import annotations

import gc
import sys

_known_modules = 0


def freeze_imports() -> None:
    """Freeze all objects that imports have made. Called at the begin of every task: workers collect garbage after each.

    Spark and Arrow import more when they first need it, pandas above all: then all objects are frozen again.
    """
    global _known_modules
    if len(sys.modules) != _known_modules:
        _known_modules = len(sys.modules)
        gc.freeze()
