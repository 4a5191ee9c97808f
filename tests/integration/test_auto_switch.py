"""Replicas under a controller over real sockets: what is acknowledged, read, cut and kept when masters change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from downrange.broker.replication.auto_switch import HaRole
from downrange.broker.replication.auto_switch_slave import AutoSwitchFollower
from downrange.broker.replication.in_sync import boot_seconds
from downrange.store.config import FlushDiskType
from downrange.store.epochs import StaleEpoch
from downrange.store.new_message import PutMessageStatus
from downrange.transport.tls import ClientTls, server_tls
from tests.support.auto_switch import Controller, Replica, replica, until
from tests.support.certificates import Certificates
from tests.support.replicas import log_bytes

OK = PutMessageStatus.PUT_OK


async def three(stack: AsyncExitStack, root: Path, controller: Controller, **settings: Any) -> list[Replica]:
    return [await stack.enter_async_context(replica(root, number, controller, **settings)) for number in (1, 2, 3)]


async def in_sync(controller: Controller, *members: int) -> None:
    await until(lambda: controller.members == set(members))


async def serves(one: Replica, wanted: list[bytes]) -> None:
    await until(lambda: one.bodies == wanted)


async def ends_with(one: Replica, other: Replica) -> None:
    await until(lambda: one.store.max_offset == other.store.max_offset)


@pytest.mark.parametrize("flush", list(FlushDiskType))
async def test_acknowledged_messages_are_on_all_members(tmp_path: Path, flush: FlushDiskType) -> None:
    controller = Controller()
    async with AsyncExitStack() as stack:
        first, second, third = await three(stack, tmp_path, controller, flush_disk_type=flush)
        await controller.elect(first, second, third)
        await in_sync(controller, 1, 2, 3)
        await until(lambda: first.replication.sync_state_set == {1, 2, 3})
        for number in range(200):
            assert await first.send(b"%d" % number) is OK
            end = first.store.max_offset
            assert second.store.max_offset == third.store.max_offset == end
            if flush is FlushDiskType.SYNC_FLUSH:
                assert min(second.store.flushed_offset, third.store.flushed_offset) == end
        assert len(first.bodies) == 200
        await until(lambda: len(second.bodies) == len(third.bodies) == 200)
        assert log_bytes(first.store) == log_bytes(second.store) == log_bytes(third.store)


async def test_slaves_of_a_master_that_has_stored_nothing_stay_connected(tmp_path: Path) -> None:
    controller = Controller()
    async with AsyncExitStack() as stack:
        first, second, third = await three(stack, tmp_path, controller, ha_send_heartbeat_interval=10)
        await controller.elect(first, second, third)
        await in_sync(controller, 1, 2, 3)
        links = {state.address for state in first.replication.states()}
        for _ in range(3):  # reports of an empty log
            before = second.replication.ha_runtime_info().ha_client_runtime_info
            await until(lambda before=before: second.replication.ha_runtime_info().ha_client_runtime_info != before)  # type: ignore[misc]
        assert {state.address for state in first.replication.states()} == links


async def test_a_new_master_has_everything_and_the_old_one_cuts_what_it_alone_has(tmp_path: Path) -> None:
    controller = Controller()
    async with AsyncExitStack() as stack:
        first, second, third = await three(stack, tmp_path, controller)
        await controller.elect(first, second, third)
        await in_sync(controller, 1, 2, 3)
        for number in range(50):
            assert await first.send(b"%d" % number) is OK
        # The first is cut off: its slaves have gone, and nobody tells it of the next epoch.
        for other in (second, third):
            other.replication.give_up()
        controller.hears = False
        pending = first.send(b"never acknowledged " * 50)
        assert len(first.bodies) == 50, "consumers do not see it"
        controller.hears = True
        await controller.elect(second, third)
        assert await second.send(b"under the second") is OK
        assert not pending.done()
        await first.replication.become_slave(controller.epoch, second.ha_address)
        assert await pending is PutMessageStatus.SERVICE_NOT_AVAILABLE
        await in_sync(controller, 1, 2, 3)
        assert await second.send(b"together") is OK
        assert log_bytes(first.store) == log_bytes(second.store) == log_bytes(third.store)
        wanted = [*(b"%d" % number for number in range(50)), b"under the second", b"together"]
        for one in (first, second, third):
            await serves(one, wanted)
        entries = [(entry.epoch, entry.start_offset) for entry in second.replication.epoch_entries()]
        assert [epoch for epoch, _ in entries] == [1, 2]
        for one in (first, third):
            assert [(entry.epoch, entry.start_offset) for entry in one.replication.epoch_entries()] == entries


async def test_elections_without_a_write_leave_no_two_epochs_at_one_offset(tmp_path: Path) -> None:
    controller = Controller()
    async with AsyncExitStack() as stack:
        first, second, third = await three(stack, tmp_path, controller)
        for winner, *others in ((first, second, third), (second, first, third), (third, first, second)):
            await controller.elect(winner, *others)
            await in_sync(controller, 1, 2, 3)
        assert await third.send(b"one") is OK
        for one in (first, second, third):
            await serves(one, [b"one"])
            assert [(entry.epoch, entry.start_offset) for entry in one.replication.epoch_entries()] == [(3, 0)]


async def test_unacknowledged_writes_of_two_masters_in_turn_never_mix(tmp_path: Path) -> None:
    """Two masters write different bytes at one offset; the third replica follows one after the other."""
    controller = Controller()
    async with AsyncExitStack() as stack:
        first, second, third = await three(stack, tmp_path, controller)
        await controller.elect(first, second, third)
        await in_sync(controller, 1, 2, 3)
        assert await first.send(b"common") is OK
        for winner, loser in ((first, second), (second, first), (first, second), (second, first)):
            loser.replication.give_up()
            controller.hears = False  # the set stays as it is
            await controller.elect(winner, third, members=frozenset((1, 2, 3)))
            winner.send(b"only %d" % controller.epoch * controller.epoch)
            await ends_with(third, winner)
            assert winner.bodies in ([], [b"common"]), "one member does not have the rest"
        controller.hears = True
        await controller.elect(third, first, second)
        assert await third.send(b"last") is OK
        await in_sync(controller, 1, 2, 3)
        assert log_bytes(first.store) == log_bytes(second.store) == log_bytes(third.store)
        for one in (first, second, third):
            await serves(one, third.bodies)


async def test_a_lost_answer_keeps_the_union_until_the_set_is_read(tmp_path: Path) -> None:
    controller = Controller()
    async with (
        replica(tmp_path, 1, controller, slave_timeout=300) as first,
        replica(tmp_path, 2, controller) as second,
    ):
        await controller.elect(first)
        controller.answers = False
        await second.replication.become_slave(1, first.ha_address)
        await in_sync(controller, 1, 2)
        assert first.replication.sync_state_set == {1}
        second.replication.give_up()  # it may be elected, and would not have what comes now
        assert await first.send(b"?") is PutMessageStatus.FLUSH_SLAVE_TIMEOUT
        assert first.bodies == []
        first.replication.sync_state_set_committed(controller.members, controller.set_epoch)
        assert first.replication.sync_state_set == {1, 2}
        controller.answers = True
        await in_sync(controller, 1)
        assert await first.send(b"alone") is OK
        assert first.bodies == [b"?", b"alone"]


async def test_a_master_without_a_lease_acknowledges_nothing(tmp_path: Path) -> None:
    controller = Controller()
    async with replica(tmp_path, 1, controller) as first:
        told: list[str] = []
        first.replication.on_given_up = lambda: told.append("given up")
        await first.replication.become_master(1, frozenset((1,)), 1)
        assert await first.send(b"too early") is PutMessageStatus.SERVICE_NOT_AVAILABLE
        assert first.store.max_offset == 0
        granted = boot_seconds()
        first.replication._slaves.now = lambda: granted + 1  # however long a busy machine takes
        first.replication.renewed(granted, 3000, 1)
        assert await first.send(b"in time") is OK
        assert first.replication.lease_left_seconds == pytest.approx(1)
        first.replication._slaves.now = lambda: granted + 2.5
        assert await first.send(b"late") is PutMessageStatus.SERVICE_NOT_AVAILABLE
        assert first.replication.role is HaRole.FENCED
        assert told == ["given up"]
        first.replication.renewed(boot_seconds() + 10, 3000, 1)
        assert await first.send(b"later") is PutMessageStatus.SERVICE_NOT_AVAILABLE
        with pytest.raises(StaleEpoch):
            await first.replication.become_master(1, frozenset((1,)), 1)
        await first.replication.become_master(2, frozenset((1,)), 2)
        first.replication.renewed(boot_seconds() + 10, 3000, 2)
        assert await first.send(b"again") is OK
        assert first.bodies == [b"in time", b"late", b"again"]


async def test_too_few_in_sync_are_refused(tmp_path: Path) -> None:
    controller = Controller()
    async with (
        replica(tmp_path, 1, controller, min_in_sync_replicas=2) as first,
        replica(tmp_path, 2, controller) as second,
    ):
        await controller.elect(first)
        assert await first.send(b"alone") is PutMessageStatus.SERVICE_NOT_AVAILABLE
        assert "minInSyncReplicas=2" in str(first.store.refusals)
        await second.replication.become_slave(1, first.ha_address)
        await in_sync(controller, 1, 2)
        assert await first.send(b"two") is OK


async def test_a_start_hides_what_was_not_confirmed_and_remembers_the_epoch(tmp_path: Path) -> None:
    controller = Controller()
    async with replica(tmp_path, 1, controller) as first:
        await controller.elect(first)
        assert await first.send(b"confirmed") is OK
        await controller.elect(first, members=frozenset((1, 2)))
        first.send(b"not confirmed")
        assert first.bodies == [b"confirmed"]
    async with replica(tmp_path, 1, controller) as first:
        assert first.bodies == [b"confirmed"]
        assert first.replication.seen_epoch == 2
        assert await first.send(b"?") is PutMessageStatus.SERVICE_NOT_AVAILABLE
        with pytest.raises(StaleEpoch):
            await first.replication.become_slave(1, "127.0.0.1:1")
        await controller.elect(first, members=frozenset((1, 2)))
        first.send(b"numbered behind it")
        assert first.bodies == [b"confirmed"]
        await controller.elect(first)
        assert first.bodies == [b"confirmed", b"not confirmed", b"numbered behind it"]


async def test_a_slave_joins_a_master_under_load(tmp_path: Path) -> None:
    controller = Controller()
    async with replica(tmp_path, 1, controller) as first, replica(tmp_path, 2, controller) as second:
        await controller.elect(first)
        sent: list[asyncio.Future[PutMessageStatus]] = []
        is_over = False

        async def load() -> None:
            while not is_over:
                sent.append(first.send(b"load" * 50))
                await asyncio.sleep(0)

        loading = asyncio.create_task(load())
        await second.replication.become_slave(1, first.ha_address)
        await in_sync(controller, 1, 2)
        is_over = True
        await loading
        assert {await one for one in sent} == {OK}
        assert log_bytes(first.store) == log_bytes(second.store)


async def test_slaves_log_in_with_the_secret_of_their_set(tmp_path: Path) -> None:
    secret, other = tmp_path / "secret", tmp_path / "other"
    secret.write_text("a secret of many characters")
    other.write_text("another secret, as long")
    controller = Controller()
    async with (
        replica(tmp_path, 1, controller, ha_secret_file=secret) as first,
        replica(tmp_path, 2, controller, ha_secret_file=secret) as second,
        replica(tmp_path, 3, controller, ha_secret_file=other) as third,
    ):
        await controller.elect(first, second, third)
        await in_sync(controller, 1, 2)
        assert await first.send(b"secret") is OK
        assert second.store.max_offset == first.store.max_offset
        await until(lambda: "another haSecretFile" in third.replication.runtime_info()["haTrouble"])
        assert third.store.max_offset == 0


async def test_the_stream_may_be_encrypted(tmp_path: Path) -> None:
    files = Certificates.make(tmp_path / "tls")
    tls = server_tls(files.server_config()), ClientTls(files.client_config())
    controller = Controller()
    async with replica(tmp_path, 1, controller, tls=tls) as first, replica(tmp_path, 2, controller, tls=tls) as second:
        await controller.elect(first, second)
        await in_sync(controller, 1, 2)
        for number in range(100):
            assert await first.send(b"%d" % number) is OK
        assert log_bytes(first.store) == log_bytes(second.store)


class Peer:
    """A slave of another make: bytes that a test chooses, and frames of the master as they come."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def says(self, text: str) -> None:
        """Check the next bytes of the master."""
        wanted = bytes.fromhex(text)
        assert (await asyncio.wait_for(self.reader.readexactly(len(wanted)), 20)).hex() == wanted.hex()

    async def is_refused(self) -> bool:
        try:
            return await asyncio.wait_for(self.reader.read(), 20) == b""
        except ConnectionError:
            return True


