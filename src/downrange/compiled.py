"""The compiled steps of what is done for every message, where they were built; see docs/how-to/compiled.md.

`steps` is the module `_steps`, or None: then everything is done in Python. A function or class that has a compiled step
of its own name is decorated with `accelerated` or `accelerated_if_usual`, which choose once, at import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from downrange.settings import wants_pure_python

try:
    if wants_pure_python():
        raise ImportError("DOWNRANGE_PURE is set")
    from downrange import _steps as steps
except ImportError:  # no compiler when it was installed, or another Python now
    steps = None  # type: ignore[assignment]

__all__ = ["VARIANT", "accelerated", "accelerated_if_usual", "steps"]

VARIANT = "pure" if steps is None else "compiled"
"""What `downrange --version` says."""

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")


def accelerated(python: T) -> T:
    """The compiled step of this name where the module was built, else the Python one."""
    return getattr(steps, python.__name__, python)  # type: ignore[attr-defined]


def accelerated_if_usual(python: Callable[P, R]) -> Callable[P, R]:
    """The compiled step first where it was built; for unusual input it returns None, and Python does the work."""
    step: Callable[P, R | None] | None = getattr(steps, python.__name__, None)
    return python if step is None else steps.first_usual(step, python)
