"""A master and its slave, each a process: how fast an empty slave catches up, and what waiting for a slave costs; and
three replicas under a controller, all of which have a message before it is acknowledged.

Everything is compared with a single broker of the same run. Three processes share the machine where otherwise one has
it, so with fewer than three free cores a part of the price is the slave's own work.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from bench.report import QUICK, Figure, cpu_seconds, table
from bench.served import by_turns, served, target
from bench.storing import append
from downrange.load import LoadReport, SendPlan, Target, find_target, send_load
from downrange.model.message_id import pack_host
from downrange.protocol.bodies.body import decode_body
from downrange.protocol.bodies.kv_config import KVTable
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import request
from downrange.store.config import StoreConfig
from downrange.store.message_store import MessageStore
from downrange.store.new_message import NewMessage
from downrange.transport.loop import run as run_loop
from downrange.transport.pool import connect
from tests.support.controlled_cluster import controlled_cluster
from tests.support.processes import Running, namesrv

LOG_BYTES: Final = (64 if QUICK else 1024) << 20
FILE_SIZE: Final = 1536 << 20  # an empty slave gets the last file only: here, the only one
BODY: Final = 1024
ROUNDS: Final = 1 if QUICK else 3
SECONDS: Final = 0.4 if QUICK else 1.0
SHAPES: Final = {1: (1, 1), 64: (8, 8), 256: (8, 32)}
_HOST: Final = pack_host("127.0.0.1", 10911)


class Process(NamedTuple):
    address: str
    pid: int


class Replicas(NamedTuple):
    master: Process
    slave: Process


@contextmanager
def replicas(directory: Path, role: str, master_data: Path | None = None) -> Iterator[Replicas]:
    """A name server, a master and a slave that follows."""
    with ExitStack() as lives:
        _, names = lives.enter_context(namesrv(directory / "names", "--log-level", "ERROR"))

        def start(name: str, data: Path, settings: dict[str, object]) -> Process:
            config = directory / f"{name}.conf"
            common = {
                "brokerName": "broker-a",
                "namesrvAddr": names,
                "listenPort": 0,
                "storePathRootDir": data,
                "mappedFileSizeCommitLog": FILE_SIZE,
                "metricsPort": -1,
                "grpcServerPort": -1,
                "waitTimeMillsInSendQueue": 10_000,
            }
            config.write_text("".join(f"{key}={value}\n" for key, value in (common | settings).items()))
            process = Running("broker", "--config", str(config), "--log-level", "ERROR")
            lives.callback(process.close)
            return Process(process.wait_for(r"ready on ([^\s,]+)", 60)[1], process.pid)

        master = start("master", master_data or directory / "master", {"brokerRole": role})
        yield Replicas(master, start("slave", directory / "slave", {"brokerRole": "SLAVE", "brokerId": 1}))


@contextmanager
def three_replicas(directory: Path) -> Iterator[Process]:
    """The master of three brokers under a controller."""
    settings: dict[str, object] = {"mappedFileSizeCommitLog": FILE_SIZE, "waitTimeMillsInSendQueue": 10_000}
    lives = AsyncExitStack()
    with asyncio.Runner() as runner:

        async def start() -> Process:
            cluster = await lives.enter_async_context(controlled_cluster(directory, settings=settings))
            master = await cluster.master()
            assert master.process is not None
            return Process(master.address, master.process.pid)

        try:
            yield runner.run(start())
        finally:
            runner.run(lives.aclose())


def fill(directory: Path) -> None:
    """A log of 1 KiB messages."""
    config = StoreConfig(store_path_root_dir=directory, mapped_file_size_commit_log=FILE_SIZE)
    with MessageStore.open(config) as store:
        number = 0
        while store.max_offset < LOG_BYTES:
            body = b"%016d" % number * (BODY // 16)
            append(store, [[NewMessage("bench", number % 4, body, b"KEYS\x01key-%d" % number, 0, _HOST, _HOST)]])
            number += 1


async def _watch(found: Replicas) -> tuple[float, int]:
    """Until the slave has everything: seconds since its first byte was seen, and bytes since then."""
    connection = await connect(found.slave.address)

    async def offset() -> int:
        reply = await connection.request(request(RequestCode.GET_BROKER_RUNTIME_INFO), 10)
        return int(decode_body(KVTable, reply.body_bytes).table["commitLogMaxOffset"])

    while not (first := await offset()):
        await asyncio.sleep(0.002)
    start = time.perf_counter()
    while (end := await offset()) < LOG_BYTES:
        await asyncio.sleep(0.01)
    seconds = time.perf_counter() - start
    await connection.drain(1)
    return seconds, end - first


def catch_up(single_bytes: float) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        root = Path(directory)
        fill(root / "filled")
        with replicas(root, "ASYNC_MASTER", root / "filled") as found:
            before = cpu_seconds(found.master.pid), cpu_seconds(found.slave.pid)
            seconds, size = run_loop(_watch(found))
            after = cpu_seconds(found.master.pid), cpu_seconds(found.slave.pid)
    rate = size / seconds / 1e6
    name = f"catch up, log of {LOG_BYTES >> 20} MiB"
    return [
        Figure(name, rate, "MB/s", rate / single_bytes, "1 KiB sends to a single broker"),
        Figure(f"{name}: CPU of the master", (after[0] - before[0]) / size * 1e9, "ms a MB"),
        Figure(f"{name}: CPU of the slave", (after[1] - before[1]) / size * 1e9, "ms a MB"),
    ]


def at(process: Process) -> Target:
    return run_loop(find_target(topic="bench", queues=4, broker=process.address, server_pid=process.pid))


def sends() -> tuple[list[Figure], float]:
    """Sends to a single broker, to a master with a slave, and to those that wait for their slaves."""
    kinds = {
        "single": "a single broker",
        "async": "ASYNC_MASTER and a slave",
        "sync": "SYNC_MASTER and a slave",
        "three": "three replicas under a controller",
    }
    loads: dict[tuple[str, int], Callable[[], LoadReport]] = {}
    with ExitStack() as lives:
        targets = {"single": target(lives.enter_context(served()))}
        for kind, role in (("async", "ASYNC_MASTER"), ("sync", "SYNC_MASTER")):
            directory = Path(lives.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
            targets[kind] = at(lives.enter_context(replicas(directory, role)).master)
        directory = Path(lives.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        targets["three"] = at(lives.enter_context(three_replicas(directory)))
        for in_flight, (connections, outstanding) in SHAPES.items():
            plan = SendPlan(SECONDS, 0.2, BODY, connections=connections, outstanding=outstanding)
            loads |= {(kind, in_flight): partial(send_load, targets[kind], plan) for kind in kinds}
        best = by_turns({f"{kind} {number}": load for (kind, number), load in loads.items()}, ROUNDS)
    figures = []
    for kind, label in kinds.items():
        for number in SHAPES:
            one, base = best[f"{kind} {number}"], best[f"single {number}"]
            name = f"send 1 KiB to {label}, {number} in flight"
            figures.append(Figure(name, one.rate, "messages/s", one.rate / base.rate, "single"))
            figures.append(Figure(f"{name}: p50", one.latency("reply", "p50"), "ms"))
            figures.append(Figure(f"{name}: p99", one.latency("reply", "p99"), "ms"))
    refused = sum(one.refused for one in best.values())
    figures.append(Figure("sends that no slave had in time", refused, "requests"))
    return figures, best["single 256"].rate * BODY / 1e6


def run() -> list[Figure]:
    figures, single_bytes = sends()
    return figures + catch_up(single_bytes)


if __name__ == "__main__":
    print(table(run()))
