"""Queues, index and checkpoint can be taken away, cut or emptied: everything is built again from the log."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from downrange.store.errors import StoreCorrupt
from downrange.store.message_store import MessageStore
from tests.support.checked_store import assert_clean, checked
from tests.support.damage import CrashedStore, everything
from tests.unit.store.small_store import open_store

Damage = Callable[[Path], object]


def first(directory: Path) -> Path:
    return min(path for path in directory.rglob("*") if path.is_file())


def last(directory: Path) -> Path:
    return max(path for path in directory.rglob("*") if path.is_file())


def empty(path: Path) -> None:
    path.write_bytes(b"")


def keep_only_the_log(root: Path) -> None:
    for path in root.iterdir():
        if path.name != "commitlog":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


DAMAGES: dict[str, Damage] = {
    "no queues": lambda root: shutil.rmtree(root / "consumequeue"),
    "no queue of a topic": lambda root: shutil.rmtree(root / "consumequeue" / "TopicTest"),
    "no single queue": lambda root: shutil.rmtree(root / "consumequeue" / "TopicTest" / "1"),
    "an empty queue directory": lambda root: first(root / "consumequeue" / "Other").unlink(),
    "an empty queue file": lambda root: empty(last(root / "consumequeue" / "TopicTest")),
    "no index": lambda root: shutil.rmtree(root / "index"),
    "no last index file": lambda root: last(root / "index").unlink(),
    "an empty last index file": lambda root: empty(last(root / "index")),
    "no checkpoint": lambda root: (root / "checkpoint").unlink(),
    "an empty checkpoint": lambda root: empty(root / "checkpoint"),
    "a short checkpoint": lambda root: (root / "checkpoint").write_bytes(b"\0\0\1"),
    "nothing but the log": keep_only_the_log,
}


def found_by_key(store: MessageStore, crashed: CrashedStore) -> list[str]:
    return [
        message.unique_key or ""
        for message in crashed.before
        if len(store.query(message.topic, message.unique_key or "", 8, 0, 1 << 62).slices) == 1
    ]


# Without a crash mark a start reads only what follows the queues that are there, and a topic that was deleted looks
# just like a queue that was lost. It is `check` that tells, and says what to do.
UNSEEN_WITHOUT_ABORT = ("no queue of a topic", "no single queue", "an empty queue file")


def rebuild_as_advised(root: Path) -> None:
    problems = [str(problem) for problem in checked(root).problems]
    assert any("move the directory consumequeue away" in problem for problem in problems), problems
    shutil.rmtree(root / "consumequeue")


@pytest.mark.parametrize("abort", ["killed", "power-cut", "no abort mark"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_missing_is_built_again(damage: str, abort: str, tmp_path: Path) -> None:
    crashed = CrashedStore(tmp_path / "store", tmp_path, plug_pulled=abort == "power-cut")
    if abort == "no abort mark":
        (crashed.root / "abort").unlink()
    DAMAGES[damage](crashed.root)
    if abort == "no abort mark" and damage in UNSEEN_WITHOUT_ABORT:
        rebuild_as_advised(crashed.root)
    with crashed.reopen(crashed.root) as store:
        assert everything(store) == crashed.before
        assert len(found_by_key(store, crashed)) == len(crashed.before)
        assert store.max_offset == crashed.end
    assert_clean(crashed.root)


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_same_after_an_orderly_stop(damage: str, tmp_path: Path) -> None:
    crashed = CrashedStore(tmp_path / "store", tmp_path)
    crashed.reopen(crashed.root).close()
    DAMAGES[damage](crashed.root)
    if damage in UNSEEN_WITHOUT_ABORT:
        rebuild_as_advised(crashed.root)
    with crashed.reopen(crashed.root) as store:
        assert everything(store) == crashed.before
        assert len(found_by_key(store, crashed)) == len(crashed.before)
    assert_clean(crashed.root)


def test_a_queue_file_cut_short_stops_the_start_with_a_reason(tmp_path: Path) -> None:
    crashed = CrashedStore(tmp_path / "store", tmp_path)
    path = first(crashed.root / "consumequeue" / "TopicTest" / "0")
    path.write_bytes(path.read_bytes()[:777])
    with pytest.raises(StoreCorrupt, match="777 bytes"):
        open_store(crashed.root)
    shutil.rmtree(crashed.root / "consumequeue")  # as the message says
    with crashed.reopen(crashed.root) as store:
        assert everything(store) == crashed.before
    assert_clean(crashed.root)
