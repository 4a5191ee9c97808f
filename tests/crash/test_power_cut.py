"""A power cut under SYNC_FLUSH loses nothing that was acknowledged, whichever pages had reached the disk by then.

The disk is simulated: what a sync wrote is safe, every other page is there or not as chance will have it, and so is the
name of a file whose directory was not synced.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from downrange.model.record import decode_records
from downrange.store.config import FlushDiskType
from downrange.store.files import OsFiles
from downrange.store.message_store import MessageStore
from tests.support.checked_store import assert_clean
from tests.support.store_writer import append_some, config_of, message_of, number_of
from tests.unit.store.small_store import kill

PAGE = 4096


class UncertainDisk(OsFiles):
    """The real files, and beside them what of each is known to be on the disk."""

    def __init__(self, root: Path) -> None:
        self._safe_bytes: dict[int, bytes] = {}  # by inode: a file may be renamed
        self.safe_names: set[Path] = set()
        for path in root.rglob("*"):  # what the last run left is safe
            self.safe_names.add(path)
            if path.is_file():
                self._safe_bytes[path.stat().st_ino] = path.read_bytes()

    def sync(self, descriptor: int) -> None:
        super().sync(descriptor)
        status = os.fstat(descriptor)
        self._safe_bytes[status.st_ino] = os.pread(descriptor, status.st_size, 0)

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        self.safe_names.update(path.iterdir())

    def leave_after_power_cut(self, source: Path, target: Path, chance: random.Random) -> None:
        """Make of `source`, which nobody writes any more, what a disk might hold after the power came back."""
        for directory, _, names in os.walk(source):
            for name in names:
                path = Path(directory, name)
                is_named = all(one in self.safe_names for one in (path, *path.parents) if source in one.parents)
                if not is_named and chance.random() < 0.5:
                    continue
                copy = target / path.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(self._mix(path, chance))

    def _mix(self, path: Path, chance: random.Random) -> bytes:
        now = path.read_bytes()
        safe = self._safe_bytes.get(path.stat().st_ino, b"").ljust(len(now), b"\0")[: len(now)]
        likely = chance.choice((0.0, 0.3, 0.7, 1.0))
        pages = range(0, len(now), PAGE)
        return b"".join((now if chance.random() < likely else safe)[at : at + PAGE] for at in pages)


def write(store: MessageStore, first: int, chance: random.Random) -> tuple[list[int], int]:
    """Append some messages, sync now and then; the ids that were acknowledged, and the next free id."""
    acknowledged: list[int] = []
    number = first
    waiting: list[tuple[int, int]] = []
    for _ in range(chance.randint(1, 40)):
        following, end = append_some(store, number, chance)
        waiting += [(end, one) for one in range(number, following)]
        number = following
        if chance.random() < 0.3:
            flushed = store.flush_commit_log()
            acknowledged += [one for end, one in waiting if end <= flushed]
            waiting = [(end, one) for end, one in waiting if end > flushed]
        match chance.randrange(30):
            case 0:
                store.write_pending()
                store.flush_queues(thorough=True)
            case 1 if store.needs_next_file:
                store.prepare_next_file()
    return acknowledged, number


def survive(directory: Path, rounds: int, seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    acknowledged: set[int] = set()
    first = 0
    root = directory / "0"
    for cut in range(rounds):
        disk = UncertainDisk(root)
        config = config_of(root, FlushDiskType.SYNC_FLUSH)
        store = MessageStore.open(config, files=disk, disk_use=lambda path: 0.1)
        new, last = write(store, first, chance)
        acknowledged.update(new)
        kill(store)
        (root / "abort").write_bytes(b"")  # of another boot
        after = directory / str(cut + 1)
        disk.leave_after_power_cut(root, after, chance)
        root = after
        config = config_of(root, FlushDiskType.SYNC_FLUSH)
        with MessageStore.open(config, disk_use=lambda path: 0.1) as store:
            found = {}
            for state in store.queues:
                offset = 0
                while offset < state.queue.max_offset:
                    result = store.read(state.topic, state.queue_id, offset, 32)
                    for part in result.slices:
                        found.update({number_of(message.body): message for message in decode_records(part)})
                    offset = result.next_begin_offset
            for number, message in found.items():
                right = message_of(number)
                assert (message.topic, message.queue_id, message.body) == right[:3]
                assert message.properties_text.encode() == right.properties
            assert acknowledged <= found.keys(), f"lost {sorted(acknowledged - found.keys())[:5]} in cut {cut}"
        assert_clean(root)
        acknowledged = set(found)  # the orderly stop just now made all of it safe
        first = last


def test_a_power_cut_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    survive(tmp_path, rounds=25, seed=random.randrange(1 << 32))


def test_a_power_cut_does_not_lose_directories_with_what_is_in_them(tmp_path: Path) -> None:
    disk = UncertainDisk(tmp_path)
    config = config_of(tmp_path / "store", FlushDiskType.SYNC_FLUSH)
    with MessageStore.open(config, files=disk, disk_use=lambda path: 0.1):
        assert {tmp_path / "store" / name for name in ("commitlog", "consumequeue", "index")} <= disk.safe_names


@pytest.mark.slow
def test_many_power_cuts(tmp_path: Path) -> None:
    for _ in range(20):
        seed = random.randrange(1 << 32)
        survive(tmp_path / str(seed), rounds=40, seed=seed)
