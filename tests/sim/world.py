"""One simulated cluster: its loop, network, machines and disks, the random numbers of its seed, and its history."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from zlib import crc32

from tests.sim import seams
from tests.sim.disk import Disk
from tests.sim.loop import SimLoop
from tests.sim.network import Network
from tests.sim.process import CURRENT, Machine, Process
from tests.support.history import Event


class World:
    """All that a run consists of. Two of one seed do the same, to the byte."""

    def __init__(self, seed: int, directory: Path) -> None:
        random.seed(seed)
        self.seed = seed
        self.chance = random.Random(f"{seed} workload")
        self.loop = SimLoop(random.Random(f"{seed} threads"))
        self.network = Network(self.loop, random.Random(f"{seed} network"))
        self.disks: dict[str, Disk] = {}
        self.history: list[Event] = []
        self.problems: list[str] = []
        """Errors that nobody handled; each is a fault, whatever the history says."""
        self._directory = directory
        self.loop.set_exception_handler(self._unhandled)
        seams.install(self.loop, self.network, self.disks)

    def machine(self, name: str, *, has_disk: bool = False) -> Machine:
        machine = Machine(name, f"10.0.0.{len(self.network.machines) + 1}", self.loop)
        self.network.machines[machine.address] = machine
        if has_disk:
            self.disks[name] = Disk(self._directory / name, random.Random(f"{self.seed} disk {name}"))
        return machine

    def process(self, name: str, machine: Machine) -> Process:
        return Process(name, machine, self.loop)

    def record(self, op: str, phase: str, *, process: str | None = None, **members: Any) -> None:
        if process is None:
            owner = CURRENT.get()
            process = owner.name if owner is not None else "simulation"
        time = int(self.loop.time() * 1e9)
        self.history.append(Event(time=time, process=process, op=op, phase=phase, **members))

    def _unhandled(self, loop: Any, context: dict[str, Any]) -> None:
        error = context.get("exception")
        where = ""
        if error is not None and error.__traceback__ is not None:
            trace = error.__traceback__
            while trace.tb_next is not None:
                trace = trace.tb_next
            where = f" at {Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
        process = CURRENT.get()
        name = process.name if process is not None else "?"
        self.problems.append(f"{loop.time():.3f} s {name}: {context['message']}: {error!r}{where}")


def checksum(body: bytes) -> int:
    return crc32(body)
