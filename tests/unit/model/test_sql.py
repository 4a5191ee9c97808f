"""The table of cases: expression, properties, result. Java's own results are in the specification of its filters."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from downrange.model.sql.errors import SqlError
from downrange.model.sql.expression import compile_sql
from downrange.model.sql.java_values import order_doubles, to_double, to_int, to_long
from downrange.model.sql.parser import MAX_DEPTH

ERROR = "error"


def result(expression: str, properties: Mapping[str, str]) -> bool | str | None:
    compiled = compile_sql(expression)
    try:
        answer = compiled.condition(properties.get)
    except ValueError:
        assert not compiled.matches(properties.get)
        return ERROR
    assert compiled.matches(properties.get) is (answer is True)
    return answer


@pytest.mark.parametrize(
    ("expression", "properties", "expected"),
    [
        # from the specification
        ("a = 1", {"a": "1"}, True),
        ("a = 1", {"a": "1.0"}, ERROR),
        ("a <> 1", {}, None),
        ("a > 3", {"a": "10"}, True),
        ("a > 3.5", {"a": "4"}, True),
        ("a > b", {"a": "10", "b": "9"}, True),
        ("a NOT IN ('x','y')", {}, None),
        ("a IS NOT NULL", {}, False),
        ("a = TRUE", {"a": "TRUE"}, True),
        ("a", {"a": "true"}, False),
        ("a OR TRUE", {}, True),
        ("NOT (a = 1 OR b = 2)", {"b": "3"}, None),
        # a string against a number takes the number's type, whatever stands beside it
        ("a = 1", {"a": "+1"}, True),
        ("a = 1", {"a": " 1"}, ERROR),
        ("a = 1", {"a": "1_0"}, ERROR),
        ("a <> 1", {"a": "abc"}, ERROR),
        ("a = 1 OR TRUE", {"a": "abc"}, ERROR),
        ("TRUE OR a = 1", {"a": "abc"}, True),
        ("FALSE AND a = 1", {"a": "abc"}, False),
        ("b = 1 AND a = 1", {"a": "abc"}, ERROR),
        ("a = 1", {"a": "2147483648"}, ERROR),
        ("a < 2147483648", {"a": "2147483648"}, False),
        ("a <= 2147483648", {"a": "-9223372036854775808"}, True),
        ("a = -2147483648", {"a": "3000000000"}, False),
        ("a = -2147483647", {"a": "3000000000"}, ERROR),
        ("a > 1.5", {"a": " 2e0f "}, True),
        ("a > 1.5", {"a": "0x1p2"}, True),
        ("a > 1.5", {"a": "2_0"}, ERROR),
        ("a > 1.5", {"a": ""}, ERROR),
        ("a > 1.5", {"a": "NaN"}, True),
        ("a = 1.5", {"a": "NaN"}, False),
        ("a < 1.5", {"a": "NaN"}, False),
        ("a < b", {"a": "Infinity", "b": "NaN"}, True),
        ("a < b", {"a": "-0.0", "b": "0"}, True),
        ("a >= b", {"a": "NaN", "b": "NaN"}, True),
        ("a > b", {"a": "x", "b": "9"}, ERROR),
        ("a = b", {"a": "1", "b": "1.0"}, False),
        ("a = b", {}, True),
        ("a = b", {"b": "1"}, None),
        ("a = b", {"a": "1"}, False),
        ("a <> b", {"a": "1"}, True),
        ("1 = a", {"a": "1"}, True),
        ("1 = a", {}, False),
        ("1 < a", {"a": "2"}, True),
        ("1 < a", {}, None),
        ("1.5 < a", {"a": "2"}, True),
        ("'x' = a", {"a": "x"}, True),
        ("1 = '1'", {}, True),
        ("'1' = 1", {}, True),
        ("1 = 'x'", {}, ERROR),
        ("1 = 1.0", {}, True),
        ("2147483648 > 1", {}, True),
        ("1 < 1.5", {}, True),
        ("-1.5 < -1", {}, True),
        ("-a = 1", {"a": "1"}, None),
        ("a = -b", {"a": "1", "b": "1"}, False),
        ("a = - -1", {"a": "1"}, True),
        ("a > -5", {"a": "-3"}, True),
        ("-5 < a", {"a": "-3"}, True),
        ("-'1' IS NULL", {}, True),
        ("-(a = 1) IS NULL", {"a": "x"}, ERROR),
        # booleans
        ("a = FALSE", {"a": "yes"}, True),
        ("TRUE = a", {"a": "true"}, ERROR),
        ("TRUE = a", {}, False),
        ("'true' = TRUE", {}, True),
        ("5 = TRUE", {}, False),
        ("(a = 1) = 5", {"a": "1"}, False),
        ("a = 1 = TRUE", {"a": "1"}, True),
        ("TRUE = FALSE", {}, False),
        ("(a = 1) = b", {"a": "1", "b": "true"}, ERROR),
        ("NOT a", {"a": "true"}, True),
        ("NOT a", {}, None),
        ("NOT a = 1", {"a": "1"}, False),
        ("NULL", {}, None),
        ("NOT NULL", {}, None),
        ("TRUE AND NULL", {}, None),
        ("NULL AND FALSE", {}, False),
        ("NULL OR TRUE", {}, True),
        ("FALSE OR NULL OR FALSE", {}, None),
        ("TRUE", {}, True),
        # null
        ("a IS NULL", {}, True),
        ("a IS NULL", {"a": ""}, False),
        ("5 IS NULL", {}, False),
        ("NULL IS NULL", {}, True),
        ("(a > 1) IS NULL", {}, True),
        ("a IS NOT NULL AND a = 'hello'", {"a": "hello"}, True),
        # lists and ranges
        ("a IN ('x', 'it''s')", {"a": "it's"}, True),
        ("(a) IN ('x')", {"a": "y"}, False),
        ("+a NOT IN ('x')", {"a": "y"}, True),
        ("a BETWEEN 2 AND 10", {"a": "2"}, True),
        ("a BETWEEN 2 AND 10", {"a": "11"}, False),
        ("a BETWEEN 1 AND 2.5", {"a": "2"}, True),
        ("a BETWEEN 1 AND 2.5", {"a": "2.1"}, ERROR),
        ("a BETWEEN -1 AND -5", {"a": "-3"}, False),
        ("a NOT BETWEEN 2 AND 10", {"a": "1"}, True),
        ("a NOT BETWEEN 3 AND 1", {"a": "2"}, True),
        ("a NOT BETWEEN 2 AND 10", {}, None),
        ("a BETWEEN b AND 10", {"a": "5", "b": "3"}, True),
        # precedence
        ("a = 1 OR b = 2 AND c = 3", {"a": "1", "b": "2", "c": "4"}, True),
        ("(a = 1 OR b = 2) AND c = 3", {"a": "1", "b": "2", "c": "4"}, False),
        ("a BETWEEN 1 AND 2 AND b = 1", {"a": "1", "b": "1"}, True),
        ("a between 1 and 2 Or TAGS = 'TagB'", {"TAGS": "TagB"}, True),
        # words
        ("a = 1 -- and so on\n AND b = 2", {"a": "1", "b": "2"}, True),
        ("a /* * / ** */ = /**/ 1", {"a": "1"}, True),
        ("$_x9 = 5L", {"$_x9": "5"}, True),
        ("A = 1", {"a": "1"}, None),
        ("a = .5", {"a": "0.5"}, True),
        ("a = 5.", {"a": "5"}, True),
        ("a = 5.E-1", {"a": "0.5"}, True),
        ("a = 00.5", {"a": "0.5"}, True),
        ("a = ''", {"a": "x"}, False),
        # 5.x
        ("a CONTAINS 'b'", {"a": "abc"}, True),
        ("a NOT CONTAINS 'b'", {"a": "abc"}, False),
        ("a NOT CONTAINS 'b'", {}, False),
        ("a CONTAINS ''", {"a": "abc"}, False),
        ("a NOT CONTAINS ''", {"a": "abc"}, False),
        ("5 NOT CONTAINS '5'", {}, False),
        ("a startswith 'ab' AND a ENDSWITH 'bc'", {"a": "abc"}, True),
        ("contains = 1 AND STARTSWITH CONTAINS '2'", {"contains": "1", "STARTSWITH": "2"}, True),
    ],
)
def test_result(expression: str, properties: dict[str, str], expected: bool | str | None) -> None:
    assert result(expression, properties) is expected


@pytest.mark.parametrize(
    ("expression", "position", "complaint"),
    [
        ("", 1, "a value or a property is expected, not the end"),
        ("a >", 4, "a value or a property is expected, not the end"),
        ("a = 1 AND", 10, "a value or a property is expected, not the end"),
        ("a > 'x' AND", 5, "the string 'x' cannot be compared by >: only numbers can"),
        ("a >= TRUE", 6, "TRUE cannot be compared by >="),
        ("a > 1 > 2", 1, "a condition cannot be compared by >"),
        ("a < NULL", 5, "NULL cannot be compared by <"),
        ("a BETWEEN 'a' AND 'b'", 11, "the string 'a' cannot be compared by >=: only numbers can"),
        ("a BETWEEN 3 AND 1", 11, "nothing lies between 3 and 1"),
        ("a BETWEEN 1", 12, "AND is expected, not the end"),
        ("a = NULL", 5, "NULL cannot be compared: write IS NULL or IS NOT NULL"),
        ("NULL <> a", 1, "NULL cannot be compared: write IS NULL or IS NOT NULL"),
        ("TRUE = 5", 1, "TRUE cannot be compared with 5"),
        ("TRUE = 'it''s'", 1, "TRUE cannot be compared with 'it''s'"),
        ("a IN (1, 2)", 7, "a string is expected, not 1"),
        ("a IN ()", 7, "a string is expected, not )"),
        ("a IN ('x' 'y')", 11, ") is expected, not 'y'"),
        ("-a IN ('x')", 1, "only a property can be IN a list"),
        ("a NOT 5", 7, "BETWEEN, IN or a text search is expected after NOT, not 5"),
        ("a IS 5", 6, "NULL is expected, not 5"),
        ("a IS NOT 5", 10, "NULL is expected, not 5"),
        ("a CONTAINS b", 12, "a string is expected, not b"),
        ("5", 1, "a condition is expected, and this is a value"),
        ("a = 1 AND 'x'", 11, "a condition is expected, and this is a value"),
        ("NOT -a", 5, "a condition is expected, and this is a value"),
        ("(a = 1", 7, ") is expected, not the end"),
        ("a = 9223372036854775808", 5, "an integer may have 64 bits, and this one has more"),
        ("a = " + "9" * 5000, 5, "an integer may have 64 bits, and this one has more"),
        ("a = 0.0", 5, "0.0 is too small: a decimal must be greater than zero"),
        ("a = 1e-999", 5, "1e-999 is too small: a decimal must be greater than zero"),
        ("a = 1e999", 5, "1e999 is too large"),
        ("a = 'x", 5, "this string has no closing quote"),
        ("a = /* x", 5, "this comment has no end"),
        ("a != 1", 3, "unequal is written <>, not !="),
        ("a = 1 @", 7, "the character '@' means nothing here"),
        ("a.b = 1", 2, "the character '.' means nothing here"),
        ("a\u00a0= 1", 2, "the character '\\xa0' means nothing here"),
    ],
)
def test_what_does_not_compile_is_refused_with_its_position(expression: str, position: int, complaint: str) -> None:
    with pytest.raises(SqlError) as refused:
        compile_sql(expression)
    assert refused.value.position == position
    assert str(refused.value) == f"position {position}: {complaint}"


@pytest.mark.parametrize(
    ("expression", "same_as", "ignored"),
    [
        ("a LIKE 'x%'", "a", "LIKE 'x%'"),
        ("a = 01", "a = 0", "1"),
        ("a = 1 b = 2 @", "a = 1", "b = 2 @"),
        ("a = 1 )", "a = 1", ")"),
        ("a IS NULL > 5", "a IS NULL", "> 5"),
        ("a = 1 AND b IS NULL IN ('x')", "a = 1 AND b IS NULL", "IN ('x')"),
        ("a = 0l", "a = 0", "l"),
        ("a = 1 -- no newline", "a = 1", "-- no newline"),
        ("a = 1 /* all */  ", "a = 1", ""),
    ],
)
def test_text_behind_the_end_is_ignored_and_reported(expression: str, same_as: str, ignored: str) -> None:
    assert compile_sql(expression).ignored == ignored
    for value in (None, "0", "1", "x"):
        properties = {} if value is None else {"a": value}
        assert result(expression, properties) is result(same_as, properties)


@pytest.mark.parametrize(
    "expression",
    [
        "(" * MAX_DEPTH + "a" + ")" * MAX_DEPTH,
        "NOT " * (MAX_DEPTH - 1) + "a",
        "a" + " IS NULL" * (MAX_DEPTH - 1),
        " OR ".join(f"a = {number}" for number in range(20_000)),
    ],
)
def test_what_is_nested_or_long_still_evaluates(expression: str) -> None:
    compile_sql(expression).condition({"a": "7"}.get)


@pytest.mark.parametrize(
    "expression",
    [
        "(" * 100_000 + "a",
        "NOT " * 100_000 + "a",
        "a = " + "-" * 100_000 + "1",
        "a" + " IS NULL" * 100_000,
        "a" + " = 1" * 100_000,
        "(" * 60 + "a" + " IS NULL" * 60 + ")" * 60 + " IS NULL" * 60,
    ],
)
def test_an_expression_that_is_nested_too_deep_is_refused(expression: str) -> None:
    with pytest.raises(SqlError, match=f"nested more than {MAX_DEPTH} deep"):
        compile_sql(expression)


def test_only_the_properties_that_matter_are_looked_up() -> None:
    asked: list[str] = []

    def look_up(name: str) -> str | None:
        asked.append(name)
        return "1"

    compile_sql("a = 1 OR b = 2").condition(look_up)
    assert asked == ["a"]


def test_numbers_are_read_as_java_reads_them() -> None:
    assert [to_int(text) for text in ("0", "-0", "+7", "007", "2147483647", "-2147483648", "٣")] == [
        0, 0, 7, 7, 2147483647, -2147483648, 3,
    ]  # fmt: skip
    assert to_long("9223372036854775807") == 9223372036854775807
    for text in ("", "+", "1.0", "1 ", "1_0", "0x1", "²", "2147483648"):
        with pytest.raises(ValueError, match=r"integer|range|invalid"):
            to_int(text)
    assert [to_double(text) for text in ("1", "1.", ".5", "1e2", "1D", "-1.5f", "\t1\n", "0x.8p1", "1e999")] == [
        1, 1, 0.5, 100, 1, -1.5, 1, 1, math.inf,
    ]  # fmt: skip
    assert to_double("0x1p9999") == math.inf
    assert to_double("-Infinity") == -math.inf
    assert math.isnan(to_double("-NaN"))
    assert math.copysign(1, to_double("-0")) == -1
    for text in ("", ".", "e5", "1e", "inf", "nan", "0x1", "1_0", "1 2", "\u00a01"):
        with pytest.raises(ValueError, match="is no number"):
            to_double(text)


def test_doubles_are_ordered_as_java_orders_them() -> None:
    ascending = [-math.inf, -1.0, -0.0, 0.0, 1.0, math.inf, math.nan]
    for place, left in enumerate(ascending):
        for other, right in enumerate(ascending):
            assert order_doubles(left, right) == (place > other) - (place < other)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a", {"a"}),
        ("TRUE", set()),
        ("a > 5 AND NOT (b = 'a' OR c IS NULL) AND d BETWEEN 1 AND 2", {"a", "b", "c", "d"}),
        ("-a = b OR color IN ('x') OR t CONTAINS 'y'", {"a", "b", "color", "t"}),
        ("a = 1 behind the end", {"a"}),
    ],
)
def test_an_expression_knows_what_it_may_ask_for(text: str, names: set[str]) -> None:
    expression = compile_sql(text)
    assert set(expression.names) == names
    asked: set[str] = set()

    def remember(name: str) -> None:
        asked.add(name)

    expression.matches(remember)
    assert asked <= names
