"""A cluster and its clients, as the seed draws them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

from downrange.model.message import MessageQueue
from downrange.model.topics import RETRY_PREFIX
from downrange.store.config import BrokerRole, FlushDiskType
from tests.sim.clients import (
    AUDITORS,
    EVENTS,
    ORDERLY,
    ORDERS,
    PAYMENTS,
    POPPERS,
    WORKERS,
    Client,
    Consumer,
    Payer,
    Popper,
    Producer,
)
from tests.sim.pipeline import Pipeline
from tests.sim.process import State
from tests.sim.servers import Broker, NameServer, Node, Shape
from tests.sim.world import World

DRAIN_SECONDS = 300.0
LOOK_SECONDS = 0.5
SETTLE_SECONDS = 5.0
OPERATOR_SECONDS = 5.0


def draw_shape(seed: int) -> Shape:
    chance = random.Random(f"{seed} shape")
    return Shape(
        name_servers=chance.choice((1, 2)),
        flush_disk_type=chance.choice((FlushDiskType.SYNC_FLUSH, FlushDiskType.ASYNC_FLUSH)),
        broker_role=chance.choice((BrokerRole.SYNC_MASTER, BrokerRole.ASYNC_MASTER)),
        has_second_master=chance.random() < 0.3,
        has_timers=chance.random() < 0.3,
        has_poppers=chance.random() < 0.3,
        has_pipeline=chance.random() < 0.3,
    )


class Cluster:
    """Name servers, a master with its slave, perhaps a second master, and clients of several kinds."""

    def __init__(self, world: World, shape: Shape, directory: Path) -> None:
        self.world = world
        self.shape = shape
        self.name_servers = [
            NameServer(world, f"namesrv{n}", directory / f"namesrv{n}") for n in range(shape.name_servers)
        ]
        addresses = tuple(one.address for one in self.name_servers)
        joined = ";".join(addresses)
        self.master = Broker(world, "a", joined, shape)
        self.slave = Broker(world, "a", joined, shape, broker_id=1)
        self.masters = [self.master]
        if shape.has_second_master:
            self.masters.append(Broker(world, "b", joined, shape))
        self.brokers = [*self.masters, self.slave]
        self.servers: list[Node] = [*self.name_servers, *self.brokers]
        self.producers: list[Client] = [Producer(world, "p1", addresses, shape), Payer(world, "payer", addresses)]
        self.consumers = [
            Consumer(world, "w1", addresses, WORKERS, (EVENTS, PAYMENTS)),
            Consumer(world, "w2", addresses, WORKERS, (EVENTS, PAYMENTS)),
            Consumer(world, "o1", addresses, ORDERLY, (ORDERS,)),
            Consumer(world, "o2", addresses, ORDERLY, (ORDERS,)),
        ]
        self.poppers = [Popper(world, name, addresses) for name in ("v1", "v2") if shape.has_poppers]
        self.pipelines = [Pipeline(world, "pipeline", addresses)] if shape.has_pipeline else []
        self.clients: list[Client] = [*self.producers, *self.consumers, *self.poppers, *self.pipelines]
        self.cut_masters: set[str] = set()
        """Masters whose machines lost power: their slaves may have more of the log than is left of it."""
        self.auditor = Consumer(world, "audit", addresses, AUDITORS, (EVENTS, ORDERS, PAYMENTS))

    def __iter__(self) -> Iterator[Node | Client]:
        yield from self.servers
        yield from self.clients

    @property
    def nodes(self) -> dict[str, Node | Client]:
        return {node.machine.name: node for node in self}

    @property
    def names(self) -> dict[str, list[str]]:
        """The machines by their part."""
        return {
            "brokers": [one.machine.name for one in self.brokers],
            "slaves": [self.slave.machine.name],
            "servers": [one.machine.name for one in self.name_servers],
            "clients": [one.machine.name for one in self.clients],
        }

    async def start(self) -> None:
        for node in self:
            node.start()
            await asyncio.sleep(0.2)

    async def drain(self) -> None:
        """End all faults, let producers finish, and wait until every group has read everything."""
        loop = self.world.loop
        for node in self:
            node.start()
        for producer in self.producers:
            producer.is_wanted = False
        while any(producer.is_busy for producer in self.producers):
            await asyncio.sleep(LOOK_SECONDS)
        consumers: list[Consumer | Popper] = [*self.consumers, *self.poppers, self.auditor]
        for consumer in consumers:
            consumer.fails = False
        self.auditor.start()
        await asyncio.sleep(SETTLE_SECONDS)
        end = loop.time() + DRAIN_SECONDS
        while left := self._left():
            if loop.time() > end:
                self.world.problems.append(f"not drained within {DRAIN_SECONDS:g} s: {left}")
                break
            for node in self:
                if not node.is_alive and not isinstance(node, Producer):
                    node.start()
            await asyncio.sleep(LOOK_SECONDS)

    async def operate(self) -> None:
        """Be the operator: a slave that has more than a power cut left of its master begins anew."""
        while True:
            await asyncio.sleep(OPERATOR_SECONDS)
            slave = self.slave.running
            if "a" not in self.cut_masters or slave is None or self.master.running is None:
                continue
            trouble = slave.replication.follower.trouble  # type: ignore[attr-defined]
            if trouble and ("the master lost what" in trouble or "their logs went different ways" in trouble):
                self.slave.kill()
                self.slave.disk.wipe()
                self.slave.start()

    def _left(self) -> str:
        """What is still to be read; empty when nothing is."""
        for group, topics in (
            (WORKERS, (EVENTS, PAYMENTS)),
            (ORDERLY, (ORDERS,)),
            (AUDITORS, (EVENTS, ORDERS, PAYMENTS)),
        ):
            for master in self.masters:
                if master.running is None:
                    return f"{master.name} does not run"
                if delayed := master.waiting_messages:
                    return f"{delayed} delayed messages at {master.name}"
                if halves := master.running.transactions._half_messages.waiting.total():
                    return f"{halves} transactions at {master.name}"
                for topic in (*topics, RETRY_PREFIX + group):
                    for queue_id in range(2):
                        state = master.running.store.queues.get(topic, queue_id)
                        end = state.queue.max_offset if state is not None else 0
                        if end and (master.running.pop.state.offsets.get(topic, group, queue_id) or 0) < end:
                            return f"{group} of {topic}/{queue_id} at {master.name}: {end}"
        for pipeline in self.pipelines:
            if waiting := self._unread(pipeline):
                return waiting
        if self.poppers and (missing := self._read_by(AUDITORS) - self._read_by(POPPERS)):
            return f"{len(missing)} messages for {POPPERS}, as {min(missing)}"
        if not self._slave_is_level():
            return f"the slave: {self.slave.running.replication if self.slave.running else 'does not run'}"
        return ""

    def _read_by(self, group: str) -> set[str]:
        return {e.id for e in self.world.history if e.op == "read" and (e.group, e.topic) == (group, EVENTS)}

    def _unread(self, pipeline: Pipeline) -> str:
        for master in self.masters:
            assert master.running is not None
            for state in master.running.store.queues:
                queue = MessageQueue(state.topic, master.name, state.queue_id)
                if state.topic in (EVENTS, PAYMENTS) and pipeline.checkpoint.offset(queue) < state.queue.max_offset:
                    return f"{pipeline.name} of {state.topic}/{state.queue_id} at {master.name}"
        return ""

    def _slave_is_level(self) -> bool:
        slave, master = self.slave.running, self.master.running
        return slave is not None and master is not None and slave.store.max_offset == master.store.max_offset

    def conclude(self) -> None:
        """Put into the history what is there in the end."""
        self._compare_replica()
        for pipeline in self.pipelines:
            pipeline.tell_result()

    def _compare_replica(self) -> None:
        """Put into the history what the slave holds, and the master."""
        slave, master = self.slave.running, self.master.running
        if slave is None or master is None or self.slave.process is None or self.slave.process.state is State.DEAD:
            return
        end, other_end = slave.store.max_offset, master.store.max_offset
        first, common = max(slave.store.min_offset, master.store.min_offset), min(end, other_end)
        self.world.record(
            "replica", "ok", process="a-slave", queue="a", offset=end, other_offset=other_end,
            crc=self.slave.log_checksum(first, common), other_crc=self.master.log_checksum(first, common),
        )  # fmt: skip
