"""A slave that ends in the middle of a record: it goes on with the whole record, whatever byte it ended at."""

from __future__ import annotations

from pathlib import Path

import pytest

from downrange.model.message import PhysicalOffset
from downrange.store.config import BrokerRole
from downrange.store.errors import StoreError
from downrange.store.message_store import MessageStore
from tests.unit.store.small_store import bodies, kill, open_store, put

PROPERTIES = {"KEYS": "order-7"}


@pytest.fixture
def log(tmp_path: Path) -> bytes:
    """Two records, as a master has them."""
    with open_store(tmp_path / "master") as master:
        put(master, b"first", properties=PROPERTIES)
        put(master, b"again", properties=PROPERTIES)
        return bytes(master.commit_log.slice(PhysicalOffset(0), master.max_offset) or b"")


def open_slave(root: Path) -> MessageStore:
    return open_store(root, broker_role=BrokerRole.SLAVE)


@pytest.mark.parametrize("is_killed", [False, True], ids=["stopped", "killed"])
def test_a_slave_that_stopped_within_a_record_asks_for_it_again(tmp_path: Path, log: bytes, is_killed: bool) -> None:
    boundary = len(log) // 2
    for end in (*range(boundary, len(log) - 36, 13), *range(len(log) - 36, len(log) + 1)):  # its text, byte by byte
        root = tmp_path / f"slave-{end}"
        slave = open_slave(root)
        slave.append_data(0, log[:end])
        slave.dispatch_pending()
        if is_killed:
            kill(slave)
        else:
            slave.close()
        with open_slave(root) as slave:
            assert slave.max_offset == (len(log) if end == len(log) else boundary), end
            slave.append_data(slave.max_offset, log[slave.max_offset :])
            slave.dispatch_pending()
            assert bodies(slave) == [b"first", b"again"]
            assert bytes(slave.commit_log.slice(PhysicalOffset(0), len(log)) or b"") == log
            assert len(slave.query("TopicTest", "order-7", 10, 0, 1 << 62).slices) == 2


def test_a_record_is_readable_when_its_last_byte_is_there(tmp_path: Path, log: bytes) -> None:
    with open_slave(tmp_path / "slave") as slave:
        for end in range(len(log)):
            slave.append_data(end, log[end : end + 1])
            slave.dispatch_pending()
            assert slave.max_offset_of("TopicTest", 0) == (end + 1) // (len(log) // 2)
            assert slave.refusals.keys() == {"slave"}


@pytest.mark.parametrize(
    "wrong", [b"\0" * 8, b"12345678", b"\0\0\0\x5a\xda\xa3\x20\xa7"], ids=["zeros", "text", "short"]
)
def test_a_log_that_cannot_be_read_is_not_followed(tmp_path: Path, log: bytes, wrong: bytes) -> None:
    with open_slave(tmp_path / "slave") as slave:
        slave.append_data(0, log)
        slave.dispatch_pending()
        slave.append_data(len(log), wrong)
        slave.dispatch_pending()
        with pytest.raises(StoreError, match=f"does not fit this one: .* at {len(log)}"):
            slave.append_data(slave.max_offset, b"more")
        assert bodies(slave) == [b"first", b"again"]
    with open_slave(tmp_path / "slave") as slave:  # what cannot be read is cut off, and asked for again
        assert slave.max_offset == len(log)
        slave.append_data(len(log), b"")