@asynccontextmanager
async def peer(master: Replica) -> AsyncIterator[Peer]:
    host, _, port = master.ha_address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Peer(reader, writer)
    finally:
        writer.close()


async def test_a_slave_of_rocketmq_gets_the_frames_that_were_captured(tmp_path: Path) -> None:
    """The exchange of a 5.3.3 slave with an empty master, a second handshake, and a first message."""
    controller = Controller()
    async with replica(tmp_path, 1, controller) as master, AsyncExitStack() as stack:
        await controller.elect(master)
        slave = await stack.enter_async_context(peer(master))
        hello = bytes.fromhex("00000001000000000000000000000002")
        answer = "000000010000000c000000000000000000000001000000010000000000000000"
        slave.writer.write(hello[:13])  # a split segment
        await asyncio.sleep(0)
        slave.writer.write(hello[13:] + hello)
        await slave.says(answer + answer)
        slave.writer.write(bytes.fromhex("000000020000000000000000"))
        await slave.says("0000000200000000ffffffffffffffff0000000100000000000000000000000000000000")
        await until(lambda: 2 in master.replication._slaves.term.in_sync)  # type: ignore[union-attr]
        told = master.send(b"hello")
        end = master.store.max_offset
        await slave.says(f"00000002{end:08x}0000000000000000000000010000000000000000{0:016x}")
        assert await slave.reader.readexactly(end) == log_bytes(master.store)
        slave.writer.write(bytes.fromhex(f"00000002{end:016x}"))
        assert await told is OK
        await in_sync(controller, 1, 2)


