"""Elections, cut links, lost answers and killed replicas under load: nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest

from downrange.broker.replication.auto_switch import HaRole
from downrange.store.new_message import PutMessageStatus
from tests.support.auto_switch import Controller, Replica, replica, until
from tests.support.replicas import log_bytes

NUMBERS = (1, 2, 3)


class Drill:
    """Three replicas, and what their senders were told."""

    def __init__(self, root: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.root = root
        self.controller = Controller()
        self.replicas: dict[int, Replica] = {}
        self.stacks: dict[int, AsyncExitStack] = {}
        self.acknowledged: list[bytes] = []
        self.sent = 0

    async def start(self, number: int) -> None:
        stack = self.stacks[number] = AsyncExitStack()
        self.replicas[number] = await stack.enter_async_context(replica(self.root, number, self.controller))

    async def restart(self, number: int) -> None:
        """A replica dies without a last word, and starts again; a master of its own gets a new epoch."""
        dead = self.replicas.pop(number)
        dead.replication.give_up()
        dead.store._refusals.refuse("flush", "killed")  # nothing is flushed, the mark of a crash stays
        await self.stacks.pop(number).aclose()
        await self.start(number)
        if number == self.controller.master:
            await self.lead(number, self.controller.members | {number})
        else:
            await self.tell(number)

    async def lead(self, winner: int, members: frozenset[int]) -> None:
        others = [number for number in NUMBERS if number != winner and self.random.random() < 0.7]
        await self.controller.elect(
            self.replicas[winner], *(self.replicas[number] for number in others), members=members
        )

    async def tell(self, number: int) -> None:
        """A replica polls the controller."""
        one, controller = self.replicas[number], self.controller
        if number == controller.master:
            one.replication.sync_state_set_committed(controller.members, controller.set_epoch)
        elif one.replication.seen_epoch < controller.epoch or one.replication.role is HaRole.FENCED:
            await one.replication.become_slave(controller.epoch, self.replicas[controller.master].ha_address)
        else:
            one.replication.set_master_ha_address(self.replicas[controller.master].ha_address)

    def send(self) -> None:
        """Send to whoever takes itself for the master."""
        for one in self.replicas.values():
            if one.replication.role is HaRole.MASTER:
                self.sent += 1
                body = b"%06d" % self.sent * self.random.choice([1, 10, 40])
                one.send(body).add_done_callback(partial(self.told, body))

    def told(self, body: bytes, told: asyncio.Future[PutMessageStatus]) -> None:
        if told.result() is PutMessageStatus.PUT_OK:
            self.acknowledged.append(body)

    async def step(self) -> None:
        controller, chance = self.controller, self.random.random()
        if chance < 0.12:
            await self.lead(self.random.choice(sorted(controller.members)), frozenset())
        elif chance < 0.2:
            await self.restart(self.random.choice(NUMBERS))
        elif chance < 0.28:
            controller.answers = not controller.answers
        elif chance < 0.36:
            self.replicas[self.random.choice(NUMBERS)].replication._slaves.close_links()
        elif chance < 0.6:
            await self.tell(self.random.choice(NUMBERS))
        for _ in range(self.random.randint(0, 20)):
            self.send()
            if self.random.random() < 0.3:
                await asyncio.sleep(self.random.choice([0, 0, 0.002]))

    async def settle(self) -> None:
        """Let the network and the controller work again, until all three are in sync."""
        self.controller.answers = True
        master = self.replicas[self.controller.master]
        if master.replication.role is not HaRole.MASTER or master.replication.epoch != self.controller.epoch:
            await self.lead(master.number, self.controller.members)

        async def all_in_sync() -> None:
            while self.controller.members != set(NUMBERS) or not self.has_one_end():
                for number in NUMBERS:
                    await self.tell(number)
                await asyncio.sleep(0.05)

        await asyncio.wait_for(all_in_sync(), 60)

    def has_one_end(self) -> bool:
        return len({one.store.max_offset for one in self.replicas.values()}) == 1


async def run_drill(root: Path, seed: int, steps: int) -> Drill:
    drill = Drill(root, seed)
    try:
        for number in NUMBERS:
            await drill.start(number)
        await drill.lead(1, frozenset())
        for _ in range(steps):
            await drill.step()
        await drill.settle()
        first, second, third = (drill.replicas[number] for number in NUMBERS)
        assert log_bytes(first.store) == log_bytes(second.store) == log_bytes(third.store)
        kept = log_bytes(first.store)
        assert [body for body in drill.acknowledged if body not in kept] == []
        await until(lambda: set(drill.acknowledged) <= set(first.bodies))
        assert first.store.commit_log.whole_end(first.store.min_offset) == first.store.max_offset
    finally:
        for stack in drill.stacks.values():
            await stack.aclose()
    return drill


@pytest.mark.parametrize("seed", range(4))
async def test_no_acknowledged_message_is_lost(tmp_path: Path, seed: int) -> None:
    drill = await run_drill(tmp_path, seed, 60)
    assert len(drill.acknowledged) > 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
async def test_no_acknowledged_message_is_lost_in_many_runs(tmp_path: Path, seed: int) -> None:
    await run_drill(tmp_path, seed, 150)
