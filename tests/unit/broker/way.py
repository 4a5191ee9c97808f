"""The two ways of a request: by the handlers alone, or with a short cut before them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from downrange.broker.handlers.plain_sends import PlainSends
from downrange.broker.handlers.send import SendHandlers
from downrange.broker.routes import Express, RouteTable, express_of, handler_of, serve_of
from downrange.protocol.framing import Frame
from downrange.transport.connection import Connection
from downrange.transport.serving import Endpoint
from downrange.transport.limits import Limits
from tests.unit.broker.fake_transport import FakeTransport
from tests.unit.broker.wired import BROKER, WiredBroker, wire


class Way:
    """A broker that is asked over one connection. Counts the requests that went by the short cut a test is about."""

    connection: Connection

    def __init__(self, root: Path, **options: Any) -> None:
        broker = replace(BROKER, **options.pop("broker", {}))
        self.broker: WiredBroker = wire(root, broker=broker, **options)
        self.taken = 0
        parts = self.broker
        for topic in ("TopicA", "TopicB", "%RETRY%group"):
            parts.topics.ensure(topic, 4)
        parts.flow.last_tick = float("inf")  # however slow the machine, it is not busy
        self.sends = SendHandlers(parts.config, parts.topics, parts.groups, parts.writer, parts.flow)
        self.plain = PlainSends(parts.config, parts.topics, parts.writer, parts.flow)
        self.transport = FakeTransport()

    def connect(self, *tables: RouteTable, lanes: tuple[Express, ...], limits: Limits | None = None) -> None:
        """The handlers of `tables` answer, and `lanes` before them, if any; the last of those is counted."""
        express = express_of(*lanes[:-1], self._counted(lanes[-1])) if lanes else None
        handler = handler_of(*tables, statistics=self.broker.statistics)
        endpoint = Endpoint(serve_of(express, handler), limits=limits)
        self.usage = endpoint.usage
        self.connection = Connection(endpoint)
        self.connection.connection_made(self.transport)  # type: ignore[arg-type]

    def _counted(self, lane: Express) -> Express:
        def take(frames: list[Frame], at: int, connection: Connection) -> int:
            end = lane(frames, at, connection)
            self.taken += end - at
            return end

        return take

    def feed(self, *frames: bytes) -> bytes:
        """What is answered at once."""
        self.connection.data_received(b"".join(frames))
        return self.transport.taken()
