"""The administrative side of a broker on a real store, asked over connections that are joined in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from downrange.broker.admission import FlowControl
from downrange.broker.bloom_filter import BloomFilter
from downrange.broker.clients import Client, Consumers, Producers
from downrange.broker.config import BrokerConfig
from downrange.broker.filter_data import ConsumerFilters
from downrange.broker.groups import CommittedOffsets, Groups
from downrange.broker.handlers.config import ConfigHandlers
from downrange.broker.handlers.consumers import ConsumerHandlers
from downrange.broker.handlers.groups import GroupHandlers
from downrange.broker.handlers.progress import ProgressHandlers
from downrange.broker.handlers.query import QueryHandlers
from downrange.broker.handlers.statistics import ServiceFigures, StatisticsHandlers
from downrange.broker.handlers.topics import TopicHandlers
from downrange.broker.json_file import JsonFile
from downrange.broker.live_config import LiveConfig
from downrange.broker.routes import Commands
from downrange.broker.statistics import Statistics
from downrange.broker.tables import Tables
from downrange.broker.topics import Topics
from downrange.clock import ManualClock
from downrange.model.message_id import pack_host
from downrange.model.subscription import Subscription, subscribe
from downrange.model.topics import TopicConfig
from downrange.protocol.bodies.offsets import DelayOffsets
from downrange.protocol.codes import LanguageCode
from downrange.protocol.command import Body, Command, request
from downrange.protocol.framing import FrameDecoder
from downrange.store.config import StoreConfig
from downrange.store.message_store import MessageStore
from downrange.store.new_message import AppendResult, NewMessage, PutMessageStatus
from downrange.store.retention import Retention
from downrange.transport.connection import Connection
from downrange.transport.serving import CommandHandler, Endpoint, refuse, serve_commands
from tests.support.golden import scenarios
from tests.support.stores import append

NOW = 1_700_000_000_000
HOST = pack_host("127.0.0.1", 10911)


class LinkedTransport(asyncio.Transport):
    """Hands what is written to the other end in the loop's next turn."""

    def __init__(self, peer_address: tuple[str, int]) -> None:
        super().__init__()
        self._peer_address = peer_address
        self._closing = False
        self.other: Connection | None = None
        self.own: Connection | None = None

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._peer_address if name == "peername" else default

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        assert self.other is not None
        if not self._closing:
            asyncio.get_running_loop().call_soon(self.other.data_received, bytes(data))

    def is_closing(self) -> bool:
        return self._closing

    def abort(self) -> None:
        if not self._closing:
            self._closing = True
            assert self.own is not None
            assert self.other is not None
            loop = asyncio.get_running_loop()
            loop.call_soon(self.own.connection_lost, None)
            other = self.other._transport
            assert other is not None
            other.abort()

    def get_write_buffer_size(self) -> int:
        return 0


def linked(near: CommandHandler, far: CommandHandler, far_address: tuple[str, int]) -> tuple[Connection, Connection]:
    """Both ends of one connection; the near end sees the far one at `far_address`."""
    ends = Connection(Endpoint(serve_commands(near))), Connection(Endpoint(serve_commands(far)))
    transports = LinkedTransport(far_address), LinkedTransport(("127.0.0.1", 10911))
    for own, other, transport in zip(ends, reversed(ends), transports, strict=True):
        transport.own, transport.other = own, other
        own.connection_made(transport)
    return ends


class FixedDelay:
    """Delivery of delayed messages that stands still."""

    def __init__(self) -> None:
        self.levels = {1: (2, 3)}

    def progress(self) -> Mapping[int, tuple[int, int]]:
        return self.levels

    def table(self) -> DelayOffsets:
        return DelayOffsets(offset_table={level: offset for level, (offset, _) in self.levels.items()})


