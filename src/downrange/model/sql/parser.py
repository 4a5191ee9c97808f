"""Parses a text into a tree. This is the grammar of RocketMQ's filters, lowest precedence first:

    or         := and (OR and)*
    and        := equality (AND equality)*
    equality   := comparison ( = comparison | <> comparison | IS [NOT] NULL )*
    comparison := unary ( < unary | <= unary | > unary | >= unary
                        | [NOT] BETWEEN unary AND unary | [NOT] IN ( string , … )
                        | [NOT] CONTAINS string | [NOT] STARTSWITH string | [NOT] ENDSWITH string )*
    unary      := + unary | - unary | NOT unary | literal | name | ( or )

As in RocketMQ an expression ends where the grammar allows no more, and the rest of the text is ignored. The three text
searches came with 5.x: they are keywords only where an operator may stand, so a property may have such a name.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from downrange.model.sql.errors import SqlError
from downrange.model.sql.lexer import DECIMAL, INTEGER, NAME, STRING, Lexer, Token
from downrange.model.sql.tree import (
    FALSE,
    NULL,
    TRUE,
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
    is_condition,
)
from downrange.model.text import Text

# An expression nested deeper than this would exhaust the stack when it is evaluated.
MAX_DEPTH: Final = 100

_OR, _AND, _EQUALITY, _COMPARISON = 1, 2, 3, 4
_POWERS: Final = {
    "OR": _OR,
    "AND": _AND,
    **dict.fromkeys(("=", "<>", "IS"), _EQUALITY),
    **dict.fromkeys(("<", "<=", ">", ">=", "BETWEEN", "IN", "NOT"), _COMPARISON),
}
_SEARCHES: Final = frozenset({"CONTAINS", "STARTSWITH", "ENDSWITH"})
_WORDS: Final = {"TRUE": TRUE, "FALSE": FALSE, "NULL": NULL}

_MAX_INT: Final = 2**31 - 1
_MAX_LONG: Final = 2**63 - 1


class Part(NamedTuple):
    """A part of the tree, where its text begins, and how deep it is nested."""

    node: Node
    position: int
    depth: int = 1


def parse(text: str) -> tuple[Node, str, frozenset[str]]:
    """The condition at the beginning of `text`, the ignored text behind it, and the properties it names."""
    parser = _Parser(text)
    part = parser.expression(_OR)
    return _condition(part), text[parser.token.position - 1 :], frozenset(parser.names)


class _Parser:
    """Parses one expression. `token` is the first unused token, `names` are the properties found so far."""

    def __init__(self, text: str) -> None:
        self._lexer = Lexer(text)
        self._nesting = 0
        self.names: set[str] = set()
        self.token = self._lexer.next()

    def expression(self, least_power: int) -> Part:
        """Parse an operand and all operators behind it with at least this precedence."""
        left = self._unary()
        # No operator of higher precedence may follow: `a IS NULL > 5` ends before `>`.
        most_power = _COMPARISON
        while least_power <= (power := self._power()) <= most_power:
            if power == _COMPARISON:
                left = self._comparison(left)
            elif power == _EQUALITY:
                left = self._equality(left)
            else:
                left = self._logic(left, power)
            most_power = power
        return left

    def _power(self) -> int:
        """The precedence of the current token; 0 when it is no operator."""
        kind = self.token.kind
        return _COMPARISON if kind == NAME and self._search() else _POWERS.get(kind, 0)

    def _search(self) -> str | None:
        word = self.token.text.upper()
        return word if self.token.kind == NAME and word in _SEARCHES else None

    def _logic(self, left: Part, power: int) -> Part:
        keyword = "OR" if power == _OR else "AND"
        parts = [left]
        while self.token.kind == keyword:
            self._advance()
            parts.append(self.expression(power + 1))
        operands = tuple(_condition(part) for part in parts)
        return _nested(And(operands) if power == _AND else Or(operands), left.position, *parts)

    def _equality(self, left: Part) -> Part:
        operator = self._advance()
        if operator.kind == "IS":
            is_negated = self._accept("NOT")
            self._expect("NULL")
            is_null = _nested(Equality(left.node, NULL), left.position, left)
            return _nested(Not(is_null.node), left.position, is_null) if is_negated else is_null
        right = self.expression(_COMPARISON)
        _check_equality(left, right)
        equal = _nested(Equality(left.node, right.node), left.position, left, right)
        return _nested(Not(equal.node), left.position, equal) if operator.kind == "<>" else equal

    def _comparison(self, left: Part) -> Part:
        operator = self._advance()
        if operator.kind in ("<", "<=", ">", ">="):
            return _compared(operator.kind, left, self._unary())
        is_negated = operator.kind == "NOT"
        if is_negated:
            operator = self.token
            if operator.kind not in ("BETWEEN", "IN") and not self._search():
                raise SqlError(
                    Text("BETWEEN, IN or a text search is expected after NOT, not {operator}", operator=operator.words),
                    operator.position,
                )
            self._advance()
        match operator.kind:
            case "BETWEEN":
                return self._between(left, is_negated)
            case "IN":
                return self._membership(left, is_negated)
            case _:
                searched = _unquoted(self._expect(STRING))
                search = TextSearch(operator.text.upper(), left.node, searched, is_negated)
                return _nested(search, left.position, left)

    def _between(self, left: Part, is_negated: bool) -> Part:
        low = self._unary()
        self._expect("AND")
        high = self._unary()
        if is_negated:
            outside = _compared("<", left, low), _compared(">", left, high)
            return _nested(Or((outside[0].node, outside[1].node)), left.position, *outside)
        inside = _compared(">=", left, low), _compared("<=", left, high)
        least, most = low.node, high.node
        if isinstance(least, Constant) and isinstance(most, Constant) and _number(most) < _number(least):
            raise SqlError(Text("nothing lies between {least} and {most}", least=least, most=most), low.position)
        return _nested(And((inside[0].node, inside[1].node)), left.position, *inside)

    def _membership(self, left: Part, is_negated: bool) -> Part:
        if not isinstance(left.node, Property):
            raise SqlError(Text("only a property can be IN a list"), left.position)
        self._expect("(")
        texts = [_unquoted(self._expect(STRING))]
        while self._accept(","):
            texts.append(_unquoted(self._expect(STRING)))
        self._expect(")")
        return Part(Membership(left.node.name, frozenset(texts), is_negated), left.position)

    def _unary(self) -> Part:
        token = self._advance()
        kind = token.kind
        if kind in ("+", "-", "NOT", "("):
            self._nesting += 1
            if self._nesting > MAX_DEPTH:
                raise _too_deep(token.position)
            part = self._nested_operand(token)
            self._nesting -= 1
            return part
        if kind == NAME:
            self.names.add(token.text)
            return Part(Property(token.text), token.position)
        if kind in _WORDS:
            return Part(_WORDS[kind], token.position)
        if kind in (STRING, INTEGER, DECIMAL):
            return Part(_literal(token), token.position)
        raise SqlError(Text("a value or a property is expected, not {token}", token=token.words), token.position)

    def _nested_operand(self, token: Token) -> Part:
        match token.kind:
            case "(":
                inner = self.expression(_OR)
                self._expect(")")
                return inner._replace(position=token.position)
            case "+":
                return self._unary()
            case "-":
                operand = self._unary()
                return _nested(Negated(operand.node), token.position, operand)
            case _:
                operand = self._unary()
                return _nested(Not(_condition(operand)), token.position, operand)

    def _advance(self) -> Token:
        token = self.token
        self.token = self._lexer.next()
        return token

    def _accept(self, kind: str) -> bool:
        if self.token.kind != kind:
            return False
        self._advance()
        return True

    def _expect(self, kind: str) -> Token:
        if self.token.kind != kind:
            raise SqlError(
                Text("{kind} is expected, not {token}", kind=kind, token=self.token.words), self.token.position
            )
        return self._advance()


def _nested(node: Node, position: int, *inner: Part) -> Part:
    depth = 1 + max(part.depth for part in inner)
    if depth > MAX_DEPTH:
        raise _too_deep(position)
    return Part(node, position, depth)


def _too_deep(position: int) -> SqlError:
    return SqlError(Text("the expression is nested more than {max_depth} deep", max_depth=MAX_DEPTH), position)


def _condition(part: Part) -> Node:
    if is_condition(part.node):
        return part.node
    if isinstance(part.node, Property):
        return BareProperty(part.node.name)
    raise SqlError(Text("a condition is expected, and this is a value"), part.position)


def _compared(operator: str, left: Part, right: Part) -> Part:
    for part in (left, right):
        node = part.node
        if is_condition(node):
            what = node if isinstance(node, Constant) else Text("a condition")
            raise SqlError(Text("{what} cannot be compared by {operator}", what=what, operator=operator), part.position)
        if isinstance(node, Constant) and not node.kind.is_number:
            raise SqlError(
                Text(
                    "the string {node} cannot be compared by {operator}: only numbers can", node=node, operator=operator
                ),
                part.position,
            )
    return _nested(Comparison(operator, left.node, right.node), left.position, left, right)


def _check_equality(left: Part, right: Part) -> None:
    for part in (left, right):
        if part.node == NULL:
            raise SqlError(Text("NULL cannot be compared: write IS NULL or IS NOT NULL"), part.position)
    if (
        isinstance(left.node, Constant)
        and isinstance(right.node, Constant)
        and left.node.kind is Kind.BOOLEAN
        and right.node.kind is not Kind.BOOLEAN
    ):
        raise SqlError(Text("{left} cannot be compared with {right}", left=left.node, right=right.node), left.position)


def _literal(token: Token) -> Constant:
    if token.kind == STRING:
        return Constant(Kind.TEXT, _unquoted(token))
    if token.kind == DECIMAL:
        number = float(token.text)
        if math.isinf(number):
            raise SqlError(Text("{token} is too large", token=token.words), token.position)
        if number == 0:
            # RocketMQ compares with Double.MIN_VALUE as the smallest number; it is the smallest positive one.
            raise SqlError(
                Text("{token} is too small: a decimal must be greater than zero", token=token.words), token.position
            )
        return Constant(Kind.DOUBLE, number)
    digits = token.text.rstrip("lL")
    if len(digits) > len(str(_MAX_LONG)) or int(digits) > _MAX_LONG:
        raise SqlError(Text("an integer may have 64 bits, and this one has more"), token.position)
    value = int(digits)
    return Constant(Kind.INT if value <= _MAX_INT else Kind.LONG, value)


def _number(constant: Constant) -> float:
    assert isinstance(constant.value, int | float)
    return constant.value


def _unquoted(token: Token) -> str:
    return token.text[1:-1].replace("''", "'")
