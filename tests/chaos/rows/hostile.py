"""Row 12: peers that send mutated frames, idle, dribble, do not read, or connect again and again."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

from downrange.protocol.framing import encode
from tests.chaos.clients import TOPIC
from tests.chaos.row import Round, Row
from tests.chaos.stage import Stage, stage
from tests.support.history import Event
from tests.support.processes import Running
from tests.support.requests import connected
from tests.support.rubbish import connect_without_reading, socket_to
from tests.support.standalone_process import standalone_process

IDLE, DRIBBLING, DEAF = 10_000, 1_000, 8
RATE: Final = 200
MOST_MIB: Final = 256
MOST_TIMES: Final = 5.0
QUIET_SENDS: Final = 1_000
LEAST_SECONDS, MOST_SECONDS = 20.0, 120.0
"""How long a round attacks: it takes some seconds to connect the crowd, so few long attacks see more frames."""
LEAST_P99_MILLIS: Final = 10.0
"""A quiet p99 below this is taken for this: a scheduler that gives a client its processor late is not on trial."""


async def play(round_: Round) -> None:
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    assert hard > IDLE + DRIBBLING + 500, f"at most {hard} open files are allowed here: raise the hard limit"
    with ExitStack() as stack:
        servers = stack.enter_context(standalone_process(round_.directory, {"maxMessageSize": 4 << 20}))
        stack.enter_context(_apart_from(servers.process.pid))
        async with stage(round_.directory, servers.namesrv, servers.broker) as clients:
            producer = await clients.start("produce", str(RATE))
            await clients.acknowledged(producer, QUIET_SENDS)
            quiet = await p99(clients)
            crowd = await asyncio.to_thread(_crowd, servers.broker, stack)
            await _be_deaf(servers.broker, stack)
            async with _attack(servers.broker, str(round_.chance.random())) as attacker:
                began = _last(clients)
                dribbling = asyncio.create_task(_dribble(crowd[:DRIBBLING]))
                seconds = min(MOST_SECONDS, max(LEAST_SECONDS, round_.seconds_left - 30))
                await clients.acknowledged(producer, int(RATE * seconds), 5 * seconds)
                hostile = await p99(clients, began)
                mebibytes = servers.resident_bytes / (1 << 20)
                dribbling.cancel()
                await asyncio.to_thread(attacker.stop)
                frames = int(attacker.wait_for(r"frames (\d+)")[1])
            await clients.end("produce")
            await clients.audit([servers.broker])
            round_.judge(clients.events())
        round_.figures["frames"] += frames
        round_.figures["idle connections"] += IDLE
        round_.figures["slow connections"] += DRIBBLING
        round_.measured.update({"quiet p99, ms": quiet, "hostile p99, ms": hostile})
        round_.measured["most MiB"] = round(mebibytes, 1)
        round_.demand(mebibytes < MOST_MIB, f"the broker holds {mebibytes:.0f} MiB")
        most = MOST_TIMES * max(quiet, LEAST_P99_MILLIS)
        round_.demand(hostile < most, f"p99 of sends is {hostile:.1f} ms, {quiet:.1f} ms without hostile peers")
        round_.demand("Traceback" not in servers.process.errors, f"the broker logged: {servers.process.errors[-500:]}")


@contextmanager
def _apart_from(broker: int) -> Iterator[None]:
    """Give the broker a processor, and all others to this process and those that it starts, if there are several.

    The broker is on trial, not the scheduler that divides a processor between it and those who attack it.
    """
    own = os.sched_getaffinity(0)
    if len(own) > 1:
        one = min(own)
        for thread in Path(f"/proc/{broker}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {one})
        os.sched_setaffinity(0, own - {one})
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


@asynccontextmanager
async def _attack(address: str, seed: str) -> AsyncIterator[Running]:
    """A process that sends mutated frames as fast as it can."""
    load = Running(address, seed, program=(sys.executable, "-m", "tests.chaos.hostile"))
    try:
        await asyncio.to_thread(load.wait_for, "ready")
        yield load
    finally:
        await asyncio.to_thread(load.stop)
        load.close()


def _last(clients: Stage) -> int:
    return max(event.time for event in clients.events("produce*"))


async def p99(clients: Stage, since: int = 0) -> float:
    """Of the sends that began since then, in milliseconds."""
    events: list[Event] = await asyncio.to_thread(clients.events, "produce*")
    began = {event.id: event.time for event in events if event.phase == "invoke" and event.time > since}
    times = sorted(event.time - began[event.id] for event in events if event.phase == "ok" and event.id in began)
    return round(times[len(times) * 99 // 100] / 1e6, 1)


def _crowd(address: str, stack: ExitStack) -> list[socket.socket]:
    return [stack.enter_context(socket_to(address)) for _ in range(IDLE + DRIBBLING)]


async def _be_deaf(address: str, stack: ExitStack) -> None:
    """Ask for everything again and again, and read no answer."""
    async with connected(address) as client:
        pulls = encode(client.pull_command(TOPIC)) * 500
    for _ in range(DEAF):
        deaf = stack.enter_context(connect_without_reading(address))
        deaf.setblocking(False)
        deaf.send(pulls)


async def _dribble(slow: list[socket.socket]) -> None:
    """Send a frame that never ends, byte by byte."""
    for one in slow:
        one.setblocking(False)
        one.send(b"\0\0\x10\0\0\0\x0f\0")
    while True:
        for number, one in enumerate(slow):
            one.send(b"{")
            if number % 50 == 0:
                await asyncio.sleep(0.05)


ROW: Final = Row(
    12,
    "hostile",
    "hostile peers: mutated frames, 10,000 idle and 1,000 slow connections in 256 MiB, slow readers, reconnect storms",
    {"frames": 50_000_000},
    "sends go on, their p99 stays within 5x",
    play,
    "there are 11,000 connections, eight that do not read, and four that send mutated frames as fast as the broker "
    "reads them. Meanwhile a client makes 200 sends in a second. Their p99 is compared with the p99 before the attack, "
    "or with 10 ms if that p99 was less. The broker has a processor of its own, and all others share another one. A "
    "frame counts when the broker has read it",
    in_memory=True,
)
