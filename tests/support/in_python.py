"""The functions of a module as they are where nothing is compiled."""

from __future__ import annotations

import importlib.util
from types import ModuleType
from unittest.mock import patch

from downrange import compiled


def in_python(module: ModuleType) -> ModuleType:
    """A second copy of a module, whose accelerated functions are the Python ones."""
    assert module.__file__ is not None
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_in_python", module.__file__)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    with patch.object(compiled, "steps", None):
        spec.loader.exec_module(copy)
    return copy
