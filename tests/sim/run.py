"""Runs one seed: a cluster, its clients, the faults that the seed draws, the drain, and the checker."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from tests.sim.cluster import Cluster, draw_shape
from tests.sim.faults import Fault, draw_faults, play
from tests.sim.world import World
from tests.support.history import Event, check

IN_MEMORY: Final = Path("/dev/shm")  # noqa: S108  a directory of a random name is made in it


@dataclass(slots=True)
class Outcome:
    """What one run gave."""

    seed: int
    faults: list[Fault]
    problems: list[str] = field(default_factory=list)
    summary: str = ""
    simulated_seconds: float = 0.0
    cpu_seconds: float = 0.0
    history: bytes = b""

    @property
    def is_good(self) -> bool:
        return not self.problems


async def _main(world: World, outcome: Outcome, faults: list[Fault] | None, directory: Path) -> None:
    cluster = Cluster(world, draw_shape(world.seed), directory)
    faults = outcome.faults = draw_faults(world.seed, cluster.names) if faults is None else faults
    await cluster.start()
    operator = asyncio.create_task(cluster.operate())
    await play(cluster, faults)
    await cluster.drain()
    operator.cancel()
    cluster.conclude()


def run_here(seed: int, faults: list[Fault] | None = None) -> Outcome:
    """Run a seed in this process, which is good for nothing else afterwards."""
    outcome = Outcome(seed, faults or [])
    began = time.process_time()
    directory = Path(tempfile.mkdtemp(prefix="downrange-sim-", dir=IN_MEMORY if IN_MEMORY.is_dir() else None))
    try:
        world = World(seed, directory)
        asyncio.set_event_loop(world.loop)
        try:
            world.loop.run_until_complete(_main(world, outcome, faults, directory))
        except Exception as error:
            logging.getLogger(__name__).debug("run failed", exc_info=error)
            outcome.problems.append(f"the run broke: {error!r}")
        world.history.sort(key=lambda event: event.time)
        report = check(world.history)
        outcome.problems += world.problems + [f"{fault.rule}: {fault.text}" for fault in report.faults]
        outcome.summary = str(report).partition("\n")[0]
        outcome.simulated_seconds = world.loop.time()
        outcome.history = encode(world.history)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    outcome.cpu_seconds = time.process_time() - began
    return outcome


def encode(history: list[Event]) -> bytes:
    encoder = msgspec.json.Encoder()
    return b"\n".join(map(encoder.encode, history))


class Running:
    """A run in a process of its own."""

    def __init__(self, seed: int, faults: list[Fault] | None = None) -> None:
        self._seed = seed
        self._faults = faults
        self._reading, writing = os.pipe()
        self._child = os.fork()
        if self._child == 0:
            os.close(self._reading)
            status = 1
            try:
                data = pickle.dumps(run_here(seed, faults))
                with open(writing, "wb") as file:
                    file.write(data)
                status = 0
            finally:
                os._exit(status)
        os.close(writing)

    def outcome(self) -> Outcome:
        """Wait until it has ended."""
        with open(self._reading, "rb") as file:
            data = file.read()
        os.waitpid(self._child, 0)
        if not data:
            return Outcome(self._seed, self._faults or [], ["the process of the run died"])
        outcome: Outcome = pickle.loads(data)  # noqa: S301  from our own child
        return outcome


def run(seed: int, faults: list[Fault] | None = None) -> Outcome:
    return Running(seed, faults).outcome()


def run_side_by_side(seeds: Iterable[int], jobs: int) -> Iterator[Outcome]:
    """Run so many seeds at a time; the outcomes come in the order of the seeds."""
    under_way: deque[Running] = deque()
    for seed in seeds:
        if len(under_way) == jobs:
            yield under_way.popleft().outcome()
        under_way.append(Running(seed))
    while under_way:
        yield under_way.popleft().outcome()


def shrink(outcome: Outcome) -> Outcome:
    """The same failure with as few of its faults as we can find: leave out halves, then single ones."""
    size = max(1, len(outcome.faults) // 2)
    while outcome.faults and size:
        at = 0
        while at < len(outcome.faults):
            fewer = outcome.faults[:at] + outcome.faults[at + size :]
            tried = run(outcome.seed, fewer)
            if tried.is_good:
                at += size
            else:
                outcome = tried
        size //= 2
    return outcome
