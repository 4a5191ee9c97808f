"""A log that was cut stays cut, whenever the process dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from downrange.model.message import PhysicalOffset
from downrange.store.config import BrokerRole
from downrange.store.errors import StoreError
from downrange.store.message_store import MessageStore
from downrange.store.read_result import GetMessageStatus
from downrange.store.truncation import NOTE
from tests.support.checked_store import assert_clean
from tests.support.dying_files import Died, DyingFiles
from tests.support.replicas import log_bytes
from tests.unit.store.small_store import bodies, kill, open_store, put


def filled(root: Path, count: int = 40, **options: object) -> tuple[MessageStore, list[int]]:
    """A store with several files, and where its records begin."""
    store = open_store(root, **options)
    offsets = [
        put(store, b"%04d" % number * 50, properties={"KEYS": str(number)}).physical_offset for number in range(count)
    ]
    assert len(store.file_times()) > 2
    return store, list(offsets)


@pytest.mark.parametrize("number", [0, 1, 7, 20, 39])
def test_a_running_store_goes_on_from_the_cut(tmp_path: Path, number: int) -> None:
    store, offsets = filled(tmp_path)
    before = log_bytes(store)
    store.truncate(offsets[number])
    assert store.max_offset == offsets[number] == store.flushed_offset
    assert log_bytes(store) == before[: offsets[number]]
    assert bodies(store) == [b"%04d" % one * 50 for one in range(number)]
    for key in range(40):
        found = store.query("TopicTest", str(key), 10, 0, 1 << 60)
        assert len(found.slices) == (1 if key < number else 0)
    put(store, b"after the cut")
    assert bodies(store)[-1] == b"after the cut"
    store.commit_log.check()
    store.close()
    assert_clean(tmp_path)
    with open_store(tmp_path) as again:
        assert bodies(again) == [*(b"%04d" % one * 50 for one in range(number)), b"after the cut"]


def test_a_cut_outside_of_the_log_is_refused(tmp_path: Path) -> None:
    store, _ = filled(tmp_path)
    for offset in (store.max_offset, store.max_offset + 1, -1):
        with pytest.raises(StoreError, match="cannot be cut"):
            store.truncate(offset)
    store.close()


def test_records_that_were_cut_do_not_come_back_when_the_process_is_killed(tmp_path: Path) -> None:
    store, offsets = filled(tmp_path)
    store.truncate(offsets[20])
    put(store, b"short")  # shorter than what was there
    kill(store)
    with open_store(tmp_path) as again:
        assert bodies(again) == [*(b"%04d" % one * 50 for one in range(20)), b"short"]


def test_a_crash_at_any_step_is_finished_by_the_next_start(tmp_path: Path) -> None:
    finished = is_noted = False
    for steps in range(400):
        root = tmp_path / str(steps)
        files = DyingFiles(1 << 60)
        store, offsets = filled(root, files=files)
        before = log_bytes(store)
        files.left = steps
        try:
            store.truncate(offsets[15])
        except Died:
            is_noted = is_noted or (root / NOTE).exists()
        else:
            finished = True
            assert not (root / NOTE).exists()
        kill(store)
        with open_store(root, broker_role=BrokerRole.SLAVE) as again:
            kept = 15 if is_noted else 40
            assert again.max_offset == (offsets[15] if kept == 15 else len(before))
            assert log_bytes(again) == before[: again.max_offset]
            assert bodies(again) == [b"%04d" % one * 50 for one in range(kept)]
            assert not (root / NOTE).exists()
        assert_clean(root)
        if finished:
            break
    assert finished
    assert steps > 12


def test_a_crash_of_the_start_that_finishes_a_truncation_is_finished_by_the_one_after(tmp_path: Path) -> None:
    for steps in range(400):
        root = tmp_path / str(steps)
        store, offsets = filled(root)
        before = log_bytes(store)
        store.flush_commit_log()
        store._truncation.note(PhysicalOffset(offsets[15]))
        kill(store)
        try:
            open_store(root, files=DyingFiles(steps)).close()
        except Died:
            pass
        else:
            break
        with open_store(root) as again:
            assert log_bytes(again) == before[: offsets[15]]
    assert steps > 8


def test_unconfirmed_records_are_hidden_until_they_are_confirmed(tmp_path: Path) -> None:
    store, offsets = filled(tmp_path)
    store.hide_unconfirmed(offsets[10] + 5)  # within a record
    assert len(bodies(store)) == 10
    store.set_confirm_offset(offsets[12])
    store.dispatch_pending()
    assert len(bodies(store)) == 12
    put(store, b"new")  # numbered behind those that are hidden
    hidden = store.read("TopicTest", 0, 41, 32)
    assert (hidden.status, hidden.next_begin_offset) == (GetMessageStatus.OFFSET_OVERFLOW_ONE, 41)
    assert len(bodies(store)) == 12
    store.truncate(offsets[30])
    assert len(bodies(store)) == 12
    store.set_confirm_offset(None)
    store.dispatch_pending()
    assert len(bodies(store)) == 30
    put(store, b"last")
    assert bodies(store)[-1] == b"last"
    store.close()
    assert_clean(tmp_path)


def test_the_confirm_offset_survives_a_start(tmp_path: Path) -> None:
    store, offsets = filled(tmp_path)
    store.hide_unconfirmed(offsets[10])
    store.close()
    with open_store(tmp_path) as again:
        assert again.checkpoint.confirm_phy_offset == offsets[10]
        again.hide_unconfirmed(again.checkpoint.confirm_phy_offset)
        assert len(bodies(again)) == 10
