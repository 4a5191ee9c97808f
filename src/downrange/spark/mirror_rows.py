"""Messages of one cluster as messages for another one: where they go, and what they carry of where they were. Pure.

A mirrored message has two properties more. MIRROR_PATH names the clusters it was in, oldest first: a message never goes
to one of them, so mirrors in a circle end. MIRROR_OFFSET is its place in the last one, `cluster/broker/queue/offset`.

Every queue of the source has a queue of its own at the target, so that the messages of a queue stay in order, and a
place in one queue can be found in the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from downrange.client.producer.forwarding import ForwardedMessage
from downrange.model.message import MessageQueue
from downrange.model.properties import KEYS, RESERVED, SHARDING_KEY, TAGS
from downrange.spark.errors import OptionError, SchemaMismatch

if TYPE_CHECKING:
    import pyarrow as pa

MIRROR_PATH: Final = "MIRROR_PATH"
MIRROR_OFFSET: Final = "MIRROR_OFFSET"
COLUMNS: Final = (
    "topic",
    "broker",
    "queue_id",
    "queue_offset",
    "msg_id",
    "unique_key",
    "body",
    "born_time",
    "properties",
)
"""The columns of the source that a mirror needs."""


class TargetBroker(NamedTuple):
    """The broker for the queues of one broker of the source; `share` brokers of the source are put on it in turn."""

    name: str
    share: int
    turn: int


class QueueMap(msgspec.Struct, frozen=True):
    """From queues of the cluster `source` to those of another one."""

    source: str
    brokers: Mapping[str, TargetBroker]

    @classmethod
    def of(cls, source: str, brokers: Sequence[str], targets: Sequence[str]) -> QueueMap:
        """A broker goes to the one of its name if there is one; the others are dealt out in order."""
        others = sorted(set(targets) - set(brokers)) or sorted(targets)
        rest = iter(range(len(brokers)))
        names = {name: name if name in targets else others[next(rest) % len(others)] for name in sorted(brokers)}
        found = {}
        for name, target in names.items():
            sharing = [one for one in names if names[one] == target]
            found[name] = TargetBroker(target, len(sharing), sharing.index(name))
        return cls(source, found)

    @classmethod
    def parse(cls, text: str) -> QueueMap:
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise OptionError(f"mirror is not what `downrange pipeline mirror` writes: {error}") from None

    def text(self) -> str:
        return msgspec.json.encode(self).decode()

    def target(self, queue: MessageQueue) -> MessageQueue:
        there = self.brokers.get(queue.broker_name)
        if there is None:
            raise OptionError(f"the source has a new broker {queue.broker_name}: start the mirror again")
        return MessageQueue(queue.topic, there.name, queue.queue_id * there.share + there.turn)

    def origin(self, queue: MessageQueue) -> str:
        """The property MIRROR_OFFSET of messages of a queue, without the offset."""
        return f"{self.source}/{queue.broker_name}/{queue.queue_id}/"


class MirrorRow(NamedTuple):
    """A message, and where it comes from."""

    queue: MessageQueue
    offset: int
    message: ForwardedMessage


def origin_offset(properties: Mapping[str, str], origin: str) -> int | None:
    """The offset that a message had in the queue of `origin`; None for messages of other origin."""
    text = properties.get(MIRROR_OFFSET, "")
    number = text.removeprefix(origin)
    return int(number) if text != number and number.isdecimal() else None


def path_of(properties: Mapping[str, str], source: str) -> str:
    before = properties.get(MIRROR_PATH)
    return source if not before else f"{before},{source}"


def mirror_rows(batch: pa.RecordBatch, queues: QueueMap) -> Iterator[MirrorRow]:
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    millis = [value // 1000 for value in columns["born_time"].cast("int64").to_pylist()]
    values = [columns[name].to_pylist() for name in COLUMNS if name != "born_time"]
    for (topic, broker, queue_id, offset, msg_id, unique_key, body, pairs), born in zip(
        zip(*values, strict=True), millis, strict=True
    ):
        queue = MessageQueue(topic, broker, queue_id)
        properties = dict(pairs or ())
        own = {name: value for name, value in properties.items() if name not in RESERVED and value}
        own[MIRROR_PATH] = path_of(properties, queues.source)
        own[MIRROR_OFFSET] = f"{queues.origin(queue)}{offset}"
        message = ForwardedMessage(
            topic,
            body or b"",
            properties.get(TAGS),
            properties.get(KEYS),
            properties=own,
            sharding_key=properties.get(SHARDING_KEY),
            born_timestamp=born,
            message_id=unique_key or msg_id,
        )
        yield MirrorRow(queue, offset, message)


def check_mirror_columns(names: Sequence[str]) -> None:
    if missing := [name for name in COLUMNS if name not in names]:
        raise SchemaMismatch(f"a mirror needs the column {missing[0]} of the source, with includeProperties")
