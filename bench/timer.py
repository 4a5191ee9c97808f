"""Timer messages: how late they come, and what very many that wait cost.

    python -m bench timer
    python -m bench.timer [--pending N]

Two parts. Over the wire: the Python client sends messages with times of their own, and a push consumer says how late
each came; lateness is counted from the time that the sender asked for, so half a tick of it is the precision (1 s). In
one process, without sockets: many messages are put into the timer topic, due hours ahead, and taken in by the timer
service; then as many as are due in one tick are delivered.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import tempfile
import time
from pathlib import Path
from typing import Final

from bench.big_store import private_bytes
from bench.report import QUICK, Figure, table
from bench.served import served
from downrange.broker.config import BrokerConfig
from downrange.broker.json_file import JsonFile
from downrange.broker.live_config import LiveConfig
from downrange.broker.message_writer import MessageWriter
from downrange.broker.services.flushing import Flusher
from downrange.broker.services.timer import TimerService
from downrange.broker.statistics import Statistics
from downrange.broker.timer_metrics import TimerMetrics
from downrange.broker.waiting_pulls import WaitingPulls
from downrange.client.consumer.config import ConsumerConfig
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.consumer.push import AsyncPushConsumer
from downrange.client.producer.producer import AsyncProducer
from downrange.clock import ManualClock
from downrange.load import Histogram
from downrange.model.message import Message
from downrange.model.message_id import pack_host
from downrange.model.topics import TIMER_TOPIC
from downrange.protocol.bodies.groups import ConsumeFromWhere
from downrange.store.config import StoreConfig
from downrange.store.message_store import MessageStore
from downrange.store.new_message import NewMessage
from downrange.store.new_messages import NewMessages
from downrange.transport.loop import run as run_loop

RATE: Final = 500
STEADY_SECONDS: Final = 2 if QUICK else 10
BURST: Final = 1_000 if QUICK else 20_000
PENDING: Final = 20_000 if QUICK else 1_000_000
DUE: Final = 2_000 if QUICK else 300_000
"""Messages of one tick."""
NOW: Final = 1_700_000_000_000
HOST: Final = pack_host("10.0.0.1", 10911)
_BATCH: Final = 200
_BODY: Final = b"x" * 128


class Arrivals:
    """Messages as they come, until as many as were sent have come."""

    def __init__(self, expected: int) -> None:
        self._left = expected
        self.done = asyncio.Event()
        self.lateness = Histogram()
        self.early = 0

    async def add(self, message: ReceivedMessage) -> None:
        late = time.time() * 1000 - int(message.properties["TIMER_DELIVER_MS"])
        self.early += late < 0
        self.lateness.record(max(0, int(late * 1e6)))
        self._left -= 1
        if self._left == 0:
            self.done.set()


async def deliver(namesrv: str, topic: str, count: int, rate: float | None) -> tuple[Arrivals, float]:
    """Send `count` messages, at a rate with times of their own, or at once for one time; and seconds of sending."""
    arrivals = Arrivals(count)
    config = ConsumerConfig(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
    chance = random.Random(7)
    async with AsyncProducer("bench", namesrv) as producer:
        await producer.send(Message(topic, b"makes the topic"))
        consumer = AsyncPushConsumer(f"bench-{topic}", namesrv, config, on_message=arrivals.add)
        await consumer.subscribe(topic, "timed")
        async with consumer:
            started, now = time.monotonic(), int(time.time() * 1000)
            at_once = now + 10_000

            async def send(first: int, step: int) -> None:
                for number in range(first, count, step):
                    due = at_once
                    if rate is not None:
                        await asyncio.sleep(started + number / rate - time.monotonic())
                        due = int(time.time() * 1000) + chance.randint(1000, 4000)
                    await producer.send(Message(topic, _BODY, tags="timed", deliver_at=due))

            await asyncio.gather(*(send(first, 64) for first in range(64)))
            seconds = time.monotonic() - started
            async with asyncio.timeout(90):
                await arrivals.done.wait()
            return arrivals, seconds


class Waiting:
    """A timer service on a store of its own, without sockets, on a clock that stands still."""

    def __init__(self, root: Path) -> None:
        self.clock = ManualClock(NOW)
        config = StoreConfig(store_path_root_dir=root)
        self.store = MessageStore.open(config, clock=self.clock, disk_use=lambda _: 0.1)
        live = LiveConfig(BrokerConfig(broker_name="bench", broker_ip1="10.0.0.1"), config)
        flusher = Flusher(self.store, live, self.clock)
        self.writer = MessageWriter(self.store, WaitingPulls(), flusher, Statistics(NOW), self.clock)
        self._metrics = TimerMetrics(JsonFile(root / "timermetrics"), self.clock)
        self._live = live
        self.service = TimerService(self.store, self.writer, self._metrics, live, self.clock)

    def fill(self, count: int, *, due: int | None = None) -> float:
        """Put messages into the timer topic; the seconds that the service needs to take them in."""
        chance = random.Random(count)
        seconds = 0.0
        for first in range(0, count, _BATCH):
            batch = NewMessages()
            for number in range(first, min(count, first + _BATCH)):
                out = due or NOW + chance.randrange(600, 86_400) * 1000
                text = f"UNIQ_KEY\x017F0000010000{number:020X}\x02TAGS\x01T\x02TIMER_DELIVER_MS\x01{out + 500}\x02"
                text += f"TIMER_OUT_MS\x01{out}\x02REAL_TOPIC\x01bench\x02REAL_QID\x010"
                self.store.add(batch, (NewMessage(TIMER_TOPIC, 0, _BODY, text.encode(), NOW, HOST, HOST),))
            self.store.append(batch)
            begun = time.perf_counter()
            while self.service.turn() == 0:
                pass
            seconds += time.perf_counter() - begun
            if first % (_BATCH * 5000) == 0:
                self.store.flush_commit_log()  # as the broker does: dirty pages must not pile up
        return seconds

    def deliver(self) -> tuple[float, float]:
        """Deliver what is due; the seconds in all, and of the longest turn, for which senders wait."""
        begun = last = time.perf_counter()
        longest = 0.0
        while self.service.turn() == 0:
            longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
        return time.perf_counter() - begun, longest

    def save(self) -> float:
        self.store.flush_commit_log()
        write = self.service.prepare_save()
        begun = time.perf_counter()
        if write is not None:
            write()
        return time.perf_counter() - begun

    def reopen(self) -> float:
        """Seconds to open the index again, as after kill -9."""
        begun = time.perf_counter()
        TimerService(self.store, self.writer, self._metrics, self._live, self.clock)
        return time.perf_counter() - begun


async def wait_many(pending: int, due: int) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="bench-timer-") as directory:
        waiting = Waiting(Path(directory))
        waiting.fill(_BATCH)
        gc.collect()
        before = private_bytes()
        taken_in = waiting.fill(pending)
        gc.collect()
        grown = private_bytes() - before
        saved = waiting.save()
        waiting.fill(due, due=NOW + 5000)
        waiting.clock.set(NOW + 6000)
        seconds, longest = waiting.deliver()
        assert waiting.store.max_offset_of("bench", 0) == due
        opened = waiting.reopen()
        figures = [
            Figure("taken in from the timer topic", pending / taken_in, "messages/s"),
            Figure(f"delivered, {due:,} of one tick", due / seconds, "messages/s"),
            Figure(f"delivered, {due:,} of one tick: longest turn", longest * 1000, "ms"),
            Figure(f"private memory that {pending:,} waiting messages take", grown / 1e6, "MB"),
            Figure("saving the progress with them", saved * 1000, "ms"),
            Figure("opening the index with them after kill -9", opened * 1000, "ms"),
        ]
        waiting.store.close()
    return figures


def run(pending: int = PENDING) -> list[Figure]:
    with served() as running:
        steady, _ = run_loop(deliver(running.namesrv, "steady", RATE * STEADY_SECONDS, RATE))
        burst, seconds = run_loop(deliver(running.namesrv, "burst", BURST, None))
    late = [
        Figure(f"late at {RATE} messages/s, {name}", steady.lateness.percentile(percent) / 1e6, "ms")
        for name, percent in (("p50", 50), ("p99", 99), ("max", 100))
    ]
    return [
        *late,
        Figure("delivered too early", steady.early + burst.early, "messages"),
        Figure(f"{BURST:,} for one time: sent", BURST / seconds, "messages/s"),
        Figure(f"{BURST:,} for one time: late, p99", burst.lateness.percentile(99) / 1e6, "ms"),
        *asyncio.run(wait_many(pending, DUE)),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--pending", type=int, default=PENDING, help="messages that wait")
    print(table(run(parser.parse_args().pending)))
