"""Messages of the gRPC protocol from and to records of the commit log. Pure."""

from __future__ import annotations

import hashlib
import zlib
from typing import Final

from downrange.client.compression import decompress
from downrange.model import properties as names
from downrange.model.errors import MessageError
from downrange.model.message import StoredMessage, SysFlag
from downrange.model.topics import RETRY_PREFIX
from downrange.proxy.checks import RESERVED
from downrange.proxy.message_types import type_of
from downrange.proxy.times import millis, put
from downrange.proxy.wire.enums import DigestType, Encoding, MessageType
from downrange.proxy.wire.messages import Message

TRACE_CONTEXT: Final = "TRACE_CONTEXT"
BORN_HOST: Final = "__BORNHOST"
BORN_TIMESTAMP: Final = "BORN_TIMESTAMP"
TIMER_DELIVER_MS: Final = "TIMER_DELIVER_MS"
_GZIP_MAGIC: Final = b"\x1f\x8b"
_MOST_PLAIN: Final = 64 * 1024 * 1024
# Properties of the system that the genuine proxy shows as the user's.
_HIDDEN: Final = RESERVED | {
    names.SHARDING_KEY, TRACE_CONTEXT, names.TRANSACTION_ID, names.TRANSACTION_CHECK_TIMES,
    names.CHECK_IMMUNITY_TIME_IN_SECONDS, "INNER_NUM", "INNER_BASE", names.INNER_MULTI_DISPATCH,
}  # fmt: skip


def properties_of(message: Message, topic: str, peer: str) -> dict[str, str]:
    """The properties under which a message that was sent is stored."""
    system = message.system_properties
    found = dict(message.user_properties)
    if system.tag:
        found[names.TAGS] = system.tag
    keys = [key for key in system.keys if key]
    if keys:
        found[names.KEYS] = names.KEY_SEPARATOR.join(keys)
    found[names.UNIQ_KEY] = system.message_id
    if system.message_type == MessageType.TRANSACTION:
        found[names.TRAN_MSG] = "true"
        found[names.TRANSACTION_ID] = system.message_id
        if system.HasField("orphaned_transaction_recovery_duration"):
            seconds = system.orphaned_transaction_recovery_duration.seconds
            found[names.CHECK_IMMUNITY_TIME_IN_SECONDS] = str(seconds)
    if system.HasField("delivery_timestamp"):
        found[TIMER_DELIVER_MS] = str(millis(system.delivery_timestamp))
    found[names.RECONSUME_TIME] = str(system.delivery_attempt)
    found[names.PGROUP] = topic
    if system.message_group:
        found[names.SHARDING_KEY] = system.message_group
    if system.trace_context:
        found[TRACE_CONTEXT] = system.trace_context
    found[BORN_HOST] = system.born_host or peer
    found[BORN_TIMESTAMP] = str(millis(system.born_timestamp))
    return found


def sys_flag_of(message: Message) -> int:
    system = message.system_properties
    flag = int(SysFlag.COMPRESSED) if system.body_encoding == Encoding.GZIP else 0
    return flag | (SysFlag.TRANSACTION_PREPARED if system.message_type == MessageType.TRANSACTION else 0)


def to_message(record: StoredMessage, topic: str, *, attempt: int = 1, handle: str | None = None) -> Message:
    """A record as consumers get it; `handle` is None for a message that is shown and not delivered."""
    found = record.properties
    message = Message()
    message.topic.name = topic
    for name, value in found.items():
        if name not in _HIDDEN:
            message.user_properties[name] = value
    system = message.system_properties
    if tag := found.get(names.TAGS):
        system.tag = tag
    system.keys.extend(record.keys)
    system.message_id = record.message_id
    body, encoding = plain_body(record)
    message.body = body
    system.body_encoding = encoding
    system.body_digest.type = DigestType.MD5
    system.body_digest.checksum = hashlib.md5(body, usedforsecurity=False).hexdigest().upper()
    system.message_type = type_of(found)
    put(system.born_timestamp, record.born_timestamp)
    system.born_host = found.get(BORN_HOST) or record.born_host.host
    put(system.store_timestamp, record.store_timestamp)
    system.store_host = f"{record.store_host.host}:{record.store_host.port}"
    deliver = found.get(TIMER_DELIVER_MS, "")
    if deliver.isdecimal() and len(deliver) < 16:
        put(system.delivery_timestamp, int(deliver))
    if handle is not None:
        system.receipt_handle = handle
    system.queue_id = record.queue_id
    system.queue_offset = record.queue_offset
    system.delivery_attempt = attempt
    if group := found.get(names.SHARDING_KEY):
        system.message_group = group
    if context := found.get(TRACE_CONTEXT):
        system.trace_context = context
    if origin := found.get("DLQ_ORIGIN_TOPIC"):
        system.dead_letter_queue.topic = origin
        system.dead_letter_queue.message_id = found.get("DLQ_ORIGIN_MESSAGE_ID", "")
    return message


def plain_body(record: StoredMessage) -> tuple[bytes, Encoding]:
    """The body as it was before its sender compressed it: not every client can read every compression."""
    if not record.sys_flag & SysFlag.COMPRESSED:
        return record.body, Encoding.IDENTITY
    try:
        if record.body.startswith(_GZIP_MAGIC):
            inflater = zlib.decompressobj(zlib.MAX_WBITS | 16)
            plain = inflater.decompress(record.body, _MOST_PLAIN)
            if inflater.eof:
                return plain, Encoding.IDENTITY
        else:
            return decompress(record.body, record.sys_flag, record.message_id, _MOST_PLAIN), Encoding.IDENTITY
    except (MessageError, zlib.error):
        pass
    return record.body, Encoding.GZIP


def original_topic(record: StoredMessage, topic: str) -> str:
    """The topic that consumers know: that of the request for records of its retry topics."""
    return topic if record.topic.startswith(RETRY_PREFIX) else record.topic
