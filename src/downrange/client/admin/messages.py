"""Single messages: find them, send one, hand one to a consumer, follow one."""

from __future__ import annotations

import random

from msgspec import structs

from downrange.client.admin.fate import FateFinder, MessageFate
from downrange.client.admin.located import Locator
from downrange.client.admin.namesrv import NamesrvAdmin
from downrange.client.admin.queue_reading import pull_from
from downrange.client.admin.search import END_OF_TIME, Budget, SearchCursor, SearchPage, Wanted, search
from downrange.client.admin.timeline import Event, GroupCopies, timeline
from downrange.client.admin.topics import TopicAdmin
from downrange.client.brokers import Broker, reader_of, sorted_brokers
from downrange.client.compression import plain_body
from downrange.client.errors import MessageNotFound, NoRoute
from downrange.client.per_server import PerServer, ask_each
from downrange.client.producer.send_result import STATUS_OF_CODE, SendResult
from downrange.client.session import Session
from downrange.client.trace_reader import MessageTrace, trace_of
from downrange.client.unique_id import UniqueIds
from downrange.model.errors import MessageError, MQError
from downrange.model.message import Message, MessageQueue, StoredMessage
from downrange.model.message_id import parse_offset_message_id
from downrange.model.properties import KEYS, RESERVED, TAGS, UNIQ_KEY, WAIT, encode_properties
from downrange.model.record import decode_record, decode_records
from downrange.model.text import Text, joined, said_by
from downrange.model.topics import (
    AUTO_CREATE_TOPIC,
    CHECK_MAX_TIME_TOPIC,
    SEND_FORBIDDEN_TOPICS,
    TRACE_TOPIC,
    Perm,
    check_topic_name,
    dlq_topic,
    retry_topic,
)
from downrange.protocol.bodies.body import decode_body
from downrange.protocol.bodies.consumers import ConsumeMessageDirectlyRequest, ConsumeMessageDirectlyResult
from downrange.protocol.bodies.query import QueryMessageRequest, ViewMessageRequest
from downrange.protocol.bodies.routes import TopicRouteData
from downrange.protocol.bodies.send import SendMessageRequest, SendMessageResponse
from downrange.protocol.bodies.transactions import ResumeCheckHalfMessageRequest
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import request
from downrange.protocol.errors import InternalError, QueryNotFound
from downrange.transport.errors import TransportError

MAX_FOUND = 64
PRODUCER_GROUP = "TOOLS_PRODUCER"
AUTO_CREATE_QUEUES = 4
"""Queues a client asks for when its message creates the topic."""


