"""Five thousand connections: what they cost idle, and what goes through when each has one send on its way."""

from __future__ import annotations

import resource
import time
from typing import Final

from bench.report import QUICK, Figure, table
from bench.served import served, target
from downrange.client.load import SendPlan, send_load
from downrange.client.load.links import Links
from downrange.client.load.server_process import ServerProcess

MANY: Final = 500 if QUICK else 5000
SECONDS: Final = 0.5 if QUICK else 4.0


def allow_descriptors(count: int) -> None:
    """For this process and the servers it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard), hard))


def run() -> list[Figure]:
    allow_descriptors(2 * MANY + 1000)
    with served() as running:
        server = ServerProcess(running.process.pid)
        where = target(running)
        few = send_load(where, SendPlan(SECONDS, 0.3, connections=8, outstanding=32))
        before = server.private_bytes
        started = time.perf_counter()
        with Links(running.broker, MANY):
            connected = time.perf_counter() - started
            send_load(where, SendPlan(0.2, 0, connections=1, outstanding=1))  # all of them have been accepted by now
            each = (server.private_bytes - before) / MANY
            among_idle = send_load(where, SendPlan(SECONDS, 0.3, connections=8, outstanding=32))
        many = send_load(where, SendPlan(SECONDS, 0.5, connections=MANY, outstanding=1))
    name = f"{MANY:,} connections"
    return [
        Figure(f"opening {name}", MANY / connected, "connections/s"),
        Figure("private memory for an idle connection", each / 1024, "KiB"),
        Figure("send 128 B, 8x32, no other connections", few.rate, "messages/s"),
        Figure(f"send 128 B, 8x32, beside {name} that are idle", among_idle.rate, "messages/s",
               among_idle.rate / few.rate, "without them"),
        Figure(f"send 128 B, {MANY}x1", many.rate, "messages/s", many.rate / few.rate, "8x32"),
        Figure(f"send 128 B, {MANY}x1: server CPU", many.server_cpu_micros or 0, "µs a message"),
        Figure(f"send 128 B, {MANY}x1: p99", many.latency["reply"].p99, "ms"),
    ]  # fmt: skip


if __name__ == "__main__":
    print(table(run()))
