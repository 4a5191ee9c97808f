"""What the failure drill does to a cluster of processes, and undoes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import Final

from downrange.simulation import Plan
from downrange.simulation.scenarios import ADDED_MILLIS, SHORT_MILLIS, window_of
from tests.support.process_cluster import ProcessCluster

FAULTY: Final = 0
"""The broker that a fault of one broker befalls."""

Action = Callable[[ProcessCluster], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Fault:
    """`begin` and `end` return when they have taken effect. `scenario` is its name in the simulator, if it is there."""

    summary: str
    begin: Action
    end: Action
    scenario: str | None = None
    seconds: float = 36.0
    """Of the whole drill. The fault is from a sixth to a half of it, as in the simulator."""
    longest_millis: float = inf
    needs_proxy: bool = False
    befalls: Callable[[int], Iterable[int]] = lambda brokers: (FAULTY,)

    def window_millis(self, seconds: float) -> tuple[float, float]:
        start, end = window_of(Plan(seconds=seconds))
        return start, min(end, start + self.longest_millis)


async def kill(cluster: ProcessCluster) -> None:
    await cluster.brokers[FAULTY].kill()


async def restart(cluster: ProcessCluster) -> None:
    await cluster.brokers[FAULTY].start()


async def stop(cluster: ProcessCluster) -> None:
    cluster.brokers[FAULTY].stop()


async def resume(cluster: ProcessCluster) -> None:
    cluster.brokers[FAULTY].resume()


async def slow_down(cluster: ProcessCluster) -> None:
    cluster.proxies[FAULTY].to_client.delay_seconds = ADDED_MILLIS / 1000


async def speed_up(cluster: ProcessCluster) -> None:
    cluster.proxies[FAULTY].to_client.delay_seconds = 0.0


async def kill_namesrvs(cluster: ProcessCluster) -> None:
    await asyncio.gather(*(server.kill() for server in cluster.namesrvs))


async def restart_namesrvs(cluster: ProcessCluster) -> None:
    await asyncio.gather(*(server.start() for server in cluster.namesrvs))


async def kill_all(cluster: ProcessCluster) -> None:
    await asyncio.gather(*(server.kill() for server in cluster.brokers))


async def restart_all(cluster: ProcessCluster) -> None:
    await asyncio.gather(*(server.start() for server in cluster.brokers))


FAULTS: Final = {
    # Long enough for the periodic look at the route, which is how those who do not probe find the broker again.
    "kill": Fault("kill -9 of one broker, then a restart", kill, restart, scenario="crash", seconds=72.0),
    "stop": Fault("SIGSTOP of one broker for 10 s", stop, resume, scenario="stopped", longest_millis=SHORT_MILLIS),
    "slow": Fault("one broker answers 800 ms later", slow_down, speed_up, scenario="brownout", needs_proxy=True),
    "namesrvs": Fault(
        "kill -9 of all name servers, then a restart", kill_namesrvs, restart_namesrvs, befalls=lambda brokers: ()
    ),
    "all": Fault(
        "kill -9 of all brokers, then a restart",
        kill_all,
        restart_all,
        scenario="all-down",
        longest_millis=SHORT_MILLIS,
        befalls=range,
    ),
}
