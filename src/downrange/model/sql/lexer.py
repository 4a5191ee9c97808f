"""Cuts an SQL92 expression into tokens, one at a time.

One at a time because the text behind the end of an expression is never looked at: see parser.py.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from downrange.model.sql.errors import SqlError
from downrange.model.text import Text

KEYWORDS: Final = frozenset({"NOT", "AND", "OR", "BETWEEN", "IN", "TRUE", "FALSE", "NULL", "IS"})

# Kinds of tokens; the kind of a keyword or a symbol is its own text.
NAME: Final = Text("a name")
INTEGER: Final = Text("an integer")
DECIMAL: Final = Text("a decimal")
STRING: Final = Text("a string")
END: Final = Text("the end")

# A line comment must end with a newline: without one, `--` is two minus signs.
_SKIPPED: Final = re.compile(r"(?:[ \t\n\r\f]|--[^\n\r]*[\n\r]|/\*.*?\*/)*", re.DOTALL)
_EXPONENT: Final = r"(?:[eE][+-]?[0-9]+)"
_TOKEN: Final = re.compile(
    rf"(?P<decimal>[0-9]+\.[0-9]*{_EXPONENT}?|\.[0-9]+{_EXPONENT}?|[0-9]+{_EXPONENT})"
    r"|(?P<integer>0|[1-9][0-9]*[lL]?)"
    r"|(?P<string>'[^']*(?:''[^']*)*')"
    r"|(?P<name>[A-Za-z_$][A-Za-z0-9_$]*)"
    r"|(?P<symbol><>|<=|>=|[=<>(),+-])"
)
_KINDS: Final = {"decimal": DECIMAL, "integer": INTEGER, "string": STRING}


class Token(NamedTuple):
    """One word of an expression. `position` counts characters from 1."""

    kind: str
    text: str
    position: int

    @property
    def words(self) -> str:
        """The token in an error."""
        return self.kind if self.kind == END else self.text

    def __str__(self) -> str:
        return self.words


class Lexer:
    """Gives the tokens of one text, and END whenever it is asked behind the last."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def next(self) -> Token:
        """The next token; raises SqlError when the text has none here."""
        start = self._skip(self._at)
        position = start + 1
        if start == len(self._text):
            self._at = start
            return Token(END, "", position)
        found = _TOKEN.match(self._text, start)
        if found is None:
            raise SqlError(self._complaint(start), position)
        self._at = found.end()
        text = found.group()
        match found.lastgroup:
            case "symbol":
                return Token(text, text, position)
            case "name":
                keyword = text.upper()
                return Token(keyword if keyword in KEYWORDS else NAME, text, position)
            case group:
                assert group is not None
                return Token(_KINDS[group], text, position)

    def _skip(self, at: int) -> int:
        skipped = _SKIPPED.match(self._text, at)
        return at if skipped is None else skipped.end()

    def _complaint(self, start: int) -> Text:
        if self._text[start] == "'":
            return Text("this string has no closing quote")
        if self._text.startswith("/*", start):
            return Text("this comment has no end")
        if self._text.startswith("!=", start):
            return Text("unequal is written <>, not !=")
        return Text("the character '{character}' means nothing here", character=repr(self._text[start])[1:-1])
