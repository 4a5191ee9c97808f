"""Row 13: a long time at 70 % of the most that a producer and a consumer can do here."""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple

from tests.chaos.clients import QUEUES, TOPIC
from tests.chaos.row import Round, Row
from tests.chaos.stage import Stage, stage
from tests.support.process_cluster import Server, broker_server
from tests.support.processes import namesrv
from tests.support.requests import connected, max_offset
from tests.support.standalone_process import resident_bytes

SHARE: Final = 0.7
MOST_SECONDS: Final = 3600.0
MOST_AT_FIRST_SECONDS: Final = 10.0
SEGMENT_SECONDS: Final = 60.0
DRAIN_SECONDS: Final = 90.0
JUDGED_EVERY: Final = 5
"""The checker needs more time for a segment than the clients."""
LEAST_SHARE: Final = 0.85
"""Of the intended rate: between two segments new clients start, which takes some seconds."""
WARM_UP: Final = 0.2
MOST_GROWTH: Final = 1.1
SLACK_MIB: Final = 4.0


async def play(round_: Round) -> None:
    settings = {"mappedFileSizeCommitLog": 64 << 20, "fileReservedTime": 1}
    with namesrv(round_.directory / "namesrv") as (_, address):
        broker = broker_server(round_.directory, "broker-a", address, settings)
        await broker.start()
        try:
            await _soak(round_, broker, address)
        finally:
            broker.close()


async def _soak(round_: Round, broker: Server, namesrv_address: str) -> None:
    """Segment after segment. The checker judges one of five while the next ones run."""
    first = await _segment(round_, broker, namesrv_address, 0.0, MOST_AT_FIRST_SECONDS)
    rate = round(SHARE * first.sends / MOST_AT_FIRST_SECONDS)
    with ThreadPoolExecutor(1, initializer=_yield_to_others) as judge:
        await _judge(round_, broker, first, judge)
        wanted = min(MOST_SECONDS, round_.seconds_left - 30)
        began, memory, sends = time.monotonic(), [(0.0, _mebibytes(broker))], 0
        watching = asyncio.create_task(_watch(broker, began, memory))
        judging: list[asyncio.Task[None]] = []
        for number in count():
            if (passed := time.monotonic() - began) >= wanted:
                break
            segment = await _segment(round_, broker, namesrv_address, rate, min(SEGMENT_SECONDS, wanted - passed + 1))
            sends += segment.sends
            if number % JUDGED_EVERY == 0:
                judging.append(asyncio.create_task(_judge(round_, broker, segment, judge)))
            else:
                shutil.rmtree(segment.directory)
        watching.cancel()
        seconds = time.monotonic() - began
        await asyncio.gather(*judging)
    round_.figures.update({"seconds": int(seconds), "sent": sends})
    round_.measured.update({"intended in a second": rate, "sent in a second": round(sends / seconds)})
    round_.demand(sends > LEAST_SHARE * rate * seconds, f"{sends} messages in {seconds:.0f} s were less than intended")
    _judge_memory(round_, [mebibytes for at, mebibytes in memory if at > WARM_UP * wanted])


class Segment(NamedTuple):
    """What clients of their own sent and consumed, and where each queue began and ended."""

    clients: Stage
    directory: Path
    begins: list[int]
    ends: list[int]

    @property
    def sends(self) -> int:
        return sum(self.ends) - sum(self.begins)


async def _segment(round_: Round, broker: Server, namesrv_address: str, rate: float, seconds: float) -> Segment:
    """Send and consume for a while. As many messages as were acknowledged are stored, and all are consumed."""
    begins = await _ends(broker)
    directory = round_.directory / f"segment-{sum(begins)}"
    async with stage(directory, namesrv_address, broker.address) as clients:
        consumer = await clients.start("consume")
        producer = await clients.start("produce", str(rate))
        await asyncio.sleep(seconds)
        await clients.end("produce")
        segment = Segment(clients, directory, begins, await _ends(broker))
        deadline = time.monotonic() + DRAIN_SECONDS
        while (reads := clients.answered(consumer)) < segment.sends and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        await clients.end("consume")
    sends = clients.answered(producer)
    round_.demand(sends == segment.sends, f"{sends} sends were acknowledged, {segment.sends} messages are stored")
    round_.demand(reads >= sends, f"{sends} sends were acknowledged, {reads} messages were consumed")
    return segment


async def _judge(round_: Round, broker: Server, segment: Segment, judge: ThreadPoolExecutor) -> None:
    await segment.clients.audit([broker.address], segment.begins, segment.ends)
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(judge, lambda: round_.judge(segment.clients.events()))
    shutil.rmtree(segment.directory)


def _yield_to_others() -> None:
    """The broker and its clients come before this thread."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


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
    "a producer and a consumer of one broker start anew every 60 s. All messages that were acknowledged are stored and "
    "consumed, by their number; the checker judges one of five such minutes while the next ones run. "
    "`make chaos ROWS=13 MINUTES=1440 SCALE=24` runs a day, hour by hour",
)
