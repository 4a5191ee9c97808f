"""Open transactions: half messages whose producer has not said yet whether to commit or to roll back.

A half message waits in RMQ_SYS_TRANS_HALF_TOPIC. Its end is an op message in RMQ_SYS_TRANS_OP_HALF_TOPIC that names its
queue offset. Brokers put a half message back at the end of its queue for every check, under its unique id. Brokers of
4.x may not let the op topic be read: then a message that was rolled back since the last check cannot be told from an
open one, and `OpenTransactions.is_certain` is False.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from downrange.client.admin.queue_reading import committed_at, reach, read_between
from downrange.client.brokers import Broker
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.errors import NoRoute
from downrange.client.per_server import PerServer, ask_each
from downrange.client.session import Session
from downrange.model import properties as names
from downrange.model.message import MessageQueue
from downrange.model.properties import find_property
from downrange.model.topics import HALF_TOPIC, OP_HALF_TOPIC, TRANSACTION_GROUP
from downrange.model.transaction_ops import ended_offsets
from downrange.protocol.errors import BrokerError, TopicNotExist

MAX_LOOKED_AT = 100_000
"""Half messages of a broker that are looked at: the newest."""


@dataclass(frozen=True, slots=True)
class HalfMessage:
    """One half message: the topic it is for, its producer group, and how often the broker has asked about it."""

    message: ReceivedMessage
    topic: str
    producer_group: str
    checks: int

    @property
    def since(self) -> int:
        """When the producer made it: the store time is that of the last check."""
        return self.message.born_timestamp


@dataclass(frozen=True, slots=True)
class OpenTransactions:
    """The half messages that wait on one broker, oldest first, one for each unique id."""

    messages: tuple[HalfMessage, ...]
    is_certain: bool


def still_open(half: Iterable[ReceivedMessage], ended: frozenset[int]) -> tuple[HalfMessage, ...]:
    """The half messages that did not end: of several with one id the last one counts, which replaced the others.

    `ended` has queue offsets: of the message itself, or of the place it was sent to before it was put back.
    """
    found: dict[str, HalfMessage] = {}
    for message in half:
        found.pop(message.message_id, None)
        sent_to = find_property(message.properties_text, names.TRAN_PREPARED_QUEUE_OFFSET) or ""
        places = {message.queue_offset, int(sent_to)} if sent_to.isdecimal() else {message.queue_offset}
        if places.isdisjoint(ended):
            found[message.message_id] = _half_message(message)
    return tuple(sorted(found.values(), key=lambda one: one.since))


def _half_message(message: ReceivedMessage) -> HalfMessage:
    def text(name: str) -> str:
        return find_property(message.properties_text, name) or ""

    checks = text(names.TRANSACTION_CHECK_TIMES)
    return HalfMessage(message, text(names.REAL_TOPIC), text(names.PGROUP), int(checks) if checks.isdecimal() else 0)


class TransactionAdmin:
    """Looks at transactions."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def open(
        self, topic: str | None = None, *, cluster: str | None = None
    ) -> PerServer[Broker, OpenTransactions]:
        """The half messages that wait on every master, for one topic or for all."""

        async def ask(broker: Broker) -> OpenTransactions:
            found = await self.open_on(broker)
            wanted = (one for one in found.messages if topic in (None, one.topic))
            return OpenTransactions(tuple(wanted), found.is_certain)

        return await ask_each(await self._session.masters(cluster), ask)

    async def open_on(self, broker: Broker) -> OpenTransactions:
        half: list[ReceivedMessage] = []
        offsets = await reach(self._session, broker, HALF_TOPIC)
        ended: frozenset[int] | None = frozenset()
        for queue, known in sorted(offsets.items()):
            done = await committed_at(self._session, broker, TRANSACTION_GROUP, queue) or 0
            begin = max(known.min_offset, done, known.max_offset - MAX_LOOKED_AT)
            if begin < known.max_offset:
                between = read_between(self._session, broker, queue, begin, known.max_offset)
                half += [message async for message in between]
                ended = await self._ended(broker, queue.queue_id)
        if ended is None:
            return OpenTransactions(still_open(await self._not_committed(half), frozenset()), is_certain=False)
        return OpenTransactions(still_open(half, ended), is_certain=True)

    async def _ended(self, broker: Broker, queue_id: int) -> frozenset[int] | None:
        """The half messages that ended since the broker last settled; None where ops cannot be read."""
        queue = MessageQueue(OP_HALF_TOPIC, broker.name, queue_id)
        begin = await committed_at(self._session, broker, TRANSACTION_GROUP, queue) or 0
        try:
            known = (await reach(self._session, broker, OP_HALF_TOPIC)).get(queue)
            if known is None:
                return None
            ops = read_between(self._session, broker, queue, max(begin, known.min_offset), known.max_offset)
            return frozenset([offset async for op in ops for offset in ended_offsets(op.tags, op.body)])
        except TopicNotExist:
            return None

    async def _not_committed(self, half: list[ReceivedMessage]) -> list[ReceivedMessage]:
        """The half messages that are not in their real topic: a committed one is there, under its unique id."""
        from downrange.client.admin.messages import MessageAdmin  # which needs this module for the fate of messages

        messages = MessageAdmin(self._session)
        waiting = []
        for message in half:
            topic = find_property(message.properties_text, names.REAL_TOPIC) or ""
            try:
                found = await messages.all_by_unique_key(topic, message.message_id)
            except (NoRoute, BrokerError):
                found = PerServer()
            if not any(found.done.values()):
                waiting.append(message)
        return waiting
