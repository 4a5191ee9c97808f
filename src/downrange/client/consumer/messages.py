"""A message as a consumer gets it, and how it is read out of the answer to a pull."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from downrange.client.compression import decompress
from downrange.client.namespace import unwrap
from downrange.compiled import accelerated
from downrange.model import properties as names
from downrange.model.message import MessageQueue, PhysicalOffset, QueueOffset, StoredMessage, SysFlag
from downrange.model.message_id import HostPort, offset_message_id, pack_host, unpack_host
from downrange.model.record import CorruptRecord, unpack_record
from downrange.model.subscription import Subscription
from downrange.model.topics import RETRY_PREFIX, popped_topic

_COMPRESSED: Final = int(SysFlag.COMPRESSED)


class ReceivedMessage(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One message that was pulled from a queue. Everything but `body` costs nothing until it is asked for.

    `topic` is the one subscribed to, also when the message comes again from the group's retry topic; `queue` is where
    it really lay. A compressed body is decompressed when it is first read, and MessageError is raised when that fails.
    """

    topic: str
    queue: MessageQueue
    queue_offset: QueueOffset
    physical_offset: PhysicalOffset
    stored_body: bytes
    properties_text: str
    sys_flag: int
    flag: int
    born_timestamp: int
    packed_born_host: bytes
    store_timestamp: int
    packed_store_host: bytes
    reconsume_times: int
    """How often the message was delivered before this time."""
    prepared_transaction_offset: int
    body_crc: int
    store_size: int
    min_offset: int
    """Of the queue, when the message was pulled."""
    max_offset: int
    plain: bytes | None = None

    def __repr__(self) -> str:
        times = f" reconsume_times={self.reconsume_times}" if self.reconsume_times else ""
        return f"<ReceivedMessage {self.topic} {self.queue.broker_name}:{self.queue_id}@{self.queue_offset}{times}>"

    @property
    def body(self) -> bytes:
        """The body, as the producer sent it: not compressed."""
        if not self.sys_flag & _COMPRESSED:
            return self.stored_body
        if self.plain is None:
            msgspec.structs.force_setattr(self, "plain", decompress(self.stored_body, self.sys_flag, self.message_id))
        assert self.plain is not None
        return self.plain

    @property
    def queue_id(self) -> int:
        """The number of the queue on its broker."""
        return self.queue.queue_id

    @property
    def broker_name(self) -> str:
        """The name of the broker that has the message."""
        return self.queue.broker_name

    @property
    def properties(self) -> dict[str, str]:
        """All properties, and two that Java's consumers add: MIN_OFFSET and MAX_OFFSET of the queue at the pull."""
        found = names.decode_properties(self.properties_text)
        found[names.MIN_OFFSET] = str(self.min_offset)
        found[names.MAX_OFFSET] = str(self.max_offset)
        return found

    @property
    def tags(self) -> str | None:
        """The tag of the message."""
        return names.find_property(self.properties_text, names.TAGS)

    @property
    def keys(self) -> list[str]:
        """The keys, one by one. `Message.keys` is the text that is sent, in which blanks separate them."""
        text = names.find_property(self.properties_text, names.KEYS)
        return [key for key in text.split(names.KEY_SEPARATOR) if key] if text else []

    @property
    def unique_key(self) -> str | None:
        """The id that the producer gave the message."""
        return names.find_property(self.properties_text, names.UNIQ_KEY)

    @property
    def transaction_id(self) -> str | None:
        """Of a message that was sent in a transaction."""
        is_transactional = names.find_property(self.properties_text, names.TRAN_MSG) == "true"
        return self.unique_key if is_transactional else None

    @property
    def offset_message_id(self) -> str:
        """The id that the broker gave the message: its address and the place in the log."""
        return offset_message_id(self.packed_store_host, self.physical_offset)

    @property
    def message_id(self) -> str:
        """The unique id when the producer gave one, else the offset id: what users call *the* message id."""
        return self.unique_key or self.offset_message_id

    @property
    def born_host(self) -> HostPort:
        """The address of the producer."""
        return unpack_host(self.packed_born_host)

    @property
    def store_host(self) -> HostPort:
        """The address of the broker that stored the message."""
        return unpack_host(self.packed_store_host)

    def with_reconsume_times(self, times: int) -> ReceivedMessage:
        """The message as if it had been delivered so often."""
        return msgspec.structs.replace(self, reconsume_times=times)


