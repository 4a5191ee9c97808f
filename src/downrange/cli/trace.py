"""`downrange trace MSGID`: the life of one message, as its clients reported it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from downrange.cli.cluster_actions import asks
from downrange.cli.output import Answer
from downrange.cli.times import time_text
from downrange.settings import camel_case

if TYPE_CHECKING:
    from downrange.client.admin import Admin
    from downrange.client.trace_reader import MessageTrace, TracedDelivery, TracedSend, TracedTransaction
    from downrange.model.message import StoredMessage


@asks
async def run(
    admin: Admin,
    message_id: Annotated[str, typer.Argument(help="Message id: the unique id, or the offset id.")],
    topic: Annotated[str, typer.Option("--topic", "-t", help="Trace topic.")] = "RMQ_SYS_TRACE_TOPIC",
) -> Answer:
    """Draw the life of a message: sent, stored, and consumed by each group. Needs clients that write traces."""
    trace = await _trace(admin, message_id, topic)
    stored = await _stored(admin, trace)
    return Answer(_document(trace, stored), ["\n".join(_lines(trace, stored))])


async def _trace(admin: Admin, message_id: str, topic: str) -> MessageTrace:
    """Find the trace of a message: traces carry its unique id, to which an offset id leads."""
    from downrange.client.errors import MessageNotFound, NoRoute
    from downrange.model.errors import MQError

    try:
        return await admin.messages.trace(message_id, topic)
    except NoRoute:
        raise MessageNotFound(
            f"no trace was written yet: there is no topic {topic}; clients write traces only if configured to"
        ) from None
    except MessageNotFound as missing:
        try:
            message = await admin.messages.by_offset_id(message_id)
        except MQError:
            raise missing from None
        if message.message_id == message_id:
            raise
        return await admin.messages.trace(message.message_id, topic)


async def _stored(admin: Admin, trace: MessageTrace) -> StoredMessage | None:
    """The message itself; None when no trace names its topic, or when it has expired."""
    from downrange.model.errors import MQError

    if not trace.sends:
        return None
    try:
        return await admin.messages.view(trace.message_id, trace.sends[0].topic)
    except MQError:
        return None


# --- for programs


def _document(trace: MessageTrace, stored: StoredMessage | None) -> dict[str, Any]:
    place = None
    if stored is not None:
        place = {
            "offsetMsgId": stored.offset_message_id,
            "storeHost": str(stored.store_host),
            "storeTimestamp": stored.store_timestamp,
            "topic": stored.topic,
            "queueId": stored.queue_id,
            "queueOffset": stored.queue_offset,
        }
    return {
        "msgId": trace.message_id,
        "sends": [_row(one) for one in trace.sends],
        "stored": place,
        "transactions": [_row(one) for one in trace.transactions],
        "deliveries": [_row(one) for one in trace.deliveries],
        "recalls": [_row(one) for one in trace.recalls],
    }


def _row(part: Any) -> dict[str, Any]:
    return {camel_case(name): getattr(value, "name", value) for name, value in asdict(part).items()}


# --- for people


def _lines(trace: MessageTrace, stored: StoredMessage | None) -> Iterator[str]:
    yield f"Message {trace.message_id}"
    for send in trace.sends[:1]:
        told = {"topic": send.topic, "tag": send.tags, "keys": send.keys, "body": f"{send.body_length} bytes"}
        yield "  " + "   ".join(f"{name} {value}" for name, value in told.items() if value)
    yield ""
    for send in trace.sends:
        yield f"● sent      {time_text(send.timestamp)}   {_send(send)}"
    if stored is not None:
        place = f"{stored.store_host}, {stored.topic} queue {stored.queue_id} offset {stored.queue_offset}"
        yield f"● stored    {time_text(stored.store_timestamp)}   on {place}"
    for transaction in trace.transactions:
        yield f"● ended     {time_text(transaction.timestamp)}   {_transaction(transaction)}"
    for recall in trace.recalls:
        result = "" if recall.success else ", failed"
        yield f"● recalled  {time_text(recall.timestamp)}   by {recall.group} at {recall.client_host}{result}"
    if not trace.deliveries:
        yield "└ no consumer has reported it"
    groups = list(trace.groups.items())
    for number, (group, deliveries) in enumerate(groups, 1):
        is_last = number == len(groups)
        yield f"{'└' if is_last else '├'} consumed by {group}"
        for delivery in deliveries:
            yield f"{' ' if is_last else '│'}   {_delivery(delivery)}"


def _send(send: TracedSend) -> str:
    kind = getattr(send.message_type, "name", str(send.message_type)).lower()
    what = "" if kind == "normal" else f", {kind} message"
    result = "success" if send.success else "failed"
    return f"by {send.group} at {send.client_host}, {result} after {send.cost_millis} ms{what}"


def _transaction(transaction: TracedTransaction) -> str:
    asked = ", when it was asked" if transaction.from_check else ""
    return f"{transaction.state} by {transaction.group} at {transaction.client_host}{asked}"


def _delivery(delivery: TracedDelivery) -> str:
    number = "delivery" if delivery.retry_times is None else f"delivery {delivery.retry_times + 1}"
    began = f"{number:<12}{time_text(delivery.timestamp)}   at {delivery.client_host}"
    if delivery.success is None:
        return f"{began}, no end reported"
    code = getattr(delivery.code, "name", None if delivery.code is None else str(delivery.code))
    because = f" ({code.lower().replace('_', ' ')})" if code and code not in ("SUCCESS", "FAILED") else ""
    return f"{began}, {'success' if delivery.success else 'failed'} after {delivery.cost_millis} ms{because}"
