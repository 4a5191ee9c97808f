"""Row 10: members of an orderly group join, leave and are killed while messages flow."""

from __future__ import annotations

from typing import Final

from tests.chaos.row import Round, Row
from tests.chaos.stage import stage
from tests.support.process_cluster import broker_server
from tests.support.processes import namesrv

CHANGES: Final = 15
MOST_MEMBERS: Final = 4
MOST_BYTES: Final = 2_000_000


async def play(round_: Round) -> None:
    directory, chance = round_.directory, round_.chance
    with namesrv(directory / "namesrv") as (_, address):
        broker = broker_server(directory, "broker-a", address, {})
        await broker.start()
        try:
            async with stage(directory, address, broker.address) as clients:
                members = [await clients.start("orderly") for _ in range(2)]
                producer = await clients.start("keyed", "0")
                for _ in range(CHANGES):
                    await clients.goes_on(producer, chance.randrange(MOST_BYTES))
                    if len(members) == 1 or (len(members) < MOST_MEMBERS and chance.random() < 0.5):
                        members.append(await clients.start("orderly"))
                    else:
                        member = members.pop(chance.randrange(len(members)))
                        await (clients.kill(member) if chance.random() < 0.7 else clients.leave(member))
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
    "a producer sends with 16 keys; one to four orderly push consumers join, leave and are killed",
    lanes=2,
)
