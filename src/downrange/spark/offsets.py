"""The position of a stream: the offset of the next message of every queue, and its JSON form in Spark's checkpoint.

    {"v": 1, "q": {"orders": {"broker-a": {"0": 42, "1": 17}}}}

Keys are sorted: Spark compares offsets by their text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from downrange.model.message import MessageQueue
from downrange.spark.errors import OptionError, SparkSourceError

Offsets = dict[MessageQueue, int]
QueueChoice = dict[str, dict[str, frozenset[int]]]
"""Topic -> broker -> queue ids."""

VERSION: Final = 1
FROM_EARLIEST: Final = -2
FROM_LATEST: Final = -1

Tree = dict[str, dict[str, dict[str, int]]]


def to_tree(offsets: Mapping[MessageQueue, int]) -> Tree:
    tree: Tree = {}
    for queue, offset in sorted(offsets.items()):
        tree.setdefault(queue.topic, {}).setdefault(queue.broker_name, {})[str(queue.queue_id)] = offset
    return tree


def to_json(offsets: Mapping[MessageQueue, int]) -> dict[str, Any]:
    """The form of offsets that Spark keeps in its checkpoint."""
    return {"v": VERSION, "q": to_tree(offsets)}


def next_offset(tree: Tree, queue: MessageQueue) -> int:
    """The offset of a queue in a tree; 0 when the tree does not have the queue."""
    return tree.get(queue.topic, {}).get(queue.broker_name, {}).get(str(queue.queue_id), 0)


def from_json(value: Mapping[str, Any]) -> Offsets:
    """The offsets of a checkpoint."""
    version = value.get("v")
    if version != VERSION:
        raise SparkSourceError(
            f"the checkpoint has offsets of version {version!r}, this is version {VERSION}: "
            "it was written by another source or a newer Downrange; use that one or another checkpoint"
        )
    try:
        return _from_tree(value["q"])
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise SparkSourceError(f"the checkpoint holds offsets that cannot be read: {error!r}") from None


def _from_tree(tree: Any) -> Offsets:
    found = {}
    for topic, brokers in tree.items():
        for broker, queues in brokers.items():
            for queue_id, offset in queues.items():
                if not isinstance(offset, int) or isinstance(offset, bool):
                    raise ValueError(f"{topic}, {broker}, queue {queue_id}: {offset!r} is not a whole number")
                found[MessageQueue(topic, broker, int(queue_id))] = offset
    return found


def parse_offsets(option: str, text: str) -> Offsets:
    """Parse offsets or times that a user gave; raises OptionError."""
    try:
        return _from_tree(_loads(text))
    except (ValueError, TypeError, AttributeError) as error:
        raise OptionError(
            f'{option} is not what is expected, {{"topic": {{"broker": {{"0": 42}}}}}}: {_reason(error)}'
        ) from None


def parse_assign(option: str, text: str) -> QueueChoice:
    """Parse the queues that a user chose; raises OptionError."""
    try:
        found = {
            topic: {broker: frozenset(_queue_id(one) for one in ids) for broker, ids in brokers.items()}
            for topic, brokers in _loads(text).items()
        }
        if not any(ids for brokers in found.values() for ids in brokers.values()):
            raise ValueError("it names no queue")
        return found
    except (ValueError, TypeError, AttributeError) as error:
        raise OptionError(
            f'{option} is not what is expected, {{"topic": {{"broker": [0, 1]}}}}: {_reason(error)}'
        ) from None


def _queue_id(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a queue id")
    return value


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None


def _reason(error: Exception) -> str:
    # Python's own words about a list in place of an object would not help a user.
    return str(error) if isinstance(error, ValueError) else "an object is missing where one is expected"


def describe(queues: Iterable[MessageQueue]) -> str:
    """Queues in the form for an error or a log line."""
    return ", ".join(f"{queue.topic} on {queue.broker_name} queue {queue.queue_id}" for queue in sorted(queues))
