"""A message as a JSON object: what commands print and dead letters are exported as."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from downrange.client.consumer.messages import ReceivedMessage
from downrange.model import properties as names
from downrange.model.errors import MessageError
from downrange.model.message import Message


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


def message_of(line: bytes, pattern: Message) -> Message:
    """The message to send that a line of JSON describes, as `message_document` writes it.

    Body, tag, keys and properties are those of the line; topic and times those of the pattern. What brokers and clients
    put among the properties is left out. Raises MessageError.
    """
    try:
        document = json.loads(line)
        body = document["body"].encode() if document.get("body") is not None else bytes.fromhex(document["bodyHex"])
        tags, keys = document.get("tags") or pattern.tags, " ".join(document.get("keys") or ()) or pattern.keys
        properties = {
            name: str(value)
            for name, value in (document.get("properties") or {}).items()
            if value and name not in names.RESERVED
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MessageError(f"not a line of `consume --json`: {type(error).__name__}: {error}") from None
    return replace(pattern, body=body, tags=tags, keys=keys, properties={**properties, **pattern.properties})
