"""The nodes of the tree of an SQL92 expression; evaluation.py gives them their meaning."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias


class Kind(Enum):
    """The type of a node's value, if it is not null. It is the same for every message."""

    TEXT = "text"
    INT = "int"
    LONG = "long"
    DOUBLE = "double"
    BOOLEAN = "boolean"
    NULL = "null"

    @property
    def is_number(self) -> bool:
        return self in (Kind.INT, Kind.LONG, Kind.DOUBLE)


@dataclass(frozen=True, slots=True)
class Constant:
    kind: Kind
    value: str | int | float | bool | None

    def __str__(self) -> str:
        match self.kind:
            case Kind.TEXT:
                return "'" + str(self.value).replace("'", "''") + "'"
            case Kind.BOOLEAN | Kind.NULL:
                return {True: "TRUE", False: "FALSE", None: "NULL"}[self.value]  # type: ignore[index]
            case _:
                return str(self.value)


@dataclass(frozen=True, slots=True)
class Property:
    """A property of the message: a text, or null when the message has no property of this name."""

    name: str


@dataclass(frozen=True, slots=True)
class Negated:
    operand: Node


@dataclass(frozen=True, slots=True)
class BareProperty:
    """A property where a condition is expected. It is never true: a property is a text, and no text is a boolean."""

    name: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison; `operator` is one of < <= > >=."""

    operator: str
    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class Equality:
    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class Membership:
    name: str
    texts: frozenset[str]
    is_negated: bool


@dataclass(frozen=True, slots=True)
class TextSearch:
    """A search in a text; `how` is one of CONTAINS, STARTSWITH, ENDSWITH."""

    how: str
    operand: Node
    searched: str
    is_negated: bool


@dataclass(frozen=True, slots=True)
class Not:
    operand: Node


@dataclass(frozen=True, slots=True)
class And:
    operands: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Or:
    operands: tuple[Node, ...]


Node: TypeAlias = (
    Constant | Property | Negated | BareProperty | Comparison | Equality | Membership | TextSearch | Not | And | Or
)
CONDITIONS = (BareProperty, Comparison, Equality, Membership, TextSearch, Not, And, Or)

TRUE = Constant(Kind.BOOLEAN, True)
FALSE = Constant(Kind.BOOLEAN, False)
NULL = Constant(Kind.NULL, None)


def is_condition(node: Node) -> bool:
    """Whether the value of a node is true, false or null; the constants TRUE, FALSE and NULL are conditions, too."""
    return isinstance(node, CONDITIONS) or (isinstance(node, Constant) and node.kind in (Kind.BOOLEAN, Kind.NULL))
