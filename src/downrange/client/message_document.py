"""A message as a JSON object: what commands print and dead letters are exported as."""

from __future__ import annotations

from typing import Any

from downrange.client.consumer.messages import ReceivedMessage
from downrange.model.errors import MessageError


def message_document(message: ReceivedMessage) -> dict[str, Any]:
    """Everything about a message. A body that is not text stands in `bodyHex`, and `body` is null."""
    try:
        body = message.body
    except MessageError:  # compressed with a library that is missing: the compressed body is better than none
        body = message.stored_body
    try:
        text: str | None = body.decode()
    except UnicodeDecodeError:
        text = None
    return {
        "msgId": message.message_id,
        "offsetMsgId": message.offset_message_id,
        "topic": message.topic,
        "tags": message.tags,
        "keys": message.keys,
        "brokerName": message.broker_name,
        "queueId": message.queue_id,
        "queueOffset": message.queue_offset,
        "reconsumeTimes": message.reconsume_times,
        "bornTimestamp": message.born_timestamp,
        "storeTimestamp": message.store_timestamp,
        "bornHost": str(message.born_host),
        "storeHost": str(message.store_host),
        "properties": message.properties,
        "body": text,
        "bodyHex": body.hex() if text is None else None,
    }
