"""How fast the simulation is: a name server, a master, its slave, a producer and a consumer for ten minutes."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from pathlib import Path
from typing import Final

from downrange.store.config import BrokerRole, FlushDiskType
from tests.sim.clients import EVENTS, ORDERS, WORKERS, Client, Consumer, Producer
from tests.sim.run import IN_MEMORY
from tests.sim.servers import Broker, NameServer, Node, Shape
from tests.sim.world import World

SECONDS: Final = 600.0
SHAPE: Final = Shape(
    name_servers=1,
    flush_disk_type=FlushDiskType.ASYNC_FLUSH,
    broker_role=BrokerRole.ASYNC_MASTER,
    has_second_master=False,
    has_timers=False,
    has_poppers=False,
    has_pipeline=False,
)


def simulated_per_cpu_second(rate: float) -> float:
    """Simulated seconds for each second of CPU time, with `rate` messages in a second.

    This process is good for nothing else afterwards.
    """
    began = time.process_time()
    directory = Path(tempfile.mkdtemp(prefix="downrange-sim-", dir=IN_MEMORY if IN_MEMORY.is_dir() else None))
    try:
        world = World(1, directory)
        asyncio.set_event_loop(world.loop)
        name_server = NameServer(world, "namesrv0", directory / "namesrv0")
        master = Broker(world, "a", name_server.address, SHAPE)
        slave = Broker(world, "a", name_server.address, SHAPE, broker_id=1)
        producer = Producer(world, "p1", (name_server.address,), SHAPE, rate)
        consumer = Consumer(world, "w1", (name_server.address,), WORKERS, (EVENTS, ORDERS))
        programs: list[Node | Client] = [name_server, master, slave, producer, consumer]

        async def work() -> None:
            for program in programs:
                program.start()
                await asyncio.sleep(0.2)
            await asyncio.sleep(SECONDS)

        world.loop.run_until_complete(work())
        assert not world.problems, world.problems
        assert len([event for event in world.history if event.op == "read"]) > SECONDS * rate / 2
        return world.loop.time() / (time.process_time() - began)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
