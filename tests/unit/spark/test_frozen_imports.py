"""What Spark's workers need not look at when they collect garbage after every task."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from downrange.spark.frozen_imports import freeze_imports


@pytest.fixture
def later() -> Iterator[ModuleType]:
    """A module that is imported after the first task."""
    freeze_imports()
    module = ModuleType("imported_later")
    yield module
    sys.modules.pop(module.__name__, None)
    gc.unfreeze()


def is_looked_at(thing: object) -> bool:
    return any(one is thing for one in gc.get_objects())


def test_what_is_imported_later_is_frozen_too(later: ModuleType) -> None:
    sys.modules[later.__name__] = later
    assert is_looked_at(later)
    freeze_imports()
    assert not is_looked_at(later)


def test_without_a_new_import_what_a_task_made_stays_collectable(later: ModuleType) -> None:
    made: list[object] = [later]
    freeze_imports()
    assert is_looked_at(made)
