"""Reads sends: 10 and 310 single, 320 batch. What is checked and in which order is RocketMQ's."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from downrange.broker.delayed import delay_level, delayed, stored_text, without_timer
from downrange.broker.groups import Groups
from downrange.broker.handlers.storing import Storing
from downrange.broker.live_config import LiveConfig
from downrange.broker.message_writer import MessageWriter
from downrange.broker.timed import Timing, recall_handle
from downrange.broker.topics import Topics
from downrange.broker.transactions.records import half
from downrange.model import properties as names
from downrange.model.errors import MessageError
from downrange.model.message import SysFlag
from downrange.model.message_id import pack_host
from downrange.model.properties import decode_properties, find_property
from downrange.model.topics import (
    HALF_TOPIC,
    MAX_TOPIC_LENGTH,
    OP_HALF_TOPIC,
    RETRY_PREFIX,
    TIMER_TOPIC,
    Perm,
    TopicConfig,
    check_topic_name,
    dlq_topic,
    is_send_forbidden,
)
from downrange.protocol.bodies.send import SendMessageRequest, decode_batch, decode_send_v1
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
from downrange.store.new_message import NewMessage, PutMessageStatus, Refusal
from downrange.transport.connection import Connection

FAQ: Final = "\nSee http://rocketmq.apache.org/docs/faq/ for further details."
STATUS_CODES: Final = {
    PutMessageStatus.FLUSH_DISK_TIMEOUT: ResponseCode.FLUSH_DISK_TIMEOUT,
    PutMessageStatus.FLUSH_SLAVE_TIMEOUT: ResponseCode.FLUSH_SLAVE_TIMEOUT,
    PutMessageStatus.SLAVE_NOT_AVAILABLE: ResponseCode.SLAVE_NOT_AVAILABLE,
    PutMessageStatus.MESSAGE_ILLEGAL: ResponseCode.MESSAGE_ILLEGAL,
    PutMessageStatus.PROPERTIES_SIZE_EXCEEDED: ResponseCode.MESSAGE_ILLEGAL,
    PutMessageStatus.SERVICE_NOT_AVAILABLE: ResponseCode.SERVICE_NOT_AVAILABLE,
}
_MULTI_TAGS: Final = int(SysFlag.MULTI_TAGS)
_SEND_V1: Final = int(RequestCode.SEND_MESSAGE)
_SEND_BATCH: Final = int(RequestCode.SEND_BATCH_MESSAGE)
_SEPARATOR: Final = names.PROPERTY_SEPARATOR.encode()
_TIMED: Final = b"TIMER_D"  # as all properties begin that say when a message is due


class SendReader:
    """Checks what producers send, and makes messages of it. `on_half` is told the topic of each half message stored."""

    def __init__(
        self, config: LiveConfig, topics: Topics, groups: Groups, writer: MessageWriter, timing: Timing | None = None
    ) -> None:
        self.config = config
        self._timing = timing or Timing(config, topics)
        self._topics = topics
        self._groups = groups
        self._writer = writer
        self.on_half: Callable[[str], None] = lambda topic: None
        self.store_host = pack_host(config.broker.broker_ip1, config.broker.listen_port)
        self.cluster_property = f"{names.CLUSTER}{names.NAME_VALUE_SEPARATOR}{config.broker.broker_cluster_name}"

    def read(self, command: Command, origin: Connection) -> Storing | Command:
        """10, 310 and 320. The header may say that a 10 is a batch, too: the C++ client sends those so."""
        header = decode_send_v1(command.ext_fields) if command.code == _SEND_V1 else command.header(SendMessageRequest)
        is_new = header.topic not in self._topics.sendable and header.topic not in self._topics
        try:
            if header.batch or command.code == _SEND_BATCH:
                asked = self._read_batch(command, header, origin)
            else:
                asked = self._read_single(command, header, origin)
        except (BrokerError, MessageError) as error:
            return self.refusal(command, error)
        if is_new and isinstance(asked, Storing):
            asked.makes_topic = True
        return asked

    def _read_batch(self, command: Command, header: SendMessageRequest, origin: Connection) -> Storing | Command:
        if len(header.topic) > MAX_TOPIC_LENGTH:
            raise MessageIllegal(f"message topic length too long {len(header.topic)}")
        config = self._topics.sendable.get(header.topic) or self.topic(header)
        queue_id = self.queue_id(config, header.queue_id, origin)
        _, waits = self._stored_properties(header.properties)
        # Every message gets all properties of the batch, WAIT too: RocketMQ takes it out of single messages only.
        shared = self.cluster_property.encode()
        if header.properties:
            shared += _SEPARATOR + header.properties.encode()
        group: list[NewMessage] = []
        for flag, body, properties in decode_batch(command.body_bytes):
            own = properties.encode()
            message = self.message(header, queue_id, body, _joined(own, shared), origin)
            message.flag = flag
            if _TIMED in message.properties:
                self._timing.set_aside(message, decode_properties(message.properties.decode()), self._writer.now())
            group.append(message)
        if not group or header.sys_flag & 12 or delay_level(find_property(header.properties, names.DELAY)) > 0:
            reason = "a batch must have messages, and they can be neither transactional nor delayed"
            return self.refused(command, Refusal(PutMessageStatus.MESSAGE_ILLEGAL, reason))
        return Storing(group, self.refused, queue_id, waits)

    def _read_single(self, command: Command, header: SendMessageRequest, origin: Connection) -> Storing:
        config = self._topics.sendable.get(header.topic) or self.topic(header)
        broker = self.config.broker
        if broker.start_accept_send_request_time_stamp:
            self.check_started()
        if config.order and not broker.broker_permission & Perm.WRITE:
            raise NoPermission(f"the broker[{broker.broker_ip1}] sending message is forbidden")
        queue_id = header.queue_id
        if not 0 <= queue_id < config.write_queue_nums:
            queue_id = self.queue_id(config, queue_id, origin)
        body, text = command.body, header.properties
        assert isinstance(body, bytes)  # as every frame has it
        message = self.message(header, queue_id, body, b"", origin)
        if config.topic_filter_type == "MULTI_TAG":
            message.sys_flag |= _MULTI_TAGS
        is_retry = header.topic.startswith(RETRY_PREFIX)
        waits = None
        handle = None
        if not is_retry and ("DELAY\x01" in text or "TRAN_MSG\x01" in text or "TIMER_D" in text):
            properties = decode_properties(text)
            waits = self._set_aside(message, properties)
            if message.topic is TIMER_TOPIC:
                handle = recall_handle(properties, broker.broker_name)
        if waits is None:
            text, waits = self._stored_properties(text)
            message.properties = text.encode()
        if is_retry:
            message = self._retried(message, header, text)
        storing = Storing((message,), self.refused, queue_id, waits, recall_handle=handle)
        if message.topic is HALF_TOPIC:
            storing.then = lambda _: self.on_half(header.topic)
        return storing

    # --- checks -------------------------------------------------------------------------------------------------

    def check_started(self) -> None:
        start_millis = self.config.broker.start_accept_send_request_time_stamp
        if start_millis and self._writer.now() < start_millis:
            raise BrokerError(f"broker unable to service, until {start_millis}")

    def topic(self, header: SendMessageRequest) -> TopicConfig:
        """The topic, created when that is allowed; an error says why it cannot be sent to."""
        topic = header.topic
        check_topic_name(topic)
        if is_send_forbidden(topic):
            raise NoPermission(f"Sending message to topic[{topic}] is forbidden.")
        config = self._topics.get(topic)
        if config is None:
            refuse_messages_on_slave(self.config)
            config = self._topics.create_like(
                topic,
                header.default_topic,
                header.default_topic_queue_nums,
                enabled=self.config.broker.auto_create_topic_enable,
            )
        if config is None and topic.startswith(RETRY_PREFIX):
            config = self._topics.ensure(topic, 1)
        if config is None:
            raise TopicNotExist(f"topic[{topic}] not exist, apply first please!{FAQ}")
        return config

    def queue_id(self, config: TopicConfig, queue_id: int, origin: Connection) -> int:
        if queue_id >= max(config.write_queue_nums, config.read_queue_nums):
            raise BrokerError(f"request queueId[{queue_id}] is illegal, {describe(config)} Producer: {origin.peer}")
        if queue_id < 0:
            return random.randrange(max(1, config.write_queue_nums))  # noqa: S311  spreading, not secrecy
        return queue_id

    def _stored_properties(self, text: str) -> tuple[str, bool]:
        """The property text as it is stored (WAIT out, CLUSTER in), and whether the sender waits."""
        waits = True
        if text.endswith("\x02WAIT\x01true") and text.count("WAIT\x01") == 1:  # as most clients write it
            text = text[:-10]
        elif "WAIT\x01" in text:
            value = find_property(text, names.WAIT)
            if value is not None:
                waits = value != "false"
                pair, framed = f"\x02WAIT\x01{value}\x02", f"\x02{text}\x02"
                while pair in framed:  # only a pair that stands whole between separators is taken out
                    framed = framed.replace(pair, "\x02")
                text = framed[1:-1]
        if not text:
            return self.cluster_property, waits
        if text[-1] == names.PROPERTY_SEPARATOR:
            return text + self.cluster_property, waits
        return f"{text}{names.PROPERTY_SEPARATOR}{self.cluster_property}", waits

    def message(
        self, header: SendMessageRequest, queue_id: int, body: bytes, properties: bytes, origin: Connection
    ) -> NewMessage:
        return NewMessage(
            header.topic, queue_id, body, properties, header.born_timestamp, origin.peer_host, self.store_host,
            header.flag, header.sys_flag, header.reconsume_times,
        )  # fmt: skip

    def _retried(self, message: NewMessage, header: SendMessageRequest, text: str) -> NewMessage:
        """A consumer that could not send back sends to its retry topic itself; too many tries end in the DLQ."""
        group_name = header.topic.removeprefix(RETRY_PREFIX)
        group = self._groups.find(group_name, auto_create=self.config.broker.auto_create_subscription_group)
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
        level = delay_level(properties.get(names.DELAY))
        return delayed(message, properties, level, self._writer.max_delay_level) if level else message

    def _set_aside(self, message: NewMessage, properties: dict[str, str]) -> bool | None:
        """Change a half message, a delayed or a timed one into the form in which it waits, and say whether its sender
        waits.

        None for any other message. `properties` are those that it came with.
        """
        broker = self.config.broker
        level = delay_level(properties.get(names.DELAY))
        is_half = properties.get(names.TRAN_MSG, "").lower() == "true"
        if not is_half and message.sys_flag & 4:
            return None
        properties[names.CLUSTER] = broker.broker_cluster_name
        if is_half:
            if broker.reject_transaction_message:
                raise NoPermission(f"the broker[{broker.broker_ip1}] sending transaction message is forbidden")
            if level:  # RocketMQ takes such a message, and drops it when it is due
                raise MessageIllegal("a transactional message cannot be delayed")
            self._timing.out_time(properties, self._writer.now())  # refused now, not when it is committed
            self._topics.ensure(HALF_TOPIC, 1)
            self._topics.ensure(OP_HALF_TOPIC, 1)  # as in 5.x: operators read there which half messages have ended
            half(message, properties)
        elif level:
            delayed(message, without_timer(properties), level, self._writer.max_delay_level)
        elif not self._timing.set_aside(message, properties, self._writer.now()):
            return None
        return properties.get(names.WAIT) != "false"

    # --- replies ------------------------------------------------------------------------------------------------

    def refusal(self, command: Command, error: BrokerError | MessageError) -> Command:
        """The reply to a send that broke a rule."""
        code = error.code if isinstance(error, BrokerError) else ResponseCode.SYSTEM_ERROR
        remark = error.remark if isinstance(error, BrokerError) else str(error)
        return command.reply(code, remark, ext_fields=self._region())

    def refused(self, command: Command, refusal: Refusal) -> Command:
        """The reply to a send that the store did not take."""
        code = STATUS_CODES.get(refusal.status, ResponseCode.SYSTEM_ERROR)
        return command.reply(code, self._remark(refusal), ext_fields=self._region())

    def _region(self) -> dict[str, str]:
        broker = self.config.broker
        return {"MSG_REGION": broker.region_id, "TRACE_ON": "true" if broker.trace_on else "false"}

    def _remark(self, refusal: Refusal) -> str:
        store = self._writer.store
        match refusal.status:
            case PutMessageStatus.MESSAGE_ILLEGAL | PutMessageStatus.PROPERTIES_SIZE_EXCEEDED:
                return (
                    "the message is illegal, maybe msg body or properties length not matched. msg body length limit "
                    f"{store.max_message_size}B, msg properties length limit 32KB."
                )
            case PutMessageStatus.SERVICE_NOT_AVAILABLE:
                return (
                    f"service not available now: {refusal.reason}. It may be caused by one of the following reasons: "
                    "the broker's disk is full "
                    f"[CL: {store.commit_log_disk_use:5.2f} CQ: {store.queue_disk_use:5.2f} "
                    f"INDEX: {store.queue_disk_use:5.2f}], messages are put to the slave, message store has been "
                    "shut down, etc."
                )
            case PutMessageStatus.CREATE_MAPEDFILE_FAILED:
                return "create mapped file failed, server is busy or broken."
            case PutMessageStatus.OS_PAGECACHE_BUSY:
                return "[PC_SYNCHRONIZED]broker busy, start flow control for a while"
            case _:
                return f"{refusal.status.value} {refusal.reason}".strip()


def _joined(own: bytes, shared: bytes) -> bytes:
    """Properties of one message of a batch, then those of the whole batch."""
    return own + _SEPARATOR + shared if own and not own.endswith(_SEPARATOR) else own + shared


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