class MessageAdmin:
    """Actions on messages."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._ids = UniqueIds(session.clock)

    async def by_offset_id(self, message_id: str) -> StoredMessage:
        """The message at the place an offset id names; the id itself says which broker to ask."""
        place = parse_offset_message_id(message_id)
        command = request(RequestCode.VIEW_MESSAGE_BY_ID, ViewMessageRequest(place.physical_offset))
        try:
            reply = await self._session.invoke(str(place.store_host), command)
        except InternalError as error:
            raise MessageNotFound(
                Text(
                    "{store_host} has no message {message_id}: {remark}",
                    store_host=place.store_host,
                    message_id=message_id,
                    remark=error.remark,
                )
            ) from None
        return decode_record(reply.body_bytes)

    async def by_key(
        self, topic: str, key: str, *, max_messages: int = MAX_FOUND, begin: int = 0, end: int = END_OF_TIME
    ) -> PerServer[Broker, tuple[StoredMessage, ...]]:
        """Messages of a topic that carry `key`, stored between two times, both included; by broker."""
        # The index knows whole seconds, rounded down, so a message of the first second would be missed.
        asked_from = max(0, begin - 1000)
        header = QueryMessageRequest(
            topic=topic, key=key, max_num=max_messages, begin_timestamp=asked_from, end_timestamp=end
        )
        found = await self._query(header)
        # The index compares hashes only: other keys may share one.
        return PerServer(
            {
                broker: tuple(
                    message
                    for message in messages
                    if message.topic == topic and key in message.keys and begin <= message.store_timestamp <= end
                )
                for broker, messages in found.done.items()
            },
            found.failed,
        )

    async def all_by_unique_key(self, topic: str, unique_key: str) -> PerServer[Broker, tuple[StoredMessage, ...]]:
        """Messages a producer gave this id, more than one when a retry stored it twice; by broker."""
        header = QueryMessageRequest(
            topic=topic,
            key=unique_key,
            max_num=32,
            begin_timestamp=0,
            end_timestamp=END_OF_TIME,
            unique_key_query=True,
        )
        found = await self._query(header)
        return PerServer(
            {
                broker: tuple(message for message in messages if message.unique_key == unique_key)
                for broker, messages in found.done.items()
            },
            found.failed,
        )

    async def by_unique_key(self, topic: str, unique_key: str) -> StoredMessage:
        """The message a producer gave this id; the oldest when a retry stored it twice."""
        found = await self.all_by_unique_key(topic, unique_key)
        same = [one for messages in found.done.values() for one in messages]
        if same:
            return min(same, key=lambda message: message.store_timestamp)
        found.raise_if_none()
        missing = joined(
            "",
            [
                Text("; {broker} could not be asked: {error}", broker=broker, error=said_by(error))
                for broker, error in found.failed.items()
            ],
        )
        raise MessageNotFound(
            Text(
                "no message {unique_key} in the topic {topic}{missing}",
                unique_key=unique_key,
                topic=topic,
                missing=missing,
            )
        )

    async def view(self, message_id: str, topic: str | None = None) -> StoredMessage:
        """A message by its unique id or its offset id, which look alike: with a topic, the unique id is tried first."""
        if topic is not None:
            try:
                return await self.by_unique_key(topic, message_id)
            except MessageNotFound as error:
                try:
                    return await self.by_offset_id(message_id)
                except (MessageError, MessageNotFound, TransportError):
                    raise error from None
        try:
            return await self.by_offset_id(message_id)
        except (MessageError, MessageNotFound, TransportError) as error:
            if _is_unique_id(message_id):
                why = f"{message_id} is a unique id: only its topic's brokers know it, so name the topic (--topic)"
                raise MessageNotFound(why) from None
            raise MessageNotFound(
                Text("{error}; if this is a unique id, name its topic (--topic)", error=said_by(error))
            ) from None

    async def by_queue_offset(self, topic: str, broker_name: str, queue_id: int, offset: int) -> StoredMessage:
        """The message with number `offset` in one queue."""
        route = await self._session.look_up_route(topic)
        serving = [data for data in route.broker_datas if data.broker_name == broker_name]
        if not serving:
            raise NoRoute(
                topic,
                Text("the topic {topic} is not on the broker {broker_name}", topic=topic, broker_name=broker_name),
            )
        queue = MessageQueue(topic, broker_name, queue_id)
        for message in decode_records(
            (await pull_from(self._session, reader_of(serving[0]), queue, offset, 1)).records
        ):
            if message.queue_offset == offset:
                return message
        raise MessageNotFound(
            Text(
                "queue {queue_id} of {topic} on {broker_name} has no message {offset}",
                queue_id=queue_id,
                topic=topic,
                broker_name=broker_name,
                offset=offset,
            )
        )

    async def between(
        self,
        topic: str,
        begin: int = 0,
        end: int = END_OF_TIME,
        *,
        tags: str | None = None,
        sql: str | None = None,
        text: str | None = None,
        cursor: SearchCursor | None = None,
        backwards: bool = False,
        budget: Budget | None = None,
    ) -> SearchPage:
        """A page of the messages stored between two times, both included: all queues merged by store time.

        `tags` is `A || B`, `sql` an SQL92 expression over properties, `text` a piece of the body. `cursor` is where
        another page ended or began; without one the page begins at `begin`, or backwards at `end`.
        """
        wanted = Wanted(topic, begin, end, tags, sql, text)
        return await search(self._session, wanted, cursor, budget or Budget(), backwards=backwards)

    async def send(self, message: Message, broker_name: str | None = None, queue_id: int | None = None) -> SendResult:
        """Send one message, to a queue of choice or to any that may be written.

        A topic that does not exist is created by the broker where its autoCreateTopicEnable allows that.
        """
        check_topic_name(message.topic)
        if message.topic in SEND_FORBIDDEN_TOPICS:
            raise MessageError(
                Text("the topic {topic} belongs to the broker; nothing may be sent to it", topic=message.topic)
            )
        unique_key = self._ids.next()
        route = await self._route_to_send(message.topic)
        queue, address = choose_queue(route, message.topic, broker_name, queue_id)
        header = SendMessageRequest(
            producer_group=PRODUCER_GROUP,
            topic=message.topic,
            queue_id=queue.queue_id,
            default_topic_queue_nums=AUTO_CREATE_QUEUES,
            born_timestamp=self._session.clock.now(),
            flag=message.flag,
            properties=encode_properties(sent_properties(message, unique_key)),
            bname=queue.broker_name,
        )
        command = request(RequestCode.SEND_MESSAGE_V2, header, body=message.body)
        reply = await self._session.invoke(address, command, accept=STATUS_OF_CODE)
        stored = reply.header(SendMessageResponse)
        return SendResult(
            status=STATUS_OF_CODE[reply.code],
            message_id=unique_key,
            offset_message_id=stored.msg_id,
            queue=queue._replace(queue_id=stored.queue_id),
            queue_offset=stored.queue_offset,
        )

    async def consume_directly(
        self, group: str, client_id: str, message_id: str, topic: str | None = None
    ) -> ConsumeMessageDirectlyResult:
        """Hand one message to the listener of one running member and return what it made of it."""
        message = await self.view(message_id, topic)
        header = ConsumeMessageDirectlyRequest(
            consumer_group=group, client_id=client_id, msg_id=message.offset_message_id
        )
        command = request(RequestCode.CONSUME_MESSAGE_DIRECTLY, header)
        timeout = self._session.config.relay_timeout_seconds
        reply = await self._session.invoke(str(message.store_host), command, timeout)
        return decode_body(ConsumeMessageDirectlyResult, reply.body_bytes)

    async def resume_check(self, message_id: str) -> StoredMessage:
        """Let the broker check a half message again that it had given up; returns the message."""
        try:
            message = await self.view(message_id, CHECK_MAX_TIME_TOPIC)
        except NoRoute:
            raise MessageNotFound(
                Text(
                    "no broker has given up a message yet: there is no {topic}",
                    topic=CHECK_MAX_TIME_TOPIC,
                )
            ) from None
        header = ResumeCheckHalfMessageRequest(message.offset_message_id)
        await self._session.invoke(str(message.store_host), request(RequestCode.RESUME_CHECK_HALF_MESSAGE, header))
        return message

    async def trace(self, message_id: str, trace_topic: str = TRACE_TOPIC) -> MessageTrace:
        """The sending and the deliveries of a message, as far as its clients wrote traces."""
        found = await self.by_key(trace_topic, message_id)
        found.raise_if_none()
        reports = [
            (plain_body(message).decode("utf-8", "replace"), message.born_host.host)
            for messages in found.done.values()
            for message in messages
        ]
        trace = trace_of(message_id, reports)
        if trace.is_empty:
            raise MessageNotFound(
                Text(
                    "no trace of {message_id} in the topic {trace_topic}; clients write it only if told to",
                    message_id=message_id,
                    trace_topic=trace_topic,
                )
            )
        return trace

    async def fate(self, message_id: str, topic: str | None = None) -> MessageFate:
        """Why each group that reads the topic of a message has or has not consumed it.

        `message_id` is an offset id, or a unique id together with the topic. A message that no consumer can see yet,
        because it is delayed or its transaction is open, is found, too.
        """
        located = await Locator(self._session, self).locate(message_id, topic)
        groups = await TopicAdmin(self._session, NamesrvAdmin(self._session)).groups(located.queue.topic)
        return await FateFinder(self._session, located, await self._trace_if_any(located.message)).find(groups)

    async def timeline(self, message_id: str, topic: str | None = None) -> tuple[Event, ...]:
        """The life of a message: sent, stored, delivered, retried, given up; as `fate` it takes either id."""
        located = await Locator(self._session, self).locate(message_id, topic)
        groups = await TopicAdmin(self._session, NamesrvAdmin(self._session)).groups(located.queue.topic)

        async def copies(of: str) -> tuple[StoredMessage, ...]:
            try:
                found = await located.copies(of)
            except NoRoute:
                return ()
            return tuple(one for messages in found.done.values() for one in messages)

        by_group = {
            group: GroupCopies(await copies(retry_topic(group)), await copies(dlq_topic(group)))
            for group in sorted({one for names in groups.done.values() for one in names})
        }
        stored = await copies(located.message.topic) or (located.message,)
        return timeline(stored, by_group, await self._trace_if_any(located.message))

    async def _trace_if_any(self, message: StoredMessage) -> MessageTrace | None:
        try:
            return await self.trace(message.message_id)
        except MQError:
            return None

    async def _route_to_send(self, topic: str) -> TopicRouteData:
        try:
            return await self._session.look_up_route(topic)
        except NoRoute as error:
            try:
                model = await self._session.look_up_route(AUTO_CREATE_TOPIC)
            except NoRoute:
                raise error from None
            queues = tuple(
                structs.replace(data, write_queue_nums=min(data.read_queue_nums, AUTO_CREATE_QUEUES))
                for data in model.queue_datas
            )
            return structs.replace(model, queue_datas=queues)

    async def _query(self, header: QueryMessageRequest) -> PerServer[Broker, tuple[StoredMessage, ...]]:
        command = request(RequestCode.QUERY_MESSAGE, header)

        async def ask(broker: Broker) -> tuple[StoredMessage, ...]:
            try:
                # A broker may have to read a whole day of index files.
                reply = await self._session.ask(broker, command, 3 * self._session.config.request_timeout_seconds)
            except QueryNotFound:
                return ()
            return tuple(decode_records(reply.body_bytes))

        route = await self._session.look_up_route(header.topic)
        return await ask_each([reader_of(data) for data in sorted_brokers(route)], ask)


def choose_queue(
    route: TopicRouteData, topic: str, broker_name: str | None = None, queue_id: int | None = None
) -> tuple[MessageQueue, str]:
    """A queue that may be written and the address of its master; raises NoRoute when none fits what is asked for."""
    masters = {data.broker_name: data.master_address for data in route.broker_datas if data.master_address}
    queues = [
        (MessageQueue(topic, data.broker_name, number), masters[data.broker_name])
        for data in route.queue_datas
        if data.perm & Perm.WRITE and data.broker_name in masters
        for number in range(data.write_queue_nums)
    ]
    fitting = [
        (queue, address)
        for queue, address in queues
        if broker_name in (None, queue.broker_name) and queue_id in (None, queue.queue_id)
    ]
    if not fitting:
        wanted = Text("") if broker_name is None and queue_id is None else Text(" like the one asked for")
        raise NoRoute(
            topic,
            Text(
                "the topic {topic} has no queue{wanted} that may be written at the moment", topic=topic, wanted=wanted
            ),
        )
    return random.choice(fitting)  # noqa: S311  spreads load, guards nothing


def sent_properties(message: Message, unique_key: str) -> dict[str, str]:
    """Everything that travels with a message; raises MessageError when a property takes a reserved name."""
    if reserved := RESERVED.intersection(message.properties):
        raise MessageError(Text("the property name {name} is reserved", name=min(reserved)))
    properties = dict(message.properties)
    if message.tags:
        properties[TAGS] = message.tags
    if message.keys:
        properties[KEYS] = message.keys
    return {**properties, UNIQ_KEY: unique_key, WAIT: "true"}


def _is_unique_id(message_id: str) -> bool:
    """Whether a producer gave this id. A broker's looks alike, but has a port where a producer's has a process id."""
    try:
        return not 0 < parse_offset_message_id(message_id).store_host.port < 1 << 16
    except MessageError:
        return False
