"""What a replay sends and how far it is. Pure but for the state file."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from pyspark.sql import Row

from downrange.model.message import Message
from downrange.model.properties import RESERVED, SHARDING_KEY
from downrange.spark.lake import files
from downrange.spark.lake.layout import LakeError

REPLAY_OF: Final = "REPLAY_OF"
"""The property of a replayed message that holds the unique key of the one in the lake."""


class Position(NamedTuple):
    """A message's place in the order of a replay: that of store times, then places."""

    date: str
    store_micros: int
    topic: str
    broker: str
    queue_id: int
    queue_offset: int


class Choice(msgspec.Struct, frozen=True):
    """What to replay and where to. Times are of the store, in milliseconds, ends included; `where` is Spark SQL."""

    target: str | None
    """Send to this topic; None: each to its own."""
    topics: tuple[str, ...] = ()
    begin_millis: int | None = None
    end_millis: int | None = None
    keys: tuple[str, ...] = ()
    where: str | None = None

    @property
    def name(self) -> str:
        """The same choice has the same name, so that a second run finds how far the first came."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:24]


class State(msgspec.Struct, frozen=True):
    """How far a replay is: everything up to `position` was acknowledged."""

    choice: Choice
    sent: int = 0
    position: Position | None = None
    is_done: bool = False


def read_state(path: Path, choice: Choice) -> State:
    try:
        return msgspec.json.decode(path.read_bytes(), type=State)
    except FileNotFoundError:
        return State(choice)
    except msgspec.DecodeError as error:
        raise LakeError(f"{path} is damaged: {error}") from None


def write_state(path: Path, state: State) -> None:
    path.parent.mkdir(exist_ok=True)
    files.write_whole(path, msgspec.json.encode(state))


def message_of(row: Row, target: str | None) -> Message:
    """The message to send for one of the lake: its own properties, not those that brokers and clients added."""
    properties: dict[str, str] = dict(row["properties"] or {})
    own = {name: value for name, value in properties.items() if name not in RESERVED}
    if origin := row["unique_key"] or row["msg_id"]:
        own[REPLAY_OF] = origin
    return Message(
        target or row["topic"],
        bytes(row["body"] or b""),
        row["tags"] or None,
        row["keys"] or None,
        properties=own,
        sharding_key=properties.get(SHARDING_KEY),
    )
