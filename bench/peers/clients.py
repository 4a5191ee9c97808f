"""A closed loop through a client library: what a program gets that uses the server in the usual fast way."""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Final, NamedTuple

from bench.peers.meter import Meter
from downrange.load import LoadReport, SendPlan
from downrange.load.server_process import ServerProcess
from downrange.transport.loop import run as run_loop

_PATIENCE_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class RunningPeer:
    address: str
    server: ServerProcess


class Calls(NamedTuple):
    """How a client keeps messages in flight: `side_by_side` calls at once, each of which sends `messages` of them and
    returns, or raises, when the server has answered for all."""

    call: Callable[[], Awaitable[object]]
    side_by_side: int = 1
    messages: int = 1


@dataclass(frozen=True, slots=True)
class Client:
    """A library that is there or is not; `open` takes address, body and how many messages shall be in flight."""

    name: str
    module: str
    open: Callable[[str, bytes, int], AbstractAsyncContextManager[Calls]]

    def missing(self) -> bool:
        return importlib.util.find_spec(self.module) is None


def drive_client(client: Client, running: RunningPeer, plan: SendPlan) -> LoadReport:
    """The closed loop of `plan` over one connection: a client library needs no more to be busy."""
    return run_loop(_drive(client, running, plan))


async def _drive(client: Client, running: RunningPeer, plan: SendPlan) -> LoadReport:
    in_flight = plan.connections * plan.outstanding
    async with client.open(running.address, bytes(plan.size), in_flight) as calls:
        meter = Meter(plan, running.server)

        async def caller() -> None:
            while not meter.is_over:
                started = time.monotonic_ns()
                await calls.call()
                meter.record(time.monotonic_ns() - started, calls.messages)
                meter.look()

        async with asyncio.timeout(plan.warm_up_seconds + plan.seconds + _PATIENCE_SECONDS):
            await asyncio.gather(*(caller() for _ in range(calls.side_by_side)))
    return meter.report(client.name)
