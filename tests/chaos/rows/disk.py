"""Row 7: the disk refuses syncs, is full, or is slow, under a broker that syncs before it acknowledges."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Final

from tests.chaos.row import Round, Row
from tests.chaos.stage import Stage, stage
from tests.support.checked_store import REPOSITORY, assert_clean
from tests.support.history import Event
from tests.support.process_cluster import Server, broker_server
from tests.support.processes import namesrv
from tests.support.standalone_process import resident_bytes

CYCLES: Final = 40
RATE: Final = 500
MOST_MIB: Final = 256
MIB: Final = 1 << 20
PROGRAM: Final = (sys.executable, "-m", "tests.chaos.faulty_broker")


class Disk:
    """The control file of a faulty disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.tell("")

    def tell(self, word: str) -> None:
        written = self._path.with_suffix(".tmp")
        written.write_text(word)
        os.replace(written, self._path)

    def errors(self) -> list[int]:
        """When operations failed, in nanoseconds of the monotonic clock."""
        path = self._path.with_suffix(".errors")
        return [int(line.split()[1]) for line in path.read_text().splitlines()] if path.exists() else []

    async def has_failed(self, before: int) -> int:
        """Wait for one failure more than `before`; when it was."""
        async with asyncio.timeout(30):
            while len(self.errors()) <= before:
                await asyncio.sleep(0.005)
        return self.errors()[before]


async def play(round_: Round) -> None:
    directory = round_.directory
    control = directory / "disk"
    disk = Disk(control)
    os.environ["CHAOS_DISK"] = str(control)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    settings = {"flushDiskType": "SYNC_FLUSH", "mappedFileSizeCommitLog": 1 << 20}
    with namesrv(directory / "namesrv") as (_, address):
        broker = broker_server(directory, "broker-a", address, settings)
        broker.program = PROGRAM
        await broker.start()
        try:
            async with stage(directory, address, broker.address) as clients:
                producer = await clients.start("produce", str(RATE))
                await clients.start("consume")
                silences = [await _cycle(round_, disk, broker, clients, producer) for _ in range(CYCLES)]
                await clients.end("produce")
                await clients.until_consumed("consume")
                await clients.end("consume")
                await clients.audit([broker.address])
                events = clients.events()
                round_.judge(events)
                for silence in filter(None, silences):
                    _find_late(round_, events, *silence)
            assert broker.process is not None
            round_.demand(broker.process.stop() == 0, "the broker did not end in order")
        finally:
            broker.close()
    assert_clean(directory / "broker-a")


async def _cycle(round_: Round, disk: Disk, broker: Server, clients: Stage, producer: str) -> tuple[int, int] | None:
    """One fault; of a failed sync the time from the failure to the death of the broker."""
    chance = round_.chance
    await clients.acknowledged(producer, chance.randrange(1, RATE // 4))
    word = chance.choice(("fsync", "full", "slow"))
    before, silence = len(disk.errors()), None
    disk.tell(word)
    if word != "slow":
        failed = await disk.has_failed(before)
    await asyncio.sleep(chance.uniform(0, 1.0))
    disk.tell("")
    assert broker.process is not None
    mebibytes = resident_bytes(broker.process.pid) / MIB
    round_.measured["most MiB"] = max(round_.measured.get("most MiB", 0.0), round(mebibytes, 1))
    round_.demand(mebibytes < MOST_MIB, f"the broker holds {mebibytes:.0f} MiB")
    if word == "fsync":  # what the disk dropped is not known: only a new start may acknowledge again
        await asyncio.sleep(chance.uniform(0, 0.5))
        silence = (failed, time.monotonic_ns())
        await broker.kill()
        await broker.start()
    await clients.acknowledged(producer, 1)
    round_.figures["cycles"] += 1
    round_.figures[f"{word} cycles"] += 1
    return silence


def _find_late(round_: Round, events: list[Event], failed: int, killed: int) -> None:
    """Sends that began after a sync had failed, and that the broker acknowledged nevertheless."""
    began = {event.id for event in events if event.op == "send" and event.phase == "invoke" and event.time > failed}
    late = [e for e in events if e.op == "send" and e.phase == "ok" and e.time < killed and e.id in began]
    round_.wrong.extend(f"{event.id} was acknowledged after a sync had failed" for event in late)


ROW: Final = Row(
    7,
    "disk",
    "fsync error, full disk, slow disk (a fault layer)",
    {"cycles": 1_000},
    "no acknowledgement after an error; memory stays bounded",
    play,
    "file operations of a broker with SYNC_FLUSH fail or take 0.3 s; after an fsync error the broker is killed and "
    "starts anew",
    lanes=8,
)
