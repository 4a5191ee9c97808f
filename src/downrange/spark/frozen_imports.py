"""What the garbage collector need not look at in a worker of Spark."""

from __future__ import annotations

import gc
import sys

_known_modules = 0


def freeze_imports() -> None:
    """Called at the begin of all work: workers collect garbage after each, and what was imported is never garbage.

    Spark and Arrow import more when they first need it, pandas above all; so this freezes again when there is more.
    """
    global _known_modules
    if len(sys.modules) != _known_modules:
        _known_modules = len(sys.modules)
        gc.freeze()
