"""All rows, in the order of their numbers."""

from __future__ import annotations

from typing import Final

from tests.chaos.row import Row
from tests.chaos.rows import kill

ROWS: Final[tuple[Row, ...]] = tuple(sorted((kill.ROW,), key=lambda row: row.number))