async def test_an_old_master_that_returns_gets_the_next_epoch_before_its_bytes(tmp_path: Path) -> None:
    """As captured: a start on the border of two epochs is announced by a packet without bytes."""
    controller = Controller()
    async with replica(tmp_path, 1, controller) as master:
        await controller.elect(master)
        await master.send(b"in epoch 1")
        border = master.store.max_offset
        await controller.elect(master)
        await master.send(b"in epoch 2")
        end = master.store.max_offset
        epochs = f"000000010000000000000000 00000002{border:016x}"
        for start, first in ((border, border), (0, 0), (7, 7)):
            async with peer(master) as slave:
                slave.writer.write(bytes.fromhex("0000000100000000000000000000000300000002") + start.to_bytes(8, "big"))
                await slave.says(f"00000001 00000018 {end:016x} 00000002 {epochs}")
                number, begin = (2, border) if first == border else (1, 0)
                head = f"{first:016x} {number:08x} {begin:016x}"
                announced = bytes.fromhex(f"00000002 00000000 {head}")
                assert (await slave.reader.readexactly(36))[:28] == announced
                at = first
                while at < end:
                    piece = await slave.reader.readexactly(36)
                    size, offset = int.from_bytes(piece[4:8], "big"), int.from_bytes(piece[8:16], "big")
                    named = int.from_bytes(piece[16:20], "big"), int.from_bytes(piece[20:28], "big")
                    assert offset == at
                    assert named == (2, border), "the last piece of epoch 1 names epoch 2 already"
                    assert at + size <= (border if at < border else end)
                    await slave.reader.readexactly(size)
                    at += size


