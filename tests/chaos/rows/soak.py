"""Row 13: a long time at 70 % of the most that a producer and a consumer can do here."""

from __future__ import annotations

import asyncio
import shutil
import statistics
import time
from typing import Final

from tests.chaos.clients import QUEUES, TOPIC
from tests.chaos.row import Round, Row
from tests.chaos.stage import Stage, stage
from tests.support.process_cluster import Server, broker_server
from tests.support.processes import namesrv
from tests.support.requests import connected, max_offset
from tests.support.standalone_process import resident_bytes

SHARE: Final = 0.7
MOST_SECONDS: Final = 3600.0
SEGMENT_SECONDS: Final = 30.0
WARM_UP: Final = 0.2
MOST_GROWTH: Final = 1.1
SLACK_MIB: Final = 4.0


async def play(round_: Round) -> None:
    directory = round_.directory
    settings = {"mappedFileSizeCommitLog": 64 << 20, "fileReservedTime": 1}
    with namesrv(directory / "namesrv") as (_, address):
        broker = broker_server(directory, "broker-a", address, settings)
        await broker.start()
        try:
            rate = SHARE * await _segment(round_, broker, address, 0.0, 10.0)
            round_.measured["messages in a second"] = round(rate)
            began, memory = time.monotonic(), [(0.0, _mebibytes(broker))]
            wanted = min(MOST_SECONDS, round_.seconds_left - 20)
            while (passed := time.monotonic() - began) < wanted:
                watching = asyncio.create_task(_watch(broker, began, memory))
                await _segment(round_, broker, address, rate, min(SEGMENT_SECONDS, wanted - passed + 1))
                watching.cancel()
            round_.figures["seconds"] += int(time.monotonic() - began)
            _judge_memory(round_, [mebibytes for at, mebibytes in memory if at > WARM_UP * wanted])
        finally:
            broker.close()


async def _segment(round_: Round, broker: Server, namesrv_address: str, rate: float, seconds: float) -> float:
    """Send and consume for a while with clients of their own, and judge; how many were acknowledged in a second."""
    directory = round_.directory / "segment"
    async with stage(directory, namesrv_address, broker.address) as clients:
        since = await _ends(broker)
        await clients.start("consume")
        await clients.start("produce", str(rate))
        await asyncio.sleep(seconds)
        await clients.end("produce")
        await clients.until_consumed("consume")
        await clients.end("consume")
        await clients.audit([broker.address], since)
        sends = await asyncio.to_thread(_judge, round_, clients)
    shutil.rmtree(directory)
    return sends / seconds


def _judge(round_: Round, clients: Stage) -> int:
    return round_.judge(clients.events()).sends


async def _ends(broker: Server) -> list[int]:
    async with connected(broker.address) as client:
        return [await max_offset(client, TOPIC, queue_id) for queue_id in range(QUEUES)]


async def _watch(broker: Server, began: float, memory: list[tuple[float, float]]) -> None:
    while True:
        memory.append((time.monotonic() - began, _mebibytes(broker)))
        await asyncio.sleep(0.5)


def _mebibytes(broker: Server) -> float:
    assert broker.process is not None
    return resident_bytes(broker.process.pid) / (1 << 20)


def _judge_memory(round_: Round, memory: list[float]) -> None:
    third = max(1, len(memory) // 3)
    first, last = statistics.median(memory[:third]), statistics.median(memory[-third:])
    round_.measured.update({"first MiB": round(first, 1), "last MiB": round(last, 1)})
    round_.demand(last < first * MOST_GROWTH + SLACK_MIB, f"memory grew from {first:.1f} to {last:.1f} MiB")


ROW: Final = Row(
    13,
    "soak",
    "soak at 70 % of the maximum",
    {"seconds": 3_600},
    "memory stays flat, nothing is lost",
    play,
    "a producer and a consumer of one broker start anew every 30 s, and their history is judged then; "
    "`--minutes 1440` runs a day",
)
