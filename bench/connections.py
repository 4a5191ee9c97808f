"""What connections cost: from one to a thousand of them in several ways, and thousands that are idle beside.

A bare echo server (bench/echo.py) is driven in the same run, with frames as long as a send: what it loses from few
connections to many is the kernel's and the loop's, and no server on this loop can do better. Where the generator takes
more CPU a message than the server, the rate is the generator's.
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from contextlib import ExitStack
from functools import partial
from typing import Final

from bench.namesrv import start
from bench.quiet import cores_apart
from bench.report import QUICK, Figure, compared, table
from bench.served import Load, by_turns, send_apart, served, target
from downrange.load import LoadReport, SendPlan, send_load
from downrange.load.frames import SendFrames
from downrange.load.histogram import Histogram
from downrange.load.links import Links
from downrange.load.report import Moment
from downrange.load.sending import links_of
from downrange.load.server_process import ServerProcess

MANY: Final = 500 if QUICK else 5000
SECONDS: Final = 0.4 if QUICK else 1.5
ROUNDS: Final = 1 if QUICK else 3
GROWTHS: Final = (
    ("more connections, each as busy as the one", (1, 32), (1000, 32)),
    ("one busy connection, then a thousand", (1, 64), (1000, 32)),
    ("more callers that wait for each reply", (64, 1), (1000, 1)),
    ("the same requests over more connections", (1, 64), (64, 1)),
    ("the same requests over more connections", (1, 1000), (1000, 1)),
)
"""What grows, from which number of connections and requests outstanding on each, to which."""


def allow_descriptors(count: int) -> None:
    """For this process and the servers it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard), hard))


def plan(connections: int, outstanding: int) -> SendPlan:
    return SendPlan(SECONDS, 0.3, connections=connections, outstanding=outstanding)


def echo_load(address: str, server: ServerProcess, load: SendPlan) -> LoadReport:
    """Frames to a server that sends them back; each that came back is sent again."""
    frames = SendFrames(load, "echo", 4)
    size = frames.frame_size
    done = 0
    with links_of(load, address) as links:
        for link in links.all:
            link.write(frames.slice(0, load.connections * load.outstanding // len(links.all)))
        begun = None
        started = now = time.monotonic()
        while now < started + load.warm_up_seconds + load.seconds:
            if begun is None and now >= started + load.warm_up_seconds:
                begun = Moment.now(server, done // size)
            for link in links.wait(0.1):
                received = link.read()
                link.write(memoryview(received))
                done += len(received)
            now = time.monotonic()
        assert begun is not None
        ended = Moment.now(server, done // size)
    return LoadReport.between("echo", begun, ended, server, {"reply": Histogram()}, Counter())


def echo_apart(address: str, server: ServerProcess, load: SendPlan) -> LoadReport:
    with cores_apart(server.pid):
        return echo_load(address, server, load)


def run() -> list[Figure]:
    allow_descriptors(2 * MANY + 1000)
    with served() as running, ExitStack() as stack:
        process, echo_address = start(stack, "-m", "bench.echo")
        echo = ServerProcess(process.pid)
        server = ServerProcess(running.process.pid)
        where = target(running)

        def beside_idle() -> LoadReport:
            with Links(running.broker, MANY):
                send_load(where, SendPlan(0.1, 0, connections=1, outstanding=1))  # all have been accepted by now
                return send_apart(where, plan(8, 32))

        send_load(where, plan(8, 32))  # what the broker makes once is not what a connection costs
        before = server.private_bytes
        started = time.perf_counter()
        with Links(running.broker, MANY):
            connected = time.perf_counter() - started
            send_load(where, SendPlan(0.1, 0, connections=1, outstanding=1))
            each = (server.private_bytes - before) / MANY
        loads: dict[str, Load] = {
            "8x32": partial(send_apart, where, plan(8, 32)),
            "8x32 beside idle": beside_idle,
            f"{MANY}x1": partial(send_apart, where, plan(MANY, 1)),
        }
        for shape in dict.fromkeys(shape for _, *shapes in GROWTHS for shape in shapes):
            loads[_name(shape)] = partial(send_apart, where, plan(*shape))
            loads[f"echo {_name(shape)}"] = partial(echo_apart, echo_address, echo, plan(*shape))
        best = by_turns(loads, ROUNDS)

    figures = [
        Figure(f"opening {MANY:,} connections", MANY / connected, "connections/s"),
        Figure("private memory for an idle connection", each / 1024, "KiB"),
    ]

    def add(label: str, load: str, base: str) -> None:
        one, other = best[load], best[base]
        figures.append(compared(label, one.rate, "messages/s", other.rate, base))
        figures.append(
            compared(f"{label}: server CPU", one.server_cpu_micros, "µs a message", other.server_cpu_micros, base)
        )
        figures.append(Figure(f"{label}: generator CPU", one.own_cpu_micros, "µs a message"))

    add("send 128 B, 8x32, no other connections", "8x32", "8x32")
    add(f"send 128 B, 8x32, beside {MANY:,} connections that are idle", "8x32 beside idle", "8x32")
    for what, few, many in GROWTHS:
        base = _name(few)
        for shape in (few, many):
            label = f"{what} ({base} to {_name(many)}): {_name(shape)}"
            add(label, _name(shape), base)
            echoed, echoed_base = best[f"echo {_name(shape)}"], best[f"echo {base}"]
            cpu, cpu_base = echoed.server_cpu_micros, echoed_base.server_cpu_micros
            figures.append(compared(f"{label}: echo", echoed.rate, "frames/s", echoed_base.rate, base))
            figures.append(compared(f"{label}: echo CPU", cpu, "µs a frame", cpu_base, base))
    add(f"send 128 B, {MANY}x1", f"{MANY}x1", "1000x1")
    figures.append(Figure(f"send 128 B, {MANY}x1: p99", best[f"{MANY}x1"].latency("reply", "p99"), "ms"))
    return figures


def _name(shape: tuple[int, int]) -> str:
    return f"{shape[0]}x{shape[1]}"


if __name__ == "__main__":
    print(table(run()))
