"""An SQL92 expression, ready to be asked about messages."""

from __future__ import annotations

from dataclasses import dataclass

from downrange.broker.sql.evaluation import condition_of
from downrange.broker.sql.parser import parse
from downrange.store.queue.property_filter import Condition, Properties


@dataclass(frozen=True, slots=True)
class SqlExpression:
    """A compiled expression. Has no state: any number may ask it at once.

    `ignored` is the part of the text behind the end of the expression, where RocketMQ stops reading; `names` are the
    properties that `condition` may ask for.
    """

    text: str
    ignored: str
    condition: Condition
    names: tuple[str, ...]

    def matches(self, properties: Properties) -> bool:
        """Only true is a match: neither unknown nor a value that cannot be compared."""
        try:
            return self.condition(properties) is True
        except ValueError:
            return False


def compile_sql(text: str) -> SqlExpression:
    """Read an expression; SqlError says what is wrong with it, and where."""
    node, ignored, names = parse(text)
    return SqlExpression(text, ignored, condition_of(node), tuple(sorted(names)))
