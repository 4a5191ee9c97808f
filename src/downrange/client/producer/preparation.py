"""From a user's message to the request it goes out in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import time_ns
from typing import Final

from downrange.client.config import ProducerConfig
from downrange.client.namespace import wrap
from downrange.client.producer.forwarding import ForwardedMessage, make_forwarded, make_forwarded_batch
from downrange.client.producer.outgoing import (
    InvalidBatch,
    Outgoing,
    OutgoingRules,
    check_topic,
    make_batch,
    make_outgoing,
)
from downrange.client.producer.request_reply import ReplyMessage, as_reply
from downrange.client.unique_id import UniqueIds
from downrange.clock import Clock, SystemClock
from downrange.model.message import Message

_REMEMBERED: Final = 10_000  # topics


class Preparation:
    """Checks the messages of one producer, gives them their ids, and makes requests of them. Any thread may call."""

    def __init__(self, config: ProducerConfig, clock: Clock) -> None:
        self._namespace = config.namespace
        self._now = clock.now
        self.nanoseconds: Callable[[], int] = time_ns
        """The time since 1970."""
        if not isinstance(clock, SystemClock):
            self.nanoseconds = lambda: clock.now() * 1_000_000
        self.ids = UniqueIds(clock)
        self.rules = OutgoingRules.of(config)
        self._wire_topics: dict[str, str] = {}
        self.known_wire_topic = self._wire_topics.get
        """`wire_topic` of a topic that was asked for before, else None."""

    def ready(self, message: Message) -> Outgoing:
        """The message as it goes out; raises MessageError."""
        topic = self._wire_topics.get(message.topic) or self.wire_topic(message.topic)
        if isinstance(message, ForwardedMessage):
            return make_forwarded(message, topic, self.rules)
        now = self._now()
        ready = make_outgoing(message, topic, self.ids.stem(now), self.ids.next_number(), now, self.rules)
        return as_reply(ready, message) if isinstance(message, ReplyMessage) else ready

    def ready_batch(self, members: tuple[Message, ...]) -> Sequence[Outgoing]:
        """Messages as the requests they go out in; raises MessageError."""
        if not members:
            raise InvalidBatch("a batch without messages")
        if isinstance(members[0], ForwardedMessage):
            return make_forwarded_batch(members, self.wire_topic(members[0].topic), self.rules)
        now = self._now()
        topic, ids = members[0].topic, self.ids
        return make_batch(members, topic, self.wire_topic(topic), ids.stem(now), ids.next_number, now, self.rules)

    def wire_topic(self, topic: str) -> str:
        """The checked name with its namespace. Remembered: the check costs as much as encoding a small message."""
        known = self._wire_topics.get(topic)
        if known is None:
            check_topic(topic)
            known = wrap(self._namespace, topic)
            check_topic(known)
            if len(self._wire_topics) >= _REMEMBERED:
                self._wire_topics.clear()
            self._wire_topics[topic] = known
        return known
