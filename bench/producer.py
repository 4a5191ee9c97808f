"""Sends per second of the producer against a broker process: threads that wait, 64 coroutines, one-way sends.

128-byte bodies, unique keys, one connection. Broker and producer share the machine, so wall rates depend on what else
runs; the producer's own CPU per message repeats better. A bare connection that writes ready-made frames is the floor.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.report import QUICK, Figure, table
from downrange.client.config import ProducerConfig
from downrange.client.producer.blocking.producer import Producer
from downrange.client.producer.producer import AsyncProducer
from downrange.model.errors import MQError
from downrange.model.message import Message
from downrange.protocol.bodies.send import SendMessageRequest
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import request
from downrange.transport.loop import run as run_loop
from downrange.transport.pool import connect
from tests.support.standalone_process import standalone_process

TOPIC = "BenchmarkTest"
BODY = b"x" * 128
CONCURRENT = 64
TOGETHER = 256
COUNT = 3_200 if QUICK else 64_000
ROUNDS = 1 if QUICK else 3


class Measured:
    """The best round: messages a second, the CPU of this process for each, and how long a call took, if known."""

    def __init__(self) -> None:
        self.rate = 0.0
        self.cpu_micros = float("inf")
        self.p50_micros = float("inf")

    def add(self, count: int, seconds: float, cpu: float) -> None:
        self.rate = max(self.rate, count / seconds)
        self.cpu_micros = min(self.cpu_micros, cpu / count * 1e6)


def timed(count: int, work: Callable[[], None], measured: Measured) -> None:
    start, cpu = time.perf_counter(), time.process_time()
    work()
    measured.add(count, time.perf_counter() - start, time.process_time() - cpu)


async def concurrently(count: int, send: Callable[[int], Awaitable[object]], measured: Measured) -> None:
    """`CONCURRENT` coroutines that each send one after the other."""

    async def sender(first: int) -> None:
        for number in range(first, count, CONCURRENT):
            await send(number)

    start, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*map(sender, range(CONCURRENT)))
    measured.add(count, time.perf_counter() - start, time.process_time() - cpu)


def message(number: int) -> Message:
    return Message(TOPIC, BODY, keys=f"key-{number}")


async def bare(address: str, count: int, measured: Measured) -> None:
    """The same requests without a producer around them: made beforehand, field by field."""
    connection = await connect(address)
    header = SendMessageRequest(
        producer_group="bench", topic=TOPIC, queue_id=0, born_timestamp=0, properties="WAIT\x01true\x02KEYS\x01key"
    )
    command = request(RequestCode.SEND_MESSAGE_V2, header, body=BODY)
    await concurrently(count, lambda number: connection.request(command, 5), measured)
    await connection.drain(1)


async def asynchronous(namesrv: str, count: int, measured: Measured, config: ProducerConfig) -> None:
    async with AsyncProducer("bench", namesrv, config) as producer:
        await producer.send(message(0))
        await concurrently(count, lambda number: producer.send(message(number)), measured)


async def together(namesrv: str, count: int, measured: Measured) -> None:
    async with AsyncProducer("bench", namesrv) as producer:
        await producer.send(message(0))
        start, cpu = time.perf_counter(), time.process_time()
        for first in range(0, count, TOGETHER):
            sent = await producer.send_all([message(number) for number in range(first, first + TOGETHER)])
            if any(isinstance(each, MQError) for each in sent):
                raise AssertionError(sent)
        measured.add(count, time.perf_counter() - start, time.process_time() - cpu)


async def oneway(namesrv: str, count: int, measured: Measured) -> None:
    """The last one waits for its reply, and so for all before it."""
    async with AsyncProducer("bench", namesrv) as producer:
        queue = (await producer.send(message(0))).queue
        start, cpu = time.perf_counter(), time.process_time()
        for number in range(count):
            await producer.send_oneway(message(number), queue=queue)
        await producer.send(message(count), queue=queue)
        measured.add(count, time.perf_counter() - start, time.process_time() - cpu)


def blocking(namesrv: str, count: int, threads: int, measured: Measured) -> None:
    """Threads that share a producer and each send one after the other."""
    took: list[float] = []

    def sender(first: int) -> None:
        for number in range(first, count, threads):
            one = message(number)
            start = time.perf_counter()
            producer.send(one)
            took.append(time.perf_counter() - start)

    def work() -> None:
        list(pool.map(sender, range(threads)))

    with Producer("bench", namesrv) as producer, ThreadPoolExecutor(threads) as pool:
        producer.send(message(0))
        timed(count, work, measured)
    measured.p50_micros = min(measured.p50_micros, statistics.median(took) * 1e6)


def batched(namesrv: str, count: int, measured: Measured) -> None:
    def work() -> None:
        for first in range(0, count, 32):
            producer.send_batch([message(number) for number in range(first, first + 32)])

    with Producer("bench", namesrv) as producer:
        producer.send(message(0))
        timed(count, work, measured)


def run() -> list[Figure]:
    names = (
        "bare",
        "async",
        "latency",
        "adaptive",
        "together",
        "oneway",
        "blocking",
        "two",
        "threads",
        "many",
        "batches",
    )
    measured = {name: Measured() for name in names}
    # A busy machine must not turn into flow control: the broker may let requests wait.
    patient = {"waitTimeMillsInSendQueue": 10_000}
    with (
        tempfile.TemporaryDirectory() as directory,
        standalone_process(Path(directory), patient, log_level="ERROR") as cluster,
    ):
        for _ in range(ROUNDS):
            run_loop(bare(cluster.broker, COUNT, measured["bare"]))
            run_loop(asynchronous(cluster.namesrv, COUNT, measured["async"], ProducerConfig()))
            for name in ("latency", "adaptive"):
                config = ProducerConfig(fault_strategy=name)
                run_loop(asynchronous(cluster.namesrv, COUNT, measured[name], config))
            run_loop(together(cluster.namesrv, COUNT, measured["together"]))
            run_loop(oneway(cluster.namesrv, COUNT, measured["oneway"]))
            blocking(cluster.namesrv, COUNT // 16, 1, measured["blocking"])
            blocking(cluster.namesrv, COUNT // 16, 2, measured["two"])
            blocking(cluster.namesrv, COUNT // 16, 8, measured["threads"])
            blocking(cluster.namesrv, COUNT // 16, 64, measured["many"])
            batched(cluster.namesrv, COUNT, measured["batches"])
    labels = {
        "bare": "64 at a time, bare connection",
        "async": "64 at a time, AsyncProducer",
        "latency": "64 at a time, fault strategy latency",
        "adaptive": "64 at a time, fault strategy adaptive",
        "together": "256 at a time, AsyncProducer.send_all",
        "oneway": "one-way, one after the other",
        "blocking": "one blocking thread",
        "two": "2 blocking threads",
        "threads": "8 blocking threads",
        "many": "64 blocking threads",
        "batches": "one blocking thread, batches of 32",
    }
    figures = []
    for name, label in labels.items():
        figures.append(
            Figure(label, measured[name].rate, "messages/s", measured[name].rate / measured["bare"].rate, "bare")
        )
        figures.append(Figure(f"{label}: CPU of the client", measured[name].cpu_micros, "µs a message"))
    figures.append(Figure("one blocking thread: a call, p50", measured["blocking"].p50_micros, "µs"))
    return figures


if __name__ == "__main__":
    print(table(run()))
