"""Steps of the request path that may be compiled, and the one place that chooses; see docs/how-to/compiled.md.

Python is the path. `_compiled/` has some of its functions and classes in C, under the names that they have in Python.
`steps` is the module made of them, or None where it was not built or DOWNRANGE_PURE is set. The choice is made once,
when a Python module is imported: its functions and classes are marked with one of the two decorators below.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

from downrange.settings import wants_pure_python

VERSION: Final = 6
"""Raised when a compiled step and its Python twin change together; a module of another version is not used."""

try:
    if wants_pure_python():
        raise ImportError("DOWNRANGE_PURE is set")
    from downrange import _steps as steps
except ImportError:  # there was no compiler when it was installed, or this is another Python
    steps = None  # type: ignore[assignment]

if steps is not None and (found := getattr(steps, "VERSION", 0)) != VERSION:
    raise ImportError(
        f"{steps.__file__} was compiled from other sources (version {found}, these need {VERSION}): install "
        "downrange again, or set DOWNRANGE_PURE=1"
    )

__all__ = ["VARIANT", "VERSION", "accelerated", "accelerated_if_usual", "steps"]

VARIANT: Final = "pure" if steps is None else "compiled"
"""Shown by `downrange --version` and in the first log line of a server."""

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
    step: Callable[P, R | None] | None = getattr(steps, python.__name__, None)
    return python if step is None else steps.first_usual(step, python)
