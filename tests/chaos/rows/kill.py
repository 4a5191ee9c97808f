"""Row 1: the broker is killed again and again while clients send and consume."""

from __future__ import annotations

import asyncio
from typing import Final

from tests.chaos.row import Round, Row
from tests.chaos.stage import stage
from tests.support.checked_store import assert_clean
from tests.support.process_cluster import broker_server
from tests.support.processes import namesrv

KILLS: Final = 50
MOST_BYTES: Final = 300_000
"""Of the producer's history from the moment that the consumer goes on to the next kill: some thousand messages."""
LONG_DEATHS: Final = 0.05
LONG_SECONDS: Final = 4.0
"""Longer than a send waits: its producer gives up, and nobody knows whether the message is stored."""


async def play(round_: Round) -> None:
    directory, chance = round_.directory, round_.chance
    settings = {"flushDiskType": chance.choice(("ASYNC_FLUSH", "SYNC_FLUSH")), "mappedFileSizeCommitLog": 4 << 20}
    with namesrv(directory / "namesrv") as (_, address):
        broker = broker_server(directory, "broker-a", address, settings)
        await broker.start()
        try:
            async with stage(directory, address, broker.address) as clients:
                producer = await clients.start("batches", "0")
                consumer = await clients.start("consume")
                for _ in range(KILLS):
                    await clients.goes_on(consumer, 1)  # so that the next broker dies under a consumer, too
                    await clients.goes_on(producer, chance.randrange(MOST_BYTES))
                    await broker.kill()
                    if chance.random() < LONG_DEATHS:
                        await asyncio.sleep(LONG_SECONDS)
                    await broker.start()
                    round_.figures["kills"] += 1
                await clients.end("batches")
                await clients.until_consumed("consume")
                await clients.end("consume")
                await clients.audit([broker.address])
                round_.judge(clients.events())
            assert broker.process is not None
            round_.demand(broker.process.stop() == 0, "the broker did not end in order")
        finally:
            broker.close()
    assert_clean(directory / "broker-a")


ROW: Final = Row(
    1,
    "kill",
    "`kill -9` of the broker under load",
    {"kills": 2_000, "acknowledged": 5_000_000},
    "nothing lost, nothing wrong",
    play,
    "a producer with 32 sends at a time, half of them batches, and a push consumer work; one "
    "broker of twenty stays dead for 4 s; both ways to flush; `store check` in the end",
    lanes=3,
)
