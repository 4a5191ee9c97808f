"""Request and reply: a producer sends a request, its consumer answers, a broker brings the answer back.

    the producer's request ──▶ topic ──▶ a consumer ──reply──▶ a broker ──pushed (326)──▶ the producer that asked

A request is an ordinary message with the properties CORRELATION_ID, REPLY_TO_CLIENT and TTL. The broker finds the
client to push to among the producers that send it heartbeats. [RequestFutureHolder, MessageUtil]

ReplyTimedOut       (ClientError)     no reply within the time given; the request may have been carried out
NotARequest         (MessageError)    a reply to a message that was not sent as a request
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from msgspec import structs

from downrange.client.compression import decompress
from downrange.client.errors import ClientClosed, ClientError, SendFailed
from downrange.client.producer.outgoing import Outgoing
from downrange.client.producer.send_result import SendResult
from downrange.client.session import Session
from downrange.clock import Clock
from downrange.model import properties as names
from downrange.model.errors import MessageError, MQError
from downrange.model.message import Message, MessageQueue, SysFlag
from downrange.model.properties import decode_properties
from downrange.model.topics import REPLY_TOPIC_SUFFIX
from downrange.protocol.bodies.replies import PushReplyMessageRequest
from downrange.protocol.bodies.routes import TopicRouteData
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command
from downrange.transport.connection import Connection

log = logging.getLogger(__name__)

REQUEST_SECONDS: Final = 3.0
TELLING_SECONDS: Final = 1.0
_REPLY: Final = "reply"
_SEND_REPLY: Final = int(RequestCode.SEND_REPLY_MESSAGE_V2)
_PUSH: Final = int(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT)


class ReplyTimedOut(ClientError):
    """No reply came in time. Whether the request was carried out is unknown."""

    code = 10006


class NotARequest(MessageError):
    """The message lacks a property a reply needs: it was not sent with `request`."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to a request. Hosts are `ip:port`: of the client that answered, of the broker it went through."""

    topic: str
    body: bytes
    properties: dict[str, str]
    flag: int
    born_timestamp: int
    born_host: str
    store_timestamp: int
    store_host: str

    @property
    def correlation_id(self) -> str:
        """The id that joins the reply to its request."""
        return self.properties[names.CORRELATION_ID]

    @property
    def tags(self) -> str | None:
        """The tag of the reply."""
        return self.properties.get(names.TAGS)

    @property
    def keys(self) -> list[str]:
        """The keys of the reply, one by one."""
        return [key for key in self.properties.get(names.KEYS, "").split(names.KEY_SEPARATOR) if key]


@dataclass(slots=True)
class ReplyMessage(Message):
    """The answer to a request, made by `reply_to`; any producer may send it."""

    correlation_id: str = ""
    reply_to_client: str = ""
    ttl_millis: str | None = None


class Request(Protocol):
    """A message as its consumer got it."""

    @property
    def properties_text(self) -> str: ...

    @property
    def message_id(self) -> str: ...


def reply_to(request: Request, body: bytes) -> ReplyMessage:
    """The message that answers `request`; raises NotARequest for any other message. [MessageUtil.createReplyMessage]"""
    properties = decode_properties(request.properties_text)
    for name in (names.CLUSTER, names.CORRELATION_ID, names.REPLY_TO_CLIENT):
        if name not in properties:
            raise NotARequest(f"message {request.message_id} cannot be replied to: it has no property {name}")
    return ReplyMessage(
        properties[names.CLUSTER] + REPLY_TOPIC_SUFFIX,
        body,
        correlation_id=properties[names.CORRELATION_ID],
        reply_to_client=properties[names.REPLY_TO_CLIENT],
        ttl_millis=properties.get(names.TTL),
    )


def as_reply(ready: Outgoing, message: ReplyMessage) -> Outgoing:
    """The outgoing message as a reply: with another code, the client it is for, and a topic without a namespace."""
    properties = {
        names.MSG_TYPE: _REPLY,
        names.CORRELATION_ID: message.correlation_id,
        names.REPLY_TO_CLIENT: message.reply_to_client,
    }
    if message.ttl_millis is not None:
        properties[names.TTL] = message.ttl_millis
    text = ready.properties + names.encode_properties(properties)
    return structs.replace(ready, code=_SEND_REPLY, topic=message.topic, properties=text)


class ReplySender(Protocol):
    """The part of a producer that sending replies needs."""

    async def send(self, message: Message, *, queue: MessageQueue | None = None) -> SendResult: ...


async def send_reply(producer: ReplySender, reply: ReplyMessage, broker_name: str) -> bool:
    """Send the reply to a request that was stored on `broker_name`; False when the client that asked is gone.

    That broker knows the client for sure. Other brokers are tried when it cannot be reached.
    """
    try:
        await producer.send(reply, queue=MessageQueue(reply.topic, broker_name, 0))
    except SendFailed as first:
        log.info("reply goes through another broker broker=%s reason=%s", broker_name, first)
        try:
            await producer.send(reply)
        except SendFailed as error:
            if error.code != ResponseCode.SYSTEM_ERROR:
                raise
            log.warning("reply not delivered client=%s reason=%s", reply.reply_to_client, error)
            return False
    return True