@pytest.mark.parametrize(
    "text",
    [
        "00000003 0000000000000000",  # no such state
        "00000002 0000000000000000",  # a report before the handshake
        "00000001 00000000 0000000000000001",  # the master's own id
        "00000001 00000000 0000000000000002 00000002 7000000000000000",  # more than the master has
        "00000001 00000000 0000000000000002 00000002 ffffffffffffffff",
        "00000001 00000000 0000000000000002 00000002 0000000000000000 00000001 00000000 0000000000000002",
        "0000000000000000 0000000000000000",  # a slave of 4.x
    ],
)
async def test_a_peer_that_talks_nonsense_is_cut_off(tmp_path: Path, text: str) -> None:
    controller = Controller()
    async with replica(tmp_path, 1, controller) as master:
        await controller.elect(master)
        assert await master.send(b"kept to ourselves") is OK
        async with peer(master) as slave:
            slave.writer.write(bytes.fromhex(text))
            received = bytearray()
            try:
                async with asyncio.timeout(20):
                    while part := await slave.reader.read(4096):
                        received += part
            except ConnectionError:
                pass
        assert await master.send(b"goes on") is OK
        assert controller.members == {1}


async def test_a_fault_in_what_follows_a_master_ends_the_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(follower: AutoSwitchFollower) -> None:
        raise RuntimeError("a fault of this program")

    async def follow() -> None:
        async with replica(tmp_path, 1, Controller()) as one:
            await one.replication.become_slave(1, "127.0.0.1:1")
            await asyncio.sleep(60)  # a slave that follows nobody, and looks well

    monkeypatch.setattr(AutoSwitchFollower, "run", broken)
    with pytest.raises(BaseExceptionGroup) as ended:
        await follow()
    assert ended.group_contains(RuntimeError, match="a fault of this program")


