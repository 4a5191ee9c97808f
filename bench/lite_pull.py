"""Messages per second of a lite pull consumer that drains a backlog, against the bare decode of the same pulls.

The backlog is that of bench/consumer.py. `MESSAGES` sets its size.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.consumer import MESSAGES, ROUNDS, TOPIC, fill, one_pull
from bench.report import Figure, best_rate, table
from downrange import AsyncLitePullConsumer, ConsumeFromWhere, LitePullConfig, LitePullConsumer
from downrange.client.consumer.messages import read_pulled
from downrange.model.message import MessageQueue
from downrange.transport.loop import run as run_loop
from tests.support.standalone_process import standalone_process

_groups = itertools.count()


def config(batch: int) -> LitePullConfig:
    return LitePullConfig(pull_batch_size=batch, consume_from_where=ConsumeFromWhere.FIRST_OFFSET)


def polled(namesrv: str, batch: int) -> None:
    async def drain() -> None:
        async with AsyncLitePullConsumer(f"bench-{next(_groups)}", namesrv, config(batch)) as consumer:
            await consumer.subscribe(TOPIC)
            count = 0
            while count < MESSAGES:
                count += len(await consumer.poll())

    run_loop(drain())


def looped(namesrv: str) -> None:
    async def drain() -> None:
        async with AsyncLitePullConsumer(f"bench-{next(_groups)}", namesrv, config(32)) as consumer:
            await consumer.subscribe(TOPIC)
            count = 0
            async for _ in consumer:
                count += 1
                if count == MESSAGES:
                    break

    run_loop(drain())


def blocking(namesrv: str) -> None:
    with LitePullConsumer(f"bench-{next(_groups)}", namesrv, config(32)) as consumer:
        consumer.subscribe(TOPIC)
        for _ in itertools.islice(consumer, MESSAGES):
            pass


def run() -> list[Figure]:
    kinds: dict[str, Callable[[str], None]] = {
        "poll, 32 at a time": lambda namesrv: polled(namesrv, 32),
        "poll, 10 at a time": lambda namesrv: polled(namesrv, 10),
        "async for": looped,
        "blocking for": blocking,
    }
    seconds = dict.fromkeys(kinds, float("inf"))
    cpu = dict.fromkeys(kinds, float("inf"))
    with (
        tempfile.TemporaryDirectory() as directory,
        standalone_process(
            Path(directory), {"defaultTopicQueueNums": 8, "waitTimeMillsInSendQueue": 10_000}, log_level="ERROR"
        ) as cluster,
    ):
        run_loop(fill(cluster.namesrv))
        pulled = run_loop(one_pull(cluster.broker))
        for _ in range(ROUNDS):
            for kind, drain in kinds.items():
                start, own = time.perf_counter(), time.process_time()
                drain(cluster.namesrv)
                seconds[kind] = min(seconds[kind], time.perf_counter() - start)
                cpu[kind] = min(cpu[kind], time.process_time() - own)
    queue = MessageQueue(TOPIC, "broker-a", 0)
    decoded = best_rate(lambda: sum(len(read_pulled(pulled, queue, min_offset=0, max_offset=0)) for _ in range(2000)))
    figures = [Figure("bare decode of pulls", decoded, "messages/s", 1.0, "bare decode")]
    for kind in kinds:
        rate = MESSAGES / seconds[kind]
        figures.append(Figure(f"drained, {kind}", rate, "messages/s", rate / decoded, "bare decode"))
        figures.append(Figure(f"drained, {kind}: CPU of the consumer", cpu[kind] / MESSAGES * 1e6, "µs a message"))
    return figures


if __name__ == "__main__":
    print(table(run()))
