"""Sends to a broker process by the load generator: sizes, messages in flight, flush on disk, batches, headers.

"8x32" is 8 connections with 32 requests outstanding on each. Server CPU a message is the figure that repeats; the
generator's is beside it to show that the generator is not what limits the rate.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Final

from bench.quiet import core_shared
from bench.report import QUICK, Figure, table
from bench.served import Best, Load, add_round, send_apart, served, target
from downrange.load import LoadReport, SendPlan, Target, send_load
from downrange.protocol.codes import SerializeType

IN_FLIGHT: Final = {1: (1, 1), 16: (4, 4), 64: (8, 8), 256: (8, 32)}
SIZES: Final = (128, 1024)
ROUNDS: Final = 1 if QUICK else 3
SECONDS: Final = 0.4 if QUICK else 1.0
LONG_SECONDS: Final = 1.0 if QUICK else 10.0
_SYNC: Final = {"flushDiskType": "SYNC_FLUSH"}


def name(size: int, in_flight: int, flush: str = "async") -> str:
    connections, outstanding = IN_FLIGHT[in_flight]
    return f"send {size} B, {flush} flush, {in_flight} in flight ({connections}x{outstanding})"


def plan(size: int, connections: int, outstanding: int, **more: object) -> SendPlan:
    return SendPlan(SECONDS, 0.2, size, connections=connections, outstanding=outstanding, **more)  # type: ignore[arg-type]


def _sharing(where: Target, one: SendPlan) -> LoadReport:
    assert where.server is not None
    with core_shared(where.server.pid):
        return send_load(where, one)


def _calls(where: Target) -> dict[str, Load]:
    """One after the other, by callers that differ in how they wait."""
    one = plan(128, 1, 1)
    return {
        "one call at a time, the caller sleeps, on a core of its own": partial(send_apart, where, one),
        "one call at a time, the caller sleeps, on the broker's core": partial(_sharing, where, one),
        "one call at a time, the caller polls, on a core of its own": partial(
            send_apart, where, replace(one, polls=True)
        ),
    }


@contextmanager
def _loads() -> Iterator[dict[str, Load]]:
    """Of one round, on new brokers with empty directories: one for each size and way to flush."""
    loads: dict[str, Load] = {}
    with ExitStack() as stack:
        for size in SIZES:
            plain = target(stack.enter_context(served()))
            synced = target(stack.enter_context(served(_SYNC)))
            for in_flight, shape in IN_FLIGHT.items():
                loads[name(size, in_flight)] = partial(send_apart, plain, plan(size, *shape))
                loads[name(size, in_flight, "sync")] = partial(send_apart, synced, plan(size, *shape))
            loads[f"send {size} B in batches of 16, 64 batches in flight (8x8)"] = partial(
                send_apart, plain, plan(size, 8, 8, batch=16)
            )
            if size == SIZES[0]:
                loads |= _more_loads(plain)
        yield loads


def _more_loads(where: Target) -> dict[str, Load]:
    """Other shapes, headers and callers, with small messages."""
    loads: dict[str, Load] = {
        f"send 128 B, async flush, {connections}x{outstanding}": partial(
            send_apart, where, plan(128, connections, outstanding)
        )
        for connections, outstanding in ((1, 64), (64, 1))
    }
    binary, without_keys = plan(128, 8, 32, header=SerializeType.ROCKETMQ), plan(128, 8, 32, has_keys=False)
    loads["send 128 B, async flush, 8x32, binary headers"] = partial(send_apart, where, binary)
    loads["send 128 B, async flush, 8x32, no keys"] = partial(send_apart, where, without_keys)
    return loads | _calls(where)


def run() -> list[Figure]:
    best: dict[str, Best] = {}
    for _ in range(ROUNDS):
        with _loads() as loads:
            add_round(best, loads)
    with served() as running:  # gigabytes, for which a machine may have to find memory, while the disk is busy
        long = replace(plan(SIZES[-1], 8, 32), seconds=LONG_SECONDS)
        add_round(
            best, {f"send {long.size} B, 8x32, for {LONG_SECONDS:g} s": partial(send_apart, target(running), long)}
        )
    figures = []
    base = best[name(128, 256)]
    for label, one in best.items():
        figures.append(Figure(label, one.rate, "messages/s", one.rate / base.rate, "128 B, 8x32"))
        figures.append(Figure(f"{label}: server CPU", one.server_cpu_micros, "µs a message"))
        figures.append(Figure(f"{label}: generator CPU", one.own_cpu_micros, "µs a message"))
        figures.append(Figure(f"{label}: p50", one.latency("reply", "p50"), "ms"))
        figures.append(Figure(f"{label}: p99", one.latency("reply", "p99"), "ms"))
    figures.append(
        Figure("generator CPU, 128 B, 8x32", base.own_cpu_micros, "µs a message",
               base.own_cpu_micros / base.server_cpu_micros, "server CPU")
    )  # fmt: skip
    figures.append(Figure("requests refused in all these loads", sum(one.refused for one in best.values()), "requests"))
    return figures


if __name__ == "__main__":
    print(table(run()))
