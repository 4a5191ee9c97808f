"""`make demo`: a cluster of real processes, a producer that loses a broker on the way, and nothing lost.

One name server and two brokers start; two thousand messages are sent while one broker is killed; it comes back, and
every acknowledged message is found again.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from downrange import AsyncProducer, Message, ProducerConfig
from downrange.client.admin import Admin
from downrange.client.config import ClientConfig
from downrange.model.errors import MQError
from downrange.model.topics import TopicConfig
from downrange.transport.loop import run

MESSAGES = 2000
CALLERS = 16


class Server(NamedTuple):
    """A server of the demo and the address it listens on."""

    process: subprocess.Popen[str]
    address: str


def start(log: Path, *arguments: str) -> Server:
    """Run a `downrange` server and wait until it says that it is ready."""
    with log.open("a") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "downrange.cli.main", *arguments], stdout=subprocess.PIPE, stderr=errors, text=True
        )
    assert process.stdout is not None
    ready = re.search(r"ready on ([\d.:]+)", process.stdout.readline())
    if ready is None:
        process.wait(10)
        sys.exit(f"demo: {arguments[0]} did not start:\n{log.read_text()}")
    return Server(process, ready[1])


def start_broker(directory: Path, namesrv: str, name: str, port: str = "0") -> Server:
    options = ["--name", name, "--port", port, "--data", str(directory / name), "--metrics-port", "-1"]
    return start(directory / "log", "broker", "-n", namesrv, *options)


async def send_while_a_broker_dies(namesrv: str, victim: Server) -> set[str]:
    """Send with several callers; kill the victim in the middle. Returns the ids of acknowledged messages."""
    numbers = iter(range(MESSAGES))
    acknowledged: set[str] = set()
    by_broker: dict[str, int] = {}
    failed = 0
    slowest = 0.0

    async def call(producer: AsyncProducer) -> None:
        nonlocal failed, slowest
        for number in numbers:
            if number == MESSAGES // 2:
                victim.process.send_signal(signal.SIGKILL)
                print(f"   … kill -9 {victim.address} after {len(acknowledged)} messages")
            began = time.perf_counter()
            try:
                result = await producer.send(
                    Message("orders", b"order %d" % number, tags="new", keys=f"order-{number}")
                )
            except MQError as error:
                failed += 1
                print(f"   … not sent: {error}")
                continue
            slowest = max(slowest, time.perf_counter() - began)
            acknowledged.add(result.message_id)
            by_broker[result.queue.broker_name] = by_broker.get(result.queue.broker_name, 0) + 1

    config = ProducerConfig(fault_strategy="adaptive", attempt_timeout_seconds=0.5)
    async with AsyncProducer("demo", namesrv, config) as producer:
        began = time.perf_counter()
        await asyncio.gather(*(call(producer) for _ in range(CALLERS)))
        seconds = time.perf_counter() - began
    shares = ", ".join(f"{count} by {name}" for name, count in sorted(by_broker.items()))
    print(f"3. {len(acknowledged)} of {MESSAGES} messages acknowledged ({shares}), {failed} failed,")
    print(f"   in {seconds:.1f} s; the slowest took {slowest * 1000:.0f} ms")
    return acknowledged


async def count_messages(admin: Admin) -> int:
    outcomes = await admin.topics.status("orders")
    return sum(queue.max_offset for stats in outcomes.done.values() for queue in stats.offset_table.values())


async def show(directory: Path, namesrv: str, brokers: dict[str, Server]) -> None:
    async with Admin(ClientConfig.of(namesrv)) as admin:
        await admin.topics.create(TopicConfig("orders", 4, 4), cluster="DefaultCluster")
        print("2. topic orders created on both brokers, 4 queues each")
        acknowledged = await send_while_a_broker_dies(namesrv, brokers["broker-b"])

        brokers["broker-b"].process.wait()
        port = brokers["broker-b"].address.rpartition(":")[2]
        began = time.perf_counter()
        brokers["broker-b"] = start_broker(directory, namesrv, "broker-b", port)
        print(f"4. broker-b is back and has recovered, {time.perf_counter() - began:.1f} s after its start")

        stored = await count_messages(admin)
        print(f"5. {stored} messages are stored: every acknowledged one, and {stored - len(acknowledged)} twice")
        if stored < len(acknowledged):
            sys.exit("demo: acknowledged messages are missing")
        by_broker = await admin.messages.by_key("orders", "order-7")
        found = next(message for messages in by_broker.done.values() for message in messages)
        print(f"6. found by its key: {found.keys[0]}, body {found.body.decode()!r}, id {found.message_id}")


def main() -> None:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        servers: dict[str, Server] = {}
        try:
            namesrv = start(directory / "log", "namesrv", "--port", "0", "--data", str(directory / "namesrv"))
            for name in ("broker-a", "broker-b"):
                servers[name] = start_broker(directory, namesrv.address, name)
            print(
                f"1. name server on {namesrv.address}, brokers on "
                f"{' and '.join(server.address for server in servers.values())}"
            )
            run(show(directory, namesrv.address, servers))
        finally:
            for server in [*servers.values(), namesrv]:
                if server.process.poll() is None:
                    os.kill(server.process.pid, signal.SIGTERM)
            codes = [server.process.wait(20) for server in [*servers.values(), namesrv]]
        print(f"7. all stopped, exit codes {codes}")
        for name in servers:
            command = [sys.executable, "-m", "downrange.cli.main", "store", "check", str(directory / name)]
            checked = subprocess.run(command, capture_output=True, text=True, timeout=60)
            print(f"8. store of {name}: {checked.stdout.strip().splitlines()[-1]}")
            codes.append(checked.returncode)
    print(f"done in {time.perf_counter() - began:.0f} s")
    sys.exit(any(codes))


if __name__ == "__main__":
    main()
