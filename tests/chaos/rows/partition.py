"""Row 8: hosts of a network do not reach each other, in one direction or in both."""

from __future__ import annotations

import asyncio
import math
from typing import Final

from tests.chaos.replicas import replicated
from tests.chaos.row import Round, Row
from tests.support.network import MISSING, may_make_networks, network

PARTITIONS: Final = 15
SHORTEST, LONGEST = 0.2, 15.0


async def play(round_: Round) -> None:
    chance = round_.chance
    with network() as net:
        async with replicated(round_, net) as (cluster, clients):
            hosts = dict(cluster.hosts)
            hosts["producer"], hosts["consumer"] = net.host(), net.host()
            producer = await clients.start("produce", "50", prefix=hosts["producer"].program_prefix)
            await clients.start("consume", prefix=hosts["consumer"].program_prefix)
            for _ in range(PARTITIONS):
                one, *others = chance.sample(list(hosts.values()), len(hosts))
                for other in others[: chance.choice((1, 1, len(others)))]:
                    net.cut(one, other)
                    if chance.random() < 0.6:
                        net.cut(other, one)
                await asyncio.sleep(math.exp(chance.uniform(math.log(SHORTEST), math.log(LONGEST))))
                net.heal()
                round_.figures["partitions"] += 1
                await asyncio.sleep(chance.uniform(0, 2))
            await clients.acknowledged(producer, 50)


ROW: Final = Row(
    8,
    "partition",
    "partitions between master, slave, name server, clients (network namespaces)",
    {"partitions": 500},
    "nothing lost, nothing wrong",
    play,
    "five hosts are behind a router that loses packets, one or both ways, for 0.2 to 15 s; both replicas are read",
    missing=lambda: "" if may_make_networks() else MISSING,
    in_memory=True,
    lanes=12,
)
