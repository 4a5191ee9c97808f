"""Row 4: every state that a disk may be left in by one append, one roll to a new file, or one checkpoint.

A step changes some units of some files, and makes some files. After a power cut each of these may have happened or not,
in any order: all subsets are tried, one after another, each in a directory of its own. Units of 512 bytes are sectors;
smaller ones are states of disks that tear sectors.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from downrange.clock import ManualClock
from downrange.model.message import StoredMessage
from downrange.store.message_store import MessageStore
from tests.chaos.row import Round, Row
from tests.support.checked_store import checked
from tests.support.damage import UnsyncedFiles, everything
from tests.unit.store.small_store import NOW, kill, open_store, put

CASES_PER_ROUND: Final = 10
"""Cases have 16 to 8,192 states, some 400 on average."""
MOST_UNITS: Final = 13
CHECKED_EVERY: Final = 50
UNITS: Final = (512, 64, 16, 8)
SIZES: Final = 2900
"""So many sizes has the first message: with its neighbour it has to fit into a file of 4,096 bytes."""
BODIES: Final = (300, 0, 20, 700, 1400)

Contents = dict[str, bytes]


@dataclass(frozen=True, slots=True)
class Unit:
    """Bytes of a file that change together; an empty range is the name of a new file."""

    path: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Case:
    """One step, its units, and the messages that must be there after it, and those that may."""

    name: str
    before: Contents
    after: Contents
    units: list[Unit]
    kept: list[StoredMessage]
    maybe: list[StoredMessage]

    @property
    def states(self) -> int:
        return 1 << len(self.units)

    def is_legal(self, mask: int) -> bool:
        """Whether a disk may be left so: the name of a log file is synced before the next log file is made."""
        names = [mask >> number & 1 for number, unit in enumerate(self.units) if _is_log_name(unit)]
        return names == sorted(names, reverse=True)

    def write(self, mask: int, root: Path) -> None:
        """Make the state in which the units of `mask` have reached the disk."""
        there = [unit for number, unit in enumerate(self.units) if mask >> number & 1]
        named = {unit.path for unit in there if unit.start == unit.end}
        files = {path: bytearray(data) for path, data in self.before.items()}
        files |= {path: bytearray(len(self.after[path])) for path in named}
        for unit in there:
            if unit.path in files:
                files[unit.path][unit.start : unit.end] = self.after[unit.path][unit.start : unit.end]
        for path, data in files.items():
            target = root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)


def _is_log_name(unit: Unit) -> bool:
    return unit.start == unit.end and unit.path.startswith("commitlog/")


def snapshot(root: Path) -> Contents:
    left_out = ("abort", "lock")  # of another boot
    paths = (path for path in sorted(root.rglob("*")) if path.is_file() and path.name not in left_out)
    return {str(path.relative_to(root)): path.read_bytes() for path in paths} | {"abort": b""}


def changed(before: Contents, after: Contents, size: int) -> list[Unit]:
    units = [Unit(path, 0, 0) for path in after if path not in before]
    for path, data in after.items():
        old = before.get(path, b"").ljust(len(data), b"\0")
        units += [
            Unit(path, at, at + size) for at in range(0, len(data), size) if old[at : at + size] != data[at : at + size]
        ]
    return units


class CheckpointFiles(UnsyncedFiles):
    """Calls back before a checkpoint is written, when all that it stands for has been synced."""

    def __init__(self) -> None:
        self.about_to_write: Callable[[], None] = lambda: None

    def write_at(self, descriptor: int, data: bytes | bytearray | memoryview, position: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").resolve().name.startswith("checkpoint"):
            self.about_to_write()
        super().write_at(descriptor, data, position)


def make_case(number: int, directory: Path) -> Case:
    """The case of a number: the kind of step, the size of bodies and of units follow from it."""
    kind = ("append", "batch", "roll", "checkpoint")[number % 4]
    body = BODIES[number // 4 % len(BODIES)]
    clock = ManualClock(NOW)
    files = CheckpointFiles()
    root = directory / f"case-{number}"
    store = open_store(root, clock=clock, files=files)
    put_one(store, clock, 0, 100 + number % SIZES)
    put_one(store, clock, 1, 50)
    if kind == "roll":
        while store.max_offset % 4096 < 3000:
            put_one(store, clock, 2, 300)
    store.flush_commit_log()
    store.write_pending()
    store.flush_queues(thorough=True)
    kept = everything(store)
    before = snapshot(root)
    if kind == "checkpoint":
        put_one(store, clock, 3, body)
        kept = everything(store)

        def note() -> None:
            nonlocal before
            before = snapshot(root)

        files.about_to_write = note
        store.flush_commit_log()
        store.write_pending()
        store.flush_queues(thorough=True)
    else:
        for more in range(3 if kind == "batch" else 1):
            put_one(store, clock, 3 + more, max(body, 1100) if kind == "roll" else body)
        store.write_pending()
    after, found = snapshot(root), everything(store)
    kill(store)
    shutil.rmtree(root)
    sizes = (1,) if kind == "checkpoint" else UNITS[number // 20 % len(UNITS) :: -1]
    units = next(
        (units for size in (*sizes, 512) if len(units := changed(before, after, size)) <= MOST_UNITS),
        changed(before, after, 4096),
    )
    return Case(f"{kind} {number}", before, after, units, kept, found[len(kept) :])


def put_one(store: MessageStore, clock: ManualClock, number: int, size: int) -> None:
    clock.tick(0.7)
    properties = {"UNIQ_KEY": f"U{number}", "KEYS": f"k{number}", "TAGS": f"T{number % 2}"}
    put(store, bytes([65 + number]) * size, queue_id=number % 2, properties=properties)


def survive(case: Case, mask: int, root: Path, *, is_checked: bool) -> None:
    """Open the state, compare, append one more message, and look again."""
    what = f"{case.name}, state {mask} of {case.states}"
    case.write(mask, root)
    with open_store(root, clock=ManualClock(NOW + 100_000), files=UnsyncedFiles()) as store:
        found = everything(store)
        more = len(found) - len(case.kept)
        assert found[: len(case.kept)] == case.kept, f"{what}: a message that was synced is gone or changed"
        assert found[len(case.kept) :] == case.maybe[: max(more, 0)], f"{what}: a message that nobody sent is served"
        put(store, b"after", queue_id=1)
        assert [message.body for message in everything(store)][len(found) :] == [b"after"], f"{what}: no more sends"
    if is_checked:
        report = checked(root)
        assert report.is_clean, f"{what}: " + "; ".join(map(str, report.problems))


async def play(round_: Round) -> None:
    root = round_.directory / "state"
    first = round_.number * CASES_PER_ROUND
    for number in range(first, first + CASES_PER_ROUND):
        case = make_case(number, round_.directory)
        for mask in filter(case.is_legal, range(case.states)):
            survive(case, mask, root, is_checked=mask % CHECKED_EVERY == 0)
            shutil.rmtree(root)
            round_.figures["states"] += 1


ROW: Final = Row(
    4,
    "torn-states",
    "enumerated torn and reordered states of one append, one roll of a file, one checkpoint",
    {"states": 1_000_000},
    "synced records are served, other records whole or not at all",
    play,
    "a step changes units (1 to 512 bytes, and names of files); a store with each subset of these units is opened, "
    "read and appended to. Left out: a log file whose name is there without the name of an older new one",
    in_memory=True,
    lanes=2,
)
