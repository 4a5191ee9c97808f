"""All rows, in the order of their numbers."""

from __future__ import annotations

from typing import Final

from tests.chaos.row import Row
from tests.chaos.rows import bit_flips, derived_files, disk, kill, order, partition, stop, torn_states, transactions

ROWS: Final[tuple[Row, ...]] = (
    kill.ROW,
    torn_states.ROW,
    bit_flips.ROW,
    derived_files.ROW,
    disk.ROW,
    partition.ROW,
    stop.ROW,
    order.ROW,
    transactions.ROW,
)