class AdminBroker:
    """All handlers for operators with their parts, and an operator's connection to them."""

    def __init__(self, root: Path, *, broker: Mapping[str, Any] | None = None, **store_changes: Any) -> None:
        self.clock = ManualClock(NOW)
        sizes: dict[str, Any] = {
            "store_path_root_dir": root,
            "mapped_file_size_commit_log": 1 << 20,
            "mapped_file_size_consume_queue": 1000,
            "max_hash_slot_num": 100,
            "max_index_num": 200,
        }
        store_config = StoreConfig(**(sizes | store_changes))
        identity: dict[str, Any] = {"broker_name": "broker-a", "broker_ip1": "127.0.0.1"}
        self.config = LiveConfig(BrokerConfig(**(identity | dict(broker or {}))), store_config)
        self.store = MessageStore.open(store_config, clock=self.clock, disk_use=lambda path: 0.1)
        directory = root / "config"
        self.topics = Topics(JsonFile(directory / "topics.json"), self.config.broker, self.clock)
        self.groups = Groups(JsonFile(directory / "subscriptionGroup.json"), self.clock)
        self.offsets = CommittedOffsets(JsonFile(directory / "consumerOffset.json"))
        self.consumers, self.producers = Consumers(), Producers()
        self.statistics = Statistics(self.clock.now())
        self.retention = Retention(self.store, hour_of=lambda now: 12)
        self.delay = FixedDelay()
        self.registrations = 0
        self.settings_path = directory / "broker.properties"
        filters = ConsumerFilters(
            JsonFile(directory / "consumerFilter.json"), BloomFilter.sized_for(32, 20), self.clock
        )
        tables = Tables(self.topics, self.groups, self.offsets, self.consumers, self.producers, filters)
        routes = [
            TopicHandlers(self.config, tables, self.store, self.retention, self.statistics, self.register).routes,
            GroupHandlers(self.config, tables, self.statistics).routes,
            QueryHandlers(self.store, self.consumers).routes,
            ProgressHandlers(self.config, tables, self.store, self.statistics, self.clock).routes,
            StatisticsHandlers(
                self.config,
                self.store,
                self.statistics,
                ServiceFigures(self.delay, FlowControl(self.config, self.store)),
                self.clock,
            ).routes,
            ConsumerHandlers(self.config, tables, self.store).routes,
            ConfigHandlers(self.config, self.store, self.topics, self.settings_path, self.clock).routes,
        ]
        handler = Commands(routes, self.statistics).answer
        _, self.operator = linked(handler, refuse, ("10.0.0.7", 40000))

    async def register(self) -> None:
        self.registrations += 1

    async def ask(
        self,
        code: int,
        header: msgspec.Struct | None = None,
        *,
        ext_fields: Mapping[str, str] | None = None,
        body: Body = b"",
        language: int = LanguageCode.JAVA,
    ) -> Command:
        """What the broker answers, whatever its code."""
        command = request(code, header, ext_fields=ext_fields, body=body)
        return await self.operator.request(msgspec.structs.replace(command, language=language), 5)

    async def refused(self, code: int, header: msgspec.Struct | None = None, **more: Any) -> tuple[int, str]:
        """Code and remark of a refusal; a success fails the test."""
        reply = await self.ask(code, header, **more)
        assert reply.code != 0, f"request {code} was not refused"
        assert not reply.body
        return reply.code, reply.remark or ""

    def topic(self, name: str = "TopicA", queues: int = 2, **changes: Any) -> TopicConfig:
        return self.topics.put(TopicConfig(name, queues, queues, **changes))

    def put(self, topic: str = "TopicA", queue_id: int = 0, body: bytes = b"hello", **properties: str) -> AppendResult:
        """Store one message; the next one is stored a second later."""
        text = "\x02".join(f"{name}\x01{value}" for name, value in properties.items())
        message = NewMessage(topic, queue_id, body, text.encode(), born_timestamp=NOW, born_host=HOST, store_host=HOST)
        result = append(self.store, message)
        assert result.status is PutMessageStatus.PUT_OK, result
        self.clock.tick(1)
        return result

    def consumer(
        self,
        group: str = "groupA",
        client_id: str = "10.0.0.9@1",
        *,
        topics: Mapping[str, str] | None = None,
        handler: CommandHandler = refuse,
        version: int = 409,
        port: int = 52000,
    ) -> Connection:
        """A consumer that is online; what the broker asks it goes to `handler`. Returns the consumer's end."""
        broker_end, consumer_end = linked(refuse, handler, ("10.0.0.9", port))
        subscriptions: list[Subscription] = [
            subscribe(topic, expression, version=NOW) for topic, expression in (topics or {"TopicA": "*"}).items()
        ]
        self.consumers.heartbeat(
            group,
            Client(broker_end, client_id, LanguageCode.JAVA, version, NOW),
            consume_type="CONSUME_PASSIVELY",
            message_model="CLUSTERING",
            consume_from_where="CONSUME_FROM_FIRST_OFFSET",
            subscriptions=subscriptions,
        )
        return consumer_end


def golden_reply(scenario: str, code: int, is_wanted: Callable[[Command], bool] = lambda reply: True) -> Command:
    """The first captured answer to a request of this code that is `is_wanted`."""
    asked = set()
    for row in scenarios()[scenario]:
        if not row.is_response:
            if row.code == code:
                asked.add((row.connection, row.sender, row.opaque))
        elif (row.connection, row.receiver, row.opaque) in asked:
            (command,) = FrameDecoder().feed(row.frame)
            if is_wanted(command):
                return command
    raise AssertionError(f"no such answer to {code} in {scenario}")
