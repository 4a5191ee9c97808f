"""Reads JSON as Java peers write it.

RocketMQ's JSON writer goes beyond the standard in three ways, which this module accepts:

    {0:"10.0.0.1:10911"}                          a number in key position
    {{"brokerName":"b","queueId":0,"topic":"T"}:5}  an object in key position
    {"$ref":"$.a.b[0]"}                           a reference to an object elsewhere in the text

A number as a key becomes its text, an object as a key its compact JSON with sorted members. A reference becomes a copy
of its target; a reference that points nowhere, or at an object around it, becomes null. Standard JSON takes the fast
path. Time and memory grow with the length of the text, whatever its content; only `JavaJsonError` is raised.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

import msgspec

from downrange.model.errors import MQError

MAX_DEPTH: Final = 128
# References can multiply a text (a thousand references to one long list); no genuine body comes near this limit.
MAX_REFERENCED_VALUES: Final = 100_000

_TOKEN: Final = re.compile(
    r"""[ \t\r\n]*(?:
        (?P<string> "[^"\\]*+(?:\\.[^"\\]*+)*+" )
      | (?P<number> -?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)? )
      | (?P<mark>   [{}\[\]:,] )
      | (?P<word>   true|false|null )
      | (?P<end>    \Z )
    )""",
    re.VERBOSE | re.DOTALL,
)
_WORDS: Final = {"true": True, "false": False, "null": None}
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_PATH_STEP: Final = re.compile(r"""\.((?:[^.\[\]\\]|\\.)+)|\[(-?[0-9]+)\]|\[(["'])(.*?)\3\]""", re.DOTALL)
_MISSING: Final = object()


class JavaJsonError(MQError):
    """The text is not JSON, not even in Java's form."""


def loads(data: bytes | str) -> Any:
    """The value of `data`, made of dict (with str keys), list, str, int, float, bool and None."""
    try:
        value = msgspec.json.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        value = _TolerantReader(_text(data)).read()
    has_references = '"$ref"' in data if isinstance(data, str) else b'"$ref"' in data
    return _resolve_references(value) if has_references else value


def canonical(value: Any) -> str:
    """Compact JSON with sorted members: the name of an object in key position."""
    return msgspec.json.encode(value, order="sorted").decode()


def _text(data: bytes | str) -> str:
    if isinstance(data, str):
        return data
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise JavaJsonError(f"not UTF-8 at byte {error.start}") from None


class _TolerantReader:
    """Reads one text in one pass; a value in key position is read like any other and then turned into a string."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._kind = ""
        self._lexeme = ""
        self._at = 0  # where the current lexeme begins
        self._next = 0
        self._inside_key = False

    def read(self) -> Any:
        self._advance()
        value = self._value(0)
        if self._kind != "end":
            raise self._unexpected("the end")
        return value

    def _advance(self) -> None:
        found = _TOKEN.match(self._text, self._next)
        if found is None:
            raise JavaJsonError(f"unreadable at character {self._next}: {self._text[self._next : self._next + 20]!r}")
        assert found.lastgroup is not None
        self._kind = found.lastgroup
        self._lexeme = found[self._kind]
        self._at = found.start(self._kind)
        self._next = found.end()

    def _unexpected(self, wanted: str) -> JavaJsonError:
        return JavaJsonError(f"expected {wanted} at character {self._at}, found {self._lexeme[:20]!r}")

    def _skip(self, mark: str) -> None:
        if self._lexeme != mark or self._kind != "mark":
            raise self._unexpected(repr(mark))
        self._advance()

    def _value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise JavaJsonError(f"nested deeper than {MAX_DEPTH} at character {self._at}")
        kind, lexeme = self._kind, self._lexeme
        value: Any
        if kind == "string":
            value = self._string(lexeme)
        elif kind == "number":
            value = self._number(lexeme)
        elif kind == "word":
            value = _WORDS[lexeme]
        elif lexeme == "{":
            return self._object(depth)
        elif lexeme == "[":
            return self._array(depth)
        else:
            raise self._unexpected("a value")
        self._advance()
        return value

    def _object(self, depth: int) -> dict[str, Any]:
        self._skip("{")
        members: dict[str, Any] = {}
        while self._lexeme != "}" or self._kind != "mark":
            if members:
                self._skip(",")
            key = self._key(depth)
            self._skip(":")
            members[key] = self._value(depth + 1)
        self._advance()
        return members

    def _array(self, depth: int) -> list[Any]:
        self._skip("[")
        values: list[Any] = []
        while self._lexeme != "]" or self._kind != "mark":
            if values:
                self._skip(",")
            values.append(self._value(depth + 1))
        self._advance()
        return values

    def _key(self, depth: int) -> str:
        kind, lexeme = self._kind, self._lexeme
        if kind == "string":
            key = self._string(lexeme)
            self._advance()
            return key
        if kind in ("number", "word"):
            self._advance()
            return lexeme
        # Each level of keys within keys would double the escapes: they would grow exponentially with the depth.
        if self._inside_key:
            raise JavaJsonError(f"an object key inside an object key at character {self._at}")
        self._inside_key = True
        value = self._value(depth + 1)
        self._inside_key = False
        return canonical(value)

    def _string(self, lexeme: str) -> str:
        if "\\" not in lexeme:
            text = lexeme[1:-1]
        else:
            try:
                text = json.loads(lexeme, strict=False)
            except ValueError:
                raise JavaJsonError(f"bad escape in the string at character {self._at}") from None
        # Java strings may contain half a surrogate pair, which UTF-8 cannot encode.
        return text if text.isascii() else _SURROGATE.sub("\ufffd", text)

    def _number(self, lexeme: str) -> int | float:
        try:
            return int(lexeme) if lexeme.lstrip("-").isdigit() else float(lexeme)
        except ValueError:
            raise JavaJsonError(f"number too long at character {self._at}") from None


def _resolve_references(root: Any) -> Any:
    return _References(root).copy(root, 0)


class _References:
    """Copies a value and replaces each reference by a copy of its target."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._around: set[int] = set()  # containers that are being copied: a reference to one of them is a circle
        self._budget = MAX_REFERENCED_VALUES
        self._expanding = 0

    def copy(self, value: Any, depth: int) -> Any:
        if self._expanding:
            self._budget -= 1
            if self._budget < 0:
                raise JavaJsonError(f"references expand to more than {MAX_REFERENCED_VALUES} values")
        if not isinstance(value, (dict, list)):
            return value
        if depth > MAX_DEPTH:
            raise JavaJsonError(f"nested deeper than {MAX_DEPTH} through references")
        self._around.add(id(value))
        copied: Any
        if isinstance(value, list):
            copied = [self.copy(member, depth + 1) for member in value]
        elif len(value) == 1 and isinstance(path := value.get("$ref"), str):
            copied = self._expand(path, depth)
        else:
            copied = {key: self.copy(member, depth + 1) for key, member in value.items()}
        self._around.remove(id(value))
        return copied

    def _expand(self, path: str, depth: int) -> Any:
        target = self._follow(path)
        if target is _MISSING or id(target) in self._around:
            return None
        self._expanding += 1
        copied = self.copy(target, depth + 1)
        self._expanding -= 1
        return copied

    def _follow(self, path: str) -> Any:
        # `@` (itself), `..` (its parent) and `$` alone always point at a container around them: circles, so null.
        if not path.startswith("$"):
            return _MISSING
        value, at = self._root, 1
        while at < len(path):
            step = _PATH_STEP.match(path, at)
            if step is None:
                return _MISSING
            name, index, _, quoted = step.groups()
            value = _member(value, name.replace("\\", "") if name else quoted if quoted is not None else index)
            at = step.end()
        return value


def _member(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return value.get(name, _MISSING)
    if isinstance(value, list) and name.isdecimal() and name.isascii() and len(name) < 10 and int(name) < len(value):
        return value[int(name)]
    return _MISSING
