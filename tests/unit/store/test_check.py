"""`check` finds every planted fault, finds none where there is none, and changes nothing."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from downrange.store.check.directory import NotAStore, StoreDirectory, StoreState
from downrange.store.check.index_shape import IndexShape, shape_of
from downrange.store.check.store_check import StoreReport, check, lenient_json
from downrange.store.message_store import MessageStore
from downrange.store.queue.consume_queue import ENTRY
from tests.support.checked_store import assert_clean, checked
from tests.support.golden_store import unpack
from tests.support.stores import append_group
from tests.unit.store.small_store import NOW, kill, new_message, open_store, put

FILE_SIZE = 4096
QUEUE = Path("consumequeue", "TopicTest", "0", "00000000000000000000")


def lines(report: StoreReport) -> str:
    return "\n".join(map(str, report.problems))


def fingerprint(root: Path) -> dict[str, tuple[str, int]]:
    """Checksum and time of change of every file, times of directories too."""
    return {
        str(path.relative_to(root)): (
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
            path.stat().st_mtime_ns,
        )
        for path in [root, *sorted(root.rglob("*"))]
    }


# Stores of the genuine broker.


@pytest.mark.parametrize("name", ["clean", "ext"])
def test_a_store_of_the_genuine_broker_is_in_order(name: str, tmp_path: Path) -> None:
    golden = unpack(name, tmp_path)
    before = fingerprint(golden.root)
    report = assert_clean(golden.root)
    assert report.state is StoreState.STOPPED
    assert report.records == len(list(golden.records()))
    assert report.queue_entries >= sum(queue["maxOffset"] for queue in golden.manifest["queues"])
    assert report.notes == ()
    assert fingerprint(golden.root) == before


def test_a_killed_broker_left_its_mark(tmp_path: Path) -> None:
    golden = unpack("killed", tmp_path)
    report = checked(golden.root)
    assert report.state is StoreState.CRASHED
    (problem,) = report.problems
    assert problem.where == "abort"
    assert "the next start reads the log from 65536 on" in problem.remedy


def test_a_torn_tail_is_told_with_the_place_of_the_cut(tmp_path: Path) -> None:
    golden = unpack("torn", tmp_path)
    torn, abort = checked(golden.root).problems
    assert torn.where == "commitlog/00000000000000196608"
    assert torn.what.startswith("torn tail: record at 232373")
    assert torn.remedy == "the next start cuts the log at 232373"
    assert abort.where == "abort"


# A store of our own, and faults planted in it.


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Stopped in order; three log files, three queues, two index files, every kind of message."""
    with open_store(tmp_path, max_index_num=100) as store:
        fill(store)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "consumerOffset.json").write_text('{"offsetTable":{"T@g":{0:1,1:2}}}')
    assert_clean(tmp_path)
    return tmp_path


def fill(store: MessageStore) -> None:
    for number in range(36):
        properties = {"UNIQ_KEY": f"U{number}", "KEYS": f"k{number} all", "TAGS": f"Tag{number % 3}"}
        put(store, b"%d" % number * 60, queue_id=number % 2, properties=properties)
    put(store, b"prepared", sys_flag=4, properties={"UNIQ_KEY": "half"})
    put(store, b"rollback", sys_flag=12, properties={"UNIQ_KEY": "back"})
    put(store, b"commit", sys_flag=8, properties={"UNIQ_KEY": "half"})
    put(store, b"later", topic="SCHEDULE_TOPIC_XXXX", queue_id=2, properties={"DELAY": "3", "TAGS": "TagA"})
    append_group(store, *[new_message(b"unit", properties={"KEYS": "b1"})] * 3)


