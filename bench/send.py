"""Sends to a broker process by the load generator: sizes, messages in flight, flush on disk, batches, headers.

"8x32" is 8 connections with 32 requests outstanding on each. Server CPU a message is the figure that repeats; the
generator's is beside it to show that the generator is not what limits the rate.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from bench.report import QUICK, Figure, table
from bench.served import by_turns, served, target
from downrange.client.load import LoadReport, SendPlan, send_load
from downrange.protocol.codes import SerializeType

IN_FLIGHT: Final = {1: (1, 1), 16: (4, 4), 64: (8, 8), 256: (8, 32)}
SIZES: Final = (128, 1024)
ROUNDS: Final = 1 if QUICK else 3
SECONDS: Final = 0.4 if QUICK else 1.0


def name(size: int, in_flight: int, flush: str = "async") -> str:
    connections, outstanding = IN_FLIGHT[in_flight]
    return f"send {size} B, {flush} flush, {in_flight} in flight ({connections}x{outstanding})"


def plan(size: int, connections: int, outstanding: int, **more: object) -> SendPlan:
    return SendPlan(SECONDS, 0.2, size, connections=connections, outstanding=outstanding, **more)  # type: ignore[arg-type]


def run() -> list[Figure]:
    with served() as plain, served({"flushDiskType": "SYNC_FLUSH"}) as synced:
        loads: dict[str, Callable[[], LoadReport]] = {}
        plain_target, synced_target = target(plain), target(synced)
        for size in SIZES:
            for in_flight, shape in IN_FLIGHT.items():
                loads[name(size, in_flight)] = partial(send_load, plain_target, plan(size, *shape))
                loads[name(size, in_flight, "sync")] = partial(send_load, synced_target, plan(size, *shape))
            loads[f"send {size} B in batches of 16, 64 batches in flight (8x8)"] = partial(
                send_load, plain_target, plan(size, 8, 8, batch=16)
            )
        for shape in ((1, 64), (64, 1)):
            loads[f"send 128 B, async flush, {shape[0]}x{shape[1]}"] = partial(
                send_load, plain_target, plan(128, *shape)
            )
        loads["send 128 B, async flush, 8x32, binary headers"] = partial(
            send_load, plain_target, plan(128, 8, 32, header=SerializeType.ROCKETMQ)
        )
        loads["send 128 B, async flush, 8x32, no keys"] = partial(
            send_load, plain_target, plan(128, 8, 32, has_keys=False)
        )
        best = by_turns(loads, ROUNDS)
    figures = []
    base = best[name(128, 256)]
    for label, one in best.items():
        figures.append(Figure(label, one.rate, "messages/s", one.rate / base.rate, "128 B, 8x32"))
        figures.append(Figure(f"{label}: server CPU", one.server_cpu_micros, "µs a message"))
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
