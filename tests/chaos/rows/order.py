"""Row 10: members of an orderly group join, leave and are killed while messages flow."""

from __future__ import annotations

import asyncio
import sys
from typing import Final

from tests.chaos.row import Round, Row
from tests.chaos.stage import stage
from tests.support.process_cluster import broker_server
from tests.support.processes import namesrv

CHANGES: Final = 12
MOST_MEMBERS: Final = 4
RATE: Final = 3_000
PROGRAM: Final = (sys.executable, "-m", "tests.chaos.hasty_broker")


async def play(round_: Round) -> None:
    directory, chance = round_.directory, round_.chance
    with namesrv(directory / "namesrv") as (_, address):
        broker = broker_server(directory, "broker-a", address, {})
        broker.program = PROGRAM
        await broker.start()
        try:
            async with stage(directory, address, broker.address) as clients:
                members = [await clients.start("orderly") for _ in range(2)]
                await clients.start("keyed", str(RATE))
                await clients.rebalanced(members)
                for _ in range(CHANGES):
                    await asyncio.sleep(chance.uniform(0, 0.5))
                    if len(members) == 1 or (len(members) < MOST_MEMBERS and chance.random() < 0.5):
                        members.append(await clients.start("orderly"))
                    else:
                        member = members.pop(chance.randrange(len(members)))
                        await (clients.kill(member) if chance.random() < 0.7 else clients.leave(member))
                    await clients.rebalanced(members)
                    round_.figures["rebalances"] += 1
                await clients.end("keyed")
                await clients.until_consumed("orderly")
                await clients.end("orderly")
                await clients.audit([broker.address])
                round_.judge(clients.events())
        finally:
            broker.close()


ROW: Final = Row(
    10,
    "order",
    "order through rebalances, members killed",
    {"rebalances": 500, "acknowledged": 5_000_000},
    "one member at a time, nothing left out, each key in order",
    play,
    "a producer sends with 16 keys, half of its sends are batches; one to four orderly push consumers join, leave and "
    "are killed; a rebalance counts when each member consumes, and all queues are consumed; the lock of a queue lives "
    "for 10 s, not for 60 s",
    in_memory=True,
    lanes=3,
)
