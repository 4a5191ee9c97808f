"""All rows, in the order of their numbers."""

from __future__ import annotations

from typing import Final

from tests.chaos.row import Row
from tests.chaos.rows import (
    bit_flips,
    derived_files,
    disk,
    hostile,
    kill,
    order,
    partition,
    power_cut,
    soak,
    stop,
    torn_states,
    transactions,
)

ROWS: Final[tuple[Row, ...]] = (
    kill.ROW,
    power_cut.SYNC,
    power_cut.ASYNC,
    torn_states.ROW,
    bit_flips.ROW,
    derived_files.ROW,
    disk.ROW,
    partition.ROW,
    stop.ROW,
    order.ROW,
    transactions.ROW,
    hostile.ROW,
    soak.ROW,
)
