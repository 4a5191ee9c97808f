"""Random expressions, evaluated by the broker and by a second evaluator that shares nothing with it.

The second one keeps to Java's way: it walks the tree anew for each message, carries the class of every value along,
and converts by a table of the few texts that are used here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from downrange.model.sql.errors import SqlError
from downrange.model.sql.expression import compile_sql

# text -> what Java's Integer, Long and Double make of it; missing: NumberFormatException
NUMBERS: dict[str, dict[str, float]] = {
    "0": {"Integer": 0, "Long": 0, "Double": 0.0},
    "1": {"Integer": 1, "Long": 1, "Double": 1.0},
    "+2": {"Integer": 2, "Long": 2, "Double": 2.0},
    "-1": {"Integer": -1, "Long": -1, "Double": -1.0},
    "-0.0": {"Double": -0.0},
    "1.0": {"Double": 1.0},
    " 1.5 ": {"Double": 1.5},
    "2147483647": {"Integer": 2147483647, "Long": 2147483647, "Double": 2147483647.0},
    "2147483648": {"Long": 2147483648, "Double": 2147483648.0},
    "9223372036854775808": {"Double": 9223372036854775808.0},
    "NaN": {"Double": math.nan},
    "Infinity": {"Double": math.inf},
    "x": {},
    "it's": {},
    "": {},
    "true": {},
    "TRUE": {},
}
TEXTS = sorted(NUMBERS)
NAMES = ("a", "b", "TAGS")
LEVELS = {"or": 1, "and": 2, "eq": 3, "ne": 3, "null": 3, "compare": 4, "between": 4, "in": 4, "search": 4}

Tree = tuple[Any, ...]


class Refused(Exception):
    """Java does not compile this."""


class Failed(Exception):
    """Java throws while evaluating this."""


# --- trees and their texts

literals = st.one_of(
    st.sampled_from([0, 1, 2, 2147483647, 2147483648, 9223372036854775807]).map(
        lambda value: ("constant", "Integer" if value < 2**31 else "Long", value)
    ),
    st.sampled_from([0.5, 1.0, 1.5, 2147483648.0, 1e300]).map(lambda value: ("constant", "Double", value)),
    st.sampled_from(TEXTS).map(lambda value: ("constant", "String", value)),
    st.sampled_from([True, False]).map(lambda value: ("constant", "Boolean", value)),
    st.just(("constant", "null", None)),
)
leaves = st.one_of(st.sampled_from(NAMES).map(lambda name: ("property", name)), literals)
flags = st.booleans()


def grow(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    return st.one_of(
        st.tuples(st.sampled_from(["and", "or", "eq", "ne"]), inner, inner),
        st.tuples(st.just("compare"), st.sampled_from(["<", "<=", ">", ">="]), inner, inner),
        st.tuples(st.just("between"), flags, inner, inner, inner),
        st.tuples(st.just("in"), flags, inner, st.lists(st.sampled_from(TEXTS), min_size=1, max_size=6)),
        st.tuples(
            st.just("search"),
            st.sampled_from(["CONTAINS", "STARTSWITH", "ENDSWITH"]),
            flags,
            inner,
            st.sampled_from(["", "1", "0", "t's"]),
        ),
        st.tuples(st.just("null"), flags, inner),
        st.tuples(st.sampled_from(["not", "minus", "plus"]), inner),
    )


# Most random trees do not compile; these nearly all do.
names = st.sampled_from(NAMES).map(lambda name: ("property", name))
numbers = literals.filter(lambda tree: tree[1] in ("Integer", "Long", "Double"))
values = st.one_of(names, names, numbers, st.tuples(st.just("minus"), st.one_of(names, numbers)))
atoms = st.one_of(
    st.tuples(st.just("compare"), st.sampled_from(["<", "<=", ">", ">="]), values, values),
    st.tuples(st.sampled_from(["eq", "ne"]), values, st.one_of(values, literals)),
    st.tuples(st.just("between"), flags, values, values, values),
    st.tuples(st.just("in"), flags, names, st.lists(st.sampled_from(TEXTS), min_size=1, max_size=6)),
    st.tuples(st.just("null"), flags, values),
    leaves.filter(lambda tree: tree[0] == "property" or tree[1] in ("Boolean", "null")),
)
conditions = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["and", "or", "eq", "ne"]), inner, inner),
        st.tuples(st.just("null"), flags, inner),
        st.tuples(st.just("not"), inner),
    ),
    max_leaves=6,
)
trees = st.one_of(conditions, conditions, st.recursive(leaves, grow, max_leaves=12))


def text_of(tree: Tree, least_level: int, draw: Any) -> str:
    """The text of a tree, in parentheses where it must be or `draw` likes it."""
    text = _text_of(tree, draw)
    return f"({text})" if LEVELS.get(tree[0], 5) < least_level or draw() else text


def _text_of(tree: Tree, draw: Any) -> str:
    match tree:
        case ("constant", "String", value):
            return "'" + str(value).replace("'", "''") + "'"
        case ("constant", "Boolean" | "null", value):
            return "null" if value is None else "TRUE" if value else "False"
        case ("constant", _, value):
            return repr(value)
        case ("property", name):
            return str(name)
        case ("and" | "or" | "eq" | "ne" as kind, left, right):
            level = LEVELS[kind]
            sign = {"and": "AND", "or": "or", "eq": "=", "ne": "<>"}[kind]
            return f"{text_of(left, level, draw)} {sign} {text_of(right, level + 1, draw)}"
        case ("compare", sign, left, right):
            return f"{text_of(left, 4, draw)}{sign}{text_of(right, 5, draw)}"
        case ("between", is_negated, value, low, high):
            ends = f"{text_of(low, 5, draw)} AND {text_of(high, 5, draw)}"
            return f"{text_of(value, 4, draw)} {'NOT ' if is_negated else ''}BETWEEN {ends}"
        case ("in", is_negated, value, texts):
            listed = ", ".join(_text_of(("constant", "String", text), draw) for text in texts)
            return f"{text_of(value, 4, draw)} {'NOT ' if is_negated else ''}IN ({listed})"
        case ("search", how, is_negated, value, searched):
            quoted = _text_of(("constant", "String", searched), draw)
            return f"{text_of(value, 4, draw)} {'NOT ' if is_negated else ''}{how} {quoted}"
        case ("null", is_negated, value):
            return f"{text_of(value, 3, draw)} IS {'NOT ' if is_negated else ''}NULL"
        case ("not" | "minus" | "plus" as kind, value):
            return {"not": "NOT ", "minus": "- ", "plus": "+"}[kind] + text_of(value, 5, draw)
    raise AssertionError(tree)


# --- what Java refuses to compile


def inside_plus(tree: Tree) -> Tree:
    """A plus sign leaves no trace."""
    return inside_plus(tree[1]) if tree[0] == "plus" else tree


def is_boolean(tree: Tree) -> bool:
    tree = inside_plus(tree)
    if tree[0] == "constant":
        return tree[1] in ("Boolean", "null")
    return tree[0] not in ("property", "minus")


def check(tree: Tree) -> None:
    """Raise Refused if this does not compile as a part of an expression."""
    match tree:
        case ("and" | "or", left, right):
            check_condition(left)
            check_condition(right)
        case ("eq" | "ne", left, right):
            check(left)
            check(right)
            left, right = inside_plus(left), inside_plus(right)
            for side in (left, right):
                if side == ("constant", "null", None):
                    raise Refused
            if left[:2] == ("constant", "Boolean") and right[0] == "constant" and right[1] != "Boolean":
                raise Refused
        case ("compare", _, left, right):
            check_number(left)
            check_number(right)
        case ("between", is_negated, value, low, high):
            for side in (value, low, high):
                check_number(side)
            low, high = inside_plus(low), inside_plus(high)
            if not is_negated and low[0] == high[0] == "constant" and low[2] > high[2]:
                raise Refused
        case ("in", _, value, _):
            check(value)
            if inside_plus(value)[0] != "property":
                raise Refused
        case ("not", value):
            check_condition(value)
        case ("null", _, value) | ("minus" | "plus", value) | ("search", _, _, value, _):
            check(value)


def check_condition(tree: Tree) -> None:
    check(tree)
    if not is_boolean(tree) and inside_plus(tree)[0] != "property":
        raise Refused


def check_number(tree: Tree) -> None:
    check(tree)
    tree = inside_plus(tree)
    if is_boolean(tree) or (tree[0] == "constant" and tree[1] == "String"):
        raise Refused


# --- what Java makes of it

Value = tuple[str, Any] | None  # class and value


def evaluate(tree: Tree, properties: Mapping[str, str]) -> Value:
    match tree:
        case ("constant", kind, value):
            return None if value is None else (kind, value)
        case ("property", name):
            return ("String", properties[name]) if name in properties else None
        case ("plus", value):
            return evaluate(value, properties)
        case ("minus", value):
            found = evaluate(value, properties)
            return (found[0], -found[1]) if found is not None and found[0] in ("Integer", "Long", "Double") else None
        case ("not", value):
            return boolean(invert(condition(value, properties)))
        case ("and", left, right):
            first = condition(left, properties)
            if first is False:
                return boolean(False)
            second = condition(right, properties)
            return boolean(False if second is False else None if None in (first, second) else True)
        case ("or", left, right):
            first = condition(left, properties)
            if first is True:
                return boolean(True)
            second = condition(right, properties)
            return boolean(True if second is True else None if None in (first, second) else False)
        case ("eq", left, right):
            return boolean(equal(evaluate(left, properties), evaluate(right, properties)))
        case ("ne", left, right):
            return boolean(invert(equal(evaluate(left, properties), evaluate(right, properties))))
        case ("null", is_negated, value):
            is_null = equal(evaluate(value, properties), None)
            return boolean(invert(is_null) if is_negated else is_null)
        case ("compare", sign, left, right):
            return boolean(compare(sign, evaluate(left, properties), evaluate(right, properties)))
        case ("between", is_negated, value, low, high):
            signs = ("<", ">") if is_negated else (">=", "<=")
            ends = [("compare", sign, value, end) for sign, end in zip(signs, (low, high), strict=True)]
            return evaluate(("or" if is_negated else "and", *ends), properties)
        case ("in", is_negated, value, texts):
            found = evaluate(value, properties)
            return None if found is None else boolean((found[1] in texts) != is_negated)
        case ("search", how, is_negated, value, searched):
            found = evaluate(value, properties)
            if found is None or found[0] != "String" or searched == "":
                return boolean(False)
            text = found[1]
            at = {"CONTAINS": searched in text, "STARTSWITH": text[: len(searched)] == searched}
            hit = at.get(how, text[-len(searched) :] == searched)
            return boolean(hit != is_negated)
    raise AssertionError(tree)


def boolean(answer: bool | None) -> Value:
    return None if answer is None else ("Boolean", answer)


def invert(answer: bool | None) -> bool | None:
    return None if answer is None else not answer


def condition(tree: Tree, properties: Mapping[str, str]) -> bool | None:
    found = evaluate(tree, properties)
    if found is None:
        return None
    return found[1] if found[0] == "Boolean" else False


def equal(left: Value, right: Value) -> bool | None:
    if left is None or right is None:
        return True if left is right else None if left is None else False
    if left == right and left[0] != "Double":
        return True
    return order(left, right) == 0


def compare(sign: str, left: Value, right: Value) -> bool | None:
    if left is None or right is None:
        return None
    if left[0] == right[0] == "String":
        left, right = ("Double", converted(left[1], "Double")), ("Double", converted(right[1], "Double"))
    answer = order(left, right)
    return {"<": answer < 0, "<=": answer <= 0, ">": answer > 0, ">=": answer >= 0}[sign]


def order(left: tuple[str, Any], right: tuple[str, Any]) -> int:
    (left_class, first), (right_class, second) = left, right
    if left_class != right_class:
        if left_class == "Boolean":
            if right_class == "String":
                raise Failed  # a ClassCastException: the wrong side is converted
            return -1
        if right_class == "String":
            return order(left, (left_class, converted(second, left_class)))
        if left_class == "String":
            return order((right_class, converted(first, right_class)), right)
        if right_class == "Boolean":
            return -1
        widest = "Double" if "Double" in (left_class, right_class) else "Long"
        widen = float if widest == "Double" else int
        return order((widest, widen(first)), (widest, widen(second)))
    if left_class == "Double":
        first, second = double_rank(first), double_rank(second)
    return -1 if first < second else 1 if first > second else 0


def double_rank(number: float) -> tuple[int, float, int]:
    if math.isnan(number):
        return (1, 0.0, 0)
    return (0, number, 0 if str(number).startswith("-") else 1)


def converted(text: str, kind: str) -> Any:
    if kind == "Boolean":
        return text in ("true", "TRUE")
    if kind not in NUMBERS[text]:
        raise Failed
    return NUMBERS[text][kind]


# --- the comparison


@settings(max_examples=1000)
@given(
    tree=trees,
    messages=st.lists(st.dictionaries(st.sampled_from(NAMES), st.sampled_from(TEXTS)), min_size=1, max_size=8),
    data=st.data(),
)
def test_the_broker_agrees_with_a_naive_evaluator(
    tree: Tree, messages: list[dict[str, str]], data: st.DataObject
) -> None:
    rng = data.draw(st.randoms(use_true_random=False))
    text = text_of(tree, 1, lambda: rng.random() < 0.2)
    try:
        check_condition(tree)
    except Refused:
        with pytest.raises(SqlError) as refused:
            compile_sql(text)
        assert 1 <= refused.value.position <= len(text) + 1
        return
    expression = compile_sql(text)
    assert expression.ignored == ""
    for properties in messages:
        try:
            expected = condition(tree, properties)
        except Failed:
            with pytest.raises(ValueError, match=r".+"):
                expression.condition(properties.get)
            assert not expression.matches(properties.get)
            continue
        assert expression.condition(properties.get) is expected, (text, properties)
        assert expression.matches(properties.get) is (expected is True)


PIECES = [*"ab1.'()=<>,-+ \n*/L@", " NOT ", " AND ", " OR ", " IS ", " NULL", " IN ", " BETWEEN "]


@given(st.lists(st.sampled_from(PIECES)).map("".join))
def test_any_text_is_refused_or_compiles_as_if_it_ended_where_it_makes_no_sense(text: str) -> None:
    try:
        expression = compile_sql(text)
    except SqlError as error:
        place = error.position - 1
    else:
        place = len(text) - len(expression.ignored)
        assert text.endswith(expression.ignored)
        shorter = compile_sql(text[:place])
        assert shorter.ignored == ""
        for properties in ({}, {"a": "1", "b": "x"}, {"a": "x", "L": "1"}):
            assert shorter.matches(properties.get) is expression.matches(properties.get)
    assert 0 <= place <= len(text)
