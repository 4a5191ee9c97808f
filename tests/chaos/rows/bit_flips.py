"""Row 5: one bit of a file is flipped."""

from __future__ import annotations

from typing import Final

from tests.chaos.row import Round, Row
from tests.support.bit_flips import KINDS, survive_flip
from tests.support.damage import CrashedStore

FLIPS: Final = 500
MESSAGES: Final = 30
"""Some files of each kind; what a flip costs grows with them."""


async def play(round_: Round) -> None:
    plug_pulled = round_.chance.random() < 0.5
    crashed = CrashedStore(round_.directory / "store", round_.directory, messages=MESSAGES, plug_pulled=plug_pulled)
    for number in range(FLIPS):
        outcome = survive_flip(crashed, KINDS[number % len(KINDS)], round_.chance)
        round_.figures[outcome] += 1
        round_.figures["flips"] += 1


ROW: Final = Row(
    5,
    "bit-flips",
    "bit flips in log, queues, index, checkpoint, offsets and topics files",
    {"flips": 100_000},
    "no wrong byte is served; a flip is repaired, or `store check` reports it",
    play,
    "one bit of a crashed store is flipped; the store is then checked, opened, read as a whole, and checked again",
    in_memory=True,
    lanes=2,
)
