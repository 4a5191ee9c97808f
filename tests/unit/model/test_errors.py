"""The error tree that model/errors.py draws is the tree of the classes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import downrange
from downrange.model import errors
from downrange.model.errors import StoreError
from downrange.model.record import CorruptRecord

_LINE = re.compile(r"^(?P<indent>[│ ]*(?:[├└]── )?)(?P<names>[A-Z]\w+(?:, [A-Z]\w+)*)  +(?P<path>[a-z][\w/]+\.py)$")

SOURCE = Path(downrange.__file__).parent

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


def real() -> Iterator[Drawn]:
    """All errors that the source defines. It is read, not imported: some modules cannot be without the C module."""
    classes: set[Drawn] = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef) and node.bases and isinstance(node.bases[0], ast.Name):
                classes.add((node.name, node.bases[0].id, path.relative_to(SOURCE).as_posix()))
    errors_found = {"MQError"}
    while more := {name for name, parent, _ in classes if parent in errors_found} - errors_found:
        errors_found |= more
    return (one for one in classes if one[0] == "MQError" or one[1] in errors_found)


def test_the_drawing_is_the_tree_of_the_classes() -> None:
    assert sorted(drawn()) == sorted(real())


def test_an_unreadable_record_is_an_error_of_the_store() -> None:
    assert issubclass(CorruptRecord, StoreError)
