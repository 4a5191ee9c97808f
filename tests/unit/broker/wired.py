"""The parts of a broker wired together on a small store and a clock that stands still, without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from downrange.broker.bloom_filter import BloomFilter
from downrange.broker.clients import Consumers, Producers
from downrange.broker.config import BrokerConfig
from downrange.broker.filter_data import ConsumerFilters
from downrange.broker.admission import FlowControl
from downrange.broker.groups import CommittedOffsets, Groups
from downrange.broker.handlers.clients import ClientHandlers
from downrange.broker.handlers.offsets import OffsetHandlers
from downrange.broker.handlers.send_back import SendBackHandlers
from downrange.broker.held_pulls import HeldPulls
from downrange.broker.json_file import JsonFile
from downrange.broker.live_config import LiveConfig
from downrange.broker.message_writer import MessageWriter
from downrange.broker.queue_locks import QueueLocks
from downrange.broker.routes import handler_of
from downrange.broker.services.delay import DelayService
from downrange.broker.services.flushing import Flusher
from downrange.broker.statistics import Statistics
from downrange.broker.topics import Topics
from downrange.clock import ManualClock
from downrange.model.message_id import pack_host
from downrange.protocol.command import Command
from downrange.store.message_store import MessageStore
from downrange.transport.connection import Connection
from downrange.transport.errors import TransportClosed
from downrange.transport.serving import LaterReply, error_reply
from tests.unit.store.small_store import NOW, small_config

BROKER = BrokerConfig(broker_name="broker-a", broker_ip1="10.0.0.1", listen_port=40911)


class FakeConnection(Connection):
    """An end without a socket: keeps what it was told."""

    def __init__(self, peer: str = "10.0.0.9:50000") -> None:
        super().__init__()
        host, _, port = peer.rpartition(":")
        self.peer = peer
        self.peer_host = pack_host(host, int(port))
        self.told: list[Command] = []
        self.is_up = True

    @property
    def is_open(self) -> bool:
        return self.is_up

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
        self.consumers, self.producers, self.locks = Consumers(), Producers(), QueueLocks()
        self.filters = ConsumerFilters(JsonFile(root / "consumerFilter.json"), BloomFilter.sized_for(32, 20), clock)
        self.statistics = Statistics(clock.now())
        self.held = HeldPulls()
        self.flusher = Flusher(store, self.config, clock)
        self.writer = MessageWriter(store, self.held, self.flusher, self.statistics, clock)
        self.flow = FlowControl(self.config, store)
        self.clients = ClientHandlers(
            self.config,
            self.topics,
            self.groups,
            self.consumers,
            self.producers,
            self.filters,
            self.locks,
            self.flow,
            clock,
        )
        self._handle = handler_of(
            self.clients.routes,
            OffsetHandlers(store, self.offsets).routes,
            SendBackHandlers(self.config, self.topics, self.groups, store, self.writer).routes,
        )

    def delay_service(self) -> DelayService:
        return DelayService(self.store, self.writer, JsonFile(self.root / "delayOffset.json"), self.config, self.clock)

    def ask(self, command: Command, connection: Connection | None = None) -> Command:
        try:
            reply: Command | LaterReply | None = self._handle(command, connection or FakeConnection())
        except Exception as error:
            reply = error_reply(command, error)
        assert isinstance(reply, Command)
        return reply

    def close(self) -> None:
        self.flusher.close()
        self.store.close()


def wire(root: Path, *, broker: BrokerConfig = BROKER, clock: ManualClock | None = None, **store: Any) -> WiredBroker:
    """A broker under `root`; keyword arguments as for a small store."""
    clock = clock or ManualClock(NOW)
    options: dict[str, Any] = {"disk_use": lambda path: 0.1, "clock": clock}
    for name in ("files", "memory_bytes"):
        if name in store:
            options[name] = store.pop(name)
    store.setdefault("mapped_file_size_commit_log", 64 * 1024)
    return WiredBroker(
        root / "config", MessageStore.open(small_config(root / "store", **store), **options), clock, broker
    )
