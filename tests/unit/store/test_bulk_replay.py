"""Replay in bulk: that usual records take this way, which do not, and that nothing is held on to.

That both ways leave the same files: tests/property/test_compiled_replay.py.
"""

from __future__ import annotations

import errno
import shutil
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from downrange.compiled import steps
from downrange.model.message import PhysicalOffset
from downrange.store.config import BrokerRole
from downrange.store.dispatcher import Dispatcher
from downrange.store.message_store import MessageStore
from downrange.store.new_messages import NewMessages
from tests.unit.store.small_store import FailingFiles, bodies, dispatched, kill, open_store, put

pytestmark = pytest.mark.skipif(steps is None, reason="built without a compiler, or DOWNRANGE_PURE is set")
LARGE = {"mapped_file_size_commit_log": 1 << 20, "mapped_file_size_consume_queue": 100_000, "max_index_num": 10_000}


def filled(root: Path, count: int = 2000) -> bytes:
    """Log bytes of messages with tags and keys, in two queues."""
    with open_store(root, **LARGE) as store:
        for number in range(count):
            put(store, b"%d" % number, queue_id=number % 2, properties={"TAGS": "T", "KEYS": f"k{number}"})
        return bytes(store.commit_log.readable_from(PhysicalOffset(0), 1 << 30) or b"")


def replayed_one_by_one(root: Path) -> int:
    with patch.object(Dispatcher, "replay", autospec=True, side_effect=Dispatcher.replay) as replay:
        store = open_store(root, **LARGE)
        assert store.recovery.replayed == store.recovery.records == 2000
        kill(store)
    return replay.call_count


def test_only_the_first_of_a_queue_is_replayed_by_itself(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / "abort").write_bytes(b"")
    assert replayed_one_by_one(tmp_path) == 0
    shutil.rmtree(tmp_path / "index")
    shutil.rmtree(tmp_path / "consumequeue")
    assert replayed_one_by_one(tmp_path) == 2


def test_a_slave_is_told_of_watched_queues_and_of_all_sizes(tmp_path: Path) -> None:
    log = filled(tmp_path / "master")
    with open_store(tmp_path / "slave", broker_role=BrokerRole.SLAVE, **LARGE) as slave:
        slave.append_data(0, log)
        told: list[NewMessages] = []
        slave.dispatch_pending(told.append)
        state = slave.queues.states["TopicTest", 1]
        in_queue = [place[2] for one in told for of, place in zip(one.states, one.places, strict=True) if of is state]
        assert in_queue == list(range(1000))
        assert b"TAGS\x01T\x02KEYS\x01k1999" in {text for one in told for text in one.properties_for(state)}
        assert sum(place[1] for one in told for place in one.places) == len(log)
        assert len(bodies(slave)) == 1000
        assert dispatched(slave) == []


def test_a_queue_that_cannot_be_written_stops_the_replay_until_it_can(tmp_path: Path) -> None:
    log = filled(tmp_path / "master")
    files = FailingFiles()
    with open_store(tmp_path / "slave", broker_role=BrokerRole.SLAVE, files=files, **LARGE) as slave:
        slave.append_data(0, log)
        files.fail["create"] = errno.ENOSPC
        slave.dispatch_pending()
        assert "No space left" in slave.refusals["dispatch"]
        slave.dispatch_pending()
        assert "No space left" in slave.refusals["dispatch"]
        files.fail.clear()
        slave.dispatch_pending()
        assert "dispatch" not in slave.refusals
        assert slave.dispatch_behind_bytes == 0
        assert len(bodies(slave)) == len(bodies(slave, queue_id=1)) == 1000
        assert len(slave.index.query("TopicTest", "k1999", 10, 0, 1 << 60).physical_offsets) == 1  # type: ignore[union-attr]


def test_nothing_is_held_on_to(tmp_path: Path) -> None:
    log = filled(tmp_path / "master", 40)
    with open_store(tmp_path / "slave", broker_role=BrokerRole.SLAVE, **LARGE) as slave:
        slave.append_data(0, log)
        slave.dispatch_pending()
        state = slave.queues.states["TopicTest", 0]
        replay_again(slave)
        before = sys.getrefcount(state), sys.getrefcount(state.topic), sys.getallocatedblocks()
        for _ in range(300):
            replay_again(slave)
        assert abs(sys.getrefcount(state) - before[0]) < 5
        assert abs(sys.getrefcount(state.topic) - before[1]) < 5
        assert abs(sys.getallocatedblocks() - before[2]) < 200
        slave.queues.tails.make_room(1000)  # nobody holds a view of it


def replay_again(store: MessageStore) -> None:
    store.follower.offset = PhysicalOffset(0)
    assert len(dispatched(store)) == 40
