"""A broker without sockets that is asked over one connection, by the bytes that come and go."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from downrange.protocol.bodies.send_replies import SendReplies
from downrange.protocol.framing import Frame
from downrange.store.new_messages import NewMessages
from downrange.transport.connection import Connection
from downrange.transport.limits import Limits
from downrange.transport.serving import Endpoint
from tests.unit.broker.fake_transport import FakeTransport
from tests.unit.broker.wired import BROKER, WiredBroker, wire


class NoUsualSends:
    """Leaves all sends to the reader in Python."""

    def read(
        self,
        frames: list[Frame],
        origins: list[Connection],
        at: int,
        stop: int,
        replies: SendReplies,
        messages: NewMessages,
        fits: int,
        batch_fits: int,
    ) -> int:
        return at


class ServedBroker:
    """Everything that a producer or a consumer may ask, with three topics of four queues each."""

    def __init__(
        self,
        root: Path,
        *,
        transport: FakeTransport | None = None,
        limits: Limits | None = None,
        accelerated: bool = True,
        **options: Any,
    ) -> None:
        broker = replace(BROKER, **options.pop("broker", {}))
        self.broker: WiredBroker = wire(root, broker=broker, **options)
        for topic in ("TopicA", "TopicB", "%RETRY%group"):
            self.broker.topics.ensure(topic, 4)
        self.sends, self.pulls = self.broker.sends, self.broker.pulls
        if not accelerated:
            self.sends._usual = NoUsualSends()  # type: ignore[assignment]
        self.endpoint = Endpoint(self.broker.path.serve, limits=limits)
        self.usage = self.endpoint.usage
        self.transport = transport or FakeTransport()
        self.connection = self.connect(self.transport)

    def connect(self, transport: FakeTransport) -> Connection:
        connection = Connection(self.endpoint)
        connection.connection_made(transport)  # type: ignore[arg-type]
        return connection

    def feed(self, *frames: bytes) -> bytes:
        """What is answered at once to frames that come in one chunk."""
        self.connection.data_received(b"".join(frames))
        return self.transport.taken()
