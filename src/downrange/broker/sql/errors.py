"""What can be wrong with an SQL92 expression."""

from __future__ import annotations

from downrange.model.errors import MQError


class SqlError(MQError):
    """This expression cannot be compiled. `position` counts characters from 1."""

    def __init__(self, message: str, position: int) -> None:
        self.position = position
        super().__init__(f"position {position}: {message}")
