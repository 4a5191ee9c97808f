"""The error tree that model/errors.py draws is the tree of the classes."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator

import downrange
from downrange.model import errors
from downrange.model.errors import MQError, StoreError
from downrange.model.record import CorruptRecord

_LINE = re.compile(r"^(?P<indent>[│ ]*(?:[├└]── )?)(?P<names>[A-Z]\w+(?:, [A-Z]\w+)*)  +(?P<path>[a-z][\w/]+\.py)$")

# Name of an error, the name of its parent, the file it stands in.
Drawn = tuple[str, str, str]


def drawn() -> Iterator[Drawn]:
    parents = ["Exception"]
    for line in (errors.__doc__ or "").splitlines():
        found = _LINE.match(line)
        if found is None:
            assert "──" not in line, f"not a line of the drawing: {line}"
            continue
        depth = len(found["indent"]) // 4
        del parents[depth + 1 :]
        names = found["names"].split(", ")
        for name in names:
            yield name, parents[depth], found["path"]
        parents.append(names[-1])


def real(error: type[Exception]) -> Iterator[Drawn]:
    yield (
        error.__name__,
        error.__bases__[0].__name__,
        error.__module__.removeprefix("downrange.").replace(".", "/") + ".py",
    )
    for child in error.__subclasses__():
        if child.__module__.startswith("downrange."):
            yield from real(child)


def test_the_drawing_is_the_tree_of_the_classes() -> None:
    for module in pkgutil.walk_packages(downrange.__path__, "downrange."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    assert sorted(drawn()) == sorted(real(MQError))


def test_an_unreadable_record_is_an_error_of_the_store() -> None:
    assert issubclass(CorruptRecord, StoreError)
