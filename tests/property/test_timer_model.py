"""Whatever is sent, recalled and restarted in whatever order: timer messages come as a heap of due times says."""

from __future__ import annotations

import asyncio
import heapq
import shutil
import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from downrange.clock import ManualClock
from downrange.store.files import OsFiles
from tests.support.timed_broker import NOW, TimedBroker
from tests.unit.store.small_store import pull_the_plug

WINDOW = 12


class NoSync(OsFiles):
    """Files that are not synced: nothing here takes pages away."""

    def sync(self, descriptor: int) -> None: ...

    def sync_directory(self, path: Path) -> None: ...


class TimerMachine(RuleBasedStateMachine):
    """A broker with timer messages, beside a heap of the messages that it has."""

    @initialize(precision=st.sampled_from([100, 1000]))
    def begin(self, precision: int) -> None:
        self.runner = asyncio.Runner()
        self.directory = Path(tempfile.mkdtemp(prefix="timer-model-"))
        self.clock = ManualClock(NOW + 137)
        self.precision = precision
        self.heap: list[tuple[int, int, bytes]] = []
        self.due: dict[bytes, int] = {}
        self.deleted: set[bytes] = set()
        self.maybe: set[bytes] = set()
        self.arrived: list[bytes] = []
        self.number = 0
        self.broker = self.open()

    def open(self) -> TimedBroker:
        options = {"timer_precision_ms": self.precision, "timer_roll_window_slot": WINDOW}

        async def made() -> TimedBroker:  # parts of it want an event loop, which nothing here uses
            return TimedBroker(self.directory / "store", self.clock, None, NoSync(), **options)

        return self.runner.run(made())

    def out_time(self, due: int) -> int:
        return (due - 1) // self.precision * self.precision

    @rule(ticks=st.one_of(st.floats(0.1, 11), st.floats(11, 60)))
    def send(self, ticks: float) -> None:
        self.number += 1
        body = b"m%d" % self.number
        due = self.clock.now() + max(1, int(ticks * self.precision))
        self.broker.send(body, due)
        self.due[body] = due
        heapq.heappush(self.heap, (self.out_time(due), self.number, body))

    @precondition(lambda self: self.heap)
    @rule(data=st.data())
    def recall(self, data: st.DataObject) -> None:
        body = data.draw(st.sampled_from(sorted(body for _, _, body in self.heap)))
        if self.out_time(self.due[body]) + 1 > self.clock.now():
            self.broker.delete(body, self.due[body])
            self.deleted.add(body)

    @rule(ticks=st.floats(0.1, 30))
    def go_on(self, ticks: float) -> None:
        """Let the time go by, a tick at a time, as it does while a broker runs."""
        end = self.clock.now() + int(ticks * self.precision)
        while self.clock.now() < end:
            self.clock.set(min(end, self.clock.now() + self.precision))
            self.broker.work()
        self.compare()

    @rule()
    def save(self) -> None:
        self.broker.save()

    @rule(way=st.sampled_from(["stop", "kill", "plug"]), ticks=st.one_of(st.just(0.0), st.floats(0, 40)))
    def restart(self, way: str, ticks: float) -> None:
        match way:
            case "stop":
                self.broker.close()
            case "kill":
                self.broker.kill()
            case _:
                pull_the_plug(self.broker.store)
        self.clock.set(self.clock.now() + int(ticks * self.precision))
        self.broker = self.open()
        if ticks:
            # A message and its deletion that were both rolled, and late, may miss each other, as in RocketMQ.
            self.maybe |= {body for body in self.deleted if self.due[body] - NOW > WINDOW * self.precision}
        for _ in range(3):  # what was to be rolled meanwhile comes a tick late
            self.broker.work()
            self.clock.set(self.clock.now() + self.precision)
        self.broker.work()
        self.compare()

    def compare(self) -> None:
        """What is due according to the heap has come, tick by tick; nothing else has, and nothing twice."""
        floor = self.clock.now() // self.precision * self.precision
        wanted: list[bytes] = []
        while self.heap and self.heap[0][0] < floor:
            body = heapq.heappop(self.heap)[2]
            wanted.append(body)
        messages = self.broker.delivered()
        new = [message.body for message in messages[len(self.arrived) :]]
        self.arrived += new
        expected = Counter(body for body in wanted if body not in self.deleted)
        unsure = {body for body in wanted if body in self.maybe}
        assert Counter(body for body in new if body not in unsure) == expected
        assert max(Counter(self.arrived).values(), default=1) == 1
        for message in messages[-len(new) :] if new else []:
            assert message.store_timestamp >= self.due[message.body]
        waiting = {body for _, _, body in self.heap}
        assert not waiting & set(self.arrived)

    def teardown(self) -> None:
        if hasattr(self, "broker"):
            self.go_on(80.0)
            assert not self.heap
            assert self.broker.service.index.check() == []
            self.broker.close()
            self.runner.close()
            shutil.rmtree(self.directory)


TestTimerMachine = TimerMachine.TestCase
TestTimerMachine.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
