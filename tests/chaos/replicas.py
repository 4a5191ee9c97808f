"""A master with a slave under clients, and how a round with them ends: all is read from both, and both are compared."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.chaos.row import Round
from tests.chaos.stage import Stage, stage
from tests.support.checked_store import assert_clean
from tests.support.network import Network
from tests.support.replica_processes import ReplicaProcesses, following, log_of, replica_processes


@asynccontextmanager
async def replicated(round_: Round, network: Network | None = None) -> AsyncIterator[tuple[ReplicaProcesses, Stage]]:
    """A round with a replicated broker. The block starts producers and consumers, and breaks things and mends them."""
    role = round_.chance.choice(("SYNC_MASTER", "ASYNC_MASTER"))
    async with replica_processes(round_.directory, role, network=network) as cluster:
        async with stage(round_.directory, cluster.namesrv.address, cluster.master.address) as clients:
            yield cluster, clients
            await clients.end("produce")
            await clients.until_consumed("consume")
            await clients.end("consume")
            await following(cluster, 60)
            await clients.audit([cluster.master.address, cluster.slave.address])
            master, slave = await asyncio.to_thread(
                lambda: (log_of(round_.directory / "master"), log_of(round_.directory / "slave"))
            )
            clients.notes.write(
                "replica",
                "ok",
                queue="master",
                offset=len(slave),
                other_offset=len(master),
                crc=zlib.crc32(slave),
                other_crc=zlib.crc32(master[: len(slave)]),
            )
            round_.judge(clients.events())
        for server in (cluster.slave, cluster.master, cluster.namesrv):
            assert server.process is not None
            code = await asyncio.to_thread(server.process.stop)
            round_.demand(code == 0, f"{server.name} ended with {code}")
    for name in ("master", "slave"):
        assert_clean(round_.directory / name)
