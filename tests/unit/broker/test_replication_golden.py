"""The captured streams of Java's master and slave, played against ours: the bytes must be the same."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest

from downrange.broker.config import BrokerConfig
from downrange.broker.live_config import LiveConfig
from downrange.broker.replication.master import Slaves
from downrange.broker.replication.slave import MasterLink
from downrange.broker.replication.wire import PacketReader
from downrange.clock import ManualClock
from downrange.model.message import PhysicalOffset
from downrange.model.record import MAGIC_BLANK
from downrange.store.config import BrokerRole, StoreConfig
from downrange.store.message_store import MessageStore
from tests.support.golden import HaRow, ha_rows
from tests.unit.broker.fake_transport import FakeTransport

FILE_SIZE = 65_536
STREAMS = [("new_slave", 4), ("new_slave_last_file", 4), ("slave_restart", 8)]


def rows_of(scenario: str, connection: int) -> list[HaRow]:
    return [row for row in ha_rows(scenario) if row.connection == connection]


def payload(rows: list[HaRow]) -> tuple[int, bytes]:
    """Where the log bytes of a stream begin, and the bytes."""
    reader = PacketReader()
    pieces = [piece for row in rows if row.sender == "master" for piece in reader.feed(memoryview(row.data))]
    return pieces[0].offset, b"".join(bytes(piece.data) for piece in pieces)


def prior_log(scenario: str, start: int) -> bytes:
    """What stood in the log before the capture began."""
    if scenario == "slave_restart":
        return payload(rows_of("new_slave", 4))[1][:start]
    blank = FILE_SIZE.to_bytes(4, "big") + MAGIC_BLANK.to_bytes(4, "big")
    return blank.ljust(FILE_SIZE, b"\0") * (start // FILE_SIZE)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def open_store(root: Path, role: BrokerRole, clock: ManualClock) -> MessageStore:
    config = StoreConfig(
        store_path_root_dir=root,
        mapped_file_size_commit_log=FILE_SIZE,
        max_hash_slot_num=100,
        max_index_num=200,
        broker_role=role,
    )
    return MessageStore.open(config, clock=clock)


@pytest.mark.parametrize(("scenario", "connection"), STREAMS)
async def test_our_master_sends_what_javas_master_sent(
    tmp_path: Path, clock: ManualClock, scenario: str, connection: int
) -> None:
    rows = rows_of(scenario, connection)
    start, log = payload(rows)
    with open_store(tmp_path, BrokerRole.ASYNC_MASTER, clock) as store:
        store.append_data(0, prior_log(scenario, start) + log[: len(payload(rows[:2])[1])])
        slaves = Slaves(store, LiveConfig(BrokerConfig(), store.config), clock)
        link = slaves._make_link()
        transport = FakeTransport()
        link.connection_made(cast(asyncio.Transport, transport))
        for number, row in enumerate(rows):
            if row.sender == "slave":
                link.data_received(row.data)
                continue
            missing = start + len(payload(rows[: number + 1])[1]) - store.max_offset
            if missing:
                at = store.max_offset - start
                store.append_data(store.max_offset, log[at : at + missing])
                link.push()
            elif not transport.written:
                await clock.advance(5.1)
                link.tick()
            assert transport.taken() == row.data
        assert slaves.acknowledged_offset == store.max_offset


@pytest.mark.parametrize(("scenario", "connection"), STREAMS)
async def test_our_slave_reports_what_javas_slave_reported(
    tmp_path: Path, clock: ManualClock, scenario: str, connection: int
) -> None:
    rows = rows_of(scenario, connection)
    start, log = payload(rows)
    with open_store(tmp_path, BrokerRole.SLAVE, clock) as store:
        prior = prior_log(scenario, start) if scenario == "slave_restart" else b""
        if prior:
            store.append_data(0, prior)
            store.dispatch_pending()
        link = MasterLink(store, store.dispatch_pending, LiveConfig(BrokerConfig(), store.config), clock)
        transport = FakeTransport()
        link.connection_made(cast(asyncio.Transport, transport))
        link.report()
        for row in rows:
            if row.sender == "master":
                link.get_buffer(-1)[: len(row.data)] = row.data
                link.buffer_updated(len(row.data))
                continue
            if not transport.written:
                await clock.advance(5.1)
                link.tick()
            assert transport.taken() == row.data
        assert not link.closed.done()
        assert store.max_offset == start + len(log)
        assert store.dispatch_behind_bytes == 0
        assert bytes(store.commit_log.slice(PhysicalOffset(start), len(log)) or b"") == log
        assert sum(state.queue.max_offset - state.queue.min_offset for state in store.queues) > 5
