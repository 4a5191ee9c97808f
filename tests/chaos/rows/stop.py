"""Row 9: any process stands still (SIGSTOP) for 0.1 to 60 seconds, and goes on."""

from __future__ import annotations

import asyncio
import math
import random
import signal
from collections.abc import Sequence
from typing import Final

from tests.chaos.replicas import replicated
from tests.chaos.row import Round, Row
from tests.support.processes import Running

STOPS: Final = 10
AT_A_TIME: Final = 2
SHORTEST, LONGEST = 0.1, 60.0


async def play(round_: Round) -> None:
    async with replicated(round_) as (cluster, clients):
        producer = await clients.start("produce", "50")
        await clients.start("consume")
        servers = [server.process for server in (cluster.namesrv, cluster.master, cluster.slave) if server.process]
        processes = [*servers, *clients.clients.values()]
        round_.chance.shuffle(processes)
        async with asyncio.TaskGroup() as tasks:
            for number in range(AT_A_TIME):
                chance = random.Random(round_.chance.random())
                tasks.create_task(_stop_some(round_, processes[number::AT_A_TIME], chance))
        await clients.acknowledged(producer, 50)


async def _stop_some(round_: Round, processes: Sequence[Running], chance: random.Random) -> None:
    for _ in range(STOPS // AT_A_TIME):
        process = chance.choice(processes)
        seconds = math.exp(chance.uniform(math.log(SHORTEST), math.log(LONGEST)))
        process.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            process.signal(signal.SIGCONT)
        round_.figures["stops"] += 1
        round_.measured["longest stop, s"] = max(round_.measured.get("longest stop, s", 0.0), round(seconds, 1))
        await asyncio.sleep(chance.uniform(0, 3))


ROW: Final = Row(
    9,
    "stop",
    "SIGSTOP of any process, 0.1-60 s",
    {"stops": 1_000},
    "nothing lost, nothing wrong",
    play,
    "name server, master, slave, producer and consumer are stopped, two of them at a time; both replicas are read",
    in_memory=True,
    lanes=12,
)
