"""Row 11: the producer of transactions, or the broker, is killed at each step."""

from __future__ import annotations

from typing import Final

from tests.chaos.row import Round, Row
from tests.support.transaction_torture import survive

TRANSACTIONS: Final = 5_000
BROKER_DEATHS: Final = 20


async def play(round_: Round) -> None:
    flush = round_.chance.choice(("ASYNC_FLUSH", "SYNC_FLUSH"))
    survived = await survive(
        round_.directory,
        round_.chance.randrange(1 << 32),
        transactions=TRANSACTIONS,
        broker_deaths=BROKER_DEATHS,
        flush=flush,
    )
    report = round_.judge(survived.events)
    round_.figures["transactions"] += report.sends
    round_.figures["kills"] += survived.lives - 1 + BROKER_DEATHS


ROW: Final = Row(
    11,
    "transactions",
    "transactions with the producer or broker killed at each step",
    {"transactions": 100_000},
    "each transaction ends as its owner said; none is left open",
    play,
    "eight transactions run at a time; a producer dies at any step, the broker at any moment; `store check` in the end",
    lanes=4,
)
