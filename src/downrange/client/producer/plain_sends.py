"""The first attempt of nearly every send, in one go: any queue will do, and the broker is connected."""

from __future__ import annotations

from time import monotonic, time_ns
from typing import Final

from downrange.client.config import ProducerConfig
from downrange.client.producer.exchange import Exchange
from downrange.client.producer.fault import QueueChooser
from downrange.client.producer.fault.chooser import INDEX_MASK
from downrange.client.producer.first_attempt import FirstAttempt
from downrange.client.producer.messages import SEND
from downrange.client.producer.preparation import Preparation
from downrange.client.producer.publish_info import PublishInfo
from downrange.client.producer.publish_routes import PublishRoutes
from downrange.client.producer.retry import SendKind
from downrange.client.producer.stored_reply import take_stored
from downrange.client.session import Session
from downrange.compiled import steps
from downrange.model.message import Message, MessageQueue
from downrange.protocol.bodies.send_template import LONGEST_FRAME
from downrange.transport.errors import TransportClosed
from downrange.transport.outstanding import Waiter

_KINDS: Final = (FirstAttempt, SendKind.SYNC)
_REMEMBERED: Final = 10_000  # topics

_Place = tuple[MessageQueue, str | None, tuple[bytes, ...]]
_Way = tuple[str, PublishInfo, tuple[_Place, ...]]
"""The topic on the wire, what is known of it, and for each queue its broker's address and what frames are made of."""


class PlainSends:
    """Asks brokers to store messages, for one producer on its loop's thread.

    Only with the compiled module, with the machine's clock, and with a fault strategy that learns nothing.
    Holds always: `ask` does what `Delivery.first` and `Exchange.ask_now` do with what `Preparation.ready` makes, or
    nothing at all.
    """

    __slots__ = (
        "_connection",
        "_exchange",
        "_ids",
        "_indexes",
        "_preparation",
        "_routes",
        "_rules",
        "_seconds",
        "_seen",
        "_ways",
    )

    def __init__(
        self,
        session: Session,
        config: ProducerConfig,
        preparation: Preparation,
        chooser: QueueChooser,
        routes: PublishRoutes,
        exchange: Exchange,
    ) -> None:
        self._seconds = float(config.send_timeout_seconds)
        self._preparation = preparation
        self._ids = preparation.ids
        self._rules = preparation.rules
        self._seen = session.route_seen
        self._connection = session.connection_known
        self._indexes = chooser.indexes()
        self._routes = routes
        self._exchange = exchange
        self._ways: dict[str, _Way] = {}

    def ask(self, message: Message, timeout: float | None, waiter: Waiter) -> FirstAttempt | None:
        """The attempt that was begun; `waiter` gets the reply. None: nothing was done, it takes a closer look."""
        way = self._ways.get(message.topic) or self._way(message.topic)
        seconds = self._seconds if timeout is None else float(timeout)
        if way is None or seconds <= 0:
            return None
        topic, info, places = way
        seen = self._seen(topic)
        index = self._indexes.get(topic)
        if index is None or seen is None or seen[1] is not info.route:
            del self._ways[message.topic]
            return None
        index = (index + 1) & INDEX_MASK
        place = places[index % len(places)]
        connection = self._connection(place[1])  # type: ignore[arg-type]  # None is no key
        opaque = None if connection is None else connection.opaque_if_room()
        if connection is None or opaque is None:
            return None
        ids = self._ids
        made = steps.make_send(
            message,
            topic,
            ids.month,
            ids.number,
            time_ns(),
            self._rules,
            _KINDS,
            info,
            place,
            monotonic(),
            seconds,
            opaque,
            LONGEST_FRAME,
        )
        if made is None:
            return None
        first, frame, expected = made
        try:
            connection.ask_encoded(opaque, frame, waiter, SEND, seconds, expected)
        except TransportClosed:
            return None
        if connection.express is None:
            connection.express = take_stored
        self._indexes[topic] = index
        return first

    def _way(self, topic: str) -> _Way | None:
        on_wire = self._preparation.known_wire_topic(topic)
        info = None if on_wire is None else self._routes.known(on_wire)
        if on_wire is None or info is None:
            return None
        pieces = {name: self._exchange.template(on_wire, name, SEND).pieces for name in info.brokers}
        places = tuple(
            (queue, info.addresses.get(queue.broker_name), pieces[queue.broker_name]) for queue in info.queues
        )
        if len(self._ways) >= _REMEMBERED:
            self._ways.clear()
        way = self._ways[topic] = on_wire, info, places
        return way
