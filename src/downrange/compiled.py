"""The compiled twins of what is done for every message, where they were built; see docs/how-to/compiled.md.

`steps` is the module `_steps`, or None: then everything is done in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
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
    """The compiled function or class of this name where there is one, else the Python one."""
    compiled: T = getattr(steps, python.__name__, python)  # type: ignore[attr-defined]
    return compiled


def accelerated_if_usual(python: Callable[P, R]) -> Callable[P, R]:
    """The compiled function of this name first, where there is one; for unusual input it returns None, and the Python
    function does the work."""
    compiled: Callable[P, R | None] | None = getattr(steps, python.__name__, None)
    if compiled is None:
        return python

    @wraps(python)
    def step(*args: P.args, **keywords: P.kwargs) -> R:
        done = compiled(*args, **keywords)
        return python(*args, **keywords) if done is None else done

    return step
