"""A compiled SQL92 expression."""

from __future__ import annotations

from dataclasses import dataclass

from downrange.model.sql.condition import Condition, Properties
from downrange.model.sql.evaluation import condition_of
from downrange.model.sql.parser import parse


@dataclass(frozen=True, slots=True)
class SqlExpression:
    """A compiled expression without state.

    `ignored` is the text behind the end of the expression, where RocketMQ stops reading; `names` are the properties
    that `condition` may look up.
    """

    text: str
    ignored: str
    condition: Condition
    names: tuple[str, ...]

    def matches(self, properties: Properties) -> bool:
        """Whether the expression is true; not if it is unknown or a value cannot be compared."""
        try:
            return self.condition(properties) is True
        except ValueError:
            return False


def compile_sql(text: str) -> SqlExpression:
    """Compile an expression; a SqlError says what is wrong with it, and where."""
    node, ignored, names = parse(text)
    return SqlExpression(text, ignored, condition_of(node), tuple(sorted(names)))
