"""A broker that takes and delivers timer messages on a clock of its own, without sockets, and can die at any step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from downrange.broker.config import BrokerConfig
from downrange.broker.json_file import JsonFile
from downrange.broker.live_config import LiveConfig
from downrange.broker.message_writer import MessageWriter
from downrange.broker.services.flushing import Flusher
from downrange.broker.services.timer import TimerService
from downrange.broker.statistics import Statistics
from downrange.broker.timed import Timing
from downrange.broker.timer_metrics import TimerMetrics
from downrange.broker.topics import Topics
from downrange.broker.waiting_pulls import WaitingPulls
from downrange.clock import ManualClock
from downrange.model import properties as names
from downrange.model.message import StoredMessage
from downrange.store.files import OS_FILES, Files
from downrange.store.message_store import MessageStore
from downrange.store.new_message import PutMessageStatus
from downrange.store.timer.timer_index import TimerIndex
from tests.unit.store.small_store import kill, new_message, open_store, read_all

SLOTS = 4096
NOW = 1_700_000_000_000
TOPIC = "orders"


class Killed(BaseException):
    """The process dies here."""


@dataclass
class Steps:
    """Counts the steps of a run; dies at one of them."""

    die_at: int = -1
    taken: int = 0
    names: list[str] = field(default_factory=list)

    def step(self, name: str) -> None:
        self.names.append(name)
        self.taken += 1
        if self.taken - 1 == self.die_at:
            raise Killed(name)

    def around(self, owner: Any, name: str) -> None:
        """Take a step before and after each call of this method."""
        call: Callable[..., Any] = getattr(owner, name)

        def counted(*args: Any, **options: Any) -> Any:
            self.step(f"before {name}")
            result = call(*args, **options)
            self.step(f"after {name}")
            return result

        setattr(owner, name, counted)


class TimedBroker:
    """One run of a broker on a directory."""

    def __init__(
        self, root: Path, clock: ManualClock, steps: Steps | None = None, files: Files = OS_FILES, **store: Any
    ) -> None:
        options: dict[str, Any] = {"mapped_file_size_commit_log": 1 << 20, "mapped_file_size_timer_log": 1024}
        self.clock = clock
        self.store: MessageStore = open_store(root, clock=clock, files=files, **(options | store))
        self.config = LiveConfig(BrokerConfig(broker_name="a", broker_ip1="127.0.0.1"), self.store.config)
        topics = Topics(JsonFile(root.with_name(f"{root.name}-topics.json")), self.config.broker, clock)
        flusher = Flusher(self.store, self.config, clock)
        statistics = Statistics(clock.now())
        self.writer = MessageWriter(self.store, WaitingPulls(), flusher, statistics, clock)
        index = TimerIndex(self.store.config, files, SLOTS)
        metrics = TimerMetrics(JsonFile(root / "config" / "timermetrics"), clock)
        self.service = TimerService(self.store, self.writer, metrics, self.config, clock, index)
        self.timing = Timing(self.config, topics, self.service.count_at)
        if steps is not None:
            steps.around(self.store, "append")
            steps.around(index, "put_each")
            steps.around(index.log, "append")
            steps.around(index.wheel, "put")
            steps.around(index.log, "sync")
            steps.around(index.wheel, "sync")
            steps.around(index, "flush")

    def send(self, body: bytes, due: int, **properties: str) -> None:
        """Store a timer message that is due at a time."""
        texts = {names.UNIQ_KEY: body.decode(), names.TIMER_DELIVER_MS: str(due), **properties}
        message = new_message(body, TOPIC, properties=texts, born_timestamp=self.clock.now())
        self.timing.set_aside(message, texts, self.clock.now())
        result = self.writer.append_one(message)
        assert result.status is PutMessageStatus.PUT_OK, result

    def delete(self, body: bytes, due: int) -> None:
        """Delete a message that was sent with this time, as a recall does."""
        out_time = (due - 1) // self.config.store.timer_precision * self.config.store.timer_precision
        self.send(b"0", out_time + 1, TIMER_DEL_UNIQKEY=f"{TOPIC}+{body.decode()}", UNIQ_KEY=body.decode())

    def work(self) -> None:
        """Do all there is to do now."""
        for _ in range(10_000):
            if self.service.turn() > 0:
                return
        raise AssertionError("there is no end of it")

    def save(self) -> None:
        """Save the progress, as the broker does every second."""
        self.store.flush_commit_log()
        write = self.service.prepare_save()
        if write is not None:
            write()

    def delivered(self) -> list[StoredMessage]:
        return read_all(self.store, TOPIC)

    def kill(self) -> None:
        kill(self.store)

    def close(self) -> None:
        self.service.close()
        self.store.close()


def check_times(messages: list[StoredMessage], due: dict[bytes, int], precision: int = 1000) -> None:
    """None was delivered before its time."""
    for message in messages:
        stored, wanted = message.store_timestamp, due[message.body]
        assert stored >= wanted, (message.body, stored - wanted)
        assert message.properties[names.TIMER_OUT_MS] == str((wanted - 1) // precision * precision)
