"""The compiled module `_steps` as `steps`, or None where it was not built; see docs/how-to/compiled.md."""

from __future__ import annotations

from downrange.settings import wants_pure_python

try:
    if wants_pure_python():
        raise ImportError("DOWNRANGE_PURE is set")
    from downrange import _steps as steps
except ImportError:  # it was installed without a compiler, or for another version of Python
    steps = None  # type: ignore[assignment]

__all__ = ["VARIANT", "steps"]

VARIANT = "pure" if steps is None else "compiled"
"""What `downrange --version` says."""
