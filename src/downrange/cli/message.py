"""`downrange message …`: single messages."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from downrange.cli.cluster_actions import asks
from downrange.cli.options import Topic, UsageError, command_family, key_values
from downrange.cli.output import Answer, Column, Table
from downrange.cli.times import parse_time, time_text
from downrange.settings import camel_case

if TYPE_CHECKING:
    from downrange.client.admin import Admin
    from downrange.client.producer.send_result import SendResult
    from downrange.model.message import Message, StoredMessage

app = command_family("Find single messages, send them, hand them to a consumer.")

MessageId = Annotated[str, typer.Argument(help="Offset message id, or unique id together with --topic.")]
OfTopic = Annotated[str | None, typer.Option("--topic", "-t", help="Topic of the message; needed for a unique id.")]
Save = Annotated[Path | None, typer.Option("--save", help="Write the body to this file.")]


@app.command("view")
@asks
async def view(
    admin: Admin,
    message_id: MessageId,
    topic: OfTopic = None,
    save: Save = None,
    every: Annotated[bool, typer.Option("--all", help="Show every copy that was stored, not only the oldest.")] = False,
) -> Answer:
    """Show one message."""
    first = await admin.messages.view(message_id, topic)
    if not every:
        return _found(first, save)
    if topic is None or save is not None:
        raise UsageError("--all needs --topic, and cannot be combined with --save")
    copies = await admin.messages.all_by_unique_key(topic, message_id)
    found = [one for messages in copies.done.values() for one in messages] or [first]
    answers = [_found(one, None) for one in sorted(found, key=lambda one: one.store_timestamp)]
    parts = "\n\n".join(str(part) for answer in answers for part in answer.parts)
    return Answer({"messages": [one.document for one in answers]}, [parts], copies.failed)


@app.command("resend")
@asks
async def resend(admin: Admin, message_id: MessageId, topic: OfTopic = None) -> Answer:
    """Send a message to its topic once more, as a new message with an id of its own."""
    from downrange.client.compression import plain_body
    from downrange.model import properties as names
    from downrange.model.message import Message

    stored = await admin.messages.view(message_id, topic)
    given = {name: value for name, value in stored.properties.items() if name not in names.RESERVED}
    keys = " ".join(stored.keys) or None
    again = Message(stored.topic, plain_body(stored), stored.tags, keys, flag=stored.flag, properties=given)
    return _sent(stored.topic, await admin.messages.send(again))


@app.command("at")
@asks
async def at(
    admin: Admin,
    topic: Topic,
    broker: Annotated[str, typer.Argument(help="Broker name.")],
    queue: Annotated[int, typer.Argument(min=0, help="Queue id.")],
    offset: Annotated[int, typer.Argument(min=0, help="Number of the message in the queue.")],
    save: Save = None,
) -> Answer:
    """Show the message at one offset of a queue."""
    return _found(await admin.messages.by_queue_offset(topic, broker, queue, offset), save)


@app.command("query")
@asks
async def query(
    admin: Admin,
    topic: Topic,
    key: Annotated[str, typer.Argument(help="Message key.")],
    max_messages: Annotated[
        int, typer.Option("--max", min=1, max=10_000, help="At most this many messages of each broker.")
    ] = 64,
    begin: Annotated[str | None, typer.Option("--begin", help="Stored at this time or later.")] = None,
    end: Annotated[str | None, typer.Option("--end", help="Stored at this time or earlier.")] = None,
) -> Answer:
    """Find messages by key."""
    span = {name: parse_time(text) for name, text in (("begin", begin), ("end", end)) if text is not None}
    found = await admin.messages.by_key(topic, key, max_messages=max_messages, **span)
    rows = [
        {
            "msgId": message.message_id,
            "offsetMsgId": message.offset_message_id,
            "broker": broker.name,
            "queueId": message.queue_id,
            "queueOffset": message.queue_offset,
            "storeTimestamp": message.store_timestamp,
        }
        for broker, messages in found.done.items()
        for message in messages
    ]
    columns = [
        Column("Message ID", "msgId"),
        Column("Broker Name", "broker"),
        Column("QID", "queueId"),
        Column("Offset", "queueOffset"),
        Column("Store Timestamp", "storeTimestamp", time_text),
    ]
    return Answer({"topic": topic, "key": key, "messages": rows}, [Table(columns, rows)], found.failed)


@app.command("send")
@asks
async def send(
    admin: Admin,
    topic: Topic,
    body: Annotated[str | None, typer.Argument(help="Body, as text.")] = None,
    file: Annotated[Path | None, typer.Option("--file", help="Take the body from this file.")] = None,
    tags: Annotated[str | None, typer.Option("--tag", "--tags", help="Tag.")] = None,
    keys: Annotated[str | None, typer.Option("--key", "--keys", help="Keys, separated by spaces.")] = None,
    properties: Annotated[list[str] | None, typer.Option("--property", help="name=value, any number of them.")] = None,
    broker: Annotated[str | None, typer.Option("--broker", "-b", help="Broker name. [any]")] = None,
    queue: Annotated[int | None, typer.Option("--queue", "-i", min=0, help="Queue id. [any]")] = None,
    trace: Annotated[
        bool, typer.Option("--trace/--no-trace", help="Write a trace of the message; `downrange trace` draws it.")
    ] = False,
) -> Answer:
    """Send one message."""
    from downrange.model.message import Message

    if (body is None) == (file is None):
        raise UsageError("give the body either as an argument or with --file")
    message = Message(topic, _body(body, file), tags, keys, properties=key_values(properties or []))
    if trace:
        return _sent(topic, await _send_traced(admin, message, broker, queue))
    return _sent(topic, await admin.messages.send(message, broker, queue))


async def _send_traced(admin: Admin, message: Message, broker: str | None, queue: int | None) -> SendResult:
    from downrange.client.admin.messages import choose_queue
    from downrange.client.config import ProducerConfig
    from downrange.client.producer.producer import AsyncProducer

    chosen = None
    if broker is not None or queue is not None:
        chosen, _ = choose_queue(await admin.session.look_up_route(message.topic), message.topic, broker, queue)
    async with AsyncProducer("TOOLS_PRODUCER", config=ProducerConfig(trace=True), session=admin.session) as producer:
        return await producer.send(message, queue=chosen)


def _sent(topic: str, result: SendResult) -> Answer:
    row = {
        "broker": result.queue.broker_name,
        "queueId": result.queue.queue_id,
        "queueOffset": result.queue_offset,
        "sendStatus": result.status.value,
        "msgId": result.message_id,
        "offsetMsgId": result.offset_message_id,
    }
    columns = [
        Column("Broker Name", "broker"),
        Column("QID", "queueId"),
        Column("Offset", "queueOffset"),
        Column("Send Result", "sendStatus"),
        Column("MsgId", "msgId"),
    ]
    return Answer({"topic": topic, **row}, [Table(columns, [row])])


def _body(text: str | None, file: Path | None) -> bytes:
    if file is None:
        return os.fsencode(text or "")  # the bytes as they were typed, even if they are not UTF-8
    try:
        return file.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror or error}") from None


@app.command("consume-directly")
@asks
async def consume_directly(
    admin: Admin,
    message_id: MessageId,
    group: Annotated[str, typer.Option("--group", "-g", help="Consumer group.")],
    client: Annotated[str, typer.Option("--client", "-d", help="Client id of a running member.")],
    topic: OfTopic = None,
) -> Answer:
    """Hand a message to a running consumer, and show the consumer's result."""
    from msgspec.structs import asdict

    result = await admin.messages.consume_directly(group, client, message_id, topic)
    row = {camel_case(name): value for name, value in asdict(result).items()}
    columns = [
        Column("Result", "consumeResult"),
        Column("Spent(ms)", "spentTimeMills"),
        Column("Order", "order"),
        Column("AutoCommit", "autoCommit"),
        Column("Remark", "remark"),
    ]
    return Answer(row, [Table(columns, [row])])


