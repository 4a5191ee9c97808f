"""The parts of a broker wired together on a small store and a clock that stands still, without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import msgspec

from downrange.broker.admission import Admission, FlowControl
from downrange.broker.bloom_filter import BloomFilter
from downrange.broker.clients import Consumers, Producers
from downrange.broker.config import BrokerConfig
from downrange.broker.filter_data import ConsumerFilters
from downrange.broker.filtering import MessageFilter
from downrange.broker.groups import CommittedOffsets, Groups
from downrange.broker.handlers.clients import ClientHandlers
from downrange.broker.handlers.offsets import OffsetHandlers
from downrange.broker.handlers.recall import RecallReader
from downrange.broker.handlers.send_back import SendBackReader
from downrange.broker.handlers.send_reader import SendReader
from downrange.broker.handlers.sends import Sends
from downrange.broker.handlers.transactions import TransactionHandlers
from downrange.broker.handlers.usual_sends import usual_sends
from downrange.broker.json_file import JsonFile
from downrange.broker.live_config import LiveConfig
from downrange.broker.message_writer import MessageWriter
from downrange.broker.pull_checks import PullChecks
from downrange.broker.pulls import Pulls
from downrange.broker.queue_locks import QueueLocks
from downrange.broker.request_path import RequestPath
from downrange.broker.routes import Commands
from downrange.broker.services.delay import DelayService
from downrange.broker.services.flushing import Flusher
from downrange.broker.services.timer import TimerService
from downrange.broker.statistics import Statistics
from downrange.broker.tables import Tables
from downrange.broker.timed import Timing
from downrange.broker.timer_metrics import TimerMetrics
from downrange.broker.topics import Topics
from downrange.broker.transactions.half_messages import HalfMessages
from downrange.broker.waiting_pulls import WaitingPull, WaitingPulls
from downrange.clock import ManualClock
from downrange.model.message import TopicQueue
from downrange.model.message_id import pack_host
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Buffer, Command
from downrange.protocol.framing import FrameDecoder, encode
from downrange.store.message_store import MessageStore
from downrange.transport.connection import Connection
from downrange.transport.errors import TransportClosed
from tests.unit.broker.fake_transport import FakeTransport
from tests.unit.store.small_store import NOW, small_config

BROKER = BrokerConfig(broker_name="broker-a", broker_ip1="10.0.0.1", listen_port=40911)


class FakeConnection(Connection):
    """An end without a socket: keeps what it was told."""

    def __init__(self, peer: str = "10.0.0.9:50000") -> None:
        self.is_up = True
        super().__init__()
        self.transport = FakeTransport()
        self.connection_made(self.transport)  # type: ignore[arg-type]
        host, _, port = peer.rpartition(":")
        self.peer = peer
        self.peer_host = pack_host(host, int(port))
        self.told: list[Command] = []

    @property
    def is_open(self) -> bool:
        return self.is_up

    def replies(self) -> list[Command]:
        """The replies that were written since the last time."""
        return FrameDecoder().feed(self.transport.taken())

    def oneway(self, command: Command) -> None:
        if not self.is_up:
            raise TransportClosed(f"connection to {self.peer} is closed")
        self.told.append(command)


class WatchedFile(JsonFile):
    """Tells when a save in a worker thread is over."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.over = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def prepare_save(self, body: msgspec.Struct) -> Callable[[], None]:
        write = super().prepare_save(body)

        def write_and_tell() -> None:
            try:
                write()
            finally:
                self._loop.call_soon_threadsafe(self.over.set)

        return write_and_tell