class AwaitedReplies:
    """The replies that a session waits for, by correlation id; handles request 326. Used on the session's loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: dict[str, asyncio.Future[Reply]] = {}

    def __repr__(self) -> str:
        return f"<AwaitedReplies waiting={len(self._waiting)}>"

    @classmethod
    def of(cls, session: Session) -> AwaitedReplies:
        """The awaited replies of `session`, which handles request 326 from now on."""
        handler = session.handlers.get(_PUSH)
        if not isinstance(handler, AwaitedReplies):
            handler = session.handlers[_PUSH] = cls(session.clock)
        return handler

    def expect(self, correlation_id: str) -> asyncio.Future[Reply]:
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[correlation_id] = reply
        reply.add_done_callback(lambda _: self._waiting.pop(correlation_id, None))
        return reply

    def __call__(self, command: Command, connection: Connection) -> Command:
        header = command.header(PushReplyMessageRequest)
        properties = decode_properties(header.properties)
        properties[names.ARRIVE_TIME] = str(self._clock.now())
        waiting = self._waiting.get(properties.get(names.CORRELATION_ID, ""))
        if waiting is None or waiting.done():
            log.info("reply dropped, nobody waits for it any more from=%s", header.born_host)
            return command.reply()
        body = command.body_bytes
        if header.sys_flag & SysFlag.COMPRESSED:
            try:
                body = decompress(body, header.sys_flag, f"the reply from {header.born_host}")
            except MessageError as error:
                waiting.set_exception(error)
                raise
        waiting.set_result(
            Reply(
                topic=header.topic,
                body=body,
                properties=properties,
                flag=header.flag,
                born_timestamp=header.born_timestamp,
                born_host=header.born_host,
                store_timestamp=header.store_timestamp,
                store_host=header.store_host,
            )
        )
        return command.reply()


SendRequest = Callable[[str, float], Awaitable[object]]
"""Sends the request, given further properties in their text form and a time-out."""


class Requests:
    """The requests of one producer that wait for replies.

    Holds always: before a request is sent, all brokers that the reply may come through have had a heartbeat of this
    client, as far as they answer. After `close` no call waits and no task is left.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._waiting: set[asyncio.Future[Reply]] = set()
        self._told: dict[str, Connection | None] = {}
        self._telling: asyncio.Task[None] | None = None
        self._reply_topics: set[str] = set()

    async def ask(self, topic: str, route: TopicRouteData, send: SendRequest, timeout: float) -> Reply:
        """Send a request to `topic` and wait for its reply; raises ReplyTimedOut, or why it could not be sent."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + timeout
        properties = {
            names.CORRELATION_ID: str(uuid.uuid4()),
            names.REPLY_TO_CLIENT: self._session.client_id,
            names.TTL: str(round(timeout * 1000)),
        }
        reply = AwaitedReplies.of(self._session).expect(properties[names.CORRELATION_ID])
        self._waiting.add(reply)
        is_sent = False
        try:
            async with asyncio.timeout_at(ends):
                await self._make_known(route)
                try:
                    await send(names.encode_properties(properties), ends - loop.time())
                except SendFailed:
                    if not reply.done():  # an answer says more about a request than a lost acknowledgement
                        raise
                is_sent = True
                return await reply
        except TimeoutError:
            what = "no reply" if is_sent else "no broker acknowledged the request"
            raise ReplyTimedOut(f"request to {topic}: {what} within {timeout:g} s") from None
        finally:
            self._waiting.discard(reply)
            reply.cancel()

    async def close(self) -> None:
        for reply in self._waiting:
            if not reply.done():
                reply.set_exception(ClientClosed("the producer was closed while a request waited for its reply"))
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.wait([self._telling])

    async def _make_known(self, route: TopicRouteData) -> None:
        """Send a heartbeat over the present connection to every broker that the reply may come through.

        The consumer that replies chooses among all brokers of the cluster, whatever topics they serve.
        """
        session = self._session
        for cluster in {data.cluster for data in route.broker_datas}:
            reply_topic = cluster + REPLY_TOPIC_SUFFIX
            if reply_topic not in self._reply_topics:
                try:
                    await session.follow(reply_topic)
                except MQError as error:
                    log.info("no route of the reply topic topic=%s reason=%s", reply_topic, error)
                self._reply_topics.add(reply_topic)
        now = {address: session.connection(address) for address in session.addresses_in_use(masters_only=True)}
        if now == self._told:  # equal also for a broker that was away then and is away now, which is not tried again
            return
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._tell(now), name="downrange heartbeat of requests")
        # A broker that hangs must not hold up the request.
        await asyncio.wait([self._telling], timeout=TELLING_SECONDS)

    async def _tell(self, addresses: Iterable[str]) -> None:
        await self._session.heartbeats.beat()
        self._told = {address: self._session.connection(address) for address in addresses}
