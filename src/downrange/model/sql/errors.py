"""The error of an SQL92 expression that cannot be compiled."""

from __future__ import annotations

from downrange.model.errors import MQError
from downrange.model.text import Text


class SqlError(MQError):
    """This expression cannot be compiled. `position` counts characters from 1."""

    def __init__(self, message: Text, position: int) -> None:
        self.position = position
        super().__init__(Text("position {position}: {message}", position=position, message=message))
