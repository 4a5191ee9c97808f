"""What ten thousand topics cost a broker, against ten: sends, memory, descriptors, mappings, stops and starts.

    python -m bench.many_topics [--topics N]

The load generator sends each message to a random queue of a random topic. Both loads are made of equally many requests,
encoded beforehand, so that the generator's own memory costs both alike.
"""

from __future__ import annotations

import argparse
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from bench.quiet import settle
from bench.report import QUICK, Figure, compared, table
from bench.served import Load, by_turns, send_apart, served_in, target
from downrange.load import SendPlan, Target, send_load
from downrange.load.server_process import ServerProcess
from tests.support.standalone_process import Standalone

FEW: Final = 10
MANY: Final = 10_000
QUEUES: Final = 4
SHAPES: Final = ((8, 32), (1, 64))
SECONDS: Final = 0.4 if QUICK else 1.0
ROUNDS: Final = 1 if QUICK else 5


class Broker:
    """A broker with so many topics, all of which were used. Each start is a process of its own, and `took` what each
    step of its life took."""

    def __init__(self, directory: Path, topics: int, ring: int) -> None:
        self.topics = topics
        self.took: dict[str, Figure] = {}
        self._directory = directory
        self._ring = ring

    def make_topics(self) -> None:
        """Create them, use them, stop in good order."""
        with served_in(self._directory) as running:
            with self._timed("create over the wire"):
                where = self._target(running)
            self._use_all(where)
            with self._timed("orderly stop, after each was used"):
                running.process.signal(signal.SIGTERM)
                running.process.wait(120)

    @contextmanager
    def serve(self) -> Iterator[Target]:
        """Start after the orderly stop, and use all topics once; afterwards kill it, and start once more."""
        with ExitStack() as stack:
            with self._timed("start to ready, after an orderly stop"):
                running = stack.enter_context(served_in(self._directory))
            server = ServerProcess(running.process.pid)
            settle()
            self._note("private memory, unused since the start", server.private_bytes / 1e6, "MB")
            where = self._target(running)
            self._use_all(where)
            yield where
            self._note("private memory, after these loads", server.private_bytes / 1e6, "MB")
            self._note("descriptors, after these loads", running.open_files, "")
            self._note("mappings, after these loads", _mappings(server.pid), "")
            running.process.kill()
            with self._timed("start to ready, after these loads and kill -9"):
                stack.enter_context(served_in(self._directory))

    def send_name(self, connections: int, outstanding: int) -> str:
        return f"send 128 B, {self.topics:,} topics, {connections}x{outstanding}"

    def _target(self, running: Standalone) -> Target:
        return target(running, "many", QUEUES, self.topics)

    def _use_all(self, where: Target) -> None:
        """Once round the ring at least."""
        seconds = 1.0
        while send_load(where, SendPlan(seconds, 0, ring=self._ring)).messages < self._ring:
            seconds *= 2

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._note(what, time.perf_counter() - started, "s")

    def _note(self, what: str, value: float, unit: str) -> None:
        self.took[what] = Figure(f"{what}, {self.topics:,} topics", value, unit)


def _mappings(pid: int) -> int:
    return len(Path(f"/proc/{pid}/maps").read_text().splitlines())


def run(topics: int = MANY) -> list[Figure]:
    ring = 2 * topics * QUEUES
    loads: dict[str, Load] = {}
    with ExitStack() as directories:
        brokers = [
            Broker(Path(directories.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))), count, ring)
            for count in (FEW, topics)
        ]
        for broker in brokers:
            broker.make_topics()
        with ExitStack() as serving:
            targets = [serving.enter_context(broker.serve()) for broker in brokers]
            for connections, outstanding in SHAPES:
                plan = SendPlan(SECONDS, 0.3, connections=connections, outstanding=outstanding, ring=ring)
                for broker, where in zip(brokers, targets, strict=True):
                    loads[broker.send_name(connections, outstanding)] = partial(send_apart, where, plan)
            best = by_turns(loads, ROUNDS)
    few = brokers[0]
    base_name = f"{FEW} topics"
    figures = []
    for shape in SHAPES:
        base = best[few.send_name(*shape)]
        for broker in brokers:
            label = broker.send_name(*shape)
            one = best[label]
            cpu, base_cpu = one.server_cpu_micros, base.server_cpu_micros
            figures.append(compared(label, one.rate, "messages/s", base.rate, base_name))
            figures.append(compared(f"{label}: server CPU", cpu, "µs a message", base_cpu, base_name))
            figures.append(Figure(f"{label}: generator CPU", one.own_cpu_micros, "µs a message"))
    for what, base_figure in few.took.items():
        for broker in brokers:
            name, value, unit, *_ = broker.took[what]
            figures.append(compared(name, value, unit, base_figure.value, base_name))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topics", type=int, default=MANY)
    print(table(run(parser.parse_args().topics)))


if __name__ == "__main__":
    main()
