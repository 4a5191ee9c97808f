"""The error of an SQL92 expression that cannot be compiled."""

from __future__ import annotations

from downrange.model.errors import MQError


class SqlError(MQError):
    """This expression cannot be compiled. `position` counts characters from 1."""

    def __init__(self, message: str, position: int) -> None:
        self.position = position
        super().__init__(f"position {position}: {message}")