class WiredBroker:
    """Everything consumers talk to. `ask` answers as a connection would."""

    def __init__(self, root: Path, store: MessageStore, clock: ManualClock, broker: BrokerConfig) -> None:
        self.root = root
        self.store = store
        self.clock = clock
        self.config = LiveConfig(broker, store.config)
        self.topics = Topics(JsonFile(root / "topics.json"), broker, clock)
        self.groups = Groups(JsonFile(root / "subscriptionGroup.json"), clock)
        self.offsets = CommittedOffsets(JsonFile(root / "consumerOffset.json"))
        self.consumers, self.producers = Consumers(), Producers()
        self.locks = QueueLocks(JsonFile(root / "queueLocks.json"), clock.now())
        self.filters = ConsumerFilters(JsonFile(root / "consumerFilter.json"), BloomFilter.sized_for(32, 20), clock)
        self.statistics = Statistics(clock.now())
        self.waiting = WaitingPulls()
        self.flusher = Flusher(store, self.config, clock)
        self.writer = MessageWriter(store, self.waiting, self.flusher, self.statistics, clock)
        self.flow = FlowControl(self.config, store)
        self.flow.last_tick = self.flow.calm_until = inf  # nothing ticks here: however slow the machine, it is not busy
        self.half_messages = HalfMessages(
            store, self.writer, self.offsets, pack_host(broker.broker_ip1, broker.listen_port)
        )
        tables = Tables(self.topics, self.groups, self.offsets, self.consumers, self.producers, self.filters)
        self.clients = ClientHandlers(self.config, tables, self.locks, clock)
        self.timing = Timing(self.config, self.topics)
        self.reader = SendReader(self.config, self.topics, self.groups, self.writer, self.timing)
        self.reader.on_half = self.half_messages.stored
        transactions = TransactionHandlers(self.config, self.half_messages, self.writer, self.flusher, self.timing)
        self.sends = Sends(
            self.writer,
            self.reader,
            usual_sends(self.topics, store.queues, self.reader.cluster_property.encode(), self.reader.store_host),
            {
                int(RequestCode.CONSUMER_SEND_MSG_BACK): SendBackReader(
                    self.config, self.topics, self.groups, store, self.writer
                ).read,
                int(RequestCode.END_TRANSACTION): transactions.read_end,
                int(RequestCode.RECALL_MESSAGE): RecallReader(self.config, self.topics, self.writer, self.timing).read,
            },
        )
        checks = PullChecks(self.config, self.topics, self.groups, self.consumers, self.filters)
        self.pulls = Pulls(self.config, checks, self.offsets, store, self.waiting, self.writer)
        routes = [transactions.routes, self.clients.routes, OffsetHandlers(store, self.offsets).routes]
        self.commands = Commands(routes, self.statistics)
        self.path = RequestPath(Admission(self.flow), self.commands, self.sends, self.pulls)

    def timer_service(self) -> TimerService:
        metrics = TimerMetrics(JsonFile(self.root / "timermetrics"), self.clock)
        return TimerService(self.store, self.writer, metrics, self.config, self.clock)

    def delay_service(self) -> DelayService:
        return DelayService(self.store, self.writer, JsonFile(self.root / "delayOffset.json"), self.clock)

    def ask(self, command: Command, connection: FakeConnection | None = None) -> Command:
        """The reply, which must come at once."""
        reply = self.handle(command, connection)
        assert reply is not None
        return reply

    def handle(self, command: Command, connection: FakeConnection | None = None) -> Command | None:
        """The reply; None when there is none, or none yet."""
        connection = connection or FakeConnection()
        (frame,) = FrameDecoder().frames(encode(command))
        self.path.serve([frame], [connection])
        replies = connection.replies()
        assert len(replies) <= 1
        return replies[0] if replies else None

    def keep_waiting(self, seconds: float) -> None:
        """All requests that come now have waited so long."""
        self.flow.last_tick = asyncio.get_running_loop().time() - seconds
        self.flow.worked_at_tick = -seconds
        self.flow._set_patience()

    def wait_for(
        self, queue: TopicQueue, offset: int, wanted: MessageFilter, connection: Connection
    ) -> asyncio.Future[None]:
        """Done when a pull that waits for this offset of a queue is woken."""
        woken = asyncio.get_running_loop().create_future()

        def read() -> list[Buffer]:
            woken.set_result(None)
            return []

        self.waiting.add(WaitingPull(queue, offset, wanted, connection, read), 60)
        return woken

    def close(self) -> None:
        self.flusher.close()
        self.store.close()


def wire(root: Path, *, broker: BrokerConfig = BROKER, clock: ManualClock | None = None, **store: Any) -> WiredBroker:
    """A broker under `root`; keyword arguments as for a small store."""
    clock = clock or ManualClock(NOW)
    options: dict[str, Any] = {"disk_use": lambda path: 0.1, "clock": clock}
    if "files" in store:
        options["files"] = store.pop("files")
    store.setdefault("mapped_file_size_commit_log", 64 * 1024)
    return WiredBroker(
        root / "config", MessageStore.open(small_config(root / "store", **store), **options), clock, broker
    )
