"""The store directory of a genuine 5.3.3 broker after POP scenarios, taken over by ours; and records as it writes."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from downrange.broker.app import RunningBroker, broker
from downrange.broker.config import BrokerConfig
from downrange.broker.json_file import JsonFile
from downrange.broker.pop.leases import Lease, bits_of
from downrange.broker.pop.orders import OrderStates
from downrange.broker.pop.records import Acknowledged, ReviveRecords, read_record
from downrange.clock import ManualClock
from downrange.model import properties as names
from downrange.model.message_id import pack_host
from downrange.model.properties import decode_properties
from downrange.model.topics import REVIVE_GROUP
from downrange.settings import Property, configure
from downrange.store.config import StoreConfig
from downrange.store.kept_message import KeptMessage, read_kept
from tests.support.golden_store import GoldenStore, unpack
from tests.support.popper import Popper, popper_of

REVIVE_TOPIC = "rmq_sys_REVIVE_LOG_DefaultCluster"
HOST = pack_host("127.0.0.1", 27911)
# A minute after the last record.
AFTERWARDS = 1_794_808_000_000


def store_config(golden: GoldenStore) -> StoreConfig:
    sizes = ("mappedFileSizeCommitLog", "mappedFileSizeConsumeQueue", "maxHashSlotNum", "maxIndexNum")
    given = {key: Property(golden.manifest["config"][key]) for key in sizes}
    return dataclasses.replace(configure(StoreConfig, given), store_path_root_dir=golden.root)


@asynccontextmanager
async def taken_over(golden: GoldenStore, clock: ManualClock) -> AsyncIterator[RunningBroker]:
    config = BrokerConfig(broker_name="broker-a", broker_ip1="127.0.0.1", listen_port=0, metrics_port=-1)
    async with broker(config, store_config(golden), clock) as running:
        yield running


def kept_records(golden: GoldenStore) -> list[KeptMessage]:
    data = b"".join(path.read_bytes() for path in sorted((golden.root / "commitlog").iterdir()))
    found, at = [], 0
    while size := int.from_bytes(data[at : at + 4], "big"):  # zeros follow the last record
        found.append(read_kept(memoryview(data)[at : at + size]))
        at += size
    return found


def test_our_records_are_those_that_java_writes(tmp_path: Path) -> None:
    golden = unpack("pop", tmp_path)
    ours = ReviveRecords("DefaultCluster", "broker-a", HOST)
    seen: dict[str, int] = {}
    leases: dict[object, Lease] = {}
    for kept in kept_records(golden):
        if kept.message.topic != REVIVE_TOPIC:
            continue
        tag = kept.find(names.TAGS) or ""
        seen[tag] = seen.get(tag, 0) + 1
        match read_record(kept):
            case Lease() as lease:
                leases[lease.key] = lease
                made = ours.checkpoint(lease, kept.message.born_timestamp)
            case Acknowledged(offsets=(_,)) if tag == "bAck":
                continue  # a batch of one message is an `ack` here, which means as much
            case Acknowledged(key=key, offsets=offsets, next_offset=None):
                lease = leases[key]
                bits = bits_of(key.start_offset, offsets)
                made = ours.acknowledgement(lease, bits, kept.message.born_timestamp)
            case other:
                raise AssertionError(other)
        assert made.body == kept.message.body
        assert (made.topic, made.queue_id, made.born_host) == (REVIVE_TOPIC, kept.message.queue_id, HOST)
        theirs = decode_properties(kept.text)
        mine = decode_properties(made.properties.decode())
        assert mine == {name: theirs[name] for name in (names.TIMER_DELIVER_MS, names.TAGS)}
    assert seen.keys() == {"ck", "ack", "bAck"}


def test_ordered_states_are_read_and_written_as_java_does(tmp_path: Path) -> None:
    golden = unpack("pop", tmp_path)
    path = golden.root / "config" / "consumerOrderInfo.json"
    states = OrderStates(JsonFile(path))
    state = states.get(("PopOrder", "pop_order", 0))
    assert state is not None
    assert (state.offsets, state.acked, state.counts, state.attempt_id) == ((1, 2, 3), 7, {1: 2}, "A5")
    before = "".join(path.read_text().split())
    states.mark_unsaved()
    states.save()
    assert "".join(path.read_text().split()) == before


async def test_our_broker_goes_on_where_java_stopped(tmp_path: Path) -> None:
    golden = unpack("pop", tmp_path)
    clock = ManualClock(AFTERWARDS)
    async with taken_over(golden, clock) as running:
        expected = golden.manifest
        assert expected["name"] == "pop"
        await clock.advance(2)
        assert len(running.pop.state.leases) == 0  # all are over: acknowledged, or revived now
        async with popper_of(running, "PopBasic", "pop_basic") as popper:
            # Two messages came after this group's last pop, for tests of filters.
            assert [each.body for each in await popper.pop(invisible=60_000)] == [b"f6", b"f7"]
            order = Popper(popper.client, "PopOrder", "pop_order")
            assert await order.pop(order=True) == []
            await order.client.send("PopOrder", b"o4")
            (ordered,) = await order.pop(order=True)
            assert ordered.handle.offset == 4
            await order.ack(ordered)
            retried = Popper(popper.client, "PopRevive", "pop_revive")
            (again,) = await retried.pop()
            assert (again.body, again.message.reconsume_times, again.handle.offset) == (b"r1", 4, 3)
            await retried.ack(again)
    async with taken_over(golden, clock) as running:
        assert sorted(len(lease.left) for lease in running.pop.state.leases) == [2]
        # Java would go on behind this record of each revive queue.
        lease = next(iter(running.pop.state.leases))
        offsets = running.pop.state.tables.offsets
        assert offsets.get(REVIVE_TOPIC, REVIVE_GROUP, lease.revive_queue) == lease.revive_offset - 1
        await clock.advance(61)
        async with popper_of(running, "PopBasic", "pop_basic") as popper:
            assert [each.body for each in await popper.pop()] == [b"f6", b"f7"]