async def test_a_broker_without_the_role_serves_nobody(tmp_path: Path) -> None:
    controller = Controller()
    async with replica(tmp_path, 1, controller) as fenced, peer(fenced) as slave:
        slave.writer.write(bytes.fromhex("00000001000000000000000000000002"))
        assert await slave.is_refused()


async def test_requests_907_and_1007_are_answered_from_the_links(tmp_path: Path) -> None:
    controller = Controller()
    async with replica(tmp_path, 1, controller) as first, replica(tmp_path, 2, controller) as second:
        await controller.elect(first, second)
        await in_sync(controller, 1, 2)
        assert await first.send(b"one") is OK
        end = first.store.max_offset
        info = first.replication.ha_runtime_info()
        assert (info.master, info.in_sync_slave_nums, info.master_commit_log_max_offset) == (True, 1, end)
        (connection,) = info.ha_connection_info
        assert (connection.diff, connection.in_sync, connection.slave_ack_offset) == (0, True, end)
        client = second.replication.ha_runtime_info().ha_client_runtime_info
        assert (client.master_addr, client.max_offset) == (first.ha_address, end)
        assert client.last_read_timestamp > 0
        (entry,) = second.replication.epoch_entries()
        assert (entry.epoch, entry.start_offset, entry.end_offset) == (1, 0, (1 << 63) - 1)
