"""`make demo`: a cluster of real processes, a producer that loses a broker on the way, and nothing lost.

One name server and two brokers start; two thousand messages are sent while one broker is killed; it comes back. A
consumer group gets every acknowledged message, and the pipelines archive them in a lake, ask SQL and draw pictures.
With CONSOLE=1 the web console follows, until Ctrl-C.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from downrange import (
    AsyncProducer,
    AsyncPushConsumer,
    ConsumeFromWhere,
    ConsumerConfig,
    Message,
    ProducerConfig,
    ReceivedMessage,
)
from downrange.cli.spark_session import spark_session
from downrange.client.admin import Admin
from downrange.client.config import ClientConfig
from downrange.model.errors import MQError
from downrange.model.topics import TRACE_TOPIC, TopicConfig
from downrange.transport.loop import run

MESSAGES = 2000
CALLERS = 16
PICTURES = Path(__file__).parent.parent / "build" / "demo"
MOMENTS: dict[str, datetime] = {}
"""When the broker died and came back, for the pictures."""
SHOP = Path(__file__).with_name("shop.py")


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
    ready = re.search(r"ready on (?:http://)?([\d.:]+)", process.stdout.readline())
    if ready is None:
        process.wait(10)
        sys.exit(f"demo: {arguments[0]} did not start:\n{log.read_text()}")
    return Server(process, ready[1])


def start_broker(directory: Path, namesrv: str, name: str, port: str = "0") -> Server:
    options = [
        "--name",
        name,
        "--port",
        port,
        "--data",
        str(directory / name),
        "--metrics-port",
        "-1",
        "--grpc-port",
        "-1",
    ]
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
                MOMENTS["broker-b killed"] = datetime.now(UTC)
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
            await asyncio.sleep(0.03)  # some 500 messages a second: slow enough to be seen in a picture
            by_broker[result.queue.broker_name] = by_broker.get(result.queue.broker_name, 0) + 1

    config = ProducerConfig(fault_strategy="adaptive", attempt_timeout_seconds=0.5, trace=True)
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


async def consume(namesrv: str, acknowledged: set[str]) -> None:
    """Consume with a group of two consumers, which share the queues and together get every message."""
    received: set[str] = set()
    everything = asyncio.Event()

    async def keep(message: ReceivedMessage) -> None:
        received.add(message.message_id)
        if acknowledged <= received:
            everything.set()

    config = ConsumerConfig(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
    began = time.perf_counter()
    async with (
        AsyncPushConsumer("billing", namesrv, config, on_message=keep) as one,
        AsyncPushConsumer("billing", namesrv, config, on_message=keep) as other,
    ):
        await asyncio.gather(one.subscribe("orders"), other.subscribe("orders"))
        async with asyncio.timeout(40):
            await everything.wait()
    seconds = time.perf_counter() - began
    print(f"7. consumer group billing got all {len(acknowledged)} acknowledged messages in {seconds * 1000:.0f} ms")


def run_pipelines(directory: Path, namesrv: str, acknowledged: set[str]) -> None:
    """Archive the topic and the traces of its sends, look into the lake, and draw what is in it."""
    from downrange.spark.lake.lake import Lake
    from downrange.spark.pipelines.archive import archive
    from downrange.spark.pipelines.sql import View, ViewKind, sql
    from downrange.spark.pipelines.stats import lake_inputs, stats

    lake = directory / "lake"
    began = time.perf_counter()
    with spark_session(None) as spark:
        started = time.perf_counter()
        done = archive(spark, lake, {"namesrv": namesrv, "subscribe": f"orders,{TRACE_TOPIC}"})
        print(f"8. archived {done.messages} messages into a Delta table: {done.files} files in {done.batches} batches,")
        print(f"   {time.perf_counter() - started:.1f} s after Spark's start of {started - began:.1f} s")
        found = sql(
            spark,
            "SELECT broker, count(*) AS messages, count(DISTINCT unique_key) AS different FROM lake"
            " WHERE topic = 'orders' GROUP BY broker ORDER BY broker",
            [View("lake", ViewKind.LAKE, str(lake))],
        ).collect()
        for row in found:
            print(f"9. SQL over the lake: {row.messages} messages of {row.broker}, {row.different} different")
        keys = Lake.open(lake).dataset(["orders"]).to_table(["unique_key"])["unique_key"].to_pylist()
        if not acknowledged <= set(keys):
            sys.exit("demo: acknowledged messages are missing in the lake")
        shutil.rmtree(PICTURES, ignore_errors=True)
        inputs = lake_inputs(spark, Lake.open(lake), (), traces=True)
        report = stats(spark, *inputs, PICTURES, window="1 second", moments=MOMENTS)
        pictures = sum(path.suffix == ".png" for path in report.written)
        print(f"10. counted {report.messages} messages and {report.sends} traced sends by the second;")
        print(f"   {pictures} pictures in {PICTURES}")


def run_console(directory: Path, namesrv: str) -> None:
    """The web console until Ctrl-C, with a shop (examples/shop.py) that gives it something to look at."""
    print("   … a shop opens: orders, groups that are behind, dead letters, transactions", flush=True)
    shop = subprocess.Popen([sys.executable, str(SHOP), namesrv], stdout=subprocess.PIPE, text=True)
    servers = [shop]
    try:
        assert shop.stdout is not None
        if shop.stdout.readline() != "ready\n":
            sys.exit("demo: the shop did not open; its reason stands above")
        options = ["--port", "0", "--history", str(directory / "console.db")]
        console = start(directory / "log", "console", "-n", f"demo={namesrv}", *options)
        servers.append(console.process)
        print(f"the console: http://{console.address}/   (Ctrl-C ends the demo)", flush=True)
        with suppress(KeyboardInterrupt):
            console.process.wait()
    finally:
        for server in servers:
            server.terminate()
            server.wait(20)


async def show(directory: Path, namesrv: str, brokers: dict[str, Server]) -> set[str]:
    async with Admin(ClientConfig.of(namesrv)) as admin:
        await admin.topics.create(TopicConfig("orders", 4, 4), cluster="DefaultCluster")
        print("2. topic orders created on both brokers, 4 queues each")
        acknowledged = await send_while_a_broker_dies(namesrv, brokers["broker-b"])

        brokers["broker-b"].process.wait()
        port = brokers["broker-b"].address.rpartition(":")[2]
        began = time.perf_counter()
        brokers["broker-b"] = start_broker(directory, namesrv, "broker-b", port)
        MOMENTS["broker-b back"] = datetime.now(UTC)
        print(f"4. broker-b is back and has recovered, {time.perf_counter() - began:.1f} s after its start")

        stored = await count_messages(admin)
        print(f"5. {stored} messages are stored: every acknowledged one, and {stored - len(acknowledged)} twice")
        if stored < len(acknowledged):
            sys.exit("demo: acknowledged messages are missing")
        by_broker = await admin.messages.by_key("orders", "order-7")
        found = next(message for messages in by_broker.done.values() for message in messages)
        print(f"6. found by its key: {found.keys[0]}, body {found.body.decode()!r}, id {found.message_id}")
    await consume(namesrv, acknowledged)
    return acknowledged


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
            acknowledged = run(show(directory, namesrv.address, servers))
            run_pipelines(directory, namesrv.address, acknowledged)
            if os.environ.get("CONSOLE") == "1":
                run_console(directory, namesrv.address)
        finally:
            for server in [*servers.values(), namesrv]:
                if server.process.poll() is None:
                    os.kill(server.process.pid, signal.SIGTERM)
            codes = [server.process.wait(20) for server in [*servers.values(), namesrv]]
        print(f"11. all stopped, exit codes {codes}")
        for name in servers:
            command = [sys.executable, "-m", "downrange.cli.main", "store", "check", str(directory / name)]
            checked = subprocess.run(command, capture_output=True, text=True, timeout=60)
            print(f"12. store of {name}: {checked.stdout.strip().splitlines()[-1]}")
            codes.append(checked.returncode)
    print(f"done in {time.perf_counter() - began:.0f} s: a broker was killed on the way, and all {len(acknowledged)}")
    print("messages that were acknowledged were consumed and archived")
    sys.exit(any(codes))


if __name__ == "__main__":
    main()
