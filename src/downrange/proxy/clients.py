"""The connected gRPC clients: their settings, their telemetry streams, and what they are registered for."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from downrange.model.errors import MQError
from downrange.model.subscription import SQL92, TAG, Subscription, subscribe
from downrange.protocol.bodies.groups import ConsumerData, ConsumeType
from downrange.proxy.backend import Backend
from downrange.proxy.http2.stream import Stream
from downrange.proxy.wire.enums import ClientType, FilterType
from downrange.proxy.wire.messages import FilterExpression, Settings, TelemetryCommand

log = logging.getLogger(__name__)

EXPIRES_SECONDS: Final = 120.0
MOST_CLIENTS: Final = 100_000


@dataclass(eq=False, slots=True)
class Client:
    """A client with its settings, known while it has a stream and for two minutes after its last sign of life."""

    client_id: str
    settings: Settings
    heard: float
    streams: list[Stream] = field(default_factory=list)
    topics: set[str] = field(default_factory=set)
    """Topics it is registered for as a producer."""
    group: str = ""
    """The group it is registered for as a consumer."""

    @property
    def kind(self) -> int:
        return self.settings.client_type

    def tell(self, command: TelemetryCommand) -> bool:
        """Send a command over a telemetry stream; False when there is none."""
        for stream in reversed(self.streams):
            if not stream.is_closed:
                stream.send_message(command.SerializeToString())
                return True
        return False


class Clients:
    """Client id -> client. Brokers are told which topics and groups have clients here."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._loop = asyncio.get_running_loop()
        self._clients: dict[str, Client] = {}
        self._producers: Counter[str] = Counter()
        self._consumers: Counter[str] = Counter()
        self._nonces = count(1)
        self._waiting: dict[str, asyncio.Future[TelemetryCommand]] = {}

    def __repr__(self) -> str:
        return f"<Clients {len(self._clients)} topics={len(self._producers)} groups={len(self._consumers)}>"

    def __iter__(self) -> Iterator[Client]:
        return iter(self._clients.values())

    def __len__(self) -> int:
        return len(self._clients)

    def get(self, client_id: str) -> Client | None:
        return self._clients.get(client_id)

    def heard(self, client_id: str) -> Client | None:
        """The client, if it is known; it has just shown that it lives."""
        client = self._clients.get(client_id)
        if client is not None:
            client.heard = self._loop.time()
        return client

    async def put(self, client_id: str, settings: Settings) -> Client:
        """Remember the settings of a client, and register it."""
        client = self._clients.get(client_id)
        if client is None:
            client = self._clients[client_id] = Client(client_id, settings, self._loop.time())
        client.settings = settings
        client.heard = self._loop.time()
        if settings.WhichOneof("kind") == "publishing":
            for topic in {resource.name for resource in settings.publishing.topics}:
                await self.register_producer(client, topic)
        else:
            await self.register_consumer(client)
        return client

    async def register_producer(self, client: Client, topic: str) -> None:
        if topic not in client.topics:
            client.topics.add(topic)
            self._producers[topic] += 1
            if self._producers[topic] == 1:
                await self._backend.add_producer(topic)

    async def register_consumer(self, client: Client) -> None:
        group = client.settings.subscription.group.name
        if client.group != group:
            await self._leave_group(client)
            client.group = group
            self._consumers[group] += 1
        await self._backend.add_consumer(consumer_data(client.settings))

    async def remove(self, client: Client) -> None:
        """Forget a client."""
        if self._clients.get(client.client_id) is client:
            del self._clients[client.client_id]
        for topic in list(client.topics):
            client.topics.discard(topic)
            self._producers[topic] -= 1
            if not self._producers[topic]:
                del self._producers[topic]
                await self._quietly(self._backend.remove_producer(topic))
        await self._leave_group(client)

    async def _leave_group(self, client: Client) -> None:
        group, client.group = client.group, ""
        if group:
            self._consumers[group] -= 1
            if not self._consumers[group]:
                del self._consumers[group]
                await self._quietly(self._backend.remove_consumer(group))

    async def _quietly(self, work: object) -> None:
        try:
            await work  # type: ignore[misc]
        except MQError as error:
            log.info("brokers not told reason=%s", error)

    def silent(self) -> list[Client]:
        """Clients that fell silent and have no stream."""
        now = self._loop.time()
        return [
            client for client in self._clients.values() if not client.streams and now - client.heard > EXPIRES_SECONDS
        ]

    def producers_of(self, topic: str) -> list[Client]:
        """Producers of a topic that can be asked, in random order."""
        found = [client for client in self._clients.values() if topic in client.topics and client.streams]
        random.shuffle(found)
        return found

    def consumers_of(self, group: str) -> Iterator[Client]:
        return (client for client in self._clients.values() if client.group == group)

    # --- commands that clients answer ---------------------------------------------------------------------------

    async def ask(self, client: Client, command: TelemetryCommand, seconds: float) -> TelemetryCommand | None:
        """The answer of a client to a command with a nonce; None when it has no stream. Raises TimeoutError."""
        nonce = str(next(self._nonces))
        kind = command.WhichOneof("kind")
        if kind == "verify_message_command":
            command.verify_message_command.nonce = nonce
        else:
            command.print_thread_stack_trace_command.nonce = nonce
        future: asyncio.Future[TelemetryCommand] = self._loop.create_future()
        self._waiting[nonce] = future
        try:
            if not client.tell(command):
                return None
            async with asyncio.timeout(seconds):
                return await future
        finally:
            del self._waiting[nonce]

    def answered(self, nonce: str, command: TelemetryCommand) -> None:
        """Take the answer to a command; an unknown nonce means nothing."""
        future = self._waiting.get(nonce)
        if future is not None and not future.done():
            future.set_result(command)


def consumer_data(settings: Settings) -> ConsumerData:
    """A consumer as brokers know consumers."""
    ours = settings.subscription
    is_simple = settings.client_type == ClientType.SIMPLE_CONSUMER
    return ConsumerData(
        group_name=ours.group.name,
        consume_type=ConsumeType.ACTIVELY if is_simple else ConsumeType.PASSIVELY,
        subscription_data_set=tuple(
            sorted(
                (subscription_of(entry.topic.name, entry.expression) for entry in ours.subscriptions),
                key=lambda one: one.topic,
            )
        ),
    )


def subscription_of(topic: str, expression: FilterExpression) -> Subscription:
    kind = SQL92 if expression.type == FilterType.SQL else TAG
    return subscribe(topic, expression.expression or None, kind)
