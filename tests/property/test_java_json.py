from __future__ import annotations

import contextlib
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from downrange.protocol.java_json import JavaJsonError, canonical, loads

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
ATOMS = TEXTS | NUMBERS | st.booleans() | st.none()
SPACES = st.sampled_from(["", " ", "\n", "\t "])

Pair = tuple[str, Any]
"""A text as Java writes it, and the value it stands for."""


@st.composite
def atoms(draw: st.DrawFn) -> Pair:
    value = draw(ATOMS)
    return json.dumps(value, ensure_ascii=draw(st.booleans())), value


@st.composite
def keys(draw: st.DrawFn) -> tuple[str, str]:
    kind = draw(st.sampled_from(["text", "number", "object"]))
    if kind == "text":
        text = draw(TEXTS.filter(lambda name: name != "$ref"))
        return json.dumps(text), text
    if kind == "number":
        number = str(draw(st.integers(-(2**63), 2**63 - 1)))
        return number, number
    value = draw(st.dictionaries(TEXTS, ATOMS, max_size=3))
    return json.dumps(value), canonical(value)


def containers(inner: st.SearchStrategy[Pair]) -> st.SearchStrategy[Pair]:
    return arrays(inner) | objects(inner)


@st.composite
def arrays(draw: st.DrawFn, inner: st.SearchStrategy[Pair]) -> Pair:
    items = draw(st.lists(inner, max_size=4))
    space = draw(SPACES)
    return "[" + f"{space},{space}".join(text for text, _ in items) + "]", [value for _, value in items]


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[Pair]) -> Pair:
    members = draw(st.lists(st.tuples(keys(), inner), max_size=4))
    space = draw(SPACES)
    texts = (f"{space}{key}{space}:{space}{text}{space}" for (key, _), (text, _) in members)
    return "{" + ",".join(texts) + "}", {name: value for (_, name), (_, value) in members}


@given(st.recursive(atoms(), containers, max_leaves=20))
def test_what_java_writes_means_what_it_says(pair: Pair) -> None:
    text, value = pair
    assert loads(text.encode()) == value


@given(st.binary(max_size=200))
def test_bytes_of_any_kind_raise_nothing_unexpected(data: bytes) -> None:
    readable_or_refused(data)


PIECES = [
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    '"',
    "\\",
    "0",
    "-1",
    ".",
    "e",
    '"$ref"',
    '"$.a[0]"',
    '"a"',
    "null",
    "\\ud800",
    " ",
]


@given(st.lists(st.sampled_from(PIECES)))
def test_texts_that_look_like_json_raise_nothing_unexpected(pieces: list[str]) -> None:
    readable_or_refused("".join(pieces).encode())


def readable_or_refused(data: bytes) -> None:
    with contextlib.suppress(JavaJsonError):
        loads(data)
