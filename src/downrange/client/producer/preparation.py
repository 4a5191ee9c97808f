"""From a user's message to the request it goes out in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from downrange.client.config import ProducerConfig
from downrange.client.namespace import wrap
from downrange.client.producer.messages import Outgoing, batches, check_batch, check_topic, outgoing, outgoing_rules
from downrange.client.producer.request_reply import ReplyMessage, as_reply
from downrange.client.producer.unique_id import UniqueIds
from downrange.clock import Clock
from downrange.compiled import steps
from downrange.model.message import Message
from downrange.model.topics import RETRY_PREFIX

_REMEMBERED: Final = 10_000  # topics


class Preparation:
    """Checks messages of one producer, gives them their ids, and makes them ready to go out. Any thread may call."""

    def __init__(self, config: ProducerConfig, clock: Clock) -> None:
        self._config = config
        self._now = clock.now
        self.ids = UniqueIds(clock)
        self.rules = outgoing_rules(config)
        self._wire_topics: dict[str, str] = {}

    def ready(self, message: Message) -> Outgoing:
        """The message as it goes out; raises MessageError."""
        topic = self._wire_topics.get(message.topic) or self.wire_topic(message.topic)
        ids = self.ids
        now = self._now()
        if steps is not None:
            ready = steps.make_outgoing(message, topic, ids.stem(now), ids.number(), now, self.rules)
            if ready is not None:
                return ready
        ready = outgoing(message, ids.next(), self._config, topic, now)
        return as_reply(ready, message) if isinstance(message, ReplyMessage) else ready

    def ready_batch(self, members: tuple[Message, ...]) -> Sequence[Outgoing]:
        """Messages as the requests they go out in; raises MessageError."""
        ids = self.ids
        now = self._now()
        if steps is not None and members:
            topic = members[0].topic
            known = self._wire_topics.get(topic)
            if known is not None and not topic.startswith(RETRY_PREFIX):
                ready = steps.make_batch(members, topic, known, ids.stem(now), ids.number, now, self.rules)
                if ready is not None:
                    return (ready,)
        return list(batches(members, ids.next, self._config, self.wire_topic(check_batch(members)), now))

    def known_wire_topic(self, topic: str) -> str | None:
        """The same if it was asked for before."""
        return self._wire_topics.get(topic)

    def wire_topic(self, topic: str) -> str:
        """The checked name with its namespace. Remembered: the check costs as much as encoding a small message."""
        known = self._wire_topics.get(topic)
        if known is None:
            check_topic(topic)
            known = wrap(self._config.namespace, topic)
            check_topic(known)
            if len(self._wire_topics) >= _REMEMBERED:
                self._wire_topics.clear()
            self._wire_topics[topic] = known
        return known
