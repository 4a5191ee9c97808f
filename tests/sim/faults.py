"""The faults of a run: a list that the seed draws, played beside the workload.

Each fault begins at its time, lasts for its seconds, and is then undone: what was killed is started again, what was
blocked is open again. The list is data, so that it can be printed, and shrunk to the faults that a failure needs.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tests.sim.process import Machine, State
from tests.sim.servers import Broker, Node
from tests.support.checked_store import checked

if TYPE_CHECKING:
    from tests.sim.clients import Client
    from tests.sim.cluster import Cluster

RUN_SECONDS: Final = 60.0
MOST_FAULTS: Final = 12
LARGEST_STEP_SECONDS: Final = 50.0
"""After a clock was set back by more than a minute a broker delivers delayed messages at once, as RocketMQ does."""
SLOW_NETWORK_SECONDS: Final = 0.05
SLOWEST_PAUSE_SECONDS: Final = 0.005


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong at `at`, for `seconds`, to one machine or between two."""

    at: float
    kind: str
    target: str
    other: str = ""
    seconds: float = 0.0
    amount: float = 0.0

    def __str__(self) -> str:
        between = f" -> {self.other}" if self.other else ""
        amount = f" by {self.amount:.3f}" if self.amount else ""
        return f"{self.at:7.3f} s  {self.kind} {self.target}{between}{amount}, for {self.seconds:.3f} s"


def draw_faults(seed: int, names: dict[str, list[str]]) -> list[Fault]:
    """The faults of a seed. `names` are the machines by their part: "brokers", "slaves", "servers", "clients"."""
    chance = random.Random(f"{seed} faults")
    found = [_draw(chance, names) for _ in range(chance.randint(0, MOST_FAULTS))]
    return sorted(found, key=lambda fault: fault.at)


def _draw(chance: random.Random, names: dict[str, list[str]]) -> Fault:
    at = chance.uniform(1.0, RUN_SECONDS)
    kind = chance.choice(list(PARTS))
    target = chance.choice([name for part in PARTS[kind] for name in names[part]])
    other, amount = "", 0.0
    seconds = min(40.0, chance.expovariate(1 / 4.0))
    if kind in ("block", "partition", "loss"):
        other = chance.choice([name for part in ALL for name in names[part] if name != target])
    elif kind == "clock":
        amount = chance.choice((-1, 1)) * chance.choice((0.05, 1.0, LARGEST_STEP_SECONDS)) * chance.random()
    elif kind == "slow":
        amount = chance.uniform(0, SLOWEST_PAUSE_SECONDS)
    return Fault(round(at, 3), kind, target, other, round(seconds, 3), round(amount, 4))


ALL: Final = ("brokers", "servers", "clients")
PARTS: Final = {
    "kill": ALL,
    "power cut": ("brokers",),
    "restart": ("brokers", "servers"),
    "stop": ALL,
    "slow": ALL,
    "block": ALL,
    "partition": ALL,
    "isolate": ALL,
    "loss": ALL,
    "clock": ALL,
    "slow network": ("servers",),
    "fsync error": ("brokers",),
    "full disk": ("brokers",),
    "bit flip": ("slaves",),
}
"""Which machines each kind of fault may hit."""


async def play(cluster: Cluster, faults: list[Fault]) -> None:
    """Let the faults happen; returns when the last is over."""
    async with asyncio.TaskGroup() as tasks:
        for fault in faults:
            tasks.create_task(_play_one(Players(cluster), fault))
        tasks.create_task(asyncio.sleep(RUN_SECONDS))


async def _play_one(players: Players, fault: Fault) -> None:
    await asyncio.sleep(fault.at)
    undo = players.begin(fault)
    await asyncio.sleep(fault.seconds)
    undo()


Undo = Callable[[], None]


