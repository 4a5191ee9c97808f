"""Starts after an orderly stop, after a killed process and after a power cut."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from downrange.clock import ManualClock
from downrange.model.record import MAGIC_BLANK
from downrange.store.checkpoint import DirectoryLock
from downrange.store.errors import StoreError, StoreLocked
from downrange.store.message_store import MessageStore
from tests.support.checked_store import assert_clean
from tests.support.stores import append
from tests.unit.store.small_store import (
    NOW,
    bodies,
    kill,
    new_message,
    open_store,
    pull_the_plug,
    put,
    read_all,
)


def fill(store: MessageStore, count: int, size: int = 300) -> list[bytes]:
    """Messages over two queues; return the bodies of queue 0."""
    expected = []
    for number in range(count):
        body = (b"%06d" % number) * (size // 6)
        put(store, body, queue_id=number % 2, properties={"KEYS": f"k{number}", "UNIQ_KEY": f"U{number}"})
        if number % 2 == 0:
            expected.append(body)
    return expected


def last_file(root: Path) -> Path:
    return max((root / "commitlog").iterdir())


def change(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as stream:
        stream.seek(at)
        stream.write(data)


def keys_found(store: MessageStore, count: int) -> int:
    return sum(len(store.query("TopicTest", f"k{number}", 32, 0, 1 << 60).slices) == 1 for number in range(count))


@pytest.mark.parametrize("is_last", [True, False])
def test_a_record_with_a_hole_in_its_properties_is_cut_off_after_a_power_cut(tmp_path: Path, is_last: bool) -> None:
    store = open_store(tmp_path)
    put(store, b"safe")
    torn = put(store, b"torn", properties={"KEYS": "k" * 300}).physical_offset
    if not is_last:
        put(store, b"behind it")
    pull_the_plug(store)
    change(last_file(tmp_path), (torn + 200) // 64 * 64, bytes(64))
    with open_store(tmp_path) as store:
        assert store.max_offset == torn
        assert bodies(store) == [b"safe"]
        assert any("a part of its topic or properties is missing" in warning for warning in store.recovery.warnings)


def test_a_zero_that_a_sender_put_into_a_property_is_no_hole(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, b"odd", properties={"KEYS": "a\0\0b"})
    put(store, b"behind it")
    pull_the_plug(store)
    with open_store(tmp_path) as store:
        assert bodies(store) == [b"odd", b"behind it"]


@pytest.mark.parametrize("entry", [0, 3, 9])
def test_a_queue_with_a_torn_entry_is_built_again(tmp_path: Path, entry: int) -> None:
    """An entry of 20 bytes may lie in two sectors: its offset was synced, the end of its size was not."""
    store = open_store(tmp_path)
    expected = fill(store, 20)
    store.write_pending()
    pull_the_plug(store)
    queue = min((tmp_path / "consumequeue" / "TopicTest" / "0").iterdir())
    assert any(queue.read_bytes()[entry * 20 + 10 : entry * 20 + 12])
    change(queue, entry * 20 + 11, b"\0")
    with open_store(tmp_path) as store:
        assert bodies(store) == expected
        assert store.recovery.rebuilt_queues


def test_an_orderly_stop_leaves_everything_in_order(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert (tmp_path / "abort").exists()
    expected = fill(store, 40)
    end = store.max_offset
    store.close()
    assert not (tmp_path / "abort").exists()
    assert (tmp_path / "lock").read_bytes() == b"lock"
    checkpoint = (tmp_path / "checkpoint").read_bytes()
    assert len(checkpoint) == 4096
    assert int.from_bytes(checkpoint[:8], "big") == int.from_bytes(checkpoint[8:16], "big") == NOW
    with open_store(tmp_path) as store:
        assert store.recovery.clean
        assert store.recovery.warnings == []
        assert store.recovery.records == 0  # the queues know the end, nothing is read
        assert store.max_offset == end
        assert bodies(store) == expected
        assert keys_found(store, 40) == 40
        assert put(store).queue_offset == 20


@pytest.mark.parametrize("leave", [kill, pull_the_plug])
def test_a_crash_loses_nothing_that_reached_the_files(tmp_path: Path, leave: object) -> None:
    store = open_store(tmp_path)
    expected = fill(store, 90)
    end = store.max_offset
    assert callable(leave)
    leave(store)
    with open_store(tmp_path) as store:
        assert not store.recovery.clean
        assert store.recovery.warnings == []
        assert store.max_offset == end
        assert bodies(store) == expected
        assert keys_found(store, 90) == 90
        assert put(store).queue_offset == 45


def test_a_torn_last_record_is_cut_off_and_zeroed(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    expected = fill(store, 21)
    torn = store.physical_offset_of("TopicTest", 0, 10)
    end = store.max_offset
    pull_the_plug(store)
    change(last_file(tmp_path), (torn + (end - torn) // 2) % 4096, bytes((end - torn) - (end - torn) // 2))
    with open_store(tmp_path) as store:
        assert store.max_offset == torn
        assert bodies(store) == expected[:-1]
        assert any(f"cut at {torn}" in warning for warning in store.recovery.warnings)
        assert not any(last_file(tmp_path).read_bytes()[torn % 4096 :])
        assert not (tmp_path / "commitlog.cut").exists()
        assert store.query("TopicTest", "k20", 32, 0, 1 << 60).slices == []
        # The place is used again, and found by key again.
        again = put(store, b"again", properties={"KEYS": "k20"})
        assert (again.physical_offset, again.queue_offset) == (torn, 10)
        assert len(store.query("TopicTest", "k20", 32, 0, 1 << 60).slices) == 1


def test_a_record_without_its_head_was_never_there(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    expected = fill(store, 4)
    end = store.max_offset
    kill(store)
    change(last_file(tmp_path), end + 88, b"a body whose writer died before the head")
    with open_store(tmp_path) as store:
        assert store.recovery.warnings == [f"the last record was not finished; the log was cut at {end}"]
        assert bodies(store) == expected
        assert not any(last_file(tmp_path).read_bytes()[end:])


@pytest.mark.parametrize("size", [0, 300])
def test_a_record_that_lost_the_middle_of_its_head_is_cut_off(tmp_path: Path, size: int) -> None:
    """With zeros for its queue offset it would take the place of the first message of its queue."""
    store = open_store(tmp_path)
    put(store, b"first")
    start = store.max_offset
    put(store, b"x" * size)
    kill(store)
    change(last_file(tmp_path), start + 20, bytes(16))  # queue offset and physical offset
    with open_store(tmp_path) as store:
        assert bodies(store) == [b"first"]
        assert store.max_offset == start


def test_whole_records_behind_a_damaged_one_are_put_aside(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, 40)
    damaged = store.physical_offset_of("TopicTest", 0, 11)
    survivors = [path for path in (tmp_path / "commitlog").iterdir() if int(path.name) > damaged]
    pull_the_plug(store)
    path = tmp_path / "commitlog" / f"{damaged // 4096 * 4096:020d}"
    change(path, damaged % 4096 + 90, b"\xff\xff")
    before = path.read_bytes()
    with open_store(tmp_path) as store:
        assert store.max_offset == damaged
        assert len(bodies(store)) == 11
        assert any("checksum" in warning for warning in store.recovery.warnings)
        aside = {path.name for path in (tmp_path / "commitlog.cut").iterdir()}
        assert aside == {path.name for path in survivors} | {f"{path.name}.from-{damaged}"}
        kept = (tmp_path / "commitlog.cut" / f"{path.name}.from-{damaged}").read_bytes()
        assert kept == before[damaged % 4096 :].rstrip(b"\0") or kept == before[damaged % 4096 :]
        put(store)


def test_an_unused_file_made_ahead_is_forgotten(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    expected = fill(store, 4)
    store.prepare_next_file()
    assert (tmp_path / "commitlog" / "00000000000000004096").exists()
    assert not store.needs_next_file
    kill(store)
    with open_store(tmp_path) as store:
        assert store.recovery.warnings == []
        assert bodies(store) == expected
        assert not (tmp_path / "commitlog" / "00000000000000004096").exists()
        store.prepare_next_file()
    assert not (tmp_path / "commitlog" / "00000000000000004096").exists()


def test_a_file_made_ahead_is_used(tmp_path: Path) -> None:
    with open_store(tmp_path, warm_mapped_file_enable=True) as store:
        needed = [store.needs_next_file]
        fill(store, 1)
        needed.append(store.needs_next_file)
        assert needed == [False, True]
        store.prepare_next_file()
        inode = (tmp_path / "commitlog" / "00000000000000004096").stat().st_ino
        fill(store, 12)
        assert (tmp_path / "commitlog" / "00000000000000004096").stat().st_ino == inode
        assert store.needs_next_file


def test_a_blank_record_without_a_next_file_still_ends_its_file(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, bytes(2000))
    put(store, bytes(2500))
    pull_the_plug(store)
    (tmp_path / "commitlog" / "00000000000000004096").unlink()
    with open_store(tmp_path) as store:
        assert store.max_offset == 4096
        assert put(store, b"next").physical_offset == 4096


def test_the_size_of_a_blank_record_that_a_power_cut_took_is_written_again(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    sent = fill(store, 20)
    first = tmp_path / "commitlog" / f"{0:020d}"
    pull_the_plug(store)
    before = first.read_bytes()
    blank = before.rindex(MAGIC_BLANK.to_bytes(4, "big")) - 4
    change(first, blank, bytes(4))
    with open_store(tmp_path) as store:
        assert bodies(store) == sent
        put(store)
    assert first.read_bytes() == before
    assert_clean(tmp_path)


def test_missing_queues_and_index_are_built_again(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    expected = fill(store, 120)
    store.close()
    files = {
        path.relative_to(tmp_path): path.read_bytes()
        for kind in ("consumequeue", "index")
        for path in (tmp_path / kind).rglob("*")
        if path.is_file()
    }
    shutil.rmtree(tmp_path / "consumequeue")
    shutil.rmtree(tmp_path / "index")
    with open_store(tmp_path) as store:
        assert bodies(store) == expected
        assert keys_found(store, 120) == 120
    rebuilt = {
        path.relative_to(tmp_path): path.read_bytes()
        for path in (tmp_path / "consumequeue").rglob("*")
        if path.is_file()
    }
    assert rebuilt == {path: data for path, data in files.items() if path.parts[0] == "consumequeue"}


def test_only_the_index_is_missing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    expected = fill(store, 30)
    store.close()
    shutil.rmtree(tmp_path / "index")
    with open_store(tmp_path) as store:
        assert bodies(store) == expected
        assert keys_found(store, 30) == 30


def test_a_queue_without_its_first_file_is_built_again(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    expected = fill(store, 120)
    store.close()
    (tmp_path / "consumequeue" / "TopicTest" / "0" / "00000000000000000000").unlink()
    with open_store(tmp_path) as store:
        assert store.recovery.rebuilt_queues == ["TopicTest/0"]
        assert bodies(store) == expected


def test_after_a_crash_a_queue_that_is_gone_is_built_again(tmp_path: Path) -> None:
    clock = ManualClock(NOW)
    store = open_store(tmp_path, clock=clock)
    expected = fill(store, 60)
    store.close()
    clock.tick(3600)
    store = open_store(tmp_path, clock=clock)
    body = b"after an hour" * 20
    for _ in range(40):
        put(store, body)
    store.flush_commit_log()
    store.write_pending()
    store.flush_queues(thorough=True)
    clock.tick(3600)
    put(store, body)
    kill(store)
    shutil.rmtree(tmp_path / "consumequeue" / "TopicTest" / "0")
    with open_store(tmp_path, clock=clock) as store:
        assert store.recovery.start_offset > 0
        assert store.recovery.rebuilt_queues == ["TopicTest/0"]
        assert bodies(store) == expected + [body] * 41


def test_recovery_starts_where_the_checkpoint_says(tmp_path: Path) -> None:
    clock = ManualClock(NOW)
    store = open_store(tmp_path, clock=clock)
    fill(store, 60)
    store.flush_commit_log()
    store.write_pending()
    store.flush_queues(thorough=True)
    assert store.checkpoint.safe_timestamp(with_index=False) == NOW - 3000
    clock.tick(60)
    for _ in range(20):
        put(store, bytes(300))
    store.flush_commit_log()
    store.write_pending()
    store.flush_queues(thorough=True)
    kill(store)
    with open_store(tmp_path, clock=clock) as store:
        # Only files that begin with a record of the first minute are known to be safe; the last such one is read.
        assert store.recovery.start_offset > 0
        assert store.commit_log.store_timestamp_at(store.recovery.start_offset) == NOW
        assert store.recovery.records < 80
        assert store.max_offset_of("TopicTest", 0) == 50


def test_an_empty_log_takes_queues_and_index_with_it(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, 5)
    store.close()
    shutil.rmtree(tmp_path / "commitlog")
    with open_store(tmp_path) as store:
        assert len(store.queues) == 0
        assert any("empty" in warning for warning in store.recovery.warnings)
        assert put(store, properties={"KEYS": "new"}).queue_offset == 0
        assert len(store.query("TopicTest", "new", 32, 0, 1 << 60).slices) == 1


def test_a_log_that_is_shorter_than_its_queues_wins(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    expected = fill(store, 40)
    store.close()
    removed = last_file(tmp_path)
    removed.unlink()
    with open_store(tmp_path) as store:
        assert store.recovery.clean
        assert store.max_offset == int(removed.name)
        assert bodies(store) == expected[: len(bodies(store))]
        last = put(store, b"next", properties={"KEYS": "next"})
        assert last.queue_offset == len(bodies(store)) - 1
        assert len(store.query("TopicTest", "next", 32, 0, 1 << 60).slices) == 1


def test_a_hole_in_the_log_is_reported(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, 60)
    store.close()
    (tmp_path / "commitlog" / "00000000000000004096").unlink()
    with open_store(tmp_path) as store:
        assert any("00000000000000004096" in warning for warning in store.recovery.warnings)
        assert read_all(store)[0].queue_offset == 0
        put(store)


def test_a_topic_that_was_deleted_and_made_again_keeps_its_new_messages(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for number in range(5):
        put(store, b"old %d" % number)
    store.remove_topic("TopicTest")
    assert store.max_offset_of("TopicTest", 0) == 0
    for number in range(3):
        assert put(store, b"new %d" % number).queue_offset == number
    pull_the_plug(store)
    assert list((tmp_path / "consumequeue").iterdir()) == []  # all entries were still in memory
    with open_store(tmp_path) as store:
        assert bodies(store) == [b"new 0", b"new 1", b"new 2"]


def test_a_second_process_is_kept_out(tmp_path: Path) -> None:
    with open_store(tmp_path):
        with pytest.raises(StoreLocked, match=str(tmp_path)):
            open_store(tmp_path)
        lock = DirectoryLock(tmp_path / "lock")
        with pytest.raises(StoreLocked, match="already open in this process"):
            lock.take()
    open_store(tmp_path).close()


def test_stores_of_other_kinds_are_refused(tmp_path: Path) -> None:
    (tmp_path / "consumequeue_r").mkdir()
    with pytest.raises(StoreError, match="RocksDB"):
        open_store(tmp_path)
    (tmp_path / "consumequeue_r").rmdir()
    (tmp_path / "batchconsumequeue" / "T" / "0").mkdir(parents=True)
    with pytest.raises(StoreError, match="BatchCQ"):
        open_store(tmp_path)


def test_stray_directories_among_the_queues_are_passed_over(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        put(store)
    (tmp_path / "consumequeue" / "TopicTest" / "notes").mkdir()
    with open_store(tmp_path) as store:
        assert bodies(store) == [b"hello"]
        assert append(store, new_message()).queue_offset == 1


def test_a_directory_that_cannot_be_a_store_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match=r"cannot use .*file/store as a store: there is a file"):
        open_store(tmp_path / "file" / "store")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "commitlog").write_bytes(b"in the way")
    for _ in range(2):  # the lock was given back: the second attempt says the same
        with pytest.raises(StoreError, match="cannot open the store"):
            open_store(tmp_path / "store")