def change(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as stream:
        stream.seek(at)
        stream.write(data)


def add(path: Path, at: int, number: int = 1) -> None:
    """Count one byte up."""
    change(path, at, bytes([(path.read_bytes()[at] + number) % 256]))


def log_of(root: Path, number: int = 0) -> Path:
    return root / "commitlog" / f"{number * FILE_SIZE:020d}"


def record_start(root: Path, number: int) -> int:
    return int(ENTRY.unpack_from((root / QUEUE).read_bytes(), number * 20)[0])


def index_file(root: Path) -> Path:
    return min((root / "index").iterdir())


def end_of(path: Path) -> int:
    return len(path.read_bytes().rstrip(b"\0"))


def end_of_log(root: Path) -> int:
    return end_of(max((root / "commitlog").iterdir()))


def remove_entry(root: Path) -> None:
    change(root / QUEUE, (end_of(root / QUEUE) - 1) // 20 * 20, bytes(20))


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a body changed": (lambda root: add(log_of(root), 95), "the body does not match its checksum"),
    "a record says it lies elsewhere": (lambda root: add(log_of(root), 35), "says that it lies at 1"),
    "a record's queue offset changed": (lambda root: add(log_of(root), record_start(root, 1) + 27), "queue offset 2"),
    "a store time in the past": (lambda root: add(log_of(root), record_start(root, 3) + 63, -40), "ms before"),
    "a magic number is gone": (lambda root: change(log_of(root), record_start(root, 2) + 4, b"abcd"), "no record at"),
    "zeros in the middle": (lambda root: change(log_of(root), record_start(root, 2), bytes(9)), "data behind it"),
    "garbage behind the end": (
        lambda root: change(max((root / "commitlog").iterdir()), end_of_log(root) + 50, b"x"),
        "torn tail",
    ),
    "a blank record of the wrong size": (
        lambda root: add(log_of(root), log_of(root).read_bytes().index(b"\xcb\xd4\x31\x94") - 1),
        "blank record",
    ),
    "properties that are no text": (lambda root: add(log_of(root), record_start(root, 1) - 1, 150), "no text"),
    "a log file is missing": (lambda root: log_of(root, 1).unlink(), "are missing"),
    "a log file is cut": (lambda root: os.truncate(log_of(root, 1), 4000), "has 4000 bytes"),
    "a stray file in the log": (lambda root: (root / "commitlog" / "notes.txt").touch(), "does not belong here"),
    "an entry says another size": (lambda root: add(root / QUEUE, 11), "its record has"),
    "an entry has another tag": (lambda root: add(root / QUEUE, 19), "tags code"),
    "an entry points between records": (lambda root: add(root / QUEUE, 27), "where no record begins"),
    "an entry points at another queue": (
        lambda root: change(
            root / QUEUE, 0, (root / "consumequeue" / "TopicTest" / "1" / QUEUE.name).read_bytes()[:20]
        ),
        "a record of TopicTest/1",
    ),
    "the last entry is gone": (remove_entry, "have no entry"),
    "an entry in the middle is gone": (lambda root: change(root / QUEUE, 40, bytes(20)), "behind its end"),
    "a queue is gone": (lambda root: shutil.rmtree(root / QUEUE.parent), "is missing, but the log holds"),
    "a queue file is cut": (lambda root: os.truncate(root / QUEUE, 500), "has 500 bytes"),
    "a stray file in a queue": (lambda root: (root / QUEUE.parent / "x").touch(), "does not belong here"),
    "an index entry has another hash": (lambda root: add(index_file(root), 40 + 400 + 20 + 3), "no such key"),
    "an index entry points elsewhere": (
        lambda root: add(index_file(root), 40 + 400 + 40 + 11),
        "where no record begins",
    ),
    "an index entry has another time": (lambda root: add(index_file(root), 40 + 400 + 40 + 15), "seconds after"),
    "a chain of the index is broken": (lambda root: add(index_file(root), 40 + 400 + 40 + 19, 7), "in its chain"),
    "a slot of the index is empty": (
        lambda root: change(index_file(root), 40, bytes(400)),
        "the newest of its chain is",
    ),
    "an index begins elsewhere": (lambda root: add(index_file(root), 7), "does not begin where its header says"),
    "an index ends elsewhere": (lambda root: add(index_file(root), 31), "says that it ends with"),
    "an index file in the middle is gone": (
        lambda root: sorted((root / "index").iterdir())[1].unlink(),
        "it ends before the message",
    ),
    "an index file is cut": (lambda root: os.truncate(index_file(root), 999), "has 999 bytes"),
    "a checkpoint from the future": (
        lambda root: change(root / "checkpoint", 8, b"\x01"),
        "consume queues is safe up to",
    ),
    "a checkpoint cut short": (lambda root: os.truncate(root / "checkpoint", 10), "has 10 bytes"),
    "no checkpoint": (lambda root: (root / "checkpoint").unlink(), "is missing"),
    "a configuration that is no JSON": (
        lambda root: (root / "config" / "consumerOffset.json").write_text('{"offsetTable":{'),
        "cannot be read",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, root: Path) -> None:
    plant, expected = FAULTS[fault]
    plant(root)
    before = fingerprint(root)
    report = checked(root)
    assert expected in lines(report)
    assert all(problem.where and problem.what and problem.remedy for problem in report.problems)
    assert fingerprint(root) == before


def test_what_follows_a_damaged_record_is_still_checked(root: Path) -> None:
    whole = assert_clean(root)
    add(log_of(root), 95)
    add(root / QUEUE, 3 * 20 + 19)
    report = checked(root)
    assert report.records == whole.records - 1
    assert "checksum" in lines(report)
    assert "entry 3 has tags code" in lines(report)
    assert len(report.problems) == 2


def test_faults_of_a_kind_make_one_line(root: Path) -> None:
    for number in range(5):
        add(root / QUEUE, number * 20 + 11)
    (problem,) = checked(root).problems
    assert problem.count == 5
    assert "(4 more like it)" in str(problem)


# Stores that are in use, were killed, or never held anything.


def test_a_store_in_use_is_checked_beside_its_writer(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        fill(store)
        report = assert_clean(tmp_path)
        assert (report.state, report.owner) == (StoreState.LIVE, os.getpid())
        assert "messages without a queue entry yet" in report.notes[-1]
        assert report.records == 43
        # The lock of this process is still held.
        taking = "from downrange.store.checkpoint import *; DirectoryLock(Path(__import__('sys').argv[1])).take()"
        other = subprocess.run([sys.executable, "-c", taking, str(tmp_path / "lock")], capture_output=True, text=True)
        assert f"in use by process {os.getpid()}" in other.stderr


def test_the_owner_of_a_store_is_found_from_outside(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        put(store)
        asking = (
            "import sys; from pathlib import Path; from downrange.store.check.directory import StoreDirectory;"
            "print(StoreDirectory(Path(sys.argv[1])).owner)"
        )
        other = subprocess.run(
            [sys.executable, "-c", asking, str(tmp_path)], capture_output=True, text=True, check=True
        )
        assert other.stdout.strip() == str(os.getpid())
    assert StoreDirectory(tmp_path).owner is None


def test_a_fault_in_a_store_in_use_is_found(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        fill(store)
        store.write_pending()
        add(log_of(tmp_path), 95)
        add(tmp_path / QUEUE, 3 * 20 + 19)
        assert "checksum" in lines(checked(tmp_path))
        assert "entry 3 has tags code" in lines(checked(tmp_path))


def test_queues_that_lag_after_a_crash_are_no_fault(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store)
    kill(store)
    (problem,) = checked(tmp_path).problems
    assert problem.where == "abort"
    assert "messages without a queue entry" in problem.what
    open_store(tmp_path).close()
    assert_clean(tmp_path)


def test_a_deleted_topic_is_no_fault(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        put(store, topic="Deleted")
        put(store)
        store.remove_topic("Deleted")
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "topics.json").write_text('{"topicConfigTable":{"TopicTest":{"readQueueNums":4}}}')
    report = assert_clean(tmp_path)
    assert any("Deleted/0 is gone and so is its topic" in note for note in report.notes)


def test_a_topic_made_again_is_no_fault(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for _ in range(3):
            put(store)
        store.remove_topic("TopicTest")
        for _ in range(2):
            put(store)
    assert assert_clean(tmp_path).queue_entries == 2


def test_messages_that_expired_are_not_missed(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        fill(store)
        store.remove_files(store.take_oldest_files(1))
        store.delete_dependents()
    report = assert_clean(tmp_path)
    assert report.min_offset == FILE_SIZE


def test_an_empty_store_is_in_order(tmp_path: Path) -> None:
    (tmp_path / "commitlog").mkdir()
    report = assert_clean(tmp_path)
    assert (report.records, report.queues) == (0, 0)


@pytest.mark.parametrize("name", ["nothing", "elsewhere"])
def test_what_is_not_a_store_is_told(name: str, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(NotAStore):
        StoreDirectory(tmp_path / name)


def test_the_store_inside_a_data_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "store" / "commitlog").mkdir(parents=True)
    with pytest.raises(NotAStore, match=rf"did you mean {tmp_path / 'store'}\?"):
        StoreDirectory(tmp_path)


def test_a_store_of_rocksdb_queues_is_not_read(root: Path) -> None:
    (root / "rocksdb").mkdir()
    (root / "rocksdb" / "CURRENT").touch()
    with pytest.raises(NotAStore, match="RocksDB"):
        StoreDirectory(root)


def test_sizes_may_come_from_the_broker_s_own_file(root: Path) -> None:
    (root / "config" / "broker.properties").write_text(
        "maxHashSlotNum=100\nmaxIndexNum=100\nmappedFileSizeCommitLog=4096\nmappedFileSizeConsumeQueue=1000\n"
    )
    assert check(StoreDirectory(root)).is_clean
    (root / "config" / "broker.properties").write_text("maxHashSlotNum=100\nmaxIndexNum=100\n")
    assert "the configuration says mappedFileSizeCommitLog=1073741824" in lines(check(StoreDirectory(root)))


def test_progress_reaches_its_end(root: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    check(StoreDirectory(root), lambda *step: steps.append(step))
    assert steps[-1] == ("queues", 3, 3)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b'{"a":{0:12,3:7\n}}', {"a": {"0": 12, "3": 7}}),
        (b'{-1:"x, 2:y"}', {"-1": "x, 2:y"}),
        (b'{"a\\"{1:":[1,2]}', {'a"{1:': [1, 2]}),
    ],
)
def test_java_writes_numbers_as_keys(text: bytes, value: object) -> None:
    assert lenient_json(text) == value


def test_the_clock_of_the_checkpoint_is_that_of_the_messages(root: Path) -> None:
    report = assert_clean(root)
    assert report.first_timestamp == report.last_timestamp == NOW


@pytest.mark.parametrize(("slots", "entries"), [(7, 11), (100, 100), (105, 99), (1000, 400)])
def test_the_shape_of_the_index_is_read_off_its_files(tmp_path: Path, slots: int, entries: int) -> None:
    """Shapes of one length, such as 100 and 100, 105 and 99, are told apart."""
    with open_store(tmp_path, max_hash_slot_num=slots, max_index_num=entries) as store:
        fill(store)
    report = assert_clean(tmp_path)
    assert report.index_keys > 0
    assert shape_of(StoreDirectory(tmp_path).index_files) == IndexShape(slots, entries)


def test_an_index_file_that_was_cut_is_told(root: Path) -> None:
    *_, last = sorted((root / "index").iterdir())
    with last.open("r+b") as file:
        file.truncate(last.stat().st_size - 3)
    assert f"{last.name} has" in lines(checked(root))