@app.command("recall")
@asks
async def recall(
    admin: Admin,
    handle: Annotated[str, typer.Argument(help="Recall handle, as `downrange produce --json` prints it.")],
) -> Answer:
    """Take back a timer message that is not due yet, if its broker allows it (recallMessageEnable)."""
    from downrange.client.producer.producer import AsyncProducer

    async with AsyncProducer("TOOLS_PRODUCER", session=admin.session) as producer:
        message_id = await producer.recall(handle)
    return Answer({"msgId": message_id}, [f"message {message_id} recalled"])


@app.command("resume-check")
@asks
async def resume_check(
    admin: Admin,
    message_id: Annotated[str, typer.Argument(help="Unique or offset id of a message in TRANS_CHECK_MAX_TIME_TOPIC.")],
) -> Answer:
    """Let a broker ask producers again about a transactional message that it had given up."""
    message = await admin.messages.resume_check(message_id)
    topic = message.properties.get("REAL_TOPIC")
    document = {"msgId": message.message_id, "offsetMsgId": message.offset_message_id, "topic": topic}
    return Answer(document, [f"{message.message_id} of {topic} will be checked again"])


def _found(message: StoredMessage, save: Path | None) -> Answer:
    from downrange.client.compression import plain_body

    body = plain_body(message)
    if save is not None:
        try:
            save.write_bytes(body)
        except OSError as error:
            raise UsageError(f"cannot write {save}: {error.strerror or error}") from None
    try:
        text: str | None = body.decode()
    except UnicodeDecodeError:
        text = None
    document = {
        "msgId": message.message_id,
        "offsetMsgId": message.offset_message_id,
        "topic": message.topic,
        "tags": message.tags,
        "keys": message.keys,
        "queueId": message.queue_id,
        "queueOffset": message.queue_offset,
        "commitLogOffset": message.physical_offset,
        "reconsumeTimes": message.reconsume_times,
        "bornTimestamp": message.born_timestamp,
        "storeTimestamp": message.store_timestamp,
        "bornHost": str(message.born_host),
        "storeHost": str(message.store_host),
        "sysFlag": message.sys_flag,
        "flag": message.flag,
        "properties": message.properties,
        "bodyLength": len(body),
        "body": text,
        "bodyHex": body.hex() if text is None else None,
    }
    lines = {
        "OffsetID": document["offsetMsgId"],
        "Topic": message.topic,
        "Tags": f"[{message.tags}]",
        "Keys": f"[{' '.join(message.keys)}]",
        "Queue ID": message.queue_id,
        "Queue Offset": message.queue_offset,
        "CommitLog Offset": message.physical_offset,
        "Reconsume Times": message.reconsume_times,
        "Born Timestamp": time_text(message.born_timestamp),
        "Store Timestamp": time_text(message.store_timestamp),
        "Born Host": message.born_host,
        "Store Host": message.store_host,
        "System Flag": message.sys_flag,
        "Properties": "{" + ", ".join(f"{name}={value}" for name, value in message.properties.items()) + "}",
        "Body": text if text is not None else f"{len(body)} bytes that are not text; --save FILE writes them",
    }
    return Answer(document, ["\n".join(f"{name + ':':<20} {value}" for name, value in lines.items())])
