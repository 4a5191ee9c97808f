"""Modules as they are without compiled steps, beside the modules that use them: for tests that compare both."""

from __future__ import annotations

import sys
from importlib import import_module
from os import environ
from types import ModuleType

from downrange.compiled import VARIANT

_PURE = "DOWNRANGE_PURE"
_PACKAGES = ("downrange", "tests")
_pure: dict[str, ModuleType] = {}


def pure_twin(name: str) -> ModuleType:
    """This module of Downrange or of the tests, imported once more into a world of its own that is pure Python.

    All that the module imports from these two packages is pure, too, and has classes of its own: what comes from both
    worlds is compared by numbers, texts and bytes.
    """
    assert VARIANT == "compiled", "there is nothing to compare"
    if name not in _pure:
        compiled = _taken_out()
        before = environ.get(_PURE)
        sys.modules.update(_pure)
        environ[_PURE] = "1"
        try:
            import_module(name)
        finally:
            _pure.update(_taken_out())
            sys.modules.update(compiled)
            del environ[_PURE]
            if before is not None:
                environ[_PURE] = before
        assert _pure["downrange.compiled"].VARIANT == "pure"
    return _pure[name]


def _taken_out() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.split(".")[0] in _PACKAGES]
    return {name: sys.modules.pop(name) for name in names}
