"""The compiled twins of what is done for every message, where they were built; see docs/how-to/compiled.md.

`steps` is the module `_steps`, or None: then everything is done in Python.
"""

from __future__ import annotations

from downrange.settings import wants_pure_python

try:
    if wants_pure_python():
        raise ImportError("DOWNRANGE_PURE is set")
    from downrange import _steps as steps
except ImportError:  # no compiler when it was installed, or another Python now
    steps = None  # type: ignore[assignment]

__all__ = ["VARIANT", "steps"]

VARIANT = "pure" if steps is None else "compiled"
"""What `downrange --version` says."""
