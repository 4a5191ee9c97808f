"""Sends: 10 and 310 single, 320 batch."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

from downrange.broker.delayed import delay_level, delayed, stored_text
from downrange.broker.flow_control import FlowControl
from downrange.broker.groups import Groups
from downrange.broker.live_config import LiveConfig
from downrange.broker.message_writer import MessageWriter
from downrange.broker.routes import RouteTable
from downrange.broker.topics import Topics
from downrange.broker.transactions.records import half
from downrange.model import properties as names
from downrange.model.errors import MessageError
from downrange.model.message import SysFlag
from downrange.model.message_id import offset_message_id, pack_host
from downrange.model.properties import decode_properties, find_property
from downrange.model.topics import (
    HALF_TOPIC,
    MAX_TOPIC_LENGTH,
    RETRY_PREFIX,
    SEND_FORBIDDEN_TOPICS,
    Perm,
    TopicConfig,
    check_topic_name,
    dlq_topic,
)
from downrange.protocol.bodies.send import SendMessageRequest, SendMessageResponse, decode_batch, decode_send_v1
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command
from downrange.protocol.errors import (
    BrokerError,
    MessageIllegal,
    NoPermission,
    SubscriptionGroupNotExist,
    TopicNotExist,
)
from downrange.store.config import BrokerRole
from downrange.store.new_message import AppendResult, BatchUnit, NewMessage, PutMessageStatus
from downrange.transport.connection import Connection
from downrange.transport.handler import LaterReply

FAQ = "\nSee http://rocketmq.apache.org/docs/faq/ for further details."
_SEND_V1 = int(RequestCode.SEND_MESSAGE)
_WAIT_FOR_NAMESRV_SECONDS: Final = 0.5


class SendHandlers:
    """Takes messages from producers. `on_half` is called with the topic of a transactional message that was stored.

    `register` tells the name servers of a new topic; its first message is answered when they know.
    """

    def __init__(
        self, config: LiveConfig, topics: Topics, groups: Groups, writer: MessageWriter, flow: FlowControl
    ) -> None:
        self._config = config
        self._topics = topics
        self._groups = groups
        self._writer = writer
        self._flow = flow
        self.on_half: Callable[[str], None] = lambda topic: None
        self.register: Callable[[], Awaitable[object]] | None = None
        self._store_host = pack_host(config.broker.broker_ip1, config.broker.listen_port)
        self._cluster_property = f"{names.CLUSTER}{names.NAME_VALUE_SEPARATOR}{config.broker.broker_cluster_name}"

    @property
    def routes(self) -> RouteTable:
        return {
            RequestCode.SEND_MESSAGE: self.send,
            RequestCode.SEND_MESSAGE_V2: self.send,
            RequestCode.SEND_BATCH_MESSAGE: self.send_batch,
        }

    def send(self, command: Command, connection: Connection) -> Command | LaterReply:
        """10 and 310. The header says whether it is a batch: the C++ client sends those as 10, too."""
        self._flow.check_send()
        header = self._header(command)
        if header.batch:
            return self.send_batch(command, connection)
        is_new = header.topic not in self._topics
        try:
            message, queue_id, waits = self._message(command, header, connection)
        except (BrokerError, MessageError) as error:
            return self._refusal(command, error)
        result = self._writer.append(message)
        if message.topic is HALF_TOPIC and result.status is PutMessageStatus.PUT_OK:
            self.on_half(header.topic)
        reply = self._writer.reply_when_safe(command, result, waits, lambda: self._accepted(queue_id, result))
        return self._when_registered(reply) if is_new else reply

    def send_batch(self, command: Command, connection: Connection) -> Command | LaterReply:
        """320."""
        self._flow.check_send()
        header = self._header(command)
        is_new = header.topic not in self._topics
        try:
            if len(header.topic) > MAX_TOPIC_LENGTH:
                raise MessageIllegal(f"message topic length too long {len(header.topic)}")
            config = self._topic(header)
            queue_id = self._queue_id(config, header.queue_id, connection)
            entries = decode_batch(command.body_bytes)
            units = [BatchUnit(entry.flag, entry.body, entry.properties.encode()) for entry in entries]
        except (BrokerError, MessageError) as error:
            return self._refusal(command, error)
        _, waits = self._stored_properties(header.properties)
        # Every message gets all properties of the batch, WAIT too: RocketMQ takes it out of single messages only.
        pieces = [self._cluster_property, header.properties]
        text = names.PROPERTY_SEPARATOR.join(piece for piece in pieces if piece)
        message = self._new(header, queue_id, b"", text, connection)
        result = self._writer.append_batch(message, units)
        reply = self._writer.reply_when_safe(command, result, waits, lambda: self._accepted(queue_id, result))
        return self._when_registered(reply) if is_new else reply

    # --- checks -------------------------------------------------------------------------------------------------

    def _header(self, command: Command) -> SendMessageRequest:
        if command.code == _SEND_V1:
            return decode_send_v1(command.ext_fields)
        return command.header(SendMessageRequest)

    def _message(
        self, command: Command, header: SendMessageRequest, connection: Connection
    ) -> tuple[NewMessage, int, bool]:
        """What to store, the queue the sender is told, and whether the sender waits until the message is safe."""
        config = self._topics.sendable.get(header.topic) or self._topic(header)
        broker = self._config.broker
        if broker.start_accept_send_request_time_stamp:
            self._check_started(broker.start_accept_send_request_time_stamp)
        if config.order and not broker.broker_permission & Perm.WRITE:
            raise NoPermission(f"the broker[{broker.broker_ip1}] sending message is forbidden")
        queue_id = header.queue_id
        if not 0 <= queue_id < config.write_queue_nums:
            queue_id = self._queue_id(config, queue_id, connection)
        text, waits = self._stored_properties(header.properties)
        body = command.body
        assert isinstance(body, bytes)
        message = self._new(header, queue_id, body, text, connection)
        if config.topic_filter_type == "MULTI_TAG":
            message.sys_flag |= SysFlag.MULTI_TAGS
        if header.topic.startswith(RETRY_PREFIX):
            return self._retried(message, header, text), queue_id, waits
        return self.set_aside(message, header.properties) or message, queue_id, waits

    def _check_started(self, start_millis: int) -> None:
        if self._writer.now() < start_millis:
            raise BrokerError(f"broker unable to service, until {start_millis}")

    def _topic(self, header: SendMessageRequest) -> TopicConfig:
        """The topic, created when that is allowed; an error says why it cannot be sent to."""
        topic = header.topic
        check_topic_name(topic)
        if topic in SEND_FORBIDDEN_TOPICS:
            raise NoPermission(f"Sending message to topic[{topic}] is forbidden.")
        config = self._topics.get(topic)
        if config is None:
            refuse_messages_on_slave(self._config)
            config = self._topics.create_like(
                topic,
                header.default_topic,
                header.default_topic_queue_nums,
                enabled=self._config.broker.auto_create_topic_enable,
            )
        if config is None and topic.startswith(RETRY_PREFIX):
            config = self._topics.ensure(topic, 1)
        if config is None:
            raise TopicNotExist(f"topic[{topic}] not exist, apply first please!{FAQ}")
        return config

    def _queue_id(self, config: TopicConfig, queue_id: int, connection: Connection) -> int:
        if queue_id >= max(config.write_queue_nums, config.read_queue_nums):
            raise BrokerError(f"request queueId[{queue_id}] is illegal, {describe(config)} Producer: {connection.peer}")
        if queue_id < 0:
            return random.randrange(max(1, config.write_queue_nums))  # noqa: S311  spreading, not secrecy
        return queue_id

    def _stored_properties(self, text: str) -> tuple[str, bool]:
        """The property text as it is stored (WAIT out, CLUSTER in), and whether the sender waits."""
        waits = True
        if "WAIT\x01" in text:
            value = find_property(text, names.WAIT)
            if value is not None:
                waits = value != "false"
                text = _without(text, names.WAIT, value)
        if not text:
            return self._cluster_property, waits
        if text[-1] == names.PROPERTY_SEPARATOR:
            return text + self._cluster_property, waits
        return f"{text}{names.PROPERTY_SEPARATOR}{self._cluster_property}", waits

    def _new(
        self, header: SendMessageRequest, queue_id: int, body: bytes, text: str, connection: Connection
    ) -> NewMessage:
        return NewMessage(
            header.topic,
            queue_id,
            body,
            text.encode(),
            header.born_timestamp,
            connection.peer_host,
            self._store_host,
            header.flag,
            header.sys_flag,
            header.reconsume_times,
        )

    def _retried(self, message: NewMessage, header: SendMessageRequest, text: str) -> NewMessage:
        """A consumer that could not send back sends to its retry topic itself; too many tries end in the DLQ."""
        group_name = header.topic.removeprefix(RETRY_PREFIX)
        group = self._groups.get(group_name)
        if group is None:
            raise SubscriptionGroupNotExist(f"subscription group not exist, {group_name}{FAQ}")
        limit = group.retry_max_times if header.max_reconsume_times is None else header.max_reconsume_times
        properties = decode_properties(text)
        if header.reconsume_times >= limit:
            message.topic = dlq_topic(group_name)
            message.queue_id = 0
            self._topics.ensure(message.topic, 1)
            self._writer.statistics.sent_to_dlq(group_name)
            message.properties = stored_text({**properties, names.DELAY: "0"})
            return message
        level = delay_level(text)
        return delayed(message, properties, level, self._writer.max_delay_level) if level else message

    def set_aside(self, message: NewMessage, text: str) -> NewMessage | None:
        """A half message or a delayed one as it waits; None for all others. `text` are the properties it came with."""
        broker = self._config.broker
        level = delay_level(text) if "DELAY" in text else 0
        is_half = "TRAN_MSG" in text and (find_property(text, names.TRAN_MSG) or "").lower() == "true"
        if not is_half and (not level or message.sys_flag & 4):
            return None
        properties = decode_properties(text)
        properties[names.CLUSTER] = broker.broker_cluster_name
        if not is_half:
            return delayed(message, properties, level, self._writer.max_delay_level)
        if broker.reject_transaction_message:
            raise NoPermission(f"the broker[{broker.broker_ip1}] sending transaction message is forbidden")
        if level:  # RocketMQ takes it, and drops it when it is due
            raise MessageIllegal("a transactional message cannot be delayed")
        self._topics.ensure(HALF_TOPIC, 1)
        return half(message, properties)

    # --- replies ------------------------------------------------------------------------------------------------

    def _when_registered(self, reply: Command | LaterReply) -> Command | LaterReply:
        """Whoever reads the answer to a topic's first message may ask for its route at once.

        Not for long: without a name server the message is stored all the same, and its sender must not send it again.
        """
        if self.register is None:
            return reply
        return asyncio.ensure_future(self._after(self.register, reply))

    async def _after(self, register: Callable[[], Awaitable[object]], reply: Command | LaterReply) -> Command | None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_WAIT_FOR_NAMESRV_SECONDS):
                await register()
        return await reply if isinstance(reply, asyncio.Future) else reply

    def _accepted(self, queue_id: int, result: AppendResult) -> SendMessageResponse:
        offsets = result.physical_offsets or (result.physical_offset,)
        return SendMessageResponse(
            msg_id=",".join([offset_message_id(self._store_host, offset) for offset in offsets]),
            queue_id=queue_id,
            queue_offset=result.queue_offset,
            msg_region=self._config.broker.region_id,
            trace_on=self._config.broker.trace_on,
        )

    def _refusal(self, command: Command, error: BrokerError | MessageError) -> Command:
        code = error.code if isinstance(error, BrokerError) else ResponseCode.SYSTEM_ERROR
        remark = error.remark if isinstance(error, BrokerError) else str(error)
        broker = self._config.broker
        fields = {"MSG_REGION": broker.region_id, "TRACE_ON": "true" if broker.trace_on else "false"}
        return command.reply(code, remark, ext_fields=fields)


def refuse_messages_on_slave(config: LiveConfig) -> None:
    """A slave's store refuses messages; this is for those that would create a topic before."""
    if config.store.broker_role is BrokerRole.SLAVE:
        reason = "service not available now: this broker is a slave: it takes messages from its master only"
        raise BrokerError(reason, ResponseCode.SERVICE_NOT_AVAILABLE)


def describe(config: TopicConfig) -> str:
    """A topic in RocketMQ's words."""
    letters = (("R", Perm.READ), ("W", Perm.WRITE), ("X", Perm.INHERIT))
    perm = "".join(letter if config.perm & bit else "-" for letter, bit in letters)
    return (
        f"TopicConfig [topicName={config.topic_name}, readQueueNums={config.read_queue_nums}, "
        f"writeQueueNums={config.write_queue_nums}, perm={perm}, topicFilterType={config.topic_filter_type}, "
        f"topicSysFlag={config.topic_sys_flag}, order={'true' if config.order else 'false'}]"
    )


def _without(text: str, name: str, value: str) -> str:
    """The text without one pair; only a pair that stands whole between separators is taken out."""
    pieces = text.split(names.PROPERTY_SEPARATOR)
    pair = f"{name}{names.NAME_VALUE_SEPARATOR}{value}"
    return names.PROPERTY_SEPARATOR.join(piece for piece in pieces if piece != pair)
