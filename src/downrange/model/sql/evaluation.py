"""Turns the tree into functions: each condition becomes a function of a message's properties.

The logic has three values: True, False and None, which is SQL's null or "unknown". If a value cannot be converted, the
functions raise ValueError, and the whole expression has no result.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from downrange.model.sql.condition import Condition, Properties
from downrange.model.sql.java_values import order_doubles, to_boolean, to_double, to_int, to_long
from downrange.model.sql.tree import (
    And,
    BareProperty,
    Comparison,
    Constant,
    Equality,
    Kind,
    Membership,
    Negated,
    Node,
    Not,
    Or,
    Property,
    TextSearch,
)

_TESTS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "=": operator.eq,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
# The operator after an exchange of the two sides.
_MIRRORED: Final = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
_FROM_TEXT: Final[dict[Kind, Callable[[str], Any]]] = {
    Kind.INT: to_int,
    Kind.LONG: to_long,
    Kind.DOUBLE: to_double,
    Kind.BOOLEAN: to_boolean,
}
_SEARCHES: Final[dict[str, Callable[[str, str], bool]]] = {
    "CONTAINS": str.__contains__,
    "STARTSWITH": str.startswith,
    "ENDSWITH": str.endswith,
}


class _Operand(NamedTuple):
    kind: Kind
    value: Callable[[Properties], Any]


def condition_of(node: Node) -> Condition:
    """The function of a condition. It raises ValueError when a property cannot be converted to the needed type."""
    match node:
        case Constant(value=bool() | None as answer):
            return lambda properties: answer
        case BareProperty(name):
            return lambda properties: None if properties(name) is None else False
        case Not(operand):
            return _negation(condition_of(operand))
        case And(operands):
            return _joined(tuple(map(condition_of, operands)), decisive=False)
        case Or(operands):
            return _joined(tuple(map(condition_of, operands)), decisive=True)
        case Membership(name, texts, is_negated):
            return _membership(name, texts, is_negated)
        case TextSearch(how, operand, searched, is_negated):
            return _text_search(_SEARCHES[how], _operand_of(operand), searched, is_negated)
        case Comparison(sign, left, right):
            return _with_constant(sign, left, right) or _comparison(sign, _operand_of(left), _operand_of(right))
        case Equality(left, right):
            return _with_constant("=", left, right) or _equality(_operand_of(left), _operand_of(right))
        case _:
            raise AssertionError(f"{node} is no condition")


def _operand_of(node: Node) -> _Operand:
    match node:
        case Constant(kind, value):
            return _Operand(kind, lambda properties: value)
        case Property(name):
            return _Operand(Kind.TEXT, lambda properties: properties(name))
        case Negated(inner):
            return _negative(_operand_of(inner))
        case _:
            return _Operand(Kind.BOOLEAN, condition_of(node))


def _negative(operand: _Operand) -> _Operand:
    """The negative of a number; of anything else null, even of a property that looks like a number."""
    value = operand.value
    if operand.kind.is_number:
        return _Operand(operand.kind, lambda properties: -value(properties))

    def nothing(properties: Properties) -> None:
        value(properties)  # raises if the value cannot be computed

    return _Operand(Kind.NULL, nothing)


# --- logic


def _negation(condition: Condition) -> Condition:
    def negated(properties: Properties) -> bool | None:
        answer = condition(properties)
        return None if answer is None else not answer

    return negated


def _joined(conditions: tuple[Condition, ...], decisive: bool) -> Condition:
    """AND, which the first False decides, or OR, which the first True decides."""

    def joined(properties: Properties) -> bool | None:
        result: bool | None = not decisive
        for condition in conditions:
            answer = condition(properties)
            if answer is decisive:
                return decisive
            if answer is None:
                result = None
        return result

    return joined


# --- texts


def _membership(name: str, texts: frozenset[str], is_negated: bool) -> Condition:
    def is_member(properties: Properties) -> bool | None:
        text = properties(name)
        return None if text is None else (text in texts) is not is_negated

    return is_member


def _text_search(found: Callable[[str, str], bool], operand: _Operand, searched: str, is_negated: bool) -> Condition:
    kind, value = operand

    def search(properties: Properties) -> bool:
        text = value(properties)
        # Without a text to search in, or to search for, the answer is False, also for the negated operator.
        if text is None or kind is not Kind.TEXT or not searched:
            return False
        return found(text, searched) is not is_negated

    return search


# --- comparisons


def _with_constant(sign: str, left: Node, right: Node) -> Condition | None:
    """One function for the usual case: the comparison of a property with a constant."""
    if sign != "=" and not isinstance(left, Property):  # the two sides of an equality differ: see _equality
        left, right, sign = right, left, _MIRRORED[sign]
    constant = _constant_of(right)
    if not isinstance(left, Property) or constant is None:
        return None
    name, test, value = left.name, _TESTS[sign], constant.value
    if constant.kind is Kind.TEXT:

        def is_same(properties: Properties) -> bool | None:
            text = properties(name)
            return None if text is None else text == value

        return is_same
    convert = _above_all_if_nan if constant.kind is Kind.DOUBLE else _FROM_TEXT[constant.kind]

    def compare(properties: Properties) -> bool | None:
        text = properties(name)
        return None if text is None else test(convert(text), value)

    return compare


def _constant_of(node: Node) -> Constant | None:
    match node:
        case Constant(kind) if kind is not Kind.NULL:
            return node
        case Negated(Constant(kind, value)) if kind.is_number:
            assert isinstance(value, int | float)
            return Constant(kind, -value)
        case _:
            return None


def _above_all_if_nan(text: str) -> float:
    """The number, or infinity for NaN: Java takes NaN for the largest double, and constants are finite."""
    number = to_double(text)
    return number if number == number else float("inf")


def _comparison(sign: str, left: _Operand, right: _Operand) -> Condition:
    test, order = _TESTS[sign], _ordering(left.kind, right.kind)

    def compare(properties: Properties) -> bool | None:
        first = left.value(properties)
        if first is None:
            return None
        second = right.value(properties)
        return None if second is None else test(order(first, second), 0)

    return compare


def _ordering(left: Kind, right: Kind) -> Callable[[Any, Any], int]:
    """A function that gives -1, 0 or 1 for two values of these kinds, which are numbers or texts that are numbers."""
    if left is Kind.TEXT and right is Kind.TEXT:
        return lambda first, second: order_doubles(to_double(first), to_double(second))
    if left is Kind.TEXT:
        convert = _FROM_TEXT.get(right, to_double)
        return lambda first, second: order_doubles(convert(first), second)
    if right is Kind.TEXT:
        convert = _FROM_TEXT.get(left, to_double)
        return lambda first, second: order_doubles(first, convert(second))
    if Kind.DOUBLE in (left, right):
        return lambda first, second: order_doubles(float(first), float(second))
    return lambda first, second: (first > second) - (first < second)


def _equality(left: _Operand, right: _Operand) -> Condition:
    """Equality: null equals null; null = value is unknown; value = null is False. IS NULL relies on this."""
    same = _sameness(left.kind, right.kind)

    def equal(properties: Properties) -> bool | None:
        first, second = left.value(properties), right.value(properties)
        if first is None:
            return True if second is None else None
        return False if second is None else same(first, second)

    return equal


def _sameness(left: Kind, right: Kind) -> Callable[[Any, Any], bool]:
    """A function that tells whether two values of these kinds, neither of them null, are equal."""
    if left is right:
        return operator.eq
    if left is Kind.BOOLEAN and right is Kind.TEXT:
        return _refuse_text
    if right is Kind.TEXT and left.is_number:
        return lambda first, second: bool(first == _FROM_TEXT[left](second))
    if left is Kind.TEXT and right is not Kind.NULL:
        return lambda first, second: bool(_FROM_TEXT[right](first) == second)
    if left.is_number and right.is_number:
        order = _ordering(left, right)
        return lambda first, second: order(first, second) == 0
    return lambda first, second: False


def _refuse_text(first: bool, second: str) -> bool:
    raise ValueError(f"a condition cannot be compared with the text {second!r}")
