"""What must hold between the compiled check of a store and its twin in Python, for one random input each."""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from downrange import compiled
from downrange.store.check import queues_in_log
from downrange.store.check import store_check as check
from downrange.store.check.queues_in_log import BLOCK_AT, LAST_OFFSET, NUMBERS
from downrange.store.check.store_check import StoreReport
from downrange.store.message_store import MessageStore
from tests.support.checked_store import checked
from tests.support.compiled_replay_checks import NONSENSE, SETTINGS, damage, fill, lose_files, record
from tests.unit.store.small_store import NOW, kill, open_store, pull_the_plug


def same_report(random: Random, root: str) -> None:
    """Check what a run left, or worse, compiled and in Python."""
    entries = random.choice((5, 50, 1000))
    settings: dict[str, Any] = SETTINGS | {"max_index_num": entries}
    store = open_store(Path(root), **settings)
    fill(random, store, random.choice((1, 20, 150)))
    if random.random() < 0.5:
        store.write_pending()
        store.flush_queues(thorough=random.random() < 0.5)
        fill(random, store, random.choice((0, 30)))
    if random.random() < 0.3:
        store.remove_files(store.take_oldest_files(1))
        store.delete_dependents()
    if random.random() < 0.2:
        _compare(Path(root), entries)  # in use
    end = store.max_offset
    random.choice((kill, pull_the_plug, MessageStore.close, MessageStore.close))(store)
    if random.random() < 0.3:
        lose_files(random, Path(root))
    if random.random() < 0.3:
        damage(random, Path(root), end)
    if random.random() < 0.5:
        _damage_what_is_derived(random, Path(root))
    _compare(Path(root), entries)


def _compare(root: Path, entries: int) -> None:
    report = checked(root, slots=7, entries=entries)
    assert report == checked_without_twins(root, slots=7, entries=entries)


def checked_without_twins(root: Path, *, slots: int, entries: int) -> StoreReport:
    with patch.object(check, "steps", None), patch.object(queues_in_log, "steps", None):
        return checked(root, slots=slots, entries=entries)


def _damage_what_is_derived(random: Random, root: Path) -> None:
    """Change some bytes of queues and index, most of them where there is something."""
    files = sorted(path for kind in ("consumequeue", "index") for path in (root / kind).rglob("*") if path.is_file())
    for path in random.choices(files, k=random.choice((1, 3))) if files else ():
        size = path.stat().st_size
        used = random.choice((40, 100, 400, size))
        with path.open("r+b") as stream:
            stream.seek(random.randrange(max(1, min(used, size))))
            stream.write(random.choice((b"\0", b"\xff", b"\x01", bytes(20), random.randbytes(3))))
        os.truncate(path, size)


def refuses_nonsense_about_a_check(random: Random) -> None:
    """Damaged records in a buffer of their own, and arguments that only a bug can pass: no error, nothing half done."""
    steps: Any = compiled.steps
    log = bytearray()
    for number in range(4):
        one = bytearray(record(random, 5 + number))
        one[28:36] = (1000 + len(log)).to_bytes(8, "big")
        log += one
    for _ in range(random.randrange(3)):
        log[random.randrange(len(log))] = random.choice((0, 1, 0x7F, 0x80, 0xFF))
    del log[random.randrange(len(log) + 1) if random.random() < 0.3 else len(log) :]
    rows = array("q", bytes(8 * NUMBERS))
    rows[LAST_OFFSET], rows[BLOCK_AT] = 4, random.choice((-1, 0))
    if random.random() < 0.5:
        rows[BLOCK_AT:] = array("q", (0, 5, random.choice((1, 4, 5)), random.choice((0, 9, 1 << 62))))
    if random.random() < 0.4:
        rows[random.randrange(NUMBERS)] = random.choice((-1, 1, 20, 2**63 - 1, -(2**63), 1 << 40))
    index = bytes(random.choice((0, 40 + 4 * 7 + 20 * 10)))
    newest = array("i", bytes(4 * random.choice((0, 7))))
    place: Any = random.choice((None, (), (index, 7, 2, 10, NOW, newest, random.random() < 0.5)))
    if place and random.random() < 0.5:
        changed = list(place)
        changed[random.randrange(len(changed))] = random.choice(NONSENSE)
        place = tuple(changed)
    arguments: list[Any] = [
        bytes(log), 0, len(log), 1000, {(b"TopicA", 1): random.choice((0, 0, 0, 12, "x"))}, steps.TopicTable(), rows,
        bytearray(random.choice((0, 99, 100))), 100, place, random.choice((0, NOW)),
    ]  # fmt: skip
    if random.random() < 0.5:
        arguments[random.randrange(len(arguments))] = random.choice(NONSENSE)
    before = list(rows), list(newest)
    found = steps.check_records(*arguments)
    if found is None:
        assert (list(rows), list(newest)) == before
    elif random.random() < 0.5:  # with what the table has learnt, and other rows
        rows[:] = array("q", before[0][: random.choice((0, 5, NUMBERS))])
        steps.check_records(*arguments)
    else:
        assert 0 <= found[0] <= len(log)
        assert found[1] > 0 or found[5] is not None
