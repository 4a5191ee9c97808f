"""Who a SYNC_MASTER lets go when, and what links do with slaves that are slow, silent, ahead or too far behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from downrange.broker.config import BrokerConfig
from downrange.broker.live_config import LiveConfig
from downrange.broker.message_writer import MessageWriter
from downrange.broker.replication.errors import ReplicationError
from downrange.broker.replication.master import SlaveLink, Slaves
from downrange.broker.replication.slave import MasterLink
from downrange.broker.replication.waiting import WaitingSenders
from downrange.broker.replication.wire import HEADER, REPORT
from downrange.broker.services.flushing import Flusher
from downrange.broker.statistics import Statistics
from downrange.broker.waiting_pulls import WaitingPulls
from downrange.clock import ManualClock
from downrange.model.message import PhysicalOffset
from downrange.store.config import BrokerRole
from downrange.store.errors import StoreError
from downrange.store.group_commit import FlushOutcome
from downrange.store.message_store import MessageStore
from downrange.store.new_message import PutMessageStatus
from tests.unit.broker.fake_transport import FakeTransport
from tests.unit.store.small_store import NOW, put, small_config

PUT_OK = PutMessageStatus.PUT_OK


def copied(ask: Callable[..., None], end_offset: int, **options: Any) -> asyncio.Future[PutMessageStatus]:
    """How the wait for a slave ends."""
    status: asyncio.Future[PutMessageStatus] = asyncio.get_running_loop().create_future()
    ask(end_offset, status.set_result, **options)
    return status


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW)


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[MessageStore]:
    config = small_config(tmp_path, broker_role=BrokerRole.SYNC_MASTER, ha_slave_fallbehind_max=3000)
    with MessageStore.open(config, clock=clock) as store:
        yield store


@pytest.fixture
def config(store: MessageStore) -> LiveConfig:
    return LiveConfig(BrokerConfig(), store.config)


def connect(slaves: Slaves) -> tuple[SlaveLink, FakeTransport]:
    link = slaves._make_link()
    transport = FakeTransport()
    link.connection_made(cast(asyncio.Transport, transport))
    return link, transport


# --- senders ------------------------------------------------------------------------------------------------------


async def test_a_sender_waits_until_any_slave_has_its_message(config: LiveConfig, clock: ManualClock) -> None:
    senders = WaitingSenders(config, clock)
    first, second = copied(senders.tell_when_copied, 100, slaves=2), copied(senders.tell_when_copied, 200, slaves=2)
    senders.acknowledge(99)
    assert not first.done()
    senders.acknowledge(150)
    senders.acknowledge(20)  # another slave, further behind
    assert first.result() is PUT_OK
    assert not second.done()
    assert senders.acknowledged_offset == 150
    assert copied(senders.tell_when_copied, 150, slaves=1).result() is PUT_OK


async def test_a_sender_gives_up_after_the_slave_timeout(config: LiveConfig, clock: ManualClock) -> None:
    senders = WaitingSenders(config, clock)
    early = copied(senders.tell_when_copied, 100, slaves=1)
    await clock.advance(1)
    late = copied(senders.tell_when_copied, 200, slaves=1)
    await clock.advance(2)
    senders.expire()
    assert early.result() is PutMessageStatus.FLUSH_SLAVE_TIMEOUT
    assert not late.done()
    assert len(senders) == 1


async def test_without_a_slave_near_enough_nobody_waits(config: LiveConfig, clock: ManualClock) -> None:
    senders = WaitingSenders(config, clock)
    assert copied(senders.tell_when_copied, 100, slaves=0).result() is PutMessageStatus.SLAVE_NOT_AVAILABLE
    assert copied(senders.tell_when_copied, 3000, slaves=1).result() is PutMessageStatus.SLAVE_NOT_AVAILABLE
    assert not copied(senders.tell_when_copied, 2999, slaves=1).done()


# --- the master's side --------------------------------------------------------------------------------------------


async def test_a_connection_is_no_slave_before_it_reports(
    store: MessageStore, config: LiveConfig, clock: ManualClock
) -> None:
    slaves = Slaves(store, config, clock)
    link, transport = connect(slaves)
    assert copied(slaves.tell_when_copied, 10).result() is PutMessageStatus.SLAVE_NOT_AVAILABLE
    link.data_received(REPORT.pack(0)[:5])
    assert transport.taken() == b""
    link.data_received(REPORT.pack(0)[5:])
    assert transport.taken() == HEADER.pack(0, 0)
    assert not copied(slaves.tell_when_copied, 10).done()


async def test_a_report_of_more_than_was_sent_does_not_count(
    store: MessageStore, config: LiveConfig, clock: ManualClock
) -> None:
    slaves = Slaves(store, config, clock)
    link, transport = connect(slaves)
    link.data_received(REPORT.pack(0))
    waiting = copied(slaves.tell_when_copied, put(store).end_offset)
    link.data_received(REPORT.pack(store.max_offset))
    assert transport.is_closing()
    assert not waiting.done()
    assert slaves.acknowledged_offset == 0


async def test_what_arrives_in_one_turn_goes_out_in_one_packet(
    store: MessageStore, config: LiveConfig, clock: ManualClock
) -> None:
    slaves = Slaves(store, config, clock)
    link, transport = connect(slaves)
    link.data_received(REPORT.pack(0))
    transport.taken()
    for _ in range(3):
        put(store)
        slaves.wake()
    assert transport.taken() == b""
    await asyncio.sleep(0)
    end = store.max_offset
    assert transport.taken() == HEADER.pack(0, end) + bytes(store.commit_log.slice(PhysicalOffset(0), end) or b"")


async def test_a_packet_ends_with_its_file_and_with_the_batch_size(
    store: MessageStore, config: LiveConfig, clock: ManualClock
) -> None:
    while store.max_offset <= 4096:
        put(store, b"x" * 500)
    object.__setattr__(config.store, "ha_transfer_batch_size", 1000)
    slaves = Slaves(store, config, clock)
    link, transport = connect(slaves)
    link.data_received(REPORT.pack(91))
    wire = transport.taken()
    sizes = []
    while wire:
        offset, size = HEADER.unpack_from(wire)
        sizes.append((offset, size))
        wire = wire[HEADER.size + size :]
    assert sizes[:6] == [(91, 0), (91, 1000), (1091, 1000), (2091, 1000), (3091, 1000), (4091, 5)]
    assert sizes[6][0] == 4096


async def test_a_slave_that_does_not_read_is_not_written_to(
    store: MessageStore, config: LiveConfig, clock: ManualClock
) -> None:
    slaves = Slaves(store, config, clock)
    link, transport = connect(slaves)
    link.data_received(REPORT.pack(0))
    transport.taken()
    link.pause_writing()
    put(store)
    link.push()
    await clock.advance(6)
    link.tick()
    assert transport.taken() == b""
    link.resume_writing()
    assert transport.taken()[:12] == HEADER.pack(0, store.max_offset)


async def test_a_silent_slave_is_given_up(store: MessageStore, config: LiveConfig, clock: ManualClock) -> None:
    slaves = Slaves(store, config, clock)
    link, transport = connect(slaves)
    link.data_received(REPORT.pack(0))
    await clock.advance(20)
    link.tick()
    assert not transport.is_aborted
    await clock.advance(0.2)
    link.tick()
    assert transport.is_aborted


async def test_a_slave_ahead_is_refused_at_its_first_report_and_at_any(
    store: MessageStore, config: LiveConfig, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    put(store)
    slaves = Slaves(store, config, clock)
    first, first_transport = connect(slaves)
    first.data_received(REPORT.pack(store.max_offset + 1))
    later, later_transport = connect(slaves)
    later.data_received(REPORT.pack(store.max_offset))
    later.data_received(REPORT.pack(store.max_offset + 1))
    assert first_transport.is_aborted
    assert later_transport.is_aborted
    assert slaves.acknowledged_offset == store.max_offset
    assert caplog.text.count("it has what this master lost") == 2


async def test_a_slave_that_needs_deleted_files_is_refused(
    store: MessageStore, config: LiveConfig, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    while store.max_offset <= 3 * 4096:
        put(store, b"x" * 500)
    store.take_oldest_files(1)
    slaves = Slaves(store, config, clock)
    link, transport = connect(slaves)
    link.data_received(REPORT.pack(4000))
    assert transport.is_aborted
    assert "its log ends at 4000, ours begins at 4096" in caplog.text


# --- the slave's side ---------------------------------------------------------------------------------------------


@pytest.fixture
def slave_store(tmp_path: Path, clock: ManualClock) -> Iterator[MessageStore]:
    with MessageStore.open(small_config(tmp_path / "slave", broker_role=BrokerRole.SLAVE), clock=clock) as store:
        yield store


def follow(store: MessageStore, clock: ManualClock) -> tuple[MasterLink, FakeTransport]:
    def dispatch() -> None:
        store.dispatch_pending()

    link = MasterLink(store, dispatch, LiveConfig(BrokerConfig(), store.config), clock)
    transport = FakeTransport()
    link.connection_made(cast(asyncio.Transport, transport))
    return link, transport


def feed(link: MasterLink, data: bytes) -> None:
    link.get_buffer(-1)[: len(data)] = data
    link.buffer_updated(len(data))


async def test_a_slave_takes_a_log_byte_by_byte(
    store: MessageStore, slave_store: MessageStore, config: LiveConfig, clock: ManualClock
) -> None:
    slaves = Slaves(store, config, clock)
    pushing, to_slave = connect(slaves)
    following, to_master = follow(slave_store, clock)
    following.report()
    pushing.data_received(to_master.taken())
    while store.max_offset <= 4096:
        put(store, b"x" * 500)
        pushing.push()
        for byte in to_slave.taken():
            feed(following, bytes([byte]))
        pushing.data_received(to_master.taken())
    assert slaves.acknowledged_offset == store.max_offset == slave_store.max_offset
    assert slave_store.max_offset_of("TopicTest", 0) == store.max_offset_of("TopicTest", 0)
    assert slave_store.min_offset == 0


async def test_a_slave_refuses_bytes_that_do_not_continue_its_log(
    slave_store: MessageStore, clock: ManualClock
) -> None:
    slave_store.append_data(4096, b"")
    for wrong in (HEADER.pack(4000, 0), HEADER.pack(4097, 0), HEADER.pack(0, 3) + b"abc"):
        link, transport = follow(slave_store, clock)
        feed(link, wrong)
        assert transport.is_aborted
        assert "do not continue a log that ends at 4096" in str(link.closed.exception())
    assert slave_store.max_offset == 4096


async def test_a_slave_refuses_what_is_no_log(
    store: MessageStore, slave_store: MessageStore, clock: ManualClock
) -> None:
    put(store)
    good = bytes(store.commit_log.slice(PhysicalOffset(0), store.max_offset) or b"")
    link, transport = follow(slave_store, clock)
    feed(link, HEADER.pack(0, len(good)) + good)
    assert transport.taken() == REPORT.pack(len(good))
    feed(link, HEADER.pack(len(good), 16) + b"not a log at all")
    assert transport.taken() == b""
    assert transport.is_aborted
    with pytest.raises(StoreError, match="does not fit this one: no record at"):
        link.closed.result()


async def test_a_stream_that_is_none_ends_the_connection(slave_store: MessageStore, clock: ManualClock) -> None:
    link, transport = follow(slave_store, clock)
    feed(link, b"HTTP/1.1 400 Bad Request\r\n")
    assert transport.is_aborted
    assert isinstance(link.closed.exception(), ReplicationError | StoreError)


async def test_a_slave_gives_up_a_silent_master(slave_store: MessageStore, clock: ManualClock) -> None:
    link, transport = follow(slave_store, clock)
    link.report()
    transport.taken()
    await clock.advance(5.1)
    link.tick()
    assert transport.taken() == REPORT.pack(0)
    await clock.advance(15)
    link.tick()
    assert transport.is_aborted
    assert "sent nothing for 20 s" in str(link.closed.exception())


# --- disk and slave together --------------------------------------------------------------------------------------


class HeldFlusher:
    """A disk that is safe when the test says so."""

    is_sync = True

    def tell_when_flushed(self, end_offset: int, tell: Callable[[FlushOutcome], None], *, may_block: bool) -> None:
        assert not may_block  # the slave must not have to wait for the disk
        self.tell = tell


@pytest.mark.parametrize("is_disk_first", [True, False])
@pytest.mark.parametrize(
    ("flushed", "is_copied", "status"),
    [
        (FlushOutcome.FLUSHED, True, PUT_OK),
        (FlushOutcome.TIMED_OUT, True, PutMessageStatus.FLUSH_DISK_TIMEOUT),
        (FlushOutcome.FLUSHED, False, PutMessageStatus.FLUSH_SLAVE_TIMEOUT),
        (FlushOutcome.FAILED, False, PutMessageStatus.FLUSH_SLAVE_TIMEOUT),
    ],
)
async def test_a_message_is_safe_when_disk_and_slave_have_it(
    store: MessageStore,
    config: LiveConfig,
    clock: ManualClock,
    flushed: FlushOutcome,
    is_copied: bool,
    status: PutMessageStatus,
    is_disk_first: bool,
) -> None:
    slaves, flusher = Slaves(store, config, clock), HeldFlusher()
    link, _ = connect(slaves)
    link.data_received(REPORT.pack(0))
    writer = MessageWriter(store, WaitingPulls(), cast(Flusher, flusher), Statistics(NOW, "c"), clock, slaves)
    end = put(store).end_offset
    told: list[PutMessageStatus] = []
    writer.tell_when_safe(end, told.append)

    async def settle_disk() -> None:
        flusher.tell(flushed)

    async def settle_slave() -> None:
        if is_copied:
            link.push()
            link.data_received(REPORT.pack(end))
        else:
            await clock.advance(3)
            slaves._senders.expire()
        await asyncio.sleep(0)

    first, second = (settle_disk, settle_slave) if is_disk_first else (settle_slave, settle_disk)
    await first()
    assert not told
    await second()
    assert told == [status]
