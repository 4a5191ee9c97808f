"""The place of one message: visible in its topic, or hidden in a waiting room of its broker."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from downrange.client.admin.delayed import DelayedAdmin, due_time
from downrange.client.admin.transactions import TransactionAdmin
from downrange.client.admin.verdicts import Hidden, NotVisible
from downrange.client.brokers import Broker
from downrange.client.errors import MessageNotFound, NoRoute
from downrange.client.per_server import PerServer
from downrange.client.session import Session
from downrange.model import properties as names
from downrange.model.errors import MessageError
from downrange.model.message import MessageQueue, StoredMessage
from downrange.model.message_id import parse_offset_message_id
from downrange.model.properties import find_property
from downrange.model.text import Text
from downrange.model.topics import DLQ_PREFIX, HALF_TOPIC, RETRY_PREFIX, SCHEDULE_TOPIC, TIMER_TOPIC

if TYPE_CHECKING:
    from downrange.client.admin.messages import MessageAdmin

WAITING_ROOMS: Final = (SCHEDULE_TOPIC, TIMER_TOPIC, HALF_TOPIC)
Found = tuple[Broker, StoredMessage]


@dataclass(frozen=True, slots=True)
class Located:
    """A message, its broker and queue, why it is hidden if it is, and how to find its copies in other topics."""

    message: StoredMessage
    broker: Broker
    queue: MessageQueue
    hidden: NotVisible | None
    copies: Callable[[str], Awaitable[PerServer[Broker, tuple[StoredMessage, ...]]]]


class Locator:
    """Finds messages by unique id or offset id, also those that no consumer can see yet."""

    def __init__(self, session: Session, messages: MessageAdmin) -> None:
        self._session = session
        self._messages = messages

    async def locate(self, message_id: str, topic: str | None) -> Located:
        """The place of a message; raises MessageNotFound. A retry or a dead letter leads to the original."""
        found = await self._visible(topic, message_id) if topic is not None else None
        found = found or await self._by_offset_id(message_id) or await self._waiting(topic, message_id)
        if found is None:
            where = Text("a place that it names; for a unique id name its topic")
            if topic is not None:
                where = Text("the topic {topic}", topic=topic)
            raise MessageNotFound(Text("no message {message_id} in {where}", message_id=message_id, where=where))
        broker, message = found
        real = real_topic(message)
        if real == message.topic:
            return self._located(broker, message)
        original = await self._visible(real, message.message_id)
        if original is not None:
            return self._located(*original)
        if message.topic not in WAITING_ROOMS:
            raise MessageNotFound(
                Text(
                    "{message_id} is a copy in {topic}; its original in {real} has expired",
                    message_id=message_id,
                    topic=message.topic,
                    real=real,
                )
            )
        return self._located(broker, message, await self._hidden(broker, message))

    def _located(self, broker: Broker, message: StoredMessage, hidden: NotVisible | None = None) -> Located:
        queue_id = find_property(message.properties_text, names.REAL_QID) or "" if hidden is not None else ""
        queue = MessageQueue(
            real_topic(message), broker.name, int(queue_id) if queue_id.isdecimal() else message.queue_id
        )
        copies = partial(self._messages.all_by_unique_key, unique_key=message.message_id)
        return Located(message, broker, queue, hidden, copies)

    async def _visible(self, topic: str, message_id: str) -> Found | None:
        """The oldest message of a topic with this unique id."""
        try:
            found = await self._messages.all_by_unique_key(topic, message_id)
        except NoRoute:
            return None
        same = [(broker, one) for broker, messages in found.done.items() for one in messages]
        if not same:
            found.raise_if_none()
        return min(same, key=lambda one: one[1].store_timestamp, default=None)

    async def _by_offset_id(self, message_id: str) -> Found | None:
        """The message at the place that an id names, if one of the brokers stored it: unique ids look alike."""
        try:
            host = str(parse_offset_message_id(message_id).store_host)
        except MessageError:
            return None
        for broker in await self._session.brokers():
            if broker.address == host:
                try:
                    return broker, await self._messages.by_offset_id(message_id)
                except MessageNotFound:
                    return None
        return None

    async def _waiting(self, topic: str | None, message_id: str) -> Found | None:
        for room in WAITING_ROOMS:
            found = await self._visible(room, message_id)
            if found is not None and topic in (None, real_topic(found[1])):
                return found
        return None

    async def _hidden(self, broker: Broker, message: StoredMessage) -> NotVisible:
        if message.topic != HALF_TOPIC:
            delays = await DelayedAdmin(self._session).delays_of(broker)
            return NotVisible(Hidden.DELAYED, due_time(message.properties_text, message.store_timestamp, delays))
        for one in (await TransactionAdmin(self._session).open_on(broker)).messages:
            if one.message.message_id == message.message_id:
                return NotVisible(Hidden.HALF, checks=one.checks)
        return NotVisible(Hidden.ROLLED_BACK)


def real_topic(message: StoredMessage) -> str:
    """The topic that a producer sent a message to, whatever topic this copy lies in."""
    topic = message.topic
    if topic in WAITING_ROOMS:
        topic = find_property(message.properties_text, names.REAL_TOPIC) or topic
    if topic.startswith((RETRY_PREFIX, DLQ_PREFIX)):
        topic = find_property(message.properties_text, names.RETRY_TOPIC) or topic
    return topic