class Players:
    """Begins each kind of fault, and knows how to end it."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._network = cluster.world.network

    def begin(self, fault: Fault) -> Undo:
        node = self._cluster.nodes[fault.target]
        begin: Undo = getattr(self, "_" + fault.kind.replace(" ", "_"))(fault, node)
        return begin

    def _kill(self, fault: Fault, node: Node | Client) -> Undo:
        node.kill()
        return node.start

    def _power_cut(self, fault: Fault, node: Broker) -> Undo:
        node.kill(with_machine=True)
        if not node.is_slave:
            self._cluster.cut_masters.add(node.name)
        return node.start

    def _restart(self, fault: Fault, node: Node) -> Undo:
        node.ask_to_stop()
        return node.start

    def _stop(self, fault: Fault, node: Node | Client) -> Undo:
        process = node.process
        if process is None or process.state is not State.RUNNING:
            return lambda: None
        process.stop()
        self._world.record("process", "stopped", process=process.name)
        if isinstance(node, Broker):
            node.hinder("stopped")

        def undo() -> None:
            if process.state is State.STOPPED and isinstance(node, Broker):
                node.hinder_no_more("stopped")
            process.go_on()

        return undo

    def _slow(self, fault: Fault, node: Node | Client) -> Undo:
        process = node.process
        if process is None:
            return lambda: None
        process.pause(fault.amount)

        def undo() -> None:
            process.pause(0.0)

        return undo

    def _block(self, fault: Fault, node: Node | Client) -> Undo:
        return self._blocked([(node.machine, self._cluster.nodes[fault.other].machine)])

    def _partition(self, fault: Fault, node: Node | Client) -> Undo:
        one, other = node.machine, self._cluster.nodes[fault.other].machine
        return self._blocked([(one, other), (other, one)])

    def _isolate(self, fault: Fault, node: Node | Client) -> Undo:
        others = [one.machine for one in self._cluster.nodes.values() if one is not node]
        return self._blocked([pair for one in others for pair in ((node.machine, one), (one, node.machine))])

    def _blocked(self, pairs: list[tuple[Machine, Machine]]) -> Undo:
        for source, target in pairs:
            self._network.block(source, target)

        def undo() -> None:
            for source, target in pairs:
                self._network.unblock(source, target)

        return undo

    def _loss(self, fault: Fault, node: Node | Client) -> Undo:
        for transport in self._network.between(node.machine, self._cluster.nodes[fault.other].machine):
            self._network.lose(transport)
        return lambda: None

    def _clock(self, fault: Fault, node: Node | Client) -> Undo:
        self._step_clock(node, int(fault.amount * 1000))
        return lambda: self._step_clock(node, -int(fault.amount * 1000))

    def _step_clock(self, node: Node | Client, millis: int) -> None:
        node.machine.clock.step_millis += millis
        if isinstance(node, Broker):
            self._world.record("clock", "ok", process=node.name, delay_nanos=millis * 1_000_000)

    def _slow_network(self, fault: Fault, node: Node | Client) -> Undo:
        usual, self._network.typical_seconds = self._network.typical_seconds, SLOW_NETWORK_SECONDS

        def undo() -> None:
            self._network.typical_seconds = min(usual, self._network.typical_seconds)

        return undo

    def _fsync_error(self, fault: Fault, node: Broker) -> Undo:
        node.disk.fails_to_sync = node.disk.was_faulty = True
        node.hinder("fsync error")

        def undo() -> None:  # an operator repairs the disk and starts the broker again
            node.disk.fails_to_sync = False
            node.kill()
            node.start()

        return undo

    def _full_disk(self, fault: Fault, node: Broker) -> Undo:
        node.disk.is_full = node.disk.was_faulty = True

        def undo() -> None:
            node.disk.is_full = False
            node.start()

        return undo

    def _bit_flip(self, fault: Fault, node: Broker) -> Undo:
        """A bit of a slave's disk changes while it is off. An operator runs `store check`, and empties a bad disk.

        A change of its log that nobody noticed is found in the end, when the logs of slave and master are compared.
        """
        node.kill()
        node.disk.flip_a_bit()
        is_reported = any(problem.where != "abort" for problem in checked(node.disk.root).problems)

        def undo() -> None:
            if is_reported:
                node.kill()
                node.disk.wipe()
            node.start()

        return undo
