"""SQL92 expressions, compiled once and remembered. The log warns once about a wrong expression."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Final

from downrange.model.sql.errors import SqlError
from downrange.model.sql.expression import SqlExpression, compile_sql

log = logging.getLogger(__name__)

_MAX_REMEMBERED_LENGTH: Final = 10_000  # longer expressions are not kept: they could fill the memory


def compiled(text: str) -> SqlExpression | SqlError:
    """The compiled expression, or the error that says what is wrong with it."""
    return _compiled(text) if len(text) <= _MAX_REMEMBERED_LENGTH else _compiled.__wrapped__(text)


@lru_cache(maxsize=1000)
def _compiled(text: str) -> SqlExpression | SqlError:
    try:
        expression = compile_sql(text)
    except SqlError as error:
        log.warning("SQL92 expression cannot be used reason=%s expression=%.500r", error, text)
        return error.with_traceback(None)
    if expression.ignored:
        log.warning(
            "SQL92 expression ends early, the rest is ignored rest=%.100r expression=%.500r", expression.ignored, text
        )
    return expression
