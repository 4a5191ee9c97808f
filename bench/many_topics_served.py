"""A whole broker with many topics against one with ten: the load generator sends each message to a random queue.

Both loads are made of equally many requests, encoded beforehand, so that the generator's own memory costs both alike.
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from bench.report import QUICK, Figure
from bench.served import Load, by_turns, send_apart, served_in, target
from downrange.client.load import SendPlan, Target, send_load
from downrange.client.load.server_process import ServerProcess
from tests.support.standalone_process import Standalone

QUEUES: Final = 4
SHAPES: Final = ((8, 32), (1, 64))
SECONDS: Final = 0.4 if QUICK else 1.0
ROUNDS: Final = 1 if QUICK else 3


@contextmanager
def broker_with(topics: int, ring: int) -> Iterator[tuple[Standalone, Target, float]]:
    """A broker whose topics have all been used and have their files, started anew; how long creating them took."""
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        with served_in(Path(directory)) as running:
            started = time.perf_counter()
            where = target(running, "many", QUEUES, topics)
            created = time.perf_counter() - started
            _use_all(where, ring)
            running.process.signal(signal.SIGTERM)
            running.process.wait(120)  # the files of all queues are made
        with served_in(Path(directory)) as running:
            yield running, target(running, "many", QUEUES, topics), created


def _use_all(where: Target, ring: int) -> None:
    """Once round the ring at least."""
    seconds = 1.0
    while send_load(where, SendPlan(seconds, 0, ring=ring)).messages < ring:
        seconds *= 2


def figures(few: int, many: int) -> list[Figure]:
    ring = 2 * many * QUEUES
    with broker_with(few, ring) as (small, few_target, _), broker_with(many, ring) as (large, many_target, created):
        server, few_server = ServerProcess(large.process.pid), ServerProcess(small.process.pid)
        unused, few_unused = server.private_bytes, few_server.private_bytes
        targets = {few: few_target, many: many_target}
        for where in targets.values():
            _use_all(where, ring)
        loads: dict[str, Load] = {}
        for connections, outstanding in SHAPES:
            plan = SendPlan(SECONDS, 0.3, connections=connections, outstanding=outstanding, ring=ring)
            for count, where in targets.items():
                loads[_name(count, plan)] = partial(send_apart, where, plan)
        best = by_turns(loads, ROUNDS)
        used, few_used = server.private_bytes, few_server.private_bytes
    rows = [Figure(f"broker: create {many:,} topics over the wire", many / created, "topics/s")]
    for connections, outstanding in SHAPES:
        plan = SendPlan(connections=connections, outstanding=outstanding)
        base, base_name = best[_name(few, plan)], f"{few} topics"
        for count in (few, many):
            one = best[_name(count, plan)]
            label = f"broker: send 128 B to {count:,} topics, {connections}x{outstanding}"
            cpu = one.server_cpu_micros
            rows.append(Figure(label, one.rate, "messages/s", one.rate / base.rate, base_name))
            rows.append(
                Figure(f"{label}: server CPU", cpu, "µs a message", cpu / (base.server_cpu_micros or 1), base_name)
            )
            rows.append(Figure(f"{label}: generator CPU", one.own_cpu_micros, "µs a message"))
    for label, private, few_private in (("since the start unused", unused, few_unused), ("in use", used, few_used)):
        rows.append(Figure(f"broker: private memory, {few} topics {label}", few_private / 1e6, "MB"))
        rows.append(
            Figure(f"broker: private memory, {many:,} topics {label}", private / 1e6, "MB",
                   private / few_private, f"{few} topics")
        )  # fmt: skip
    return rows


def _name(count: int, plan: SendPlan) -> str:
    return f"{count} {plan.connections}x{plan.outstanding}"
