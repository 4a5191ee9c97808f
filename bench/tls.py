"""What TLS costs: handshakes a second, and the broker's CPU a message over plain and TLS connections of one run.

All loads go to one broker with tls.server.mode=permissive, which tells TLS from plain by the first byte. The generator
uses one socket after the other for both, so that the broker gets chunks of one shape; its own CPU over TLS is no
figure of the broker.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from bench.quiet import cores_apart
from bench.report import QUICK, Figure, compared, cpu_seconds, table
from bench.served import Load, by_turns, pull_apart, send_apart, served_in
from downrange.client.config import ClientConfig
from downrange.load import PullPlan, SendPlan, Target, find_target
from downrange.load.links import open_socket
from downrange.load.server_process import ServerProcess
from downrange.transport.loop import run as run_loop
from downrange.transport.tls import ClientTls
from tests.support.certificates import Certificates
from tests.support.standalone_process import Standalone

ROUNDS: Final = 1 if QUICK else 3
SECONDS: Final = 0.4 if QUICK else 1.5
HANDSHAKES: Final = 100 if QUICK else 2000
THREADS: Final = 8
IDLE: Final = 100 if QUICK else 300
SHAPES: Final = ((8, 32), (1, 64), (64, 1), (1, 1))


@contextmanager
def secured() -> Iterator[tuple[Standalone, Certificates]]:
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        files = Certificates.make(Path(directory) / "tls")
        cert, key = files.server
        settings = {"tls.server.mode": "permissive", "tls.server.certPath": cert, "tls.server.keyPath": key}
        with served_in(Path(directory), settings) as running:
            yield running, files


def where(running: Standalone, files: Certificates, topic: str, *, is_tls: bool) -> Target:
    config = ClientConfig((running.namesrv,), use_tls=is_tls, tls=files.client_config())
    found = find_target(topic=topic, queues=4, broker=running.broker, server_pid=running.process.pid, config=config)
    return run_loop(found)


def plan(connections: int, outstanding: int, size: int = 128) -> SendPlan:
    return SendPlan(SECONDS, 0.3, size, connections=connections, outstanding=outstanding, each_alone=True)


def handshakes(running: Standalone, tls: ClientTls | None) -> tuple[float, float]:
    """Connections a second, made by a few threads, and the broker's CPU for each in microseconds."""

    def connect(_: int) -> None:
        open_socket(running.broker, tls).close()

    with cores_apart(running.process.pid), ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(connect, range(THREADS)))
        before, started = cpu_seconds(running.process.pid), time.perf_counter()
        list(pool.map(connect, range(HANDSHAKES)))
        seconds = time.perf_counter() - started
        cpu = cpu_seconds(running.process.pid) - before
    return HANDSHAKES / seconds, cpu / HANDSHAKES * 1e6


def idle_bytes(running: Standalone, tls: ClientTls) -> float:
    """The broker's private memory for one connection that has nothing to do."""
    server = ServerProcess(running.process.pid)
    before = server.private_bytes
    with ExitStack() as stack:
        for _ in range(IDLE):
            stack.enter_context(open_socket(running.broker, tls))
        return (server.private_bytes - before) / IDLE


def run() -> list[Figure]:
    figures: list[Figure] = []
    with secured() as (running, files):
        plain = where(running, files, "plain", is_tls=False)
        tls = where(running, files, "tls", is_tls=True)
        rate, cpu = handshakes(running, tls.tls)
        plain_rate, plain_cpu = handshakes(running, None)
        figures.append(compared("connections with a TLS handshake", rate, "connections/s", plain_rate, "plain"))
        figures.append(compared("TLS handshake: server CPU", cpu, "µs", plain_cpu, "plain"))
        assert tls.tls is not None
        figures.append(Figure("private memory for an idle TLS connection", idle_bytes(running, tls.tls) / 1024, "KiB"))
        loads: dict[str, Load] = {}
        for connections, outstanding in SHAPES:
            for kind, target in (("plain", plain), ("TLS", tls)):
                name = f"send 128 B, {connections}x{outstanding}, {kind}"
                loads[name] = partial(send_apart, target, plan(connections, outstanding))
        for kind, target in (("plain", plain), ("TLS", tls)):
            loads[f"send 1024 B, 8x32, {kind}"] = partial(send_apart, target, plan(8, 32, 1024))
        best = by_turns(loads, ROUNDS)
        pulls: dict[str, Load] = {
            f"pull 4x8, {kind}": partial(pull_apart, where(running, files, topic, is_tls=kind == "TLS"), PullPlan())
            for kind, topic in (("plain", "plain"), ("TLS", "plain"))
        }
        best |= by_turns(pulls, ROUNDS)
    for name, one in best.items():
        base = best[name.replace("TLS", "plain")]
        figures.append(compared(name, one.rate, "messages/s", base.rate, "plain"))
        figures.append(
            compared(f"{name}: server CPU", one.server_cpu_micros, "µs a message", base.server_cpu_micros, "plain")
        )
        figures.append(Figure(f"{name}: generator CPU", one.own_cpu_micros, "µs a message"))
    figures.append(Figure("requests refused in all these loads", sum(one.refused for one in best.values()), "requests"))
    return figures


if __name__ == "__main__":
    print(table(run()))