def received(
    stored: StoredMessage, queue: MessageQueue, *, min_offset: int = 0, max_offset: int = 0, namespace: str = ""
) -> ReceivedMessage:
    """A decoded record as a consumer sees it."""
    return ReceivedMessage(
        topic=_topic(queue.topic, stored.properties_text, namespace),
        queue=queue,
        queue_offset=stored.queue_offset,
        physical_offset=stored.physical_offset,
        stored_body=stored.body,
        properties_text=stored.properties_text,
        sys_flag=stored.sys_flag,
        flag=stored.flag,
        born_timestamp=stored.born_timestamp,
        packed_born_host=pack_host(*stored.born_host),
        store_timestamp=stored.store_timestamp,
        packed_store_host=pack_host(*stored.store_host),
        reconsume_times=stored.reconsume_times,
        prepared_transaction_offset=stored.prepared_transaction_offset,
        body_crc=stored.body_crc,
        store_size=stored.store_size,
        min_offset=min_offset,
        max_offset=max_offset,
    )


def _topic(queue_topic: str, properties_text: str, namespace: str, group: str = "") -> str:
    """The topic the user subscribed to: a retried message says where it comes from."""
    topic = queue_topic
    if queue_topic.startswith(RETRY_PREFIX):
        topic = names.find_property(properties_text, names.RETRY_TOPIC) or queue_topic
        topic = popped_topic(topic, group) if group else topic
    return unwrap(namespace, topic) if namespace else topic


def read_pulled(
    data: bytes,
    queue: MessageQueue,
    *,
    min_offset: int,
    max_offset: int,
    offset_delta: int = 0,
    namespace: str = "",
    group: str = "",
) -> list[ReceivedMessage]:
    """The messages of a pull's answer, in order. Raises CorruptRecord: to skip a record would be to lose a message.

    `offset_delta` moves queue offsets, as 5.x wants it for queues that were mapped to another broker. Messages of a
    pop retry topic of `group` have the topic that was popped from.
    """
    if not offset_delta and not queue.topic.startswith(RETRY_PREFIX):
        topic = _topic(queue.topic, "", namespace)
        read = read_usual(data, queue, topic, min_offset, max_offset, ReceivedMessage)
        if read is not None:
            return read
    return read_in_python(data, queue, min_offset, max_offset, offset_delta, namespace, group)


@accelerated
def read_usual(
    data: bytes, queue: MessageQueue, topic: str, min_offset: int, max_offset: int, kind: type[ReceivedMessage]
) -> list[ReceivedMessage] | None:
    """The messages if all records are usual; None: `read_in_python` reads them, in Python always."""
    return None


def read_in_python(
    data: bytes,
    queue: MessageQueue,
    min_offset: int,
    max_offset: int,
    offset_delta: int,
    namespace: str,
    group: str = "",
) -> list[ReceivedMessage]:
    """`read_pulled` without the compiled step, which leaves unusual records to this function."""
    messages: list[ReceivedMessage] = []
    is_retry = queue.topic.startswith(RETRY_PREFIX)
    topic = _topic(queue.topic, "", namespace)
    length = len(data)
    at = 0
    while at < length:
        head, body_at, _, properties_at, end = unpack_record(data, at, length)
        (size, _, body_crc, _, flag, queue_offset, physical_offset, sys_flag, born_timestamp, born_host,
         store_timestamp, store_host, reconsume_times, prepared, body_length) = head  # fmt: skip
        try:
            properties_text = data[properties_at:end].decode()
        except UnicodeDecodeError as error:
            raise CorruptRecord(f"record at {at}: {error}") from None
        messages.append(
            ReceivedMessage(
                _topic(queue.topic, properties_text, namespace, group) if is_retry else topic,
                queue,
                queue_offset + offset_delta,  # type: ignore[arg-type]  # QueueOffset() would take longer than the sum
                physical_offset,
                data[body_at : body_at + body_length],
                properties_text,
                sys_flag,
                flag,
                born_timestamp,
                born_host,
                store_timestamp,
                store_host,
                reconsume_times,
                prepared,
                body_crc,
                size,
                min_offset,
                max_offset,
            )
        )
        at = end
    return messages


def wanted(messages: Sequence[ReceivedMessage], subscription: Subscription) -> Sequence[ReceivedMessage]:
    """Those whose tag is really subscribed to: brokers compare hashes, and two tags may share one."""
    if not subscription.tags or not subscription.is_tag_type or subscription.class_filter_mode:
        return messages
    tags = subscription.tags
    return [message for message in messages if message.tags in tags]
