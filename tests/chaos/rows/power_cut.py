"""Rows 2 and 3: the power of a machine is cut under load, with SYNC_FLUSH and with ASYNC_FLUSH."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path
from typing import Final

from downrange.model.message import StoredMessage
from downrange.model.record import decode_records
from downrange.store.config import FlushDiskType, StoreConfig
from downrange.store.message_store import MessageStore
from tests.chaos.clients import TOPIC, checksum, id_of
from tests.chaos.images import image_disk, missing
from tests.chaos.row import Round, Row
from tests.chaos.stage import stage
from tests.support.checked_store import checked
from tests.support.history import Event
from tests.support.process_cluster import broker_server
from tests.support.processes import namesrv

IMAGES: Final = 10
FILE_SIZE: Final = 1 << 20
FLUSH_MILLIS: Final = 500
WINDOW_NANOS: Final = 3 * FLUSH_MILLIS * 1_000_000
"""A flush begins every 500 ms, and may itself take its time."""


async def play(round_: Round, flush: FlushDiskType) -> None:
    directory = round_.directory
    settings = {
        "flushDiskType": flush.value,
        "mappedFileSizeCommitLog": FILE_SIZE,
        "flushIntervalCommitLog": FLUSH_MILLIS,
        "flushCommitLogLeastPages": 0,
        "maxHashSlotNum": 1000,
        "maxIndexNum": 4000,
        "diskMaxUsedSpaceRatio": 95,
    }
    with image_disk(directory) as disk, namesrv(directory / "namesrv") as (_, address):
        broker = broker_server(directory, "broker-a", address, {**settings, "storePathRootDir": disk.path / "store"})
        await broker.start()
        try:
            async with stage(directory, address, broker.address) as clients:
                producer = await clients.start("produce", "400")
                for _ in range(IMAGES):
                    await clients.acknowledged(producer, round_.chance.randrange(1, 300))
                    before = time.monotonic_ns()
                    await asyncio.to_thread(disk.copy)
                    after = time.monotonic_ns()
                    with disk.mounted_copy() as root:
                        found = await asyncio.to_thread(read_all, root / "store", flush)
                    events = known_by(clients.events(), before, after)
                    window = WINDOW_NANOS if flush is FlushDiskType.ASYNC_FLUSH else 0
                    cut = Event(time=before, process="broker-a", op="cut", phase="ok", window_nanos=window)
                    _judge(round_, sorted([*events, cut, *found], key=lambda event: event.time))
                await clients.end("produce")
        finally:
            broker.close()


def known_by(events: list[Event], before: int, after: int) -> list[Event]:
    """The history as it was when the power went: the copy took from `before` to `after`."""
    return [e for e in events if e.time <= (after if e.phase == "invoke" else before)]


def read_all(root: Path, flush: FlushDiskType) -> list[Event]:
    """Open a store after the power cut, read it, and let `store check` look at it."""
    (root / "abort").write_bytes(b"")  # of another boot
    config = StoreConfig(
        store_path_root_dir=root,
        mapped_file_size_commit_log=FILE_SIZE,
        max_hash_slot_num=1000,
        max_index_num=4000,
        flush_disk_type=flush,
    )
    found: list[Event] = []
    with MessageStore.open(config, disk_use=lambda path: 0.1) as store:
        for state in store.queues:
            offset = 0
            while state.topic == TOPIC and offset < state.queue.max_offset:
                result = store.read(state.topic, state.queue_id, offset, 32)
                messages = [message for part in result.slices for message in decode_records(part)]
                found += [_read(message, state.queue_id) for message in messages]
                offset = result.next_begin_offset
    report = checked(root)
    assert report.is_clean, "\n".join(map(str, report.problems))
    return found


def _read(message: StoredMessage, queue_id: int) -> Event:
    return Event(
        time=time.monotonic_ns(),
        process="auditor",
        op="read",
        phase="ok",
        topic=TOPIC,
        queue=f"broker-a/{queue_id}",
        offset=message.queue_offset,
        id=id_of(message.body),
        crc=checksum(message.body),
    )


def _judge(round_: Round, events: list[Event]) -> None:
    """Judge one image; sends of earlier images are judged again, and counted once in the end."""
    counted = round_.figures.copy()
    report = round_.judge(events)
    for name in ("unanswered", "reads", "duplicates"):
        round_.figures[name] = counted[name]
    round_.figures["acknowledged"] = max(counted["acknowledged"], report.sends)
    round_.figures["images"] += 1
    read = {event.id for event in events if event.op == "read"}
    cut = next(event.time for event in events if event.op == "cut")
    lost = [e.time for e in events if e.op == "send" and e.phase == "ok" and e.id not in read]
    round_.figures["acknowledged, then lost"] += len(lost)
    oldest = (cut - min(lost)) / 1e6 if lost else 0.0
    round_.measured["oldest lost, ms"] = max(round_.measured.get("oldest lost, ms", 0.0), round(oldest, 1))


SYNC: Final = Row(
    2,
    "power-cut-sync",
    "power cut, SYNC_FLUSH: an ext4 image behind a loop mount is copied under load; the copy is mounted and opened",
    {"images": 2_000},
    "nothing acknowledged is lost",
    partial(play, flush=FlushDiskType.SYNC_FLUSH),
    "the image lies on XFS; a reflink copies it at one moment, under 400 sends in a second; `store check` follows",
    in_memory=True,
    missing=missing,
    lanes=2,
)
ASYNC: Final = Row(
    3,
    "power-cut-async",
    "power cut, ASYNC_FLUSH",
    {"images": 2_000},
    "only the end of each queue is lost, within the flush window",
    partial(play, flush=FlushDiskType.ASYNC_FLUSH),
    "as row 2; a flush begins every 500 ms, and no message older than 1.5 s may be lost",
    in_memory=True,
    missing=missing,
    lanes=2,
)
